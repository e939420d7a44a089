"""*rim*: `sluice batch`: its flags, its exit codes and its last line."""

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from sluice_core.engines import ENGINES
from sluice_core.words import clean
from sluice_core.work import BACKGROUND, CLASS_HEADER
from sluice_frontend.batches.index import Index
from sluice_frontend.batches.item import MAX_SHOWN, Refusal
from sluice_frontend.batches.lines import JsonLines, fill
from sluice_frontend.batches.results import Locked, Results, WriteError
from sluice_frontend.config import API_KEY

from sluice.measure.client import MAX_RETRIES
from sluice.measure.endpoint import EndpointError, base_url, served_model
from sluice.numbers import at_least, count, positive

from .report import Reporter
from .run import Interrupted, ToldRun
from .send import EndpointGone, Sender
from .sources import CHAT, FOLDER_ROUTES, Folder, Source
from .target import opened

MOST_TOLD = 10
"""Bad lines that are told of one input."""
ALL_OK, SOME_FAILED, REFUSED, ALL_FAILED, DISK_FULL, GONE, LOCKED = range(7)
INTERRUPTED = 130
"""Exit codes, as docs/batch.md has them."""
STOPS = {Interrupted: INTERRUPTED, WriteError: DISK_FULL, EndpointGone: GONE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "With --model, all further flags are those of `sluice serve`; they go last."
    parser.add_argument("input", type=Path, metavar="IN", help="OpenAI's batch lines, or a folder")
    parser.add_argument("-o", "--out", type=Path, required=True, help="results, appended to")
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--model", help="start an engine: a directory, ORG/NAME, hf://ORG/NAME@REV")
    whose.add_argument("--url", type=base_url, help="an API that runs already, without a route")
    parser.add_argument(
        "--engine",
        choices=[name for name, engine in ENGINES.items() if engine.program],
        help="another engine for --model, as of `sluice serve`",
    )
    parser.add_argument("--api-key-file", type=Path, help=f"bearer of the API; else {API_KEY}")
    parser.add_argument("--admin-url", type=base_url, help="admin port, which tells the cap")
    parser.add_argument("--admin-token-file", type=Path, help="bearer of the admin port")
    parser.add_argument(
        "--concurrency", type=count, help="requests under way; default: by the cap, else 256"
    )
    parser.add_argument("--max-retries", type=at_least(0), default=MAX_RETRIES, help="of a request")
    parser.add_argument("--timeout", type=positive, default=600.0, help="seconds for one try")
    parser.add_argument(
        "--shard", type=shard, metavar="I/N", help="send only lines whose number modulo N is I"
    )
    parser.add_argument(
        "--background", action="store_true", help="take only the places that others leave"
    )
    parser.add_argument(
        "--report-port",
        type=count,
        help="tell JSON of the counts there, wait for the API, and end with 0 when all is done",
    )
    of_folder = parser.add_argument_group("for a folder")
    of_folder.add_argument("--route", choices=FOLDER_ROUTES, help="for each text and image")
    of_folder.add_argument("--prompt", help=f"text in front of each document; {CHAT} alone")
    of_folder.add_argument(
        "--fields", type=fields, default={}, metavar="JSON", help="further fields of each body"
    )
    of_folder.add_argument("--served-model-name", help="model of each body; default: the first")


def shard(text: str) -> tuple[int, int]:
    """One of N parts, the first is 0: argparse's `type=`."""
    part, _, num = text.partition("/")
    if part.isdecimal() and num.isdecimal() and int(part) < int(num):
        return int(part), int(num)
    raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1")


def fields(text: str) -> dict[str, Any]:
    """A JSON object without a stream: argparse's `type=`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("stream"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, or asks for a stream")
    return found


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice batch`; its exit code is one of those above."""
    reporter, code = Reporter(), REFUSED
    try:
        code, said = _batch(args, reporter)
        print(said)
    except (Refusal, EndpointError) as e:
        code, said = LOCKED if isinstance(e, Locked) else REFUSED, str(e)
        print(f"sluice batch: {e}", file=sys.stderr)
    except sqlite3.OperationalError as e:
        code, said = DISK_FULL, f"the index in the temporary folder: {e}"
        print(f"sluice batch: {said}", file=sys.stderr)
    reporter.leave(said)
    return code


def _batch(args: argparse.Namespace, reporter: Reporter) -> tuple[int, str]:
    """The exit code and the last line of a batch that was not refused."""
    source = _source(args)
    with closing(Index()) as index:
        try:
            _fill(index, source)
        except OSError as e:
            raise Refusal(f"the input cannot be read: {e}") from e
        reporter.total = sum(index.counts())
        if args.shard:
            index.keep(*args.shard)
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise Refusal(f"the folder of {args.out} cannot be made: {e.strerror}") from e
        with Results(args.out) as results:
            _mark_done(index, results)
            reporter.run = ToldRun(index, source, results)
            return _run(args, reporter.run, source, results, reporter)


def _source(args: argparse.Namespace) -> Source:
    """The input; raises `Refusal` if flags and input do not go together."""
    is_folder = args.input.is_dir()
    if not os.access(args.input, os.R_OK) or not (is_folder or args.input.is_file()):
        raise Refusal(f"{args.input} is no file and no folder that can be read")
    only = {"--route": args.route, "--prompt": args.prompt, "--fields": args.fields}
    if not is_folder and any(only.values()):
        named = ", ".join(flag for flag, value in only.items() if value)
        raise Refusal(f"{named} is for a folder; the lines of a file say it themselves")
    if args.url and (args.engine or args.flags):
        stray = " ".join([*(["--engine"] if args.engine else []), *args.flags])
        raise Refusal(f"unrecognized arguments: {stray}; only --model starts an engine")
    if not is_folder:
        return JsonLines(args.input)
    if args.route is None or (args.prompt and args.route != CHAT):
        raise Refusal(f"a folder needs --route, and --prompt is for {CHAT} alone")
    return Folder(args.input, args.route, args.prompt or "", args.fields)


def _fill(index: Index, source: Source) -> None:
    """Add all items; raises `Refusal` with the lines that are bad."""
    problems, num = list[str](), 0
    for num, (line, why) in enumerate(fill(index, source.found(), source.noun), 1):
        if num <= MOST_TOLD:
            problems.append(f"{source.noun} {line}: {why}")
    if num > MOST_TOLD:
        problems.append(f"and {num - MOST_TOLD} more")
    if not num and not sum(index.counts()):
        problems.append("the input has no request")
    if problems:
        raise Refusal("nothing was sent: " + "; ".join(problems))


def _mark_done(index: Index, results: Results) -> None:
    """Note what earlier runs have done; raises `Refusal` if that was of another input."""
    for result in results.read():
        if not index.mark(result.custom_id, is_ok=result.is_ok):
            raise Refusal(
                f"{results.path} is of another input: custom_id "
                f"{clean(result.custom_id, MAX_SHOWN)!r} is not in this one, or twice in it"
            )


def _run(
    args: argparse.Namespace, run: ToldRun, source: Source, results: Results, reporter: Reporter
) -> tuple[int, str]:
    """Send what is pending; the exit code and the last line."""
    code, why = ALL_OK, ""
    try:
        if run.pending:
            asyncio.run(_send(args, run, source, reporter))
            results.sync()
    except (Interrupted, WriteError, EndpointGone) as e:
        code, why = STOPS[type(e)], f" {e}; the same command goes on."
    if not code and run.failed and args.report_port is None:
        code = SOME_FAILED if run.ok else ALL_FAILED
    done = run.ok + run.failed
    failed = "all failed" if run.failed == done > 0 else f"{run.failed} failed"
    return code, f"{done} of {done + run.pending} done, {failed}: {args.out}.{why}"


async def _send(args: argparse.Namespace, run: ToldRun, source: Source, reporter: Reporter) -> None:
    """Run it on the endpoint; raises EndpointError, or what ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, run.leave)
    key = os.environ.get(API_KEY, "").strip()
    with run.leaving_at_once():
        async with reporter.served(args.report_port), opened(args, key) as target:
            needs_model = isinstance(source, Folder) and "model" not in source.fields
            named = args.served_model_name or (None if needs_model else "")
            served = await served_model(target.session, target.url, named)
            if isinstance(source, Folder):
                source.fields.setdefault("model", served.name)
            headers = {CLASS_HEADER: BACKGROUND} if args.background else {}
            sender = Sender(
                target.session, target.url, target.slow_down, args.max_retries, headers=headers
            )
            await run.run(target, sender.send)
