"""`sluice status NAME`: what the object and its events say of one service, in one page of text."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from sluice_core.bounded import count
from sluice_core.contract import TARGETS
from sluice_operator.reasons import Reason

from sluice.kube import (
    NAMESPACE,
    OTHER_VERSION,
    UNREADABLE,
    Kube,
    KubeError,
    add_object_arguments,
    find_object,
)
from sluice.page import text_table

GIB = 2**30
UNSEEN = "no operator has looked at it yet; is one running, and does it serve this namespace?"
MAX_EVENTS = 12
Object = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_object_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice status`: 0, or 2 if the object cannot be read."""
    try:
        kube, body = find_object(args)
        page = describe(body, *_events_of(kube, args.name, body))
    except KubeError as e:
        print(f"sluice status: {e}", file=sys.stderr)
        return 2
    except UNREADABLE as e:
        print(f"sluice status: {OTHER_VERSION}: {e}", file=sys.stderr)
        return 2
    print(page)
    return 0


def _events_of(kube: Kube, name: str, body: Object) -> tuple[Sequence[Object], str]:
    meta = body.get("metadata") or {}
    try:
        return kube.events(name, meta.get("namespace", NAMESPACE), meta.get("uid")), ""
    except KubeError as e:  # for example without the right to list events
        return (), str(e)


def describe(body: Object, events: Sequence[Object], unlisted: str = "") -> str:
    """The page. `events`: of the object, oldest first; `unlisted`: why they cannot be listed."""
    meta, status = body.get("metadata") or {}, body.get("status") or {}
    parts = {
        f"{meta.get('namespace', '-')}/{meta.get('name', '-')}": _head(body, status),
        "Plan": _plan(status),
        "Cap": _cap(status.get("batching") or {}),
        "Evidence": _evidence(status),
        "Replicas": _replicas(status) if status else "",
        "Conditions": _conditions(status),
        "Events": f"cannot be listed: {unlisted}" if unlisted else _events(events),
    }
    return "\n\n".join(f"{title}\n{indent(text, '  ')}" for title, text in parts.items() if text)


def _head(body: Object, status: Object) -> str:
    meta, model = body.get("metadata") or {}, (body.get("spec") or {}).get("model") or {}
    uri, since = model.get("uri", "-"), meta.get("deletionTimestamp")
    leaves = f"; it is being deleted, since {since}" if since else ""
    note = note_on(status, meta.get("generation", 0))
    if not status:
        return f"{uri}: {note}{leaves}"
    late = f" ({note})" if note else ""
    return f"{uri} at {status.get('url', 'no address yet')}{late}{leaves}"


def note_on(status: Object, generation: int) -> str:
    """Why `status` does not describe the spec at `generation`, "" if it does."""
    if not status:
        return UNSEEN
    seen = status.get("observedGeneration", 0)
    return "" if seen == generation else f"of generation {seen}; the spec is at {generation}"


def _plan(status: Object) -> str:
    memory, found = status.get("memory") or {}, []
    for name in ("planned", "measured"):
        sizes = {key: count(value) or 0 for key, value in (memory.get(name) or {}).items()}
        if sizes:
            told = (f"{k.removesuffix('_bytes')} {v / GIB:.3f}" for k, v in sizes.items())
            found.append(f"{name} (GiB): {', '.join(told)}")
    if "kvTokens" in memory:
        error = memory.get("errorPercent")
        off = f"; measured against planned: {error} %" if error else ""
        found.append(f"the KV cache of a pod holds {memory['kvTokens']} tokens{off}")
    if "sequences" in memory:
        found.append(
            f"of the observed lengths it carries {memory['sequences']} sequences; a full cap would "
            f"preempt {memory.get('expectedPreemptions', '-')} % of the time"
        )
    return "\n".join(found)


def _cap(batching: Object) -> str:
    if "cap" not in batching:
        return ""
    limited = batching.get("limitedBy")
    lines = [
        f"{batching['cap']} of at most {batching.get('ceiling', '?')}, epoch "
        f"{batching.get('epoch', '-')}" + (f", limited by {limited}" if limited else ""),
        f"effective batch {batching.get('effectiveBatch', '-')}, predicted to hold the "
        f"inter-token target: {batching.get('predicted', '-')}",
    ]
    lines += _why(batching)
    if change := batching.get("lastChange"):
        moved, time, reason = _change(change)
        lines.append(f"last change: {moved} at {time}: {reason}")
    return "\n".join(lines)


def _change(change: Object) -> tuple[str, str, str]:
    """The old and the new value, the time and the reason."""
    moved = f"{change.get('from', '-')} -> {change.get('to', '-')}"
    return moved, change.get("time", "-"), change.get("reason", "-")


def _why(part: Object) -> list[str]:
    """The last look's reason, and the change that advisory mode proposes."""
    told = [f"{part['reason']}: {part.get('message', '')}"] if "reason" in part else []
    return told + ([f"advised: {part['proposed']}"] if "proposed" in part else [])


def _evidence(status: Object) -> str:
    slo, load = status.get("slo") or {}, status.get("load") or {}
    header = ["target", "asked", "measured", "samples", "over", "over %", "allowed %", "verdict"]
    header.append("samples to headroom")
    keys = ("target", "measured", "samples", "over", "usedPercent", "allowedPercent", "verdict")
    is_unused = (status.get("batching") or {}).get("reason") == Reason.CAP_UNUSED
    rows = [
        [name, *(str(slo[name].get(key, "-")) for key in keys), _needed(slo[name], is_unused)]
        for name in TARGETS
        if name in slo
    ]
    misses = {name: n for name, n in (load.get("misses") or {}).items() if n}
    lines = [text_table([header, *rows])] if rows else []
    if load:
        lines.append(
            f"{load.get('arrivalsPerSecond', '-')} arrivals/s, {load.get('running', 0)} running, "
            f"{load.get('waiting', 0)} waiting"
        )
    if misses:
        told = ", ".join(f"{n} {name}" for name, n in misses.items())
        lines.append(f"late first tokens by cause: {told}")
    return "\n".join(lines + ([f"failed requests: {failed}"] if (failed := failures(load)) else []))


def failures(load: Object) -> str:
    """The failed requests of the window by kind, and their share; "" without any."""
    by = {kind: num for kind, num in (load.get("failed") or {}).items() if num}
    told = ", ".join(f"{num} {kind}" for kind, num in sorted(by.items(), key=lambda one: -one[1]))
    return f"{told} ({load.get('failedPercent', '-')} %)" if told else ""


def _needed(target: Object, is_unused: bool) -> str:
    """Clean samples that headroom still needs. `is_unused`: no more requests run than a lower cap
    allows, so no sample says anything about this cap."""
    rare = "" if target.get("verifiable", True) else " (over an hour at this traffic)"
    unused = " (the cap is unused)" if target.get("samplesNeeded") else ""
    return f"{target.get('samplesNeeded', '-')}{unused if is_unused else rare}"


def _replicas(status: Object) -> str:
    scaling, pods = status.get("scaling") or {}, status.get("pods") or {}
    named = {kind: pods.get(kind) for kind in ("silent", "noisy")}
    owner = scaling.get("replicasOwner", "-")
    lines = [
        f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)} ready, wanted "
        f"{scaling.get('desired', '-')}, owner {owner}"
    ]
    lines += _why(scaling)
    lines += [f"{kind}: {', '.join(names)}" for kind, names in named.items() if names]
    changes = map(_change, scaling.get("history") or ())
    lines += [f"{time}  {moved}: {reason}" for moved, time, reason in changes]
    return "\n".join(lines)


def _conditions(status: Object) -> str:
    return "\n".join(
        f"{c.get('type', '-')}={c.get('status', '-')} ({c.get('reason', '')}) since "
        f"{c.get('lastTransitionTime', '-')}" + (f": {c['message']}" if c.get("message") else "")
        for c in status.get("conditions") or ()
    )


def _events(events: Sequence[Object]) -> str:
    lines = [
        f"{e.get('lastTimestamp') or '-'}  {e.get('reason') or '-'}: {e.get('message') or ''}"
        for e in events
    ]
    left = len(lines) - MAX_EVENTS
    return "\n".join([*([f"({left} older ones)"] if left > 0 else []), *lines[-MAX_EVENTS:]])
