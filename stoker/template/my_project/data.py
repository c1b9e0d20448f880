"""The data set: a function that returns `Data`. configs/dataset/spirals.yaml refers to it."""

import math

import torch

from stoker.data.datasets import Data, TensorSplit


def spirals(samples: int = 1500, noise: float = 0.2) -> Data:
    """Return points (x, y) on three arms of a spiral; the class of a point is its arm."""
    generator = torch.Generator().manual_seed(0)  # always the same points
    arm = torch.arange(samples) % 3
    radius = torch.rand(samples, generator=generator).sqrt()
    angle = 4 * radius + arm * (2 * math.pi / 3)
    angle += noise * torch.randn(samples, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    sizes = [samples - 2 * (samples // 5), samples // 5, samples // 5]
    parts = zip(points.split(sizes), arm.split(sizes), strict=True)
    train, val, test = (TensorSplit(inputs, targets) for inputs, targets in parts)
    return Data("spirals", train, val, test, in_shape=(2,), num_classes=3)
