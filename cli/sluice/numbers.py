"""Numbers of a command line: argparse's `type=`, each refuses what it cannot use in one clause."""

import argparse
from math import inf

FIRST_TOKEN_ID = 10
"""Ids below it are left to special tokens."""


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def several(text: str) -> int:
    """A whole number of at least 2."""
    return _whole(text, 2)


def vocabulary(text: str) -> int:
    """The size of a vocabulary that token ids are drawn from."""
    return _whole(text, FIRST_TOKEN_ID + 1)


def _whole(text: str, least: int) -> int:
    try:
        if (number := int(text)) >= least:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")


def positive(text: str) -> float:
    """A finite number over 0."""
    if (number := not_negative(text)) > 0:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number over 0")


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        if 0 <= (number := float(text)) < inf:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
