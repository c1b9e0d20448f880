"""Metrics on the device until asked for, as in torchmetrics: update(outputs, targets), compute(), reset()."""

import torch
from stoker.trainer import launch, parallel
from stoker.trainer.errors import UserError, check_number


class Mean:
    """The mean of values, each weighted by its number of samples: `update(value, samples)`."""

    higher_is_better = False

    def __init__(self):
        self.reset()

    def update(self, value, samples=1):
        if isinstance(self.total, float):
            self.total = torch.full(
                (), self.total, dtype=wide_type(value), device=value.device
            )  # waits for no device
        value = value if value.ndim == 0 else value.reshape(())
        self.total.add_(value.detach(), alpha=samples)  # one kernel, although the total is wider
        self.samples += samples

    def compute(self):
        total = (
            torch.tensor(self.total, dtype=torch.float64)
            if isinstance(self.total, float)
            else self.total
        )
        return total / self.samples if self.samples else torch.tensor(torch.nan)

    def reset(self):
        self.total, self.samples = 0.0, 0

    def over_ranks(self):
        """The Mean of what all processes have seen; all have to ask."""
        if parallel.ranks() == 1:
            return self
        whole = Mean()
        total, whole.samples = parallel.add_up(float(self.total)), parallel.add_up(self.samples)
        whole.total = (
            torch.tensor(total, dtype=torch.float64) if whole.samples else 0.0
        )  # as one process has it
        return whole

    def state_dict(self):
        whole = self.over_ranks()
        return {"total": whole.total, "samples": whole.samples}

    def load_state_dict(self, state):
        self.reset()
        if launch.is_first():  # it was of all processes, and is added up again
            self.total, self.samples = float(state["total"]), state["samples"]


class Sums:
    """Sums over all samples, so batches of 7 give what one full batch gives; the children say what is summed.

    One tensor on the device of the outputs: float64 (float32 on mps), or int64 for what is counted. `higher_is_better`
    tells which end of the metric is the good one.
    """

    higher_is_better = True

    def __init__(self):
        self.reset()

    def reset(self):
        self.sums = None

    def add(self, sums):
        self.sums = sums if self.sums is None else self.sums + sums

    def compute(self):
        """Over what all processes have seen, and all have to ask; nan before the first update."""
        sums = parallel.add_up(self.sums)
        return torch.tensor(torch.nan) if sums is None else self.value(sums)


def class_of(targets, outputs):
    """Class indices (N, ...) of the targets for outputs (N, C, ...): the classes are second, as in CrossEntropyLoss.

    Of soft targets (N, C, ...), as mixup makes them, it is the largest. UserError for all else.
    """
    if outputs.ndim > 1 and outputs.shape[1] > 1:
        if targets.shape == outputs.shape[:1] + outputs.shape[2:]:
            return targets
        if targets.shape == outputs.shape and ((targets.sum(1) - 1).abs() < 0.01).all():
            return targets.argmax(1)
    raise UserError(
        "This metric is for one class a sample: outputs (N, classes, ...) and targets (N, ...); "
        f"these are {tuple(outputs.shape)} and {tuple(targets.shape)}.\n"
        "For one logit or several labels take torchmetrics.classification.BinaryAccuracy or MultilabelAccuracy."
    )


def wide_type(tensor):
    """The type to sum in: float64, but float32 on mps, which has no other."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def wide(tensor):
    """The tensor in the type to sum in."""
    return tensor.to(wide_type(tensor))


class Accuracy(Sums):
    """The share of samples (or pixels) whose largest output is their class; outputs (N, C, ...), targets (N, ...)."""

    def reset(self):
        super().reset()
        self.count = 0

    def update(self, outputs, targets):
        self.add_hits(class_of(targets, outputs) == outputs.argmax(1))

    def add_hits(self, hits):
        self.add(hits.sum())
        self.count += hits.numel()

    def value(self, sums):
        return wide(sums) / parallel.add_up(self.count)


class TopK(Accuracy):
    """The share of samples whose class is among the `k` largest outputs; outputs (N, C, ...), targets (N, ...)."""

    def __init__(self, k=5):
        self.k = check_number("metrics.k", k, whole=True, least=1)
        super().__init__()

    def update(self, outputs, targets):
        true = class_of(targets, outputs)
        best = outputs.topk(min(self.k, outputs.shape[1]), 1).indices
        self.add_hits((best == true.unsqueeze(1)).any(1))


class Confusion(Sums):
    """The (C, C) matrix of counts, a row a true class, a column a predicted one."""

    higher_is_better = None

    def __init__(self, num_classes):
        self.num_classes = check_number("metrics.num_classes", num_classes, whole=True, least=2)
        super().__init__()

    def update(self, outputs, targets):
        true = class_of(targets, outputs)
        if outputs.shape[1] != self.num_classes:
            raise UserError(
                f"num_classes={self.num_classes}: the model's outputs are of {outputs.shape[1]} classes."
            )
        cells = (true * self.num_classes + outputs.argmax(1)).flatten()
        counts = torch.zeros(self.num_classes**2, dtype=torch.int64, device=outputs.device)
        self.add(
            counts.scatter_add_(0, cells, torch.ones_like(cells))
        )  # bincount would wait for the device

    def value(self, sums):
        return sums.reshape(self.num_classes, self.num_classes)


class MSE(Sums):
    """The mean squared error over all targets, times `scale` squared.

    `scale` is the standard deviation by which a data set divided its targets: one number, or one for each of them.
    """

    higher_is_better = False
    power = 2

    def __init__(self, scale=1.0):
        self.scale = torch.as_tensor(scale, dtype=torch.float64).cpu()
        super().__init__()

    def update(self, outputs, targets):
        check_same_shape(outputs, targets)
        errors = (wide(outputs) - wide(targets)).abs() ** self.power
        totals = (errors.sum(0) if self.scale.ndim else errors.sum()).reshape(-1)
        self.add(torch.cat([totals, torch.full_like(totals[:1], errors.numel())]))

    def value(self, sums):
        return (sums[:-1] / sums[-1] * (self.scale**self.power).to(sums)).sum()


class MAE(MSE):
    """The mean absolute error over all targets, times `scale`."""

    power = 1


class R2(Sums):
    """The share of the targets' variance that is explained, the mean over targets; outputs and targets (N, T).

    1 is perfect, 0 is as good as the mean.
    """

    def update(self, outputs, targets):
        check_same_shape(outputs, targets)
        if self.sums is None:
            # Sums about a value near the mean: sums of squares about 0 would cancel.
            self.origin = wide(targets).mean(0)
        offsets, errors = wide(targets) - self.origin, wide(outputs) - wide(targets)
        samples = torch.full_like(self.origin, len(targets))
        self.add(torch.stack([offsets.sum(0), (offsets**2).sum(0), (errors**2).sum(0), samples]))

    def compute(self):
        if parallel.ranks() > 1:
            self.sums = self.about_common_origin()
        return super().compute()

    def about_common_origin(self):
        """The sums, about the mean of the origins of all processes."""
        nothing = self.sums is None
        origins = parallel.add_up(
            None if nothing else torch.stack([self.origin, torch.ones_like(self.origin)])
        )
        if nothing:
            return None
        origin = origins[0] / origins[1]
        (total, squares, residual, samples), shift = self.sums, self.origin - origin
        self.origin = origin
        return torch.stack(
            [
                total + samples * shift,
                squares + 2 * shift * total + samples * shift**2,
                residual,
                samples,
            ]
        )

    def value(self, sums):
        total, squares, residual, samples = sums
        return (1 - residual / (squares - total**2 / samples)).mean()


def check_same_shape(outputs, targets):
    """UserError unless the shapes agree.

    (N, 1) against (N,) would broadcast to (N, N) and give a wrong number in silence.
    """
    if outputs.shape != targets.shape:
        raise UserError(
            f"The model gives {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            "they have to be the same."
        )


def default_metrics(kind, scale=1.0):
    """What is shown for a kind of data set.

    Accuracy for "classification"; R2, MAE and MSE, in the targets' own units, for "regression".
    """
    if kind == "classification":
        return {"acc": Accuracy()}
    return {"r2": R2(), "mae": MAE(scale), "mse": MSE(scale)}
