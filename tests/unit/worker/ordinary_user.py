"""Tests often run as root, who may read every file: here what an ordinary user may."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

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


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that any user may look into; pytest's own are for their owner alone."""
    with TemporaryDirectory() as made:
        path = Path(made)
        path.chmod(0o755)
        yield path
