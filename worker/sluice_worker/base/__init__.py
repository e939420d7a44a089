"""Both processes: messages between them, and the CPUs and memory that they may use."""
