"""Numbers of a command line: argparse's `type=`; each refuses unusable text in one clause."""

import argparse
from collections.abc import Callable
from math import inf

FIRST_TOKEN_ID = 10
"""Token ids below it are left to special tokens."""


def at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            if (number := int(text)) >= least:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")

    return read


count = at_least(1)
several = at_least(2)
vocabulary = at_least(FIRST_TOKEN_ID + 1)


def positive(text: str) -> float:
    if (number := not_negative(text)) > 0:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number over 0")


def not_negative(text: str) -> float:
    try:
        if 0 <= (number := float(text)) < inf:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
