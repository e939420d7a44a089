"""A start of a worker with an 8B of random weights, for `bench.gpu`: planned and measured bytes."""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from bench.gpu_engine import EIGHT_B
from bench.gpu_kernels import REHEARSED, VOCAB
from sluice_core.wire import Submit, packed
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine.startup import start
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import StepWork
from tokenizers import Tokenizer, decoders, models

MAX_LEN, BUDGET, UTILIZATION = (256, 64, 0.5) if REHEARSED else (8192, 2048, 0.9)


IN_USE = "in use"


@dataclass(frozen=True, slots=True)
class Bytes:
    """What the formula plans of one class, and what was measured."""

    name: str
    planned: int
    measured: int


@contextmanager
def written_model() -> Iterator[Path]:
    """A checkpoint without weights: each token is a text of its own."""
    pieces = {f"t{number}": number for number in range(VOCAB)}
    built = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    built.decoder = decoders.Fuse()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        built.save(str(path / "tokenizer.json"))
        (path / "config.json").write_text(json.dumps(EIGHT_B | {"dtype": "bfloat16"}))
        yield path


def measured_memory() -> tuple[list[Bytes], float]:
    """Plan and measurement of a worker's start, class by class, and how many seconds it took.

    The formula's activations are those of the step that takes most, in which all logits are
    sampled on the host; the start measures a prompt.

    IN_USE: what the plan allows, and what the device has given out once all graphs are captured
    and a step of a whole budget has run beside as many decodes as fit."""
    began = time.monotonic()
    with written_model() as path:
        config = EngineConfig(
            str(path), load_format="dummy", max_model_len=MAX_LEN,
            device="cpu" if REHEARSED else "cuda",
            max_num_batched_tokens=BUDGET, memory_utilization=UTILIZATION,
        )  # fmt: skip
        engine, ready = start(config, lambda *_: None)
    took_s = time.monotonic() - began
    planned, measured = ready.memory.planned, ready.memory.measured
    names = ("weights", "activation", "kv_cache")
    found = [Bytes(n, planned[f"{n}_bytes"], measured[f"{n}_bytes"]) for n in names]
    while engine.runner.use_idle_time():
        pass
    engine.runner.execute(_full_step(ready.ceiling, ready.block_size))
    if not REHEARSED:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found.append(Bytes(IN_USE, int(UTILIZATION * total), total - free))
    return found, took_s


def _full_step(ceiling: int, block_size: int) -> list[StepWork]:
    """A prompt that takes the budget, but for a decode of each of the other sequences."""
    count = BUDGET - (ceiling - 1)
    works = []
    for number in range(ceiling):
        length = count if number == 0 else 1
        asked = Submit(str(number), packed([0] * length), 1, 0.0, 0, False, [], 0, 0.0)
        sequence = Sequence(asked, seed=0, token_ids=asked.prompt_token_ids)
        blocks = -(-length // block_size)
        first = 0 if number == 0 else -(-count // block_size) + number
        sequence.block_ids = [*range(first, first + blocks)]
        works.append(StepWork(sequence, 0, length, samples=True))
    return works
