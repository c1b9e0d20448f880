"""Batched augmentation on the device of the batch: every sample has its own random values, all from one generator."""

import functools
import math
from collections.abc import Mapping

import torch
from stoker.trainer import settings
from stoker.trainer.device import to_device
from stoker.trainer.errors import UserError, check_number

# The geometric ones in the order in which they are applied, whatever the order of the list.
# `flip` takes no value, the others this one unless told.
GEOMETRIC = {"flip": True, "shift": 2, "crop": 4, "cutout": 8}
SLIDING = ("crop", "shift")  # drawn in this order for the rows, then for the columns
MIXING = {"mixup": 0.2, "cutmix": 1.0}
DEFAULTS = GEOMETRIC | MIXING


class Augment:
    """Augments batches: `augment(inputs, targets, generator) -> (inputs, targets)`.

    Built from a list such as `["flip", {"crop": 4}, {"mixup": 0.2}]`. Random left-right `flip`, or `{flip: alternate}`:
    each sample in every second epoch (Jordan 2024, arXiv 2404.00498, section 3.6); `shift` by up to k pixels, zeros
    coming in; `crop` out of a frame of k reflected pixels; `cutout` of a k x k square of zeros: one gather on the raw
    (uint8 or float) images. Then `normalize`. Then, in the order of the list, `mixup` (Zhang 2018, arXiv 1710.09412),
    `cutmix` (Yun 2019, arXiv 1905.04899) and callables `(inputs, targets, generator) -> (inputs, targets)`. The mixing
    ones make class targets soft: (N, num_classes).

    The generator is the CPU's whatever the device, so the same pictures are made on each.
    """

    def __init__(self, spec=(), num_classes=None, normalize=None):
        self.geometric, self.mixing, self.rest = {}, [], []
        self.num_classes, self.normalize = num_classes, normalize
        for item in [spec] if isinstance(spec, (str, Mapping)) else spec or ():
            for name, value in item.items() if isinstance(item, Mapping) else [(item, None)]:
                self._add(name, value)

    def _add(self, item, value):
        if type(item).__module__.startswith("torchvision.transforms"):
            name = type(item).__name__
            raise UserError(
                f"dataset.augment: torchvision's {name} draws one value for a whole batch.\n"
                f"Type names instead: {', '.join(DEFAULTS)}."
            )
        if callable(item):
            self.rest.append(item)
            return
        settings.check_augmentation(item)
        key, value = f"dataset.augment.{item}", DEFAULTS[item] if value is None else value
        if item in MIXING:
            self.mixing.append(item)
            function, a = _mixup if item == "mixup" else _cutmix, check_number(key, value, above=0)
            self.rest.append(functools.partial(function, a=a, num_classes=self.num_classes))
        elif item != "flip":
            self.geometric[item] = check_number(key, value, whole=True, least=1)
        elif value is True or value == "alternate":
            self.geometric[item] = value
        else:
            raise UserError(
                f"{key}={value}: there is no such flip. Type flip or {{flip: alternate}}."
            )

    def check(self, in_shape):
        """UserError where these augmentations cannot work on inputs of this shape."""
        for name in [*self.geometric, *self.mixing]:
            if len(in_shape) != 3 and name != "mixup":
                raise UserError(
                    f"dataset.augment: {name} moves pixels, and these inputs have the shape {tuple(in_shape)}.\n"
                    "Type dataset.augment=[] or [mixup]."
                )
        if self.geometric.get("crop", 0) >= min(in_shape[1:], default=math.inf):
            raise UserError(
                f"dataset.augment.crop={self.geometric['crop']}: "
                f"give less than the {min(in_shape[1:])} pixels of the image."
            )

    def __call__(self, inputs, targets, generator):
        inputs = self.images(inputs, self.draw(inputs.shape, generator))
        return self.mix(inputs, targets, generator)

    def draw(self, shape, generator, flips=None):
        """What the geometric ones need for a batch of (N, C, H, W): a dict of tensors on the CPU, a row a sample.

        `flips` (N,) says for an alternating flip who is flipped in this epoch; None draws that too.
        """
        self.check(shape[1:])
        if not self.geometric:
            return {}
        draws, (n, sizes) = {}, (shape[0], shape[2:])
        if "flip" in self.geometric:
            alternates = self.geometric["flip"] == "alternate" and flips is not None
            draws["flip"] = (
                flips.view(n, 1) if alternates else torch.rand((n, 1), generator=generator) < 0.5
            )
        sliding = [
            (f"{name} {axis}", self.geometric[name])
            for axis in (0, 1)
            for name in SLIDING
            if name in self.geometric
        ]
        for name, k in sliding:
            draws[name] = torch.randint(-k, k + 1, (n, 1), generator=generator)
        if "cutout" in self.geometric:
            # The middle lies anywhere in the image, so the square may hang over the border.
            for axis, size in enumerate(sizes):
                middle = torch.randint(0, size, (n, 1), generator=generator)
                draws[f"cutout {axis}"] = middle - self.geometric["cutout"] // 2
        return draws

    def images(self, inputs, draws):
        """The inputs of one batch, or of several at once, with their draws: moved, then normalised."""
        if draws:
            inputs = self._move_pixels(inputs, draws)
        return inputs if self.normalize is None else self.normalize(inputs)

    def mix(self, inputs, targets, generator):
        """One batch after what looks at the whole of it: mixup, cutmix and callables."""
        for function in self.rest:
            inputs, targets = function(inputs, targets, generator)
        return inputs, targets

    def _move_pixels(self, inputs, draws):
        """The images after flip, shift, crop and cutout.

        Row and column of the source are independent of each other in all of these, so two small tables
        (N, H) and (N, W) make the one gather.
        """
        n, channels, height, width = inputs.shape
        draws = {name: to_device(draw, inputs.device) for name, draw in draws.items()}
        # The last operation is undone first: from the pixel that is written back to the pixel that is read.
        sources, visible = [], []
        for axis, size in enumerate((height, width)):
            place = torch.arange(size, device=inputs.device).expand(n, size)
            if "crop" in self.geometric:
                place = (place + draws[f"crop {axis}"]).abs()
                place = size - 1 - (size - 1 - place).abs()
            if "shift" in self.geometric:
                place = place - draws[f"shift {axis}"]
                visible.append((place >= 0) & (place < size))
                place = place.clamp(0, size - 1)
            sources.append(place)
        rows, columns = sources
        if "flip" in self.geometric:
            columns = torch.where(draws["flip"], width - 1 - columns, columns)
        index = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).view(n, 1, height * width)
        moved = (
            inputs.flatten(2)
            .gather(2, index.expand(n, channels, height * width))
            .view(inputs.shape)
        )
        if visible:
            moved *= (visible[0].unsqueeze(2) & visible[1].unsqueeze(1)).unsqueeze(1)
        if "cutout" in self.geometric:
            inside = []
            for axis, size in enumerate((height, width)):
                place, start = torch.arange(size, device=inputs.device), draws[f"cutout {axis}"]
                inside.append((place >= start) & (place < start + self.geometric["cutout"]))
            moved *= ~(inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1)
        return moved


def sample_beta(a, generator):
    """One draw of Beta(a, a), a 0-dim tensor on the CPU, so nothing waits for a device; no rejection.

    Devroye 1996, "Random variate generation in one line of code", from Bailey's 1994 generator for Student's t: exact
    for every a > 0.
    """
    u, v = torch.rand(2, generator=generator).unbind()
    cosine = torch.cos(2 * math.pi * v)
    return (1 + cosine.sign() * torch.rsqrt(1 + 1 / ((u ** (-1 / a) - 1) * cosine.square()))) / 2


def _soft(targets, num_classes, dtype):
    """Class numbers as (N, num_classes) probabilities; floating-point targets (soft, or a regression's) as they are."""
    if targets.is_floating_point():
        return targets
    if num_classes is None:
        raise UserError(
            "Augment with mixup or cutmix: give num_classes, since class targets become (N, num_classes) probabilities."
        )
    soft = torch.zeros(len(targets), num_classes, dtype=dtype, device=targets.device)
    return soft.scatter_(1, targets.unsqueeze(1), 1)


def _mixup(inputs, targets, generator, *, a, num_classes):
    inputs = inputs if inputs.is_floating_point() else inputs.float()
    targets = _soft(targets, num_classes, inputs.dtype)
    share = sample_beta(a, generator)
    # The neighbour is as random a partner as a permutation's, since the batch itself was drawn at random.
    return inputs * share + inputs.roll(1, 0) * (1 - share), targets * share + targets.roll(
        1, 0
    ) * (1 - share)


def _cutmix(inputs, targets, generator, *, a, num_classes):
    targets = _soft(
        targets, num_classes, inputs.dtype if inputs.is_floating_point() else torch.float32
    )
    side = (1 - sample_beta(a, generator)).sqrt()
    inside = []
    middles = torch.rand(2, generator=generator).unbind()
    for size, middle in zip(inputs.shape[2:], middles, strict=True):
        place = torch.arange(size, device=inputs.device)
        start, stop = ((middle - side / 2) * size).round(), ((middle + side / 2) * size).round()
        inside.append((place >= start) & (place < stop))
    pasted = inside[0].unsqueeze(1) & inside[1]
    share = (
        1 - pasted.to(targets.dtype).mean()
    )  # what is left of each image, after the border has cut the rectangle
    return torch.where(pasted, inputs.roll(1, 0), inputs), targets * share + targets.roll(1, 0) * (
        1 - share
    )
