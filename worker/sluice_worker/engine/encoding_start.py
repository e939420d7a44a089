"""From a configuration to an engine that makes vectors: weights, memory, profile."""

import time
from collections.abc import Callable, Sequence

from sluice_core.contract import MemoryReport, StepModel
from sluice_core.errors import DoesNotFit
from sluice_core.heap import release_freed
from sluice_core.latency import STEPS_TO_END, TARGET_MARGIN, StepLaw, StepTime
from sluice_core.model.architecture import DTYPE_BYTES, ModelShape
from sluice_core.model.files import Directory, checkpoint_dir
from sluice_core.model.images import JointShape
from sluice_core.model.sizing import MemoryPlan, MemoryRequest, advice
from sluice_core.model.vectors import plan_vectors, stored_bytes
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepRecord, StepTimes
from sluice_core.wire import Ready
from sluice_kernels.interface import Kernels

from ..base.config import EngineConfig
from ..base.resources import Resources
from ..scheduling.texts import TextQueue, WaitingText
from .encoding import EncodingEngine, record_of
from .machine import Machine
from .vector_model import Asked, VectorModel, load, read_asked

Progress = Callable[[str, int], None]
"""(phase, percent) of the start."""
PROFILED = ((8,), (8,) * 8, (64,) * 4, (128,) * 4, (16,) * 32)
"""Lengths of the texts of each dummy step."""
PROFILED_IMAGES = (1, 2, 4)
"""Images of each."""
PROFILE_S = 1.0
USUAL_TOKENS = 128
"""Tokens of a text for which the first cap is predicted, if the model reads as many."""


def start(config: EngineConfig, progress: Progress) -> tuple[EncodingEngine, Ready]:
    """Load the model and measure it. Raises StartupError with one sentence."""
    machine, source = Machine(config, Resources()), Directory(checkpoint_dir(config.model))
    asked = read_asked(source, config, machine.kind)
    base_bytes = machine.base_bytes()
    plan = _plan(asked, machine, config)
    planned = plan.as_dict()
    progress("weights", 0)
    kernels = _kernels(asked, machine)
    model = load(config, source, asked, machine, kernels)
    release_freed()
    progress("profile", 60)
    times = StepTimes()
    times.set_profile(_profile(model, asked))
    predicted = _predicted_cap(times.model, asked, config.e2e_ms, plan.ceiling)
    cap = min(config.initial_num_seqs or predicted, plan.ceiling)
    limits = EngineLimits(config.epoch, cap, config.max_num_batched_tokens)
    ready = Ready(
        ceiling=plan.ceiling,
        predicted_cap=predicted,
        cap=cap,
        max_model_len=asked.max_len,
        memory=MemoryReport(planned, planned | {"reserve_bytes": base_bytes}, 0),
        step_model=times.model,
        kernels=kernels.name,
    )
    return EncodingEngine(TextQueue(limits), model, times, asked.max_len, asked.image_rows), ready


def _kernels(asked: Asked, machine: Machine) -> Kernels:
    shape, group = asked.shape, 1
    if isinstance(shape, ModelShape):
        group = shape.num_heads // shape.num_kv_heads
    return machine.kernels(asked.dtype, group)


def _plan(asked: Asked, machine: Machine, config: EngineConfig) -> MemoryPlan:
    """The bytes of each part; raises DoesNotFit."""
    dtype_bytes = DTYPE_BYTES[asked.dtype]
    request = MemoryRequest(
        total_bytes=machine.total_bytes(),
        utilization=config.memory_utilization,
        weights_bytes=stored_bytes(asked.shape, dtype_bytes),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(asked.max_len, asked.shape.default_len),
        block_size=1,
        dtype_bytes=dtype_bytes,
        max_num_seqs=config.max_num_seqs,
        device=machine.kind,
    )
    pixel_bytes = asked.pixels.num_bytes if asked.pixels is not None else 0
    plan = plan_vectors(asked.shape, request, pixel_bytes)
    if not plan.fits:
        raise DoesNotFit(f"{plan.explain()} {advice(plan)}")
    return plan


def _predicted_cap(
    model: StepModel | None, asked: Asked, e2e_ms: float | None, ceiling: int
) -> int:
    """Texts or images of usual length whose step takes half of the target: most come while another
    step runs, and wait for its end."""
    if model is None or e2e_ms is None:
        return ceiling
    usual = asked.image_rows if asked.pixels is not None else min(USUAL_TOKENS, asked.max_len)
    law = StepLaw(model.a, 0.0, 0.0, model.d)
    most = StepTime(law).most_within(TARGET_MARGIN * e2e_ms / STEPS_TO_END, 1, usual)
    return max(1, int(min(most, ceiling)))


def _profile(model: VectorModel, asked: Asked) -> list[StepRecord]:
    """Time a few steps of dummy texts and images, each the quicker of two runs."""
    records, deadline = [], time.monotonic() + PROFILE_S
    for texts in _dummies(asked):
        runs = []
        for _ in range(2):
            started = time.monotonic()
            model.vectors(texts)
            runs.append(time.monotonic() - started)
        lengths = [len(text.token_ids) for text in texts]
        records.append(record_of(lengths, time.monotonic(), min(runs)))
        if time.monotonic() > deadline:
            break
    return records


def _dummies(asked: Asked) -> list[list[WaitingText]]:
    """The steps that are timed; images first, which take longest."""
    lengths = [[min(length, asked.max_len) for length in each] for each in PROFILED]
    steps = [[_text([0] * length) for length in each] for each in lengths]
    if asked.pixels is None:
        return [_named(step) for step in steps]
    image = WaitingText("", range(asked.image_rows), 0, 0.0, pixels=bytes(asked.pixels.num_bytes))
    pictures = [[image] * num for num in PROFILED_IMAGES]
    both = [*pictures, *steps] if isinstance(asked.shape, JointShape) else pictures
    return [_named(step) for step in both]


def _text(token_ids: list[int]) -> WaitingText:
    return WaitingText("", token_ids, 0, 0.0)


def _named(step: Sequence[WaitingText]) -> list[WaitingText]:
    return [text._replace(request_id=str(number)) for number, text in enumerate(step)]
