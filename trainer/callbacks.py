"""What happens between steps: the Callback, progress, checkpoints, early stopping, averages, time limit, NaN guard."""

import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from stoker.trainer import checkpoint, launch, parallel, settings, summary
from stoker.trainer.errors import TrainingError, UserError, as_typed, check_number, did_you_mean
from stoker.trainer.readable import number
from stoker.trainer.state import ANYTHING, check_like, refuse

SILENCE = 30  # seconds, after which Progress says where it is also in the middle of an epoch


class Callback:
    """Seven hooks, each called with the trainer, in the order of the list of callbacks.

    A callback with a state that has to survive a restart gives it in `state_dict` (tensors and plain values) and takes
    it in `load_state_dict`.

    Where several processes train together, each has its callbacks, and calls them at the same steps: one that stops the
    training has to do so on all of them. With `first_rank_only` it is there once, to print or to write.
    """

    first_rank_only = False

    def on_fit_start(self, trainer):
        """Everything is built and nothing is trained; `trainer.step` is above 0 where a run is continued."""

    def on_step_end(self, trainer):
        """The last thing of each step, after the evaluation and the end of the epoch where the step has them."""

    def on_epoch_end(self, trainer):
        """The whole training set was seen once more; not where a run stops in the middle."""

    def on_eval_start(self, trainer):
        """Before an evaluation or a prediction."""

    def on_eval_end(self, trainer):
        """After it, also when it failed."""

    def on_log(self, trainer, row):
        """A row of numbers: {"step": ..., "epoch": ..., "train/loss": ...}."""

    def on_fit_end(self, trainer):
        """The last thing of a fit, also when it failed (`trainer.failed`), be it before this one's `on_fit_start`."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def check_state(self, trainer, state, name):
        """UserError where `load_state_dict` or what comes after it could not do with this state; changes nothing."""


NOTHING = {"loss": 0.0, "samples": 0}  # of an epoch: the sum over its samples, and how many


class Monitor(Callback):
    """A callback that watches one logged number.

    "auto" is the first metric of the validation set whose good end is known, or its loss, or the training loss. Of
    that a row has a part of the epoch: what counts is the mean over the epoch, at its end.
    """

    def __init__(self, monitor="auto", mode="auto"):
        self.monitor, self.mode = monitor, settings.check("monitor_mode", mode)
        self.best = None  # {"step", "value"}
        self.epoch = dict(NOTHING)

    def on_fit_start(self, trainer):
        """UserError where nothing of that name will be logged, or where it is not known which end of it is good."""
        if not trainer.step:
            self.best, self.epoch = None, dict(NOTHING)  # of an earlier fit
        good_end = {
            f"val/{name}": getattr(m, "higher_is_better", None)
            for name, m in trainer.metrics.items()
        }
        good_end |= {"val/loss": False}
        good_end = {**(good_end if trainer.val_loader is not None else {}), "train/loss": False}
        known_end = [name for name, higher in good_end.items() if higher is not None]
        self.name = known_end[0] if self.monitor == "auto" else self.monitor
        if self.name not in good_end:
            hint = did_you_mean(self.name, good_end)
            names = ", ".join(good_end)
            raise UserError(
                f"monitor={as_typed(self.name)}: no such number is logged.{hint}\nType monitor= one of: {names}."
            )
        higher = good_end[self.name] if self.mode == "auto" else self.mode == "max"
        if higher is None:
            what = "the metric does not say whether high or low is good."
            raise UserError(
                f"monitor={self.name}: {what}\nType monitor_mode=max or monitor_mode=min."
            )
        self.sign = 1 if higher else -1

    def improved(self, trainer, row, min_delta=0.0):
        """Whether the row's number is better than the best one by more than `min_delta`; it is the best one then.

        None where the row has it not, or the epoch goes on of which it has a part.
        """
        if self.name not in row:
            return None
        value = row[self.name] if self.name != "train/loss" else self.over_epoch(trainer, row)
        if value is None:
            return None
        better = not math.isnan(value) and (
            self.best is None or self.sign * (value - self.best["value"]) > min_delta
        )
        if better:
            self.best = {"step": trainer.step, "value": value}
        return better

    def over_epoch(self, trainer, row):
        """The mean training loss of the epoch that this row ends, or of a training that has no whole one; else None."""
        samples = row.get("train/samples", 1)
        self.epoch["loss"] += samples * row["train/loss"]
        self.epoch["samples"] += samples
        if trainer.step % trainer.steps_per_epoch and (
            self.best is not None or trainer.step < trainer.total_steps
        ):
            return None
        mean, self.epoch = self.epoch["loss"] / self.epoch["samples"], dict(NOTHING)
        return mean

    def state_dict(self):
        return {"best": self.best} | ({"epoch": dict(self.epoch)} if self.epoch != NOTHING else {})

    def load_state_dict(self, state):
        self.best, self.epoch = state["best"], dict(state.get("epoch", NOTHING))

    def check_state(self, trainer, state, name):
        like = self.state_dict() | {"best": None}
        like.pop("epoch", None)
        if isinstance(state, dict) and state.get("best") is not None:
            like["best"] = {"step": 0, "value": math.inf}
        if isinstance(state, dict) and "epoch" in state:
            like["epoch"] = {"loss": math.inf, "samples": 0}
        check_like(state, like, name)
        best = state["best"]
        if "epoch" in state and not state["epoch"]["samples"] > 0:
            refuse(state["epoch"]["samples"], "a number of samples", f"{name}.epoch.samples")
        if best and not (isinstance(state["best"]["step"], int) and state["best"]["step"] >= 0):
            refuse(state["best"]["step"], "a number of steps", f"{name}.best.step")


class Checkpoint(Monitor):
    """Saves the whole state to `folder`/step_<number>.ckpt; keeps the last `keep` and the best.

    It saves every `every` steps, every `epochs` epochs and every `minutes`, None being never; when the monitored number
    is the best so far; and at the end. The last callback in the list, so that it saves what the others became in this
    step. The training waits for a copy of the state; it is written in a thread. The plain values in `about`, such as
    the config, are saved beside it.
    """

    def __init__(
        self,
        folder,
        every=None,
        epochs=1,
        minutes=None,
        keep=2,
        monitor="auto",
        mode="auto",
        overwrite=False,
    ):
        super().__init__(monitor, mode)
        self.folder, self.overwrite = Path(folder), overwrite
        self.about = {}
        self.every = settings.check("checkpoint.every", every)
        self.epochs = settings.check("checkpoint.epochs", epochs)
        self.minutes = settings.check("checkpoint.minutes", minutes)
        self.keep = settings.check("checkpoint.keep", keep)
        self.due, self.metrics = False, {}  # the last value of each number logged
        self.writer, self.writing = None, None

    def on_fit_start(self, trainer):
        """UserError where the folder holds another run's checkpoints."""
        super().on_fit_start(trainer)
        if launch.is_first():
            self.check_folder(trainer)
            checkpoint.go_back(self.folder, trainer.step)
        gone = (
            self.best
            and launch.is_first()
            and not checkpoint.path_of(self.folder, self.best["step"]).exists()
        )
        if parallel.add_up(int(bool(gone))):
            self.best = None  # it was reached in another folder
        self.writer, self.saved = ThreadPoolExecutor(1, "checkpoint"), trainer.step
        self.due, self.last_time = False, trainer.agreement.now()
        self.metrics = self.metrics if trainer.step else {}

    def check_folder(self, trainer):
        if not trainer.step and not self.overwrite and checkpoint.files(self.folder):
            more = f"or go on from them: fit(..., resume={str(self.folder)!r})"
            raise UserError(f"{self.folder} has checkpoints: give another folder, {more}.")
        if self.folder.is_symlink() or (
            self.folder.exists() and not self.folder.is_dir()
        ):  # a link may lead anywhere
            raise UserError(
                f"{self.folder} is no folder, and checkpoints go into one. Remove it, or move it away."
            )

    def on_log(self, trainer, row):
        self.due |= bool(self.improved(trainer, row))
        # How long it took is no part of what a run comes to.
        self.metrics |= {
            name: row[name] for name in row if name not in ("train/seconds", "train/samples")
        }

    def on_epoch_end(self, trainer):
        self.due |= (
            bool(self.epochs) and trainer.step % (self.epochs * trainer.steps_per_epoch) == 0
        )

    def on_step_end(self, trainer):
        if self.writing is not None and self.writing.done():
            self.wait()  # for nothing but its error
        due = self.due or trainer.should_stop or trainer.step == trainer.total_steps
        due = due or (self.every and trainer.step % self.every == 0)
        if due or (self.minutes and trainer.agreement.now() >= self.last_time + 60 * self.minutes):
            with trainer.spans["checkpoint"]:
                self.save(trainer)

    def on_fit_end(self, trainer):
        # In the step's evaluation, or after this callback had its turn. Where an error ends the fit, nobody knows what
        # state the training is in.
        if trainer.interrupted and trainer.step != self.saved and not trainer.failed:
            self.save(trainer)
        if self.writer is not None:
            self.writer.shutdown()
            self.wait()

    def save(self, trainer):
        """Copies the state, and has it written; one at a time, so that there is one copy at most.

        All processes have to come here, as each may have a part of the state; the first one writes it.
        """
        self.wait()
        self.due, self.saved, self.last_time = False, trainer.step, trainer.agreement.now()
        if name := checkpoint.first_nonfinite(trainer.module):
            raise TrainingError(
                f"The weights of {name} are not finite at step {trainer.step}: no checkpoint is written of them.\n"
                "Type a lower optimizer.lr, or max_grad_norm=1."
            )
        state = checkpoint.copy({**trainer.state_dict(), "about": self.about})
        if launch.is_first():
            path = checkpoint.path_of(self.folder, trainer.step)
            self.writing = self.writer.submit(self.write, path, state, self.best)

    def state_dict(self):
        return super().state_dict() | {"metrics": dict(sorted(self.metrics.items()))}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.metrics = state["metrics"]

    def check_state(self, trainer, state, name):
        super().check_state(
            trainer, state | {"metrics": self.metrics} if isinstance(state, dict) else state, name
        )
        check_like(state, dict.fromkeys([*state, "metrics"], ANYTHING), name)
        if not isinstance(state["metrics"], dict) or not all(
            isinstance(key, str) for key in state["metrics"]
        ):
            refuse(state["metrics"], "a dict of numbers", f"{name}.metrics")

    def write(self, path, state, best):
        """In the thread: the new one, and when it is in place, away with the old ones."""
        checkpoint.save(path, state)
        for step, old in list(checkpoint.files(self.folder).items())[self.keep :]:
            if step != (best and best["step"]):
                old.unlink()

    def wait(self):
        """Until all is written; raises what went wrong there."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()


class EarlyStopping(Monitor):
    """Ends the training after `patience` evaluations in a row that are not better by more than `min_delta`."""

    def __init__(self, patience, min_delta=0.0, monitor="auto", mode="auto"):
        super().__init__(monitor, mode)
        self.patience = settings.check("patience", patience)
        self.min_delta = check_number("min_delta", min_delta, least=0)
        self.waited = 0

    def on_fit_start(self, trainer):
        super().on_fit_start(trainer)
        self.waited = self.waited if trainer.step else 0
        self.stop_when_due(trainer)  # a stopped run that is continued stays stopped

    def on_log(self, trainer, row):
        better = self.improved(trainer, row, self.min_delta)
        if better is not None:
            self.waited = 0 if better else self.waited + 1
            self.stop_when_due(trainer)

    def stop_when_due(self, trainer):
        if self.waited >= self.patience:
            trainer.stop(
                f"{self.name} was not better than {self.best['value']:.4g} for {self.waited} evaluations"
                if self.best
                else f"no {self.name}",
                "early_stopping",
            )

    def state_dict(self):
        return super().state_dict() | {"waited": self.waited}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.waited = state["waited"]


class Lookahead(Callback):
    """Every `every` steps, slow weights go a part of the way to the trained ones, which then go on from the slow ones.

    slow = d * slow + (1 - d) * trained, BatchNorm's statistics included; the last step ends so too. d rises as
    (step / total_steps) ** `power` to `decay` at the end (Jordan 2024, arXiv 2404.00498, section 3.4); for power 0 it
    is the same throughout (Zhang 2019, arXiv 1907.08610, algorithm 1, where 1 - d is called alpha).
    """

    def __init__(self, every=5, decay=0.5, power=0):
        self.every = check_number("callbacks.lookahead.every", every, whole=True, least=1)
        self.decay = check_number("callbacks.lookahead.decay", decay, least=0, most=1)
        self.power = check_number("callbacks.lookahead.power", power, least=0)
        self.slow, self.step = None, 0

    def on_fit_start(self, trainer):
        """UserError where an EMA stands in front of it, which would hand it averages instead of the weights."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        if any(isinstance(callback, EMA) for callback in before):
            raise UserError(
                "callbacks: Lookahead changes the weights that EMA averages. Put it in front of EMA."
            )
        current = floating_state(trainer, frozen=True)
        continued = self.slow is not None and trainer.step
        self.slow = copied(self.slow if continued else current, like=current)
        self.step = self.step if continued else trainer.step

    def on_step_end(self, trainer):
        self.update(trainer)

    def on_eval_start(self, trainer):
        if self.slow is not None:  # or evaluated before any training
            self.update(trainer)

    @torch.no_grad()
    def update(self, trainer):
        """Does the step's part, once: a step with an evaluation asks for it before that and at its end."""
        if self.step == trainer.step or not trainer.is_time(self.every):
            return
        self.step, current = trainer.step, floating_state(trainer)
        slow, trained = [self.slow[name] for name in current], list(current.values())
        decay = self.decay * (trainer.step / trainer.total_steps) ** self.power
        slow, trained = parallel.local(slow), parallel.local(trained)
        torch._foreach_lerp_(slow, trained, 1 - decay)
        torch._foreach_copy_(
            trained, slow
        )  # in place: a swap of `.data` is ignored by sharded modules

    def state_dict(self):
        return {"slow": self.slow, "step": self.step}

    def load_state_dict(self, state):
        self.slow, self.step = state["slow"], state["step"]

    def check_state(self, trainer, state, name):
        check_copies(trainer, state, "slow", name)


class EMA(Callback):
    """Evaluates and predicts with an exponential moving average of the weights and of BatchNorm's statistics.

    The decay is min(decay, (1 + step) / (10 + step)), so that the average is of use from the first epoch on (as
    tf.train.ExponentialMovingAverage has it).
    """

    def __init__(self, decay):
        self.decay = settings.check("ema", decay)
        self.average, self.raw, self.step = None, None, 0

    def on_fit_start(self, trainer):
        current = floating_state(trainer, frozen=True)
        continued = self.average is not None and trainer.step
        self.average = copied(self.average if continued else current, like=current)
        self.step = self.step if continued else trainer.step

    def on_step_end(self, trainer):
        self.update(trainer)

    @torch.no_grad()
    def update(self, trainer):
        """Takes the step's weights in, once: a step with an evaluation asks for it before that and at its end."""
        if self.step == trainer.step:
            return
        self.step = trainer.step
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        current = floating_state(trainer)
        average = parallel.local([self.average[name] for name in current])
        torch._foreach_lerp_(average, parallel.local(current.values()), 1 - decay)

    @torch.no_grad()
    def on_eval_start(self, trainer):
        if self.average is None:  # evaluated before any training
            return
        self.update(trainer)
        current = floating_state(trainer)
        self.raw = {name: tensor.clone() for name, tensor in current.items()}
        for name, tensor in current.items():
            # In place: a swap of `.data` is ignored by sharded modules.
            tensor.copy_(parallel.like(self.average[name], tensor))

    @torch.no_grad()
    def on_eval_end(self, trainer):
        if self.raw is not None:
            for name, tensor in floating_state(trainer).items():
                tensor.copy_(self.raw[name])
            self.raw = None

    def state_dict(self):
        return {"average": self.average, "step": self.step}

    def load_state_dict(self, state):
        self.average, self.step = state["average"], state["step"]

    def check_state(self, trainer, state, name):
        check_copies(trainer, state, "average", name)


def floating_state(trainer, frozen=False):
    """{name: tensor} of the weights and statistics that can be averaged, live; frozen weights only if asked."""
    fixed = (
        ()
        if frozen
        else {
            name for name, weight in trainer.module.named_parameters() if not weight.requires_grad
        }
    )
    state = trainer.module.state_dict().items()
    return {
        name: tensor for name, tensor in state if tensor.is_floating_point() and name not in fixed
    }


def check_copies(trainer, state, key, name):
    """UserError where the state's tensors are not copies of the model's, as they are from the first fit on."""
    begun = isinstance(state, dict) and (state.get(key) is not None or state.get("step") != 0)
    check_like(
        state, {key: floating_state(trainer, frozen=True) if begun else None, "step": 0}, name
    )


def copied(tensors, like):
    """Copies with the devices and layouts of the tensors in `like`: those of a checkpoint come on the CPU."""
    return {
        name: torch.empty_like(tensor).copy_(parallel.like(tensors[name], tensor))
        for name, tensor in like.items()
    }


class TimeLimit(Callback):
    """Ends the training after the step in which `minutes` are over.

    The schedule stays that of the whole length: continue the run to complete it.
    """

    def __init__(self, minutes):
        self.minutes = settings.check("max_minutes", minutes)

    def on_fit_start(self, trainer):
        self.end = trainer.agreement.now() + 60 * self.minutes

    def on_step_end(self, trainer):
        if trainer.agreement.now() >= self.end:
            trainer.stop(f"reached the time limit (max_minutes={self.minutes:g})", "time_limit")


class NaNGuard(Callback):
    """Ends the training with a TrainingError at the first logged loss, or norm of the gradient, that is not finite."""

    def on_fit_start(self, trainer):
        self.finite_until = trainer.step

    def on_log(self, trainer, row):
        for name, value in row.items():
            if (name.endswith("/loss") or name == "train/grad_norm") and not math.isfinite(value):
                first = self.finite_until + 1 if name.startswith("train/") else trainer.step
                steps = f"in steps {first:,} to" if first < trainer.step else "at step"
                where = (
                    f"{name} is {value} {steps} {trainer.step:,} (learning rate {trainer.lr:.3g})"
                )
                raise TrainingError(
                    f"{where}; {summary.not_finite(trainer)}.\nType {self.advice(trainer)}."
                )
        if "train/loss" in row:
            self.finite_until = trainer.step

    @staticmethod
    def advice(trainer):
        more = ["max_grad_norm=1"] * (trainer.max_grad_norm is None) + [
            "precision=bf16"
        ] * trainer.scaler.is_enabled()
        return " or ".join(["a lower optimizer.lr", *more])


class Progress(Callback):
    """One line an epoch with loss, validation metrics and speed; on a terminal a bar, elsewhere a line now and then."""

    first_rank_only = True
    bar = None

    def on_fit_start(self, trainer):
        for line in summary.plan(trainer):
            print(line)
        if sys.stdout.isatty():
            import tqdm

            self.bar = tqdm.tqdm(
                total=trainer.total_steps,
                initial=trainer.step,
                leave=False,
                unit="step",
                dynamic_ncols=True,
            )
        self.said = time.monotonic()
        self.start_epoch()

    def start_epoch(self):
        self.loss, self.samples, self.seconds, self.validation = 0.0, 0, 0.0, {}

    def on_log(self, trainer, row):
        if "train/samples" in row:
            self.loss += row["train/loss"] * row["train/samples"]
            self.samples += row["train/samples"]
            self.seconds += row["train/seconds"]
        self.validation |= {
            name: value
            for name, value in row.items()
            if name.startswith("val/") and isinstance(value, float)
        }
        if self.validation and trainer.step % trainer.steps_per_epoch:
            self.line(trainer)

    def on_epoch_end(self, trainer):
        self.line(trainer)
        self.start_epoch()

    def line(self, trainer, where=None):
        epochs = math.ceil(trainer.total_steps / trainer.steps_per_epoch)
        done = trainer.step / trainer.steps_per_epoch
        width = len(str(epochs))
        loss = f"  loss {number(self.loss / self.samples)}" if self.samples else ""
        values = "".join(f"  {name} {number(value)}" for name, value in self.validation.items())
        speed = f"  {self.samples / self.seconds:,.0f} samples/s" if self.seconds else ""
        epoch = f"{done:{width}g}" if done.is_integer() else f"{done:.2f}"
        self.validation = {}
        self.write(f"{where or f'epoch {epoch}/{epochs}'}{loss}{values}{speed}")

    def write(self, text):
        """A line, above the bar where there is one."""
        self.said = time.monotonic()
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def on_step_end(self, trainer):
        if self.bar is not None:
            self.bar.update(trainer.step - self.bar.n)
        elif time.monotonic() > self.said + SILENCE:
            self.line(trainer, f"step {trainer.step:,}/{trainer.total_steps:,}")

    def on_fit_end(self, trainer):
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if trainer.stop_reason:
            print(f"stopped at step {trainer.step}: {trainer.stop_reason}")
