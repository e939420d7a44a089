"""Code shared by operator, worker and command line: wire contract, sizes, checkpoints, hubs.

It imports none of the other packages, and no torch, kopf or FastAPI.
"""
