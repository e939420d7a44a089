"""`spec.hardware` from the requests and limits of a pod, and from its choice of nodes. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sluice_core.bounded import count

from .draft import Draft, Object

_DEVICE = re.compile(r".+/.*(gpu|mig-|gaudi|tpu|neuron|ascend|i915|xe|npu|mlu|dcu|rocm)[^/]*")
_MEMORIES: Final = {
    "b300": 268, "b200": 179, "gb200": 186,
    "h200": 140, "mi355": 288, "mi325": 256, "mi300": 192, "mi250": 64,
    "mi210": 64, "h100": 80, "h20": 96, "a100": 40, "a800": 80, "rtx-6000-ada": 48, "l40": 45,
    "a6000": 48, "a40": 45, "a30": 24, "a10": 22, "v100": 16, "t4": 15, "l4": 22, "4090": 24,
    "3090": 24, "5090": 32, "v5-lite": 16, "v5p": 95, "v6e": 32, "p5": 80, "p4de": 80, "p4d": 40,
    "g6e": 45, "g6": 22, "g5": 22, "g4dn": 15, "inf2": 16, "trn1": 16, "gaudi3": 128, "gaudi2": 96,
}  # fmt: skip
"""GiB of a device by a part of a label's value; the first that is found counts."""
_PRODUCTS = re.compile(r"gpu|accelerator|instance-type|tpu|neuron|habana|card", re.IGNORECASE)
_PLACEHOLDER = "80Gi"
_HARDWARE = ("nodeSelector", "tolerations", "runtimeClassName")
_TOLERATION = {"key", "operator", "value", "effect", "tolerationSeconds"}


def devices(draft: Draft) -> None:
    """Write accelerator, gpus, resource and nodes from the engine's resources."""
    held = draft.container.setdefault("resources", {})
    limits, requests = held.setdefault("limits", {}), held.setdefault("requests", {})
    asked = sorted({**requests, **limits}, key=lambda name: not name.startswith("nvidia.com/gpu"))
    name = next((one for one in asked if _DEVICE.fullmatch(one)), None)
    if draft.nodes > 1:
        draft.put("hardware.nodes", draft.nodes)
    if name is None:
        others = _other_device(draft)
        draft.put("hardware.accelerator", "other" if others else "cpu")
        if others:
            draft.say("changed", draft.where, f"no device is asked for; it comes by {others}")
        return
    number = limits.pop(name, None)
    number = requests.pop(name, number) if number is None else (requests.pop(name, 0), number)[1]
    draft.put("hardware.accelerator", "nvidia" if name.startswith("nvidia.com/") else "other")
    if name != "nvidia.com/gpu":
        draft.put("hardware.resource", name)
    whole = count(number)
    if whole != 1:
        draft.put("hardware.gpus", number if whole is None else whole)


def _other_device(draft: Draft) -> str:
    """Say how a pod comes to a device that no resource asks for; "" for none."""
    env = {one["name"] for one in draft.container.get("env", [])}
    paths = json.dumps(draft.pod.get("volumes", []))
    if draft.container["resources"].get("claims"):
        return "resourceClaims"
    if "NVIDIA_VISIBLE_DEVICES" in env or "nvidia" in draft.pod.get("runtimeClassName", ""):
        return "the container runtime"
    return "a path of the node" if re.search(r'"/dev/(dri|kfd|nvidia|accel|vfio)', paths) else ""


def read(draft: Draft, memory: str | None) -> None:
    """Write the rest of `hardware`; `memory`: of one device, as the command was told."""
    held = draft.container.pop("resources")
    limits, requests = held.pop("limits"), held.pop("requests")
    on_cpu = draft.get("hardware.accelerator") == "cpu"
    if not on_cpu:
        draft.put("hardware.memory", memory or _guess(draft))
    for name in ("cpu", "memory"):
        path = {"cpu": "cpu", "memory": "memory" if on_cpu else "hostMemory"}[name]
        limit, request = limits.pop(name, None), requests.get(name)
        if path == "memory" and memory:
            draft.put("hardware.memory", memory)
        if limit is not None:
            draft.put(f"hardware.{path}", _quantity(limit))
        elif request is not None and path != "hostMemory":
            draft.put(f"hardware.{path}", _quantity(request))
            draft.say("changed", f"{draft.where}.resources", f"{name} {request} is a limit too")
        elif path != "hostMemory" and not draft.get(f"hardware.{path}"):
            _missing(draft, path)
        if request is not None and _quantity(request) == draft.get(f"hardware.{path}"):
            requests.pop(name)
    for one in _HARDWARE:
        if one in draft.pod:
            draft.put(f"hardware.{one}", draft.pod.pop(one))
    _tolerations(draft)
    rest = {**held, **({"limits": limits} if limits else {}),
            **({"requests": requests} if requests else {})}  # fmt: skip
    if rest:
        draft.patch["resources"] = rest


def _missing(draft: Draft, path: str) -> None:
    if path == "cpu":
        draft.say("missing", "hardware.cpu", "the file has no CPU; the pods get the default")
    else:
        draft.put("hardware.memory", _PLACEHOLDER)
        draft.say("missing", "hardware.memory", f"{_PLACEHOLDER} is a placeholder: give --memory")


def _tolerations(draft: Draft) -> None:
    """Carry tolerations with a field that the object has not to the overlay."""
    given = draft.get("hardware.tolerations") or []
    kept = [one for one in given if one.keys() <= _TOLERATION]
    if len(kept) < len(given):
        draft.put("hardware.tolerations", kept)
        draft.pod["tolerations"] = [one for one in given if one not in kept]


def _quantity(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else value


def _guess(draft: Draft) -> str:
    """Guess the memory of one device by its resource's name or a label of its nodes."""
    name = draft.get("hardware.resource") or ""
    if profile := re.search(r"mig-\d+c?\.?\d*g\.(\d+)gb", name):
        draft.say("missing", "hardware.memory", f"{profile[1]}Gi by {name}; check it, or --memory")
        return f"{profile[1]}Gi"
    for key, value in _labels(draft.pod):
        if key.endswith(("gpu.memory", "gpu-memory")) and count(value):
            found = f"{value}Mi"
        elif not (_PRODUCTS.search(key) and (gib := _gib(value.lower()))):
            continue
        else:
            found = f"{gib}Gi"
        draft.say("missing", "hardware.memory", f"{found} by {key}={value}; check it, or --memory")
        return found
    draft.say("missing", "hardware.memory",
              f"{_PLACEHOLDER} is a placeholder: give --memory of one device")  # fmt: skip
    return _PLACEHOLDER


def _gib(product: str) -> int | None:
    if said := re.search(r"(\d{2,3})gb", product):
        return int(said[1])
    parts = (part for part in _MEMORIES if re.search(rf"(?<![a-z0-9]){part}(?![0-9])", product))
    return next((_MEMORIES[part] for part in parts), None)


def _labels(pod: Object) -> Iterator[tuple[str, str]]:
    """Yield the labels that the pod's nodes must have."""
    yield from pod.get("nodeSelector", {}).items()
    yield from _expressions(pod.get("affinity", {}).get("nodeAffinity", {}))


def _expressions(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        values = value.get("values")
        if isinstance(values, list) and value.get("operator") == "In":
            yield from ((str(value.get("key")), str(one)) for one in values)
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _expressions(one)
