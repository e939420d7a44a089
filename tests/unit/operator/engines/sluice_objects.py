"""Objects of our own engine whose Deployments were written down before there were other engines."""

from __future__ import annotations

from typing import Any

_GPU = {"accelerator": "nvidia", "memory": "22Gi", "hostMemory": "8Gi"}
_HUB = {"uri": "hf://Qwen/Qwen3-0.6B", "secretRef": {"name": "hf"}, "cache": {"pvc": "models"}}
SLUICE_OBJECTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "claim": {"model": {"uri": "pvc://models/a/b"}, "drain__timeout": "45s"},
    "gpu": {"hardware": _GPU, "model": _HUB, "apiKeySecretRef": {"name": "keys"}},
    "arguments": {
        "engine": {"image": "r/w:2", "args": ["--seed=1", "--block-size=16"]},
        "batching": {
            "maxNumBatchedTokens": 512, "prefixCaching": False, "speculation": "Never",
            "memoryUtilization": "0.8",
        },
        "hardware__nodeSelector": {"zone": "a"},
        "hardware__tolerations": [{"operator": "Exists"}],
        "hardware__runtimeClassName": "nvidia",
    },
}  # fmt: skip
"""By name, what is changed in the valid object, as `create_service` takes it."""
