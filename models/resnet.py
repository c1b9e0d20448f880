"""ResNet: ResNet-18 in its CIFAR form (He et al. 2016, arXiv 1512.03385): a 3x3 stem of stride 1 and no pooling."""

import torch
from stoker.models.checks import check_image, check_sizes
from stoker.trainer.errors import UserError
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, inputs):
        hidden = torch.relu(self.norm1(self.conv1(inputs)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))


class ResNet(nn.Module):
    """(N, C, H, W) -> (N, num_classes); `widths` and `blocks` have one entry a stage.

    Stages after the first halve the map while it stays at least 2x2.
    """

    def __init__(self, in_shape, num_classes, widths=(64, 128, 256, 512), blocks=(2, 2, 2, 2)):
        super().__init__()
        channels, *size = check_image("resnet", in_shape)
        widths, blocks = check_sizes("model.widths", widths), check_sizes("model.blocks", blocks)
        if len(widths) != len(blocks):
            raise UserError(
                f"model.widths={widths} and model.blocks={blocks}: give both lists one number a stage."
            )
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        stages, inputs, smallest = [], widths[0], min(size)
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            # A 1x1 map would leave the norms one value a channel when the last batch of an epoch has one sample.
            stride = 2 if stage and smallest >= 3 else 1
            smallest = -(-smallest // stride)
            stages += [
                Block(width if i else inputs, width, 1 if i else stride) for i in range(count)
            ]
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs):
        return self.head(self.stages(self.stem(inputs)).mean((2, 3)))
