"""The step loop's body for texts: what fails in a step fails alone."""

from collections.abc import Sequence

import pytest
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepTimes
from sluice_core.wire import Encode, packed
from sluice_worker.engine.encoding import EncodingEngine
from sluice_worker.scheduling.texts import TextQueue, WaitingText

BAD = 13


class Model:
    """Breaks any step that holds a text with the token BAD."""

    def vectors(self, texts: Sequence[WaitingText]) -> list[bytes | None]:
        if any(BAD in text.token_ids for text in texts):
            raise RuntimeError("a shape that cannot be")
        return [bytes(text.token_ids) for text in texts]


def engine(*token_ids: list[int]) -> EncodingEngine:
    made = EncodingEngine(TextQueue(EngineLimits(1, 8, 100)), Model(), StepTimes(), 50)
    for number, ids in enumerate(token_ids):
        assert made.submit(Encode(str(number), packed(ids)), 0.0) is None
    return made


def test_a_text_that_breaks_a_step_fails_alone() -> None:
    own = engine([1, 2], [BAD, 4], [5, 6])
    report, failed = own.step()
    assert report is not None
    assert {found.request_id: found.values for found in report.vectors} == {
        "0": b"\1\2",
        "2": b"\5\6",
    }
    assert [one.request_id for one in failed] == ["1"]
    assert own.submit(Encode("3", packed([7])), 0.0) is None
    again, none = own.step()
    assert again is not None
    assert [found.values for found in again.vectors] == [b"\7"]
    assert not none


def test_an_engine_of_which_every_text_fails_is_at_fault_itself() -> None:
    with pytest.raises(RuntimeError, match="a shape"):
        engine([BAD], [BAD, 1]).step()


def test_texts_are_at_fault_if_one_of_before_can_still_be_computed() -> None:
    own = engine([1])
    own.step()
    own.submit(Encode("bad", packed([BAD])), 0.0)
    report, failed = own.step()
    assert report is not None
    assert not report.vectors
    assert [one.request_id for one in failed] == ["bad"]
