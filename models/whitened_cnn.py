"""WhitenedCNN: a whitened 2x2 convolution and three convolutional blocks, for short training runs;
and the callback that whitens the first layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stoker.models.checks import check_image, check_sizes
from stoker.trainer import launch, parallel
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, check_number

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

NORM_MOMENTUM = 0.4
LOGIT_SCALE = 0.111  # factor on the outputs of the last layer


class WhitenedCNN(nn.Module):
    """Map images (N, C, H, W) of at least 3x3 pixels to (N, num_classes).

    This is the network of Jordan 2024 (arXiv 2404.00498). Each entry of `widths` adds a block of
    two convolutions that halves the feature map, unless that would make it smaller than 2x2. In
    evaluation, the logits are averaged over six views of the image (section 3.5). Half of the
    weight goes to the image and its mirror image. The other half goes to copies of these two that
    are shifted by one pixel, up and left or down and right. The first layer is trained like the
    others unless you add the Whiten callback.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int] = (64, 256, 256),
    ) -> None:
        super().__init__()
        channels, height, width = check_image("whitened_cnn", in_shape)
        if min(height, width) < 3:
            raise UserError(
                "model: whitened_cnn takes images of at least 3x3 pixels, but these are "
                f"{height}x{width}."
            )
        # A filter for each principal direction of a 2x2 patch, and one for its negative.
        inputs = 2 * channels * 2 * 2
        self.first = nn.Conv2d(channels, inputs, 2)
        smallest = min(height, width) - 1
        layers: list[nn.Module] = [nn.GELU()]
        for outputs in check_sizes("widths", widths):
            layers.append(convolution(inputs, outputs))
            if smallest >= 4:
                layers.append(nn.MaxPool2d(2))
                smallest //= 2
            layers += [offset_norm(outputs), nn.GELU()]
            layers += [convolution(outputs, outputs), offset_norm(outputs), nn.GELU()]
            inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, num_classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            return self.logits(inputs)
        padded = nn.functional.pad(inputs, (1, 1, 1, 1), mode="reflect")
        up_left = padded[:, :, :-2, :-2]
        down_right = padded[:, :, 2:, 2:]
        terms = []
        for share, view in ((0.25, inputs), (0.125, up_left), (0.125, down_right)):
            terms.append(share * self.logits(view))
            terms.append(share * self.logits(view.flip(3)))
        return sum(terms[1:], terms[0])

    def logits(self, inputs: Tensor) -> Tensor:
        """Compute the logits of a single view."""
        features = self.blocks(self.first(inputs)).amax((2, 3))
        # Use full precision, because in bf16 close logits would often round to the same value.
        with torch.autocast(inputs.device.type, enabled=False):
            outputs: Tensor = self.head(features.to(self.head.weight.dtype))
            return outputs * LOGIT_SCALE

    @torch.no_grad()
    def whiten(self, batches: Iterable[Tensor], eps: float = 5e-4) -> None:
        """Set the first layer's filters so that its outputs on these images are uncorrelated.

        The filters are the eigenvectors of the second-moment matrix of the 2x2 patches, and their
        negatives. Each is divided by the square root of (its eigenvalue + `eps`); see section 3.2.
        The moments are summed across all processes.
        """
        weight = self.first.weight
        moments = torch.zeros(())
        count = 0
        for images in batches:
            # (4 C, number of patches)
            patches = nn.functional.unfold(images, 2).transpose(0, 1).flatten(1)
            moments = moments + patches @ patches.T
            count += patches.shape[1]
        mean = parallel.add_up(moments) / parallel.add_up(count)
        values, vectors = torch.linalg.eigh(mean.double().cpu())
        scaled = vectors / (values.clamp_min(0) + eps).sqrt()
        filters = torch.cat((scaled.T, -scaled.T)).view(weight.shape).to(weight.dtype)
        weight.copy_(parallel.like(filters, weight))


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Make a 3x3 convolution whose first outputs start as a copy of the inputs (section 3.3)."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def offset_norm(channels: int) -> nn.BatchNorm2d:
    """Make a BatchNorm that learns an offset but no scale."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=NORM_MOMENTUM)
    norm.weight.requires_grad_(False)
    return norm


class Whiten(Callback):
    """Whiten the first layer of a WhitenedCNN using the first `images` training images, and freeze
    its filters.

    The layer's bias is trained for `bias_epochs` epochs and then frozen too, so that the backward
    pass can skip the layer (Jordan 2024, arXiv 2404.00498, section 3.2).
    """

    def __init__(self, images: int = 5000, bias_epochs: float = 3) -> None:
        self.images: int = check_number("callbacks.whiten.images", images, whole=True, least=1)
        self.bias_epochs: float = check_number("callbacks.whiten.bias_epochs", bias_epochs, least=0)

    def on_fit_start(self, trainer: "Trainer") -> None:
        if not isinstance(trainer.module, WhitenedCNN):
            name = type(trainer.module).__name__
            raise UserError(
                f"callbacks.whiten: {name} has no layer to whiten. Type model=whitened_cnn."
            )
        if trainer.step == 0:  # a resumed run already has these filters
            trainer.module.whiten(first_images(trainer.train_loader, self.images))
        trainer.module.first.weight.requires_grad_(False)
        self.on_step_end(trainer)

    def on_step_end(self, trainer: "Trainer") -> None:
        module = trainer.module
        assert isinstance(module, WhitenedCNN)  # checked by on_fit_start
        assert module.first.bias is not None
        learns = trainer.step < self.bias_epochs * trainer.steps_per_epoch
        module.first.bias.requires_grad_(learns)


def first_images(loader: Any, count: int) -> Iterator[Tensor]:
    """Yield the images of the first batches: `count` in total, or fewer if the epoch has fewer."""
    # `fit` seeks to its own position before it reads a batch, so the order stays the same.
    loader.seek(0)
    for images, *_ in loader:
        share = range(launch.rank(), count, launch.world_size())
        yield images[: len(share)]
        count -= loader.global_size
        if count <= 0:
            return
