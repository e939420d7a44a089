"""What operator, worker and command line share: wire contract, sizes, checkpoint headers, hubs.

It imports none of the other packages, and no torch, kopf or FastAPI.
"""
