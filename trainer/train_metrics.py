"""A Trainer that also computes its metrics on the training batches."""

import copy
from typing import Any

import torch

from stoker.trainer import evaluation
from stoker.trainer.errors import UserError
from stoker.trainer.history import History
from stoker.trainer.steps import captures, closure_step
from stoker.trainer.trainer import Trainer


class TrainMetrics(Trainer):
    """A Trainer that also logs its metrics on training batches, such as "train/acc".

    The metrics cover the steps since the last row, and use the same outputs as the loss: with
    dropout, and with the weights of each step. A resumed fit starts counting where it resumes. To
    compute the metrics with the current weights, call `evaluate(train_loader, "train")`.

    To combine this class with your own Trainer, list it first, so that it wraps `compute_loss`::

        class Mine(TrainMetrics, OfDicts):
            pass

    Raises:
        UserError: The Trainer uses micro_batch="auto" or LBFGS, which may compute a batch several
            times, or compile="graph", which does not run the Python code of a step.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        repeats = self.special_step is closure_step or self.splitter.adapts
        if repeats or captures(self):
            raise UserError(
                f"{type(self).__name__} cannot be used with micro_batch='auto', compile='graph' or "
                "LBFGS, which compute a batch's loss several times or in a CUDA graph."
            )

    def fit(self, train_loader: Any, val_loader: Any = None, resume: Any = None) -> History:
        """Train as in `Trainer.fit`, starting with empty metrics."""
        evaluation.reset(self)
        return super().fit(train_loader, val_loader, resume)

    def compute_loss(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of the batch and the outputs; in training, update the metrics."""
        loss, outputs = super().compute_loss(batch)
        if self.module.training:
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
        """Return the numbers for the steps since the last row, including the metrics."""
        row = super().training_numbers()
        row.update(evaluation.metric_values(self, "train"))
        evaluation.reset(self)
        return row
