"""What an 8B's step is made of beside attention: products and small kernels, for `bench.gpu`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from bench.gpu_kernels import (
    DEVICE,
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    PAGE,
    SHRUNK,
    VOCAB,
    WIDTH,
    Job,
    Point,
    graphed,
    random,
    random_rotary,
    shrunk,
    timed,
)
from sluice_kernels.triton import add_norm, choose, cut, gated, rotate_store
from torch import Tensor
from torch.nn.functional import linear

PRODUCTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "head": (VOCAB, HIDDEN),
}
"""Outputs and inputs."""
FRESH_BYTES = (1 << 30) // SHRUNK**3
"""So many weights in turn are not found in the GPU's own cache."""
CALLS = 32 // min(SHRUNK, 16)
"""Of a small kernel in a row: one alone takes less than its launch."""


def product_jobs(copy: Point, repeats: int) -> Iterator[Job]:
    """A decode step's products, which should take what reading their weights takes."""
    for name, (outputs, inputs) in PRODUCTS.items():
        for rows in (1, 8, 32, 64):
            told = f"{name} of {rows}"
            yield told, partial(_product, told, copy, repeats, rows, outputs, inputs)


def _product(name: str, copy: Point, repeats: int, rows: int, outputs: int, inputs: int) -> Point:
    count = max(2, FRESH_BYTES // (2 * outputs * inputs))
    given, weights = random(rows, inputs), [random(outputs, inputs) for _ in range(count)]
    time_ms = timed(graphed(partial(_products, given, weights)), repeats, count)
    rate = 2 * (outputs * inputs + rows * (inputs + outputs)) / time_ms.median / 1e9
    return Point(name, time_ms, rate, "TB/s", rate / copy.rate)


def _products(given: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        linear(given, weight)


def small_jobs(repeats: int) -> Iterator[Job]:
    """What runs between the products, as it finds its rows: in the GPU's own cache."""
    for rows in (32, 2048) if SHRUNK == 1 else (2,):
        for name, make in (("norm", _norm), ("rotate, store", _rotate), ("gate", _gate)):
            yield f"{name} of {rows}", partial(_small, f"{name} of {rows}", make, repeats, rows)
    for kind, shares in (("greedy", (0.0, 1.0)), ("drawn", (0.7, 1.0)), ("cut", (0.7, 0.8))):
        name = f"sampling of 32, {kind}"
        yield name, partial(_small, name, partial(_sampling, *shares), repeats, shrunk(32))


Make = Callable[[int], Callable[[], object]]
"""For so many rows: a call of a kernel."""


def _small(name: str, make: Make, repeats: int, rows: int) -> Point:
    call = make(rows)
    time_ms = timed(graphed(partial(_again, call)), repeats, CALLS)
    return Point(name, time_ms, 1000 * time_ms.median, "us")


def _again(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _norm(rows: int) -> Callable[[], object]:
    residual, added = random(rows, HIDDEN), random(rows, HIDDEN)
    return partial(add_norm.add_norm, residual, added, torch.ones(HIDDEN, device=DEVICE), 1e-5)


def _rotate(rows: int) -> Callable[[], object]:
    heads = random(rows, HEADS + 2 * KV_HEADS, DIM)
    cache = random(-(-rows // PAGE), 2, KV_HEADS, PAGE, DIM)
    places = torch.arange(rows, device=DEVICE)
    given = cache, places // PAGE, places % PAGE, HEADS
    return partial(rotate_store.rotate_store, heads, random_rotary(rows), None, 1e-5, *given)


def _gate(rows: int) -> Callable[[], object]:
    return partial(gated.gated, random(rows, 2 * WIDTH), "silu")


def _sampling(temperature: float, top_p: float, rows: int) -> Callable[[], object]:
    """Of the least top-p and top-k that chat models have, or of all tokens."""
    ones = torch.ones(rows, device=DEVICE)
    seeds = torch.arange(rows, device=DEVICE)
    top_k = torch.full_like(seeds, 20 if top_p < 1 else 0)
    draws = cut.Draws(temperature * ones, top_p * ones, 0 * ones, top_k, seeds)
    return partial(choose.choose, random(rows, VOCAB), draws)
