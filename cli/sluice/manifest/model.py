"""The model of an engine, and the volume of its downloads. Pure."""

import json
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from .draft import Draft, Object

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_HOME = {"TGI": "/data", "Ollama": "/root/.ollama", "LlamaCpp": "/root/.cache/llama.cpp"}
_HOMES = {"Ollama": "OLLAMA_MODELS", "LlamaCpp": "LLAMA_CACHE"}
_PLAIN_MOUNT = {"name", "mountPath", "subPath", "readOnly"}
_ASIDE = "/mnt/hub"
"""Mount path of a cache that is no plain claim, as the operator has HF_HOME."""


def read(draft: Draft, given: str) -> None:
    """Write `model.uri` of the model that the engine is started with."""
    source = re.sub(r"^(https?://)?(hf\.co|huggingface\.co)/", "", given)
    repo, _, tag = source.partition(":")
    if "://" in source:
        draft.put("model.uri", source)
    elif source.startswith(("/", ".")):
        _local(draft, source.rstrip("/"))
    else:
        draft.put("model.uri", f"hf://{repo}")
        if tag and draft.engine == "LlamaCpp":
            draft.args += ["--hf-repo", source]
        elif tag:
            draft.say("lost", "model", f"the tag {tag} of {repo}; the engine takes its default")
    if draft.engine != "LlamaCpp":  # which serves any name
        draft.spec["model"].setdefault("name", given)


def _local(draft: Draft, path: str) -> None:
    """Write the URI of a path: on a claim, or on whatever is mounted there."""
    mount = _mount_of(draft, path)
    volume = mount and _volume(draft, mount["name"])
    if not mount or not volume or not _is_claim(mount, volume):
        draft.put("model.uri", f"file://{path}")
        return
    below = _joined(mount.get("subPath", ""), _below(path, mount["mountPath"]))
    claim = volume["persistentVolumeClaim"].get("claimName")
    draft.put("model.uri", f"pvc://{claim}/{below}".rstrip("/"))
    if not _is_named(draft, mount["mountPath"], path):
        draft.unmount(mount)


def cache(draft: Draft) -> None:
    """Carry the volume with a hub's downloads: a claim as `model.cache`, others beside it."""
    if not str(draft.get("model.uri")).startswith("hf://"):
        return
    home = _home(draft)
    mount = _mount_of(draft, home)
    volume = mount and _volume(draft, mount["name"])
    if not mount or not volume:
        return
    below = _joined(mount.get("subPath", ""), _below(home, mount["mountPath"]))
    if draft.engine == "Ollama":
        below = _joined(mount.get("subPath", ""), "")
    path, source = f"{draft.where}.volumeMounts[{mount['name']}]", volume.keys() - {"name"}
    if _is_named(draft, mount["mountPath"]):
        draft.say("changed", path, "is kept, as other words name it; downloads go to model.cache")
    elif "emptyDir" in source:
        draft.say("owned", path, "the operator keeps downloads in an emptyDir of its own")
        if volume["emptyDir"]:
            draft.say("lost", path, f"{json.dumps(volume['emptyDir'])} of the downloads")
        draft.unmount(mount)
    elif _is_claim(mount, volume) and not below and not _is_read_only(mount, volume):
        draft.put("model.cache.pvc", volume["persistentVolumeClaim"].get("claimName"))
        if draft.engine == "Ollama":
            draft.say("changed", path, "files lie at the top of the claim, so they load again")
        draft.unmount(mount)
    elif draft.engine in _HOMES:
        draft.say("lost", path, "the engine keeps downloads in model.cache, a claim, alone")
    else:
        draft.say("changed", path, f"mounted at {_ASIDE}, by HF_HUB_CACHE; user 65532 reads it")
        inside = _joined(_below(home, mount["mountPath"]), "hub")
        mount["mountPath"] = _ASIDE
        draft.spec["engine"].setdefault("env", []).append(
            {"name": "HF_HUB_CACHE", "value": f"{_ASIDE}/{inside}"}
        )


def _home(draft: Draft) -> str:
    """Return the folder of the engine's downloads. Its variable becomes the operator's."""
    name = _HOMES.get(draft.engine, "HF_HOME")
    env = draft.container.get("env", [])
    own = next((one for one in env if one["name"] == name and "value" in one), None)
    home = _HUB_HOME.get(draft.engine, "/root/.cache/huggingface")
    if own is None:
        return home
    env.remove(own)
    draft.say("owned", f"{draft.where}.env.{name}", "the operator sets it")
    return str(own["value"]).rstrip("/") or "/"


def _mount_of(draft: Draft, path: str) -> Object | None:
    """Return the deepest mount of the engine that holds `path`."""
    mounts = draft.container.get("volumeMounts", [])
    holds = [one for one in mounts if PurePosixPath(path).is_relative_to(one["mountPath"])]
    return max(holds, key=lambda one: len(one["mountPath"]), default=None)


def _volume(draft: Draft, name: str) -> Object | None:
    found = draft.volume(name)
    kinds = ("emptyDir", "persistentVolumeClaim")
    is_sound = found is not None and all(isinstance(found.get(kind, {}), dict) for kind in kinds)
    return found if is_sound else None


def _is_claim(mount: Object, volume: Object) -> bool:
    """Return True for a claim that is mounted in no special way."""
    return "persistentVolumeClaim" in volume and mount.keys() <= _PLAIN_MOUNT


def _is_read_only(mount: Object, volume: Object) -> bool:
    return bool(mount.get("readOnly") or volume["persistentVolumeClaim"].get("readOnly"))


def _below(path: str, top: str) -> str:
    return str(PurePosixPath(path).relative_to(top)).removeprefix(".")


def _joined(first: str, second: str) -> str:
    return "/".join(filter(None, (first.strip("/"), second.strip("/"))))


def _is_named(draft: Draft, top: str, path: str = "\0") -> bool:
    """Return True if a word of the engine lies under `top`, other than `path`."""
    said = [*draft.args, *_texts(draft.container.get("env", [])), *_texts(draft.spec["engine"])]
    return any(top in word and word != path for word in said)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    else:
        yield str(value)
