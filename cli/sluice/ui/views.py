"""The pages: of all services, of one, and of one server. Pure.

Each section has an id, by which the script of the page replaces it. All texts of others get into
HTML by `tag`, which escapes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from sluice_core.bounded import count
from sluice_core.contract import Evidence, RuntimeConfig
from sluice_core.words import clean
from sluice_operator.spec.service import SpecError, parse
from sluice_operator.times import milliseconds, unix_time

from sluice import report
from sluice.kube import OTHER_VERSION, UNREADABLE
from sluice.page import Html, join, tag
from sluice.status import GIB, note_on

from .charts import Line, Mark, Part, bar, chart, clock, span_of, spark
from .history import TARGETS, Point
from .objects import (
    Detail,
    Fleet,
    Object,
    condition,
    duration,
    key_of,
    marks_of,
    pod_rows,
    verdict_of,
)

CAP = Line("cap", "cap", "blue", is_step=True)
WAITING = Line("waiting", "waiting", "orange")
TIMES = {
    "timeToFirstToken": Line("timeToFirstToken", "measured", "purple"),
    "interTokenLatency": Line("interTokenLatency", "measured", "pink"),
    "endToEnd": Line("endToEnd", "measured", "green"),
}
COUNTS = {
    "Cap": (CAP, Line("batch", "effective batch", "orange")),
    "Pods": (Line("wanted", "wanted", "grey", True), Line("ready", "ready", "green", True)),
    "Queue": (WAITING, Line("running", "running", "blue")),
    "Arrivals a second": (Line("arrivals", "requests", "grey"),),
}
MEMORY = {
    "weights_bytes": ("weights", "blue"),
    "activation_bytes": ("activations", "orange"),
    "workspace_bytes": ("workspace", "pink"),
    "reserve_bytes": ("reserve", "purple"),
    "kv_cache_bytes": ("KV cache", "green"),
}
"""Classes of bytes: their names and colours."""
COLOURS = {"Breach": "bad", "Hold": "warn", "Headroom": "good"}
"""Of verdicts; others have none."""


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """One server. `at_s`: Unix time of its last answer; `problem`: why none has come since."""

    url: str
    config: RuntimeConfig
    evidence: Evidence
    points: Sequence[Point]
    marks: Sequence[Mark]
    at_s: float
    problem: str


def document(title: str, *sections: Html) -> Html:
    """A whole page."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} - sluice ui"),
        tag("link", rel="icon", href="data:,"),
        tag("link", rel="stylesheet", href="/style.css"),
        tag("script", src="/live.js", defer=""),
    )
    gone = tag("p", class_="problem", id="gone", hidden="", role="alert")
    body = tag("body", gone, tag("main", *sections))
    return join(Html("<!doctype html>"), tag("html", head, body, lang="en"))


def fleet(seen: Fleet, now: float) -> Html:
    """All services as a table, the worst first, and all batches."""
    bad = sum(_chip_of(body)[0] == "Breach" for body in seen.services)
    told = f"services: {len(seen.services)}, over a target: {bad}"
    header = ["service", "state", "first tokens", "gaps", "cap", "pods", "waiting"]
    rows = [_row(seen, body, now) for body in seen.services]
    none = tag("p", "There is no InferenceService here.") if seen.at_s else ""
    return document(
        "Services",
        _head("Services", [told], seen.at_s, seen.problem, seen.notes),
        _section("fleet", "", _grid(header, rows) if rows else none),
        *_batches(seen.batches),
    )


def service(seen: Fleet, body: Object, detail: Detail, now: float) -> Html:
    """One service. Where its status is of another version, that alone is told."""
    namespace, name = key_of(body)
    try:
        told, parts = _described(body), list(_parts(seen, body, detail, now))
    except UNREADABLE:
        told, parts = [OTHER_VERSION], []
    notes = (*seen.notes, *detail.notes)
    head = _head(f"{namespace}/{name}", told, seen.at_s, seen.problem, notes, is_below=True)
    return document(name, head, *parts)


def server(seen: ServerSeen, now: float) -> Html:
    """One server, without a cluster."""
    config, memory = seen.config, seen.evidence.memory
    slo = {
        "timeToFirstToken": config.slo.ttft_ms,
        "interTokenLatency": config.slo.itl_ms,
        "endToEnd": config.slo.e2e_ms,
    }
    told = [
        f"cap {config.cap} of at most {config.ceiling}, epoch {config.epoch}, order "
        f"{config.scheduling_policy}",
        "P99 over the minute before",
        *([clean(config.hung.reason)] if config.hung else []),
    ]
    return document(
        seen.url,
        _head(seen.url, told, seen.at_s, seen.problem, ()),
        _charts(seen.points, slo, "99", seen.marks, now),
        _decisions(seen.marks, "The cap has not changed in the last hour."),
        *_memory({"planned": memory.planned, "measured": memory.measured}),
    )


def _head(
    title: str,
    told: Sequence[object],
    at_s: float,
    problem: str,
    notes: Sequence[str],
    *,
    is_below: bool = False,
) -> Html:
    """Title, what is told at once, and how old the data is."""
    up = tag("a", "all services", href="/") if is_below else ""
    age = f"data of {clock(at_s)}" if at_s else "no data yet"
    old = f"{problem}. All below is old: {age}." if at_s else f"{problem}."
    return _section(
        "head",
        "",
        tag("h1", title),
        tag("nav", up, tag("span", age, class_="dim")),
        *(tag("p", one) for one in told),
        *(tag("p", note, class_="note") for note in notes),
        tag("p", old, class_="problem", role="status") if problem else "",
    )


def _section(name: str, title: str, *inside: object) -> Html:
    return tag("section", tag("h2", title) if title else "", *inside, id=name)


def _grid(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """A table whose cells know their columns, for a screen without room for them."""
    head = tag("tr", *(tag("th", name) for name in header))
    lines = (
        tag("tr", *(tag("td", cell, data_name=n) for n, cell in zip(header, row, strict=True)))
        for row in rows
    )
    return tag("table", tag("thead", head), tag("tbody", *lines))


def _chip(text: str, colour: str = "") -> Html:
    return tag("span", text, class_=f"chip {colour}".rstrip())


def _chip_of(body: Object) -> tuple[str, Html]:
    """The worst verdict, and how it is shown, with what keeps the service from being ready."""
    try:
        verdict, ready = verdict_of(body), condition(body, "Ready")
        chip = _chip(verdict, COLOURS.get(verdict, ""))
        if ready.get("status") == "True":
            return verdict, chip
        return verdict, join(_chip(f"not ready: {ready.get('reason', 'unseen')}", "bad"), " ", chip)
    except UNREADABLE:
        return "", _chip("?", "bad")


def _row(seen: Fleet, body: Object, now: float) -> list[object]:
    namespace, name = key_of(body)
    where = f"/services/{quote(namespace, safe='')}/{quote(name, safe='')}"
    link = join(tag("a", name, href=where), " ", tag("small", namespace))
    try:
        return [link, _chip_of(body)[1], *_measured(seen, body, now)]
    except UNREADABLE:
        return [link, OTHER_VERSION, *["-"] * 5]


def _measured(seen: Fleet, body: Object, now: float) -> Iterator[Html]:
    status = body.get("status") or {}
    points = seen.histories[body["metadata"]["uid"]].points
    span = span_of(points, now)
    slo, batching = status.get("slo") or {}, status.get("batching") or {}
    for name in ("timeToFirstToken", "interTokenLatency"):
        one = slo.get(name) or {}
        of = f" of {one['target']}" if "target" in one else ""
        curve = spark(TIMES[name], points, span, target=milliseconds(one.get("target")))
        yield _figure(one.get("measured", "-"), of, curve)
    cap = batching.get("cap", "-")
    yield _figure(cap, f" of {batching.get('ceiling', '-')}", spark(CAP, points, span))
    ready = Line("ready", "ready", "green", is_step=True)
    wanted = f" of {status.get('replicas', 0)}"
    yield _figure(status.get("readyReplicas", 0), wanted, spark(ready, points, span))
    waiting = (status.get("load") or {}).get("waiting", "-")
    yield _figure(waiting, "", spark(WAITING, points, span))


def _figure(value: object, of: str, curve: Html) -> Html:
    return join(tag("span", tag("b", value), tag("small", of), class_="figure"), curve)


def _described(body: Object) -> list[object]:
    status, meta = body.get("status") or {}, body.get("metadata") or {}
    model = ((body.get("spec") or {}).get("model") or {}).get("uri", "-")
    since = meta.get("deletionTimestamp")
    told: list[object] = [_chip_of(body)[1], f"{model} at {status.get('url', 'no address yet')}"]
    ready = condition(body, "Ready")
    told += [f"{ready.get('reason')}: {ready.get('message')}"] if ready.get("message") else []
    told += [note] if (note := note_on(status, meta.get("generation", 0))) else []
    return told + ([f"it is being deleted, since {since}"] if since else [])


def _parts(seen: Fleet, body: Object, detail: Detail, now: float) -> Iterator[Html]:
    status = body.get("status") or {}
    if not status:
        return
    slo, points = status.get("slo") or {}, seen.histories[body["metadata"]["uid"]].points
    marks = marks_of(body, detail.events, now)
    targets = {name: milliseconds((slo.get(name) or {}).get("target")) for name in TARGETS}
    yield _charts(points, targets, str(slo.get("percentile", "99")), marks, now)
    yield _decisions(marks, "Nothing was decided in the last hour.", status)
    pods = [*pod_rows(detail.pods, now)]
    header = ["pod", "phase", "restarts", "age", "what is told of it"]
    yield _section("pods", "Pods", _grid(header, pods) if pods else tag("p", "There is none."))
    yield from _memory(status.get("memory") or {})
    namespace, name = key_of(body)
    yield from _batches(
        [
            one
            for one in seen.batches
            if key_of(one)[0] == namespace
            and ((one.get("spec") or {}).get("serviceRef") or {}).get("name") == name
        ]
    )
    yield from _report(body)
    rows = [
        [
            *(c.get(key, "") for key in ("type", "status", "reason")),
            duration(now - unix_time(c.get("lastTransitionTime"))),
            c.get("message", ""),
        ]
        for c in status.get("conditions") or ()
    ]
    header = ["condition", "status", "reason", "for", "message"]
    yield _section("conditions", "Conditions", _grid(header, rows))


def _charts(
    points: Sequence[Point],
    targets: Mapping[str, float | None],
    percentile: str,
    marks: Sequence[Mark],
    now: float,
) -> Html:
    """A picture for each target and each count that was measured, over one span of time."""
    span = span_of(points, now)
    shown = [
        chart(f"P{percentile} of {TARGETS[name]}", [line], points, span, marks,
              target=targets[name], is_ms=True)
        for name, line in TIMES.items()
        if targets[name] or name != "endToEnd"
    ]  # fmt: skip
    for title, lines in COUNTS.items():
        if any(line.name in point.values for line in lines for point in points):
            shown.append(chart(title, lines, points, span, marks))
    since = f"Measured since {clock(points[0].at_s)}." if points else "Nothing was measured yet."
    told = f"The last {duration(span.end_s - span.begin_s)}. {since}"
    return _section("charts", "", tag("p", told, class_="dim"), tag("div", *shown, class_="charts"))


def _decisions(marks: Sequence[Mark], none: str, status: Object | None = None) -> Html:
    """The newest first, by the numbers that the pictures have; and why nothing moves now."""
    items = [
        tag("li", tag("time", clock(mark.at_s)), " ", mark.text, value=mark.number,
            class_="bad" if mark.is_warning else None)
        for mark in reversed(marks)
    ]  # fmt: skip
    now = []
    for what, part in (("cap", "batching"), ("replicas", "scaling")):
        one = (status or {}).get(part) or {}
        if "reason" in one:
            told = f"{one['reason']}: {one.get('message', '')}".removesuffix(": ")
            now.append(tag("p", tag("b", f"{what} now "), told))
    inside = tag("ol", *items, reversed="") if items else tag("p", none)
    return _section("decisions", "Time line", *now, inside)


def _memory(memory: Mapping[str, Mapping[str, object]]) -> Iterator[Html]:
    """The plan and what was measured, as bars of one length."""
    kinds = {
        kind: {key: count(value) or 0 for key, value in (memory.get(kind) or {}).items()}
        for kind in ("planned", "measured")
    }
    total = max(kinds["planned"].get("total_bytes", 0), *(
        sum(sizes.get(key, 0) for key in MEMORY) for sizes in kinds.values()
    ))  # fmt: skip
    bars = []
    for kind, sizes in kinds.items():
        parts = [
            Part(sizes[key], f"{name} {sizes[key] / GIB:.3f} GiB", colour)
            for key, (name, colour) in MEMORY.items()
            if sizes.get(key)
        ]
        if parts:
            keys = [tag("span", part.label, class_=f"key {part.colour}") for part in parts]
            bars += [tag("h3", kind), bar(parts, total), tag("p", *keys, class_="keys")]
    if bars:
        of = tag("p", f"of {total / GIB:.3f} GiB", class_="dim")
        yield _section("memory", "Memory", of, *bars)


def _batches(batches: Sequence[Object]) -> Iterator[Html]:
    """Batches with their progress; nothing where there is none."""
    header = ["batch", "state", "progress", "requests", "rate", "time left", "what is told of it"]
    rows = []
    for body in batches:
        try:
            rows.append(_batch(body))
        except UNREADABLE:
            rows.append(["/".join(key_of(body)), OTHER_VERSION, *["-"] * 5])
    if rows:
        yield _section("batches", "Batches", _grid(header, rows))


def _batch(body: Object) -> list[object]:
    status, succeeded = body.get("status") or {}, condition(body, "Succeeded")
    counts = status.get("counts") or {}
    total, done, failed = (count(counts.get(key)) or 0 for key in ("total", "completed", "failed"))
    parts = [Part(done, f"{done} completed", "green"), Part(failed, f"{failed} failed", "red")]
    requests = f"{done + failed} of {total}" + (f", {failed} failed" if failed else "")
    rate, left = status.get("rate"), count(status.get("timeLeft"))
    told = f"{succeeded.get('reason', '')}: {succeeded.get('message', '')}"
    return [
        "/".join(key_of(body)),
        _chip(str(status.get("state", "unseen"))),
        bar(parts, total),
        requests,
        f"{rate}/s" if rate else "-",
        "-" if left is None else duration(left),
        told.removesuffix(": "),
    ]


def _report(body: Object) -> Iterator[Html]:
    """What `sluice report` says."""
    try:
        told = report.build(parse(body), body.get("status") or {}, None)
    except SpecError as e:
        yield _section("report", "Report", tag("p", str(e)))
        return
    rows = [report.row(one) for one in told["targets"]]
    yield _section(
        "report",
        "Report",
        _grid(report.HEADER, rows) if rows else "",
        tag("p", report.INDEPENDENT, class_="dim") if rows else "",
        *(tag("p", sentence) for sentence in (*report.sentences(told), *told["advice"])),
    )
