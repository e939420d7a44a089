"""Greedy output is the same with n-gram speculation and without, whatever the batch does."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from sluice_core.contract import StepModel
from sluice_core.steptime import StepTimes
from sluice_core.wire import Submit
from sluice_worker.base.config import NgramSpeculation
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.runner import Runner
from sluice_worker.scheduling import drafts as drafts_module
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.speculation import Drafter
from sluice_worker.text.tokenizer import Tokenizer
from unit.worker.engine.factories import (
    create_request,
    create_scheduler,
    load_decoder,
    run_all,
    save_llama,
)

NGRAM = NgramSpeculation("ngram", num_speculative_tokens=6)
DEMO = Path(__file__).parents[4] / "examples" / "model"
PROMPTS = (
    "import os\nimport sys\nimport ",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a + b\n\ndef add(",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "for name in names:\n    print(name)\n\nfor name in names:\n    print(",
)


class Unmeasured(StepTimes):
    """No model of the step's time, so that what is drafted does not depend on the machine."""

    def refit(self, now: float, *, is_throttled: bool = False) -> StepModel | None:
        return None


def create_engine(path: Path, scheduler: Scheduler) -> Engine:
    pool = scheduler.pool
    runner = Runner(load_decoder(path), pool.num_total, pool.block_size, scheduler.eos_token_ids)
    return Engine(scheduler, runner, Unmeasured())


def create_demo_engine(scheduler: Scheduler) -> Engine:
    scheduler.vocab_size = 2048
    return create_engine(DEMO, scheduler)


def demo_requests(max_tokens: int) -> list[Submit]:
    tokenizer = Tokenizer(DEMO)
    return [
        create_request(f"p{i}", list(tokenizer.encode(text)), max_tokens=max_tokens)
        for i, text in enumerate(PROMPTS)
    ]


def test_demo_model_writes_the_same_text_in_fewer_steps() -> None:
    requests = demo_requests(96)
    plain = create_demo_engine(create_scheduler(num_blocks=96))
    expected = run_all(plain, requests)
    engine = create_demo_engine(create_scheduler(num_blocks=96, speculation=NGRAM))
    assert run_all(engine, requests) == expected
    counters = engine.scheduler.counters
    assert sum(counters.accepted_by_position) > 0.8 * counters.draft_tokens > 0
    assert engine.num_steps < 0.75 * plain.num_steps


def test_preempted_demo_model_writes_the_same_text() -> None:
    requests = demo_requests(96)
    expected = run_all(create_demo_engine(create_scheduler(num_blocks=96)), requests)
    scheduler = create_scheduler(num_blocks=14, max_model_len=200, speculation=NGRAM)
    assert run_all(create_demo_engine(scheduler), requests) == expected
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.num_drafts > 0


class Oracle(Drafter):
    """Guesses what was written without speculation, and is sometimes wrong on purpose."""

    known: Iterable[list[int]] = ()
    chance = random.Random(5)

    @property
    def is_on(self) -> bool:
        return True

    def draft(self, token_ids: list[int], most: int) -> tuple[int, ...]:  # type: ignore[override]
        begin, end = len(token_ids), len(token_ids) + self.chance.randint(0, most)
        known = [text for text in self.known if text[:begin] == token_ids]
        guess = known[0][begin:end] if known else [3] * (end - begin)
        return tuple(token if self.chance.random() < 0.8 else 0 for token in guess)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, num_hidden_layers=2)
    return path


def random_requests(min_tokens: int = 0) -> list[Submit]:
    lengths = (5, 17, 40, 63, 64, 31)
    return [create_request(f"r{n}", n, max_tokens=60, min_tokens=min_tokens) for n in lengths]


@pytest.fixture
def expected(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Outputs without speculation; whoever speculates from here on knows them."""
    requests = random_requests()
    outputs = run_all(create_engine(random_model, create_scheduler(num_blocks=96)), requests)
    known = [[*request.prompt_token_ids, *outputs[request.request_id]] for request in requests]
    monkeypatch.setattr(Oracle, "known", known)
    monkeypatch.setattr(drafts_module, "Drafter", Oracle)
    return outputs


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(96, 16), (13, 16), (34, 4)])
def test_right_and_wrong_drafts_change_no_token(
    random_model: Path,
    expected: dict[str, list[int]],
    num_blocks: int,
    block_size: int,
    caching: bool,
) -> None:
    scheduler = create_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=130,
        prefix_caching=caching,
        speculation=NGRAM,
    )
    assert run_all(create_engine(random_model, scheduler), random_requests()) == expected
    counters = scheduler.counters
    assert 0 < sum(counters.accepted_by_position) < counters.draft_tokens
    assert (counters.num_preemptions > 0) == (num_blocks < 96)


def test_a_stop_token_in_a_draft_ends_the_request_where_it_would_have_ended(
    random_model: Path, expected: dict[str, list[int]]
) -> None:
    eos = {expected["r17"][40], expected["r63"][33]}
    scheduler = create_scheduler(num_blocks=96, eos=eos, speculation=NGRAM)
    outputs = run_all(create_engine(random_model, scheduler), random_requests())
    for name, whole in expected.items():
        ends = [place for place, token in enumerate(whole) if token in eos]
        assert outputs[name] == whole[: ends[0] + 1 if ends else None]


def test_min_tokens_hold_inside_a_draft(random_model: Path, expected: dict[str, list[int]]) -> None:
    eos = [expected["r17"][10], expected["r63"][13]]
    plain, drafted = (
        run_all(
            create_engine(
                random_model, create_scheduler(num_blocks=96, eos=eos, speculation=speculation)
            ),
            random_requests(min_tokens=30),
        )
        for speculation in (None, NgramSpeculation("ngram", 3, 2, 1))
    )
    assert drafted == plain
    assert min(len(output) for output in plain.values()) >= 30
