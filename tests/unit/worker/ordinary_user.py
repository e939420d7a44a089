"""Tests often run as root, who may read every file: here what an ordinary user may."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

VERSION_3 = 0x20080522
OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: to read and write in spite of a file's mode."""
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def ordinary_user() -> Iterator[int]:
    """This thread without root's right to ignore the modes of files; gives its user's id.

    Source: capset(2). The user stays, who may own the checkout and all that is imported from it.
    """
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    own = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice
    _call(libc.capget, header, own)
    fewer = type(own)(*own)
    fewer[0] &= ~OVERRIDES
    _call(libc.capset, header, fewer)
    try:
        yield os.geteuid()
    finally:
        _call(libc.capset, header, own)


def _call(function: Callable[..., int], *arguments: ctypes.Array[ctypes.c_uint32]) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
