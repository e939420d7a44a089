"""Bodies of routes at which nothing is written: texts become vectors, classes or scores."""
