"""Which sizes of decode steps have a CUDA graph, and when each is captured. Pure.

A graph serves one number of rows; smaller steps are padded with rows of no sequence. Up to some
hundreds of rows the weights' bytes bound decoding, so padding by at most a half costs little. Few
graphs cost little memory and time.
"""

from collections.abc import Callable, Collection

FIRST_SIZES = 32
"""Rows: graphs up to this size are captured first, also for the profile, which runs no larger."""
MIN_FREE_BYTES = 512 << 20
"""Bytes that must be free beside a step's own memory to capture one of the rest: a graph keeps some
tens of MiB."""


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
    """The smallest size of each kind: a kernel is compiled for each number of splits."""
    return sorted({num_splits(size): size for size in range(ceiling, 0, -1)}.values())


def next_size(ceiling: int, captured: Collection[int]) -> int | None:
    """The next size to capture, the smallest first; None if all are captured."""
    return next((size for size in graph_sizes(ceiling) if size not in captured), None)


def has_room(free_bytes: int, activation_bytes: int) -> bool:
    """True if one more may be captured with this free memory, of which a step takes a part."""
    return free_bytes - activation_bytes >= MIN_FREE_BYTES


def padded_size(num_rows: int, captured: Collection[int]) -> int:
    """Rows to run a step of `num_rows` with: those of the smallest graph that holds them.

    `num_rows` itself if there is none; the step then runs without a graph.
    """
    return min((size for size in captured if size >= num_rows), default=num_rows)
