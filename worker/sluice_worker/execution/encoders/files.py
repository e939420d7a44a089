"""The tensors of an encoder's checkpoint, under the names that its writers gave them."""

import re
from pathlib import Path

import torch
from sluice_core.errors import CheckpointError
from sluice_core.model.encoders import EncoderFamily
from torch import Tensor

from ..models.linear import ReadTensor
from ..weights import Checkpoint

_IGNORED = re.compile(
    r"(^|\.)(pooler\.|cls\.|lm_head\.|vocab_|classifier\.|pre_classifier\.|head\.|decoder\."
    r"|embeddings\.position_ids$)"
)
"""Heads that a vector does not need, and positions that older exporters wrote."""
_OLD_NORMS = {".weight": ".gamma", ".bias": ".beta"}


class EncoderFiles:
    """Reads tensors by BERT's names: with the prefix of a model with a head, or without; norms
    under their old names too."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, family: EncoderFamily
    ) -> None:
        self._directory, self._dtype, self._device = directory, dtype, device
        self._checkpoint, self._prefix = Checkpoint(directory, dtype, device), family.prefix

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; CheckpointError."""
        return self._checkpoint.read(self._stored(name), shape)

    def folder(self, name: str) -> ReadTensor:
        """The tensors of a folder of the checkpoint."""
        return Checkpoint(self._directory / name, self._dtype, self._device).read

    def finish(self) -> None:
        """Refuse tensors that were not read and are of no head."""
        left = [name for name in self._checkpoint.unread if not _IGNORED.search(name)]
        if left:
            raise CheckpointError(f"tensor {min(left)[:128]} has no place in the model.")

    def _stored(self, name: str) -> str:
        names = [self._prefix + name, name]
        for new, old in _OLD_NORMS.items():
            if name.endswith(f"LayerNorm{new}"):
                base = name.removesuffix(new) + old
                names += [self._prefix + base, base]
        return next((each for each in names if self._checkpoint.holds(each)), name)
