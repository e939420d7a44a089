"""`sluice ui`: a page on loopback that shows services, and changes nothing.

`cluster` or `server` looks again and again, `history` keeps an hour of it. `views` makes pages of
that with `charts`, both pure, and `site` gives them to a browser that knows the token.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
