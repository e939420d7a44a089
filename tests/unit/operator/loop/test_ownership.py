"""Claims on whose an object is: one of two operators cares, and never neither for long."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from sluice_operator.children.manifests import configmap
from sluice_operator.children.runtime import OWNER_ANNOTATION, Runtime
from sluice_operator.loop import ownership
from sluice_operator.loop.ownership import Claim, Mark, Move, judge, mark_of
from sluice_operator.reasons import Reason
from unit.operator.observations import NOW, SETTINGS, create_service

RESYNC_S = 30.0
ANSWER_S, AGAIN_S = 120.0, 600.0


@dataclass
class Operator:
    """One installation's view of an object, looked at every half minute."""

    name: str
    claim: Claim = field(default_factory=Claim)
    cares: bool = False

    def look(self, mark: Mark, now: float) -> Mark:
        """The mark as it leaves it."""
        move, self.claim = judge(mark, self.name, self.claim, now, RESYNC_S)
        self.cares = move in (Move.CARE, Move.ANSWER)
        if self.cares:
            asked_by = "" if move is Move.ANSWER else mark.asked_by
            return Mark(self.name, asked_by)
        return Mark(mark.owner, self.name) if move is Move.ASK else mark


def live(mark: Mark, seconds: float, *operators: Operator, start_s: float = NOW) -> Mark:
    """What becomes of the mark while `operators` look at it in turn."""
    for tick in range(int(seconds / RESYNC_S)):
        for operator in operators:
            mark = operator.look(mark, start_s + tick * RESYNC_S)
    return mark


def test_an_object_of_nobody_is_taken_and_kept() -> None:
    one = Operator("one")
    assert live(Mark(), 60.0, one) == Mark("one")
    assert one.cares


def test_an_owner_that_lives_keeps_its_object() -> None:
    one, two = Operator("one"), Operator("two")
    mark = live(Mark("one"), 2 * 3600.0, one, two)
    assert mark.owner == "one"
    assert (one.cares, two.cares) == (True, False)
    assert one.claim.rival == "two"


def test_it_is_asked_once_in_ten_minutes() -> None:
    one, two = Operator("one"), Operator("two")
    asked, mark = 0, Mark("one")
    for tick in range(int(3600 / RESYNC_S)):
        mark = one.look(mark, NOW + tick * RESYNC_S)
        before, mark = mark, two.look(mark, NOW + tick * RESYNC_S)
        asked += mark.asked_by == "two" and before.asked_by == ""
    assert asked <= 3600 / AGAIN_S


def test_an_owner_that_is_gone_is_followed_when_it_has_not_answered_for_two_minutes() -> None:
    two = Operator("two")
    mark = live(Mark("one"), ANSWER_S, two)
    assert (mark, two.cares) == (Mark("one", "two"), False)
    assert live(mark, 3 * RESYNC_S, two, start_s=NOW + ANSWER_S) == Mark("two")
    assert two.cares


def test_an_owner_that_goes_after_it_has_answered_is_asked_again() -> None:
    one, two = Operator("one"), Operator("two")
    mark = live(Mark("one"), 300.0, one, two)
    assert mark == Mark("one")
    after_s = AGAIN_S + ANSWER_S + 2 * RESYNC_S
    assert live(mark, after_s, two, start_s=NOW + 300.0) == Mark("two")


def test_an_owner_that_was_overtaken_stands_back() -> None:
    one, two = Operator("one", cares=True), Operator("two")
    mark = live(Mark("two"), 3600.0, two, one)
    assert mark.owner == "two"
    assert not one.cares


def test_a_question_that_nobody_answers_or_follows_is_asked_over() -> None:
    """The owner is gone, and so is who asked for the object after that."""
    three = Operator("three")
    mark = live(Mark("one", asked_by="two"), 270.0, three)
    assert (mark.asked_by, three.cares) == ("two", False)
    mark = live(mark, 270.0, three, start_s=NOW + 270.0)
    assert (mark.owner, three.cares) == ("three", True)


def test_a_question_of_one_that_lives_is_left_to_it() -> None:
    two, three = Operator("two"), Operator("three")
    mark = live(Mark("one"), 7200.0, two, three)
    assert [two.cares, three.cares].count(True) == 1
    assert mark.owner in ("two", "three")


def test_a_restarted_process_waits_anew_for_the_answer() -> None:
    move, claim = judge(Mark("one", "two"), "two", Claim(), NOW, RESYNC_S)
    assert (move, claim) == (Move.WAIT, Claim(asked_s=NOW))


def test_a_configmap_that_is_gone_is_left_to_the_owner_that_answered() -> None:
    refused = Claim(refused_s=NOW)
    assert judge(Mark(), "two", refused, NOW + 1, RESYNC_S)[0] is Move.WAIT
    assert judge(Mark(), "two", refused, NOW + AGAIN_S, RESYNC_S)[0] is Move.CARE


def test_only_the_configmap_of_this_very_object_tells_its_owner() -> None:
    held = configmap(create_service(), SETTINGS, Runtime(1, 4, 1))
    assert held["metadata"]["annotations"][OWNER_ANNOTATION] == SETTINGS.instance
    assert mark_of("uid-1", held) == Mark(SETTINGS.instance)
    assert mark_of("another", held) == mark_of("uid-1", None) == Mark()


@pytest.mark.parametrize(("stalled", "told"), [("False", True), ("True", False)])
def test_the_status_names_a_rival_while_it_asks(stalled: str, told: bool) -> None:
    status = {"conditions": [{"type": "Stalled", "status": stalled, "reason": "x", "message": ""}]}
    claim = Claim(rival="b/sluice", rival_until_s=NOW + AGAIN_S)
    [entry] = ownership.told(status, claim, NOW)["conditions"]
    assert (entry["reason"] == Reason.OTHER_OPERATOR) is told
    assert ("operator b/sluice asks for it too" in entry["message"]) is told
    assert ownership.told(status, claim, NOW + AGAIN_S + 1) == status
