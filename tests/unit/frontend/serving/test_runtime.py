"""A frontend needs no engine of ours: admission, live limits and evidence before a foreign one."""

import asyncio
import json
from collections.abc import Iterable, Sequence

import pytest
from sluice_core.contract import TICK_SECONDS, Causes, RuntimePatch, Slo, encode
from sluice_core.errors import DeadlineUnreachable, NotReady, QueueFull, SluiceError
from sluice_core.port import EngineFacts, EngineLimits, Manner
from sluice_core.work import Deadlines, Work
from sluice_frontend.api.fit import fit
from sluice_frontend.api.generate import Completion, parse_completion
from sluice_frontend.config import ServerConfig
from sluice_frontend.evidence.measured import Measured
from sluice_frontend.serving.admission import Admission
from sluice_frontend.serving.limits import RuntimeLimits
from sluice_frontend.serving.runtime import Runtime

MEMORY_BYTES = 1 << 30
LIVE = RuntimeLimits(0, 1, 512, Slo(), "Queue", None)
FACTS = EngineFacts(2, 2, 2, max_model_len=64, block_size=16, num_blocks=8, kv_tokens=128)


class Foreign:
    """A server that says nothing of its steps."""

    def __init__(self, manner: Manner = Manner()) -> None:  # noqa: B008 - it is frozen
        self.facts: EngineFacts | None = None
        self.manner = manner
        self.closed = asyncio.Event()
        self.open_ids: list[str] = []
        self.limits: list[EngineLimits] = []

    @property
    def num_open(self) -> int:
        return len(self.open_ids)

    def fail(self, request_id: str, error: SluiceError) -> None:
        self.open_ids.remove(request_id)

    def drop(self, request_id: str, error: SluiceError) -> None:
        self.fail(request_id, error)

    def fail_all(self, error: SluiceError) -> None:
        for request_id in list(self.open_ids):
            self.fail(request_id, error)

    def configure(self, limits: EngineLimits) -> None:
        self.limits.append(limits)

    async def check_integrity(self) -> str | None:
        return None


class Words:
    """A reading whose tokens are words."""

    def __init__(self, request: Completion) -> None:
        self._request = request

    async def check_sampling(self) -> None:
        pass

    def fewest(self, num_chars: int) -> int:
        return 1

    async def prompts(self, keep: int | None) -> Sequence[Sequence[int]]:
        return [[1] * len(str(prompt).split()) for prompt in self._request.prompts]

    def echoes(self) -> Iterable[str]:
        return ()


def create_runtime(config: ServerConfig, engine: Foreign) -> Runtime:
    return Runtime(
        config,
        LIVE,
        Measured(config.flag_slo),
        engine,
        model_name="foreign",
        cache_config={},
        throttled_s=lambda: 0.0,
    )


def serves(runtime: Runtime, engine: Foreign) -> None:
    """Let the engine be ready."""
    engine.facts = FACTS
    runtime.serves(FACTS)


async def admit(runtime: Runtime, **fields: object) -> list[int]:
    request = parse_completion(json.dumps({"prompt": "a b c", **fields}).encode())
    admission = Admission(runtime, MEMORY_BYTES)
    work, budgets = await fit(request, Words(request), admission.check_open(), 100)
    admission.admit(work, 0.0)
    return budgets


async def test_a_foreign_engine_gets_what_its_limits_hold_and_a_cap_that_is_changed_live() -> None:
    engine = Foreign()
    runtime = create_runtime(ServerConfig(max_num_queued_reqs=1), engine)
    with pytest.raises(NotReady):
        await admit(runtime)
    serves(runtime, engine)
    assert await admit(runtime, max_tokens=9, n=3) == [9]
    engine.open_ids = list("abc")
    with pytest.raises(QueueFull, match="max_num_queued_reqs is 1"):
        await admit(runtime)
    runtime.patch(RuntimePatch(epoch=1, cap=1))
    assert [(limits.epoch, limits.cap) for limits in engine.limits] == [(1, 1)]
    recorder = runtime.recorder
    recorder.advance(recorder.ticks.start_s + TICK_SECONDS, 0.0, 0.0)
    evidence = runtime.evidence(0)
    assert evidence.step_model is None
    assert (evidence.ticks[0].epoch, evidence.ticks[0].refused) == (1, 2)
    assert evidence.ticks[0].ttft.by == Causes(outside=1, cap=1)


async def test_a_share_of_a_hold_reaches_the_engine_live_until_the_next_one() -> None:
    engine = Foreign()
    runtime = create_runtime(ServerConfig(), engine)
    serves(runtime, engine)
    assert runtime.runtime_config().hold_share == 1
    for share in (0.0, None, 0.5):
        told = runtime.patch(RuntimePatch(epoch=0, slo=Slo(ttft_ms=500), hold_share=share))
        assert told.hold_share == (share or 0)
    assert [limits.hold_share for limits in engine.limits] == [0, 0.5]


async def test_a_request_whose_tokens_somebody_else_counts_meets_the_same_queue() -> None:
    engine = Foreign()
    runtime = create_runtime(ServerConfig(max_num_queued_reqs=1), engine)
    serves(runtime, engine)
    admission = Admission(runtime, MEMORY_BYTES)

    def ask(deadlines: Deadlines = Deadlines(), n: int = 1) -> None:  # noqa: B008
        admission.admit(Work((3,), n, deadlines=deadlines, is_exact=False), arrival_s=0.0)

    ask(n=3)
    with pytest.raises(DeadlineUnreachable):
        ask(Deadlines(ttft_ms=1))
    engine.open_ids = list("abc")
    with pytest.raises(QueueFull, match="max_num_queued_reqs is 1"):
        ask()
    assert runtime.stats.rejected == {"deadline": 1, "max_num_queued_reqs": 1}


async def test_the_way_an_engine_is_steered_is_told_where_it_is_not_ours() -> None:
    manner = Manner("gate", "chunks", "fixed")
    for told, expected in ((Manner(), {}), (manner, manner._asdict())):
        engine = Foreign(told)
        runtime = create_runtime(ServerConfig(), engine)
        engine.facts = FACTS
        config = json.loads(encode(runtime.runtime_config()))
        assert {name: config[name] for name in Manner._fields if name in config} == expected
