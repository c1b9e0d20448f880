"""The Callback base class and the built-in callbacks, which run between steps."""

import math
import sys
import time
import weakref
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from stoker.trainer import checkpoint, launch, parallel, settings, stopping, summary, terminal
from stoker.trainer.errors import (
    NotFinite,
    UserError,
    as_typed,
    check_number,
    did_you_mean,
    is_one_slip,
)
from stoker.trainer.history import weight_of
from stoker.trainer.loading import by_name
from stoker.trainer.metrics import Mean
from stoker.trainer.readable import brief, number
from stoker.trainer.state import ANYTHING, check_like, frozen, refuse
from stoker.trainer.window import NUMBERS

if TYPE_CHECKING:
    from stoker.trainer.live import Live
    from stoker.trainer.trainer import Trainer

Row = dict[str, Any]
State = dict[str, Any]
Tensors = dict[str, torch.Tensor]

SILENCE = 30  # seconds between two lines that Progress prints within an epoch


class Callback:
    """Base class with seven hooks, each called with the trainer.

    A callback with state that must survive a restart returns it from `state_dict` (tensors and
    plain values) and takes it back in `load_state_dict`.

    If several processes train together, each has its own callbacks and calls them at the same
    steps: a callback that stops training has to do so on all of them. With `first_rank_only`,
    only rank 0 runs the callback, for example to print or to write files.
    """

    first_rank_only: bool = False

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Called before the first step; `trainer.step` is above 0 in a resumed run."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """Called after each step, including any evaluation or end of epoch at this step."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """Called after each pass over the training set, but not if the run stops during it."""

    def on_eval_start(self, trainer: "Trainer") -> None:
        """Called before an evaluation or a prediction, unless it is nested in another one."""

    def on_eval_end(self, trainer: "Trainer") -> None:
        """Called after an evaluation or a prediction, even if it failed."""

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        """Called with each row of numbers: {"step": ..., "epoch": ..., "train/loss": ...}."""

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Called after a fit, even one that failed (`trainer.failed`) before `on_fit_start`."""

    def state_dict(self) -> State:
        """Return what to save in a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned."""

    def check_state(self, trainer: "Trainer", state: Any, name: str) -> None:
        """Raise UserError if `load_state_dict` could not use this state; change nothing."""


class Monitor(Callback):
    """A callback that monitors one logged number.

    `monitor="auto"` picks the first validation metric that says whether higher or lower is better,
    or else the validation loss, or else the training loss. The training loss counts as its mean
    over an epoch.

    With `mode` "max" or "min", it can also be a number that you pass to `trainer.log`.
    """

    name: str  # the monitored number, set by `on_fit_start`
    sign: int  # 1 if high is good, -1 if low is good
    warned: bool  # whether the warning about a non-finite number was given
    is_missing: bool = False  # your own number, not logged so far

    def __init__(self, monitor: str = "auto", mode: str = "auto") -> None:
        self.monitor = monitor
        self.mode = settings.check("monitor_mode", mode)
        self.forget()

    def forget(self) -> None:
        self.best: dict[str, float] | None = None  # {"step", "value"}
        self.epoch_loss = 0.0  # summed over the samples of this epoch
        self.epoch_weight = 0.0

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Choose the number to monitor.

        Raises:
            UserError: The number is never logged, or has no direction.
        """
        if not trainer.step:
            self.forget()  # the results of an earlier fit
        higher_is_better: dict[str, bool | None] = {}
        splits = by_name(trainer.val_loader)
        for split in splits:
            for name, metric in trainer.metrics.items():
                higher_is_better[f"{split}/{name}"] = getattr(metric, "higher_is_better", None)
        for split in [*splits, "train"]:
            higher_is_better[f"{split}/loss"] = False
        self.name = self.monitor
        if self.monitor == "auto":
            self.name = next(n for n, higher in higher_is_better.items() if higher is not None)
        is_usual = self.name in higher_is_better
        if not is_usual and not self.may_be_logged(higher_is_better):
            raise UserError(
                f"monitor={as_typed(self.name)}: no such number is logged."
                f"{did_you_mean(self.name, higher_is_better)}\n"
                f"Choose one of: {', '.join(higher_is_better)}.\n"
                "For a number that you log, such as my/number, also type monitor_mode=max or min."
            )
        higher = higher_is_better[self.name] if self.mode == "auto" else self.mode == "max"
        if higher is None:
            raise UserError(
                f"monitor={self.name}: the metric does not say whether higher or lower is better.\n"
                "Type monitor_mode=max or monitor_mode=min."
            )
        self.sign = 1 if higher else -1
        self.warned = False
        self.is_missing = not is_usual and self.best is None

    def may_be_logged(self, usual: Iterable[str]) -> bool:
        """Return whether this is a valid name for a number passed to `trainer.log`."""
        is_typo = any(is_one_slip(self.name, name) for name in usual)
        return self.mode != "auto" and "/" in self.name and not is_typo

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Warn if your own monitored number was never logged."""
        if self.is_missing and not trainer.failed:
            launch.warn(
                f"{type(self).__name__}: monitor={self.name} was not logged, "
                "so nothing counts as the best."
            )

    def improved(self, trainer: "Trainer", row: Row, min_delta: float = 0.0) -> bool | None:
        """Return whether the row's number beats the best by more than `min_delta`; then keep it.

        A number that is not finite never does, and causes one warning per fit. Return None if the
        row does not have the number, or covers only part of its epoch.
        """
        if self.name == "train/loss" and "train/samples" in row:
            value = self.over_epoch(trainer, row)
        else:
            value = row.get(self.name)
        if value is None:
            self.check_loss(trainer, row)
            return None
        self.is_missing = False
        if isinstance(value, list):
            raise UserError(f"monitor={self.name}: this is a list. Monitor a single number.")
        if not math.isfinite(value):
            self.warn(trainer, value)
            return False
        if self.best is not None and self.sign * (value - self.best["value"]) <= min_delta:
            return False
        self.best = {"step": trainer.step, "value": value}
        return True

    def check_loss(self, trainer: "Trainer", row: Row) -> None:
        """Raise UserError if the row is an evaluation without the monitored loss."""
        split, _, number = self.name.rpartition("/")
        names = [f"{split}/{name}" for name in trainer.metrics]
        if number == "loss" and split != "train" and names and all(name in row for name in names):
            raise UserError(
                f"monitor={self.name}: evaluations return no loss.\n"
                "Monitor a metric, or train/loss."
            )

    def warn(self, trainer: "Trainer", value: float) -> None:
        """Warn, once in a fit, that the monitored number is not finite."""
        if not self.warned:
            launch.warn(
                f"{type(self).__name__}: {self.name} is {value} at step {trainer.step:,}, "
                "which never counts as the best."
            )
        self.warned = True

    def over_epoch(self, trainer: "Trainer", row: Row) -> float | None:
        """Return the mean training loss of the epoch if this row ends it, else None.

        Training for less than one epoch counts as one epoch. If all targets of a row are ignored it
        has no loss, and an epoch of such rows has no mean.
        """
        if "train/loss" in row:
            weight = weight_of(row)
            self.epoch_loss += weight * row["train/loss"]
            self.epoch_weight += weight
        ends_fit = trainer.step >= trainer.total_steps
        if trainer.step % trainer.steps_per_epoch and not (ends_fit and self.best is None):
            return None
        mean = self.epoch_loss / self.epoch_weight if self.epoch_weight else None
        self.epoch_loss = 0.0
        self.epoch_weight = 0.0
        return mean

    def state_dict(self) -> State:
        epoch = {"loss": self.epoch_loss, "weight": self.epoch_weight}
        return {"best": self.best, "epoch": epoch}

    def load_state_dict(self, state: State) -> None:
        self.best = state["best"]
        self.epoch_loss = state["epoch"]["loss"]
        self.epoch_weight = state["epoch"]["weight"]

    def check_state(self, trainer: "Trainer", state: Any, name: str) -> None:
        like = {**self.state_dict(), "best": None}
        if "metrics" in like:  # the state of a Checkpoint
            like["metrics"] = ANYTHING
        if isinstance(state, dict) and state.get("best") is not None:
            like["best"] = {"step": 0, "value": math.inf}
        check_like(state, like, name)
        weight = state["epoch"]["weight"]
        if not weight >= 0:  # also nan
            refuse(weight, "a weight of at least 0", f"{name}.epoch.weight")
        step = state["best"]["step"] if state["best"] else 0
        if not isinstance(step, int) or step < 0:
            refuse(step, "a number of steps", f"{name}.best.step")


class Checkpoint(Monitor):
    """Save the whole state to `folder`/step_<number>.ckpt; keep the last `keep` and the best.

    It saves every `every` steps, every `epochs` epochs and every `minutes` (None means never), when
    the monitored number is the best so far, and at the end. Put it last in the list, so that it
    saves the state of the other callbacks after this step. Training only waits while the state is
    copied; a thread writes the copy. The plain values in `about`, such as the config, are saved
    with it.
    """

    saved: int  # the step of the last copy

    def __init__(
        self,
        folder: str | Path,
        every: int | None = None,
        epochs: int | None = 1,
        minutes: float | None = None,
        keep: int = 2,
        monitor: str = "auto",
        mode: str = "auto",
        overwrite: bool = False,
    ) -> None:
        super().__init__(monitor, mode)
        self.folder = Path(folder)
        self.overwrite = overwrite
        self.about: State = {}
        self.every = settings.check("checkpoint.every", every)
        self.epochs = settings.check("checkpoint.epochs", epochs)
        self.minutes = settings.check("checkpoint.minutes", minutes)
        self.keep = settings.check("checkpoint.keep", keep)
        self.due = False
        self.metrics: Row = {}  # the last value of each logged number
        self.last_time = 0.0  # of the last copy, by `trainer.agreement`'s clock
        self.writer: ThreadPoolExecutor | None = None
        self.writing: Future[None] | None = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Raise UserError if the folder holds the checkpoints of another run."""
        super().on_fit_start(trainer)
        is_gone = False
        if launch.is_first():
            self.check_folder(trainer)
            checkpoint.go_back(self.folder, trainer.step)
            if self.best:
                path = checkpoint.path_of(self.folder, int(self.best["step"]))
                is_gone = not path.exists()
        if parallel.add_up(int(is_gone)):
            self.best = None  # it belongs to another folder
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.saved = trainer.step
        self.due = False
        self.last_time = trainer.agreement.now()
        if not trainer.step:
            self.metrics = {}

    def check_folder(self, trainer: "Trainer") -> None:
        """Raise UserError unless the folder is free for this run."""
        if not trainer.step and not self.overwrite and checkpoint.files(self.folder):
            raise UserError(
                f"{self.folder} already has checkpoints: pass a different folder, or resume from "
                f"them with fit(..., resume={str(self.folder)!r})."
            )
        is_file = self.folder.exists() and not self.folder.is_dir()
        if is_file or self.folder.is_symlink():  # a link may point anywhere
            raise UserError(
                f"{self.folder} is not a folder, and checkpoints need one. Remove it, or move it "
                "away."
            )

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        if self.improved(trainer, row):
            self.due = True
        self.metrics.update(row)
        # Not part of a run's result.
        for name in ("train/seconds", "train/samples", "device/memory_mib"):
            self.metrics.pop(name, None)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if self.epochs and trainer.step % (self.epochs * trainer.steps_per_epoch) == 0:
            self.due = True

    def on_step_end(self, trainer: "Trainer") -> None:
        if self.writing is not None and self.writing.done():
            self.wait()  # raises its error
        due = self.due or trainer.should_stop or trainer.step == trainer.total_steps
        if self.every and trainer.step % self.every == 0:
            due = True
        if self.minutes and trainer.agreement.now() >= self.last_time + 60 * self.minutes:
            due = True
        if due:
            with trainer.spans["checkpoint"]:
                self.save(trainer)

    def on_fit_end(self, trainer: "Trainer") -> None:
        # Interrupted in the step's evaluation, or after this callback was called. After an error
        # the state of the run is unknown.
        if trainer.interrupted and trainer.step != self.saved and not trainer.failed:
            with trainer.spans["checkpoint"]:
                self.save(trainer)
        if self.writer is not None:
            self.writer.shutdown()
            self.wait()
        super().on_fit_end(trainer)

    def save(self, trainer: "Trainer") -> None:
        """Copy the state and write it in a thread, one copy at a time.

        All processes have to call this, since each may hold a part of the state; rank 0 writes.

        Raises:
            NotFinite: A weight is not finite.
            TrainingError: The last copy could not be written.
        """
        self.wait()
        self.due = False
        self.saved = trainer.step
        self.last_time = trainer.agreement.now()
        name = checkpoint.first_nonfinite(trainer.module)
        if name is not None:
            symptom = f"The weights of {name} are not finite at step {trainer.step:,}"
            raise NotFinite(
                f"{symptom}, so no checkpoint is saved.\n"
                "Type a lower optimizer.lr, or max_grad_norm=1.",
                symptom,
            )
        state = checkpoint.copy({**trainer.state_dict(), "about": self.about})
        if launch.is_first():
            assert self.writer is not None
            path = checkpoint.path_of(self.folder, trainer.step)
            self.writing = self.writer.submit(self.write, path, state, self.best)

    def write(self, path: Path, state: State, best: dict[str, float] | None) -> None:
        """Write the new file, then remove the old ones that are not kept. Runs in the thread."""
        checkpoint.save(path, state)
        old = list(checkpoint.files(self.folder).items())[self.keep :]
        for step, old_path in old:
            if best is None or step != best["step"]:
                old_path.unlink()

    def wait(self) -> None:
        """Wait until everything is written; raise the thread's error if there is one."""
        if self.writing is not None:
            writing = self.writing
            self.writing = None
            writing.result()

    def state_dict(self) -> State:
        return {**super().state_dict(), "metrics": dict(sorted(self.metrics.items()))}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.metrics = dict(state["metrics"])

    def check_state(self, trainer: "Trainer", state: Any, name: str) -> None:
        super().check_state(trainer, state, name)
        metrics = state["metrics"]
        if not isinstance(metrics, dict) or not all(isinstance(key, str) for key in metrics):
            refuse(metrics, "a dict of numbers", f"{name}.metrics")


class EarlyStopping(Monitor):
    """Stop after `patience` evaluations in a row that do not improve by more than `min_delta`."""

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
        self.waited = 0  # evaluations since the best

    def on_fit_start(self, trainer: "Trainer") -> None:
        super().on_fit_start(trainer)
        if not trainer.step:
            self.waited = 0
        self.stop_when_due(trainer)  # a run that stopped early stays stopped

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        better = self.improved(trainer, row, self.min_delta)
        if better is not None:
            self.waited = 0 if better else self.waited + 1
            self.stop_when_due(trainer)

    def stop_when_due(self, trainer: "Trainer") -> None:
        if self.waited < self.patience:
            return
        reason = f"{self.name} was not finite in {self.waited} evaluations"
        if self.best:
            best = number(self.best["value"])
            reason = f"{self.name} was not better than {best} for {self.waited} evaluations"
        trainer.stop(reason, "early_stopping")

    def state_dict(self) -> State:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.waited = state["waited"]


class ShadowWeights(Callback):
    """A callback that keeps a second set of the weights and of BatchNorm's statistics.

    Subclasses define `update`, which brings the set up to the trainer's step. It is called at the
    end of each step, and before the step's evaluation.
    """

    key: str  # the set's key in a checkpoint

    def __init__(self) -> None:
        self.shadow: Tensors | None = None
        self.step = 0  # the step of the last update
        # Outside of a fit: the module whose weights these are, and the checksums of its tensors.
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.sums: dict[str, int] | None = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        if hasattr(trainer.optimizer, "eval"):
            name = type(self).__name__
            raise UserError(
                f"{name}: {type(trainer.optimizer).__name__} already evaluates with averaged "
                f"weights. Leave {name} out."
            )
        self.module = None
        self.sums = None
        current = floating_state(trainer.module)
        if self.shadow is None or not trainer.step:
            self.shadow = current
            self.step = trainer.step
        # Copied to the devices and layouts of the model: a checkpoint's tensors are on the CPU.
        copies: Tensors = {}
        for name, tensor in current.items():
            value = parallel.like(self.shadow[name], tensor)
            copies[name] = torch.empty_like(tensor).copy_(value)
        self.shadow = copies

    def on_step_end(self, trainer: "Trainer") -> None:
        self.update(trainer)

    def on_fit_end(self, trainer: "Trainer") -> None:
        # The device of a failed fit may not work any more; the module is None if it was closed.
        if not trainer.failed and trainer.module is not None:
            self.module = weakref.ref(trainer.module)
            self.sums = self.current_sums()

    def on_eval_start(self, trainer: "Trainer") -> None:
        self.forget_if_changed()
        if self.shadow is not None:  # None if evaluated before any training
            self.update(trainer)

    def forget_if_changed(self) -> None:
        """Discard the set if its fit is over and the weights have changed since."""
        if self.shadow is None or self.sums is None:
            return
        is_changed = self.current_sums() not in (None, self.sums)
        if not parallel.add_up(int(is_changed)):
            return
        self.shadow = None
        self.step = 0
        launch.warn(
            f"{type(self).__name__}: the weights have changed since the fit or checkpoint, "
            f"so the {self.key} weights are discarded."
        )

    def current_sums(self) -> dict[str, int] | None:
        """Return the checksums of the module; None in a fit, or if the module is gone."""
        module = None if self.module is None else self.module()
        return None if module is None else checksums(module)

    def update(self, trainer: "Trainer") -> None:
        """Bring the set up to `trainer.step`, once per step."""
        raise NotImplementedError

    @torch.no_grad()
    def average(self, trainer: "Trainer", decay: float) -> Tensors:
        """Set shadow = decay * shadow + (1 - decay) * trained, and return the trained weights.

        A frozen weight is its own average, even if it is trained again later. It is copied at every
        step, since any code may set it.
        """
        assert self.shadow is not None
        trained = floating_state(trainer.module)
        fixed: Tensors = {}
        for name in frozen(trainer.module):
            if name in trained:
                fixed[name] = trained.pop(name)
        copy_into({name: self.shadow[name] for name in fixed}, fixed)
        if trained:
            shadow = parallel.local(self.shadow[name] for name in trained)
            average = get_ema_multi_avg_fn(decay)
            average(shadow, parallel.local(trained.values()), None)
        self.step = trainer.step
        return trained

    def state_dict(self) -> State:
        self.forget_if_changed()
        return {self.key: self.shadow, "step": self.step}

    def load_state_dict(self, state: State) -> None:
        self.shadow = state[self.key]
        self.step = state["step"]
        self.sums = self.current_sums()

    def check_state(self, trainer: "Trainer", state: Any, name: str) -> None:
        in_fit = trainer.train_loader is not None
        self.module = None if in_fit else weakref.ref(trainer.module)
        like: State = {self.key: None, "step": 0}
        is_new = isinstance(state, dict) and state.get(self.key) is None and state.get("step") == 0
        if not is_new:
            like[self.key] = floating_state(trainer.module)
        check_like(state, like, name)


class Lookahead(ShadowWeights):
    """Every `every` steps, move slow weights towards the trained ones and continue from them.

    slow = d * slow + (1 - d) * trained, including BatchNorm's statistics; this also happens at the
    last step. d rises as (step / total_steps) ** `power` to `decay` at the end (Jordan 2024, arXiv
    2404.00498, section 3.4). With power 0 it is constant (Zhang 2019, arXiv 1907.08610, algorithm
    1, where 1 - d is called alpha).
    """

    key = "slow"

    def __init__(self, every: int = 5, decay: float = 0.5, power: float = 0) -> None:
        super().__init__()
        self.every: int = check_number("callbacks.lookahead.every", every, whole=True, least=1)
        self.decay: float = check_number("callbacks.lookahead.decay", decay, least=0, most=1)
        self.power: float = check_number("callbacks.lookahead.power", power, least=0)

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Raise UserError if an EMA comes first: it would hand over averages, not weights."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        if any(isinstance(callback, EMA) for callback in before):
            raise UserError(
                "callbacks: Lookahead changes the weights that EMA averages. Put it before EMA."
            )
        super().on_fit_start(trainer)

    @torch.no_grad()
    def update(self, trainer: "Trainer") -> None:
        if self.step == trainer.step or not trainer.is_time(self.every):
            return
        decay = self.decay * (trainer.step / trainer.total_steps) ** self.power
        trained = self.average(trainer, decay)
        assert self.shadow is not None
        copy_into(trained, self.shadow)


class EMA(ShadowWeights):
    """Evaluate and predict with an exponential moving average of weights and BatchNorm statistics.

    The decay is min(decay, (1 + step) / (10 + step)), so that the average is already useful in the
    first epoch (as in tf.train.ExponentialMovingAverage).
    """

    key = "average"

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = settings.check("ema", decay)
        self.raw: Tensors | None = None  # the trained weights, during an evaluation

    def update(self, trainer: "Trainer") -> None:
        if self.step != trainer.step:
            step = trainer.step
            self.average(trainer, min(self.decay, (1 + step) / (10 + step)))

    def on_eval_start(self, trainer: "Trainer") -> None:
        super().on_eval_start(trainer)
        if self.shadow is not None:
            current = floating_state(trainer.module)
            self.raw = {name: tensor.clone() for name, tensor in current.items()}
            copy_into(current, self.shadow)

    def on_eval_end(self, trainer: "Trainer") -> None:
        if self.raw is not None:
            copy_into(floating_state(trainer.module), self.raw)
            self.raw = None

    def state_dict(self) -> State:
        self.check_weights()
        return super().state_dict()

    def check_state(self, trainer: "Trainer", state: Any, name: str) -> None:
        self.check_weights()
        super().check_state(trainer, state, name)

    def check_weights(self) -> None:
        """Raise UserError unless the model holds the trained weights now."""
        if self.raw is not None:
            raise UserError(
                "EMA: during an evaluation the model holds the averages, not the trained weights. "
                "Save and load the run's state before or after it."
            )


def checksums(module: torch.nn.Module) -> dict[str, int]:
    """Return a checksum of the bytes of each parameter and floating-point buffer.

    With shards, only those of this process.
    """
    tensors = {**floating_state(module), **dict(module.named_parameters())}
    sums: dict[str, int] = {}
    for name, tensor in zip(tensors, parallel.local(tensors.values()), strict=True):
        flat = tensor.detach().cpu().reshape(-1)
        sums[name] = zlib.crc32(flat.view(torch.uint8).numpy().data)
    return sums


def floating_state(module: torch.nn.Module) -> Tensors:
    """Return the live floating-point weights and statistics by name."""
    state: Tensors = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            state[name] = tensor
    return state


@torch.no_grad()
def copy_into(tensors: Tensors, values: Tensors) -> None:
    """Copy the values into the tensors of the same names.

    In place: sharded modules ignore tensors that are swapped by `.data`.
    """
    for name, tensor in tensors.items():
        tensor.copy_(parallel.like(values[name], tensor))


class TimeLimit(Callback):
    """Stop after `minutes`. The schedule keeps its full length: resume the run to complete it."""

    end: float  # by the clock of `trainer.agreement`

    def __init__(self, minutes: float) -> None:
        self.minutes = settings.check("max_minutes", minutes)

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.end = trainer.agreement.now() + 60 * self.minutes

    def on_step_end(self, trainer: "Trainer") -> None:
        if trainer.agreement.now() >= self.end:
            trainer.stop(f"reached the time limit (max_minutes={self.minutes:g})", "time_limit")


class NaNGuard(Callback):
    """Raise NotFinite at the first logged loss or gradient norm that is not finite.

    `fit` then replays the steps since the last good row or checkpoint, to find the first bad step
    and whether its batch, its loss or its gradients were not finite. That batch is saved in
    `folder`, with a checkpoint of the state before the step. Until a Checkpoint has saved a state
    of the fit, a copy of its first state is kept in CPU memory, unless the weights are sharded.
    """

    finite_until: int  # the step of the last row with finite training numbers
    first_step: int  # when the fit began
    first_state: State | None = None  # the Trainer's state at that step, on the CPU

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.finite_until = trainer.step
        self.first_step = trainer.step
        if not any(map(parallel.is_shard, trainer.module.parameters())):  # too large to gather
            self.first_state = checkpoint.copy(trainer.state_dict(), everywhere=True)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self.first_state = None

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        for name, value in row.items():
            is_watched = name.endswith("/loss") or name == "train/grad_norm"
            if is_watched and not math.isfinite(value):
                self.fail(trainer, name, value)
        if "train/loss" in row:
            self.finite_until = trainer.step
            if self.is_saved(trainer):
                self.first_state = None

    def fail(self, trainer: "Trainer", name: str, value: float) -> NoReturn:
        """Raise NotFinite for this number."""
        symptom = f"{name} is {value} {self.where(trainer, name)}"
        broken = checkpoint.first_nonfinite(trainer.module)
        split, _, _ = name.partition("/")
        if broken is not None:
            reason = f"the weights of {broken} are not finite"
        elif split in by_name(trainer.val_loader):
            raise NotFinite(
                f"{symptom}, and all weights are finite.\n"
                f"Check the data and the targets of {split}."
            )
        else:
            reason = "all weights are finite, so check the inputs, the targets and the loss"
        is_explained = split == "train" or broken is not None
        raise NotFinite(
            f"{symptom} (learning rate {brief(trainer.lr)}); {reason}.\n"
            f"Type {self.advice(trainer)}.",
            symptom if is_explained else "",
        )

    def is_saved(self, trainer: "Trainer") -> bool:
        """Return whether a Checkpoint has saved a state of this fit, where a replay can start."""
        savers = [one for one in trainer.callbacks if isinstance(one, Checkpoint)]
        return any(saver.saved > self.first_step for saver in savers)

    def where(self, trainer: "Trainer", name: str) -> str:
        """Return the steps that the number covers: a training loss is a mean over several steps."""
        first = self.finite_until + 1
        if name.startswith("train/") and first < trainer.step:
            return f"in steps {first:,} to {trainer.step:,}"
        return f"at step {trainer.step:,}"

    @staticmethod
    def advice(trainer: "Trainer") -> str:
        advice = ["a lower optimizer.lr"]
        if trainer.max_grad_norm is None:
            advice.append("max_grad_norm=1")
        if trainer.scaler.is_enabled():
            advice.append("precision=bf16")
        return " or ".join(advice)


class Progress(Callback):
    """Print a line per epoch with loss, metrics, speed and the numbers passed to `trainer.log`.

    On a terminal these are the rows of a table, above a line that is updated at each step.
    Elsewhere, a line is also printed now and then during a long epoch.
    """

    first_rank_only = True
    live: "Live | None" = None  # on a terminal
    last_line: float  # when it was printed
    is_stream = False  # whether a line shows the numbers since the last one
    is_evaluated = False  # whether an evaluation followed this step

    def on_fit_start(self, trainer: "Trainer") -> None:
        for line in summary.plan(trainer):
            terminal.show(line)
        if terminal.is_terminal(sys.stdout):
            from stoker.trainer.live import Live

            monitors = [callback for callback in trainer.callbacks if isinstance(callback, Monitor)]
            self.live = Live(trainer, monitors[-1] if monitors else None)
        self.last_line = time.monotonic()
        # Data without a length has a single epoch, which is too long for a mean.
        self.is_stream = trainer.steps_per_epoch == trainer.max_steps
        self.start_epoch()

    def start_epoch(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.numbers: dict[str, float] = {}  # logged since the last line
        self.means: dict[str, Mean] = {}  # of training numbers over the epoch

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        if self.live is not None:
            self.live.add(row)
        samples = row.get("train/samples", 0)
        self.samples += samples
        self.seconds += row.get("train/seconds", 0.0)
        for name, value in row.items():
            if name == "train/loss":
                self.mean(name, value, weight_of(row))
            elif isinstance(value, float) and not self.is_usual(name):
                self.numbers[name] = self.mean(name, value, samples) if samples else value
        for split in by_name(trainer.val_loader):
            if any(f"{split}/{name}" in row for name in ("loss", *trainer.metrics)):
                self.is_evaluated = True

    def mean(self, name: str, value: float, samples: float) -> float:
        """Return a training number's mean over the epoch so far."""
        mean = self.means.setdefault(name, Mean())
        mean.update(torch.tensor(value, dtype=torch.float64), 1, samples)
        return float(mean.compute())

    @staticmethod
    def is_usual(name: str) -> bool:
        """Return whether a line leaves this number out or shows it in another form."""
        return name in (*NUMBERS, "epoch") or name.startswith("train/lr/")

    def on_step_end(self, trainer: "Trainer") -> None:
        ends_epoch = trainer.step % trainer.steps_per_epoch == 0
        if ends_epoch or self.is_evaluated:  # includes what `on_epoch_end` logged
            self.line(self.epoch(trainer))
        if ends_epoch:
            self.start_epoch()
        if self.live is not None:
            self.live.step()
        elif time.monotonic() > self.last_line + SILENCE:
            self.line(f"step {trainer.step:,}/{trainer.total_steps:,}")

    def on_fit_end(self, trainer: "Trainer") -> None:
        if not trainer.failed and self.numbers:  # logged after the last line
            self.line(self.epoch(trainer))
        if self.live is not None:
            self.live.close()
            self.live = None
        # A program that handles signals tells its user what to do after one.
        is_told = trainer.interrupted and stopping.received is not None
        if trainer.stop_reason and not is_told:
            terminal.show(f"stopped at step {trainer.step:,}: {trainer.stop_reason}")

    @staticmethod
    def epoch(trainer: "Trainer") -> str:
        """Return "epoch 3/10", "epoch 2.50/10" within an epoch, or "step 20/60"."""
        if trainer.steps_per_epoch == trainer.max_steps:
            return f"step {trainer.step:,}/{trainer.total_steps:,}"
        epochs = f"{math.ceil(trainer.total_steps / trainer.steps_per_epoch):,}"
        done = trainer.step / trainer.steps_per_epoch
        if done.is_integer():
            return f"epoch {done:{len(epochs)},.0f}/{epochs}"
        return f"epoch {done:.2f}/{epochs}"

    def line(self, where: str) -> None:
        """Print a line with the numbers so far."""
        numbers = {}
        if "train/loss" in self.means:
            numbers["loss"] = float(self.means["train/loss"].compute())
        numbers.update(self.numbers)
        speed = f"{self.samples / self.seconds:,.0f}" if self.seconds else ""
        if self.live is not None:
            self.live.row(numbers, speed)
        else:
            parts = [where, *(f"{name} {number(value)}" for name, value in numbers.items())]
            if speed:
                parts.append(f"{speed} samples/s")
            self.write("  ".join(parts))
        self.numbers = {}
        self.is_evaluated = False
        if self.is_stream:
            self.start_epoch()

    def write(self, text: str) -> None:
        """Print a line above the live one."""
        self.last_line = time.monotonic()
        if self.live is None:
            print(text, flush=True)
        else:
            self.live.write(text)
