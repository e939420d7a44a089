"""The Secret with the API's keys. No watch shows it, so it is read at intervals."""

import base64
import math
from collections.abc import Mapping
from typing import Any

from ..cluster.client import Cluster, Ref
from ..spec.service import InferenceService
from .pod import KEYS

_AGAIN_S = 5.0
"""Seconds until a Secret without usable keys is read again."""


class ApiKeys:
    """The API keys of one object."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._name, self._problem, self._read_s = "", "", -math.inf

    async def problem(self, service: InferenceService, now_s: float, every_s: float) -> str:
        """Why no pod could start with them, "" if it could; read every `every_s` at most while all
        is well. Raises ClusterError."""
        ref = service.spec.api_key_secret_ref
        if ref is None:
            return ""
        again_s = _AGAIN_S if self._problem else every_s
        if ref.name != self._name or now_s - self._read_s >= again_s:
            secret = await self._cluster.get(Ref("Secret", service.namespace, ref.name))
            self._problem = problem_of(secret, ref.name)
            self._name, self._read_s = ref.name, now_s
        return self._problem


def problem_of(secret: Mapping[str, Any] | None, name: str) -> str:
    """Why the Secret called `name` holds no keys that a worker would take; "" if it holds some."""
    where = "spec.apiKeySecretRef: "
    if secret is None:
        return f"{where}there is no Secret {name}"
    encoded = (secret.get("data") or {}).get(KEYS)
    if encoded is None:
        return f"{where}the Secret {name} has no key `{KEYS}`"
    try:
        text = base64.b64decode(encoded).decode("utf-8")
    except ValueError:
        return f"{where}`{KEYS}` of the Secret {name} is not UTF-8 text"
    return "" if text.strip() else f"{where}`{KEYS}` of the Secret {name} is empty"
