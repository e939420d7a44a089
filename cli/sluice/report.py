"""`sluice report NAME`: what one service promised, held and cost, and what would help.

All data comes from the object: its status holds the measurements over `spec.slo.window`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any

from sluice_core.bounded import count, number
from sluice_core.contract import TARGETS
from sluice_core.latency import TARGET_MARGIN as MARGIN
from sluice_core.latency import StepLaw, StepTime
from sluice_operator.spec.service import InferenceService, SpecError, parse
from sluice_operator.times import milliseconds

from sluice.kube import OTHER_VERSION, UNREADABLE, KubeError, add_object_arguments, find_object
from sluice.measure.curve import wilson
from sluice.numbers import not_negative
from sluice.page import text_table
from sluice.status import UNSEEN, failures, note_on

GIB = 2**30
UNIFORM = 0.05
"""Share of padding below which static batches are worth a measurement."""
INDEPENDENT = (
    "95 % intervals (Wilson) take samples as independent; those of one burst are not, so the true "
    "ones are wider"
)
HEADER = ["target", "asked", "measured", "samples", "attained", "95 % interval", "held"]
Object = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_object_arguments(parser)
    parser.add_argument("--price", type=not_negative, help="of one GPU (or one CPU) for an hour")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice report`: 0, or 2 if the object cannot be read."""
    try:
        body = find_object(args)[1]
        report = build(parse(body), body.get("status") or {}, args.price)
    except (KubeError, SpecError) as e:
        print(f"sluice report: {e}", file=sys.stderr)
        return 2
    except UNREADABLE as e:
        print(f"sluice report: {OTHER_VERSION}: {e}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1) if args.json else as_text(report))
    return 0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The pods' work, from `status`: means of a request in tokens, and the step model."""

    output: float
    prompt: float
    length: float
    sigma: float
    step: StepTime

    def tokens_per_s(self, sequences: float) -> float:
        """Throughput of one pod whose batch always holds `sequences`."""
        return 1000 * sequences * self.output / self.request_ms(sequences)

    def request_ms(self, sequences: float) -> float:
        """From a request's admission to its last token."""
        return max(self.step.request_ms(sequences, self.output, self.prompt), 1e-6)


def read_work(status: Object) -> WorkDone | None:
    """The work, None until requests have finished and a step model is fitted."""
    load, step = status.get("load") or {}, (status.get("batching") or {}).get("step") or {}
    finished, lengths = load.get("finished"), load.get("lengths")
    if not (finished and load.get("tokens") and lengths and step):
        return None
    output = load["tokens"] / finished
    names = ("fixedMs", "sequenceMs", "kvTokenMs", "promptTokenMs")
    mean = max(_number(lengths["mean"]), output)
    a, b, c, d = (_number(step[name]) for name in names)
    times = StepTime(StepLaw(a, b, c, d).at_context(mean - output / 2))
    return WorkDone(output, load["promptTokens"] / finished, mean, _number(lengths["sigma"]), times)


def _number(text: object) -> float:
    """A number of the status; raises ValueError for one that it cannot hold."""
    found = number(text)
    if found is None:
        raise ValueError(f"{text!r} is no number that can be")
    return found


def build(service: InferenceService, status: Object, price: float | None) -> dict[str, Any]:
    """The whole report, ready for JSON. `price`: of one GPU or CPU hour."""
    slo, found = service.spec.slo, status.get("slo") or {}
    work = read_work(status)
    return {
        "name": service.name,
        "namespace": service.namespace,
        "percentile": slo.percentile if slo.has_target else None,
        "window_s": slo.window_s if slo.has_target else None,
        "note": note_on(status, service.generation) or None,
        "targets": [_attained(name, found[name]) for name in TARGETS if name in found],
        "good_percent": found.get("goodPercent"),
        "smooth_percent": found.get("smoothPercent"),
        "misses": (status.get("load") or {}).get("misses") or {},
        "failed": (status.get("load") or {}).get("failed") or {},
        "failures": failures(status.get("load") or {}) or None,
        "cap": _cap(status, work),
        "cost": _cost(service, status, price),
        "advice": list(_advice(service, status, work)),
    }


def _attained(name: str, target: Object) -> dict[str, Any]:
    n, over, attained, interval = target.get("samples"), target.get("over"), None, None
    if n is not None and over is not None:
        attained, interval = (n - over) / n if n else None, wilson(n - over, n)
    allowed = target.get("allowedPercent")
    return {
        "name": name,
        "target_ms": milliseconds(target.get("target")),
        "measured_ms": milliseconds(target.get("measured")),
        "samples": n,
        "over": over,
        "attained": attained,
        "interval": interval,
        "asked": None if allowed is None else 1 - _number(allowed) / 100,
        "verdict": target.get("verdict", "NoTraffic"),
    }


def _cap(status: Object, work: WorkDone | None) -> dict[str, Any]:
    """The cap and the throughput it costs, by the step model. It is compared with the ceiling, or
    with the sequences that fit in memory if those are fewer."""
    batching = status.get("batching") or {}
    names = {"in_force": "cap", "ceiling": "ceiling", "limited_by": "limitedBy"}
    cap: dict[str, Any] = {name: batching.get(key) for name, key in names.items()}
    if work is None or not cap["in_force"] or not cap["ceiling"]:
        unknown = "most", "tokens_per_s", "ceiling_tokens_per_s", "costs_percent"
        return cap | dict.fromkeys(unknown)
    carried = max(1, (status.get("memory") or {}).get("sequences", cap["ceiling"]))
    runs, can_run = min(cap["in_force"], carried), min(cap["ceiling"], carried)
    ours, most = work.tokens_per_s(runs), work.tokens_per_s(can_run)
    return {
        **cap,
        "most": can_run,
        "tokens_per_s": ours,
        "ceiling_tokens_per_s": most,
        "costs_percent": 100 * max(0.0, 1 - ours / most),
    }


def _cost(service: InferenceService, status: Object, price: float | None) -> dict[str, Any]:
    load, hardware = status.get("load") or {}, service.spec.hardware
    gpus = hardware.num_gpus
    unit, each = ("GPU", float(gpus)) if gpus else ("CPU", hardware.cpu_millis / 1000)
    tokens, seconds = load.get("tokens") or 0, load.get("podSeconds") or 0
    per_1k = 1000 * each * seconds / tokens if tokens else None
    priced = per_1k is not None and price is not None
    return {
        "unit": unit, "units_of_a_pod": each, "pod_seconds": seconds, "tokens": tokens,
        "busy_percent": load.get("busyPercent"), "unit_seconds_per_1k_tokens": per_1k,
        "price_per_hour": price,
        "price_per_1k_tokens": (per_1k or 0.0) * (price or 0.0) / 3600 if priced else None,
    }  # fmt: skip


def _advice(service: InferenceService, status: Object, work: WorkDone | None) -> Iterator[str]:
    if not status:
        return
    succeed = [c for c in status.get("conditions") or () if c.get("type") == "RequestsSucceed"]
    if succeed and succeed[0].get("status") == "False":
        yield f"Engine: {succeed[0].get('message')}. Its log says why; speed does not mend it."
        return
    if work is None:
        yield "Too little traffic in the window for advice: it rests on lengths and step times."
        return
    yield from _device(service, status, work)
    yield from _memory(status, work)
    yield from _dtype(status)
    yield from _batching(status, work)


def _device(service: InferenceService, status: Object, work: WorkDone) -> Iterator[str]:
    slo, load = service.spec.slo, status.get("load") or {}
    busy = _number(load.get("busyPercent", 0))
    alone_ms = work.step.mean_ms(1, 0)
    if slo.itl_ms and alone_ms > MARGIN * slo.itl_ms:
        factor = alone_ms / (MARGIN * slo.itl_ms)
        yield (
            f"Device: one sequence alone takes {alone_ms:.3g} ms for a token, over {MARGIN:g} x "
            f"{slo.itl_ms:g} ms: one {factor:.2g} times as fast is needed, or a smaller model "
            "or dtype, or a looser target."
        )
    elif busy < 30:
        yield (
            f"Device: the pods compute {busy:g} % of their time, so a smaller one would do as far "
            "as throughput goes; its first tokens and gaps would be slower in proportion."
        )


def _memory(status: Object, work: WorkDone) -> Iterator[str]:
    memory, batching = status.get("memory") or {}, status.get("batching") or {}
    kv_bytes = _bytes(memory, "kv_cache_bytes")
    waits = ((status.get("load") or {}).get("misses") or {}).get("kv", 0)
    if not kv_bytes or not memory.get("kvTokens"):
        return
    if not waits and batching.get("limitedBy") != "VRAM":
        return
    holds = memory["kvTokens"] / work.length
    each = kv_bytes / memory["kvTokens"] * work.length
    cap = inf if batching.get("limitedBy") == "VRAM" else batching.get("cap") or inf
    ours, twice = (work.tokens_per_s(min(n * max(holds, 1), cap)) for n in (1, 2))
    bound = f", of which the cap lets {cap} run" if cap < 2 * holds else ""
    yield (
        f"Memory: {memory['kvTokens']} KV tokens / {work.length:.0f} tokens a request = "
        f"{holds:.1f} sequences of {each / GIB:.3g} GiB each; {waits} late first tokens waited for "
        f"KV. {kv_bytes / GIB:.3g} GiB more would hold twice as many{bound}: {ours:.0f} -> "
        f"{twice:.0f} tokens/s of a full pod by the step model."
    )


def _dtype(status: Object) -> Iterator[str]:
    model, memory = status.get("model") or {}, status.get("memory") or {}
    kv_bytes, weights = _bytes(memory, "kv_cache_bytes"), model.get("bytes") or 0
    if not model.get("parameters") or weights / model["parameters"] < 3.9:
        return
    if not kv_bytes or not memory.get("kvTokens"):
        return
    per_token = kv_bytes / memory["kvTokens"]
    tokens = (kv_bytes + weights / 2) / (per_token / 2)
    yield (
        f"dtype: the checkpoint has {weights / model['parameters']:.0f} bytes a weight. bfloat16 "
        f"frees {weights / 2 / GIB:.3g} GiB of {weights / GIB:.3g} and halves {per_token:.0f} bytes"
        f" a token: the KV cache would hold {tokens:.0f} tokens instead of {memory['kvTokens']}, "
        "and a step reads half as much."
    )


def _batching(status: Object, work: WorkDone) -> Iterator[str]:
    cap = (status.get("batching") or {}).get("cap") or 1
    longest = work.output + work.sigma * sqrt(2 * log(cap))
    waste = 1 - work.output / longest
    sums = (
        f"outputs of {work.output:.0f} tokens, whose lengths vary by {work.sigma:.0f} at most (as "
        f"those with their prompts do): of {cap} the longest has up to {work.output:.0f} + "
        f"{work.sigma:.0f} sqrt(2 ln {cap}) = {longest:.0f}, so static batches would pad away up "
        f"to {100 * waste:.0f} % of their rows"
    )
    if waste >= UNIFORM:
        yield f"Batching: continuous. {sums[0].upper()}{sums[1:]}."
    else:
        yield (
            f"Batching: {sums}. For offline work of such lengths static batches of the largest "
            "size lose nothing; `sluice bench` tells what they gain."
        )


def _bytes(memory: Object, key: str) -> int:
    """Measured bytes, else planned ones."""
    parts = {**(memory.get("planned") or {}), **(memory.get("measured") or {})}
    return count(parts.get(key)) or 0


def row(t: Object) -> list[str]:
    """One of the report's targets, under `HEADER`."""
    measured, asked = (_told(t[name], "{:g} ms") for name in ("measured_ms", "target_ms"))
    low, high = t["interval"] or (None, None)
    between = "-" if low is None else f"{low:.3%} to {high:.3%}"
    is_known = None not in (t["attained"], t["asked"])
    held = ("yes" if t["attained"] >= t["asked"] else "no") if is_known else "-"
    share = _told(t["attained"], "{:.3%}")
    return [t["name"], asked, measured, _told(t["samples"], "{}"), share, between, held]


def _told(value: object, form: str) -> str:
    """The value, or a dash if it is not known."""
    return "-" if value is None else form.format(value)


def sentences(report: Object) -> Iterator[str]:
    """What the report says of misses, failures, cap and cost."""
    cap, cost = report["cap"], report["cost"]
    late = ", ".join(f"{n} {cause}" for cause, n in report["misses"].items() if n) or "none"
    yield f"Late first tokens by cause: {late}."
    yield f"Failed requests: {report['failures'] or 'none'}."
    if report["good_percent"]:
        smooth = _told(report["smooth_percent"], "{} %")
        yield f"Good requests: {report['good_percent']} %, smooth: {smooth}."
    if cap["tokens_per_s"] is not None:
        yield (
            f"Cap {cap['in_force']} of {cap['ceiling']}: a full pod brings "
            f"{cap['tokens_per_s']:.0f} tokens/s, at {cap['most']}, as many as can "
            f"run, {cap['ceiling_tokens_per_s']:.0f}: the cap costs {cap['costs_percent']:.0f} % "
            f"(by the step model; limited by {cap['limited_by'] or 'nothing'})."
        )
    if cost["unit_seconds_per_1k_tokens"] is not None:
        each = cost["price_per_1k_tokens"]
        price = "" if each is None else f", {each:.3g} at {cost['price_per_hour']:g} an hour"
        yield (
            f"Cost: {cost['units_of_a_pod']:g} {cost['unit']} x {cost['pod_seconds']} s of pods / "
            f"{cost['tokens']} tokens = {cost['unit_seconds_per_1k_tokens']:.3g} {cost['unit']}-"
            "seconds for 1,000 tokens"
            f"{price}; busy {_told(cost['busy_percent'], '{}')} %."
        )


def as_text(report: Object) -> str:
    head = f"{report['namespace']}/{report['name']}: {_asked(report)}"
    if report["note"] == UNSEEN:
        return head
    promised = (
        text_table([HEADER, *map(row, report["targets"])])
        if report["targets"]
        else "No target was judged yet."
    )
    return "\n".join(
        [head, "", promised, f"({INDEPENDENT})", "", *sentences(report), "", *report["advice"]]
    )


def _asked(report: Object) -> str:
    """The promise, and the generation of the spec that the report is about."""
    asked = f"P{report['percentile']} over {report['window_s'] or 0:g} s"
    asked, note = asked if report["percentile"] else "no targets", report["note"]
    if note == UNSEEN:
        return UNSEEN
    return f"{asked} ({note})" if note else asked
