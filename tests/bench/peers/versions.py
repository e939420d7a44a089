"""The versions that a figure belongs to, from the pins and the repository."""

import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.peers.install import LLAMA_ARCHIVE, LOCKS, OLLAMA_MODULE, VLLM_WHEEL
from bench.peers.variants import Variant


def pinned(site: str, package: str) -> str:
    """A package's version in a peer's lock."""
    lines = (LOCKS / f"{site}.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(package + "=="))


def _sluice() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return f"commit {commit or 'unknown'}, torch=={version('torch')}"


def version_of(site: str) -> str:
    """A site's program, or our own."""
    match site:
        case "vllm":
            return f"{VLLM_WHEEL}, {pinned('vllm', 'torch')}"
        case "transformers":
            return f"{pinned(site, 'transformers')}, {pinned(site, 'torch')}"
        case "llama.cpp":
            return f"of {LLAMA_ARCHIVE}"
        case "ollama":
            return OLLAMA_MODULE
        case _:
            return _sluice()


def versions(variants: Sequence[Variant]) -> dict[str, str]:
    """The versions of the variants' programs, by site."""
    sites = dict.fromkeys(variant.site or "sluice" for variant in variants)
    return {site: version_of(site) for site in sites}
