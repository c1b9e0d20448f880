"""ResNet: ResNet-18 for CIFAR (He et al. 2016, arXiv 1512.03385). It starts with a 3x3 convolution
of stride 1 and no pooling.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.models.checks import check_image, check_sizes
from stoker.trainer.errors import UserError


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm1(self.conv1(inputs)))
        hidden = self.norm2(self.conv2(hidden))
        return torch.relu(hidden + self.shortcut(inputs))


class ResNet(nn.Module):
    """Map images (N, C, H, W) to (N, num_classes); `widths` and `blocks` have one entry per stage.

    Each stage except the first halves the feature map, unless that would make it smaller than 2x2.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int] = (64, 128, 256, 512),
        blocks: Sequence[int] = (2, 2, 2, 2),
    ) -> None:
        super().__init__()
        channels, height, width = check_image("resnet", in_shape)
        widths = check_sizes("widths", widths)
        blocks = check_sizes("blocks", blocks)
        if not widths or len(widths) != len(blocks):
            raise UserError("model.blocks: expected one number per entry of model.widths.")
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        smallest = min(height, width)
        inputs = widths[0]
        stages: list[nn.Module] = []
        for outputs, count in zip(widths, blocks, strict=True):
            # Do not go down to 1x1: with a single sample in a batch, the norms would see only one
            # value per channel.
            stride = 2 if stages and smallest >= 3 else 1
            smallest = -(-smallest // stride)
            stages.append(Block(inputs, outputs, stride))
            stages += [Block(outputs, outputs, 1) for _ in range(count - 1)]
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.stages(self.stem(inputs))
        outputs: Tensor = self.head(features.mean((2, 3)))
        return outputs
