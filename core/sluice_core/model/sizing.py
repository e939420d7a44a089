"""How many sequences fit: the memory arithmetic, shared by operator and worker.

Pure and standard library only. The operator calls it before any pod exists. The worker calls it
before it loads and again with measured bytes. So both give the same number and the same sentence.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from .architecture import DTYPE_BYTES as DTYPE_BYTES
from .architecture import HEAD as HEAD
from .architecture import LOADED_BITS as LOADED_BITS
from .architecture import ModelShape as ModelShape
from .architecture import SizingError as SizingError
from .architecture import bytes_saved as bytes_saved
from .architecture import names_dtype as names_dtype
from .architecture import resolve_dtype as resolve_dtype
from .architecture import weights_bytes as weights_bytes
from .parallel import COLLECTIVE_BYTES, ONE_GPU, Layout, Rank, ranks
from .parallel import Indivisible as Indivisible

MIB = 1 << 20
GIB = 1 << 30

DEFAULT_BATCHED_TOKENS = 2048
"""Tokens of one step; vLLM's default for servers on all but the largest GPUs."""
DEFAULT_BLOCK_SIZE: Mapping[str, int] = {"cpu": 64, "cuda": 16}
"""Tokens of one block of the KV cache."""
MAX_CEILING = 256
"""Ceiling when the user names none: vLLM's default for all but the largest GPUs."""
ENGINE_RESERVE_BYTES = 540 * MIB
"""Interpreter and torch of the engine process, resident with torch 2.15."""
BODIES_BYTES = 64 * MIB
"""All requests' bodies and all answers in the API process."""
READING_BYTES = 96 * MIB
"""The process that reads large bodies beside it. In the same turn, and after that, their texts are
tokenised, which takes less."""
API_BYTES = 90 * MIB + BODIES_BYTES + READING_BYTES
"""The API process and all that clients may make it take; 90 MiB are resident without any."""
CPU_RESERVE_BYTES = ENGINE_RESERVE_BYTES + API_BYTES
CONTEXT_BYTES = 500 * MIB
"""Bytes that CUDA takes on a GPU before the first tensor (about that on Hopper)."""
WORKSPACE_BYTES: Mapping[str, int] = {"cpu": 32 * MIB, "cuda": CONTEXT_BYTES + 140 * MIB}
"""GEMM scratch and allocator slack; on CUDA also the context."""
HOST_BYTES = 3 * GIB
"""Host memory in bytes beside a GPU: both processes as on a CPU, and 2 GiB for CUDA. The 2 GiB
(libraries, context, kernels' code) are assumed: no GPU has been measured yet."""
MAX_GATHER_BYTES = 16 * MIB
"""Pages that plain attention brings together at once, for a group of decodes.

From 32 MiB on, glibc takes fresh memory from the system for each, at 1.5 GB/s (measured).
"""
FULL_BATCH_SPLITS = 8
"""Parts of a context whose results decoding on a GPU keeps until they are joined, in a full batch.
"""
MAX_SCORES_BYTES = 16 * MIB
"""Float32 scores that attention with a soft cap writes out at once."""
MOST_UTILIZATION = 0.95
"""Largest utilization that advice names: allocators and the machine take some memory as well."""
DEFAULT_MEAN_LENGTH = 1024
"""Mean length (prompt and output) assumed before any traffic, at most half of max_model_len."""
MAX_DIMS = 8
"""Most dimensions of a tensor; a model's tensors have two, a convolution's four."""
MOST_BYTES = 1 << 60
"""Status and metrics hold 64 bits; no model is near it."""
ADVISED_TENSOR = (2, 4, 8)
"""GPUs to a stage that advice names: those of one machine."""
STATISTICAL_Z = 2.326
"""P99 of a normal: the pool overflows, and preempts, in at most 1 % of the moments."""

# Bits of the dtypes that safetensors 0.8 names; only floating ones change with the run's dtype.
_HEADER_FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_HEADER_OTHER_BITS = {
    "C64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8,
    "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_HEADER_BITS = {**_HEADER_FLOAT_BITS, **_HEADER_OTHER_BITS}
_AS_STORED = re.compile(r"scale|zero|g_idx|absmax|quant_map|quant_state")
"""In the names of tensors beside quantised weights, which engines keep in their own dtype."""


def safetensors_header_bytes(
    header: Mapping[str, object], dtype_bytes: int | None, *, quantised: bool = False
) -> int:
    """Bytes of the tensors in one safetensors file's JSON header.

    `dtype_bytes`: bytes per element after conversion of floating tensors; None keeps each as it is.
    `quantised`: scales, zeros and indices of groups are kept too, and what is kept counts by its
    place in the file. Raises SizingError where the header is not one.
    """
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            is_kept = quantised and _AS_STORED.search(name)
            wanted = None if is_kept else dtype_bytes
            stored = _place_bytes(entry, wanted) if quantised else None
            total += _tensor_bytes(name, entry, wanted) if stored is None else stored
    return total


def _place_bytes(entry: object, wanted: int | None) -> int | None:
    """Bytes of a tensor's place in the file; None if it has no place, or is converted."""
    if not isinstance(entry, Mapping) or (wanted and entry.get("dtype") in _HEADER_FLOAT_BITS):
        return None
    place = entry.get("data_offsets")
    ends = [end for end in place if type(end) is int] if isinstance(place, list) else []
    return ends[1] - ends[0] if len(ends) == 2 and 0 <= ends[0] <= ends[1] <= MOST_BYTES else None


def _tensor_bytes(name: str, entry: object, dtype_bytes: int | None) -> int:
    dtype = entry.get("dtype") if isinstance(entry, Mapping) else None
    dims = entry.get("shape") if isinstance(entry, Mapping) else None
    if not isinstance(dtype, str) or dtype not in _HEADER_BITS or not isinstance(dims, list):
        raise SizingError(f"tensor {name[:128]} has no known dtype and shape.")
    # A product of many dims takes a time that grows with the square of their number.
    if len(dims) > MAX_DIMS or not all(
        isinstance(dim, int) and 0 <= dim <= 1 << 40 for dim in dims
    ):
        raise SizingError(f"tensor {name[:128]} has an impossible shape.")
    bits = _HEADER_BITS[dtype]
    if dtype_bytes is not None and dtype in _HEADER_FLOAT_BITS:
        bits = 8 * dtype_bytes
    return -(-math.prod(dims) * bits // 8)  # elements of under a byte are packed


def kv_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """Bytes of keys and values of one token.

    All layers share one block table, so each keeps every token. A layer with a sliding window
    reads less but holds no less.
    """
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype_bytes


def activation_bytes(
    shape: ModelShape,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    dtype_bytes: int,
    *,
    in_a_row: bool = False,
) -> int:
    """Peak bytes of one step: the wider of attention and MLP per token, and the sampled logits.

    A row of logits has three copies: the model's dtype, float32, and one for sampling.
    in_a_row: all layers share one scratch, in which a gate is never written out.
    """
    hidden, head_dim = shape.hidden_size, shape.head_dim
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    logits = max_num_seqs * shape.vocab_size * (8 + dtype_bytes)
    if in_a_row:
        # Residual stream, what is added to it, and the scratch behind a row's norm.
        widest = max(qkv + shape.num_heads * head_dim, shape.intermediate_size)
        return max_num_batched_tokens * dtype_bytes * (3 * hidden + widest) + logits
    attention = 2 * qkv + shape.num_heads * head_dim
    # Residual stream, its normalised copy and one float32 copy inside the norm (Gemma: two).
    norm = dtype_bytes * 2 * hidden + (8 if shape.family.gemma else 4) * hidden
    per_token = norm + max(dtype_bytes * attention, _mlp_bytes(shape, dtype_bytes))
    return max_num_batched_tokens * per_token + logits


def _mlp_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Peak bytes per token of the widest MLP.

    Experts run one after another, and a token goes to each at most once. Beside the running expert
    lie its input rows, their result, the sum, and the router's output.
    """
    dense = dtype_bytes * 3 * shape.intermediate_size
    if shape.experts is None:
        return dense
    router = 8 * shape.experts.count + 24 * shape.experts.per_token
    expert = dtype_bytes * 3 * (shape.experts.width + shape.hidden_size) + router
    has_dense = len(shape.experts.layers) < shape.num_layers
    return max(dense, expert) if has_dense else expert


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of one pod (CPU) or device (CUDA) by use, and how many sequences they carry.

    `guaranteed_seqs`: sequences of max_model_len. `stage`: that of the device, of several which
    `layout` tells.
    """

    total_bytes: int
    utilization: float
    weights_bytes: int
    activation_bytes: int
    workspace_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    ceiling: int
    device: Literal["cpu", "cuda"] = "cpu"
    layout: Layout = ONE_GPU
    stage: int = 1

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def guaranteed_seqs(self) -> int:
        return self.num_blocks // blocks_for(self.max_model_len, self.block_size)

    @property
    def fits(self) -> bool:
        """True if at least one sequence of max_model_len fits."""
        return self.ceiling >= 1

    @property
    def usable_bytes(self) -> int:
        """Bytes that the plan may use: utilization x total."""
        return int(self.utilization * self.total_bytes)

    @property
    def fixed_bytes(self) -> int:
        """All that is there before the first KV block."""
        return (
            self.weights_bytes + self.activation_bytes + self.workspace_bytes + self.reserve_bytes
        )

    def as_dict(self) -> dict[str, int]:
        """Bytes by class; the keys of `MemoryReport`."""
        return {
            "total_bytes": self.total_bytes,
            "weights_bytes": self.weights_bytes,
            "activation_bytes": self.activation_bytes,
            "workspace_bytes": self.workspace_bytes,
            "reserve_bytes": self.reserve_bytes,
            "kv_cache_bytes": self.kv_tokens * self.kv_bytes_per_token,
        }

    def explain(self) -> str:
        """The arithmetic in one sentence, of the GPU that has least room."""
        left = self.usable_bytes - self.fixed_bytes
        step = "activations" if self.kv_bytes_per_token else "a step"
        sizes = (
            f"{self.layout.named(self.stage)}{self.utilization:g} x {_size(self.total_bytes)} - "
            f"weights {_size(self.weights_bytes)} - {step} {_size(self.activation_bytes)} - "
            f"workspace {_size(self.workspace_bytes)} - reserve {_size(self.reserve_bytes)} = "
            f"{_size(left)}"
        )
        if not self.kv_bytes_per_token:
            return f"{sizes}; no KV cache is needed."
        return (
            f"{sizes} for the KV cache: {self.num_blocks} blocks of {self.block_size} tokens "
            f"({_size(self.kv_bytes_per_token)} per token), {self.guaranteed_seqs} sequences of "
            f"{self.max_model_len} tokens."
        )


def most_sequences(max_num_seqs: int | None, max_num_batched_tokens: int) -> int:
    """The requested number. A step decodes all running sequences, so its budget is a bound too."""
    return min(max_num_seqs or MAX_CEILING, max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What a plan is asked for.

    `gathers`: attention gathers pages and writes masks out, as plain torch does. None until a
    worker has chosen its kernels: assumed on a CPU, not on a GPU, as Triton's do not gather.
    `measured_activation_bytes`: used if larger than the formula's. `in_a_row`: the kernels run
    layers in one scratch. `num_blocks`: a number that the user fixed. `layout`: the GPUs that run
    the model together, of `total_bytes` each; `weights_bytes` is the whole model's.
    `kv_dtype_bytes`: of keys and values, where it is not `dtype_bytes`.
    """

    total_bytes: int
    utilization: float
    weights_bytes: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    dtype_bytes: int
    max_num_seqs: int | None
    device: Literal["cpu", "cuda"]
    gathers: bool | None = None
    measured_activation_bytes: int = 0
    in_a_row: bool = False
    num_blocks: int | None = None
    layout: Layout = ONE_GPU
    kv_dtype_bytes: int | None = None

    @property
    def num_seqs(self) -> int:
        """The most sequences that are asked for."""
        return most_sequences(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are left to the rest of the machine, and to what several GPUs exchange."""
        together = COLLECTIVE_BYTES if self.layout.num_gpus > 1 else 0
        return CPU_RESERVE_BYTES if self.device == "cpu" else together


def plan_memory(shape: ModelShape, asked: MemoryRequest) -> MemoryPlan:
    """Plan the memory. A model that does not fit is a plan with `fits` False, not an error.

    Of several GPUs the plan is that of the one with least room: each keeps as many blocks.
    Raises SizingError if no memory could help: impossible numbers, or max_model_len over the
    model's own. Raises Indivisible where the GPUs cannot divide the model.
    """
    _check_request(shape, asked)
    plans = [_plan_rank(rank, asked) for rank in ranks(shape, asked.layout)]
    return min(plans, key=lambda plan: (plan.fits, plan.num_blocks * plan.fits, -needed(plan)))


def fewest_gpus(shape: ModelShape, asked: MemoryRequest) -> int | None:
    """The smallest power of two of GPUs with which the model would fit by more tensor parallelism,
    in the same stages; None if none of ADVISED_TENSOR a stage is enough."""
    for tensor in ADVISED_TENSOR if asked.device == "cuda" else ():
        layout = replace(asked.layout, tensor=tensor)
        with suppress(Indivisible):
            fits = plan_memory(shape, replace(asked, layout=layout)).fits
            if fits and tensor > asked.layout.tensor:
                return layout.num_gpus
    return None


def _plan_rank(rank: Rank, asked: MemoryRequest) -> MemoryPlan:
    shape, kv_dtype_bytes = rank.shape, asked.kv_dtype_bytes or asked.dtype_bytes
    activations = _activation_bytes(shape, asked)
    per_token = kv_bytes_per_token(shape, kv_dtype_bytes)
    workspace = _workspace_bytes(shape, asked, per_token)
    weights = rank.weights_bytes(asked.weights_bytes, asked.dtype_bytes)
    left = int(asked.utilization * asked.total_bytes) - weights
    left -= activations + workspace + asked.reserve_bytes
    num_blocks, length = asked.num_blocks, asked.max_model_len
    if num_blocks is None:
        num_blocks = max(left // (per_token * asked.block_size), 0)
    guaranteed = num_blocks // blocks_for(length, asked.block_size)
    carried = max(guaranteed, _usual_sequences(num_blocks, asked.block_size, length))
    # A number of blocks that a person fixed takes what it takes.
    fits = guaranteed >= 1 and num_blocks * asked.block_size * per_token <= left
    return _bounded(
        MemoryPlan(
            total_bytes=asked.total_bytes,
            utilization=asked.utilization,
            weights_bytes=weights,
            activation_bytes=activations,
            workspace_bytes=workspace,
            reserve_bytes=asked.reserve_bytes,
            kv_bytes_per_token=per_token,
            block_size=asked.block_size,
            num_blocks=num_blocks,
            max_model_len=length,
            ceiling=min(carried, asked.num_seqs) if fits else 0,
            device=asked.device,
            layout=asked.layout,
            stage=rank.stage,
        )
    )


def needed(plan: MemoryPlan) -> int:
    """Bytes that one sequence of max_model_len needs, or the blocks that a person fixed."""
    num_blocks = max(blocks_for(plan.max_model_len, plan.block_size), plan.num_blocks)
    return plan.fixed_bytes + num_blocks * plan.block_size * plan.kv_bytes_per_token


def _activation_bytes(shape: ModelShape, asked: MemoryRequest) -> int:
    sizes = asked.max_num_batched_tokens, asked.num_seqs, asked.dtype_bytes
    formula = activation_bytes(shape, *sizes, in_a_row=asked.in_a_row)
    return max(formula, asked.measured_activation_bytes)


def _workspace_bytes(shape: ModelShape, asked: MemoryRequest, per_token: int) -> int:
    workspace = WORKSPACE_BYTES[asked.device]
    if asked.device == "cpu" if asked.gathers is None else asked.gathers:
        return workspace + _attention_bytes(shape, asked, per_token)
    if asked.device == "cuda":
        splits = FULL_BATCH_SPLITS * (shape.head_dim + 2) * 4
        workspace += asked.num_seqs * shape.num_heads * splits
    return workspace


def _bounded(plan: MemoryPlan) -> MemoryPlan:
    if max(map(abs, plan.as_dict().values())) > MOST_BYTES:
        raise SizingError(f"config.json makes sizes of over {MOST_BYTES >> 50} PiB.")
    return plan


def host_memory_bytes(shape: ModelShape, dtype_bytes: int, num_gpus: int = 1) -> int:
    """Memory of the host that loading onto a pod's GPUs takes, in whole GiB.

    Files are mapped, so the kernel can reclaim pages that were read. One tensor at a time goes to
    the device, perhaps through a copy in another dtype. So beside HOST_BYTES only the largest
    tensor counts, however many there are: the embeddings, or an MLP's matrix. Each GPU has its own
    process, which takes all of that.
    """
    widest = max(shape.vocab_size, shape.intermediate_size)
    each = HOST_BYTES + widest * shape.hidden_size * dtype_bytes
    return math.ceil(num_gpus * each / GIB) * GIB


def _check_request(shape: ModelShape, asked: MemoryRequest) -> None:
    if not 0 < asked.utilization <= 1:
        raise SizingError(f"memory utilization {asked.utilization} is not over 0 and at most 1.")
    if asked.block_size < 1 or asked.max_num_batched_tokens < 1:
        raise SizingError("block_size and max_num_batched_tokens must be at least 1.")
    if not 1 <= asked.max_model_len <= shape.max_position:
        raise SizingError(
            f"max_model_len {asked.max_model_len} is not between 1 and the model's "
            f"max_position_embeddings {shape.max_position} (its scaling counted)."
        )


def _attention_bytes(shape: ModelShape, asked: MemoryRequest, bytes_per_token: int) -> int:
    """Scratch of one layer's attention: gathered pages, and masks of a chunk over its past."""
    length = asked.max_model_len
    chunk = min(asked.max_num_batched_tokens, length)
    longest = length * (bytes_per_token // shape.num_layers)
    masks = len(shape.windows) * chunk * length * asked.dtype_bytes
    scores = 2 * MAX_SCORES_BYTES if shape.attention_softcap else 0
    return max(MAX_GATHER_BYTES, longest) + masks + scores


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def _usual_sequences(num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Sequences of usual lengths: a ceiling is fixed at start, and must not move with traffic."""
    usual = min(max_model_len / 2, DEFAULT_MEAN_LENGTH)
    mean = max(usual, 1.0) + (block_size - 1) / 2  # the last block of a sequence is half empty
    return carried_sequences(num_blocks * block_size, mean, usual / 2)


def carried_sequences(kv_tokens: int, mean: float, sigma: float) -> int:
    """Largest N with N mu + z sigma sqrt(N) <= kv_tokens, solved for sqrt(N). N sequences of this
    mean and deviation (tokens) outgrow the KV memory at most 1 % of the time."""
    mean, z_sigma = max(mean, 1.0), STATISTICAL_Z * max(sigma, 0.0)
    root = math.sqrt(z_sigma**2 + 4 * mean * kv_tokens)
    return int(((root - z_sigma) / (2 * mean)) ** 2)


def overflow_share(num_seqs: int, kv_tokens: int, mean: float, sigma: float) -> float:
    """Share of the time in which `num_seqs` such sequences outgrow the KV memory, so that one is
    preempted. The sum of their lengths is assumed to be normal."""
    spare, spread = kv_tokens - num_seqs * mean, sigma * math.sqrt(num_seqs)
    if spread <= 0:
        return float(spare < 0)
    return 0.5 * math.erfc(spare / spread / math.sqrt(2))


def advice(plan: MemoryPlan, shape: ModelShape | None = None, num_gpus: int | None = None) -> str:
    """The change that would make a plan fit, in one sentence with numbers; empty if it fits.
    `shape`: None where it is no ModelShape. `num_gpus`: with which it would fit (`fewest_gpus`)."""
    if plan.fits:
        return ""
    if not plan.kv_bytes_per_token:
        more = [*_larger_share(plan, plan.fixed_bytes), _more_memory(plan, plan.fixed_bytes)]
        return f"It would fit with {' or '.join(more)} or with a smaller max_num_batched_tokens."
    least = blocks_for(plan.max_model_len, plan.block_size)
    left = (plan.usable_bytes - plan.fixed_bytes) // plan.kv_bytes_per_token // plan.block_size
    if plan.num_blocks < left:  # a person fixed their number: more memory would bring no more
        enough = [f"{least} blocks"] if least <= left else []
        return f"It would fit with {' or '.join([*_shorter_window(plan), *enough])}."
    enough_bytes = needed(plan)
    options = _smaller_dtype(plan, shape, enough_bytes - plan.fixed_bytes) if shape else []
    options += _shorter_window(plan)
    options += [f"{left} blocks"] if plan.num_blocks >= least and left >= least else []
    options += _larger_share(plan, enough_bytes)
    options += [f"{num_gpus} GPUs"] if num_gpus else []
    options += [_more_memory(plan, enough_bytes)]
    return f"It would fit with {' or '.join(options)}."


def _larger_share(plan: MemoryPlan, num_bytes: int) -> list[str]:
    share = math.ceil(100 * num_bytes / plan.total_bytes) / 100
    return [f"gpu_memory_utilization {share:g}"] if share <= MOST_UTILIZATION else []


def _smaller_dtype(plan: MemoryPlan, shape: ModelShape, kv_bytes: int) -> list[str]:
    if plan.kv_bytes_per_token < kv_bytes_per_token(shape, 4):
        return []
    halved = plan.weights_bytes + plan.activation_bytes + kv_bytes
    fixed = plan.workspace_bytes + plan.reserve_bytes
    return ["dtype bfloat16"] if halved / 2 + fixed <= plan.usable_bytes else []


def _shorter_window(plan: MemoryPlan) -> list[str]:
    fits = 0 < plan.kv_tokens < plan.max_model_len
    return [f"max_model_len {plan.kv_tokens}"] if fits else []


def _more_memory(plan: MemoryPlan, num_bytes: int) -> str:
    total = math.ceil(num_bytes / plan.utilization)
    if plan.device == "cpu":
        return f"{_at_least(total)} of memory instead of {_size(plan.total_bytes)}"
    return f"{'a GPU' if plan.layout.num_gpus == 1 else 'GPUs'} of {_at_least(total)}"


def _size(num_bytes: int) -> str:
    """`num_bytes` for a reader, in the unit that fits it."""
    unit, divisor = _unit(num_bytes)
    return f"{num_bytes / divisor:.1f} {unit}" if divisor > 1 else f"{num_bytes} B"


def _at_least(num_bytes: int) -> str:
    """The same, rounded up."""
    unit, divisor = _unit(num_bytes)
    return f"{math.ceil(10 * num_bytes / divisor) / 10:.1f} {unit}"


def _unit(num_bytes: int) -> tuple[str, int]:
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10))
    return next((unit for unit in units if abs(num_bytes) >= unit[1]), ("B", 1))
