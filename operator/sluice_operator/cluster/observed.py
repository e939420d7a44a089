"""Objects of the API server, read into frozen values. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_core.errors import timestamp

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
"""The kubelet alternates between the two; one that flaps would be told at every turn."""
_HELD_BACK_S = 10.0
"""The kubelet's first back-off; before that it starts a container again within a second or two."""
_FAILED_S = 600.0
"""For so long a pod that failed may be why none serves."""
_UNMOUNTED_S = 120.0
"""A pod has no volumes and no network for so long before it is called trouble."""
_LATE_S = 10.0
"""A pod that is not gone so long after its grace period is stuck, and so is its room."""
_MAX_MESSAGE = 300
_LACKS_ROOM = ("Insufficient ", "Too many pods")
"""As the scheduler says it."""
_LACKS_QUOTA = "exceeded quota: "
"""As the API server says it. What it refuses for another reason, it would refuse in place of a pod
that serves, too."""
NODE_S = 600.0
"""A pod that no node takes for so long counts as one that will not come: a node that restarts, or
that an autoscaler adds, is there by then."""
_POD_META = ("name", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
_TEMPLATE_LABEL = "pod-template-hash"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod, or the creation of pods, makes no progress; the reason is Kubernetes' own word
    where it has one. `passes`: it may by itself, and soon."""

    reason: Reason | Foreign
    message: str
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of an object. `started_s`: Unix time of its start, 0 before it has one. `drains`: it
    leaves, and its grace period is not over: its room will be free. `roomless_s`: Unix time since
    when no node takes it, 0 where one does; `lacks_room`: more room on some node would do.
    `template`: names the pod template it is made from."""

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
        """True where no node takes it."""
        return self.trouble is not None and self.trouble.reason == "Unschedulable"

    @property
    def serving(self) -> bool:
        """True where the Service sends requests to it."""
        return self.ready and not self.terminating


@dataclass(frozen=True, slots=True)
class Rollout:
    """The Deployment's own account of itself; all 0 where there is none. `roomless_s`: Unix time
    since when pods cannot be made for want of quota, 0 where they can."""

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
        template=(meta.get("labels") or {}).get(_TEMPLATE_LABEL, ""),
    )


def unplaced(
    pods: Sequence[Pod], rollout: Rollout, wanted: int, now: float, patience_s: float
) -> int:
    """How many of the pods that are wanted no node has taken for `patience_s`, or no quota. Those
    that wait for the room of one that drains are none, nor those of a template of which no node has
    taken any: it may be one that none ever will, and must not take the place of pods that serve.
    One of them is, where it is room that lacks: it will have that of the next one that stops.
    """
    on_nodes = [pod for pod in pods if pod.started_s and not pod.has_no_room]
    known = {pod.template for pod in on_nodes}
    waiting = [pod for pod in pods if pod.has_no_room and not pod.terminating]
    placed = sum(not pod.has_no_room and (pod.drains or not pod.terminating) for pod in pods)
    late = [pod for pod in waiting if now - pod.roomless_s >= patience_s]
    num_late = sum(pod.template in known for pod in late)
    is_one_late = any(pod.lacks_room for pod in late if pod.template not in known)
    num_missing = max(0, wanted - placed - len(waiting))
    if num_missing and rollout.roomless_s and now - rollout.roomless_s >= patience_s:
        # Of the newest template, which some node knows where more are on nodes than of older ones.
        is_known = sum(not pod.terminating for pod in on_nodes) > rollout.outdated
        num_late += num_missing if is_known else 0
        is_one_late |= not is_known
    return max(0, min(num_late + is_one_late, wanted - placed))


def essence_of(body: Object) -> Object:
    """A live pod without its spec, and of its metadata only what is read: much may be in there."""
    meta = body["metadata"]
    kept = {key: meta[key] for key in _POD_META if key in meta}
    labels = {_TEMPLATE_LABEL: (meta.get("labels") or {}).get(_TEMPLATE_LABEL, "")}
    return {"metadata": {**kept, "labels": labels}, "status": body.get("status") or {}}


def failure_of(bodies: Iterable[Object], now: float) -> Trouble | None:
    """Why the newest of the pods that failed lately did, where Kubernetes says so: evicted, or not
    admitted by its node. Such a pod has no container that could."""
    newest = max(filter(_is_failure, bodies), key=_changed_s, default=None)
    if newest is None or now - _changed_s(newest) >= _FAILED_S:
        return None
    return _trouble(newest["status"]["reason"], newest["status"].get("message"))


def version(thing: Object) -> int:
    """The resourceVersion, which is a number that rises with each write (KEP-5504)."""
    return int(thing.get("metadata", {}).get("resourceVersion", 0))


def controller_of(body: Object) -> str | None:
    """uid of the object that a child is of; None where its owner references name none."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def rollout_of(body: Object | None) -> Rollout:
    """Read a live Deployment."""
    if body is None:
        return Rollout()
    status = body.get("status") or {}
    generation = body["metadata"].get("generation", 0)
    return Rollout(
        observed=status.get("observedGeneration", 0) >= generation,
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        trouble=_rollout_trouble(status),
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
    if progress.get("reason") == "DeploymentPaused":  # by hand: nothing that is edited comes about
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
    initial = status.get("initContainerStatuses") or ()  # of a webhook's, say
    containers = (*initial, *(status.get("containerStatuses") or ()))
    unready_s = _unready_s(status)
    told = next(filter(None, (_container_trouble(one, unready_s) for one in containers)), None)
    return told or _sandbox_trouble(status, now) or _unready_trouble(unready_s)


def _unready_s(status: Object) -> float:
    """The condition turns also when a container ends, but then before the next one starts."""
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
    """The last end of a container that stays. Init containers end when they are done."""
    ends = filter(None, map(last_end, status.get("containerStatuses") or ()))
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
    # One that is deleted fails without a reason, as its worker leaves with a signal's exit code.
    return status.get("phase") == "Failed" and bool(status.get("reason"))


def _changed_s(body: Object) -> float:
    """Unix time of the newest condition of a pod that has ended, else of its creation."""
    conditions = body["status"].get("conditions") or ()
    changed = [str(c.get("lastTransitionTime") or "") for c in conditions]
    return unix_time(max([*changed, str(body["metadata"].get("creationTimestamp") or "")]))


def _container_trouble(container: Object, unready_s: float) -> Trouble | None:
    """A container that was ready since it ended has no end that keeps it from serving."""
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
    """True where the kubelet waited before it started this run. It would again, and says nothing
    of that while the container runs."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    run = state.get("running") or state.get("terminated") or {}
    ended_s = unix_time((last.get("terminated") or {}).get("finishedAt"))
    return bool(ended_s) and unix_time(run.get("startedAt")) - ended_s >= _HELD_BACK_S


def _trouble(reason: str, message: object) -> Trouble:
    text = " ".join(str(message or "").split())
    return Trouble(Foreign(reason), text[:_MAX_MESSAGE])
