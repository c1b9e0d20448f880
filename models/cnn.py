"""CNN: convolutional blocks, global pooling and a linear layer, for images of 8x8 or larger."""

from collections.abc import Sequence

from torch import Tensor, nn

from stoker.models.checks import check_dropout, check_image, check_sizes


class CNN(nn.Module):
    """Map images (N, C, H, W) to (N, num_classes), with one block per entry of `channels`.

    Each block halves the feature map, unless that would make it smaller than 2x2.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int] = (32, 64, 128),
        kernel: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        inputs, height, width = check_image("cnn", in_shape)
        check_dropout(dropout)
        blocks: list[nn.Module] = []
        for outputs in check_sizes("channels", channels):
            blocks.append(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False))
            if min(height, width) >= 4:
                # Pool before the norm, so that the norm and activation do a quarter of the work.
                blocks.append(nn.MaxPool2d(2))
                height //= 2
                width //= 2
            blocks.append(nn.BatchNorm2d(outputs))
            blocks.append(nn.ReLU(inplace=True))
            inputs = outputs
        self.features = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        pooled = self.features(inputs).amax((2, 3))
        outputs: Tensor = self.head(self.dropout(pooled))
        return outputs
