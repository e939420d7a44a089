"""Every reason that conditions, events and decisions give: stable words for look-ups and alerts.

If Kubernetes has a word of its own (CrashLoopBackOff, Unschedulable), that one is passed on.
`python -m sluice_operator.reasons` prints the table of `docs/reasons.md`.
"""

import sys
from enum import StrEnum
from typing import NewType, Self

Foreign = NewType("Foreign", str)
"""A reason in Kubernetes' words, or one that was read back."""


class Reason(StrEnum):
    """A word, and its meaning."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> Self:
        """A member that is its own word."""
        member = str.__new__(cls, word)
        member._value_, member.meaning = word, meaning
        return member

    # The object and its pods: Ready, Reconciling, Stalled
    SERVING = "Serving", "Pods serve."
    READING_MODEL = "ReadingModel", "The model is being read; pods are made after that."
    STARTING = "Starting", "No pod is ready yet."
    RESTARTING = (
        "Restarting",
        "A pod's container has ended and starts again. The message says how it ended, and when.",
    )
    HUNG = "Hung", "The engine of a pod makes no step. The kubelet restarts it if that lasts."
    NOT_READY = "NotReady", "A pod that was ready is not; its container runs."
    KEYS_MISSING = (
        "KeysMissing",
        "The Secret of `spec.apiKeySecretRef` is not there, or has no keys; no pod is made.",
    )
    SCALED_TO_ZERO = "ScaledToZero", "`spec.replicas` is 0, and no pod is left."
    SUSPENDED = "Suspended", "`spec.suspend` is true, and no pod is left."
    NO_GROUPS = (
        "NoLeaderWorkerSets",
        "`spec.hardware.nodes` needs LeaderWorkerSet, which the cluster does not have.",
    )
    ROLLING_OUT = "RollingOut", "Pods of an older spec are being replaced."
    NO_ROOM_TO_SURGE = (
        "NoRoomToSurge",
        "A new pod fits on no node beside the old ones, which go on serving; `rollout: Replace` "
        "stops one first.",
    )
    SCALING = "Scaling", "Pods start or drain."
    REPLICAS_TAKEN = (
        "ReplicasTaken",
        "Somebody keeps setting the replicas of the Deployment and has them now; the message says "
        "who, and what an HPA must name as its target.",
    )
    SETTLED = "Settled", "All is as the object asks."
    NOT_STALLED = "NotStalled", "Nothing stands in the way."
    INVALID_SPEC = (
        "InvalidSpec",
        "The spec cannot be read, or the API server refuses its pods; the old ones go on.",
    )
    UNKNOWN_FIELDS = (
        "UnknownFields",
        "Fields of the spec that this operator does not know, as a newer one does, are left out.",
    )
    NAME_TAKEN = "NameTaken", "An object of this name is somebody else's; it is left alone."
    AWAITING_DELETION = (
        "AwaitingDeletion",
        "Children of a deleted object of this name are still going; its own are made after them.",
    )
    OTHER_OPERATOR = (
        "OtherOperator",
        "Another installation of the operator cares for the object; the message says how to "
        "hand it over.",
    )
    APPLY_FAILED = (
        "ApplyFailed",
        "The API server refused to write or to show a child: quota, policy, missing right.",
    )
    CHILD_RESTORED = "ChildRestored", "A child was deleted or edited by hand and has been put back."
    # A batch: Accepted, Succeeded
    ACCEPTED = "Accepted", "The batch can run, or has run."
    NO_SERVICE = "NoService", "There is no InferenceService of the name in `spec.serviceRef`."
    QUEUED = "Queued", "Kueue has not admitted the Job of the batch yet."
    RUNNING = "Running", "Shards of the batch are at work."
    ALL_SUCCEEDED = "AllSucceeded", "Every request of the batch has a good result."
    SOME_FAILED = "SomeFailed", "Every request has a result, and some are errors."
    ALL_FAILED = "AllFailed", "Every request has a result, and all are errors."
    BAD_INPUT = "BadInput", "Nothing was sent: the message has the first bad lines."
    SHARDS_FAILED = "ShardsFailed", "A shard has ended without its results, again and again."
    EXPIRED = "Expired", "`spec.completionWindow` is over; the results so far stay."
    # ModelFits
    FITS = "Fits", "Weights, activations and KV cache fit into the memory."
    INSUFFICIENT_MEMORY = (
        "InsufficientMemory",
        "Weights, activations and KV cache do not fit into the memory; told is what would.",
    )
    IMPOSSIBLE_SIZE = "ImpossibleSize", "What is asked of the model contradicts its configuration."
    UNSUPPORTED_CHECKPOINT = "UnsupportedCheckpoint", "The model is there and cannot be served."
    LEFT_TO_ENGINE = (
        "LeftToEngine",
        "Another engine loads the model, which the operator cannot read or compute.",
    )
    HEADERS_UNAVAILABLE = (
        "HeadersUnavailable",
        "The operator could not read the model; its pods size themselves.",
    )
    # MetricsAvailable
    NO_PODS = "NoPods", "No pod has reported yet."
    NO_READY_PODS = "NoReadyPods", "No pod is ready yet."
    NO_EVIDENCE_YET = "NoEvidenceYet", "No pod has closed its first tick of 2 s yet."
    ALL_PODS_HEARD = "AllPodsHeard", "Every ready pod gives fresh evidence."
    SOME_PODS_SILENT = (
        "SomePodsSilent",
        "The pods named give no fresh evidence; the others decide.",
    )
    MAJORITY_SILENT = (
        "MajoritySilent",
        "Most ready pods give no fresh evidence: nothing is decided.",
    )
    METRICS_UNAVAILABLE = (
        "MetricsUnavailable",
        "Cap and replicas are held: too few pods report metrics.",
    )
    # SLOMet, SLOFeasible, RequestsSucceed
    NO_TRAFFIC = "NoTraffic", "Nothing arrived within the window."
    NO_TARGETS = "NoTargets", "`spec.slo` asks for nothing."
    TARGETS_HOLD = "TargetsHold", "Every target holds over its window, among all arrivals."
    TARGET_MISSED = "TargetMissed", "At least one target does not hold over its window."
    REQUESTS_SUCCEED = "RequestsSucceed", "Hardly a request fails."
    REQUESTS_FAIL = (
        "RequestsFail",
        "The engine answers with errors, or cuts its answers; the message says how and how many.",
    )
    FEASIBLE = "Feasible", "No target is out of reach by the evidence."
    NO_EVIDENCE = "NoEvidence", "The cap was changed too lately to tell: no evidence since."
    INTERFERENCE = (
        "Interference",
        "Gaps are over target under interference that half the cap would not hold.",
    )
    PREFILL_INTERFERENCE = (
        "PrefillInterference",
        "Gaps are over target only beside another request's prompt, which no cap mends: the "
        "message has the token budget to set.",
    )
    LONG_STEPS = (
        "LongSteps",
        "Gaps are over target only in steps that were long so that first tokens were in time.",
    )
    PREFILL_EXCEEDS_TARGET = (
        "PrefillExceedsTarget",
        "One prompt alone takes longer than is allowed.",
    )
    CPU_THROTTLED = "CPUThrottled", "The CPU limit of the pods breaks the inter-token target."
    INTER_TOKEN_LATENCY_INFEASIBLE = (
        "InterTokenLatencyInfeasible",
        "Not even the smallest cap holds the inter-token target on this hardware.",
    )
    END_TO_END_INFEASIBLE = "EndToEndInfeasible", "One request alone takes longer than is allowed."
    # The cap moves
    CAP_PREDICTED = "CapPredicted", "The first cap, from the start-up profile."
    EPOCH_RECOVERED = "EpochRecovered", "Pods were ahead of what had been written down."
    WITHIN_LIMITS = (
        "WithinLimits",
        "Cap or replicas were outside their limits: those of the spec, or of memory, have changed.",
    )
    HEADROOM = "Headroom", "The gaps at the full cap have shown room for more."
    LOAD_NEEDS_CAP = (
        "LoadNeedsCap",
        "No more pods may come, and below this cap arrivals would wait for ever: the gaps pay.",
    )
    QUEUE_STANDS = (
        "QueueStands",
        "Requests wait for the cap; some will be late, or the step model sees far more room.",
    )
    FIRST_TOKEN_BREACHED = "FirstTokenBreached", "First tokens are late for want of a larger cap."
    END_TO_END_BREACHED = "EndToEndBreached", "Requests end late for want of a larger cap."
    TOO_MANY_TO_END = (
        "TooManyToEnd",
        "So many run at once that none of them ends in time: lowered.",
    )
    INTER_TOKEN_LATENCY_BREACHED = "InterTokenLatencyBreached", "Gaps are over target: lowered."
    RAISED_TOO_FAR = (
        "RaisedTooFar",
        "Since the last raise gaps are over target and the step model sees less room: lowered.",
    )
    INTERFERENCE_LASTS = "InterferenceLasts", "The pod is slower for now: lowered until it ends."
    # The cap holds
    STATIC_BATCH = (
        "StaticBatch",
        "`batching.mode` is Static: the cap is the size of a batch, and only the replicas move.",
    )
    CAP_UNUSED = "CapUnused", "Fewer run than the cap allows, which proves nothing."
    COLLECTING_EVIDENCE = "CollectingEvidence", "Headroom needs the samples that are named."
    AWAITING_ACKNOWLEDGEMENT = (
        "AwaitingAcknowledgement",
        "Pods have not taken over the last change.",
    )
    WAITING_FOR_KV = (
        "WaitingForKV",
        "Requests wait for KV memory: pods help, a higher cap does not.",
    )
    PREFILL_BOUND = "PrefillBound", "The time went into prefill, not into waiting for the cap."
    COLD_START = "ColdStart", "The time went into a cold start."
    OUTSIDE_ENGINE = "OutsideEngine", "The time went into tokenising, HTTP, or a busy CPU."
    INTER_TOKEN_LATENCY_AT_TARGET = "InterTokenLatencyAtTarget", "The gaps leave no room."
    AT_CEILING = "AtCeiling", "The cap is what memory or the user allows."
    ENDS_AT_TARGET = "EndsAtTarget", "Of more at once, each would end too late."
    AT_PREDICTED_CAP = "AtPredictedCap", "The step model sees no room above."
    KV_MEMORY = "KVMemory", "The KV memory carries no more sequences of the observed lengths."
    CAP_REMEMBERED = "CapRemembered", "A higher cap has broken the target and is not retried yet."
    # The replicas
    STEADY = "Steady", "The replicas fit the arrivals."
    SCALED_OUT = "ScaledOut", "What arrives needs more pods."
    SCALED_IN = "ScaledIn", "Fewer pods hold the targets with margin."
    SCALE_UP_WINDOW = "ScaleUpWindow", "More are wanted, not for long enough yet."
    SCALE_DOWN_WINDOW = "ScaleDownWindow", "Fewer would do, not for long enough yet."
    AWAITING_REPLICAS = "AwaitingReplicas", "Pods asked for are starting or drain a backlog."
    AT_MAX_REPLICAS = "AtMaxReplicas", "More pods are needed than the spec allows."
    REPLICAS_EXTERNAL = (
        "ReplicasExternal",
        "Somebody else owns the number: `spec.replicas` is set, or the Deployment's is taken.",
    )


def table() -> str:
    """All reasons in Markdown."""
    rows = [f"| `{reason}` | {reason.meaning} |" for reason in Reason]
    return "\n".join(["| reason | what it says |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
