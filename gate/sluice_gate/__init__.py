"""A gate before any inference engine: a live cap, a queue, and evidence of its latencies.

Pure: `asked` (a request's work), `chunks` (tokens of an answer), `outside` (the step model).
"""
