"""What n-gram speculation gains and costs, on the demo's model: CPU-seconds with and without.

    PYTHONPATH=tests nice -n 19 .venv/bin/python -m bench.speculation

Each round decodes the same texts without and with speculation, a step of each in turns, and gives
one ratio: other load on the machine meets both. Prefills are in it, as they are in a server.
Three kinds of text, all over a real forward pass of every step:
  own    what the model itself writes greedily (it soon repeats itself)
  edit   the prompt's code again with a word changed every 40 tokens, as an editor's request does
  new    code that the prompt does not hold
The last two are forced: the model's step is made, and its token replaced by the text's. In bfloat16
`own` may differ where two tokens are nearly equal, as it does between two batch sizes without
speculation (4 of these 8 texts, batch 1 against 4); in float32 it is the same.
"""

import argparse
import os
import statistics
import sysconfig
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from bench.serving import MODEL
from sluice.machine import processor
from sluice_core.model.files import read_json
from sluice_core.model.sizing import MAX_GATHER_BYTES, MAX_SCORES_BYTES, resolve_dtype
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepTimes
from sluice_core.wire import Submit, packed
from sluice_kernels.choose import choose
from sluice_worker.base.config import DType, NgramSpeculation
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.runner import Runner
from sluice_worker.execution.weights import Checkpoint
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.step import StepWork
from sluice_worker.text.tokenizer import Tokenizer

HELD_OUT = (
    "textwrap.py",
    "queue.py",
    "csv.py",
    "graphlib.py",
    "shelve.py",
    "http/cookies.py",
    "json/encoder.py",
    "urllib/robotparser.py",
)
PROMPT_TOKENS, NEW_TOKENS, BLOCK_SIZE = 256, 256, 64
TOKENS_BETWEEN_EDITS = 40
AIM_GAIN, AIM_LOSS = 1.6, 0.02
SPECULATION = NgramSpeculation("ngram", num_speculative_tokens=8)

Texts = dict[str, list[int]]


class Forced(Runner):
    """The model's steps, with the tokens of given texts."""

    texts: Texts

    def execute(self, works: Seq[StepWork], prefill_follows: bool = False) -> list[int | None]:
        """As the runner; the sampled tokens are replaced by those that follow in the text."""
        super().execute(works, prefill_follows)
        return [
            self.texts[work.sequence.request_id][work.start + work.num_tokens - left + 1]
            for work in works
            for left in range(work.num_samples, 0, -1)
        ]


@dataclass(slots=True)
class Side:
    """One of two engines that decode the same texts in turns."""

    engine: Engine
    outputs: Texts
    cpu_s: float = 0.0

    def step(self) -> None:
        """One step, timed; no more once all texts are written."""
        if not self.engine.has_work:
            return
        started = time.thread_time()
        report, _ = self.engine.step()
        self.cpu_s += time.thread_time() - started
        for token in report.tokens if report else ():
            self.outputs[token.request_id].append(token.token_id)

    @property
    def tokens_per_step(self) -> float:
        """Mean over all steps, prefills included."""
        return sum(len(output) for output in self.outputs.values()) / self.engine.num_steps


@dataclass(frozen=True, slots=True)
class Machine:
    """What is loaded once: the model in the dtype that a worker would choose, code as tokens."""

    model: Decoder
    codes: list[list[int]]


def load_model(dtype_name: DType) -> Decoder:
    """The demo's model with the kernels that a worker would choose."""
    config = DecoderConfig.from_json(read_json(MODEL, "config.json"))
    dtype: torch.dtype = getattr(torch, resolve_dtype(dtype_name, config.shape, on_cpu=True))
    device = torch.device("cpu")
    kernels = choose(
        device,
        dtype,
        None,
        os.environ,
        max_gather_bytes=MAX_GATHER_BYTES,
        max_scores_bytes=MAX_SCORES_BYTES,
    )
    return Decoder(config, Checkpoint(MODEL, dtype, device).read, kernels)


def load(dtype_name: DType) -> Machine:
    """The demo's model, and the beginnings of modules that it was not trained on."""
    tokenizer = Tokenizer(MODEL)
    library = Path(sysconfig.get_paths()["stdlib"])
    codes = [list(tokenizer.encode((library / name).read_text())) for name in HELD_OUT]
    long = [code for code in codes if len(code) > PROMPT_TOKENS + NEW_TOKENS]
    return Machine(load_model(dtype_name), long)


def edited(code: Seq[int]) -> list[int]:
    """`code` with one token changed in every `TOKENS_BETWEEN_EDITS`."""
    return [
        (token + 1) % 2048 if place % TOKENS_BETWEEN_EDITS == TOKENS_BETWEEN_EDITS - 1 else token
        for place, token in enumerate(code)
    ]


def texts_of(kind: str, machine: Machine) -> Texts:
    """Prompt and output of each request; for `own` the prompt alone."""
    texts = {}
    for number, code in enumerate(machine.codes):
        prompt, rest = code[:PROMPT_TOKENS], code[PROMPT_TOKENS:]
        output = {"own": [], "edit": edited(prompt), "new": rest}[kind]
        texts[str(number)] = prompt + output[: NEW_TOKENS + 1]
    return texts


def side(machine: Machine, texts: Texts, batch: int, config: NgramSpeculation | None) -> Side:
    """An engine with all texts submitted, of which `batch` run at a time."""
    num_blocks = batch * -(-(PROMPT_TOKENS + NEW_TOKENS) // BLOCK_SIZE)
    is_own = len(texts["0"]) == PROMPT_TOKENS
    kind = Runner if is_own else Forced
    runner = kind(machine.model, num_blocks, BLOCK_SIZE, frozenset())
    if isinstance(runner, Forced):
        runner.texts = texts
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=False),
        EngineLimits(0, batch, 2048),
        max_model_len=1024,
        vocab_size=2048,
        speculation=config,
    )
    engine = Engine(scheduler, runner, StepTimes())
    for name, text in texts.items():
        request = Submit(name, packed(text[:PROMPT_TOKENS]), NEW_TOKENS, 0.0, 0, True, [], 0, 0.0)
        assert engine.submit(request, 0.0) is None
    return Side(engine, {name: [] for name in texts})


def race(machine: Machine, texts: Texts, batch: int) -> tuple[Side, Side]:
    """Both engines, a step of each in turns, so that other load meets both."""
    plain, drafted = (side(machine, texts, batch, config) for config in (None, SPECULATION))
    while plain.engine.has_work or drafted.engine.has_work:
        plain.step()
        drafted.step()
    return plain, drafted


def measure(machine: Machine, kind: str, batch: int, rounds: int) -> float:
    """Print one line; the median ratio of CPU-seconds without over with speculation."""
    texts = texts_of(kind, machine)
    ratios, equal = [], True
    for _ in range(rounds):
        plain, drafted = race(machine, texts, batch)
        ratios.append(plain.cpu_s / drafted.cpu_s)
        equal &= plain.outputs == drafted.outputs
    counters, ratio = drafted.engine.scheduler.counters, statistics.median(ratios)
    print(
        f"{kind:5} batch {batch}: {ratio:5.2f} x ({min(ratios):.2f} .. {max(ratios):.2f}), "
        f"{plain.cpu_s:.2f} -> {drafted.cpu_s:.2f} CPU-s, "
        f"{plain.tokens_per_step:.1f} -> {drafted.tokens_per_step:.1f} tokens a step, "
        f"accepted {sum(counters.accepted_by_position)} of {counters.draft_tokens} drafted, "
        f"same tokens: {'yes' if equal else 'NO'}",
        flush=True,
    )
    return ratio


def main() -> None:
    """All kinds at batch 1, 2 and 4."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32"))
    given = parser.parse_args()
    rounds: int = given.rounds
    torch.set_num_threads(1)
    machine = load(given.dtype)
    print(
        f"{processor()}, 1 thread, {machine.model.embedding.dtype}, {rounds} rounds, median (all)"
    )
    race(machine, texts_of("own", machine), 4)  # the first calls are slow
    ratios = {
        (kind, batch): measure(machine, kind, batch, rounds)
        for kind in ("own", "edit", "new")
        for batch in (1, 2, 4)
    }
    gain = min(ratio for (kind, _), ratio in ratios.items() if kind == "edit")
    loss = 1 - min(ratio for (kind, _), ratio in ratios.items() if kind == "new")
    print(
        f"copying: at least {gain:.2f} x (aim {AIM_GAIN}); new text: at most {loss:.1%} lost",
        end="",
    )
    print(f" (aim {AIM_LOSS:.0%})")


if __name__ == "__main__":
    main()
