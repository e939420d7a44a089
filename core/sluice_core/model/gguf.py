"""A GGUF file's header: the sizes of its model, and how many slots of llama.cpp fit.

Pure but for the `Source` it reads, of whose files at most MAX_GGUF_BYTES: they are hostile input.
The layout is that of ggml's docs/gguf.md, blocks are those of its ggml-common.h.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError
from .architecture import MAX_LAYERS, MAX_NUMBER, SizingError
from .files import Source, refuse_pointer
from .sizing import MAX_DIMS, MIB, MOST_BYTES, WORKSPACE_BYTES, MemoryPlan, MemoryRequest

SUFFIX = ".gguf"
MAX_GGUF_BYTES = 16 << 20
"""Most bytes of one header. Its list of tokens takes most: 10 MiB with 256,000 tokens."""
SLOT_TOKENS = 4096
"""Context of a slot where nobody says."""
GGUF_RESERVE_BYTES = 256 * MIB
"""The server beside weights, cache and a step. Assumed: not measured yet."""
_BATCH_TOKENS = 512
"""Tokens that llama.cpp computes at once (`--ubatch-size`), with logits in float32 for each."""
_CHUNK_BYTES = 2 << 20
_MAX_ENTRIES = 1 << 16
"""Most tensors or values of one header; the largest models have 3,000."""
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?")))
_NUMBERS |= {10: "<Q", 11: "<q", 12: "<d"}
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),
}  # fmt: skip
"""By the number of a tensor's type: elements of a block, and its bytes (12 is Q4_K, 30 BF16)."""


@dataclass(frozen=True, slots=True)
class GgufShape:
    """Sizes of a model in GGUF files. `kv_elements`: keys and values of a token, of all layers, as
    if each kept every token. `has_windows`: some keep fewer."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    kv_elements: int
    num_elements: int
    weights_bytes: int
    has_windows: bool = False
    dtype: str = "float16"
    default_len: int = SLOT_TOKENS


def model_name(file: str) -> str:
    """The name of a file's model: the same for all its parts."""
    return _PART.sub("-parts", file)


def read_gguf(source: Source, names: Sequence[str]) -> GgufShape:
    """The shape in the headers of a model's files; CheckpointError, or SizingError."""
    most = source.max_headers
    if not 0 < len(names) <= most:
        raise CheckpointError(f"{source.title} has no GGUF model in 1 to {most} files.")
    values: dict[str, object] = {}
    num_elements = num_bytes = 0
    for name in names:
        header = _Header(source, name)
        values = {**header.values, **values}
        num_elements, num_bytes = num_elements + header.elements, num_bytes + header.num_bytes
    if num_bytes > MOST_BYTES:
        raise CheckpointError(f"{names[0]}: claims tensors of over {MOST_BYTES >> 50} PiB.")
    return _shape(names[0], values, num_elements, num_bytes)


def _shape(name: str, values: Mapping[str, object], elements: int, size: int) -> GgufShape:
    prefix = f"{values.get('general.architecture')}."
    own = {key.removeprefix(prefix): value for key, value in values.items()}
    if any(key.startswith(("ssm.", "wkv", "attention.kv_lora")) for key in own):
        raise SizingError(f"{name}: the cache of {prefix[:64]} is not of keys and values alone.")
    (num_layers,), (hidden,) = _ints(name, own, "block_count"), _ints(name, own, "embedding_length")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise SizingError(f"{name}: block_count is not from 1 to {MAX_LAYERS:,}.")
    heads = _ints(name, own, "attention.head_count", None, num_layers)
    kv_heads = _ints(name, own, "attention.head_count_kv", heads[0], num_layers)
    head_dim = hidden // max(heads[0], 1)
    (key_length,) = _ints(name, own, "attention.key_length", head_dim)
    (value_length,) = _ints(name, own, "attention.value_length", head_dim)
    tokens = own.get("tokenizer.ggml.tokens")
    (vocab_size,) = _ints(name, own, "vocab_size", len(tokens) if isinstance(tokens, range) else 0)
    return GgufShape(
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=max(_ints(name, own, "feed_forward_length", None, num_layers)),
        vocab_size=vocab_size,
        kv_elements=sum(kv_heads) * (key_length + value_length),
        num_elements=elements,
        weights_bytes=size,
        has_windows=bool(own.get("attention.sliding_window")),
    )


def _ints(
    name: str, own: Mapping[str, object], key: str, default: int | None = None, times: int = 1
) -> Sequence[int]:
    """A number for each of `times` layers, from a list of them or from one for all."""
    value = own.get(key, default)
    found = value if isinstance(value, list) else [value] * times
    numbers = [one for one in found if isinstance(one, int) and 0 <= one <= MAX_NUMBER]
    if len(numbers) != times or len(found) != times:
        raise SizingError(f"{name}: {key} is missing, or is not {times} whole numbers.")
    return numbers


class _Header:
    """One file's header. `values`: its metadata; of a list of texts, or a long one, the length.
    `elements`, `num_bytes`: of all its tensors."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        self._data, self._at = bytearray(), 0
        magic = self._take(4)
        refuse_pointer(bytes(self._data[:256]), name)
        version = self._number("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise CheckpointError(f"{name}: not a GGUF file of version 2 or 3.")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        if max(num_tensors, num_values) > _MAX_ENTRIES:
            raise CheckpointError(f"{name}: over {_MAX_ENTRIES:,} tensors or values.")
        self.values = {self._text(): self._value(self._number("<I")) for _ in range(num_values)}
        self.elements = self.num_bytes = 0
        for _ in range(num_tensors):
            self._add_tensor()

    def _add_tensor(self) -> None:
        title, num_dims = self._text()[:128], self._number("<I")
        if num_dims > MAX_DIMS:
            raise CheckpointError(f"{self._name}: tensor {title} has an impossible shape.")
        dims = [self._number("<Q") for _ in range(num_dims)]
        kind, _ = self._number("<I"), self._number("<Q")
        if kind not in _BLOCKS or max(dims, default=0) > 1 << 40:
            raise SizingError(f"{self._name}: tensor {title} has no known type and shape.")
        block, num_bytes = _BLOCKS[kind]
        self.elements += math.prod(dims)
        self.num_bytes += -(-math.prod(dims) // block) * num_bytes

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self._name}: a value of an unknown type.")
        inner, length = self._number("<I"), self._number("<Q")
        if inner == _STRING and length <= MAX_GGUF_BYTES:
            for _ in range(length):
                self._take(self._number("<Q"))
        elif inner in _NUMBERS:
            form = _NUMBERS[inner]
            data = self._take(length * struct.calcsize(form))
            if length <= MAX_LAYERS:
                return [number for (number,) in struct.iter_unpack(form, data)]
        else:  # also lists of lists, which nothing here needs
            raise CheckpointError(f"{self._name}: a list of an unknown type.")
        return range(length)

    def _text(self) -> str:
        return self._take(self._number("<Q")).decode(errors="replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, length: int) -> bytes:
        start, end = self._at, self._at + length
        if end > MAX_GGUF_BYTES:
            raise CheckpointError(f"{self._name}: a header of over {MAX_GGUF_BYTES >> 20} MiB.")
        while end > len(self._data):
            more = self._source.read(self._name, len(self._data), _CHUNK_BYTES)
            if not more:
                raise CheckpointError(f"{self._name}: truncated, or not a GGUF file.")
            self._data += more
        self._at = end
        return bytes(self._data[start:end])


def plan_gguf(shape: GgufShape, asked: MemoryRequest) -> MemoryPlan:
    """Plan the memory of llama.cpp, which reserves `max_model_len` tokens for each slot.

    Of several GPUs (`layout.pipeline`) each gets some of the layers; the plan is of the fullest.
    Raises SizingError if no memory could help.
    """
    if not 0 < asked.utilization <= 1 or asked.max_model_len < 1:
        raise SizingError("memory utilization or max_model_len is impossible.")
    layers = -(-shape.num_layers // asked.layout.pipeline)
    per_token = -(-shape.kv_elements * layers // shape.num_layers) * asked.dtype_bytes
    widths = shape.vocab_size + 4 * shape.hidden_size + 2 * shape.intermediate_size
    plan = MemoryPlan(
        total_bytes=asked.total_bytes,
        utilization=asked.utilization,
        weights_bytes=-(-shape.weights_bytes * layers // shape.num_layers),
        activation_bytes=4 * _BATCH_TOKENS * widths,
        workspace_bytes=WORKSPACE_BYTES[asked.device],
        reserve_bytes=GGUF_RESERVE_BYTES,
        kv_bytes_per_token=per_token,
        block_size=asked.max_model_len,
        num_blocks=0,
        max_model_len=asked.max_model_len,
        ceiling=0,
        device=asked.device,
        layout=asked.layout,
    )
    slots = (plan.usable_bytes - plan.fixed_bytes) // max(asked.max_model_len * per_token, 1)
    if shape.has_windows and slots < 1 and plan.fixed_bytes < plan.usable_bytes:
        raise SizingError("a slot fits only if layers with a window keep fewer tokens.")
    ceiling = min(max(slots, 0), asked.num_seqs)
    return replace(plan, num_blocks=ceiling, ceiling=ceiling)
