"""The attacks of strangers on a real gate: what is wanted, and what comes.

    PYTHONPATH=cluster:tests .venv/bin/python -m bench.attacks --out build/attacks.json
    PYTHONPATH=cluster:tests .venv/bin/python -m bench.attacks --out docs/reliability.json \\
        --before docs/reliability-before.json --page docs/reliability.md

Each attack has an engine, a gate and a watch of its own, all on loopback. All of them take about
eight minutes. `--before` shows an earlier run beside this one; `--only` runs some of them.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from bench.attacks import contract, crowds, hostile, ollama, targets
from bench.attacks.page import Row, Run, markdown, write
from bench.attacks.table import Attack, Came, attacks_of
from bench.peers.processes import unwind_on_sigterm
from sluice.machine import processor

ATTACKS = attacks_of((targets, ollama, crowds, hostile, contract))
LIMIT_S = 110.0
"""Of one attack; the longest waits 95 s for a connection to be closed."""


async def _bounded(attack: Attack, directory: Path) -> Came:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await attack.run(directory)
    except TimeoutError:
        return Came(f"it did not end within {LIMIT_S:.0f} s", False)


def tried(attack: Attack) -> Row:
    """One attack, in a folder of its own. One that cannot be tried is not right."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        try:
            came = asyncio.run(_bounded(attack, Path(directory)))
        except Exception as error:
            came = Came(
                f"could not be tried: {type(error).__name__}: {str(error).strip()[-300:]}", False
            )
    took_s = round(time.monotonic() - start_s, 1)
    row = Row(
        attack.kind, attack.name, attack.input, attack.wanted, came.text, came.ok, took_s,
        came.figures,
    )  # fmt: skip
    print(
        f"{'ok ' if row.ok else 'BAD'} {row.kind} {row.name}: {row.came}  ({took_s} s)", flush=True
    )
    return row


def run(attacks: Sequence[Attack]) -> list[Row]:
    """All of them, those that mostly wait beside the others; in the order of the table."""
    waiting = [attack for attack in attacks if attack.is_long]
    with ThreadPoolExecutor(max_workers=max(1, len(waiting))) as beside:
        futures = {attack.name: beside.submit(tried, attack) for attack in waiting}
        rows = {attack.name: tried(attack) for attack in attacks if not attack.is_long}
        rows |= {name: future.result() for name, future in futures.items()}
    return [rows[attack.name] for attack in attacks]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--before", type=Path, help="the JSON file of an earlier run")
    parser.add_argument("--rows", type=Path, help="run nothing: the rows of this JSON file")
    parser.add_argument("--page", type=Path, help="a page of Markdown that gets the tables")
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    return parser.parse_args(argv)


def _read(path: Path | None) -> list[Row]:
    return msgspec.json.decode(path.read_bytes(), type=Run).rows if path else []


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m bench.attacks`: 1 if an attack did not come out as wanted."""
    given = parse(argv)
    unwind_on_sigterm()
    chosen = [attack for attack in ATTACKS if attack.name in given.only]
    rows = _read(given.rows) if given.rows else run(chosen)
    tables = markdown(rows, _read(given.before))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        told = msgspec.json.encode(Run(processor(), os.cpu_count() or 0, rows))
        given.out.write_bytes(msgspec.json.format(told, indent=1) + b"\n")
    if given.page:
        write(given.page, tables)
    print(tables)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
