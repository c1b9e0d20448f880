"""Metrics with the interface of torchmetrics: update(outputs, targets), compute() and reset().

They keep their sums on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stoker.trainer import launch, losses, parallel
from stoker.trainer.device import wide_type
from stoker.trainer.errors import UserError, check_number


class Mean:
    """A running mean weighted by sample count: `update(value, samples)`.

    If a value is not a mean over samples, pass its own weight: `update(value, samples, weight)`.
    The weight is a number, or a tensor, which stays on its device. Values with weight 0 are
    ignored, even if they are NaN.
    """

    higher_is_better = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total: float | Tensor = 0.0
        self.samples: int = 0
        self.weight: float | Tensor = 0

    def update(self, value: Tensor, samples: int = 1, weight: float | Tensor | None = None) -> None:
        if weight is None:
            weight = samples
        if value.is_cpu and not isinstance(weight, Tensor):
            number = value.item()  # on the CPU, this does not wait, and is faster than a tensor
            if weight:
                self.total += number * float(weight)
        else:
            if not isinstance(self.total, Tensor):
                self.total = losses.on_device(self.total, value.device)
            value = (value if value.ndim == 0 else value.reshape(())).detach()
            if isinstance(weight, Tensor):
                if weight.is_floating_point():
                    weight = weight.to(self.total.dtype)
                counted = value.to(self.total.dtype).masked_fill(weight == 0, 0)  # nan * 0 = nan
                self.total.add_(counted * weight)
            elif weight:
                # A single kernel, even if the total has a wider dtype.
                self.total.add_(value, alpha=weight)
        self.weight = self.weight + weight
        self.samples += samples

    def compute(self) -> Tensor:
        """Return the mean, or NaN if the total weight is 0."""
        total = self.total
        if not isinstance(total, Tensor):
            total = torch.tensor(total, dtype=torch.float64)
        return total / self.weight

    def over_ranks(self) -> "Mean":
        """Return the Mean across all processes; all processes must call this."""
        if parallel.process_count == 1:
            return self
        mean = Mean()
        vars(mean).update(self.state_dict())
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the sums across all processes; all processes must call this."""
        sums = {"total": float(self.total), "samples": self.samples, "weight": float(self.weight)}
        return {name: parallel.add_up(value) for name, value in sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if launch.is_first():  # because the state is already the sum across all processes
            self.total = float(state["total"])
            self.samples = state["samples"]
            self.weight = state["weight"]


class Sums:
    """A metric computed from sums over all samples, so that the batch size does not matter.

    Subclasses define `update(outputs, targets)`, which calls `add(sums)`, and may override
    `value(sums)`. The sums are a single tensor on the device of the outputs: float64 (float32 on
    mps), or int64 for counts. To select the best weights by the metric, set `higher_is_better` in
    the subclass. None means that neither direction is better.
    """

    higher_is_better: bool | None = None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums: Tensor | None = None

    def add(self, sums: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums + sums

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the sums of one batch."""
        raise NotImplementedError

    def value(self, sums: Tensor) -> Tensor:
        """Return the value of the metric: by default, the first sum divided by the second."""
        sums = wide(sums)
        return sums[0] / sums[1]

    def compute(self) -> Tensor:
        """Return the metric, or NaN if there was no data. All processes must call this."""
        sums = parallel.add_up(self.sums)
        return torch.tensor(torch.nan) if sums is None else self.value(sums)


def check_over_ranks(metrics: Mapping[str, Any]) -> None:
    """Raise UserError for a metric that cannot be combined across several processes."""
    if parallel.process_count == 1:
        return
    for name, metric in metrics.items():
        if not isinstance(metric, Sums) and not hasattr(metric, "sync_on_compute"):
            raise UserError(
                f"metrics.{name}: {type(metric).__name__} cannot be combined across "
                f"{parallel.process_count} processes.\n"
                "Subclass torchmetrics.Metric or stoker.trainer.metrics.Sums, "
                "or remove the metric."
            )


def class_of(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return the class indices (N, ...) of the targets for outputs (N, C, ...).

    As in CrossEntropyLoss, dimension 1 of the outputs holds the classes. Soft targets (N, C, ...),
    such as those of mixup, are replaced by the class with the largest probability.

    Raises:
        UserError: The targets are neither class indices nor probabilities.
    """
    if outputs.ndim > 1 and outputs.shape[1] > 1:
        if targets.shape == outputs.shape[:1] + outputs.shape[2:]:
            # uint8 cannot represent -100, and its sums overflow.
            return targets if targets.is_floating_point() else targets.long()
        if targets.shape == outputs.shape:
            off = (targets.sum(1) - 1).abs()
            if (off < 0.01).all():
                return targets.argmax(1)
    raise UserError(
        "This metric needs one class per sample: outputs (N, classes, ...) and targets (N, ...), "
        f"not {tuple(outputs.shape)} and {tuple(targets.shape)}.\n"
        "For a single logit or for several labels per sample, use BinaryAccuracy or "
        "MultilabelAccuracy from torchmetrics.classification."
    )


def wide(tensor: Tensor) -> Tensor:
    """Convert the tensor to the dtype used for sums."""
    return tensor.to(wide_type(tensor.device.type))


class OfClasses(Sums):
    """A metric of class indices that ignores targets of class `ignore_index`.

    If `ignore_index` is None, the metric ignores the class that the Trainer's loss ignores. Without
    a Trainer, it then counts all targets.
    """

    ignored_by_loss: int | None = None  # set by the Trainer before each evaluation

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index: int | None = check_number(
            "metrics.ignore_index", ignore_index, whole=True, optional=True
        )
        super().__init__()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        true = class_of(targets, outputs)
        ignored = self.ignored_by_loss if self.ignore_index is None else self.ignore_index
        if ignored is None or targets.is_floating_point():
            counts = torch.ones_like(true, dtype=torch.bool)
        else:
            counts = true != ignored
        self.add(self.sums_of(outputs, true, counts))

    def sums_of(self, outputs: Tensor, true: Tensor, counts: Tensor) -> Tensor:
        """Return the sums of one batch: `true` classes, and a mask of those that count."""
        raise NotImplementedError


class Accuracy(OfClasses):
    """The fraction of samples (or pixels, or tokens) whose true class has the largest output.

    Outputs are (N, C, ...), targets (N, ...).
    """

    higher_is_better = True

    def sums_of(self, outputs: Tensor, true: Tensor, counts: Tensor) -> Tensor:
        return torch.stack([(self.hits(outputs, true) & counts).sum(), counts.sum()])

    def hits(self, outputs: Tensor, true: Tensor) -> Tensor:
        return true == outputs.argmax(1)


class TopK(Accuracy):
    """The fraction of samples whose true class is among the `k` largest outputs.

    Outputs are (N, C, ...), targets (N, ...).
    """

    def __init__(self, k: int = 5, ignore_index: int | None = None) -> None:
        self.k: int = check_number("metrics.k", k, whole=True, least=1)
        super().__init__(ignore_index)

    def hits(self, outputs: Tensor, true: Tensor) -> Tensor:
        best = outputs.topk(min(self.k, outputs.shape[1]), 1).indices
        return (best == true.unsqueeze(1)).any(1)


class Confusion(OfClasses):
    """The (C, C) matrix of counts: one row per true class, one column per predicted class."""

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        self.num_classes: int = check_number(
            "metrics.num_classes", num_classes, whole=True, least=2
        )
        super().__init__(ignore_index)

    def sums_of(self, outputs: Tensor, true: Tensor, counts: Tensor) -> Tensor:
        if outputs.shape[1] != self.num_classes:
            raise UserError(
                f"metrics: num_classes={self.num_classes}, but the model's outputs have "
                f"{outputs.shape[1]} classes."
            )
        cells = (true.where(counts, 0) * self.num_classes + outputs.argmax(1)).flatten()
        table = torch.zeros(self.num_classes**2, dtype=torch.int64, device=outputs.device)
        # bincount would wait for the device.
        return table.scatter_add_(0, cells, counts.flatten().to(cells.dtype))

    def value(self, sums: Tensor) -> Tensor:
        return sums.reshape(self.num_classes, self.num_classes)


class MeanIoU(Confusion):
    """The intersection over union of true and predicted pixels, averaged over the classes.

    A class that occurs neither in the targets nor in the predictions is skipped. Outputs are
    (N, C, ...), targets (N, ...).
    """

    higher_is_better = True

    def value(self, sums: Tensor) -> Tensor:
        counts = super().value(sums)
        hits = wide(counts.diagonal())
        return (hits / (counts.sum(0) + counts.sum(1) - hits)).nanmean()


class Perplexity(OfClasses):
    """The exponential of the mean cross-entropy (in nats) per token.

    Outputs are logits (N, C, ...), targets (N, ...).
    """

    higher_is_better = False

    def sums_of(self, outputs: Tensor, true: Tensor, counts: Tensor) -> Tensor:
        logits = outputs.float() if outputs.dtype.itemsize < 4 else outputs
        nats = functional.cross_entropy(logits, true.where(counts, 0), reduction="none")
        return torch.stack([wide(nats.where(counts, 0)).sum(), wide(counts).sum()])

    def value(self, sums: Tensor) -> Tensor:
        return super().value(sums).exp()


class MSE(Sums):
    """The mean squared error over all targets, times `scale` squared.

    `scale` is the standard deviation by which the data set has divided its targets: one number, or
    one per target.
    """

    higher_is_better = False
    power = 2

    def __init__(self, scale: float | Sequence[float] | Tensor = 1.0) -> None:
        self.scale = torch.as_tensor(scale, dtype=torch.float64).cpu()
        super().__init__()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        check_same_shape(outputs, targets)
        errors = wide(outputs) - wide(targets)
        self.scale = self.scale.to(errors)  # waits for the device in the first batch only
        total = ((errors * self.scale).abs() ** self.power).sum()
        self.add(torch.stack([total, torch.full_like(total, errors.numel())]))


class MAE(MSE):
    """The mean absolute error over all targets, times `scale`."""

    power = 1


class R2(Sums):
    """The fraction of the variance of the targets that is explained, averaged over the T targets.

    Outputs and targets are (N, T). 1 is perfect, and 0 is as good as predicting the mean. As in
    scikit-learn, the value of a constant target is 0, or 1 if all predictions are exact. With fewer
    than two samples, the value is NaN.
    """

    # Targets are summed relative to the first one, which is row 0 of the sums. Relative to 0, sums
    # of squares would suffer from cancellation; relative to a rounded mean, those of a constant
    # target would not be 0.
    higher_is_better = True

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        check_same_shape(outputs, targets)
        targets = wide(targets)
        if self.sums is None:
            self.sums = targets.new_zeros(5, *targets.shape[1:])
            self.sums[0] = targets[0]
        offsets = targets - self.sums[0]
        squares = offsets**2
        residual = (wide(outputs) - targets) ** 2
        samples = torch.full_like(self.sums[0], len(targets))
        self.sums[1:] += torch.stack([offsets.sum(0), squares.sum(0), residual.sum(0), samples])

    def compute(self) -> Tensor:
        parts = [part for part in parallel.from_all(self.sums) if part is not None]
        if not parts:
            return torch.tensor(torch.nan)
        # Each process has its own origin: shift all sums to the origin of the first process.
        shifted = []
        for origin, total, squares, residual, samples in parts:
            shift = origin - parts[0][0]
            squares = squares + 2 * shift * total + samples * shift**2
            shifted.append(torch.stack([total + samples * shift, squares, residual, samples]))
        return self.value(sum(shifted[1:], shifted[0]))

    def value(self, sums: Tensor) -> Tensor:
        total, squares, residual, samples = sums
        explained = 1 - residual / (squares - total**2 / samples)
        exact = (residual == 0).to(explained)
        explained = torch.where(squares == 0, exact, explained)
        explained = explained.where(samples > 1, torch.nan)
        return explained.mean()


def check_same_shape(outputs: Tensor, targets: Tensor) -> None:
    """Raise UserError if the shapes differ.

    Shapes (N, 1) and (N,) would broadcast to (N, N), which is silently wrong.
    """
    if outputs.shape != targets.shape:
        raise UserError(
            f"The outputs have shape {tuple(outputs.shape)} and the targets "
            f"{tuple(targets.shape)}. Give both the same shape."
        )
