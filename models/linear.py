"""Linear: one affine map of the flattened input."""

import math

from torch import nn


class Linear(nn.Module):
    """(N, *in_shape) -> (N, num_classes): logits, or the predictions of a regression."""

    def __init__(self, in_shape, num_classes):
        super().__init__()
        self.head = nn.Linear(math.prod(in_shape), num_classes)

    def forward(self, inputs):
        return self.head(inputs.flatten(1))
