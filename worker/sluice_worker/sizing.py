"""How many sequences fit: the memory arithmetic, shared by operator and worker.

Pure and standard library only. The operator calls it before any pod exists, the worker before it
loads and again with measured bytes, so both give the same number and the same sentence.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
GIB = 1 << 30

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
SUPPORTED_ARCHITECTURES = frozenset({"LlamaForCausalLM"})
MAX_CEILING = 256
"""Ceiling when the user names none: vLLM's default for all but the largest GPUs."""
CPU_RESERVE_BYTES = 700 * MIB
"""Interpreter, torch and the API process: 540 + 90 MiB resident with torch 2.15, and slack."""
WORKSPACE_BYTES: Mapping[str, int] = {"cpu": 32 * MIB, "cuda": 640 * MIB}
"""GEMM scratch and allocator slack; on CUDA also the context (about 500 MiB on Hopper)."""
MAX_GATHER_BYTES = 32 * MIB
"""Pages that attention brings together at once, for a group of decodes."""
DEFAULT_MEAN_LENGTH = 1024
"""Mean length (prompt and output) assumed before any traffic, at most half of max_model_len."""
STATISTICAL_Z = 2.326
"""P99 of a normal: the pool overflows, and preempts, in at most 1 % of the moments."""

# Bits of the dtypes that safetensors 0.8 names; only floating ones change with the run's dtype.
_HEADER_FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_HEADER_OTHER_BITS = {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16}
_HEADER_BITS = {
    **_HEADER_FLOAT_BITS,
    **_HEADER_OTHER_BITS,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
}


class SizingError(ValueError):
    """The model or the numbers asked for cannot be sized; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's config.json decides its memory. `dtype`: that of the checkpoint."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tie_word_embeddings: bool
    sliding_window: int | None
    dtype: str

    @staticmethod
    def from_config(config: Mapping[str, object]) -> "ModelShape":
        """The shape in a Hugging Face config.json; SizingError if it is missing or unsupported."""
        architecture = _architecture(config)
        hidden_size = _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise SizingError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}."
            )
        return ModelShape(
            architecture=architecture,
            num_layers=_positive(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_positive(config, "head_dim", max(hidden_size // num_heads, 1)),
            intermediate_size=_positive(config, "intermediate_size"),
            vocab_size=_positive(config, "vocab_size"),
            max_position=_positive(config, "max_position_embeddings"),
            tie_word_embeddings=config.get("tie_word_embeddings") is True,
            sliding_window=_sliding_window(config),
            dtype=_dtype(config),
        )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise SizingError("config.json: architectures must be a list of one name.")
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise SizingError(
            f"config.json: architecture {names[0][:64]} is not supported; supported: "
            f"{', '.join(sorted(SUPPORTED_ARCHITECTURES))}."
        )
    return names[0]


def _positive(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise SizingError(f"config.json: {name} is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise SizingError(f"config.json: {name} must be a positive integer.")
    return value


def _sliding_window(config: Mapping[str, object]) -> int | None:
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None
    return _positive(config, "sliding_window")


def _dtype(config: Mapping[str, object]) -> str:
    # transformers 5 writes `dtype`; before that it was `torch_dtype`.
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPE_BYTES:
        raise SizingError(f"config.json: dtype must be one of {', '.join(sorted(DTYPE_BYTES))}.")
    return name.removeprefix("torch.")


def resolve_dtype(requested: str, shape: ModelShape) -> str:
    """The dtype to run with: `requested`, or the checkpoint's own for "auto"."""
    name = shape.dtype if requested == "auto" else requested
    if name not in DTYPE_BYTES:
        raise SizingError(
            f"dtype {name[:32]} is not one of auto, {', '.join(sorted(DTYPE_BYTES))}."
        )
    return name


def safetensors_header_bytes(header: Mapping[str, object], dtype_bytes: int | None) -> int:
    """Bytes of the tensors in one safetensors file's JSON header.

    `dtype_bytes`: bytes per element after conversion of floating tensors; None keeps each as it is.
    Raises SizingError where the header is not one.
    """
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            total += _tensor_bytes(name, entry, dtype_bytes)
    return total


def _tensor_bytes(name: str, entry: object, dtype_bytes: int | None) -> int:
    dtype = entry.get("dtype") if isinstance(entry, Mapping) else None
    dims = entry.get("shape") if isinstance(entry, Mapping) else None
    if not isinstance(dtype, str) or dtype not in _HEADER_BITS or not isinstance(dims, list):
        raise SizingError(f"safetensors header: tensor {name[:128]} has no known dtype and shape.")
    if not all(isinstance(dim, int) and 0 <= dim <= 1 << 40 for dim in dims):
        raise SizingError(f"safetensors header: tensor {name[:128]} has an impossible shape.")
    bits = _HEADER_BITS[dtype]
    if dtype_bytes is not None and dtype in _HEADER_FLOAT_BITS:
        bits = 8 * dtype_bytes
    return math.prod(dims) * bits // 8


def weights_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Bytes of a model's weights by its shape alone, for random weights that no file holds."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    attention = hidden * head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    layer = attention + 3 * hidden * shape.intermediate_size + 2 * hidden
    embeddings = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    return dtype_bytes * (shape.num_layers * layer + embeddings + hidden)


def kv_bytes_per_token(shape: ModelShape, dtype_bytes: int, tensor_parallel: int = 1) -> int:
    """Bytes of keys and values of one token on one rank."""
    if tensor_parallel < 1 or shape.num_kv_heads % tensor_parallel:
        raise SizingError(
            f"tensor_parallel {tensor_parallel} does not divide the model's "
            f"{shape.num_kv_heads} key/value heads."
        )
    return (
        2
        * shape.num_layers
        * (shape.num_kv_heads // tensor_parallel)
        * (shape.head_dim * dtype_bytes)
    )


def activation_bytes(
    shape: ModelShape, max_num_batched_tokens: int, max_num_seqs: int, dtype_bytes: int
) -> int:
    """Peak bytes of one step: the wider of attention and MLP per token, and the sampled logits.

    Logits: one float32 copy and one for sampling of each row, after one in the model's dtype.
    """
    hidden, head_dim = shape.hidden_size, shape.head_dim
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    attention = 2 * qkv + shape.num_heads * head_dim
    mlp = 3 * shape.intermediate_size
    # Residual stream, its normalised copy and one float32 copy inside the norm.
    per_token = dtype_bytes * (2 * hidden + max(attention, mlp)) + 4 * hidden
    logits = max_num_seqs * shape.vocab_size * (8 + dtype_bytes)
    return max_num_batched_tokens * per_token + logits


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes of one pod (CPU) or device (CUDA) go, and how many sequences that carries.

    `guaranteed_seqs`: sequences of max_model_len. `statistical_seqs`: of the lengths observed.
    """

    total_bytes: int
    utilization: float
    weights_bytes: int
    activation_bytes: int
    workspace_bytes: int
    reserve_bytes: int
    kv_bytes_per_token: int
    block_size: int
    kv_tokens: int
    num_blocks: int
    max_model_len: int
    guaranteed_seqs: int
    statistical_seqs: int
    ceiling: int
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of max_model_len fits."""
        return self.guaranteed_seqs >= 1

    @property
    def usable_bytes(self) -> int:
        """What the plan may use: utilization x total."""
        return int(self.utilization * self.total_bytes)

    @property
    def fixed_bytes(self) -> int:
        """All that is there before the first KV block."""
        return (
            self.weights_bytes + self.activation_bytes + self.workspace_bytes + self.reserve_bytes
        )

    def as_dict(self) -> dict[str, int]:
        """Bytes by class; the keys of `MemoryReport.planned` and `.measured`."""
        return {
            "total_bytes": self.total_bytes,
            "weights_bytes": self.weights_bytes,
            "activation_bytes": self.activation_bytes,
            "workspace_bytes": self.workspace_bytes,
            "reserve_bytes": self.reserve_bytes,
            "kv_cache_bytes": self.kv_tokens * self.kv_bytes_per_token,
        }

    def explain(self) -> str:
        """The arithmetic in one sentence."""
        left = self.usable_bytes - self.fixed_bytes
        return (
            f"{self.utilization:g} x {_size(self.total_bytes)} - weights "
            f"{_size(self.weights_bytes)} - activations {_size(self.activation_bytes)} - workspace "
            f"{_size(self.workspace_bytes)} - reserve {_size(self.reserve_bytes)} = {_size(left)} "
            f"for the KV cache: {self.num_blocks} blocks of {self.block_size} tokens "
            f"({_size(self.kv_bytes_per_token)} per token), {self.guaranteed_seqs} sequences of "
            f"{self.max_model_len} tokens."
        )


def plan_memory(
    shape: ModelShape,
    *,
    total_bytes: int,
    utilization: float,
    weights_bytes: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    dtype_bytes: int,
    max_num_seqs: int | None,
    lengths: tuple[float, float] | None,
    device: Literal["cpu", "cuda"],
    tensor_parallel: int = 1,
    activation_bytes: int | None = None,
    num_blocks: int | None = None,
) -> MemoryPlan:
    """The plan for one rank. A model that does not fit is a plan with `fits` False, not an error.

    `lengths`: mean and standard deviation of observed lengths in tokens, None before any traffic.
    `activation_bytes`: measured, in place of the formula's. `num_blocks`: fixed by a person.
    Raises SizingError where no memory could help: impossible numbers, or max_model_len over the
    model's own.
    """
    _check_request(shape, utilization, max_num_batched_tokens, max_model_len, block_size)
    if activation_bytes is None:
        activation_bytes = _activations(
            shape, max_num_batched_tokens, max_num_seqs or MAX_CEILING, dtype_bytes
        )
    reserve = CPU_RESERVE_BYTES if device == "cpu" else 0
    per_token = kv_bytes_per_token(shape, dtype_bytes, tensor_parallel)
    chunk = min(max_num_batched_tokens, max_model_len)
    workspace = WORKSPACE_BYTES[device] + _attention_bytes(
        chunk, max_model_len, dtype_bytes, per_token // shape.num_layers
    )
    usable = int(utilization * total_bytes)
    left = usable - weights_bytes - activation_bytes - workspace - reserve
    if num_blocks is None:
        num_blocks = max(left // (per_token * block_size), 0)
    guaranteed = num_blocks // blocks_for(max_model_len, block_size)
    statistical = max(guaranteed, _statistical_seqs(num_blocks, block_size, max_model_len, lengths))
    ceiling = min(statistical, max_num_seqs or MAX_CEILING) if guaranteed else 0
    return MemoryPlan(
        total_bytes=total_bytes,
        utilization=utilization,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        workspace_bytes=workspace,
        reserve_bytes=reserve,
        kv_bytes_per_token=per_token,
        block_size=block_size,
        kv_tokens=num_blocks * block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        guaranteed_seqs=guaranteed,
        statistical_seqs=statistical,
        ceiling=ceiling,
        device=device,
    )


def _check_request(
    shape: ModelShape, utilization: float, budget: int, max_model_len: int, block_size: int
) -> None:
    if not 0 < utilization <= 1:
        raise SizingError(f"memory utilization {utilization} is not over 0 and at most 1.")
    if block_size < 1 or budget < 1:
        raise SizingError("block_size and max_num_batched_tokens must be at least 1.")
    if not 1 <= max_model_len <= shape.max_position:
        raise SizingError(
            f"max_model_len {max_model_len} is not between 1 and the model's "
            f"max_position_embeddings {shape.max_position}."
        )


_activations = activation_bytes


def _attention_bytes(
    chunk: int, max_model_len: int, dtype_bytes: int, layer_kv_bytes_per_token: int
) -> int:
    """Scratch of one layer's attention: gathered pages, and the mask of a chunk over its past."""
    longest = max_model_len * layer_kv_bytes_per_token
    return max(MAX_GATHER_BYTES, longest) + chunk * max_model_len * dtype_bytes


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def _statistical_seqs(
    num_blocks: int, block_size: int, max_model_len: int, lengths: tuple[float, float] | None
) -> int:
    """Largest N with N mu + z sigma sqrt(N) <= kv_tokens, solved for sqrt(N)."""
    default = min(max_model_len / 2, DEFAULT_MEAN_LENGTH)
    mean, sigma = lengths if lengths else (default, default / 2)
    mean = max(mean, 1.0) + (block_size - 1) / 2  # the last block of a sequence is half empty
    z_sigma = STATISTICAL_Z * max(sigma, 0.0)
    root = math.sqrt(z_sigma**2 + 4 * mean * num_blocks * block_size)
    return int(((root - z_sigma) / (2 * mean)) ** 2)


def advice(plan: MemoryPlan, shape: ModelShape) -> str:
    """What would make a plan fit, in one sentence with numbers; empty if it fits."""
    if plan.fits:
        return ""
    sequence = blocks_for(plan.max_model_len, plan.block_size) * plan.block_size
    needed = math.ceil((plan.fixed_bytes + sequence * plan.kv_bytes_per_token) / plan.utilization)
    options = [*_smaller_dtype(plan, shape), *_shorter_window(plan), _more_memory(plan, needed)]
    return f"It would fit with {' or '.join(options)}."


def _smaller_dtype(plan: MemoryPlan, shape: ModelShape) -> list[str]:
    if plan.kv_bytes_per_token < kv_bytes_per_token(shape, 4):
        return []
    sequence = blocks_for(plan.max_model_len, plan.block_size) * plan.block_size
    halved = plan.weights_bytes + plan.activation_bytes + sequence * plan.kv_bytes_per_token
    fixed = plan.workspace_bytes + plan.reserve_bytes
    return ["dtype bfloat16"] if halved / 2 + fixed <= plan.usable_bytes else []


def _shorter_window(plan: MemoryPlan) -> list[str]:
    return [f"max_model_len {plan.kv_tokens}"] if plan.kv_tokens else []


def _more_memory(plan: MemoryPlan, needed: int) -> str:
    if plan.device == "cpu":
        return f"{_size(needed)} of memory instead of {_size(plan.total_bytes)}"
    # Each further rank brings its own workspace; weights and KV are divided between them.
    shared = needed * plan.utilization - plan.workspace_bytes
    gpus = math.ceil(shared / max(plan.usable_bytes - plan.workspace_bytes, 1))
    return f"a GPU of {_size(needed)} (or {gpus} GPUs of {_size(plan.total_bytes)})"


def _size(num_bytes: int) -> str:
    """`num_bytes` for a reader, in the unit that fits it."""
    for unit, divisor in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if abs(num_bytes) >= divisor:
            return f"{num_bytes / divisor:.1f} {unit}"
    return f"{num_bytes} B"
