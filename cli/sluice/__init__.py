"""The command line: the one place that may import both pure sides, operator and worker."""
