"""The schema of `status`: what the operator reports. No floats: shares and times are texts.

A newer operator may run beside this CRD. So every level takes fields that it does not declare, and
our words are texts. The API server refuses a whole status for one word that an `enum` lacks.
"""

from typing import Any, Literal, get_args

from sluice_core.contract import CapIs, GapsFrom

from ..spec.kinds import Schema
from ..spec.service import MAX_HISTORY, BatchingMode
from ..tuner.types import LimitedBy, Verdict

COUNT: Schema = {"type": "integer", "format": "int64", "minimum": 0}
SIGNED: Schema = {"type": "integer", "format": "int64"}
TEXT: Schema = {"type": "string", "maxLength": 1024}
MESSAGE: Schema = {"type": "string", "maxLength": 32768}
TIME: Schema = {"type": "string", "format": "date-time"}
FLAG: Schema = {"type": "boolean"}
BYTES_BY_CLASS: Schema = {
    "type": "object",
    "additionalProperties": {"x-kubernetes-int-or-string": True},
}
"""Whole bytes, or a quantity as text."""


def say(schema: Schema, description: str) -> Schema:
    """`schema` with a description for `kubectl explain`."""
    return {"description": description, **schema}


def group(description: str, **properties: Schema) -> Schema:
    """An object with `properties`, each optional, and whatever a newer operator adds."""
    schema = {"description": description, "type": "object", "properties": properties}
    return {**schema, "x-kubernetes-preserve-unknown-fields": True}


def names(description: str) -> Schema:
    """A list of names of pods."""
    items = {"type": "string", "maxLength": 253}
    schema = {"type": "array", "maxItems": 1000, "items": items}
    return {"description": description, **schema, "x-kubernetes-list-type": "atomic"}


def one_of(description: str, literal: Any) -> Schema:
    """One of the texts of a `Literal`, which the description lists."""
    return say(TEXT, f"{description} One of {', '.join(get_args(literal))}.")


def _target(name: str) -> Schema:
    return group(
        f"Evidence on {name} in the window.",
        target=say(TEXT, "The target, as a duration."),
        measured=say(TEXT, "The measured time at `percentile`, as a duration."),
        bound=say(TEXT, "Its upper bound, of 95 % if samples are independent; none of too few."),
        over=say(COUNT, "Samples over target."),
        samples=say(COUNT, "Samples in the window."),
        allowedPercent=say(TEXT, "Share that may be over."),
        usedPercent=say(TEXT, "Share that was over."),
        verdict=one_of("What the evidence says.", Verdict),
        samplesNeeded=say(COUNT, "Clean samples until headroom is shown."),
        verifiable=say(FLAG, "False where they would take over an hour at this traffic."),
    )


_DECISION: Schema = {"time": TIME, "reason": TEXT, "from": COUNT, "to": COUNT}
CONDITION = group(
    "As everywhere in Kubernetes.",
    type={"type": "string", "maxLength": 64},
    status={"type": "string", "enum": ["True", "False", "Unknown"]},
    reason=TEXT,
    message=MESSAGE,
    lastTransitionTime=TIME,
    observedGeneration=SIGNED,
)


def conditions_of(about: str) -> Schema:
    """The list of conditions, by type."""
    return {
        "description": about,
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {**CONDITION, "required": ["type", "status"]},
    }


STATUS = group(
    "What was seen and decided; written by the operator only.",
    observedGeneration=say(SIGNED, "The generation that this status is about."),
    url=say(TEXT, "Where the Service answers, inside the cluster."),
    replicas=say(COUNT, "Pods there are."),
    readyReplicas=say(COUNT, "Pods that serve."),
    selector=say(TEXT, "Label selector of the pods, for /scale."),
    model=group(
        "The checkpoint, as its headers say.",
        name=say(TEXT, "The `model` of the OpenAI API."),
        resolvedRevision=say(TEXT, "Commit of an hf:// model."),
        parameters=say(COUNT, "Number of weights."),
        bytes=say(COUNT, "Bytes of the weights."),
    ),
    memory=group(
        "Bytes by class.",
        planned=say(BYTES_BY_CLASS, "By the formula."),
        measured=say(BYTES_BY_CLASS, "By a worker at its start."),
        kvTokens=say(COUNT, "Tokens that the KV cache of one pod holds."),
        errorPercent=say(
            TEXT, "Measured against planned, in percent of what is planned for the model."
        ),
        sequences=say(COUNT, "How many of the observed lengths one pod carries, 99 % of the time."),
        expectedPreemptions=say(
            TEXT, "Percent of the time that a full cap of such lengths outgrows the KV cache."
        ),
    ),
    batching=group(
        "The cap on concurrent sequences of a pod.",
        mode=one_of("How batches are formed.", BatchingMode),
        ceiling=say(COUNT, "Most that memory and the user allow; fixed at start."),
        cap=say(COUNT, "The cap in force."),
        initialNumSeqs=say(COUNT, "The cap before any evidence."),
        capIs=one_of("Where the cap is held; gate: before an engine that runs more.", CapIs),
        gapsFrom=one_of("What gaps between tokens are measured on.", GapsFrom),
        reason=say(TEXT, "Why the cap is what it is, at the last look."),
        message=say(MESSAGE, "The same with its evidence."),
        proposed=say(COUNT, "The cap that advisory mode would set."),
        predicted=say(COUNT, "Largest cap that the step model expects to hold the target."),
        effectiveBatch=say(TEXT, "Mean number of sequences that ran in a step."),
        epoch=say(COUNT, "Number of the last change."),
        step=group(
            "What a step takes in ms, as fitted: the sum of these.",
            fixedMs=say(TEXT, "Of every step."),
            sequenceMs=say(TEXT, "For each sequence that decodes."),
            kvTokenMs=say(TEXT, "For each token in their KV cache."),
            promptTokenMs=say(TEXT, "For each prompt token beside them."),
        ),
        limitedBy=one_of(
            "What keeps the cap from rising; User: maxNumSeqs, static.size or "
            "maxNumBatchedTokens, also by default.",
            LimitedBy,
        ),
        lastChange=group("The last change of the cap.", **_DECISION, epoch=COUNT),
    ),
    slo=group(
        "The promise against what was measured.",
        percentile=say(TEXT, "The percentile of the measured times, as `spec.slo` has it."),
        timeToFirstToken=_target("the first token"),
        interTokenLatency=_target("the gaps between tokens"),
        endToEnd=_target("whole requests"),
        met=say(FLAG, "Whether every target holds over the window."),
        goodPercent=say(TEXT, "Requests whose first token, mean gap and end held."),
        smoothPercent=say(TEXT, "Requests whose first token and end held, with hardly a gap over."),
    ),
    scaling=group(
        "Replicas, and why.",
        reason=say(TEXT, "Why the replicas are what they are, at the last look."),
        message=say(MESSAGE, "The same with its evidence."),
        proposed=say(COUNT, "The replicas that advisory mode would set."),
        desired=say(COUNT, "Replicas wanted now."),
        pending=say(COUNT, "Pods that are not ready yet."),
        replicasOwner=one_of("Who sets the replicas.", Literal["Sluice", "External"]),
        lastDecision=group("The last decision.", **_DECISION),
        history={
            "description": "Last changes, newest first.",
            "type": "array",
            "maxItems": MAX_HISTORY,
            "items": group("One.", **_DECISION),
            "x-kubernetes-list-type": "atomic",
        },
    ),
    load=group(
        "What arrives.",
        arrivalsPerSecond=say(TEXT, "Requests a second."),
        running=say(COUNT, "Sequences that run, over all pods."),
        waiting=say(COUNT, "Requests that wait, over all pods."),
        cause=say(TEXT, "Where most misses of the first token come from."),
        tokens=say(COUNT, "Tokens generated in the window, by the pods that serve."),
        promptTokens=say(COUNT, "Prompt tokens that they computed in it."),
        finished=say(COUNT, "Requests that they finished in it."),
        failed={
            "description": "Requests that the engines failed in the window, by the status that "
            "they answered; cut: an answer without its end; died: a connection that broke in front "
            "of it.",
            "type": "object",
            "additionalProperties": COUNT,
        },
        failedPercent=say(TEXT, "Share of the requests that ended in the window."),
        podSeconds=say(COUNT, "Seconds that they served of it, summed over them."),
        busyPercent=say(TEXT, "Of these, in engine steps."),
        misses=group(
            "First tokens over target in the window, each by the largest part of its time; of "
            "requests that were refused or never begun, by what they would have waited for.",
            cap=say(COUNT, "Waiting for the cap."),
            kv=say(COUNT, "Waiting for KV blocks."),
            prefill=say(COUNT, "Computing prompts."),
            outside=say(COUNT, "Outside the engine: a cold start, tokenising, HTTP."),
            other=say(COUNT, "What the pod booked to none of these."),
        ),
        lengths=group(
            "Prompt plus output of finished requests, in tokens.",
            mean=say(TEXT, "Their mean."),
            sigma=say(TEXT, "Their standard deviation."),
        ),
    ),
    pods=group(
        "Pods that stand out.",
        silent=names("Without metrics; left out of the sums."),
        noisy=names("Alone over target; named, not averaged."),
    ),
    conditions=conditions_of(
        "Ready, Reconciling, Stalled, ModelFits, SLOMet, SLOFeasible, "
        "MetricsAvailable, RequestsSucceed."
    ),
)
"""The structural schema of `status`."""
