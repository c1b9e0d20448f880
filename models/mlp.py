"""MLP: fully connected layers with an activation, and dropout and a norm where asked."""

import itertools
import math

from stoker.models.checks import check_sizes
from stoker.trainer.errors import check_choice, check_number
from torch import nn

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
NORMS = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class MLP(nn.Module):
    """(N, *in_shape) -> (N, num_classes); `hidden=[]` is a linear model.

    norm="batch" needs two samples a batch to train.
    """

    def __init__(
        self, in_shape, num_classes, hidden=(256, 256), activation="relu", dropout=0.0, norm="none"
    ):
        super().__init__()
        sizes = [math.prod(in_shape), *check_sizes("model.hidden", hidden, empty=True)]
        activation = ACTIVATIONS[check_choice("model.activation", activation, ACTIVATIONS)]
        norm = NORMS[check_choice("model.norm", "none" if norm is None else norm, NORMS)]
        check_number("model.dropout", dropout, least=0, most=0.95)
        layers = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(sizes):
            # The norm has its own offset, so the bias in front of it would do nothing.
            layers.append(nn.Linear(inputs, outputs, bias=norm is None))
            if norm is not None:
                layers.append(norm(outputs))
            layers += [activation(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))

    def forward(self, inputs):
        return self.layers(inputs)
