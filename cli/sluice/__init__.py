"""The command line, the one place that may import both the operator's and the worker's pure sides."""
