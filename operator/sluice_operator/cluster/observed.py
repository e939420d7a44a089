"""Objects of the API server, read into frozen values. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sluice_core.bounded import count
from sluice_core.errors import timestamp
from sluice_core.words import clean

from ..reasons import Foreign, Reason
from ..times import unix_time
from .ends import Ended, last_end

Object = Mapping[str, Any]

_WAITING_TROUBLES = frozenset(
    {
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
_SAME_TROUBLE = {"ErrImagePull": "ImagePullBackOff"}
"""The kubelet alternates between the two reasons; without this, each change would be reported."""
_HELD_BACK_S = 10.0
"""Seconds of the kubelet's first back-off; before that it restarts a container within 1 or 2 s."""
_FAILED_S = 600.0
"""Seconds for which a failed pod may explain that none serves."""
_UNMOUNTED_S = 120.0
"""Seconds without volumes or network before a pod is in trouble."""
_LATE_S = 10.0
"""Seconds after its grace period until a pod counts as stuck, and its room as taken."""
_MAX_MESSAGE, _MAX_REASON = 300, 128
_LACKS_ROOM = ("Insufficient ", "Too many pods")
"""The scheduler's words."""
_LACKS_QUOTA = "exceeded quota: "
"""The API server's words. If it refuses a pod for another reason, it would also refuse the
replacement of a pod that serves."""
NODE_S = 600.0
"""Seconds until a pod that no node takes counts as one that will not come. By then, a node that
restarts, or that an autoscaler adds, is there."""
_POD_META = ("name", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
MAX_VERSION = (1 << 63) - 1
"""Of a resourceVersion: etcd counts in 64 bits."""
SHARD_LABEL = "batch.kubernetes.io/job-completion-index"
"""On each pod of an Indexed Job."""
_TEMPLATE_LABELS = ("pod-template-hash", "leaderworkerset.sigs.k8s.io/template-revision-hash")
"""The one or the other is on each pod of a Deployment or a LeaderWorkerSet."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod, or the creation of pods, makes no progress; the reason is Kubernetes' own word if
    it has one. `passes`: the trouble may pass by itself, and soon.

    The words are the kubelet's, a registry's, a webhook's or an engine's, so they are cleaned."""

    reason: Reason | Foreign
    message: str
    passes: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.reason, Reason):
            object.__setattr__(self, "reason", Foreign(clean(self.reason, _MAX_REASON)))
        object.__setattr__(self, "message", clean(self.message))


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of an object. `started_s`: Unix time of its start, 0 before it. `drains`: it leaves
    within its grace period, and its room will be free. `roomless_s`: Unix time since when no node
    takes it, 0 if one does. `lacks_room`: more room on some node would suffice. `template`: names
    its pod template."""

    name: str
    uid: str
    ip: str
    ready: bool
    terminating: bool
    started_s: float
    trouble: Trouble | None
    drains: bool = False
    roomless_s: float = 0.0
    lacks_room: bool = False
    template: str = ""
    ended: Ended | None = None
    unready_s: float = 0.0
    has_volumes: bool = False

    @property
    def has_no_room(self) -> bool:
        """True if no node takes it."""
        return self.trouble is not None and self.trouble.reason == "Unschedulable"

    @property
    def serving(self) -> bool:
        """True if the Service sends requests to it."""
        return self.ready and not self.terminating


@dataclass(frozen=True, slots=True)
class Rollout:
    """The own account of what makes the pods; all 0 without one. `roomless_s`: Unix time since when
    quota prevents new pods, 0 if it does not."""

    observed: bool = False
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    trouble: Trouble | None = None
    roomless_s: float = 0.0

    @property
    def outdated(self) -> int:
        """Pods of an older spec that are not leaving yet."""
        return max(0, self.replicas - self.updated)


def pod_of(body: Object, now: float) -> Pod:
    """Read a live pod."""
    meta, status = body["metadata"], body.get("status") or {}
    scheduled = _condition(status, "PodScheduled")
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        ip=status.get("podIP") or "",
        ready=_condition(status, "Ready").get("status") == "True",
        terminating=meta.get("deletionTimestamp") is not None,
        started_s=unix_time(status.get("startTime")),
        trouble=_pod_trouble(status, now),
        ended=_last_end(status),
        unready_s=_unready_s(status),
        has_volumes=_condition(status, "PodReadyToStartContainers").get("status") == "True",
        # The API server writes when the grace period ends, not when it began.
        drains=now < unix_time(meta.get("deletionTimestamp")) + _LATE_S,
        roomless_s=_turned_s(scheduled) if scheduled.get("status") == "False" else 0.0,
        lacks_room=any(word in str(scheduled.get("message")) for word in _LACKS_ROOM),
        template=next(iter(_template(meta).values()), ""),
    )


def _template(meta: Object) -> dict[str, str]:
    labels = meta.get("labels") or {}
    return {name: labels[name] for name in _TEMPLATE_LABELS if name in labels}


def with_followers(pods: Sequence[Pod], followers: Sequence[Pod]) -> tuple[Pod, ...]:
    """The first pods of groups; one that waits for a pod of its group has that pod's trouble."""
    troubled = {pod.name.rpartition("-")[0]: pod for pod in followers if pod.trouble}
    return tuple(_waiting_for(pod, troubled.get(pod.name)) for pod in pods)


def _waiting_for(pod: Pod, follower: Pod | None) -> Pod:
    is_waiting = pod.trouble is None or pod.trouble.reason == Reason.NOT_READY
    if follower is None or follower.trouble is None or pod.ready or not is_waiting:
        return pod
    said = f"{follower.name} of its group: {follower.trouble.message}"
    trouble = replace(follower.trouble, message=said)
    roomless_s, lacks_room = follower.roomless_s, follower.lacks_room
    return replace(pod, trouble=trouble, roomless_s=roomless_s, lacks_room=lacks_room)


def unplaced(
    pods: Sequence[Pod], rollout: Rollout, wanted: int, now: float, patience_s: float
) -> int:
    """Number of wanted pods that no node or quota has accepted for `patience_s`. Pods that wait for
    a draining pod's room do not count. Nor do pods of a template that no node has taken yet:
    perhaps none ever will, and such pods must not replace pods that serve. But one of them counts
    if it lacks room: it gets the room of the next pod that stops."""
    on_nodes = [pod for pod in pods if pod.started_s and not pod.has_no_room]
    known = {pod.template for pod in on_nodes}
    waiting = [pod for pod in pods if pod.has_no_room and not pod.terminating]
    placed = sum(not pod.has_no_room and (pod.drains or not pod.terminating) for pod in pods)
    late = [pod for pod in waiting if now - pod.roomless_s >= patience_s]
    num_late = sum(pod.template in known for pod in late)
    is_one_late = any(pod.lacks_room for pod in late if pod.template not in known)
    num_missing = max(0, wanted - placed - len(waiting))
    if num_missing and rollout.roomless_s and now - rollout.roomless_s >= patience_s:
        # They have the newest template; a node has it if more pods are on nodes than outdated.
        is_known = sum(not pod.terminating for pod in on_nodes) > rollout.outdated
        num_late += num_missing if is_known else 0
        is_one_late |= not is_known
    return max(0, min(num_late + is_one_late, wanted - placed))


def essence_of(body: Object) -> Object:
    """A live pod without its spec and with only the metadata that is read: there may be much."""
    meta = body["metadata"]
    kept = {key: meta[key] for key in _POD_META if key in meta}
    labels = meta.get("labels") or {}
    shard = {SHARD_LABEL: labels[SHARD_LABEL]} if SHARD_LABEL in labels else {}
    kept["labels"] = {**_template(meta), **shard}
    return {"metadata": kept, "status": body.get("status") or {}}


def failure_of(bodies: Iterable[Object], now: float) -> Trouble | None:
    """Why the newest recently failed pod failed, if Kubernetes says so: evicted, or not admitted by
    its node. Such a pod has no container that could tell."""
    newest = max(filter(_is_failure, bodies), key=_changed_s, default=None)
    if newest is None or now - _changed_s(newest) >= _FAILED_S:
        return None
    return _trouble(newest["status"]["reason"], newest["status"].get("message"))


def version(thing: Object) -> int:
    """The resourceVersion, which is a number that rises with each write (KEP-5504)."""
    return count(thing.get("metadata", {}).get("resourceVersion"), MAX_VERSION) or 0


def uid_of(body: Object | None) -> str:
    """The object's uid; empty without an object."""
    return str(body["metadata"]["uid"]) if body else ""


def controller_of(body: Object) -> str | None:
    """uid of the object that a child is of; None if its owner references name none."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def rollout_of(body: Object | None) -> Rollout:
    """Read a live Deployment or LeaderWorkerSet, which tells its troubles in its pods alone."""
    if body is None:
        return Rollout()
    status = body.get("status") or {}
    generation = body["metadata"].get("generation", 0)
    is_of_groups = "leaderWorkerTemplate" in body.get("spec", {})
    return Rollout(
        observed=status.get("observedGeneration", 0) >= generation,
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        trouble=None if is_of_groups else _rollout_trouble(status),
        roomless_s=_refused_s(status),
    )


def _condition(status: Object, kind: str) -> Object:
    found: dict[str, Object] = {c.get("type"): c for c in status.get("conditions") or ()}
    return found.get(kind, {})


def _rollout_trouble(status: Object) -> Trouble | None:
    failure = _condition(status, "ReplicaFailure")
    if failure.get("status") == "True":  # quota, or an admission that refuses the pods
        return _trouble(failure.get("reason") or "FailedCreate", failure.get("message"))
    progress = _condition(status, "Progressing")
    if progress.get("reason") == "DeploymentPaused":  # paused by hand: no edit takes effect
        return _trouble("DeploymentPaused", "`kubectl rollout resume` lets it go on")
    if progress.get("status") == "False":
        return _trouble(
            progress.get("reason") or "ProgressDeadlineExceeded", progress.get("message")
        )
    return None


def _refused_s(status: Object) -> float:
    failure = _condition(status, "ReplicaFailure")
    lacks_quota = failure.get("status") == "True" and _LACKS_QUOTA in str(failure.get("message"))
    return _turned_s(failure) if lacks_quota else 0.0


def _pod_trouble(status: Object, now: float) -> Trouble | None:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _trouble(scheduled.get("reason") or "Unschedulable", scheduled.get("message"))
    if _condition(status, "Ready").get("status") == "True":
        return None
    initial = status.get("initContainerStatuses") or ()  # for example a webhook's
    unready_s = _unready_s(status)
    # The gate lives on while an engine beside it crashes, and is only the messenger.
    troubles = [_container_trouble(one, 0.0) for one in initial]
    troubles += [
        _container_trouble(one, unready_s) for one in status.get("containerStatuses") or ()
    ]
    told = next(filter(None, troubles), None)
    return told or _sandbox_trouble(status, now) or _unready_trouble(unready_s)


def _unready_s(status: Object) -> float:
    """The condition also turns when a container ends, but then before the next one starts."""
    states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    ready = _condition(status, "Ready")
    is_running = bool(states) and all("running" in state for state in states)
    if ready.get("status") != "False" or not is_running:
        return 0.0
    started_s = max(unix_time(state["running"].get("startedAt")) for state in states)
    return _turned_s(ready) if _turned_s(ready) > started_s else 0.0


def _unready_trouble(unready_s: float) -> Trouble | None:
    if not unready_s:
        return None
    return Trouble(Reason.NOT_READY, f"it was ready until {timestamp(unready_s)}", True)


def _last_end(status: Object) -> Ended | None:
    """The last end of a container that stays. Init containers end when they are done, except for a
    sidecar, which alone is `started` while it runs."""
    sidecars = [one for one in status.get("initContainerStatuses") or () if one.get("started")]
    ends = filter(None, map(last_end, [*(status.get("containerStatuses") or ()), *sidecars]))
    return max(ends, key=lambda ended: ended.at_s, default=None)


def _sandbox_trouble(status: Object, now: float) -> Trouble | None:
    """Missing volumes or network, without which no image is pulled."""
    sandbox = _condition(status, "PodReadyToStartContainers")
    since_s = _turned_s(sandbox)
    if sandbox.get("status") != "False" or now - since_s < _UNMOUNTED_S:
        return None
    said = f"without its volumes or its network since {timestamp(since_s)}"
    return _trouble("ContainerCreating", f"{said}; its events in `kubectl describe pod` say why")


def _turned_s(condition: Object) -> float:
    return unix_time(condition.get("lastTransitionTime"))


def _is_failure(body: Object) -> bool:
    status = body.get("status") or {}
    # A deleted pod fails without a reason, as its worker leaves with a signal's exit code.
    return status.get("phase") == "Failed" and bool(status.get("reason"))


def _changed_s(body: Object) -> float:
    """Unix time of the newest condition of an ended pod, else of its creation."""
    conditions = body["status"].get("conditions") or ()
    changed = [str(c.get("lastTransitionTime") or "") for c in conditions]
    return unix_time(max([*changed, str(body["metadata"].get("creationTimestamp") or "")]))


def _container_trouble(container: Object, unready_s: float) -> Trouble | None:
    """An end no longer counts as trouble once the container has been ready after it."""
    waiting = (container.get("state") or {}).get("waiting") or {}
    ended, said = last_end(container), str(waiting.get("reason", ""))
    reason = _SAME_TROUBLE.get(said, said)
    if reason in _WAITING_TROUBLES and not (ended and reason == "CrashLoopBackOff"):
        return _trouble(reason, waiting.get("message"))
    if ended is None or container.get("ready") or unready_s:
        return None
    # Its own words say more than "back-off restarting failed container".
    is_held_back = reason == "CrashLoopBackOff" or _was_held_back(container)
    word = Foreign("CrashLoopBackOff") if is_held_back else Reason.RESTARTING
    return Trouble(ended.reason if ended.is_for_memory else word, ended.sentence, not is_held_back)


def _was_held_back(container: Object) -> bool:
    """True if the kubelet waited before it started this run. It would wait again, but reports
    nothing while the container runs."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    run = state.get("running") or state.get("terminated") or {}
    ended_s = unix_time((last.get("terminated") or {}).get("finishedAt"))
    return bool(ended_s) and unix_time(run.get("startedAt")) - ended_s >= _HELD_BACK_S


def _trouble(reason: str, message: object) -> Trouble:
    text = " ".join(str(message or "").split())
    return Trouble(Foreign(reason), text[:_MAX_MESSAGE])
