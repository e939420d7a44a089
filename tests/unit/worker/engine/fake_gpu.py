"""A GPU of fake tensors: shapes, strides and devices are a GPU's, and nothing is computed.

What a real one would refuse or wait for shows without one: an operation in a CUDA graph that reads
the host's memory, a number that the host asks for, a kernel that is compiled late.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sluice_kernels.interface import Spans
from sluice_kernels.triton.kernels import LaunchPlan, TritonKernels
from sluice_worker.engine import machine, startup
from sluice_worker.execution.gpu.decode_step import PendingTokens
from sluice_worker.execution.models import decoder
from sluice_worker.execution.models.linear import ReadTensor
from sluice_worker.execution.runner import Runner
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

GIB = 1 << 30
HOPPER = CUDABackend(GPUTarget("cuda", 90, 32))


@dataclass(slots=True)
class Placed:
    """What Triton looks at of a tensor: its dtype, and whether it begins at 16 bytes."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


@dataclass(slots=True)
class Trace:
    """What happened. compiled: kernels, each once for what it is specialised on; late: those of
    them first met in a capture, or once ready; touched: operations of a capture, or of a step once
    ready, that wait for the host's memory."""

    is_capturing: bool = False
    is_ready: bool = False
    num_captures: int = 0
    compiled: set[tuple[object, ...]] = field(default_factory=set)
    late: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)

    def launch(self, kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        """In place of Triton's own launch: what it would be compiled for, by Triton's own rules."""
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, HOPPER)
        placed = [_placed(arg) if isinstance(arg, Tensor) else arg for arg in args]
        _, specialised, rest = binder(*placed, **options)
        key = (kernel.__name__, *specialised, *rest.items())
        if key not in self.compiled and (self.is_capturing or self.is_ready):
            self.late.append(str(key))
        self.compiled.add(key)

    @contextmanager
    def capture(self, graph: object, pool: object = None) -> Iterator[None]:
        """In place of torch.cuda.graph."""
        self.is_capturing, self.num_captures = True, self.num_captures + 1
        yield
        self.is_capturing = False


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operation."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        devices = {
            leaf.device.type
            for leaf in tree_leaves((args, kwargs, found))
            if isinstance(leaf, Tensor)
        }
        waits = len(devices) > 1 and not (
            kwargs.get("non_blocking") or any(arg is True for arg in args)
        )
        if (self._trace.is_capturing and "cpu" in devices) or (self._trace.is_ready and waits):
            self._trace.touched.append(str(func))
        return found


def _placed(tensor: Tensor) -> Placed:
    return Placed(tensor.dtype, int(tensor.storage_offset()) * tensor.itemsize)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """An H100 for `startup.start`, and what happens on it."""
    trace = Trace()
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0
    )
    for name, value in {
        "mem_get_info": lambda *_: (79 * GIB, 80 * GIB),
        "synchronize": lambda: None,
        "get_device_properties": lambda _: gpu,
        "empty_cache": lambda: None,
        "memory_reserved": lambda _: GIB,
        "memory_allocated": lambda _: GIB,
        "max_memory_allocated": lambda _: 2 * GIB,
        "reset_peak_memory_stats": lambda _: None,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": trace.capture,
        "Event": lambda **_: event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(jit.JITFunction, "run", lambda *args, **kw: trace.launch(*args, **kw))
    monkeypatch.setattr(machine, "_pick_device", lambda _: "cuda")
    monkeypatch.setattr(startup, "random_weights", _weights)
    monkeypatch.setattr(decoder, "_identity", id)
    monkeypatch.setattr(torch.Tensor, "pin_memory", _pinned)
    monkeypatch.setattr(PendingTokens, "tokens", lambda pending: [7] * len(pending.rows))
    with ExitStack() as modes:
        modes.enter_context(FakeTensorMode())
        _plan_for_real(monkeypatch)
        modes.enter_context(Watch(trace))
        yield trace


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _weights(seed: int, dtype: torch.dtype, device: torch.device) -> ReadTensor:
    return lambda name, shape: torch.empty(shape, dtype=dtype, device=device)


def _plan_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is planned by numbers that the host has, which fake tensors have not."""
    spans, plan = Runner._spans, TritonKernels.plan

    def real_spans(*args: Any) -> Spans:
        with _disable_current_modes():
            return spans(*args)

    def real_plan(self: TritonKernels, found: Spans, cache: Tensor, windows: Any) -> LaunchPlan:
        here = SimpleNamespace(
            shape=cache.shape, device=torch.device("cpu"), element_size=cache.element_size
        )
        with _disable_current_modes():
            real = plan(self, found, here, windows)  # type: ignore[arg-type]
        tables, lengths, tiles = (
            _pinned(part).to(cache.device, non_blocking=True)
            for part in (real.tables, real.lengths, real.tiles)
        )
        return LaunchPlan(tables, lengths, tiles, real.splits)

    monkeypatch.setattr(Runner, "_spans", real_spans)
    monkeypatch.setattr(TritonKernels, "plan", real_plan)
