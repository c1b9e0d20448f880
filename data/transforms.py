"""torchvision transforms, applied to each training sample as it is read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.trainer.errors import UserError, first_line
from stoker.trainer.losses import IGNORED
from stoker.trainer.seeding import CPU, mix_seed, random_states_kept, seed_generators


def is_transform(item: Any) -> bool:
    """Return whether this is a transform of torchvision, without importing torchvision."""
    return any(base.__module__.startswith("torchvision.transforms.") for base in type(item).__mro__)


class PerSample:
    """Reads samples of a split and transforms each of them; a mask is transformed with its image.

    A sample's random numbers depend only on the seed, the epoch and the sample's index, not on its
    batch or process. The loss ignores mask pixels that come from outside the image. If the
    transforms include a RandomResizedCrop or a Resize, and the split has a method
    `originals(indices)`, images are read with this method, at their original size.
    """

    def __init__(self, transforms: Sequence[Any], in_shape: Sequence[int], seed: int) -> None:
        self.transforms = transforms
        self.in_shape = tuple(in_shape)
        self.seed = seed
        self.names = ", ".join(type(transform).__name__ for transform in transforms)
        from torchvision.transforms import v2

        modules: list[Any] = []
        for step in transforms:
            if isinstance(step, torch.nn.Module):  # not all of torchvision.transforms are
                modules += step.modules()
        # Whether a transform resizes images, instead of only cropping them as RandomCrop does.
        self.sets_size = any(isinstance(one, (v2.RandomResizedCrop, v2.Resize)) for one in modules)

    def read(self, split: Any, epoch: int, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of these samples, transformed for this epoch."""
        read = split.__getitem__
        if self.sets_size:
            read = getattr(split, "originals", read)
        samples = zip(*read(indices), strict=True)
        transformed = []
        with random_states_kept(CPU):
            for index, (inputs, targets) in zip(indices, samples, strict=True):
                seed_generators(CPU, mix_seed("transform", self.seed, epoch, index))
                transformed.append(self.apply(inputs, targets))
        inputs, targets = zip(*transformed, strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def apply(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Transform an image (C, H, W) and its target."""
        from torchvision.tv_tensors import Image, Mask

        has_mask = targets.ndim == 2 and not targets.is_floating_point()
        sample = [Image(inputs)]
        if has_mask:
            # Pixels from outside the image become 0, so let the classes start at 1.
            sample.append(Mask((targets + 1).where(targets != IGNORED, 0)))
        try:
            for transform in self.transforms:
                sample = transform(sample)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise UserError(f"dataset.augment: {self.names}: {first_line(error)}") from error
        image = sample[0] if isinstance(sample, list) else sample
        is_image = isinstance(image, Tensor) and image.dtype == inputs.dtype
        if not is_image or image.shape != self.in_shape:
            raise UserError(
                f"dataset.augment: {self.names} must return a single {inputs.dtype} image of "
                f"shape {self.in_shape}.\n"
                "Remove ToDtype and Normalize: images are scaled and normalized afterward, with "
                "dataset.mean and dataset.std."
            )
        if has_mask:
            mask = sample[1].as_subclass(Tensor)
            targets = (mask - 1).where(mask > 0, IGNORED)
        return image.as_subclass(Tensor), targets
