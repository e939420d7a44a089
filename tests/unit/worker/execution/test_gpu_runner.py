"""The GPU's runner on a CPU: steps ahead of the host change no token, whoever comes and goes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from sluice_core.steptime import StepTimes
from sluice_core.wire import Abort, Submit
from sluice_core.work import Sampling
from sluice_kernels.triton.kernels import TritonKernels
from sluice_kernels.waiting import reached
from sluice_worker.base.config import NgramSpeculation
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.gpu.capture import MIN_FREE_BYTES
from sluice_worker.execution.gpu.decode_step import DecodeStep, PendingTokens
from sluice_worker.execution.gpu.rows import Row
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.models.step import StepInput
from sluice_worker.execution.runner import Runner
from sluice_worker.scheduling import drafts as drafts_module
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.speculation import Drafter
from sluice_worker.scheduling.step import StepWork
from unit.worker.engine.factories import (
    collect,
    create_engine_of,
    create_gpu_engine_of,
    create_request,
    create_requests,
    create_scheduler,
    load_decoder,
    run_all,
    save_llama,
)
from unit.worker.execution.test_families_equal_transformers import MODELS, save_random


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = tmp_path_factory.mktemp("llama")
    save_llama(path, num_hidden_layers=2)
    return load_decoder(path, kernels=TritonKernels(4, 16))


def some_request(chance: random.Random, number: int) -> Submit:
    """Greedy; some end by a stop token, some edit their logits, some want log-probabilities."""
    sampling = chance.choice(
        [None, None, None, Sampling(logprobs=2), Sampling(logit_bias={3: 2.0})]
    )
    stops = chance.sample(range(199), 20) if chance.random() < 0.5 else []
    return create_request(
        f"r{number}",
        chance.randint(1, 60),
        max_tokens=chance.randint(1, 30),
        min_tokens=chance.choice([0, 0, 1]),
        stop_token_ids=stops,
        sampling=sampling,
    )


def churned(engine: Engine, seed: int) -> dict[str, list[int]]:
    """Outputs of 60 requests that arrive between the steps; each tenth is aborted on its way."""
    chance, outputs, arrived = random.Random(seed), dict[str, list[int]](), 0
    while engine.has_work or arrived < 60:
        for _ in range(min(chance.choice([0, 0, 0, 1, 2]), 60 - arrived)):
            request = some_request(chance, arrived)
            outputs[request.request_id] = []
            assert engine.submit(request, 0.0) is None
            arrived += 1
            if arrived % 10 == 0:
                engine.abort(Abort(f"r{arrived - 3}"))
        if engine.has_work:
            assert collect(engine, outputs) == []
    assert engine.scheduler.check_integrity() is None
    assert engine.scheduler.pool.num_used == 0
    return outputs


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_ends_aborts_and_preemptions_change_no_token(model: Decoder, seed: int) -> None:
    def scheduler() -> Scheduler:
        return create_scheduler(cap=6, num_blocks=16, block_size=8, max_model_len=120)

    plain = create_engine_of(model, scheduler())
    expected = churned(plain, seed)
    engine = create_gpu_engine_of(model, scheduler())
    found = churned(engine, seed)
    assert engine.scheduler.counters.num_preemptions > 0
    # An abort may meet a request a step earlier or later: what both have is the same.
    assert all(
        mine[: len(theirs)] == theirs[: len(mine)]
        for mine, theirs in zip(found.values(), expected.values(), strict=True)
    )
    assert sum(map(len, found.values())) > 300


@pytest.mark.parametrize(
    ("temperature", "sampling"), [(0.0, Sampling()), (0.8, Sampling(top_p=0.9, top_k=20))]
)
def test_a_decoding_batch_is_always_a_step_ahead_until_it_ends(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, temperature: float, sampling: Sampling
) -> None:
    sizes: list[int] = []
    launch = DecodeStep.launch

    def counted(self: DecodeStep, rows: list[Row]) -> PendingTokens:
        sizes.append(len(rows))
        return launch(self, rows)

    monkeypatch.setattr(DecodeStep, "launch", counted)
    engine = create_gpu_engine_of(model, create_scheduler(block_size=4, budget=64))
    requests = [
        create_request(f"r{size}", size, max_tokens=20, temperature=temperature, sampling=sampling)
        for size in (5, 6, 7)
    ]
    run_all(engine, requests)
    # One step of prefill, then each step of decodes is launched once: none is thrown away.
    assert sizes == [3] * 19
    assert engine.num_steps == 20


def test_a_newcomers_prefill_is_of_one_forward_with_those_who_decode(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the step that ran ahead, and none runs ahead of it."""
    built: list[list[int]] = []
    build = Runner.build

    def noted(self: Runner, works: list[StepWork]) -> StepInput:
        built.append([work.num_tokens for work in works])
        return build(self, works)

    monkeypatch.setattr(Runner, "build", noted)
    engine = create_gpu_engine_of(model, create_scheduler(block_size=4, budget=64))
    outputs: dict[str, list[int]] = {"first": [], "second": []}
    for request in create_request("first", 9, max_tokens=12), create_request("second", 11):
        assert engine.submit(request, 0.0) is None
        for _ in range(3):
            collect(engine, outputs)
    # The prompt of the first alone; of the second, a step late, beside the first's next token.
    assert built == [[9], [1, 11]]
    assert [len(tokens) for tokens in outputs.values()] == [6, 2]


def test_a_mixture_of_experts_gives_its_tokens_before_the_next_step_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches wait for the device in each layer."""
    log: list[str] = []
    launch, tokens = DecodeStep.launch, PendingTokens.tokens

    def launched(self: DecodeStep, rows: list[Row]) -> PendingTokens:
        log.append("launched")
        return launch(self, rows)

    def read(self: PendingTokens) -> list[int | None]:
        log.append("read")
        return tokens(self)

    monkeypatch.setattr(DecodeStep, "launch", launched)
    monkeypatch.setattr(PendingTokens, "tokens", read)
    save_random(tmp_path, "qwen3_moe", MODELS["qwen3_moe-mixed"])
    experts = load_decoder(tmp_path, kernels=TritonKernels(4, 16))
    engine = create_gpu_engine_of(experts, create_scheduler())
    run_all(engine, create_requests((5, 6), max_tokens=6))
    assert log == ["read"] + ["launched", "read"] * 5


def test_draws_are_the_same_beside_others_that_need_the_host(model: Decoder) -> None:
    def drawn(*others: Submit) -> list[int]:
        request = create_request("r", 20, max_tokens=30, temperature=0.9, seed=5)
        engine = create_gpu_engine_of(model, create_scheduler())
        return run_all(engine, [request, *others])["r"]

    alone = drawn()
    penalised = Sampling(top_p=0.9, repetition_penalty=1.2)
    other = create_request("o", 9, max_tokens=12, temperature=1.0, sampling=penalised)
    assert drawn(other) == alone
    assert len(set(alone)) > 5


class Graph:
    """Stands for a CUDA graph: runs a step of `size` rows again."""

    def __init__(self, decodes: DecodeStep, size: int) -> None:
        self.decodes, self.size, self.num_replays = decodes, size, 0

    def replay(self) -> None:
        self.num_replays += 1
        self.decodes._run(self.size)


def test_a_batch_with_requests_that_need_the_host_decodes_by_its_graph(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    biased = Sampling(logit_bias={3: 2.0}, logprobs=2)
    cut = Sampling(top_p=0.9, repetition_penalty=1.2)
    requests = [
        create_request("greedy", 5, max_tokens=9),
        create_request("biased", 6, max_tokens=9, sampling=biased),
        create_request("drawn", 7, max_tokens=9, sampling=cut, temperature=1.0, seed=3),
    ]
    expected = run_all(create_engine_of(model, create_scheduler()), requests)
    engine = create_gpu_engine_of(model, create_scheduler())
    decodes: DecodeStep = engine.runner._decodes  # type: ignore[attr-defined]
    graph: Any = Graph(decodes, 4)  # one row is padding
    decodes._graphs[4] = graph
    built, build = [], Runner.build

    def noted(self: Runner, works: Any) -> Any:
        built.append(works)
        return build(self, works)

    monkeypatch.setattr(Runner, "build", noted)
    assert run_all(engine, requests) == expected
    assert graph.num_replays == 8
    assert len(built) == 1  # the prompts


class Reckless(Drafter):
    """Drafts however wrong it was."""

    @property
    def is_on(self) -> bool:
        return True


def test_drafts_are_verified_as_chunks(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "Drafter", Reckless)
    monkeypatch.setattr(StepTimes, "refit", lambda *args, **named: None)  # no time decides
    requests = create_requests((40, 150), max_tokens=60)
    expected = run_all(create_engine_of(model, create_scheduler()), requests)
    ngram = NgramSpeculation("ngram", 4, prompt_lookup_max=2, prompt_lookup_min=1)
    scheduler = create_scheduler(speculation=ngram)
    assert run_all(create_gpu_engine_of(model, scheduler), requests) == expected
    assert scheduler.counters.num_drafts > 5


def test_nan_of_a_row_that_ran_ahead_fails_its_request_alone(model: Decoder) -> None:
    requests = create_requests((20, 30), max_tokens=30)
    expected = run_all(create_engine_of(model, create_scheduler()), requests)
    engine = create_gpu_engine_of(model, create_scheduler())
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert engine.submit(request, 0.0) is None
    for _ in range(4):
        assert collect(engine, outputs) == []
    (poisoned,) = [s for s in engine.scheduler.running if s.request_id == "r30"]
    for cache in engine.runner.caches:
        cache[poisoned.block_ids] = float("nan")
    assert collect(engine, outputs) == []  # this step had been launched before
    (failed,) = collect(engine, outputs)
    assert failed.request_id == "r30"
    while engine.has_work:
        assert collect(engine, outputs) == []
    assert outputs["r20"] == expected["r20"]
    assert not any(cache.isnan().any() for cache in engine.runner.caches)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_writes_the_same_tokens(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, name.partition("-")[0], MODELS[name])
    biased = Sampling(logit_bias={3: 0.5})
    requests = create_requests((17, 40), max_tokens=12)
    requests.insert(0, create_request("r1", 1, max_tokens=12, sampling=biased))
    plain = create_engine_of(load_decoder(tmp_path), create_scheduler(budget=512))
    expected = run_all(plain, requests)
    scheduler = create_scheduler(cap=2, budget=19, block_size=4, num_blocks=128)
    on_gpu = load_decoder(tmp_path, kernels=TritonKernels(4, 16))
    assert run_all(create_gpu_engine_of(on_gpu, scheduler), requests) == expected


def test_kernels_of_every_kind_of_step_are_compiled_before_the_first(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, found, run = TritonKernels(4, 16), [], DecodeStep._run

    def noted(self: DecodeStep, size: int) -> None:
        found.append(kernels.splits(size, self._caches[0]).num)
        run(self, size)

    monkeypatch.setattr(DecodeStep, "_run", noted)
    engine = create_gpu_engine_of(model, create_scheduler())
    assert found == [32, 16, 8]  # of 1 to 16 rows
    assert not any(cache.any() for cache in engine.runner.caches)


def test_the_host_sleeps_while_it_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, bool]] = []

    class Event:
        def __init__(self, **options: bool) -> None:
            made.append(options)

        def record(self) -> None:
            made.append({"recorded": True})

    monkeypatch.setattr(torch.cuda, "Event", Event)
    reached()
    assert made == [{"blocking": True}, {"recorded": True}]


def test_without_a_gpu_there_is_nothing_to_capture(model: Decoder) -> None:
    engine = create_gpu_engine_of(model, create_scheduler())
    assert not torch.cuda.is_available()
    assert engine.use_idle_time() == float("inf")


@contextmanager
def no_memory(graph: object, pool: object) -> Iterator[None]:
    raise torch.OutOfMemoryError
    yield


@contextmanager
def no_driver_memory(graph: object, pool: object) -> Iterator[None]:
    yield
    raise torch.AcceleratorError("CUDA error: out of memory\nCompile with ...")


SHORT = "memory is short"


@pytest.mark.parametrize(
    ("fail", "why"),
    [(None, SHORT), (no_memory, SHORT), (no_driver_memory, "CUDA error: out of memory")],
)
def test_where_memory_is_short_no_more_is_captured_and_the_log_says_so_once(
    model: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fail: Any,
    why: str,
) -> None:
    """By what is free beside a step's own, which the factory says is a MiB, or by an error."""
    engine = create_gpu_engine_of(model, create_scheduler())
    decodes: DecodeStep = engine.runner._decodes  # type: ignore[attr-defined]
    decodes._may_capture = True
    free_bytes = [MIN_FREE_BYTES + (1 << 20)]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes[0], 0))
    assert engine.use_idle_time() == 0.0
    assert engine.use_idle_time() == 0.0
    if fail is None:
        free_bytes[0] -= 1
    else:
        monkeypatch.setattr(torch.cuda, "graph", fail)
    assert [engine.use_idle_time() for _ in range(3)] == [float("inf")] * 3
    assert [*decodes._graphs] == [1, 2]
    assert caplog.messages == [f"no CUDA graphs for steps of over 2 sequences: {why}"]
    requests = create_requests((5, 6, 7), max_tokens=6)
    expected = run_all(create_engine_of(model, create_scheduler()), requests)
    assert run_all(engine, requests) == expected
