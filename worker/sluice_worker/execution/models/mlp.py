"""The two kinds of MLP: one for all tokens, or experts of which each token takes a few."""

from dataclasses import dataclass

import torch
from sluice_kernels.expert_mlp import expert_mlp
from sluice_kernels.interface import Kernels, Projection
from torch import Tensor

from .config import DecoderConfig
from .linear import Linear, ReadTensor, fuse, made, read_linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate) * up); gate_up comes gated."""

    gate_up: Projection
    down: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [num_tokens, hidden_size] -> the same."""
        return self.down(self.gate_up(rows))


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """A mixture of experts; gate_up, which comes gated, and down: one layer for each.

    `shares_are_of_chosen`: the chosen experts' shares sum to 1, not the shares of all experts.
    """

    router: Projection
    gate_up: list[Projection]
    down: list[Projection]
    per_token: int
    shares_are_of_chosen: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [num_tokens, hidden_size] -> the same."""
        likely = self.router(rows).softmax(dim=-1, dtype=torch.float32)
        shares, experts = likely.topk(self.per_token, dim=-1)
        if self.shares_are_of_chosen:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return expert_mlp(rows, experts, shares, self.gate_up, self.down)


def read_mlp(
    config: DecoderConfig, index: int, read: ReadTensor, kernels: Kernels
) -> GatedMlp | ExpertMlp:
    """The MLP of a layer, of the kind that the layer has."""
    experts = config.shape.experts
    if experts is not None and index in experts.layers:
        return _read_experts(config, index, read, kernels)
    shape, name = config.shape, f"model.layers.{index}.mlp."
    hidden, width = shape.hidden_size, shape.intermediate_size
    if shape.family.fused:
        gate_up = read_linear(read, name + "gate_up_proj", 2 * width, hidden, False)
    else:
        names = (name + "gate_proj", name + "up_proj")
        gate_up = fuse([read_linear(read, n, width, hidden, shape.mlp_bias) for n in names])
    down = read_linear(read, name + "down_proj", hidden, width, shape.mlp_bias)
    return GatedMlp(made(kernels, gate_up, config.activation), made(kernels, down))


def _read_experts(
    config: DecoderConfig, index: int, read: ReadTensor, kernels: Kernels
) -> ExpertMlp:
    experts, names = config.shape.experts, config.shape.family.experts
    assert experts is not None
    assert names is not None
    hidden, width = config.shape.hidden_size, experts.width
    block = f"model.layers.{index}.{names.block}."

    def layer(expert: int, part: str, rows: int, columns: int) -> Linear:
        return read_linear(read, f"{block}experts.{expert}.{part}", rows, columns, False)

    gate_up, down = [], []
    for expert in range(experts.count):
        parts = [layer(expert, part, width, hidden) for part in (names.gate, names.up)]
        gate_up.append(made(kernels, fuse(parts), config.activation))
        down.append(made(kernels, layer(expert, names.down, hidden, width)))
    router = read_linear(read, block + "gate", experts.count, hidden, False)
    return ExpertMlp(
        # The router decides which weights are used, so it is not quantised.
        kernels.projection(router.weight, None, None, narrow=False),
        gate_up,
        down,
        experts.per_token,
        config.norm_topk_prob,
    )
