"""The schema of a batch's `status`, made as that of a service."""

from typing import Final, Literal, get_args

from ..spec.batch import MAX_SHARDS
from ..spec.kinds import Schema
from .schema import COUNT, SIGNED, TEXT, conditions_of, group, one_of, say

State = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired"]
"""OpenAI's words."""
ENDS: Final = tuple(get_args(State)[3:])
"""States that do not change any more."""

BATCH_STATUS: Schema = group(
    "What was seen; written by the operator only.",
    observedGeneration=say(SIGNED, "The generation that this status is about."),
    state=one_of("How far it is.", State),
    counts=group(
        "Requests of the whole input.",
        total=say(COUNT, "All of them; 0 while they are checked."),
        completed=say(COUNT, "Those with a good result."),
        failed=say(COUNT, "Those with another one."),
    ),
    rate=say(TEXT, "Requests a second, of the pods that run."),
    timeLeft=say(COUNT, "Seconds until the end, at that rate."),
    shards=group(
        "The parts of the input.",
        total=say(COUNT, "How many there are."),
        done=say(COUNT, "How many have ended well."),
        results={
            "description": "Results of each, by its number.",
            "type": "array",
            "maxItems": MAX_SHARDS,
            "items": group("One.", completed=COUNT, failed=COUNT),
            "x-kubernetes-list-type": "atomic",
        },
    ),
    conditions=conditions_of("Accepted, ModelFits, Succeeded."),
)
"""The structural schema of `status`."""
