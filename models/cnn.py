"""CNN: convolution blocks, global pooling and one linear layer; any image from 1x8x8 up."""

from stoker.models.checks import check_image, check_sizes
from stoker.trainer.errors import UserError, check_number
from torch import nn


class CNN(nn.Module):
    """(N, C, H, W) -> (N, num_classes), by one block for each of `channels`.

    Each block halves the map while it stays at least 2x2.
    """

    def __init__(self, in_shape, num_classes, channels=(32, 64, 128), kernel=3, dropout=0.0):
        super().__init__()
        inputs, height, width = check_image("cnn", in_shape)
        channels = check_sizes("model.channels", channels)
        if check_number("model.kernel", kernel, whole=True, least=1) % 2 == 0:
            raise UserError(
                f"model.kernel={kernel}: give an odd whole number, so that the map keeps its size."
            )
        check_number("model.dropout", dropout, least=0, most=0.95)
        blocks = []
        for outputs in channels:
            blocks.append(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False))
            if min(height, width) >= 4:
                # Before the norm rather than after: a quarter of the work for norm and activation.
                blocks.append(nn.MaxPool2d(2))
                height, width = height // 2, width // 2
            blocks += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            inputs = outputs
        self.features = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, inputs):
        return self.head(self.dropout(self.features(inputs).amax((2, 3))))
