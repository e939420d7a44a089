"""Numbers and words of others come in at the modules that are listed here, and nowhere else.

The first table says of each module that parses a text why its numbers are bounded; the second names
the modules in which words of others become sentences of ours, which they clean.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("core", "frontend", "gate", "operator", "cli", "worker")
OURS = (
    *(f"worker/sluice_worker/{room}" for room in ("base", "execution", "scheduling", "text")),
    *("operator/sluice_operator/tuner", "cli/sluice/simulate", "core/sluice_core/steptime.py"),
)
"""Rooms whose numbers are our own: tensors, laws, this machine, traces, a tokenizer's state."""

TYPES = "types with bounds"
READ = "each number is read by `bounded`"
OWN = "flags, environment, clocks or files of whoever starts it"
SUMS = "arithmetic with values that are bounded already"
PARSED = {
    "core/sluice_core/bounded.py": "the place",
    "core/sluice_core/contract.py": TYPES,
    "core/sluice_core/wire.py": TYPES,
    "core/sluice_core/errors.py": OWN,
    "core/sluice_core/hub/reference.py": OWN,
    "core/sluice_core/hub/site.py": READ,
    "core/sluice_core/model/architecture.py": "a model's configuration: each number has its most",
    "core/sluice_core/model/encoders.py": "the same",
    "core/sluice_core/model/images.py": "the same",
    "core/sluice_core/model/files.py": "the same: whoever reads a field checks it",
    "core/sluice_core/model/stored.py": "eight bytes of a header, below its most",
    "frontend/sluice_frontend/batches/files.py": OWN,
    "frontend/sluice_frontend/batches/item.py": TYPES,
    "frontend/sluice_frontend/batches/outputs.py": TYPES,
    "frontend/sluice_frontend/batches/records.py": OWN,
    "frontend/sluice_frontend/batches/results.py": TYPES,
    "frontend/sluice_frontend/config.py": OWN,
    "frontend/sluice_frontend/evidence/metrics.py": SUMS,
    "frontend/sluice_frontend/http/beside.py": "our own process, which it started",
    "frontend/sluice_frontend/http/bodies.py": "a length of at most 20 digits, as h11 checks",
    "frontend/sluice_frontend/http/clients.py": SUMS,
    "frontend/sluice_frontend/http/logs.py": OWN,
    "frontend/sluice_frontend/api/chat.py": "a client's argument, handed to a template",
    "frontend/sluice_frontend/api/json_body.py": "clients' bodies: types with bounds",
    "gate/sluice_gate/request/asked.py": "clients' bodies: what cannot be counted is one",
    "gate/sluice_gate/queue/backend.py": SUMS,
    "gate/sluice_gate/queue/progress.py": SUMS,
    "gate/sluice_gate/request/estimate.py": OWN,
    "gate/sluice_gate/request/json_object.py": "members stay bytes; `asked` bounds their numbers",
    "gate/sluice_gate/count/chunks.py": READ,
    "gate/sluice_gate/engine/inner.py": TYPES,
    "gate/sluice_gate/engine/upstream.py": READ,
    "gate/sluice_vllm/link.py": "the gate's own messages",
    "gate/sluice_vllm/settings.py": OWN,
    "operator/sluice_operator/children/manifests.py": "a template, compared and not computed with",
    "operator/sluice_operator/children/runtime.py": READ,
    "operator/sluice_operator/cluster/jobs.py": TYPES,
    "operator/sluice_operator/spec/batch.py": TYPES,
    "operator/sluice_operator/cluster/client.py": "the API server's objects, by its schemas",
    "operator/sluice_operator/plan/tune.py": SUMS,
    "operator/sluice_operator/plan/rival.py": "the API server's objects, by its schemas",
    "operator/sluice_operator/pods/scrape.py": TYPES,
    "operator/sluice_operator/settings.py": OWN,
    "operator/sluice_operator/spec/kinds.py": "amounts with their own bounds",
    "operator/sluice_operator/spec/service.py": TYPES,
    "operator/sluice_operator/status/usage.py": SUMS,
    "cli/sluice/__main__.py": OWN,
    "cli/sluice/batch/command.py": OWN,
    "cli/sluice/bench.py": OWN,
    "cli/sluice/kube.py": READ,
    "cli/sluice/load.py": OWN,
    "cli/sluice/manifest/checks.py": "quantities that a rule has matched",
    "cli/sluice/manifest/hardware.py": "two or three digits of a device's name",
    "cli/sluice/measure/client.py": READ,
    "cli/sluice/measure/curve.py": SUMS,
    "cli/sluice/measure/endpoint.py": READ,
    "cli/sluice/measure/targets.py": OWN,
    "cli/sluice/numbers.py": OWN,
    "cli/sluice/plan.py": OWN,
    "cli/sluice/report.py": SUMS,
    "cli/sluice/ui/cluster.py": "the API server's objects, by its schemas",
    "cli/sluice/ui/server.py": TYPES,
    "worker/sluice_worker/api/generation.py": OWN,
    "worker/sluice_worker/api/app.py": OWN,
    "worker/sluice_worker/tasks/tokenize.py": "a tokenizer's own `decode`",
    "worker/sluice_worker/engine/client.py": TYPES,
    "worker/sluice_worker/engine/machine.py": OWN,
    "worker/sluice_worker/tasks/classify.py": OWN,
    "worker/sluice_worker/tasks/embed.py": OWN,
    "worker/sluice_worker/engine/startup.py": OWN,
    "worker/sluice_worker/engine/encoding_start.py": OWN,
    "worker/sluice_worker/engine/process.py": "the API process's own messages",
}
"""Why a module may parse."""

CLEANED = {
    "core/sluice_core/errors.py": "sentences that quote a client, an engine, a file",
    "core/sluice_core/hub/site.py": "a hub's",
    "core/sluice_core/model/architecture.py": "a model's configuration",
    "frontend/sluice_frontend/batches/item.py": "an input's and a server's, in sentences on them",
    "frontend/sluice_frontend/batches/lines.py": "an input's",
    "frontend/sluice_frontend/batches/work.py": "the same",
    "operator/sluice_operator/__main__.py": "the API server's last words",
    "operator/sluice_operator/cluster/client.py": "the API server's, a webhook's",
    "operator/sluice_operator/cluster/ends.py": "an engine's last words",
    "operator/sluice_operator/cluster/jobs.py": "a Job's own account",
    "operator/sluice_operator/cluster/observed.py": "the kubelet's, a registry's",
    "operator/sluice_operator/pods/scrape.py": "a pod's answer",
    "operator/sluice_operator/spec/service.py": "a user's object",
    "operator/sluice_operator/status/batch.py": "the same of a batch",
    "operator/sluice_operator/status/compose.py": "all that a status says",
    "operator/sluice_operator/status/events.py": "all that an event says",
    "cli/sluice/batch/command.py": "an input's, in sentences on it",
    "cli/sluice/batch/report.py": "the last line of a run",
    "cli/sluice/batch/run.py": "a server's error, shown once",
    "cli/sluice/batch/send.py": "a server's ids",
    "cli/sluice/kube.py": "all that an object of a cluster says",
    "cli/sluice/manifest/command.py": "a file's, in a sentence on it",
    "cli/sluice/manifest/draft.py": "a manifest's, in lines on it",
    "cli/sluice/measure/client.py": "a server's errors",
    "cli/sluice/measure/endpoint.py": "a server's names and refusals",
    "cli/sluice/serve.py": "fields of a log line",
    "cli/sluice/ui/cluster.py": "all that an object of a cluster says",
    "cli/sluice/ui/views.py": "why a server hangs",
    "worker/sluice_worker/engine/client.py": "the engine process's last words",
}
"""Whose words a module makes sentences of."""

TEXTS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.JoinedStr, ast.BoolOp)
"""What an argument looks like that may be a text; arithmetic and literals are none."""
PARSERS = ("loads", "Decoder", "json.load", "json.decode", "msgpack.decode", "literal_eval")
DECODERS = ("decode", "_decoder.decode")
"""Of `contract`, and made of `msgspec`'s decoders; with an encoding it is a text's own method."""


def parses(call: ast.Call) -> bool:
    """True if the call makes values of a text."""
    name = ast.unparse(call.func)
    if name in ("int", "float"):
        return bool(call.args) and isinstance(call.args[0], TEXTS)
    if name.endswith(".json") and not call.args:
        return True
    is_decoder = name == DECODERS[0] or name.endswith(DECODERS[1])
    return is_decoder or any(name == one or name.endswith(f".{one}") for one in PARSERS)


def imports_clean(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").endswith("words")
        and {alias.name for alias in node.names} & {"clean", "clean_all"}
        for node in ast.walk(tree)
    )


def sources() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(OURS):
                yield name, ast.parse(path.read_text())


SOURCES = dict(sources())


def found(holds: Callable[[ast.AST], bool]) -> set[str]:
    return {name for name, tree in SOURCES.items() if holds(tree)}


def has_parser(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Call) and parses(node) for node in ast.walk(tree))


def test_only_listed_modules_parse_texts() -> None:
    assert found(has_parser) - PARSED.keys() == set()


def test_the_list_of_parsers_names_no_module_that_has_none() -> None:
    assert PARSED.keys() - found(has_parser) == set()


def test_a_module_of_which_the_list_says_that_it_reads_by_bounded_imports_it() -> None:
    own = {name for name, why in PARSED.items() if why == READ}
    told = {name for name in own if "bounded import" in (ROOT / name).read_text()}
    assert own - told - {"cli/sluice/kube.py"} == set()  # whose readers are status and report


def test_only_listed_modules_clean_words_and_each_of_them_does() -> None:
    assert found(imports_clean) == CLEANED.keys()


def test_characters_are_judged_in_one_place() -> None:
    own = ("core/sluice_core/words.py",)
    secrets = (
        "core/sluice_core/hub/reference.py",
        "frontend/sluice_frontend/config.py",
        "operator/sluice_operator/children/admin_token.py",
        "gate/sluice_gate/request/json_object.py",
    )  # which refuse, or fold a name, and show nothing
    words = ("isprintable", "unicode_escape", "unicodedata")
    files = {name for name in SOURCES if any(word in (ROOT / name).read_text() for word in words)}
    assert files == {*own, *secrets}


@pytest.mark.parametrize(
    "line",
    [
        *("json.loads(body)", "int(reply['tokens'])", "float(value)", "float(x.get('a') or 0)"),
        *("msgspec.json.decode(body, type=T)", "msgspec.json.Decoder(T)", "await reply.json()"),
        *("decode(body, RuntimeConfig)", "self._decoder.decode(body)", "int(match[1])"),
    ],
)
def test_a_new_parser_is_found(line: str) -> None:
    call = f"async def f():\n    {line}"
    assert has_parser(ast.parse(call))


@pytest.mark.parametrize("line", ["float('inf')", "int(2 * x)", "data.decode()", "json.dumps(x)"])
def test_what_parses_nothing_is_not_found(line: str) -> None:
    assert not has_parser(ast.parse(line))
