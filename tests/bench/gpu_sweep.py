"""What launching the attention kernels otherwise would bring on this GPU.

    PYTHONPATH=tests .venv/bin/python -m bench.gpu_sweep [--seconds 100] [--out docs]

Blocks, warps, stages and splits of decode, and rows, blocks, warps and stages of prefill. Several
processes compile them first, as that takes seconds each. Writes gpu-sweep.json.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from bench.gpu_kernels import (
    DEVICE,
    DIM,
    HEADS,
    KV_BYTES,
    KV_HEADS,
    PAGE,
    SCALE,
    copy_point,
    graphed,
    matmul_point,
    num_processors,
    random,
    tables_of,
    timed,
)
from bench.gpu_parts import FRESH_BYTES, PRODUCTS
from sluice_kernels.triton import decode, prefill
from sluice_kernels.triton.few_rows import few_rows
from sluice_kernels.triton.kernels import upload
from torch.nn.functional import linear

DECODE_BATCHES = [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 32768)]
PREFILL_SIZES = [(0, 1024), (0, 2048), (0, 8192), (8192, 2048)]
_decode_constants, _prefill_constants = decode.decode_constants, prefill.prefill_constants


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to launch a kernel; splits: of decode, 0: as it chooses."""

    kernel: str
    changes: tuple[tuple[str, int], ...]
    splits: int = 0

    @property
    def name(self) -> str:
        told = " ".join(
            f"{key.lower().removeprefix('num_')} {value}" for key, value in self.changes
        )
        return f"{self.kernel}: {told or 'as it is'}" + f" splits {self.splits}" * bool(self.splits)


def variants() -> Iterator[Variant]:
    """Those that fit; the present ones first."""
    yield Variant("decode", ())
    yield Variant("prefill", ())
    for rows, block, warps, stages in itertools.product(
        (128, 64), (64, 128, 32), (8, 4), (3, 4, 2, 5)
    ):
        if rows * block <= 128 * 64 or warps == 8:
            given = {"ROWS": rows, "BLOCK": block, "num_warps": warps, "num_stages": stages}
            yield Variant("prefill", tuple(given.items()))
    for block, warps, stages in itertools.product((64, 32, 128), (4, 2, 8), (3, 4, 5, 2)):
        if block * (stages - 1) <= 512:
            given = {"BLOCK": block, "num_warps": warps, "num_stages": stages}
            yield Variant("decode", tuple(given.items()))
    for block_n, block_k, warps, stages in (
        (16, 256, 4, 3), (16, 256, 4, 5), (32, 256, 4, 3), (32, 128, 4, 5), (64, 128, 4, 4),
        (64, 256, 4, 3), (64, 128, 8, 4), (128, 64, 4, 4), (32, 512, 8, 3), (16, 512, 8, 3),
    ):  # fmt: skip
        given = {"N": block_n, "K": block_k, "num_warps": warps, "num_stages": stages}
        yield Variant("few", tuple(given.items()))
    yield Variant("few", ())
    for splits in (4, 16, 32):
        yield Variant("decode", (), splits)


def use(variant: Variant) -> None:
    """Launch kernels so from now on."""
    changes: Mapping[str, int] = dict(variant.changes)
    decode.decode_constants = lambda *of: {**_decode_constants(*of), **changes}  # type: ignore[assignment]
    prefill.prefill_constants = lambda *of: {**_prefill_constants(*of), **changes}  # type: ignore[assignment]
    decode.join_constants.cache_clear()


def measure(variant: Variant, repeats: int, is_first: bool = False) -> dict[str, float]:
    """TB/s or TFLOP/s of each size; `is_first`: one small launch, which compiles it."""
    use(variant)
    found = {}
    if variant.kernel == "few":
        config = tuple(dict(variant.changes).values())
        for (name, (outputs, inputs)), rows in itertools.product(PRODUCTS.items(), (1, 8, 32)):
            given = random(rows, inputs)
            weights = [
                random(outputs, inputs)
                for _ in range(1 if is_first else max(2, FRESH_BYTES // (2 * outputs * inputs)))
            ]

            def step(given=given, weights=weights):
                for weight in weights:
                    if config:
                        few_rows(given, weight, config)
                    else:
                        linear(given, weight)

            if is_first:
                step()
                continue
            if config:
                gap = (
                    few_rows(given, weights[0], config).float() - linear(given, weights[0]).float()
                )
                assert gap.norm() < 0.01 * linear(given, weights[0]).float().norm()
            median = timed(graphed(step), repeats, len(weights)).median
            found[f"{name} {rows}"] = 2 * outputs * inputs / median / 1e9
            if is_first and name == "o":
                break
    elif variant.kernel == "decode":
        for count, context in DECODE_BATCHES[:1] if is_first else DECODE_BATCHES:
            pages = -(-context // PAGE)
            layers = 1 if is_first else min(32, max(2, (4 << 30) // (count * context * KV_BYTES)))
            caches = [random(count * pages, 2, KV_HEADS, PAGE, DIM) for _ in range(layers)]
            lengths = torch.full((count,), context, device=DEVICE, dtype=torch.int32)
            query, tables = random(count, HEADS, DIM), tables_of([pages] * count)
            splits = decode.choose_splits(count, KV_HEADS, num_processors())
            if variant.splits:
                splits = decode.Splits(variant.splits, 1)

            def step(caches=caches, query=query, lengths=lengths, tables=tables, splits=splits):
                for cache in caches:
                    decode.decode(query, lengths, cache, tables, SCALE, splits=splits)

            if is_first:
                for num in (8, 16, 32):
                    splits = decode.Splits(num, 1)
                    step(splits=splits)
                break
            median = timed(graphed(step), repeats, layers).median
            found[f"{count} x {context}"] = count * context * KV_BYTES / median / 1e9
    else:
        for start, count in PREFILL_SIZES[:1] if is_first else PREFILL_SIZES:
            pages = -(-(start + count) // PAGE)
            cache, tables = random(pages, 2, KV_HEADS, PAGE, DIM), tables_of([pages])
            query = random(count, HEADS, DIM)
            tokens = prefill.tile_tokens(HEADS // KV_HEADS, cache)
            tiles = upload(
                torch.from_numpy(prefill.cut_tiles([(0, 0, start, count)], tokens)), cache.device
            )

            def step(query=query, tiles=tiles, cache=cache, tables=tables):
                prefill.prefill(query, tiles, cache, tables, SCALE)

            if is_first:
                step()
                break
            median = timed(graphed(step), repeats).median
            seen = count * start + count * (count + 1) // 2
            found[f"{count} at {start}"] = 4 * seen * HEADS * DIM / median / 1e9
    return found


def compile_some(some: list[Variant]) -> None:
    """In a process of its own: what it compiles is found on disk by the others."""
    with torch.inference_mode():
        for variant in some:
            try:
                measure(variant, 1, is_first=True)
            except Exception as error:  # too much shared memory, say
                print(f"{variant.name}: {str(error)[:80]}", flush=True)


def main() -> None:
    """Print and write what each brings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    end_s, every = time.monotonic() + given.seconds, [*variants()]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=compile_some, args=(every[at::12],), daemon=True) for at in range(12)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(1.0, given.seconds / 2 - (given.seconds - (end_s - time.monotonic()))))
        if process.is_alive():
            process.kill()
    print(f"compiled; {end_s - time.monotonic():.0f} s are left", flush=True)
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        copy, matmul = copy_point(5), matmul_point(5)
        print(f"copy {copy.rate:.3f} TB/s, product {matmul.rate:.0f} TFLOP/s", flush=True)
        for variant in every:
            if time.monotonic() > end_s:
                print("no time for the rest", flush=True)
                break
            try:
                found[variant.name] = measure(variant, 5)
            except Exception as error:
                print(f"{variant.name}: {str(error)[:60]}", flush=True)
                continue
            ceiling = copy.rate if variant.kernel != "prefill" else matmul.rate
            shares = "  ".join(f"{k}: {v / ceiling:5.1%}" for k, v in found[variant.name].items())
            print(f"{variant.name:52} {shares}", flush=True)
            (given.out / "gpu-sweep.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
