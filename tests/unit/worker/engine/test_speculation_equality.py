"""Greedy output is the same with n-gram speculation and without, whatever the batch does."""

from pathlib import Path

import pytest
from sluice_worker.engine import Engine
from sluice_worker.runner import Runner
from sluice_worker.scheduler import Scheduler
from sluice_worker.speculation import NgramSpeculation
from sluice_worker.steptime import StepTimes
from sluice_worker.tokenizer import Tokenizer
from sluice_worker.wire import Submit

from .factories import (
    create_engine,
    create_request,
    create_scheduler,
    load_decoder,
    run_all,
    save_llama,
)

NGRAM = NgramSpeculation("ngram", num_speculative_tokens=6)
EAGER = NgramSpeculation("ngram", 5, prompt_lookup_max=2, prompt_lookup_min=1)
DEMO = Path(__file__).parents[4] / "examples" / "model"
PROMPTS = (
    "import os\nimport sys\nimport ",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a + b\n\ndef add(",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "for name in names:\n    print(name)\n\nfor name in names:\n    print(",
)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, num_hidden_layers=2)
    return path


def repetitive(count: int, max_tokens: int, min_tokens: int = 0) -> list[Submit]:
    """Prompts that say the same few words over and over."""
    return [
        create_request(f"r{i}", [(7 * i + j % (3 + i)) % 199 for j in range(30 + 9 * i)],
                       max_tokens=max_tokens + 3 * i, min_tokens=min_tokens)
        for i in range(count)
    ]  # fmt: skip


def create_demo_engine(scheduler: Scheduler) -> Engine:
    scheduler.vocab_size = 2048
    pool = scheduler.pool
    runner = Runner(load_decoder(DEMO), pool.num_total, pool.block_size, scheduler.eos_token_ids)
    return Engine(scheduler, runner, StepTimes())


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


@pytest.mark.parametrize("speculation", [NGRAM, EAGER], ids=["ngram", "eager"])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(96, 16), (13, 16), (64, 4)])
def test_random_model_writes_the_same_tokens(
    random_model: Path, speculation: NgramSpeculation, num_blocks: int, block_size: int
) -> None:
    requests = repetitive(6, 60)
    expected = run_all(create_engine(random_model, create_scheduler(num_blocks=96)), requests)
    scheduler = create_scheduler(
        num_blocks=num_blocks, block_size=block_size, max_model_len=180, speculation=speculation
    )
    assert run_all(create_engine(random_model, scheduler), requests) == expected
    assert scheduler.counters.num_drafts > 0
    if num_blocks * block_size < 300:
        assert scheduler.counters.num_preemptions > 0


def test_end_of_text_in_a_draft_ends_the_request_where_it_would_have_ended(
    random_model: Path,
) -> None:
    requests = repetitive(4, 50)
    plain = run_all(create_engine(random_model, create_scheduler(num_blocks=96)), requests)
    eos = [plain["r1"][-2], plain["r2"][-3]]
    outputs = [
        run_all(
            create_engine(
                random_model, create_scheduler(num_blocks=96, eos=eos, speculation=speculation)
            ),
            repetitive(4, 50, min_tokens=20),
        )
        for speculation in (None, EAGER)
    ]
    assert outputs[0] == outputs[1]
    assert any(len(output) < len(plain[name]) for name, output in outputs[0].items())
