"""Both processes: configuration, and the CPUs and memory that they may use."""
