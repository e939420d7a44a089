"""Pure: the sequences of the next step, their blocks, and its time. Engine process."""
