"""How a Trainer counts, splits and weights batches."""

import functools
from typing import Any

import torch

from stoker.trainer import batch as batches
from stoker.trainer import losses, parallel
from stoker.trainer.micro_batch import MicroBatch

# (micro-batch, its fraction of the weight, or None for a whole batch)
MicroBatches = list[tuple[Any, float | torch.Tensor | None]]


class Batching:
    """The part of a Trainer that measures and splits batches."""

    loss: Any
    divisor: losses.Divisor | None = None  # maps targets to what the mean loss divides by
    device: torch.device
    train_loader: Any
    micro_batch: MicroBatch
    # For this step's batch, in this process:
    step_samples: int = 0
    step_weight: float | torch.Tensor = 0
    # Whether a training batch's weight is its number of samples, which costs nothing to compute.
    weighs_samples: bool = False
    # Whether a whole batch may have weight 0, because of class weights or your own loss_weight.
    may_weigh_nothing: bool = False
    # The factor for the losses of your own train_step, because processes average their gradients.
    process_weight: float | torch.Tensor = 1.0

    def sample_dim(self, name: str, value: Any) -> batches.SampleDim:
        """Return the dimension of a value that counts samples, or None if it has no samples.

        It determines how batches are split into micro-batches and among processes, and how many
        samples they have. Override it if that is not the first dimension::

            def sample_dim(self, name, value):
                if name == "batch[0]":  # a text (time, samples)
                    return 1
                return super().sample_dim(name, value)

        Names are the expressions that access the value: `batch[0]`, `batch['x']`. For a list inside
        the batch, 0 means one item per sample, None looks inside the list, and "auto" picks what
        fits the rest of the batch. Values without samples are passed to each part unchanged.
        """
        return batches.usual_dim(name, value)

    def loss_weight(self, batch: Any) -> float | torch.Tensor:
        """Return what `compute_loss` divides by: the weight of the batch's mean loss.

        Micro-batches, processes, evaluations and logged losses are averaged with these weights. For
        torch's losses of (outputs, targets), the weight is what they divide by; for any other loss,
        it is the number of samples. Override it for your own loss; a tensor stays on the device.
        """
        if self.divisor is not None and isinstance(batch, (list, tuple)) and len(batch) == 2:
            targets = batch[1]
            if isinstance(targets, torch.Tensor):
                return self.divisor(targets)
        return self.samples(batch)

    @functools.cached_property
    def sample_dims(self) -> batches.SampleDimOf:
        """`sample_dim`, or the plain function if no subclass overrides it."""
        is_usual = type(self).sample_dim is Batching.sample_dim
        return batches.usual_dim if is_usual else self.sample_dim

    def samples(self, batch: Any) -> int:
        """Return the number of samples in a batch."""
        return batches.size(batch, self.sample_dims)

    def measure_batch(self, batch: Any) -> None:
        """Record the samples and the weight of this process's part of a step's batch."""
        self.step_samples = batches.size(batch, self.sample_dims)  # `samples` inlined
        if self.weighs_samples:
            self.step_weight = self.step_samples
        elif isinstance(batch, batches.Accumulated):
            self.step_weight = sum(map(self.loss_weight, batch.parts))
        else:
            self.step_weight = self.loss_weight(batch)
        if parallel.process_count > 1:
            samples = self.train_loader.global_size
            parallel.check_size(samples)
            self.micro_batch.global_samples = samples
            total = samples if self.weighs_samples else None
            self.process_weight = parallel.weight(self.step_weight, total, self.device)

    def split_with_fractions(self, batch: Any) -> MicroBatches:
        """Return the micro-batches of a step with their fractions of its weight."""
        is_whole = self.micro_batch.parts == 1 and self.micro_batch.size is None
        if is_whole and not self.may_weigh_nothing and not isinstance(batch, batches.Accumulated):
            return [(batch, None)]  # the usual case, in a single call
        return self.with_fractions(self.micro_batch.split(batch))

    def with_fractions(self, parts: list[Any]) -> MicroBatches:
        """Return these micro-batches of a step with their fractions of its weight."""
        if len(parts) == 1 and not self.may_weigh_nothing:
            return [(parts[0], None)]
        weigh = self.samples if self.weighs_samples else self.loss_weight
        weights = [weigh(part) for part in parts]
        return list(zip(parts, losses.fractions(weights, self.device), strict=True))
