"""WhitenedCNN: a whitened 2x2 convolution and three blocks, for short trainings; and the callback
that whitens it.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stoker.models.checks import check, check_choice, check_image, check_sizes, is_number
from stoker.trainer import launch, parallel
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, check_number

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

VIEWS = ("none", "mirror", "mirror_shift")


class WhitenedCNN(nn.Module):
    """Map images (N, C, H, W) of 3x3 and larger to (N, num_classes).

    The network of Jordan 2024 (arXiv 2404.00498). Each of `widths` is a block of two convolutions
    that halves the map while it stays at least 2x2. In evaluation the logits are a mean over
    `views` of the image (section 3.5): "none" is the image alone; "mirror" adds its mirror image;
    "mirror_shift" gives these two half of the weight, and the other half to both moved by one pixel
    up and left, and down and right. The first layer is trained like the others unless Whiten is
    among the callbacks.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int] = (64, 256, 256),
        norm_momentum: float = 0.4,
        logit_scale: float = 0.111,
        views: str = "mirror_shift",
    ) -> None:
        super().__init__()
        channels, height, width = check_image("whitened_cnn", in_shape)
        momentum_fits = is_number(norm_momentum) and 0 < norm_momentum <= 1
        check("norm_momentum", norm_momentum, momentum_fits, "a number above 0 and at most 1")
        scale_fits = is_number(logit_scale) and logit_scale > 0
        check("logit_scale", logit_scale, scale_fits, "a number above 0")
        check_choice("views", views, VIEWS)
        if min(height, width) < 3:
            raise ValueError(
                "whitened_cnn takes images of at least 3x3 pixels, but these have "
                f"{height}x{width}."
            )
        self.logit_scale = logit_scale
        self.views = views
        # Each principal direction of a 2x2 patch, and its negative.
        inputs = 2 * channels * 2 * 2
        self.first = nn.Conv2d(channels, inputs, 2)
        smallest = min(height, width) - 1
        layers: list[nn.Module] = [nn.GELU()]
        for outputs in check_sizes("widths", widths):
            layers.append(convolution(inputs, outputs))
            if smallest >= 4:
                layers.append(nn.MaxPool2d(2))
                smallest //= 2
            layers.append(offset_norm(outputs, norm_momentum))
            layers.append(nn.GELU())
            layers.append(convolution(outputs, outputs))
            layers.append(offset_norm(outputs, norm_momentum))
            layers.append(nn.GELU())
            inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, num_classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training or self.views == "none":
            return self.logits(inputs)
        views = weighted_views(inputs, self.views)
        weighted = [share * self.logits(view) for share, view in views]
        return functools.reduce(torch.add, weighted)

    def logits(self, inputs: Tensor) -> Tensor:
        """Compute the logits of the images as they are."""
        features = self.blocks(self.first(inputs)).amax((2, 3))
        # In full precision, since close logits would often be equal in bf16.
        with torch.autocast(inputs.device.type, enabled=False):
            outputs: Tensor = self.head(features.to(self.head.weight.dtype))
            return outputs * self.logit_scale

    @torch.no_grad()
    def whiten(self, batches: Iterable[Tensor], eps: float = 5e-4) -> None:
        """Set the first layer's filters so that its outputs on these batches of images are
        uncorrelated.

        The filters are the eigenvectors of the second moments of the 2x2 patches, each divided by
        the root of (its eigenvalue + `eps`), and their negatives (section 3.2). Processes that
        train together add up their moments.
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
        filters = scaled.T.view(-1, *weight.shape[1:])
        filters = torch.cat((filters, -filters)).to(weight.dtype)
        weight.copy_(parallel.like(filters, weight))


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Make a 3x3 convolution that starts as the identity, as far as it has outputs (section
    3.3).
    """
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def offset_norm(channels: int, momentum: float) -> nn.BatchNorm2d:
    """Make a BatchNorm that learns an offset and no scale."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=momentum)
    norm.weight.requires_grad_(False)
    return norm


def weighted_views(images: Tensor, views: str) -> Iterator[tuple[float, Tensor]]:
    """Yield (weight, images) for each of the `views`; the weights add up to 1."""
    moved = [(1.0, images)]
    if views == "mirror_shift":
        padded = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
        up_left = padded[:, :, :-2, :-2]
        down_right = padded[:, :, 2:, 2:]
        moved = [(0.5, images), (0.25, up_left), (0.25, down_right)]
    for share, view in moved:
        yield share / 2, view
        yield share / 2, view.flip(3)


class Whiten(Callback):
    """Whiten the first layer of a WhitenedCNN with the first `images` training images, and freeze
    its filters.

    Its bias is trained for `bias_epochs` epochs and then frozen too, so that backward stops behind
    that layer (Jordan 2024, arXiv 2404.00498, section 3.2).
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
        if trainer.step == 0:  # a resumed run already has its filters
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
    """Yield the images of the first batches: `count` in all, or as many as an epoch has."""
    # `fit` seeks before it starts, so this does not affect the order of batches.
    loader.seek(0)
    for images, *_ in loader:
        share = range(launch.rank(), count, launch.world_size())
        yield images[: len(share)]
        count -= loader.global_size
        if count <= 0:
            return
