"""The results of the conformance suite as a file, and as a section of docs/engines.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

BEGIN, END = "<!-- make engines -->\n", "<!-- end -->\n"
NAMES = {
    "sluice": "Sluice",
    "vllm": "vLLM",
    "vllm-tp2": "vLLM, tensor parallel 2",
    "llamacpp": "llama.cpp",
    "ollama": "Ollama",
}
SIGNS = {"passed": "yes", "failed": "**no**", "skipped": "-"}
UNITS = {"_ms": " ms", "_s": " s"}


class Line(Struct, frozen=True):
    """One test: passed, failed or skipped; why not; its figures."""

    outcome: str
    reason: str
    figures: dict[str, Any]


class Results(Struct, frozen=True):
    """One engine. `left_out`: why it could not be tried."""

    version: str
    date: str
    cpu: str
    left_out: str
    lines: dict[str, Line]


def merged(path: Path, name: str, results: Results) -> dict[str, Results]:
    """All results so far, with the new ones, which are written."""
    told = msgspec.json.decode(path.read_bytes(), type=dict[str, Results]) if path.exists() else {}
    told = {each: told[each] for each in NAMES if each in told and each != name} | {name: results}
    ordered = {each: told[each] for each in NAMES if each in told}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    return ordered


def section(page: str, results: Mapping[str, Results]) -> str:
    """The page with its table anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(results) + END + rest.partition(END)[2]


def table(results: Mapping[str, Results]) -> str:
    """A row for each line of the suite, a column for each engine; reasons below."""
    names = list(results)
    tests = dict.fromkeys(test for each in results.values() for test in each.lines)
    rows = [
        ["", *(NAMES[name] for name in names)],
        ["---"] * (len(names) + 1),
        ["version", *(results[name].version for name in names)],
    ]
    for test in tests:
        found = [results[name].lines.get(test) for name in names]
        rows.append([test.replace("_", " "), *(_cell(line) for line in found)])
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    reasons = [
        f"- {NAMES[name]}, {test.replace('_', ' ')}: `{line.reason}`\n"
        for name in names
        for test, line in results[name].lines.items()
        if line.outcome == "failed"
    ]
    reasons += [
        f"- {NAMES[name]} was not tried: {one.left_out}\n"
        for name, one in results.items()
        if one.left_out
    ]
    return "\n" + text + ("\n" + "".join(reasons) if reasons else "") + "\n"


def _cell(line: Line | None) -> str:
    if line is None:
        return ""
    figures = ", ".join(_figure(name, value) for name, value in line.figures.items())
    return SIGNS[line.outcome] + (f"; {figures}" if figures else "")


def _figure(name: str, value: object) -> str:
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')} {value}{unit}"
    return f"{name.replace('_', ' ')} {value}"
