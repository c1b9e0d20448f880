"""The model can be any torch.nn.Module. configs/model/net.yaml refers to this class."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """Map inputs (N, *in_shape) to logits (N, num_classes). The data set provides both sizes."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(in_shape), width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, num_classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)
