"""What came of the comparison: means over the seeds, paired differences, what was to be reached."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from sluice.simulate.runs import Result

POLICIES = ("sluice", "deadline", "oracle", "ceiling", "aimd")
STEADY = ("steady-50", "steady-80", "steady-95")
AIM_STEADY, AIM_OTHER = 0.98, 0.95
MAX_BELOW_CEILING, MIN_ABOVE_CEILING, MAX_VIOLATIONS = 2.0, 50.0, 0.5
MAX_BELOW_ARRIVAL, AIM_DEADLINE = 1.0, 1.05
MAX_CHANGES, MAX_CONVERGED_S = 3, 60.0


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds of each cell, and the median time to converge; differences are paired,
    in points, with 95 % intervals."""
    return [_summary(cell, part) for cell, part in _by_cell(rows)]


def newest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest row of each cell and seed: one that was run with other caps too counts once."""
    return list({(*row["cell"].values(), row["seed"]): row for row in rows}.values())


def _by_cell(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, str], list[Any]]]:
    for cell in {tuple(row["cell"].values()): row["cell"] for row in rows}.values():
        yield cell, [row for row in rows if row["cell"] == cell]


def _summary(cell: dict[str, str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(policy: str, name: str) -> float:
        return fmean(row[policy][name] or 0.0 for row in rows if policy in row)

    def over(result: Result) -> float:
        return max(result["ttft_over_share"] or 0.0, result["itl_over_share"] or 0.0)

    def means(name: str) -> dict[str, float]:
        return {policy: mean(policy, name) for policy in POLICIES if any(policy in r for r in rows)}

    smooth = means("smooth_share")
    ordered = [row for row in rows if "deadline" in row]
    return {
        **cell,
        "seeds": len(rows),
        "aimd_seeds": sum("aimd" in row for row in rows),
        "deadline_seeds": len(ordered),
        **_worth(ordered),
        "smooth": smooth,
        "good": means("good_share"),
        "goodput_rps": means("goodput_rps"),
        "reach": smooth["sluice"] / smooth["oracle"] if smooth["oracle"] else None,
        "above_ceiling_points": _paired(
            [100 * (r["sluice"]["smooth_share"] - r["ceiling"]["smooth_share"]) for r in rows]
        ),
        "violations_above_oracle_points": _paired(
            [100 * (over(r["sluice"]) - over(r["oracle"])) for r in rows]
        ),
        "oracle_caps": sorted(row["oracle"]["cap"] for row in rows),
        "last_caps": sorted(row["sluice"]["last_cap"] for row in rows),
        "cap_changes": mean("sluice", "cap_changes"),
        "converged_s": median(_converged_s(row) for row in rows),
        "last_cap_change_s": mean("sluice", "last_cap_change_s"),
        "gpu_seconds_per_1k_tokens": means("gpu_seconds_per_1k_tokens"),
        "times_real": fmean(row["times_real"] for row in rows),
    }


def _worth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the order by deadline brings, in points beside ours, and the best cap on these seeds."""
    if not rows:
        return {}

    def above(name: str) -> tuple[float, float | None]:
        return _paired([100 * (row["deadline"][name] - row["sluice"][name]) for row in rows])

    return {
        "deadline_smooth_points": above("smooth_share"),
        "deadline_good_points": above("good_share"),
        "oracle_of_deadline": fmean(row["oracle"]["smooth_share"] for row in rows),
    }


def _aim(cell: dict[str, Any]) -> float:
    steady = cell["trace"] in STEADY and cell["noise"] == "independent"
    return AIM_STEADY if steady else AIM_OTHER


def _converged_s(row: dict[str, Any]) -> float:
    """When the cap first was one that, held for the whole run, reaches the aim; it may have left it
    since."""
    ours, oracle = row["sluice"], row["oracle"]
    by_cap = sorted((int(cap), share) for cap, share in oracle["smooth_by_cap"].items())
    enough = _aim(row["cell"]) * oracle["smooth_share"]
    path = [(0.0, ours["first_cap"]), *ours["cap_path"]]
    reaches = (since_s for since_s, cap in path if share_at(cap, by_cap) >= enough)
    return float(next(reaches, ours["simulated_s"]))


def share_at(cap: int, by_cap: Sequence[tuple[int, float]]) -> float:
    """The share at `cap`, between those of the caps that were tried; 0 below the least of them."""
    for (low, share), (high, next_share) in pairwise(by_cap):
        if low <= cap <= high:
            return share + (next_share - share) * (cap - low) / (high - low)
    return by_cap[-1][1] if cap >= by_cap[-1][0] else 0.0


def _paired(differences: list[float]) -> tuple[float, float | None]:
    """(mean, half of its 95 % interval), the latter None with one seed."""
    if len(differences) < 2:
        return differences[0], None
    spread = stdev(differences) / math.sqrt(len(differences))
    return fmean(differences), _student(len(differences) - 1) * spread


def _student(freedom: int) -> float:
    """97.5 % of Student's t, within 0.3 % (Abramowitz and Stegun 26.7.5, exact up to 3)."""
    if freedom <= 3:
        return (12.706, 4.303, 3.182)[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The summary as a Markdown table of smooth and good shares in percent."""
    head = (
        "| service, targets, noise | trace | seeds | ours | by deadline (points; seeds) "
        "| oracle (cap) | reach | cap = max | AIMD | good: ours, by deadline, oracle, max, AIMD "
        "| good/s, of the oracle's | GPU-s/1k tokens | changes | converged |"
    )
    lines = [head, "|---" * 14 + "|"]
    for cell in summary:
        smooth, good = (
            {name: f"{100 * share:.1f}" for name, share in cell[kind].items()}
            for kind in ("smooth", "good")
        )
        good = {name: good.get(name, "-") for name in POLICIES}
        by_deadline = "-"
        if num := cell["deadline_seeds"]:
            by_deadline = f"{smooth['deadline']} ({cell['deadline_smooth_points'][0]:+.1f}; {num})"
        caps = cell["oracle_caps"]
        reach = "-" if cell["reach"] is None else f"{100 * cell['reach']:.1f} %"
        lines.append(
            f"| {cell['service']}, {cell['target']}, {cell['noise']} | {cell['trace']} "
            f"| {cell['seeds']} | {smooth['sluice']} | {by_deadline} "
            f"| {smooth['oracle']} ({caps[0]}-{caps[-1]}) | {reach} | {smooth['ceiling']} "
            f"| {smooth.get('aimd', '-')} | {', '.join(good.values())} "
            f"| {_goodput(cell['goodput_rps'])} "
            f"| {cell['gpu_seconds_per_1k_tokens']['sluice']:.3g} "
            f"| {cell['cap_changes']:.1f} | {cell['converged_s']:.0f} s |"
        )
    return "\n".join(lines)


def _goodput(per_s: dict[str, float]) -> str:
    share = f", {100 * per_s['sluice'] / per_s['oracle']:.0f} %" if per_s["oracle"] else ""
    return f"{per_s['sluice']:.2f}{share}"


def reach(summary: Sequence[dict[str, Any]]) -> str:
    """Each thing that was to be reached, with how many cells reach it and the worst."""
    known = [cell for cell in summary if cell["reach"] is not None]
    steady = [cell for cell in known if _aim(cell) == AIM_STEADY]
    other = [cell for cell in known if cell not in steady]
    lines = ["| to be reached | cells | worst |", "|---|---|---|"]
    lines.append(_line(f"{AIM_STEADY:.0%} of the oracle, steady", steady, "reach", AIM_STEADY))
    lines.append(_line(f"{AIM_OTHER:.0%} of the oracle, others", other, "reach", AIM_OTHER))
    above = [{**cell, "points": cell["above_ceiling_points"][0]} for cell in summary]
    lines.append(_line("at most 2 points below cap = max", above, "points", -MAX_BELOW_CEILING))
    inner = [
        cell
        for cell in above
        if 100 * (cell["smooth"]["oracle"] - cell["smooth"]["ceiling"]) >= MIN_ABOVE_CEILING
    ]
    what = f"at least {MIN_ABOVE_CEILING:g} points above it, where any cap is"
    lines.append(_line(what, inner, "points", MIN_ABOVE_CEILING))
    more = [{**c, "negated": -c["violations_above_oracle_points"][0]} for c in summary]
    lines.append(_line("at most 0.5 points more violations", more, "negated", -MAX_VIOLATIONS))
    surely = [{**c, "negated": -_upper(c["violations_above_oracle_points"])} for c in summary]
    lines.append(_line("... by the end of its 95 % interval", surely, "negated", -MAX_VIOLATIONS))
    changes = [{**cell, "negated": -cell["cap_changes"]} for cell in summary]
    lines.append(_line("at most 3 changes of the cap", changes, "negated", -MAX_CHANGES))
    late = [{**cell, "negated": -cell["converged_s"]} for cell in summary]
    lines.append(_line("converged within 60 s", late, "negated", -MAX_CONVERGED_S))
    ordered = [
        {**c, "points": c["deadline_smooth_points"][0]}
        for c in summary
        if "deadline_smooth_points" in c
    ]
    what = f"by deadline at most {MAX_BELOW_ARRIVAL:g} point below ours"
    lines.append(_line(what, ordered, "points", -MAX_BELOW_ARRIVAL))
    if oracle := sum(cell["oracle_of_deadline"] for cell in ordered):
        share = sum(cell["smooth"]["deadline"] for cell in ordered) / oracle
        what = f"by deadline {AIM_DEADLINE:.0%} of the oracle, all together"
        lines.append(f"| {what} | {share >= AIM_DEADLINE:d} of 1 | {share:.3g} |")
    return "\n".join(lines)


def _upper(paired: tuple[float, float | None]) -> float:
    mean, half = paired
    return mean + (half or 0.0)


def _line(what: str, cells: Sequence[dict[str, Any]], key: str, aim: float) -> str:
    if not cells:
        return f"| {what} | none | |"
    held = sum(cell[key] >= aim for cell in cells)
    worst = min(cells, key=lambda cell: float(cell[key]))
    name = ", ".join(worst[part] for part in ("service", "target", "noise", "trace"))
    value = -worst[key] if key == "negated" else worst[key]
    return f"| {what} | {held} of {len(cells)} | {value:.3g} ({name}) |"
