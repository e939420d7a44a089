"""A cluster of one node on this machine, from its programs to its clean-up."""
