"""Linear: a single linear layer on the flattened input."""

import math
from collections.abc import Sequence

from torch import Tensor, nn


class Linear(nn.Module):
    """Map (N, *in_shape) to (N, num_classes): logits, or predictions for a regression."""

    def __init__(self, in_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(in_shape), num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs.flatten(1))
        return outputs
