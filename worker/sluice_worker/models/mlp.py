"""The two kinds of MLP: one for all tokens, or experts of which each token takes a few."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from sluice_kernels.expert_mlp import expert_mlp
from torch import Tensor
from torch.nn.functional import gelu, silu

from .config import DecoderConfig
from .linear import Linear, ReadTensor, fuse, read_linear

Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate) * up)."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [num_tokens, hidden_size] -> the same."""
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """A mixture of experts. gate_up [count, 2 * width, hidden_size], down [.., .., width].

    `shares_are_of_chosen`: the shares of the chosen experts add up to 1, not those of all.
    """

    router: Linear
    gate_up: Tensor
    down: Tensor
    per_token: int
    shares_are_of_chosen: bool
    activation: Activation

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [num_tokens, hidden_size] -> the same."""
        likely = self.router(rows).softmax(dim=-1, dtype=torch.float32)
        shares, experts = likely.topk(self.per_token, dim=-1)
        if self.shares_are_of_chosen:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return expert_mlp(rows, experts, shares, self.gate_up, self.down, self.activation)


def read_mlp(config: DecoderConfig, index: int, read: ReadTensor) -> GatedMlp | ExpertMlp:
    """The MLP of a layer, of the kind that the layer has."""
    experts = config.shape.experts
    if experts is not None and index in experts.layers:
        return _read_experts(config, index, read)
    shape, name = config.shape, f"model.layers.{index}.mlp."
    hidden, width = shape.hidden_size, shape.intermediate_size
    if shape.family.fused:
        gate_up = read_linear(read, name + "gate_up_proj", 2 * width, hidden, False)
    else:
        names = (name + "gate_proj", name + "up_proj")
        gate_up = fuse([read_linear(read, n, width, hidden, shape.mlp_bias) for n in names])
    down = read_linear(read, name + "down_proj", hidden, width, shape.mlp_bias)
    return GatedMlp(gate_up, down, _ACTIVATIONS[config.activation])


def _read_experts(config: DecoderConfig, index: int, read: ReadTensor) -> ExpertMlp:
    experts, names = config.shape.experts, config.shape.family.experts
    assert experts is not None
    assert names is not None
    hidden, width = config.shape.hidden_size, experts.width
    block = f"model.layers.{index}.{names.block}."
    router = read_linear(read, block + "gate", experts.count, hidden, False)
    gate_up = router.weight.new_empty(experts.count, 2 * width, hidden)
    down = router.weight.new_empty(experts.count, hidden, width)
    for expert in range(experts.count):
        name = f"{block}experts.{expert}."
        gate_up[expert, :width] = read(f"{name}{names.gate}.weight", (width, hidden))
        gate_up[expert, width:] = read(f"{name}{names.up}.weight", (width, hidden))
        down[expert] = read(f"{name}{names.down}.weight", (hidden, width))
    return ExpertMlp(
        router,
        gate_up,
        down,
        experts.per_token,
        config.norm_topk_prob,
        _ACTIVATIONS[config.activation],
    )
