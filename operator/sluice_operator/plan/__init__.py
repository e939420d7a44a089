"""One pass as a value: what to write, send and report."""
