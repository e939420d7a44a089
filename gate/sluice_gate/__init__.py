"""A gate in front of any inference engine: a live cap, a queue, and evidence of its latencies.

Here: the program, its ports, and the way of a request in (`proxy`) and of its answer out (`relay`).
"""
