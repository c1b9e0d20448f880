"""WhitenedCNN: a whitened 2x2 convolution and three blocks, for a short training; and the callback that whitens it."""

import torch
from stoker.models.checks import check_image, check_sizes
from stoker.trainer import launch, parallel
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, check_choice, check_number
from torch import nn

VIEWS = ("none", "mirror", "mirror_shift")


class WhitenedCNN(nn.Module):
    """(N, C, H, W) -> (N, num_classes), for images from 3x3 up: the network of Jordan 2024 (arXiv 2404.00498).

    Each of `widths` is a block of two convolutions, which halves the map while it stays at least 2x2. In evaluation
    the logits are a mean over `views` of the image: none but itself; mirror, it and its mirror image; mirror_shift,
    these two in their place (half of the weight), and moved by one pixel up and left, and down and right (section 3.5).
    The first layer is learnt like the others unless a Whiten is among the callbacks.
    """

    def __init__(
        self,
        in_shape,
        num_classes,
        widths=(64, 256, 256),
        norm_momentum=0.4,
        logit_scale=0.111,
        views="mirror_shift",
    ):
        super().__init__()
        channels, height, width = check_image("whitened_cnn", in_shape)
        widths = check_sizes("model.widths", widths)
        check_number("model.norm_momentum", norm_momentum, above=0, most=1)
        self.logit_scale = check_number("model.logit_scale", logit_scale, above=0)
        self.views = check_choice("model.views", views, VIEWS)
        if min(height, width) < 3:
            raise UserError(
                f"model=whitened_cnn wants images from 3x3 up, and these have {height}x{width}."
            )
        inputs = 2 * channels * 2 * 2  # each direction of a patch's pixels, and its negative
        self.first = nn.Conv2d(channels, inputs, 2)
        height, width = height - 1, width - 1
        layers = [nn.GELU()]
        for outputs in widths:
            layers.append(convolution(inputs, outputs))
            if min(height, width) >= 4:
                layers.append(nn.MaxPool2d(2))
                height, width = height // 2, width // 2
            layers += [offset_norm(outputs, norm_momentum), nn.GELU()]
            layers += [
                convolution(outputs, outputs),
                offset_norm(outputs, norm_momentum),
                nn.GELU(),
            ]
            inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, num_classes, bias=False)

    def forward(self, inputs):
        if self.training or self.views == "none":
            return self.logits(inputs)
        return sum(share * self.logits(view) for share, view in weighted_views(inputs, self.views))

    def logits(self, inputs):
        """The logits of the images as they are."""
        features = self.blocks(self.first(inputs)).amax((2, 3))
        with torch.autocast(
            inputs.device.type, enabled=False
        ):  # in bf16, two near logits would often be equal
            return self.head(features.to(self.head.weight.dtype)) * self.logit_scale

    @torch.no_grad()
    def whiten(self, batches, eps=5e-4):
        """Sets the first layer's filters from batches of images, so that its outputs on them are uncorrelated.

        They are the eigenvectors of the 2x2 patches' second moments, each over the root of (its eigenvalue + `eps`),
        and their negatives (section 3.2).
        """
        moments, patches_seen = 0.0, 0
        for images in batches:
            patches = (
                nn.functional.unfold(images, 2).transpose(0, 1).flatten(1)
            )  # (4 C, number of patches)
            moments = moments + patches @ patches.T
            patches_seen += patches.shape[1]
        moments, patches_seen = parallel.add_up(moments), parallel.add_up(patches_seen)
        values, vectors = torch.linalg.eigh((moments / patches_seen).double().cpu())
        filters = (vectors / (values.clamp_min(0) + eps).sqrt()).T.view(
            -1, *self.first.weight.shape[1:]
        )
        filters = torch.cat((filters, -filters)).to(self.first.weight.dtype)
        self.first.weight.copy_(parallel.like(filters, self.first.weight))


def convolution(inputs, outputs):
    """A 3x3 convolution that at first hands its inputs on, as far as it has outputs for them (section 3.3)."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def offset_norm(channels, momentum):
    """BatchNorm that learns an offset and no scale."""
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=momentum)
    norm.weight.requires_grad_(False)
    return norm


def weighted_views(images, views):
    """Yields (share, images) of each of the `views`; the shares add up to 1."""
    moved = [(1.0, images)]
    if views == "mirror_shift":
        padded = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
        moved = [(0.5, images), (0.25, padded[:, :, :-2, :-2]), (0.25, padded[:, :, 2:, 2:])]
    for share, view in moved:
        yield share / 2, view
        yield share / 2, view.flip(3)


class Whiten(Callback):
    """Whitens the first layer of a WhitenedCNN by the first `images` training images, and freezes its filters.

    Its bias is trained for `bias_epochs` epochs, and then frozen too: no gradient has to go that far back any more
    (Jordan 2024, arXiv 2404.00498, section 3.2).
    """

    def __init__(self, images=5000, bias_epochs=3):
        self.images = check_number("callbacks.whiten.images", images, whole=True, least=1)
        self.bias_epochs = check_number("callbacks.whiten.bias_epochs", bias_epochs, least=0)

    def on_fit_start(self, trainer):
        if not isinstance(trainer.module, WhitenedCNN):
            name = type(trainer.module).__name__
            raise UserError(
                f"callbacks.whiten: {name} has no layer to whiten. Type model=whitened_cnn."
            )
        if trainer.step == 0:  # a run that is continued has its filters
            trainer.module.whiten(first_images(trainer.train_loader, self.images))
        trainer.module.first.weight.requires_grad_(False)
        self.on_step_end(trainer)

    def on_step_end(self, trainer):
        trainer.module.first.bias.requires_grad_(
            trainer.step < self.bias_epochs * trainer.steps_per_epoch
        )


def first_images(loader, count):
    """Yields the images of the first batches, `count` in all or as many as an epoch has."""
    loader.seek(0)  # fit itself seeks where it begins, so this changes no order
    for images, *_ in loader:
        yield images[: len(range(launch.rank(), count, launch.world_size()))]
        count -= loader.global_size
        if count <= 0:
            return
