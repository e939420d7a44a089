"""Engines of other makers, one file each: operator, gate and command line read them here."""

from collections.abc import Mapping
from typing import Final

from . import custom, llamacpp, ollama, sglang, tgi, vllm
from .engine import EngineName, ForeignEngine

ENGINES: Final[Mapping[EngineName, ForeignEngine]] = {
    engine.name: engine
    for engine in (
        vllm.ENGINE, sglang.ENGINE, tgi.ENGINE, llamacpp.ENGINE, ollama.ENGINE, custom.ENGINE
    )
}  # fmt: skip
FOREIGN: Final[Mapping[str, ForeignEngine]] = {engine.kind: engine for engine in ENGINES.values()}
"""The same by their names in an object. Our own engine is not among them: it needs no gate."""
