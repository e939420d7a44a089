"""The owner of an object that two installations watch, perhaps with different images. Pure.

A child, a service's ConfigMap or a batch's Job, names its installation (`--instance`), that of its
first writer. Others leave the object alone, until a person writes another name there.
"""

from ..children.runtime import OWNER_ANNOTATION
from ..cluster.client import Ref
from ..cluster.observed import Object
from ..reasons import Reason
from ..status.events import Notice

_EVENT_S = 3600.0
"""Seconds for which the API server keeps an event."""


def owner_of(uid: str, held: Object | None) -> str:
    """The owner that the child `held` of the object with `uid` names; "" for nobody, or if it
    belongs to something else."""
    meta = (held or {}).get("metadata", {})
    if uid not in {owner.get("uid") for owner in meta.get("ownerReferences") or ()}:
        return ""
    return str((meta.get("annotations") or {}).get(OWNER_ANNOTATION, ""))


def refusal(owner: str, me: str, held: Ref, now: float) -> Notice:
    """Notice that `me` leaves `owner`'s object alone; its child `held` can hand it over."""
    command = f"kubectl annotate {held.kind.lower()} {held.name} -n {held.namespace} --overwrite"
    text = (
        f"installation {owner} cares for it, so {me} leaves it alone; "
        f"to hand it over: {command} {OWNER_ANNOTATION}={me}"
    )
    return Notice(True, Reason.OTHER_OPERATOR, text, f"owner/{owner}/{me}/{int(now // _EVENT_S)}")
