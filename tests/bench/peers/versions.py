"""The versions that a figure belongs to, from the pins and the repository."""

import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bench.peers.install import LLAMA_ARCHIVE, LOCKS, VLLM_WHEEL
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


def versions(variants: Sequence[Variant]) -> dict[str, str]:
    """What each of the variants' programs is, by its site."""
    known = {
        "sluice": _sluice(),
        "vllm": f"{VLLM_WHEEL}, {pinned('vllm', 'torch')}",
        "transformers": f"{pinned('transformers', 'transformers')}, "
        f"{pinned('transformers', 'torch')}",
        "llama.cpp": f"of {LLAMA_ARCHIVE}",
    }
    sites = dict.fromkeys(variant.site or "sluice" for variant in variants)
    return {site: known[site] for site in sites}
