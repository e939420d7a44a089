"""A linear layer as a value."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [num_rows, in] -> [num_rows, out]."""
        return linear(rows, self.weight, self.bias)
