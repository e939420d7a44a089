"""Carry the engine's flags and variables to fields of the object, or as they were. Pure."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from sluice_core.bounded import count, number
from sluice_operator.spec.engine_rules import OWNED_VARIABLES

from . import flags as engine_flags
from . import model
from .draft import Draft, LineKind, Object, Unreadable
from .flags import Flag
from .launch import Launch

_DTYPES = {"half": "float16", "float": "float32"}
_TASKS = {
    "--task=embed": "Embed", "--task=embedding": "Embed", "--runner=pooling": "Embed",
    "--is-embedding": "Embed", "--task=classify": "Classify", "--task=score": "Score",
}  # fmt: skip
_THOUSANDS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
_SCRIPT = (
    'the script is kept; its engine must be started with "$@", which are the operator\'s flags'
)
_WRAPPER = "is kept, and gets the operator's flags as its last arguments"
_PULL = re.compile(r"ollama (?:pull|run) ([^\s;&|\"]+)")
_SPLITS = ("tensor", "pipeline", "executor")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


def read(draft: Draft, launch: Launch) -> None:
    """Take image, command, arguments and variables out of the container."""
    variables = _variables(draft, launch)
    implied, rest = engine_flags.from_variables(draft.engine, variables)
    draft.container["env"] = rest
    given, free = engine_flags.parse(launch.flags)
    draft.spec |= {"engine": {"name": draft.engine}, "model": {"uri": ""}}
    draft.container.pop("command", None)
    draft.container.pop("args", None)
    if image := draft.container.pop("image", ""):
        draft.put("engine.image", image)
    if launch.command:
        draft.put("engine.command", list(launch.command))
        if launch.is_script:
            draft.say("lost", f"{draft.where}.command", _SCRIPT)
        elif launch.is_wrapper:
            draft.say("changed", f"{draft.where}.command", _WRAPPER)
    for one in launch.dropped:
        draft.say(_joins(draft), f"{draft.where}.command", f"{one!r}: hardware.nodes joins pods")
    if launch.is_script:
        source = _of_script(draft, given, free)
        _apply(draft, [_sourced(one, variables) for one in implied], [])
    else:
        told = [*implied, *given]
        source = _apply(draft, [_sourced(one, variables) for one in told], free)
        _parallel(draft, told)
    if not source and draft.engine == "Ollama":
        source = _pulled(draft)
    if not source:
        raise Unreadable(f"{draft.where} names no model; one that is pulled later has no uri")
    model.read(draft, source)


def _of_script(draft: Draft, given: Sequence[Flag], free: list[str]) -> str:
    """Return the model alone, as the script keeps its own flags."""
    rules = engine_flags.RULES[draft.engine]
    named = [one.value for one in given if rules.get(one.name) == "model"] or free
    script = " ".join(draft.spec["engine"]["command"])
    if draft.engine == "Ollama" and (pulled := _PULL.search(script)):
        named = [pulled[1]]
        del draft.spec["engine"]["command"]
        draft.lines[-1:] = []
        draft.say("owned", f"{draft.where}.command", f"{script!r}: the operator serves and pulls")
    return named[0] if named else ""


def _pulled(draft: Draft) -> str:
    """Return the model that a hook pulls, and take the hook: the operator pulls it."""
    hook = draft.container.get("lifecycle", {}).get("postStart", {})
    pulled = _PULL.search(json.dumps(hook).replace('", "', " "))
    if pulled:
        draft.say("owned", f"{draft.where}.lifecycle.postStart", "the operator pulls the model")
        del draft.container["lifecycle"]["postStart"]
    return pulled[1] if pulled else ""


def _variables(draft: Draft, launch: Launch) -> list[Object]:
    """Return the container's variables, the last of each name; then those of its script."""
    given = dict(launch.given)
    merged: dict[str, Object] = {}
    for one in draft.container.pop("env", []):
        if one["name"] in merged:
            draft.say("lost", f"{draft.where}.env.{one['name']}", "is there twice; the last counts")
        merged[one["name"]] = one
    return [*(one for one in merged.values() if one["name"] not in given),
            *({"name": name, "value": value} for name, value in given.items())]  # fmt: skip


def _sourced(flag: Flag, variables: Sequence[Object]) -> Flag:
    """Return a flag with the source of the variable that is its whole value."""
    name = re.fullmatch(r"\$\((\w+)\)", flag.value)
    sources = {one["name"]: one.get("valueFrom") for one in variables}
    if name and sources.get(name[1]):
        return replace(flag, source=sources[name[1]])
    return flag


def _apply(draft: Draft, given: Sequence[Flag], free: list[str]) -> str:
    """Give each flag to its rule; return the model. What no rule takes stays an argument."""
    rules, named = engine_flags.RULES[draft.engine], list(free)
    contexts = []
    for flag in given:
        rule = rules.get(flag.name, "")
        if rule == "model":
            named.append(flag.value)
        elif rule in _SPLITS:
            continue
        elif rule == "context":
            contexts.append(flag)
        elif not (rule and _RULES[rule](draft, flag)):
            draft.args += flag.written(draft.engine == "LlamaCpp")
            if task := _TASKS.get(f"{flag.name}={flag.value}".rstrip("=")):
                draft.put("model.task", task)
    for flag in contexts:
        _context(draft, flag)
    if len(named) > 1 and len(set(named)) > 1:
        draft.say(
            "lost", f"{draft.where}.args", f"{' '.join(named[:-1])}: {named[-1]} is the model"
        )
    return named[-1] if named else ""


def _line(draft: Draft, flag: Flag) -> str:
    return f"{draft.where}.{flag.origin or f'args: {flag.name}'}"


def _number(path: str, low: int, high: int) -> Callable[[Draft, Flag], bool]:
    def rule(draft: Draft, flag: Flag) -> bool:
        text, unit = flag.value[:-1], _THOUSANDS.get(flag.value[-1:])
        whole = count(text) if unit else count(flag.value)
        said = whole * (unit or 1) if whole is not None else None
        if said is None or not low <= said <= high:
            return False
        draft.put(path, said)
        return True

    return rule


def _text(path: str) -> Callable[[Draft, Flag], bool]:
    def rule(draft: Draft, flag: Flag) -> bool:
        draft.put(path, flag.value)
        return True

    return rule


def _name(draft: Draft, flag: Flag) -> bool:
    draft.put("model.name", flag.value)
    if others := flag.values[1:]:
        draft.say("lost", _line(draft, flag), f"an object has one name, so not {' '.join(others)}")
    return True


def _dtype(draft: Draft, flag: Flag) -> bool:
    dtype = _DTYPES.get(flag.value, flag.value)
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        return False
    draft.put("model.dtype", dtype)
    return True


def _share(draft: Draft, flag: Flag) -> bool:
    share = number(flag.value, 1)
    if share is None or share < 0.01 or (share == 0.9 and draft.engine != "VLLM"):
        return False  # these find a share of their own where the object has the default
    draft.put("batching.memoryUtilization", f"{share:.6g}")
    return True


def _caching(draft: Draft, flag: Flag) -> bool:
    draft.put("batching.prefixCaching", not re.match("--(no|disable)", flag.name))
    return True


def _key(draft: Draft, flag: Flag) -> bool:
    """Name the Secret of the API's keys. Without it the pods wait: nobody gets in unasked."""
    source = (flag.source or {}).get("secretKeyRef", {})
    name, key = source.get("name"), source.get("key")
    if key == "keys":
        draft.put("apiKeySecretRef.name", name)
        return True
    draft.put("apiKeySecretRef.name", f"{draft.name}-keys")
    now = f"; it is key {key} of Secret {name} now" if name else ""
    words = f"make Secret {draft.name}-keys, whose key `keys` has the API's keys, one a line{now}"
    draft.say("missing", _line(draft, flag), words)
    return True


def _owned(draft: Draft, flag: Flag) -> bool:
    said = f"{' '.join(flag.values)} is the operator's" if flag.values else "the operator sets it"
    draft.say("owned", _line(draft, flag), said)
    return True


def _joins(draft: Draft) -> LineKind:
    """Return the kind of a line on what joins nodes."""
    return "owned" if draft.nodes > 1 else "lost"


def _wiring(draft: Draft, flag: Flag) -> bool:
    said = f"{' '.join(flag.values)}: " if flag.values else ""
    draft.say(_joins(draft), _line(draft, flag), f"{said}hardware.nodes joins the pods")
    return True


_RULES: Final[dict[str, Callable[[Draft, Flag], bool]]] = {
    "name": _name, "revision": _text("model.revision"), "dtype": _dtype, "share": _share,
    "length": _number("model.maxModelLen", 1, 1_048_576),
    "seqs": _number("batching.maxNumSeqs", 1, 4096),
    "budget": _number("batching.maxNumBatchedTokens", 16, 65_536),
    "caching": _caching, "uncached": _caching, "key": _key, "owned": _owned, "wiring": _wiring,
}  # fmt: skip


def _context(draft: Draft, flag: Flag) -> None:
    """Write the length of one sequence. The slots of llama.cpp share its context."""
    total, slots = count(flag.value) or 0, draft.get("batching.maxNumSeqs") or 1
    if not total:
        draft.say("owned", _line(draft, flag), f"{flag.value}: the operator gives the model's own")
        return
    length = max(total // slots, 1)
    draft.put("model.maxModelLen", length)
    draft.put("batching.maxNumSeqs", slots)
    kind: LineKind = "owned" if slots > 1 else "changed"
    words = f"{total} for all sequences, so maxModelLen is {length} and maxNumSeqs {slots}"
    draft.say(kind, _line(draft, flag), words)


def _parallel(draft: Draft, given: Sequence[Flag]) -> None:
    """Leave out the flags that `hardware` stands for; where one differs, keep them all."""
    gpus, sizes = draft.get("hardware.gpus") or 1, {"tensor": 1, "pipeline": 1}
    wanted, splits = {"tensor": gpus, "pipeline": draft.nodes}, []
    rules = engine_flags.RULES[draft.engine]
    for flag in given:
        if (rule := rules.get(flag.name)) in ("tensor", "pipeline"):
            sizes[str(rule)] = count(flag.value) or 0
            splits.append(flag)
        elif rule == "executor" and draft.nodes > 1:
            draft.say("owned", _line(draft, flag), f"{flag.value}: hardware.nodes joins the pods")
        elif rule == "executor":
            draft.args += flag.written(apart=False)
    if draft.engine == "TGI" and not splits:
        return  # it takes all devices that it sees
    if draft.engine not in ("VLLM", "SGLang", "TGI") or sizes == wanted:
        return
    if splits or any("parallel" in one or "--dp" in one for one in draft.args):
        draft.args += [word for flag in splits for word in flag.written(apart=False)]
        return
    if draft.nodes > 1:
        return  # without a flag the group would not start either
    none = "--tensor-parallel-size=1" if draft.engine == "VLLM" else "--tp-size=1"
    draft.args.append(none)
    words = f"{gpus} devices and one of them used; take {none} away to use all"
    draft.say("changed", f"{draft.where}.args", words)


def variables(draft: Draft) -> None:
    """Carry the variables: to the object's `env`, the token's Secret, or the overlay."""
    env: list[Object] = draft.spec["engine"].pop("env", [])
    beside: list[Object] = []
    for one in draft.container.pop("env", []):
        name, source = one["name"], one.get("valueFrom", {})
        path = f"{draft.where}.env.{name}"
        if name in _TOKENS and _token(draft, name, one):
            continue
        if re.fullmatch("|".join(OWNED_VARIABLES), name):
            draft.say("lost", path, f"{one.get('value', '')}: the operator sets it".lstrip(": "))
        elif not _fits(one) or _leads_to(one, beside):
            field = source.get("resourceFieldRef", {})
            if field.get("containerName") == draft.container.get("name"):
                field["containerName"] = "engine"
            beside.append(one)
        else:
            env.append(one)
    if env:
        draft.put("engine.env", env)
    if beside:
        draft.patch["env"] = beside


def _fits(one: Object) -> bool:
    """Return True if `engine.env` takes the variable."""
    is_short = len(one.get("value", "")) <= 4096
    kinds = one.get("valueFrom", {}).keys() - {"secretKeyRef", "configMapKeyRef"}
    return not kinds and is_short and re.fullmatch(r"[A-Za-z_]\w*", one["name"]) is not None


def _leads_to(one: Object, beside: Sequence[Object]) -> bool:
    """Return True if a value needs a variable that comes after those of `engine.env`."""
    return any(f"$({other['name']})" in one.get("value", "") for other in beside)


def _token(draft: Draft, name: str, one: Object) -> bool:
    """Carry the token of a hub; return True if nothing is left to carry."""
    path, held = f"{draft.where}.env.{name}", draft.get("model.secretRef")
    source = one.get("valueFrom", {}).get("secretKeyRef")
    if not source:
        if "value" in one and name == "HF_TOKEN":
            draft.say("lost", path, "a token in plain text; make a Secret, for model.secretRef")
            return True
        return False
    ref = {key: source[key] for key in ("name", "key") if key in source}
    if not str(draft.get("model.uri")).startswith("hf://") or draft.engine == "Ollama":
        draft.say("lost", path, f"{ref}: a token is for hf:// models, and not of Ollama")
        return True
    if held is not None and held != ref:
        return False
    draft.put("model.secretRef", ref)
    if source.get("optional"):
        draft.say("changed", path, "the Secret is no longer optional: True")
    return True
