"""*rim*: traces as files: ours, Azure's and BurstGPT's CSV, Mooncake's JSON lines."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512
LONGEST_S = 366 * 86_400
"""Longest trace in seconds: the tuner looks every two seconds of it."""


class TraceError(ValueError):
    """A trace that cannot be read; one sentence with file and line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One arrival. `max_tokens`: all of them are generated.

    `prefix`: the beginning of the prompt, a name for each `prefix_unit` tokens. Two prompts share
    the tokens of their common leading names.
    """

    t_s: float
    prompt_tokens: int
    max_tokens: int
    prefix: tuple[str | int, ...] = ()
    prefix_unit: int = 1

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prompt that may be shared with others."""
        return min(self.prompt_tokens, len(self.prefix) * self.prefix_unit)


def read_trace(path: Path) -> list[Request]:
    """The requests of a file in order of arrival, the first at second 0.

    A JSON line of ours is {"t_s", "prompt_tokens", "max_tokens", "prefix_id"}. Prompts of one
    `prefix_id` begin alike for `prefix_tokens`, by default over the length of the shorter one.
    Requests of public traces that generated nothing (failures) are left out. Raises TraceError.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            requests = list(_csv(file) if path.suffix.lower() == ".csv" else _json(file))
    except (OSError, ValueError, csv.Error, OverflowError, RecursionError) as e:
        raise TraceError(f"{path}: {e}") from e
    if not requests:
        raise TraceError(f"{path}: no request in it.")
    first_s = min(request.t_s for request in requests)
    if max(request.t_s for request in requests) - first_s > LONGEST_S:
        raise TraceError(f"{path}: from the first to the last request there is more than a year.")
    moved = (replace(request, t_s=request.t_s - first_s) for request in requests)
    return sorted(moved, key=lambda request: request.t_s)


def _json(lines: Iterable[str]) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            with _at(number):
                yield from _parse(_object(line))


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    return row


def _csv(lines: Iterable[str]) -> Iterator[Request]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        with _at(number):
            time_s = _csv_time(row["TIMESTAMP" if "TIMESTAMP" in row else "Timestamp"])
            yield from _csv_request(row, time_s)


@contextmanager
def _at(number: int) -> Iterator[None]:
    """Names the line in any error about it."""
    try:
        yield
    except KeyError as e:
        raise ValueError(f"line {number}: {e} is missing") from e
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"line {number}: {e}") from e


def _csv_time(text: str) -> float:
    """Seconds (BurstGPT), or a date in UTC with up to seven digits after the second (Azure)."""
    try:
        return float(text)
    except ValueError:
        whole, _, fraction = text.strip().removesuffix("Z").removesuffix("+00:00").partition(".")
        return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def _parse(row: Mapping[str, Any]) -> list[Request]:
    """A line of ours or Mooncake's; none if Mooncake's generated nothing."""
    if "input_length" in row:  # Mooncake: milliseconds; chained hashes of 512 tokens each
        prefix = tuple(row.get("hash_ids") or ())
        seconds, output = float(row["timestamp"]) / 1000, row["output_length"]
        if output == 0:
            return []
        return [_checked(seconds, row["input_length"], output, prefix, MOONCAKE_BLOCK)]
    name, prompt = row.get("prefix_id"), row["prompt_tokens"]
    prefix = () if name in (None, "") else (name,)
    unit = row.get("prefix_tokens") or prompt
    return [_checked(float(row["t_s"]), prompt, row["max_tokens"], prefix, unit)]


def _csv_request(row: Mapping[str, Any], t_s: float) -> list[Request]:
    """Azure's or BurstGPT's row; none if nothing was generated."""
    is_azure = "ContextTokens" in row
    prompt = int(row["ContextTokens" if is_azure else "Request tokens"])
    output = int(row["GeneratedTokens" if is_azure else "Response tokens"])
    return [_checked(t_s, prompt, output, (), 1)] if prompt > 0 and output > 0 else []


def _checked(
    t_s: float, prompt: int, output: int, prefix: tuple[str | int, ...], unit: int
) -> Request:
    if not isfinite(t_s) or t_s < 0:
        raise ValueError(f"t_s {t_s} is not a time after the start")
    for name, value in (("prompt_tokens", prompt), ("max_tokens", output), ("prefix", unit)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} {value!r} is not a whole number of at least 1")
    if not all(isinstance(name, str | int) for name in prefix):
        raise ValueError("a prefix is named by a text or a number")
    return Request(t_s, prompt, output, prefix, unit)
