"""The C++ kernels against plain torch over shapes, dtypes and instruction sets of this machine."""

import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sluice_kernels.cpu.build import (
    BUILT,
    COMPILER,
    BuildTarget,
    CannotBuild,
    cache_directories,
    loaded,
    recipe_of,
    usable_targets,
)
from sluice_kernels.cpu.kernels import CppKernels
from sluice_kernels.cpu.library import Library
from sluice_kernels.cpu.panels import panel_int8_projection, panel_projection
from sluice_kernels.int8 import ZERO, PlainByteRows, to_int8
from sluice_kernels.interface import Activation, Heads, LayerParts, Spans
from sluice_kernels.linear import plain_projection, rounded_rows
from sluice_kernels.plain import PlainKernels, gate
from torch import Tensor

TARGETS = usable_targets(platform.machine(), Path("/proc/cpuinfo").read_text())
DTYPES = (torch.float32, torch.bfloat16)
PLAIN = PlainKernels(1 << 25, 1 << 24)
EXACT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
examples = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: target.name)
def cpp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CppKernels:
    target: BuildTarget = request.param
    try:
        directories = cache_directories({"HOME": str(Path.home())})
        library = loaded(Library, recipe_of(target), directories, (BUILT,))
    except CannotBuild as error:
        if shutil.which(COMPILER):
            raise
        pytest.skip(str(error))
    return CppKernels(library, lambda *_: plain_projection, target.name)


@dataclass(frozen=True)
class Case:
    """A step over random pages: some sequences with one new token, some with chunks."""

    heads: Heads
    block_size: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    query_size: float = 1.0

    def build(self) -> tuple[Tensor, Tensor, Spans]:
        """rows, cache (keys and values in place), spans."""
        generator = torch.Generator().manual_seed(self.seed)
        heads, page = self.heads, self.block_size
        lengths = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        num_pages = -(-max(lengths) // page)
        order = torch.randperm(num_pages * len(lengths), generator=generator)
        size = (len(order) + 1, 2, heads.num_kv_heads, page, heads.head_dim)
        cache = torch.randn(size, generator=generator).to(self.dtype)
        spans = Spans(
            order.view(len(lengths), num_pages),
            torch.tensor(self.starts),
            torch.tensor([0, *self.counts]).cumsum(0),
        )
        num_rows, all_heads = sum(self.counts), heads.num_heads + 2 * heads.num_kv_heads
        rows = torch.randn(num_rows, all_heads, heads.head_dim, generator=generator)
        return (rows * self.query_size).to(self.dtype), cache, spans

    def slot_mapping(self, spans: Spans) -> tuple[Tensor, Tensor]:
        """Block and slot of each token."""
        positions = [
            torch.arange(start, start + count)
            for start, count in zip(self.starts, self.counts, strict=True)
        ]
        blocks = [t[p // self.block_size] for t, p in zip(spans.tables, positions, strict=True)]
        return torch.cat(blocks), torch.cat(positions) % self.block_size


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    head_dim = 2 * draw(st.sampled_from([1, 4, 6, 16, 20, 32, 33, 64, 128]))
    heads = Heads(
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        softcap=draw(st.sampled_from([None, 0.7, 30.0])),
        window=draw(st.sampled_from([None, 1, 5, 64, 100])),
        norm=None,
        norm_eps=1e-6,
    )
    decodes = sorted(draw(st.lists(st.integers(0, 300), max_size=4)))
    chunk = st.tuples(st.sampled_from([0, 1, 63, 150]), st.integers(2, 90))
    chunks = draw(st.lists(chunk, min_size=not decodes, max_size=2))
    return Case(
        heads,
        draw(st.sampled_from([1, 4, 16, 64, 100])),
        (*decodes, *(start for start, _ in chunks)),
        (*(1 for _ in decodes), *(count for _, count in chunks)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 99)),
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wide(kernels: PlainKernels, case: Case) -> Tensor:
    """Attention of the case in float32, keys and values of the chunks taken from their pages."""
    rows, cache, spans = case.build()
    rows, cache = rows.float(), cache.float()
    blocks, slots = case.slot_mapping(spans)
    rows[:, case.heads.num_heads :] = cache[blocks, :, :, slots].flatten(1, 2)
    plan = kernels.plan(spans, cache, (case.heads.window,))
    return kernels.attention(rows, case.heads, cache, plan)


@examples
@given(case=cases(), num_threads=st.sampled_from([1, 2]))
def test_attention_equals_the_reference(cpp: CppKernels, case: Case, num_threads: int) -> None:
    rows, cache, spans = case.build()
    with threads(num_threads):
        plan = cpp.plan(spans, cache, (case.heads.window,))
        found = cpp.attention(rows, case.heads, cache, plan)
    assert found.dtype == case.dtype
    within = EXACT[case.dtype]
    torch.testing.assert_close(found.float(), wide(PLAIN, case), atol=within, rtol=within)


@pytest.mark.parametrize("kernels", ["cpp", "plain"])
def test_rows_behind_the_spans_come_out_as_zeros(cpp: CppKernels, kernels: str) -> None:
    heads = Heads(4, 2, 32, 0.2, None, None, None, 1e-6)
    case = Case(heads, 16, (40, 3), (1, 20), torch.float32, 0)
    rows, cache, spans = case.build()
    more = torch.cat([rows, torch.full_like(rows[:3], float("nan"))])
    chosen = cpp if kernels == "cpp" else PLAIN
    plan = chosen.plan(spans, cache, (None,))
    found = chosen.attention(more, heads, cache, plan)
    assert found[:-3].equal(chosen.attention(rows, heads, cache, plan))
    assert not found[-3:].any()


@given(st.integers(1, 4096))
def test_rounded_rows_are_few_and_few_more(num: int) -> None:
    assert num <= rounded_rows(num) <= 1.25 * num
    assert rounded_rows(rounded_rows(num)) == rounded_rows(num)
    assert len({rounded_rows(n) for n in range(1, num + 1)}) <= 28 + min(num, 512) / 16 + num / 64


def test_one_long_sequence_is_split_between_threads_and_comes_out_the_same(cpp: CppKernels) -> None:
    heads = Heads(6, 1, 64, 0.125, None, None, None, 1e-6)
    case = Case(heads, 64, (5000,), (1,), torch.float32, 0)
    rows, cache, spans = case.build()
    rows *= 3  # so that few slots decide, which lie in one part
    found = []
    for num_threads in (1, 4):
        with threads(num_threads):
            found.append(cpp.attention(rows, heads, cache, spans))
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [1e8, 1e10, 1e20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 90])
def test_scores_of_any_size_are_numbers_and_equal_the_reference(
    cpp: CppKernels, count: int, dtype: torch.dtype, size: float
) -> None:
    heads = Heads(4, 2, 32, 0.2, None, 100, None, 1e-6)
    case = Case(heads, 16, (200,), (count,), dtype, 0, size)
    rows, cache, spans = case.build()
    found = cpp.attention(rows, heads, cache, cpp.plan(spans, cache, (100,)))
    within = EXACT[dtype]
    torch.testing.assert_close(found.float(), wide(PLAIN, case), atol=within, rtol=within)


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0xFFC00010 - 2**32])
def test_no_bits_of_what_is_no_number_become_one(cpp: CppKernels, bits: int) -> None:
    heads = Heads(2, 1, 32, 0.2, None, None, None, 1e-6)
    rows, cache, spans = Case(heads, 16, (40,), (1,), torch.float32, 0).build()
    cache.view(torch.int32)[spans.tables[0, 0], 0, 0, 7] = bits
    assert cpp.attention(rows, heads, cache, spans).isnan().all()


@pytest.mark.parametrize("slot", [64, 67])
def test_what_is_no_number_is_not_lost_where_nothing_else_is_seen_beside_it(
    cpp: CppKernels, slot: int
) -> None:
    """Slots are met 64 at a time, and scores brought to one maximum by halves."""
    heads = Heads(2, 1, 32, 0.2, None, None, None, 1e-6)
    rows, cache, spans = Case(heads, 16, (slot,), (1,), torch.float32, 0).build()
    cache[spans.tables[0, 4], 0, 0, : slot - 63] = float("nan")
    assert cpp.attention(rows, heads, cache, spans).isnan().all()


def test_what_is_no_number_stays_with_its_own_sequence(cpp: CppKernels) -> None:
    heads = Heads(4, 2, 32, 0.2, None, None, None, 1e-6)
    case = Case(heads, 16, (40, 70, 3), (1, 1, 20), torch.float32, 0)
    rows, cache, spans = case.build()
    cache[spans.tables[1, 2], 0, 0, 7] = float("nan")
    cache[spans.tables[0, 2], :, :, 9:] = float("nan")  # slots behind the sequence's last token
    found = cpp.attention(rows, heads, cache, spans)
    assert found[1, :64].isnan().all()
    assert found[[0, *range(2, 22)]].isfinite().all()
    assert found[1, 64:].isfinite().all()


@examples
@given(case=cases(), is_normed=st.booleans())
def test_turning_and_storing_equal_the_reference(
    cpp: CppKernels, case: Case, is_normed: bool
) -> None:
    rows, cache, spans = case.build()
    heads = case.heads
    if is_normed:
        norm = torch.rand(heads.num_heads + heads.num_kv_heads, heads.head_dim) + 0.5
        heads = replace(heads, norm=norm)
    rotary = torch.polar(torch.ones(1), torch.rand(len(rows), 1, heads.head_dim // 2) * 9)
    slot_mapping = case.slot_mapping(spans)
    wide_rows, wide_cache = (part.clone().float() for part in (rows, cache))
    cpp.rope_and_store(rows, rotary, heads, cache, slot_mapping)
    PLAIN.rope_and_store(wide_rows, rotary, heads, wide_cache, slot_mapping)
    within = EXACT[case.dtype]
    torch.testing.assert_close(rows.float(), wide_rows, atol=within, rtol=within)
    torch.testing.assert_close(cache.float(), wide_cache, atol=within, rtol=within)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 200))


@examples
@given(size=sizes, dtype=st.sampled_from(DTYPES), adds=st.booleans())
def test_norms_equal_the_reference(
    cpp: CppKernels, size: tuple[int, int], dtype: torch.dtype, adds: bool
) -> None:
    residual, hidden = (torch.randn(size).to(dtype) for _ in range(2))
    weight = torch.rand(size[1])
    residuals = (residual.clone(), residual.clone())
    added = hidden if adds else None
    found = cpp.norm(residuals[0], added, weight, 1e-6)
    expected = PLAIN.norm(residuals[1], added, weight, 1e-6)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-2)
    assert torch.equal(*residuals)


@examples
@given(
    num_rows=st.integers(1, 40),
    outputs=st.integers(1, 300),
    width=st.integers(1, 90).map(lambda half: 2 * half) | st.sampled_from([32, 96, 128]),
    dtype=st.sampled_from(DTYPES),
)
def test_products_with_shared_weights_equal_the_reference(
    cpp: CppKernels, num_rows: int, outputs: int, width: int, dtype: torch.dtype
) -> None:
    rows, weight = (torch.randn(n, width).to(dtype) for n in (num_rows, outputs))
    found = cpp.shared_projection(weight)(rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, rows.float() @ weight.float().T, atol=1e-4, rtol=1e-4)


@examples
@given(
    num_rows=st.integers(1, 8) | st.sampled_from([12, 13, 16, 17, 32, 33, 96, 97, 200, 400]),
    outputs=st.integers(1, 300),
    width=st.integers(1, 90).map(lambda half: 2 * half) | st.sampled_from([32, 384, 416, 1024]),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
)
def test_products_with_panels_equal_the_reference(
    cpp: CppKernels, num_rows: int, outputs: int, width: int, has_bias: bool, num_threads: int
) -> None:
    rows, weight = (torch.randn(n, width).bfloat16() for n in (num_rows, outputs))
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    with threads(num_threads):
        found = panel_projection(cpp.library)(weight, bias)(rows)
    expected = plain_projection(weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(found.float(), expected(rows.float()), atol=5e-2, rtol=1e-2)


@examples
@given(
    num_rows=st.integers(1, 6) | st.sampled_from([13, 17, 97, 400]),
    outputs=st.integers(1, 150),
    width=st.integers(1, 60).map(lambda part: 4 * part) | st.sampled_from([64, 768, 832]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_int8_products_with_panels_equal_those_of_what_was_rounded(
    cpp: CppKernels, num_rows: int, outputs: int, width: int, dtype: torch.dtype, has_bias: bool
) -> None:
    rows = torch.randn(num_rows, width).to(dtype)
    weight, bias = torch.randn(outputs, width), torch.randn(outputs) if has_bias else None
    found = panel_int8_projection(cpp.library)(weight, bias)(rows)
    (steps, scales), (narrow, sizes) = to_int8(weight), cpp.library.to_bytes(rows)
    expected = (narrow.double() - ZERO) @ steps.double().T * sizes[:, None] * scales
    expected = expected if bias is None else expected + bias
    assert found.dtype == dtype
    limit = EXACT[dtype]
    torch.testing.assert_close(found.double(), expected, atol=limit, rtol=limit)


@examples
@given(
    num_rows=st.sampled_from([1, 6, 17, 97]),
    outputs=st.integers(1, 150),
    width=st.sampled_from([7, 36, 64, 832]),
    activation=st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    has_bias=st.booleans(),
    narrow=st.booleans(),
)
def test_gated_products_equal_products_that_are_gated(
    cpp: CppKernels,
    num_rows: int,
    outputs: int,
    width: int,
    activation: Activation,
    has_bias: bool,
    narrow: bool,
) -> None:
    rows = torch.randn(num_rows, width).bfloat16()
    weight = (torch.randn(2 * outputs, width) / width**0.5).bfloat16()
    bias = torch.randn(2 * outputs).bfloat16() if has_bias else None
    make = panel_int8_projection if narrow else panel_projection
    found = make(cpp.library, activation)(weight, bias)(rows)
    expected = gate(make(cpp.library)(weight, bias)(rows).float(), activation)
    assert found.shape == (num_rows, outputs)
    torch.testing.assert_close(found.float(), expected, atol=5e-2, rtol=2e-2)


def test_callers_at_once_with_more_threads_than_processors_get_what_one_gets(
    cpp: CppKernels,
) -> None:
    weight = torch.randn(700, 64).bfloat16()
    layer = panel_projection(cpp.library)(weight, None)
    inputs = [torch.randn(count, 64).bfloat16() for count in range(1, 60)]
    expected = [layer(rows) for rows in inputs]

    def all_again(num_threads: int) -> bool:
        with threads(num_threads):
            return all(map(torch.equal, map(layer, inputs), expected))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(all_again, [5, 2, 3, 4] * 8))


def layer_parts(cpp: CppKernels, heads: Heads, width: int, narrow: bool, number: int) -> LayerParts:
    """A layer of random weights, some of them with a bias, every second one sliding."""
    query = heads.num_heads * heads.head_dim
    activation: Activation = "gelu_pytorch_tanh" if number % 2 else "silu"
    make = panel_int8_projection if narrow else panel_projection
    plain, gated = make(cpp.library), make(cpp.library, activation)

    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.empty(outputs, inputs).normal_(0, inputs**-0.5).bfloat16()

    qkv = query + 2 * heads.num_kv_heads * heads.head_dim
    return LayerParts(
        norm=(torch.rand(width) + 0.5, 1e-6),
        qkv=plain(weight(qkv, width), torch.randn(qkv).bfloat16()),
        heads=heads,
        output=plain(weight(width, query), None),
        mlp_norm=(torch.rand(width) + 0.5, 1e-5),
        gate_up=gated(weight(2 * 36, width), None),
        down=plain(weight(width, 36), torch.randn(width).bfloat16()),
        is_sliding=number % 2 == 1,
    )


@examples
@given(
    case=cases(),
    width=st.sampled_from([4, 36, 64, 128]),
    num_layers=st.integers(1, 3),
    narrow=st.booleans(),
    is_normed=st.booleans(),
)
def test_layers_in_a_row_equal_their_operations(
    cpp: CppKernels, case: Case, width: int, num_layers: int, narrow: bool, is_normed: bool
) -> None:
    case = replace(case, dtype=torch.bfloat16)
    rows, cache, spans = case.build()
    slot_mapping, num_rows = case.slot_mapping(spans), len(rows)
    heads = replace(case.heads, head_dim=4 * -(-case.heads.head_dim // 4))
    if is_normed:
        norm = torch.rand(heads.num_heads + heads.num_kv_heads, heads.head_dim) + 0.5
        heads = replace(heads, norm=norm)
    size = (*cache.shape[:4], heads.head_dim)
    caches = [torch.randn(size).bfloat16() for _ in range(num_layers + 1)]
    angles = torch.rand(2, num_rows, 1, heads.head_dim // 2) * 9
    rotary = torch.polar(torch.ones(1), angles)
    parts = [layer_parts(cpp, heads, width, narrow, i) for i in range(num_layers + 1)]
    residual = torch.randn(num_rows, width).bfloat16()
    expected_residual, expected_caches = residual.clone(), [cache.clone() for cache in caches]
    hidden: Tensor | None = None
    for part, pages in zip(parts[:num_layers], expected_caches, strict=False):
        normed = cpp.norm(expected_residual, hidden, *part.norm)
        qkv = part.qkv(normed).view(num_rows, -1, heads.head_dim)
        cpp.rope_and_store(qkv, rotary[int(part.is_sliding)], heads, pages, slot_mapping)
        hidden = part.output(cpp.attention(qkv, heads, pages, spans))
        hidden = part.down(part.gate_up(cpp.norm(expected_residual, hidden, *part.mlp_norm)))
    stack = cpp.stack(parts)
    assert stack is not None
    found = stack(residual, (rotary[0], rotary[1]), caches[:num_layers], slot_mapping, spans)
    assert hidden is not None
    assert torch.equal(found, hidden)
    assert torch.equal(residual, expected_residual)
    assert all(map(torch.equal, caches, expected_caches))


def test_layers_of_other_products_are_not_run_in_a_row(cpp: CppKernels) -> None:
    heads = Heads(2, 1, 4, 0.5, None, None, None, 1e-6)
    own = layer_parts(cpp, heads, 8, False, 0)
    other = replace(own, down=cpp.projection(torch.randn(8, 36), None, None, narrow=True))
    assert cpp.stack([own]) is not None
    assert cpp.stack([own, other]) is None
    assert replace(cpp, round_rows=rounded_rows).stack([own]) is None


def test_a_width_that_fills_no_words_stays_wide(cpp: CppKernels) -> None:
    rows, weight = torch.randn(3, 7).bfloat16(), torch.randn(5, 7).bfloat16()
    for make in (panel_projection(cpp.library), panel_int8_projection(cpp.library)):
        found = make(weight, None)(rows).float()
        torch.testing.assert_close(found, rows.float() @ weight.float().T, atol=0.2, rtol=0.05)


@examples
@given(
    size=sizes,
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    scale=st.sampled_from([1.0, 100.0]),
)
def test_gates_equal_the_reference(
    cpp: CppKernels,
    size: tuple[int, int],
    dtype: torch.dtype,
    activation: Activation,
    scale: float,
) -> None:
    gate_up = (torch.randn(size[0], 2 * size[1]) * scale).to(dtype)
    found, expected = cpp.library.gate(gate_up, activation), gate(gate_up.float(), activation)
    within = EXACT[dtype]
    torch.testing.assert_close(found.float(), expected, atol=within, rtol=within)


@examples
@given(size=sizes, dtype=st.sampled_from(DTYPES), scale=st.sampled_from([0.0, 1e-6, 1.0, 1e4]))
def test_bytes_of_rows_equal_the_reference(
    cpp: CppKernels, size: tuple[int, int], dtype: torch.dtype, scale: float
) -> None:
    rows = (torch.randn(size) * scale).to(dtype)
    found, scales = cpp.library.to_bytes(rows)
    expected, expected_scales = PlainByteRows().to_bytes(rows)
    torch.testing.assert_close(scales, expected_scales)
    assert (found.int() - expected.int()).abs().max() <= 1  # halves may round to either side
    products, bias = torch.randn(size), torch.randn(size[1])
    for added in (None, bias):
        ours, theirs = (products.to(dtype, copy=True) for _ in range(2))
        cpp.library.scale_(ours, scales, added)
        PlainByteRows().scale_(theirs, scales, added)
        torch.testing.assert_close(ours, theirs)


@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 8, 63, 64, 65, 130, 300]), min_size=1, max_size=6),
    num_heads=st.integers(1, 5),
    head_dim=st.sampled_from([2, 8, 12, 32, 64, 66]),
    window=st.sampled_from([None, 1, 5, 64]),
    is_causal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@examples
def test_texts_behind_each_other_see_themselves_alone(
    cpp: CppKernels,
    lengths: list[int],
    num_heads: int,
    head_dim: int,
    window: int | None,
    is_causal: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows, behind = sum(lengths), 3
    qkv = torch.randn(num_rows + behind, 3, num_heads, head_dim, generator=generator).to(dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    window = None if is_causal else window
    plan = cpp.plan_texts(offsets, qkv)
    ours = cpp.text_attention(qkv, plan, window, is_causal=is_causal)
    assert not ours[num_rows:].any()
    for start, length in zip(offsets.tolist(), lengths, strict=False):
        q, k, v = qkv[start : start + length].float().permute(1, 2, 0, 3)
        places = torch.arange(length)
        distance = places[:, None] - places
        seen = distance >= 0 if is_causal else distance.abs() <= (window or length)
        scores = (q @ k.transpose(1, 2) * head_dim**-0.5).masked_fill(~seen, -torch.inf)
        expected = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        found = ours[start : start + length].float()
        assert torch.allclose(found, expected, atol=EXACT[dtype], rtol=EXACT[dtype])


@given(
    num_rows=st.integers(1, 9),
    width=st.integers(1, 130),
    is_added=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@examples
def test_layer_norms_of_sums_equal_torchs(
    cpp: CppKernels,
    num_rows: int,
    width: int,
    is_added: bool,
    has_bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, added = (torch.randn(num_rows, width, generator=generator) * 3 + 1 for _ in range(2))
    rows, added = rows.to(dtype), added.to(dtype)
    weight, bias = (torch.randn(width, generator=generator) for _ in range(2))
    given_bias = bias if has_bias else None
    found = cpp.layer_norm(rows, added if is_added else None, weight, given_bias, 1e-5)
    whole = rows.float() + added.float() * is_added
    expected = torch.nn.functional.layer_norm(whole, (width,), weight, given_bias, 1e-5)
    assert torch.allclose(found.float(), expected, atol=EXACT[dtype], rtol=EXACT[dtype])


@pytest.mark.parametrize("is_tanh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_equals_torchs(cpp: CppKernels, dtype: torch.dtype, is_tanh: bool) -> None:
    rows = torch.linspace(-12, 12, 4 * 1001).view(4, 1001).to(dtype)
    expected = torch.nn.functional.gelu(rows.float(), approximate="tanh" if is_tanh else "none")
    found = cpp.gelu_(rows.clone(), is_tanh=is_tanh).float()
    exact = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(found, expected, atol=exact, rtol=exact)
