"""Numbers of others: whatever they are, what comes out is bounded, or nothing comes out."""

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.bounded import MAX_COUNT, MAX_NUMBER, Numbers, count, number
from sluice_core.port import EngineLoad
from sluice_core.wire import StepReport, encode_frame, from_engine_decoder

ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
)  # fmt: skip


@given(ANYTHING, st.integers(0, MAX_COUNT))
def test_a_count_is_a_whole_number_within_its_bounds(value: object, most: int) -> None:
    found = count(value, most)
    assert found is None or (type(found) is int and 0 <= found <= most)


@given(ANYTHING, st.floats(0, MAX_NUMBER))
def test_a_number_is_finite_and_within_its_bounds(value: object, most: float) -> None:
    found = number(value, most)
    assert found is None or (type(found) is float and 0 <= found <= most)


@given(st.integers(0, MAX_COUNT))
def test_every_count_is_read_as_it_is(value: int) -> None:
    assert count(value) == count(str(value)) == count(float(value)) == value


@pytest.mark.parametrize("text", ["²", "١٢", "+1", " 1", "1_0", "9" * 5000, "", "-0"])
def test_only_ascii_digits_are_a_count(text: str) -> None:
    assert count(text) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 10**400, True, "nan", None, [1]])
def test_none_of_these_is_a_number(value: object) -> None:
    assert number(value) is None


def test_what_is_left_out_is_counted_and_what_is_not_told_is_not() -> None:
    left_out = Counter[str]()
    numbers = Numbers("usage", left_out)
    assert [numbers.count(value) for value in (3, None, -1)] == [3, None, None]
    assert [numbers.number(value) for value in (0.5, None, math.nan)] == [0.5, None, None]
    assert left_out == {"usage": 2}


STATE = EngineLoad(1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
STEP = StepReport([], 0, 1.0, 0.01, 1, 1, 0, 1, False, STATE)
NUMBERS = [
    field.name
    for field in msgspec.structs.fields(StepReport)
    if type(getattr(STEP, field.name)) in (int, float)
]


def test_there_are_numbers_in_a_report() -> None:
    assert len(NUMBERS) >= 9


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e13, 1e300, 2**62])
def test_a_report_with_an_impossible_number_is_none(name: str, value: float) -> None:
    body = encode_frame(msgspec.structs.replace(STEP, **{name: value}))[4:]
    with pytest.raises(msgspec.ValidationError):
        from_engine_decoder.decode(body)


@pytest.mark.parametrize("field", msgspec.structs.fields(EngineLoad), ids=lambda field: field.name)
@pytest.mark.parametrize("value", [math.nan, -1e13, 2**62])
def test_a_state_with_an_impossible_number_is_none(
    field: msgspec.structs.FieldInfo, value: float
) -> None:
    state = msgspec.structs.replace(STATE, **{field.name: value})
    with pytest.raises(msgspec.ValidationError):
        from_engine_decoder.decode(encode_frame(msgspec.structs.replace(STEP, snapshot=state))[4:])
