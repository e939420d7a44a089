"""`sluice from FILE`: read the file, print the objects, and say where they differ."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import yaml
from sluice_core.words import clean
from sluice_operator.spec import kinds

from . import checks, documents
from .convert import Converted, convert, other
from .draft import NoEngine, Unreadable

_MOST_BYTES = 4 << 20


def _memory(text: str) -> str:
    try:
        return kinds.MEMORY.written(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r}: {e}") from e


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The object is on standard output. On standard error is a line for each field that it does "
        "not say as the manifest did. owned: the operator does that itself. missing: choose a "
        "value. changed: the object says it in another way. lost: it cannot say it. "
        "Status 0: the object passes the checks. 1: a check refuses it. 2: there is no object."
    )
    parser.add_argument(
        "file",
        help="YAML with a Deployment, StatefulSet or LeaderWorkerSet of vLLM, SGLang, TGI, "
        "llama.cpp or Ollama; - for standard input",
    )
    parser.add_argument("--memory", type=_memory, help="of one device, or of the pod on CPUs: 80Gi")


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice from`: 0 if the object passes, 1 if a check refuses it, 2 for none."""
    try:
        found = _converted(_text(args.file), args.memory)
    except Unreadable as e:
        print(clean(f"sluice from: {args.file}: {e}"), file=sys.stderr)
        return 2
    yaml.safe_dump_all([one.body for one in found], sys.stdout, sort_keys=False, width=100)
    status = 0
    for one in found:
        print(*one.lines, sep="\n", file=sys.stderr)
        if refused := checks.refusal(one.body):
            print(clean(f"refused: {one.body['metadata']['name']}: {refused}"), file=sys.stderr)
            status = 1
    if not checks.has_rules():
        print("not checked: rules of the CRD; pip install 'sluice[from]', or ask "
              "kubectl apply --dry-run=server -f FILE", file=sys.stderr)  # fmt: skip
    return status


def _text(file: str) -> str:
    """Return the file as text; raises Unreadable."""
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise Unreadable("the file is too large to be a manifest")
        return data.decode()
    except OSError as e:
        raise Unreadable(e.strerror or str(e)) from e
    except ValueError as e:
        raise Unreadable(str(e) if isinstance(e, Unreadable) else "the file is no text") from e


def _converted(text: str, memory: str | None) -> list[Converted]:
    """Convert all workloads of a file that run an engine; raises Unreadable."""
    found = documents.read(text)
    workloads = [one for one in found if documents.is_workload(one)]
    if not workloads:
        raise Unreadable("there is no Deployment, StatefulSet or LeaderWorkerSet in it")
    for one in workloads:
        documents.check_shape(one)
    others = [one for one in found if not documents.is_workload(one)]
    objects, left, reason = [], [*map(other, others)], Unreadable("")
    for one in workloads:
        try:
            objects.append(convert(one, others, memory))
        except NoEngine as e:
            reason, left = e, [*left, other(one)]
        except Unreadable as e:
            reason, left = e, [*left, replace(other(one), kind="lost", words=str(e))]
    if not objects:
        raise reason
    several = objects if len(objects) > 1 else []
    for at, made in enumerate(several):
        name = made.body["metadata"]["name"]
        named = (replace(line, path=f"{name}: {line.path}") for line in made.lines)
        objects[at] = replace(made, lines=tuple(named))
    return [*objects[:-1], replace(objects[-1], lines=(*objects[-1].lines, *left))]
