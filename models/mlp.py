"""MLP: fully connected layers with an activation, dropout and an optional norm."""

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from stoker.models.checks import check_dropout, check_sizes
from stoker.trainer.errors import check_choice

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
NORMS: dict[str, type[nn.Module] | None] = {
    "none": None,
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


class MLP(nn.Module):
    """Map (N, *in_shape) to (N, num_classes). With `hidden=[]`, the model is linear.

    norm="batch" needs at least two samples in a training batch.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        dropout: float = 0.0,
        norm: str = "none",
    ) -> None:
        super().__init__()
        check_choice("model.activation", activation, ACTIVATIONS)
        check_choice("model.norm", norm, NORMS)
        check_dropout(dropout)
        sizes = [math.prod(in_shape), *check_sizes("hidden", hidden)]
        norm_layer = NORMS[norm]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(sizes):
            # The norm adds its own bias, so the linear layer does not need one.
            layers.append(nn.Linear(inputs, outputs, bias=norm_layer is None))
            if norm_layer is not None:
                layers.append(norm_layer(outputs))
            layers.append(ACTIVATIONS[activation]())
            layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(sizes[-1], num_classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs
