"""A Trainer that computes its metrics on the training batches as well."""

import copy
from typing import Any

import torch

from stoker.trainer import evaluation
from stoker.trainer.errors import UserError
from stoker.trainer.history import History
from stoker.trainer.steps import ClosureStep
from stoker.trainer.trainer import Trainer


class TrainMetrics(Trainer):
    """A Trainer whose training rows have its metrics too: "train/acc" beside "train/loss".

    They are over the steps since the last row, of the outputs that the loss was computed from: with
    dropout, and with the weights of each step. A resumed fit counts from where it begins.
    `evaluate(train_loader, "train")` computes them with the weights as they are.

    Put it before your own Trainer, whose `compute_loss` it then wraps::

        class Mine(TrainMetrics, OfDicts):
            pass

    Raises:
        UserError: With micro_batch="auto" a batch may be computed twice, with LBFGS many times, and
            with compile="graph" no Python code of a step runs. Or no loss came from this class's
            `compute_loss`.
    """

    sees_outputs: bool = False  # whether this fit called `compute_loss`

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        step = self.special_step
        counts_wrong = isinstance(step, ClosureStep) or (step is not None and step.captures)
        if counts_wrong or self.micro_batch.adapts:
            raise UserError(
                f"{type(self).__name__}: leave out micro_batch='auto', compile='graph' and LBFGS, "
                "which compute a batch's loss several times or in a CUDA graph."
            )

    def fit(self, train_loader: Any, val_loader: Any = None, resume: Any = None) -> History:
        """Train as `Trainer.fit` does."""
        evaluation.reset(self)
        self.sees_outputs = False
        return super().fit(train_loader, val_loader, resume)

    def compute_loss(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of the batch, and the outputs."""
        loss, outputs = super().compute_loss(batch)
        if self.module.training:
            self.sees_outputs = True
            with torch.no_grad():
                self.update_metrics(outputs, batch)
        return loss, outputs

    def evaluate(self, loader: Any, split: str = "val") -> dict[str, Any]:
        """Return {"val/loss": ..., "val/acc": ...}, computed by copies of the metrics."""
        of_training = self.metrics
        self.metrics = copy.deepcopy(of_training)
        try:
            return super().evaluate(loader, split)
        finally:
            self.metrics = of_training

    def training_numbers(self) -> dict[str, Any]:
        """Return the numbers of the steps since the last row, with the metrics."""
        if not self.sees_outputs:
            name = type(self).__name__
            raise UserError(
                f"{name}.compute_loss hides TrainMetrics.compute_loss, which computes the "
                "metrics.\n"
                f"Derive {name} from Trainer, and train with class Both(TrainMetrics, {name})."
            )
        row = super().training_numbers()
        row.update(evaluation.metric_values(self, "train"))
        evaluation.reset(self)
        return row
