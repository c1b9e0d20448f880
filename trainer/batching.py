"""The part of a Trainer that counts, splits and weights batches."""

import functools
from typing import Any

import torch

from stoker.trainer import batches, losses, parallel
from stoker.trainer.splitter import Splitter

# (micro-batch, its fraction of the batch's weight); the fraction of a whole batch is None
MicroBatches = list[tuple[Any, float | torch.Tensor | None]]


class Batching:
    """The part of a Trainer that measures and splits batches."""

    loss: Any
    divisor: losses.Divisor | None = None  # maps targets to the denominator of the loss
    device: torch.device
    train_loader: Any
    splitter: Splitter
    # Samples and weight of this process's part of the current batch.
    step_samples: int = 0
    step_weight: float | torch.Tensor = 0
    # Whether the weight of a training batch is its number of samples, which is free to compute.
    weighs_samples: bool = False
    # Whether a whole batch can have weight 0, because of class weights or your own loss_weight.
    may_weigh_nothing: bool = False
    # In your own train_step, multiply the loss by this factor, because gradients are averaged
    # across processes.
    process_weight: float | torch.Tensor = 1.0

    def sample_dim(self, name: str, value: Any) -> batches.SampleDim:
        """Return the sample dimension of a value in a batch, or None if there is none.

        The Trainer counts samples along this dimension, and splits batches along it into
        micro-batches and among processes. Override this method for any other dimension::

            def sample_dim(self, name, value):
                if name == "batch[0]":  # a tensor of shape (time, samples)
                    return 1
                return super().sample_dim(name, value)

        The name of a value is the expression that accesses it: `batch[0]`, `batch['x']`. For a list
        inside the batch, 0 means that each item is a sample, None looks inside the list, and "auto"
        picks what fits the rest of the batch. Values without samples are passed unchanged to each
        part of a split batch.
        """
        return batches.usual_dim(name, value)

    def loss_weight(self, batch: Any) -> float | torch.Tensor:
        """Return the number that `compute_loss` divides by: the weight of the batch's mean loss.

        Losses are averaged with these weights over micro-batches, processes, logged steps and
        evaluations. By default, the weight is what torch's loss divides by, or the number of
        samples for any other loss. Override this for your own loss. You can return a tensor on the
        device: the Trainer does not wait for it.
        """
        if self.divisor is not None and isinstance(batch, (list, tuple)) and len(batch) == 2:
            targets = batch[1]
            if isinstance(targets, torch.Tensor):
                return self.divisor(targets)
        return self.samples(batch)

    @functools.cached_property
    def sample_dims(self) -> batches.SampleDimOf:
        """`sample_dim`, or the faster default function if no subclass overrides it."""
        is_usual = type(self).sample_dim is Batching.sample_dim
        return batches.usual_dim if is_usual else self.sample_dim

    def samples(self, batch: Any) -> int:
        """Return the number of samples in a batch."""
        return batches.size(batch, self.sample_dims)

    def measure_batch(self, batch: Any) -> None:
        """Set `step_samples`, `step_weight` and `process_weight` for the batch of a step."""
        self.step_samples = batches.size(batch, self.sample_dims)  # `self.samples`, inlined
        if self.weighs_samples:
            self.step_weight = self.step_samples
        elif isinstance(batch, batches.Accumulated):
            self.step_weight = sum(map(self.loss_weight, batch.parts))
        else:
            self.step_weight = self.loss_weight(batch)
        if parallel.process_count > 1:
            samples = self.train_loader.global_size
            parallel.check_size(samples)
            self.splitter.global_samples = samples
            total = samples if self.weighs_samples else None
            self.process_weight = parallel.weight(self.step_weight, total, self.device)

    def split_with_fractions(self, batch: Any) -> MicroBatches:
        """Split a step's batch into [(micro-batch, its fraction of the weight)]."""
        is_whole = self.splitter.parts == 1 and self.splitter.size is None
        if is_whole and not self.may_weigh_nothing and not isinstance(batch, batches.Accumulated):
            return [(batch, None)]  # a fast path for the usual case
        return self.with_fractions(self.splitter.split(batch))

    def with_fractions(self, parts: list[Any]) -> MicroBatches:
        """Return [(micro-batch, its fraction of the weight)] for the parts of a step's batch."""
        if len(parts) == 1 and not self.may_weigh_nothing:
            return [(parts[0], None)]
        weigh = self.samples if self.weighs_samples else self.loss_weight
        weights = [weigh(part) for part in parts]
        return list(zip(parts, losses.fractions(weights, self.device), strict=True))
