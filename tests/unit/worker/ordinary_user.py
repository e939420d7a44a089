"""Tests often run as root, who may read every file: here what an ordinary user may."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[int]:
    """This process as a user without root's rights; gives its id. What it imports is to be imported
    before."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)  # which takes the capabilities as well
    try:
        yield os.geteuid()
    finally:
        os.seteuid(own)
