"""Engines by name: data, and one pure function each for what the engine is started with.

No module here knows Kubernetes beyond a command, arguments and variables: `children` makes pods.
"""

from collections.abc import Mapping
from typing import Final

from ..settings import Settings
from ..spec.service import EngineName, EngineSpec
from . import custom, llamacpp, ollama, sglang, tgi, vllm
from .engine import Engine

FOREIGN: Final[Mapping[EngineName, Engine]] = {
    "VLLM": vllm.ENGINE,
    "SGLang": sglang.ENGINE,
    "TGI": tgi.ENGINE,
    "LlamaCpp": llamacpp.ENGINE,
    "Ollama": ollama.ENGINE,
    "Custom": custom.ENGINE,
}
"""Every engine but our own, which needs no gate."""


def image_of(engine: EngineSpec, settings: Settings) -> str:
    """The image that the object names, else the installation's, else the adapter's."""
    if engine.image:
        return engine.image
    if engine.name == "Sluice":
        return settings.worker_image
    return dict(settings.engine_images).get(engine.name) or FOREIGN[engine.name].image
