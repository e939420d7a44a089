"""GGUF headers: the bytes of a model, and what a hostile file is answered."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.engines import FOREIGN
from sluice_core.errors import CheckpointError
from sluice_core.model.files import Directory
from sluice_core.model.gguf import (
    GGUF_RESERVE_BYTES,
    MAX_GGUF_BYTES,
    SLOT_TOKENS,
    GgufShape,
    model_name,
    plan_gguf,
    read_gguf,
)
from sluice_core.model.parallel import Layout
from sluice_core.model.sizing import GIB, MemoryPlan, MemoryRequest, SizingError, advice

VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 32,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(2000)],
    "tokenizer.ggml.scores": [0.5] * 2000,
}
"""Llama-3-8B's, with fewer tokens."""
Q4_K, F32, BF16 = 12, 0, 30
TENSORS = {"token_embd.weight": ([4096, 2000], Q4_K), "output_norm.weight": ([4096], F32)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_of(value: object) -> bytes:
    """A value behind the number of its type."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        items = [value_of(item) for item in value]
        kind, inner = items[0][:4], b"".join(item[4:] for item in items)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + inner
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, int)
    return struct.pack("<II", 4, value)


def gguf(
    values: Mapping[str, Any] = VALUES,
    tensors: Mapping[str, tuple[list[int], int]] = TENSORS,
    *,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """The header of a GGUF file of version 3."""
    num_tensors, num_values = counts or (len(tensors), len(values))
    data = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values)
    data += b"".join(text(key) + value_of(value) for key, value in values.items())
    for name, (dims, kind) in tensors.items():
        data += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        data += struct.pack("<IQ", kind, 0)
    return data


def read(folder: Path, data: bytes) -> GgufShape:
    (folder / "m.gguf").write_bytes(data)
    return read_gguf(Directory(folder), ["m.gguf"])


def request(**changes: Any) -> MemoryRequest:
    asked: dict[str, Any] = {
        "total_bytes": 24 * GIB, "utilization": 0.9, "weights_bytes": 0,
        "max_num_batched_tokens": 2048, "max_model_len": 8192, "block_size": 16, "dtype_bytes": 2,
        "max_num_seqs": None, "device": "cuda", **changes,
    }  # fmt: skip
    return MemoryRequest(**asked)


def test_sizes_come_from_the_header(tmp_path: Path) -> None:
    shape = read(tmp_path, gguf())
    assert shape.weights_bytes == 4096 * 2000 // 256 * 144 + 4096 * 4
    assert shape.num_elements == 4096 * 2001
    assert shape.kv_elements * 2 == 128 << 10  # as Llama-3-8B's, in float16
    assert (shape.vocab_size, shape.num_layers, shape.hidden_size) == (2000, 32, 4096)
    assert FOREIGN["LlamaCpp"].slot_tokens == SLOT_TOKENS == shape.default_len


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (0, 32), (1, 16), (30, 16), (2, 4.5), (3, 5), (6, 5.5), (7, 6), (8, 8.5), (10, 2.625),
        (11, 3.4375), (12, 4.5), (13, 5.5), (14, 6.5625), (39, 4.25),
    ],
)  # fmt: skip
def test_each_type_takes_the_bits_of_its_blocks(tmp_path: Path, kind: int, bits: float) -> None:
    shape = read(tmp_path, gguf(tensors={"w": ([512, 64], kind)}))
    assert shape.weights_bytes * 8 == 512 * 64 * bits


def test_heads_of_each_layer_and_widths_of_their_own_are_counted(tmp_path: Path) -> None:
    each = {
        **VALUES,
        "llama.block_count": 4,
        "llama.attention.head_count_kv": [8, 0, 0, 2],  # two layers keep nothing
        "llama.attention.key_length": 192,
        "llama.attention.value_length": 128,
        "llama.vocab_size": 50,
    }
    shape = read(tmp_path, gguf(each))
    assert shape.kv_elements == 10 * (192 + 128)
    assert shape.vocab_size == 50


def test_parts_are_added_up(tmp_path: Path) -> None:
    names = [f"m-{part:05}-of-00002.gguf" for part in (1, 2)]
    (tmp_path / names[0]).write_bytes(gguf(tensors={}))
    (tmp_path / names[1]).write_bytes(gguf({"split.no": 1}, {"w": ([64], F32)}))
    shape = read_gguf(Directory(tmp_path), names)
    assert (shape.weights_bytes, shape.num_layers) == (256, 32)


def test_a_model_is_the_file_or_all_its_parts() -> None:
    first, second = (f"a-0000{part}-of-00002.gguf" for part in (1, 2))
    assert model_name(first) == model_name(second)
    assert len({model_name(name) for name in (first, "a.gguf", "b.gguf", f"b{first}")}) == 4


def test_slots_are_what_is_left_over_the_context_of_one(tmp_path: Path) -> None:
    shape = read(tmp_path, gguf(tensors={"w": ([1 << 16, 1 << 16], Q4_K)}))
    assert shape.weights_bytes == (1 << 32) * 9 // 16
    plan = plan_gguf(shape, request())
    assert plan.kv_bytes_per_token == 128 << 10
    left = plan.usable_bytes - plan.fixed_bytes
    assert plan.ceiling == left // (8192 * (128 << 10))
    assert plan.reserve_bytes == GGUF_RESERVE_BYTES
    assert plan.explain().endswith(f"{plan.ceiling} sequences of 8192 tokens.")
    four = plan_gguf(shape, request(max_num_seqs=4))
    assert (four.ceiling, four.kv_tokens) == (4, 4 * 8192)
    small = plan_gguf(shape, request(total_bytes=4 * GIB))
    assert (small.fits, small.ceiling) == (False, 0)
    told = advice(small)
    enough = float(told.removeprefix("It would fit with a GPU of ").removesuffix(" GiB."))
    assert plan_gguf(shape, request(total_bytes=int(enough * GIB))).ceiling == 1


def test_layers_are_divided_between_gpus(tmp_path: Path) -> None:
    shape = read(tmp_path, gguf(tensors={"w": ([1 << 16, 1 << 16], Q4_K)}))

    def plan(num_gpus: int) -> MemoryPlan:
        return plan_gguf(shape, request(layout=Layout(pipeline=num_gpus)))

    assert plan(2).weights_bytes * 2 == plan(1).weights_bytes
    assert plan(3).kv_bytes_per_token == 11 * 4096  # of 32 layers
    assert plan(2).explain().startswith("GPU of stage 1 of 2: ")


def test_a_slot_that_only_windows_may_make_fit_is_left_to_the_engine(tmp_path: Path) -> None:
    slid = read(tmp_path, gguf({**VALUES, "llama.attention.sliding_window": 1024}))
    assert plan_gguf(slid, request()).fits
    with pytest.raises(SizingError, match="a slot fits only if layers with a window"):
        plan_gguf(slid, request(max_model_len=1 << 20))
    assert not plan_gguf(slid, request(total_bytes=GIB // 2)).fits


LONG = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated, or not a GGUF file"),
        (b"GGUF", "truncated, or not a GGUF file"),
        (b"PK\3\4" + bytes(64), "not a GGUF file of version 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "not a GGUF file of version 2 or 3"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
        (gguf()[:-9], "truncated, or not a GGUF file"),
        (gguf(counts=(1 << 60, 1)), "over 65,536 tensors or values"),
        (gguf(counts=(1, 1 << 60)), "over 65,536 tensors or values"),
        (gguf({"a": struct.pack("<I", 8) + LONG}), "a header of over 16 MiB"),
        (gguf({"a": struct.pack("<II", 9, 8) + LONG}), "a list of an unknown type"),
        (gguf({"a": struct.pack("<II", 9, 0) + LONG}), "a header of over 16 MiB"),
        (gguf({"a": struct.pack("<IIQ", 9, 9, 1)}), "a list of an unknown type"),
        (gguf({"a": struct.pack("<I", 77)}), "a value of an unknown type"),
        (gguf(tensors={"w": ([1] * 9, 0)}), "tensor w has an impossible shape"),
        (gguf(tensors={"w": ([1 << 41], 0)}), "tensor w has no known type and shape"),
        (gguf(tensors={"w": ([1], 99)}), "tensor w has no known type and shape"),
        (gguf(tensors={"w": ([1 << 40, 1 << 40], 0)}), "claims tensors of over 1024 PiB"),
        (gguf({**VALUES, "llama.block_count": 5000}), "block_count is not from 1 to 1,024"),
        (gguf({**VALUES, "llama.block_count": 0}), "block_count is not from 1 to 1,024"),
        (gguf({**VALUES, "llama.block_count": "2"}), "block_count is missing, or is not 1 whole"),
        (gguf({**VALUES, "llama.attention.head_count_kv": [1, 2]}), "is not 32 whole numbers"),
        (gguf({"general.architecture": "llama"}), "block_count is missing"),
        (gguf({}), "block_count is missing"),
        (gguf({**VALUES, "llama.ssm.state_size": 1}), "is not of keys and values alone"),
        (gguf({**VALUES, "llama.attention.kv_lora_rank": 1}), "is not of keys and values alone"),
    ],
)
def test_a_file_that_is_none_is_one_sentence(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises((CheckpointError, SizingError), match=why) as refused:
        read(tmp_path, data)
    assert str(refused.value).startswith("m.gguf: ")


def test_a_header_of_many_texts_is_read_in_time(tmp_path: Path) -> None:
    texts = struct.pack("<IIQ", 9, 8, 1 << 21) + bytes(8 << 21)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="a header of over 16 MiB"):
        read(tmp_path, gguf({"a": texts}))
    assert len(texts) > MAX_GGUF_BYTES
    assert time.monotonic() - began < 30


@given(st.integers(0, len(gguf()) - 1), st.integers(0, 255), st.binary(max_size=40))
def test_whatever_a_file_says_is_a_shape_or_a_sentence(place: int, byte: int, more: bytes) -> None:
    whole = gguf({**VALUES, "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": [0.5]})
    place %= len(whole)
    data = whole[:place] + bytes([byte]) + more + whole[place + 1 :]

    class Held:
        title, max_headers = "m", 4

        def names(self) -> list[str]:
            return ["m.gguf"]

        def read(self, name: str, start: int, length: int) -> bytes:
            return data[start : start + length]

    with contextlib.suppress(CheckpointError, SizingError):
        plan_gguf(read_gguf(Held(), ["m.gguf"]), request()).explain()
