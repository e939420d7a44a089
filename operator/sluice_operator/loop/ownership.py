"""Whose an object is where two installations watch it, with different images perhaps. Pure.

The ConfigMap bears the name of the operator that cares for its object. Another one stands back. It
asks now and then, in an annotation of its own: an owner that lives takes the question away; where
it stays, the owner is gone and the object is taken over. So nobody beats a heart: an object that
nobody contests is written by nobody.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf
from typing import Any

from ..children.runtime import OWNER_ANNOTATION
from ..cluster.observed import Object
from ..reasons import Reason
from ..status.events import Notice

ASKING_MANAGER = "sluice-operator-asking"
"""Of the question only: whoever applies without it takes it away, and nothing else."""
_ASKED_ANNOTATION = "sluice.dev/asked-by"
_ANSWER_RESYNCS = 4
"""Two minutes by default to answer: an operator that is upgraded is away for less."""
_UNANSWERED_RESYNCS = 10
"""Five minutes by default until a third operator's question, which is neither answered nor followed
by its taking over, is nobody's any more."""
_AGAIN_RESYNCS = 20
"""Ten minutes by default until an owner that answered is asked again."""


class Move(Enum):
    """What to do about an object now."""

    CARE = auto()
    ANSWER = auto()  # take another's question away, and care
    ASK = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class Claim:
    """What one operator knows of its right to an object; times are of a clock that is never set.

    `asked_s`: when it asked the owner; `refused_s`: when the owner last answered; `rival`: who
    asked it last, told of until `rival_until_s`; `other`: a third one that asks, since `other_s`.
    """

    asked_s: float | None = None
    refused_s: float = -inf
    rival: str = ""
    rival_until_s: float = -inf
    other: str = ""
    other_s: float = -inf


@dataclass(frozen=True, slots=True)
class Mark:
    """Whose an object is by its ConfigMap, and who asks for it; "" for nobody."""

    owner: str = ""
    asked_by: str = ""


def mark_of(uid: str, held: Object | None) -> Mark:
    """The mark on the ConfigMap `held` of the object with `uid`; none on one of somebody else."""
    meta = (held or {}).get("metadata", {})
    if uid not in {owner.get("uid") for owner in meta.get("ownerReferences") or ()}:
        return Mark()
    found = meta.get("annotations") or {}
    return Mark(found.get(OWNER_ANNOTATION, ""), found.get(_ASKED_ANNOTATION, ""))


def judge(mark: Mark, me: str, claim: Claim, now_s: float, resync_s: float) -> tuple[Move, Claim]:
    """What the operator `me` does about an object with `mark`, and what it then knows."""
    if mark.owner == me:
        known = replace(claim, asked_s=None, refused_s=-inf)
        if mark.asked_by not in ("", me):
            known = Claim(rival=mark.asked_by, rival_until_s=now_s + 2 * _AGAIN_RESYNCS * resync_s)
        return (Move.ANSWER if mark.asked_by else Move.CARE), known
    is_refused = now_s - claim.refused_s < _AGAIN_RESYNCS * resync_s
    if not mark.owner:  # an owner that lives makes its ConfigMap again
        return (Move.WAIT if is_refused else Move.CARE), claim
    if mark.asked_by == me:
        # A restarted process waits anew.
        asked_s = now_s if claim.asked_s is None else claim.asked_s
        is_over = now_s - asked_s >= _ANSWER_RESYNCS * resync_s
        return (Move.CARE if is_over else Move.WAIT), Claim(asked_s=asked_s)
    if claim.asked_s is not None:
        return Move.WAIT, Claim(refused_s=now_s)
    if is_refused:
        return Move.WAIT, claim
    if mark.asked_by:
        if mark.asked_by != claim.other:
            claim = replace(claim, other=mark.asked_by, other_s=now_s)
        if now_s - claim.other_s < _UNANSWERED_RESYNCS * resync_s:
            return Move.WAIT, claim
    return Move.ASK, Claim(asked_s=now_s)


def question(held: Object, asked_by: str) -> Object:
    """The question on the ConfigMap `held`; without `asked_by`, its end. Never a new ConfigMap."""
    meta = held["metadata"]
    annotations = {_ASKED_ANNOTATION: asked_by} if asked_by else {}
    known = {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**known, "annotations": annotations},
    }


def refusal(owner: str, me: str, now: float) -> Notice:
    """That `me` stands back from an object of `owner`'s."""
    text = f"operator {owner} cares for it: {me}, which watches it too, stands back; {_ADVICE}"
    return Notice(True, Reason.OTHER_OPERATOR, text, f"owner/{owner}/{me}/{int(now)}")


def told(status: dict[str, Any], claim: Claim, now_s: float) -> dict[str, Any]:
    """`status` of an owner's, with the rival that asked lately in Stalled, where nothing stalls."""
    if now_s > claim.rival_until_s:
        return status
    said = f"operator {claim.rival} asks for it too, and stands back; {_ADVICE}"
    entry = {"reason": Reason.OTHER_OPERATOR, "message": said}
    conditions = [
        {**c, **entry} if c["type"] == "Stalled" and c["status"] == "False" else c
        for c in status["conditions"]
    ]
    return {**status, "conditions": conditions}


_ADVICE = "uninstall one, or give each its own watchNamespaces"
