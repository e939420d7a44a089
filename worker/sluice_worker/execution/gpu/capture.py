"""Which sizes of decode steps have a CUDA graph, and when each is captured. Pure.

A graph serves one number of rows; a step of fewer is padded with rows of no sequence. Decoding is
bound by the weights' bytes up to some hundreds of rows, so padding by at most a half costs little,
and few graphs cost little memory and time.
"""

from collections.abc import Callable, Collection

FIRST_SIZES = 32
"""Graphs up to this size are captured first, for the profile as well: it runs no larger step."""
MIN_FREE_BYTES = 512 << 20
"""Memory that must be left beside a step's own for one of the rest to be captured: a graph keeps
some tens of MiB."""


def graph_sizes(ceiling: int) -> list[int]:
    """Sizes for steps of up to `ceiling` rows, ascending: 1, 2, 4 ... 32, 48, 64, 96, 128 ..."""
    sizes = {1, ceiling}
    power = 2
    while power < ceiling:
        sizes.add(power)
        if power >= FIRST_SIZES and power * 3 // 2 < ceiling:
            sizes.add(power * 3 // 2)
        power *= 2
    return sorted(sizes)


def first_sizes(ceiling: int) -> list[int]:
    """Those that are captured first."""
    return [size for size in graph_sizes(ceiling) if size <= FIRST_SIZES]


def kinds_of_steps(ceiling: int, num_splits: Callable[[int], int]) -> list[int]:
    """The smallest size of each kind: a kernel is compiled for the splits that a step reads in."""
    return sorted({num_splits(size): size for size in range(ceiling, 0, -1)}.values())


def next_size(ceiling: int, captured: Collection[int]) -> int | None:
    """What to capture next, the smallest first; None: all are."""
    return next((size for size in graph_sizes(ceiling) if size not in captured), None)


def has_room(free_bytes: int, activation_bytes: int) -> bool:
    """Whether one more may be captured where so much is free and a step takes so much of it."""
    return free_bytes - activation_bytes >= MIN_FREE_BYTES


def padded_size(num_rows: int, captured: Collection[int]) -> int:
    """Rows that a step of `num_rows` is run with: as the smallest graph that holds them has.

    `num_rows` itself where none does, and the step runs without a graph.
    """
    return min((size for size in captured if size >= num_rows), default=num_rows)
