"""`sluice batch`: many requests of a file or a folder, through one engine, into one file.

`item` and `folder` read inputs, and `index` keeps what is known of each item on disk. `results` is
the file of results, `send` makes one result, `run` keeps many under way, `target` is the engine.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
