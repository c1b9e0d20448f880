"""Callbacks that monitor a logged number or the time, and can stop training.

`Monitor.improved` decides which value is the best, for both `Checkpoint` and `EarlyStopping`.
"""

import math
from typing import TYPE_CHECKING, ClassVar

from stoker.trainer import launch, settings
from stoker.trainer.callback import Callback, Row
from stoker.trainer.errors import UserError, as_typed, check_number, did_you_mean, nearest
from stoker.trainer.history import weight_of
from stoker.trainer.loading import by_name
from stoker.trainer.number_format import counted, number

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


class Monitor(Callback):
    """A callback that monitors one logged number.

    `monitor="auto"` picks the first validation metric that declares whether higher is better, or
    else the validation loss, or else the training loss. The training loss is averaged over an
    epoch. To monitor a number that you pass to `trainer.log`, set `mode` to "max" or "min".
    """

    state_attributes: ClassVar[tuple[str, ...]] = ("best", "epoch")
    name: str  # the monitored number, set by `on_fit_start`
    sign: int  # 1 if higher is better, -1 if lower is better
    warned: bool  # whether a warning about a non-finite number was logged
    is_missing: bool = False  # whether the number has not been logged yet

    def __init__(self, monitor: str = "auto", mode: str = "auto") -> None:
        self.monitor = monitor
        self.mode = settings.check("monitor_mode", mode)
        self.forget()

    def forget(self) -> None:
        self.best: dict[str, float] | None = None  # {"step", "value"}
        self.epoch = {"loss": 0.0, "weight": 0.0}  # the training loss, summed over this epoch

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Choose the number to monitor.

        Raises:
            UserError: The number is never logged, or it is unknown whether higher is better.
        """
        if not trainer.step:
            self.forget()  # values from an earlier fit
        higher_is_better: dict[str, bool | None] = {}
        splits = by_name(trainer.val_loader)
        for split in splits:
            for name, metric in trainer.metrics.items():
                higher_is_better[f"{split}/{name}"] = getattr(metric, "higher_is_better", None)
        higher_is_better.update({f"{split}/loss": False for split in [*splits, "train"]})
        known = [name for name, higher in higher_is_better.items() if higher is not None]
        self.name = known[0] if self.monitor == "auto" else self.monitor
        higher = higher_is_better.get(self.name)
        is_typo = nearest(self.name, higher_is_better, loosely=False) is not None
        is_own = "/" in str(self.name) and not is_typo  # it may be null
        if self.mode != "auto" and (self.name in higher_is_better or is_own):
            higher = self.mode == "max"
        if higher is None:
            raise UserError(
                f"monitor={as_typed(self.name)}: no such number is logged, or it is unknown "
                f"whether higher is better.{did_you_mean(self.name, known)}\n"
                f"Choose one of: {', '.join(known)}.\n"
                "For another metric, or a number that you log, also type monitor_mode=max or min."
            )
        self.sign = 1 if higher else -1
        self.warned = False
        self.is_missing = self.best is None

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Warn if the number was never logged during a complete fit."""
        if self.is_missing and not trainer.failed and trainer.step == trainer.total_steps:
            launch.warn(
                f"{type(self).__name__}: {self.name} was never logged, so there is no best value.\n"
                "Add a metric with +metrics.NAME._target_=CLASS, or type monitor=train/loss."
            )

    def improved(self, trainer: "Trainer", row: Row, min_delta: float = 0.0) -> bool | None:
        """Return whether the row's value is better than the best by more than `min_delta`.

        If so, record it as the best. A non-finite value is never better, and causes one warning per
        fit. Return None if the row has no value, or only a training loss in the middle of an epoch.
        """
        value = row.get(self.name)
        if self.name == "train/loss" and "train/samples" in row:
            value = self.over_epoch(trainer, row)
        if value is None:
            return None
        self.is_missing = False
        if isinstance(value, list):
            raise UserError(
                f"monitor={self.name}: this metric is a list. Choose a metric with a single value."
            )
        if not math.isfinite(value):
            if not self.warned:
                launch.warn(
                    f"{type(self).__name__}: {self.name} is {value} at step {trainer.step:,}, "
                    "which cannot be the best value."
                )
            self.warned = True
            return False
        if self.best is not None and self.sign * (value - self.best["value"]) <= min_delta:
            return False
        self.best = {"step": trainer.step, "value": value}
        return True

    def over_epoch(self, trainer: "Trainer", row: Row) -> float | None:
        """Return the mean training loss of the epoch if this row ends the epoch, else None.

        A fit of less than one epoch counts as an epoch. A row has no loss if all of its targets are
        ignored.
        """
        if "train/loss" in row:
            self.epoch["loss"] += weight_of(row) * row["train/loss"]
            self.epoch["weight"] += weight_of(row)
        ends_fit = trainer.step == trainer.total_steps
        if trainer.step % trainer.steps_per_epoch and not (ends_fit and self.best is None):
            return None
        loss, weight = self.epoch.values()
        self.epoch = {"loss": 0.0, "weight": 0.0}
        return loss / weight if weight else None


class EarlyStopping(Monitor):
    """Stop after `patience` evaluations in a row that do not improve by more than `min_delta`."""

    state_attributes: ClassVar[tuple[str, ...]] = (*Monitor.state_attributes, "waited")

    def __init__(
        self,
        patience: int,
        min_delta: float = 0.0,
        monitor: str = "auto",
        mode: str = "auto",
    ) -> None:
        super().__init__(monitor, mode)
        self.patience = settings.check("patience", patience)
        self.min_delta: float = check_number("min_delta", min_delta, least=0)
        self.waited = 0  # number of evaluations since the best one

    def on_fit_start(self, trainer: "Trainer") -> None:
        super().on_fit_start(trainer)
        if not trainer.step:
            self.waited = 0
        self.stop_when_due(trainer)  # if the run had already stopped early

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        better = self.improved(trainer, row, self.min_delta)
        if better is not None:
            self.waited = 0 if better else self.waited + 1
            self.stop_when_due(trainer)

    def stop_when_due(self, trainer: "Trainer") -> None:
        if self.waited >= self.patience:
            best = f" (best: {number(self.best['value'])})" if self.best else ""
            reason = f"{self.name} did not improve in {counted(self.waited, 'evaluation')}{best}"
            trainer.stop(reason, "early_stopping")


class TimeLimit(Callback):
    """Stop after `minutes`. The schedule keeps its full length; resume the run to complete it."""

    end: float  # on the clock of `trainer.agreement`

    def __init__(self, minutes: float) -> None:
        self.minutes = settings.check("max_minutes", minutes)

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.end = trainer.agreement.now() + 60 * self.minutes

    def on_step_end(self, trainer: "Trainer") -> None:
        if trainer.agreement.now() >= self.end:
            trainer.stop(f"reached the time limit (max_minutes={self.minutes:g})", "time_limit")
