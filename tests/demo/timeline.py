"""What the demo saw, row by row, and what it must have seen. Pure: values in, values out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice_operator.times import milliseconds

MIN_SHARE_OF_NEW_POD = 0.2
ROLL = "roll"
"""The phase, after all others, in which every pod is replaced."""


@dataclass(frozen=True, slots=True)
class Row:
    """One look at the object's status and its pods. Milliseconds for `*_ms`; None = no samples."""

    t_s: float
    phase: str
    arrivals_per_s: float | None
    cap: int
    effective_batch: float | None
    replicas: int
    ready: int
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    verdict: str
    cause: str
    reason: str
    pods: Mapping[str, int] = field(default_factory=dict)
    """Pod UID -> restarts."""

    HEADER = (
        "   time phase     arrivals/s  cap  batch  pods  TTFT P99  ITL P99  verdict     cause      "
    )

    def line(self, start_s: float) -> str:
        """The row as one line of the live table."""
        return (
            f"{self.t_s - start_s:6.0f}s {self.phase:9.9} {_num(self.arrivals_per_s, 10, 1)}"
            f" {self.cap:4d} {_num(self.effective_batch, 6, 1)}  {self.ready:d}/{self.replicas:d}"
            f" {_num(self.ttft_p99_ms, 7, 0)}ms {_num(self.itl_p99_ms, 6, 1)}ms"
            f"  {self.verdict:11.11} {self.cause:10.10}"
        )


def _num(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def row(
    t_s: float, phase: str, service: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]
) -> Row:
    """Read an InferenceService and its pods as the API server gives them."""
    status = service.get("status") or {}
    batching, slo = status.get("batching") or {}, status.get("slo") or {}
    load = status.get("load") or {}
    ttft, itl = slo.get("timeToFirstToken") or {}, slo.get("interTokenLatency") or {}
    verdicts = [v for v in (ttft.get("verdict"), itl.get("verdict")) if v]
    worst = next((v for v in ("Breach", "Hold", "Headroom") if v in verdicts), "NoTraffic")
    return Row(
        t_s=t_s,
        phase=phase,
        arrivals_per_s=_float(load.get("arrivalsPerSecond")),
        cap=int(batching.get("cap") or 0),
        effective_batch=_float(batching.get("effectiveBatch")),
        replicas=int(status.get("replicas") or 0),
        ready=int(status.get("readyReplicas") or 0),
        ttft_p99_ms=milliseconds(ttft.get("measured")),
        itl_p99_ms=milliseconds(itl.get("measured")),
        verdict=worst,
        cause=str(load.get("cause") or "-"),
        reason=str((batching.get("lastChange") or {}).get("reason") or ""),
        pods={pod["metadata"]["uid"]: _restarts(pod) for pod in pods},
    )


def _float(value: object) -> float | None:
    return None if value is None else float(str(value))


def _restarts(pod: Mapping[str, Any]) -> int:
    """Of its containers, and of the sidecar that another engine runs in."""
    status = pod.get("status") or {}
    kinds = ("containerStatuses", "initContainerStatuses")
    return sum(int(c.get("restartCount", 0)) for kind in kinds for c in status.get(kind) or [])


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the story: whether it was seen, and what was seen."""

    claim: str
    seen: bool
    detail: str


def raised_live(rows: Sequence[Row]) -> Check:
    """The cap went up between two rows whose pods are the same and never restarted."""
    raises = [
        (a.cap, b.cap)
        for a, b in zip(rows, rows[1:], strict=False)
        if b.cap > a.cap > 0 and set(a.pods) & set(b.pods)
    ]
    restarts = sum(
        max(r.pods.get(uid, 0) for r in rows) for uid in {u for r in rows for u in r.pods}
    )
    detail = ", ".join(f"{a} -> {b}" for a, b in raises) + f"; restarts: {restarts}"
    return Check(
        "the cap was raised live, without a restart", bool(raises) and not restarts, detail
    )


def scaled_out(rows: Sequence[Row]) -> Check:
    """A second pod became ready."""
    first = next((r for r in rows if r.ready >= 2), None)
    high = next((r for r in rows if r.phase == "high"), None)
    took = f"{first.t_s - high.t_s:.0f} s after the load rose" if first and high else "never"
    return Check("a second pod became ready", first is not None, took)


def broken(
    rows: Sequence[Row], phases: Sequence[Mapping[str, Any]], targets_ms: Mapping[str, float]
) -> Check:
    """The load broke a target, as its clients measured it, and the object said why.

    `targets_ms`: by the name of the measured P99 in the phases.
    """
    high = next((p for p in phases if p["phase"] == "high"), {})
    over = [
        f"{name} {high[name]:.0f} of {target_ms:.0f}"
        for name, target_ms in targets_ms.items()
        if (high.get(name) or 0.0) > target_ms
    ]
    causes = [r.cause for r in rows if r.phase == "high" and r.cause not in ("-", "none")]
    detail = ", ".join([*over, *causes[:1]]) or "no target was broken"
    return Check("the load broke a target", bool(over and causes), detail)


def held_share(rows: Sequence[Row], ttft_ms: float, itl_ms: float) -> float:
    """The share of looks at which both P99s of the object's window were within their targets."""
    looks = [is_held(row, ttft_ms, itl_ms) for row in rows]
    held = [look for look in looks if look is not None]
    return sum(held) / max(len(held), 1)


def is_held(row: Row, ttft_ms: float, itl_ms: float) -> bool | None:
    """Whether both P99s were within their targets; None where one had no samples."""
    if row.ttft_p99_ms is None or row.itl_p99_ms is None:
        return None
    return row.ttft_p99_ms <= ttft_ms and row.itl_p99_ms <= itl_ms


def shared(phases: Sequence[Mapping[str, Any]]) -> Check:
    """The pod that came later served its part of the high load."""
    by_pod = next((dict(p["by_pod"]) for p in phases if p["phase"] == "high"), {})
    total = sum(by_pod.values()) or 1
    shares = sorted((n / total for n in by_pod.values()), reverse=True)
    second = shares[1] if len(shares) > 1 else 0.0
    detail = f"{100 * second:.0f} % of {total} requests"
    return Check("the new pod served its share", second >= MIN_SHARE_OF_NEW_POD, detail)


def scaled_in(rows: Sequence[Row]) -> Check:
    """After two ready pods there was one again, and its leaving pod is gone, before any rollout."""
    rows = rows[: _rollout(rows)]
    last = rows[-1] if rows else None
    seen = any(r.ready >= 2 for r in rows) and last is not None and len(last.pods) == 1
    return Check(
        "the second pod was drained and left", seen, f"{len(last.pods) if last else 0} pod"
    )


def _rollout(rows: Sequence[Row]) -> int:
    """The index of the first row of the rollout, else their number."""
    return next((i for i, r in enumerate(rows) if r.phase == ROLL), len(rows))


def rolled(rows: Sequence[Row]) -> Check:
    """While the load went on, the pods from before the rollout were replaced by ready ones."""
    start = _rollout(rows)
    old = set(rows[start - 1].pods) if start else set()
    rows = rows[start:]
    new = [r for r in rows if r.ready and r.pods and not old & set(r.pods)]
    seen = bool(new) and new[0].phase == ROLL
    detail = f"{new[0].t_s - rows[0].t_s:.0f} s after the edit" if new else "never"
    return Check("a rolling update replaced the pods under load", seen, detail)


def nothing_lost(phases: Sequence[Mapping[str, Any]]) -> Check:
    """Every request of every phase ended ok."""
    sent = sum(int(p["sent"]) for p in phases)
    ok = sum(int(p["results"].get("ok", 0)) for p in phases)
    retries = sum(int(p["retries"]) for p in phases)
    detail = f"{ok} of {sent} requests answered in full, {retries} client retries"
    return Check("no request was lost", sent > 0 and ok == sent, detail)


def checks(
    rows: Sequence[Row], phases: Sequence[Mapping[str, Any]], targets_ms: Mapping[str, float]
) -> list[Check]:
    """All promises of the story; `targets_ms` as `broken` has them."""
    rollouts = [rolled(rows)] if any(p["phase"] == ROLL for p in phases) else []
    return [
        raised_live(rows), broken(rows, phases, targets_ms), scaled_out(rows), shared(phases),
        scaled_in(rows), *rollouts, nothing_lost(phases),
    ]  # fmt: skip


def as_json(
    rows: Sequence[Row], phases: Sequence[Mapping[str, Any]], seen: Sequence[Check]
) -> dict[str, object]:
    """The whole timeline, for the file beside the plot."""
    story = [asdict(check) for check in seen]
    return {"rows": [asdict(r) for r in rows], "phases": list(phases), "checks": story}
