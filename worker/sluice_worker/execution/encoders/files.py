"""The tensors of a checkpoint that makes vectors, under the names that its writers gave them."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from sluice_core.errors import CheckpointError
from sluice_core.model.architecture import may_lack
from sluice_core.model.encoders import EncoderFamily
from torch import Tensor

from ..models.linear import ReadTensor
from ..weights import Checkpoint

_IGNORED = re.compile(
    r"(^|\.)(pooler\.|cls\.|lm_head\.|vocab_|classifier\.|pre_classifier\.|head\.|decoder\."
    r"|embeddings\.position_ids$|embeddings\.mask_token$|logit_(scale|bias)$)"
)
"""Heads that a vector does not need, what is for training, and positions of older exporters."""
_OLD_NORMS = {".weight": ".gamma", ".bias": ".beta"}
Spellings = Callable[[str], list[str]]
"""The names that a tensor may have in a file."""


def of_encoder(family: EncoderFamily) -> Spellings:
    """With the prefix of a model with a head, or without; norms under their old names too."""
    return partial(_spellings, family.prefix)


def of_decoder(name: str) -> list[str]:
    """With the prefix of a model with a head, or without."""
    return [name, name.removeprefix("model.")]


def _spellings(prefix: str, name: str) -> list[str]:
    names = [prefix + name, name]
    for new, old in _OLD_NORMS.items():
        if name.endswith(f"LayerNorm{new}"):
            base = name.removesuffix(new) + old
            names += [prefix + base, base]
    return names


class VectorFiles:
    """Reads tensors by our names."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, spellings: Spellings
    ) -> None:
        self._directory, self._dtype, self._device = directory, dtype, device
        self._checkpoint, self._spellings = Checkpoint(directory, dtype, device), spellings

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; CheckpointError."""
        stored = (each for each in self._spellings(name) if self._checkpoint.holds(each))
        return self._checkpoint.read(next(stored, name), shape)

    def folder(self, name: str) -> ReadTensor:
        """The tensors of a folder of the checkpoint."""
        return Checkpoint(self._directory / name, self._dtype, self._device).read

    def finish(self) -> None:
        """Refuse tensors that were not read and are of no head."""
        unread = self._checkpoint.unread
        left = [name for name in unread if not _IGNORED.search(name) and not may_lack(name)]
        if left:
            raise CheckpointError(f"tensor {min(left)[:128]} has no place in the model.")
