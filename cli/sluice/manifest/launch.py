"""The engine that a container runs, and its words, also behind `sh -c`. Pure."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .draft import Object

_PROGRAMS: Final = {
    "VLLM": r"vllm serve|python3? -m vllm\.entrypoints\.openai\.api_server",
    "SGLang": r"python3? -m sglang\.launch_server|sglang serve",
    "TGI": r"text-generation-launcher",
    "LlamaCpp": r"llama-server",
    "Ollama": r"ollama serve",
}
_IMAGES: Final = {
    "VLLM": r"vllm", "SGLang": r"sglang", "TGI": r"text-generation-inference|(^|-)tgi(-|$)",
    "LlamaCpp": r"llama[.-]?cpp(?!-python)|llama-server", "Ollama": r"^ollama",
}  # fmt: skip
_BESIDE = re.compile(r"router|gateway|operator|exporter|proxy|webui|bench|sidecar|adapter|download")
"""Images that have an engine's name and are none."""
_SHELL = re.compile(r"(\S*/)?(ba|da|z)?sh")
_SEPARATORS = re.compile(r"&&|[;\n]")
_WIRING = re.compile(r"multi-node-serving|\bray start\b|\bray status\b")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(\S*|'[^']*'|\"[^\"$`]*\")")
_UNSAFE = re.compile(r"`|\$\((?!\w+\))|\$[@*#?!0-9]")
"""Words that a shell would replace by others, which the file does not have."""


@dataclass(frozen=True, slots=True)
class Launch:
    """`engine`: its kind. `flags`: words after the program. `command`: of the object, () for the
    engine's own. `given`: variables that a script sets. `dropped`: its commands that join nodes.
    `is_script`: the command is the script as it was, with flags of its own. `is_wrapper`: it is a
    program that must hand its arguments on."""

    engine: str
    flags: tuple[str, ...]
    command: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    is_script: bool = False
    is_wrapper: bool = False


def basename(image: str) -> str:
    """Return the last part of an image's name, without tag and digest."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def find(containers: Sequence[Object]) -> tuple[int, Launch] | None:
    """Find the container that runs an engine, by its program, else by its image."""
    for number, one in enumerate(containers):
        if found := _by_program(one):
            return number, found
    for number, one in enumerate(containers):
        image = basename(one.get("image", "")).lower()
        kind = next((kind for kind, form in _IMAGES.items() if re.search(form, image)), None)
        if kind and not _BESIDE.search(image):
            command, args = one.get("command", []), one.get("args", [])
            if kind == "Ollama" and args[:1] == ["serve"]:
                args = args[1:]
            literals = _literals(one)
            flags = tuple(_kubelet(word, literals) for word in args)
            return number, Launch(kind, flags, tuple(command), is_wrapper=True)
    return None


def _by_program(container: Object) -> Launch | None:
    words = [*container.get("command", []), *container.get("args", [])]
    literals = _literals(container)
    known = {one["name"] for one in container.get("env", [])}
    for at in range(1, len(words) - 1):
        if _SHELL.fullmatch(words[0]) and re.fullmatch(r"-[a-z]*c", words[at]):
            return _of_script(words[: at + 1], words[at + 1 :], literals, known)
    for kind, form in _PROGRAMS.items():
        for at in range(len(words)):
            for size in (1, 2, 3):
                said = " ".join([words[at].rpartition("/")[2], *words[at + 1 : at + size]])
                if len(words) >= at + size and re.fullmatch(form, said):
                    program = _own_program(kind, words[at : at + size])
                    command = [*words[:at], *program]
                    own = () if command == _usual(kind) else tuple(command)
                    flags = (_kubelet(word, literals) for word in words[at + size :])
                    return Launch(kind, tuple(flags), own)
    return None


def _literals(container: Object) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


def _own_program(kind: str, words: Sequence[str]) -> list[str]:
    """Return the program to which the operator's flags fit: vLLM's module takes no bare model."""
    return ["vllm", "serve"] if kind == "VLLM" and "-m" in words else list(words)


def _usual(kind: str) -> list[str]:
    usual = {"VLLM": "vllm serve", "SGLang": "python3 -m sglang.launch_server"}
    usual |= {"TGI": "text-generation-launcher", "Ollama": "ollama serve"}
    return usual.get(kind, "").split()


def _kubelet(word: str, literals: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: literals.get(found[1], found[0]), word)


def _of_script(
    shell: Sequence[str], script: Sequence[str], literals: Mapping[str, str], known: set[str]
) -> Launch | None:
    """Read the engine that a script starts last. One that does more stays a script."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*$", "", script[0], flags=re.MULTILINE)).strip()
    starts = [
        (found.start(), found, kind)
        for kind, form in _PROGRAMS.items()
        for found in re.finditer(
            rf"(?<![\w./-])((?:[\w.-]*/)*)({form.replace(' ', '[ ]+')})\b", text
        )
    ]
    if not starts:
        return None
    at, found, kind = max(starts, key=lambda one: one[0])
    before, dropped, given = _before(text[:at])
    values = _resolver({**literals, **given}, known)
    tail = re.sub(r"(\s+2>&1)?[\s;]*$", "", text[found.end() :])
    simple = _words(tail, values)
    if simple is None or kind == "Ollama":
        head = re.split(r"&&|\|\||[;\n&|<>]", re.sub(r'"?\$[@*]"?', "", tail))[0]
        flags = tuple(_words(head, values) or ())
        return Launch(kind, flags, (*shell, *script, *([] if script[1:] else ["sh"])),
                      {}, dropped, is_script=True)  # fmt: skip
    program = found[1] + " ".join(_own_program(kind, found[2].split()))
    if not before:
        own = () if program.split() == _usual(kind) else tuple(program.split())
        return Launch(kind, tuple(simple), own, given, dropped)
    run = before + ("exec " if re.search(r"[;&\n]\s*$", before) else "") + f'{program} "$@"'
    return Launch(kind, tuple(simple), (*shell, run, "sh"), {}, dropped, is_wrapper=True)


def _before(text: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Return the part of a script before the engine, its commands that join nodes, and variables.

    The part is empty if it only sets these variables.
    """
    commands = [one.strip() for one in _SEPARATORS.split(text)]
    dropped = tuple(one for one in commands if _WIRING.search(one))
    rest = [
        one for one in commands
        if one not in dropped and not re.fullmatch(r"|exec|set( -\S+| pipefail)*", one)
    ]  # fmt: skip
    set_by = [_ASSIGNMENT.fullmatch(re.sub(r"\s*\bexec$", "", one)) for one in rest]
    if all(set_by):
        return "", dropped, {one[1]: one[2].strip("'\"") for one in set_by if one}
    kept = text if not dropped else "\n".join(one for one in commands if one and one in rest) + "\n"
    return re.sub(r"\bexec\s*$", "", kept), dropped, {}


def _resolver(literals: Mapping[str, str], known: set[str]) -> Callable[[re.Match[str]], str]:
    """Return a function that writes a shell's variable as the kubelet would."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3] or found[4], found[2]
        if name in literals:
            return literals[name]
        if name in known or name.startswith("LWS_") or found[4]:
            return f"$({name})"
        return default if default is not None else found[0]

    return value


def _words(text: str, value: Callable[[re.Match[str]], str]) -> list[str] | None:
    """Return the words of one simple command; None where it is more than that."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        words = list(lexer)
    except ValueError:
        return None
    if any(set(word) <= set(";&|<>\n") for word in words if word) or _UNSAFE.search(text):
        return None
    form = r"\$\{(\w+)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)|\$\((\w+)\)"
    said = [re.sub(form, value, word) for word in words]
    return None if any(re.search(r"\$[{A-Za-z]", word) for word in said) else said
