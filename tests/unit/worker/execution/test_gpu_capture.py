"""Which CUDA graphs there are, when they are captured, and what a padded step is made of."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.work import Sampling
from sluice_kernels.triton.decode import choose_splits
from sluice_worker.execution.gpu.arrays import decode_arrays, spans
from sluice_worker.execution.gpu.capture import (
    FIRST_SIZES,
    MIN_FREE_BYTES,
    first_sizes,
    graph_sizes,
    has_room,
    kinds_of_steps,
    next_size,
    padded_size,
)
from sluice_worker.execution.gpu.rows import Row, decodes_of, rows_after, rows_of
from sluice_worker.execution.sampler import Draw, row_seed
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import StepWork
from unit.worker.engine.factories import create_request


def test_sizes_end_at_the_ceiling() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(256) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]


@given(st.integers(1, 600))
def test_every_step_has_a_graph_and_is_at_most_doubled(ceiling: int) -> None:
    sizes = graph_sizes(ceiling)
    assert sizes == sorted(set(sizes))
    for num_rows in range(1, ceiling + 1):
        size = padded_size(num_rows, sizes)
        assert num_rows <= size < 2 * num_rows or size == num_rows
        assert num_rows < 64 or size <= 1.5 * num_rows


@given(st.integers(1, 600))
def test_small_sizes_come_first_and_the_rest_one_by_one(ceiling: int) -> None:
    captured = first_sizes(ceiling)
    assert captured
    assert max(captured) <= FIRST_SIZES
    while (size := next_size(ceiling, captured)) is not None:
        assert size > max(captured)
        captured.append(size)
    assert captured == graph_sizes(ceiling)


@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from([20, 108, 132]))
def test_each_number_of_splits_that_a_step_may_have_is_compiled_for(
    ceiling: int, num_kv_heads: int, num_processors: int
) -> None:
    def splits(num_rows: int) -> int:
        return choose_splits(num_rows, num_kv_heads, num_processors).num

    sizes = kinds_of_steps(ceiling, splits)
    assert {*map(splits, sizes)} == {*map(splits, range(1, ceiling + 1))}
    assert len(sizes) <= 3


def test_what_a_step_takes_is_not_free_for_graphs() -> None:
    assert has_room(MIN_FREE_BYTES + 1000, 1000)
    assert not has_room(MIN_FREE_BYTES + 999, 1000)


def test_a_step_that_no_graph_holds_runs_as_it_is() -> None:
    assert padded_size(40, first_sizes(256)) == 40
    assert padded_size(3, []) == 3


def sequence(prompt: int, blocks: list[int], max_tokens: int = 8) -> Sequence:
    request = create_request(f"s{prompt}", prompt, max_tokens=max_tokens)
    found = Sequence(request, seed=1, token_ids=request.prompt_token_ids)
    found.block_ids = blocks
    return found


def draw(sequence: Sequence, ahead: int) -> Draw:
    return Draw(0.0, sequence.seed, sequence.num_tokens + ahead)


CUT = Draw(0.5, 1, 10, top_k=20, top_p=0.75, min_p=0.25)


def test_padding_has_no_tokens_and_writes_nowhere() -> None:
    first, second = sequence(4, [7]), sequence(9, [3, 5, 6])
    rows = [Row(first, 3, 7, draw(first, 0)), Row(second, 9, 5, CUT, source=6)]
    arrays = decode_arrays(rows, 4, 16, block_size=8)
    assert arrays.fields[0].tolist() == [first.token_ids[3], -1, 0, 0]
    assert arrays.fields[1].tolist() == [0, 6, 0, 0]
    assert arrays.fields[2].tolist() == [3, 9, 0, 0]
    assert arrays.fields[3:5].tolist() == [[7, 5, -1, -1], [3, 1, 0, 0]]
    assert arrays.lengths.tolist() == [4, 10, 0, 0]
    assert arrays.shares.tolist() == [
        [0.0, 0.5, 0.0, 0.0],
        [1.0, 0.75, 0.0, 0.0],
        [0.0, 0.25, 0.0, 0.0],
    ]
    assert arrays.fields[5].tolist() == [0, 20, 0, 0]
    assert arrays.fields[6].tolist() == [0, row_seed(CUT.seed, CUT.index), 0, 0]
    assert arrays.tables.tolist() == [[7, 0], [3, 5]]


def test_what_goes_to_the_device_in_one_piece_are_the_steps_arrays() -> None:
    first, second = sequence(4, [7]), sequence(9, [3, 5, 6])
    rows = [Row(first, 3, 7, CUT), Row(second, 9, 5, CUT, source=6)]
    arrays = decode_arrays(rows, 4, 16, block_size=8)
    packed = torch.from_numpy(arrays.packed)
    fields, lengths, shares, tables = (packed[part] for part in spans(16))
    assert fields.view(torch.int64).view(-1, 16)[:, :4].tolist() == arrays.fields.tolist()
    assert lengths.view(torch.int32)[:4].tolist() == arrays.lengths.tolist()
    assert shares.view(torch.float32).view(-1, 16)[:, :4].tolist() == arrays.shares.tolist()
    assert tables.view(torch.int32).view(2, 2).tolist() == arrays.tables.tolist()


def test_rows_go_on_unless_their_last_token_is_being_sampled() -> None:
    goes_on, ends = sequence(5, [1, 2]), sequence(4, [3], max_tokens=1)
    works = [StepWork(goes_on, 4, 1, True), StepWork(ends, 0, 4, True)]
    rows = rows_of(works, 4, draw)
    assert rows is not None
    assert [row.position for row in rows] == [4, 3]
    (after,) = rows_after(enumerate(rows), 4, draw)
    assert (after.sequence, after.position, after.block, after.source) == (goes_on, 5, 2, 0)
    assert after.draw.index == 6


def test_a_step_decodes_only_where_each_work_is_one_token_that_a_sample_comes_of() -> None:
    one = sequence(5, [1, 2])
    edited = Draw(1.0, 1, 5, top_p=0.9)
    decode = StepWork(one, 4, 1, True)
    assert decodes_of([decode], [edited], 4) == [Row(one, 4, 2, edited)]
    for more in (
        StepWork(one, 3, 2, True),
        StepWork(one, 3, 1, False),
        StepWork(one, 4, 2, True, (7,)),
    ):
        assert decodes_of([decode, more], [edited] * 3, 4) is None
    scored = Sequence(create_request("s", 5, sampling=Sampling(prompt_logprobs=1)), seed=1)
    scored.block_ids = [1, 2]
    assert decodes_of([StepWork(scored, 4, 1, True)], [edited], 4) is None


def test_no_row_goes_on_where_one_has_no_slot_left() -> None:
    has_room, full = sequence(5, [1, 2]), sequence(8, [3, 4])
    works = [StepWork(has_room, 4, 1, True), StepWork(full, 7, 1, True)]
    assert rows_after(enumerate(rows_of(works, 4, draw) or ()), 4, draw) == []
