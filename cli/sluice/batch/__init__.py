"""`sluice batch`: many requests of a file or a folder, through one engine, into one file.

`sources` reads folders; lines, their index and the file of results are the frontend's `batches`.
`send` makes one result, `run` keeps many under way, `target` is the engine.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
