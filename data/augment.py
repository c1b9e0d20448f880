"""Batched augmentation, on the batch's device. Each sample gets its own random values, all drawn
from one generator.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Generator, Tensor

from stoker.data.transforms import is_transform
from stoker.trainer.errors import UserError, check_choice, check_number
from stoker.trainer.losses import IGNORED
from stoker.trainer.seeding import random_stream
from stoker.trainer.transfer import to_device

# The default value of each augmentation. The geometric ones, which come first, are always applied
# in this order.
DEFAULTS: dict[str, Any] = {
    "flip": True,
    "shift": 2,
    "crop": 4,
    "cutout": 8,
    "mixup": 0.2,
    "cutmix": 1.0,
}
SLIDING = ("crop", "shift")  # drawn in this order, first for rows and then for columns

# A list such as ["flip", {"crop": 4}, function], a single item of such a list, or None.
Spec = Any
# Random numbers for the geometric augmentations of a batch: CPU tensors, one row per sample.
Draws = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]


class Augment:
    """Augments batches according to a list such as `["flip", {"crop": 4}, {"mixup": 0.2}]`.

    Augmentation has three steps. `draw` draws the random numbers that a batch needs in step 2,
    `move` applies step 2, and `mix` applies step 3.

    1. torchvision's v2 transforms, in the order of the list, when a sample is read: see PerSample.
    2. The geometric augmentations, in a single gather on the raw (uint8 or float) images: a random
       left-right `flip`, or `{flip: alternate}`, which flips each sample in every second epoch
       (Jordan 2024, arXiv 2404.00498, section 3.6); a `shift` by up to k pixels, filled with zeros;
       a random `crop` after k pixels of reflection padding; a `cutout` of a k x k square.
    3. On normalized images, `mixup` (Zhang 2018, arXiv 1710.09412), `cutmix` (Yun 2019, arXiv
       1905.04899) and callables `(inputs, targets, generator) -> (inputs, targets)`, in the order
       of the list.

    `mixup` and `cutmix` turn class targets into soft targets of shape (N, num_classes). Masks
    (N, H, W) get the same geometric augmentations as their images. Mask pixels lost to a shift or
    cutout become -100, which the loss ignores.

    The generator is always on the CPU, so every device produces the same images.
    """

    def __init__(self, spec: Spec = (), num_classes: int = 0) -> None:
        self.num_classes = num_classes
        self.transforms: list[Any] = []
        self.geometric: dict[str, Any] = {}
        self.mixing: list[str] = []
        self.rest: list[Callable[..., Pair]] = []
        is_alone = isinstance(spec, (str, Mapping)) or callable(spec)
        items = [spec] if is_alone else spec or ()
        for item in items:
            if isinstance(item, Mapping):
                for name, value in item.items():
                    self._add(name, value)
            else:
                self._add(item, None)

    def _add(self, item: Any, value: Any) -> None:
        if is_transform(item):
            self.transforms.append(item)
            return
        if callable(item):
            self.rest.append(item)
            return
        check_choice("dataset.augment", item, DEFAULTS)
        key = f"dataset.augment.{item}"
        value = DEFAULTS[item] if value is None else value
        if item in ("mixup", "cutmix"):
            check_number(key, value, above=0)
            self.mixing.append(item)
            self.rest.append(
                functools.partial(_mix, name=item, a=value, num_classes=self.num_classes)
            )
            return
        if item == "flip":
            check_choice(key, value, (True, "alternate"))
        else:
            check_number(key, value, whole=True, least=1)
        self.geometric[item] = value

    def check(self, in_shape: Sequence[int], target_shape: Sequence[int] = ()) -> None:
        """Check that these augmentations work on inputs and class targets of these shapes."""
        moves_pixels = bool(self.geometric or self.transforms)
        needs_images = moves_pixels or "cutmix" in self.mixing
        has_masks = len(target_shape) == 2
        if (
            (needs_images and len(in_shape) != 3)
            or (self.mixing and target_shape)
            or (moves_pixels and has_masks and tuple(target_shape) != tuple(in_shape[1:]))
        ):
            names = ", ".join([*self.geometric, *self.mixing]) or "transforms"
            raise UserError(
                f"dataset.augment: {names} cannot be applied to inputs of shape {tuple(in_shape)} "
                f"with targets of shape {tuple(target_shape)}. Images must be (channels, height, "
                "width), masks must have the same size, and mixup and cutmix need one class per "
                "sample.\n"
                "Type dataset.augment=[]."
            )
        crop = self.geometric.get("crop", 0)
        smallest = min(in_shape[1:], default=math.inf)
        if crop >= smallest:
            raise UserError(
                f"dataset.augment.crop={crop}: choose a number less than {smallest}, the shorter "
                "side of the images."
            )

    def draw(
        self,
        shape: Sequence[int],
        generator: Generator,
        flips: Tensor | None = None,
    ) -> Draws:
        """Draw the random numbers for the geometric augmentations of a batch (N, C, H, W).

        `flips` (N,) says which samples `{flip: alternate}` flips in this epoch; if it is None,
        flips are drawn at random.
        """
        draws: Draws = {}
        column = (shape[0], 1)
        if self.geometric.get("flip") == "alternate" and flips is not None:
            draws["flip"] = flips.view(column)
        elif "flip" in self.geometric:
            draws["flip"] = torch.rand(column, generator=generator) < 0.5
        for axis in (0, 1):
            for name in SLIDING:
                if name in self.geometric:
                    k = self.geometric[name]
                    draws[f"{name} {axis}"] = torch.randint(-k, k + 1, column, generator=generator)
        if "cutout" in self.geometric:
            # The center can be anywhere in the image, so the square can extend beyond the border.
            for axis, size in enumerate(shape[2:]):
                middle = torch.randint(0, size, column, generator=generator)
                draws[f"cutout {axis}"] = middle - self.geometric["cutout"] // 2
        return draws

    def mix(self, inputs: Tensor, targets: Tensor, generator: Generator) -> Pair:
        """Apply the augmentations that need a whole batch: mixup, cutmix and callables."""
        for function in self.rest:
            inputs, targets = function(inputs, targets, generator)
        return inputs, targets

    def move(self, inputs: Tensor, targets: Tensor, draws: Draws) -> Pair:
        """Apply flip, shift, crop and cutout to images, and to their masks if they have any.

        Each of these operations maps rows and columns independently, so two small tables of source
        indices, (N, H) and (N, W), are enough for a single gather.
        """
        if not draws:
            return inputs, targets
        n, channels, height, width = inputs.shape
        draws = {name: to_device(draw, inputs.device) for name, draw in draws.items()}
        sources = []
        shown = []  # masks of the rows, then the columns, that stay inside the image after a shift
        cut_out = []
        for axis, size in enumerate((height, width)):
            place = torch.arange(size, device=inputs.device).expand(n, size)
            # Undo the last operation first, to get from the output pixel to the source pixel.
            if "cutout" in self.geometric:
                start = draws[f"cutout {axis}"]
                cut_out.append(_between(place, start, start + self.geometric["cutout"]))
            if "crop" in self.geometric:
                place = (place + draws[f"crop {axis}"]).abs()
                place = size - 1 - (size - 1 - place).abs()
            if "shift" in self.geometric:
                place = place - draws[f"shift {axis}"]
                shown.append(_between(place, 0, size))
                place = place.clamp(0, size - 1)
            sources.append(place)
        rows, columns = sources
        if "flip" in self.geometric:
            columns = torch.where(draws["flip"], width - 1 - columns, columns)
        index = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).view(n, 1, -1)
        from_pixels = index.expand(n, channels, height * width)
        moved = inputs.flatten(2).gather(2, from_pixels).view(inputs.shape)
        has_masks = targets.ndim == 3 and not targets.is_floating_point()
        if has_masks:
            targets = targets.flatten(1).gather(1, index.squeeze(1)).view(targets.shape)
        visible = []
        if shown:
            visible.append(_outer(*shown))
        if cut_out:
            visible.append(~_outer(*cut_out))
        for pixels in visible:
            moved *= pixels.unsqueeze(1)
            if has_masks:
                targets = targets.where(pixels, IGNORED)
        return moved, targets


def _between(place: Tensor, start: Tensor | int, stop: Tensor | int) -> Tensor:
    """Return a mask of the positions in [start, stop)."""
    return (place >= start) & (place < stop)


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    """Combine masks (..., H) and (..., W) into (..., H, W), which is true where both are true."""
    return rows.unsqueeze(-1) & columns.unsqueeze(-2)


def sample_beta(a: float, generator: Generator) -> float:
    """Draw a value from Beta(a, a)."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return numpy.random.default_rng(seed).beta(a, a)


def _with_neighbours(values: Tensor, share: Tensor | float) -> Tensor:
    """Mix each sample with its neighbor in the batch.

    The samples of a batch are in random order, so no further permutation is needed.
    """
    return values * share + values.roll(1, 0) * (1 - share)


def _mix(
    inputs: Tensor,
    targets: Tensor,
    generator: Generator,
    *,
    name: str,
    a: float,
    num_classes: int,
) -> Pair:
    """Mix the samples of a batch with each other, by "mixup" or "cutmix"."""
    dtype = inputs.dtype if inputs.is_floating_point() else torch.float32
    if not targets.is_floating_point():  # classes become probabilities, (N, num_classes)
        soft = torch.zeros(len(targets), num_classes, dtype=dtype, device=targets.device)
        targets = soft.scatter_(1, targets.unsqueeze(1), 1)
    if name == "mixup":
        share = sample_beta(a, generator)
        return _with_neighbours(inputs.to(dtype), share), _with_neighbours(targets, share)
    from torchvision.transforms.v2 import CutMix

    # CutMix draws from the global generator.
    with random_stream(int(torch.randint(2**63 - 1, (), generator=generator))):
        mixed: Pair = CutMix(alpha=a)(inputs, targets)
    return mixed
