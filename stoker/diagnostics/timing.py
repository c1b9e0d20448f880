"""Where the time of a training goes: sampled steps, cut into stages, and one sentence on what to change."""

import contextlib
import itertools
import math
import random
import sys
import time
from collections import Counter

from stoker.data.loader import DeviceLoader, HostLoader, StreamedOnce
from stoker.runs.loggers import Logger
from stoker.runs.rundir import STAGES
from stoker.trainer import device as devices
from stoker.trainer import graph, launch
from stoker.trainer.callbacks import Callback, Checkpoint, Progress

MOST_COST = (
    0.005  # of the time, for the sampling: as much again is left for being asked after each step
)
SOON = 0.1  # seconds: what is shorter says nothing of what is longer
MOST_GROWTH, FEWEST_STEPS = (
    16,
    4,
)  # of a batch that is proposed: so many times as large, so many steps in an epoch
# The share of the time from which on a stage is worth a change. Evaluations and checkpoints are of use, waiting is not.
WORTH = {
    "data": 0.1,
    "transfer": 0.1,
    "checkpoint": 0.1,
    "logging": 0.1,
    "evaluation": 0.2,
    "fixed": 0.3,
    "idle": 0.5,
}
AIM = {
    "checkpoint": 0.05,
    "evaluation": 0.05,
    "fixed": 0.15,
    "idle": 0.15,
}  # the share that the change leaves


class Timing(Callback):
    """Splits the time of a fit into STAGES, and says at the end of the first epoch what to change.

    Evaluations, checkpoints and the rows of loggers are timed as they come. Of the steps some are cut into stages by
    marks in the work of the device (events on a GPU, for which nothing waits): the first of the fit, which stands for
    itself, and of the first ones of the epochs and of the others so many, at random, that the sampling takes at most
    MOST_COST of the time. A sampled step does the same work: the methods that it goes through are timed from outside,
    for this step alone. A step that is one graph, or that a Trainer does in its own way, is the stage "step".
    The last of the callbacks, or what those behind it do is taken for data that is waited for.
    """

    first_rank_only = True
    evaluated, in_evaluation = None, False

    def __init__(self):
        self.took, self.said, self.began = {}, None, 0.0
        self.in_step, self.in_fit = (
            contextlib.ExitStack(),
            contextlib.ExitStack(),
        )  # what is replaced meanwhile

    def on_fit_start(self, trainer):
        self.device, self.took, self.said, self.is_new = trainer.device, {}, None, True
        self.whole = {
            "evaluation": 0.0,
            "checkpoint": 0.0,
            "logging": 0.0,
        }  # seconds of what is timed as it comes
        self.first_step, self.sampled = (
            trainer.step,
            {"fit": [], "epoch": [], "other": []},
        )  # {stage: seconds} of each
        self.unread, self.marks = (
            [],
            None,
        )  # marks of the steps that were sampled, and of the one that is or will be
        self.kind = None  # of that one, once its work is done
        self.random, self.cost, self.next, self.hosts = random.Random(0), 0.0, trainer.step + 1, []
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoint):
                self.in_fit.enter_context(replaced(callback, "save", self.timing, "checkpoint"))
            if isinstance(callback, Logger):
                self.in_fit.enter_context(replaced(callback, "attempt", self.timing, "logging"))
                self.in_fit.enter_context(replaced(callback, "begin", self.starting))
        for name in ("evaluate", "predict"):  # as methods: a Trainer may have its own
            self.in_fit.enter_context(replaced(trainer, name, self.evaluating))
        self.began = time.perf_counter()
        self.begin(trainer, "fit")

    def on_fit_end(self, trainer):
        self.in_step.close()
        self.in_fit.close()
        if not trainer.failed:
            self.took, self.said = self.split(trainer), self.sentence(trainer)

    def on_log(self, trainer, row):
        if "train/loss" in row:  # for which the device was waited for
            self.read()
        elif self.evaluated is not None:  # what its row costs the others is a part of an evaluation
            start, logging = self.evaluated
            self.evaluated = None
            self.whole["evaluation"] += (
                time.perf_counter() - start - (self.whole["logging"] - logging)
            )
            if self.marks is not None:
                self.mark(None)

    def on_epoch_end(self, trainer):
        whole = trainer.step - self.first_step >= trainer.steps_per_epoch
        if (
            self.is_new
            and whole
            and trainer.step < trainer.total_steps
            and (said := self.sentence(trainer))
        ):
            self.is_new = False
            for callback in trainer.callbacks:
                if isinstance(callback, Progress):
                    callback.write(f"speed    {said}")

    def on_step_end(self, trainer):
        if self.kind is not None:
            self.mark("other")
            self.unread.append((self.kind, self.marks))
            self.kind = self.marks = None
        if not trainer.step % trainer.steps_per_epoch:
            if not self.sampled["epoch"] or not self.too_early():
                self.begin(trainer, "epoch")
        elif trainer.step >= self.next:
            self.begin(trainer, "other")

    @contextlib.contextmanager
    def timing(self, stage):
        """Adds the time within to the stage; the steps that the device still had to do are no part of it."""
        devices.synchronize(self.device)
        if self.marks is not None:
            self.mark("other")
        start = time.perf_counter()
        try:
            yield
        finally:
            devices.synchronize(self.device)
            self.whole[stage] += time.perf_counter() - start
            if self.marks is not None:
                self.mark(None)

    @contextlib.contextmanager
    def evaluating(self):
        """The stage of an evaluation, and within it of none that it calls."""
        if self.in_evaluation:
            yield
            return
        self.in_evaluation = True
        try:
            with self.timing("evaluation"):
                yield
        finally:
            self.in_evaluation = False
        self.evaluated = time.perf_counter(), self.whole["logging"]

    @contextlib.contextmanager
    def starting(self):
        """A logger that starts takes as long for any training: this is no part of its time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.leave_out(seconds)
            self.whole["logging"] -= seconds

    def leave_out(self, seconds):
        """Takes what has just been done, for so long, out of the training's time."""
        self.began += seconds

    def too_early(self):
        """Seconds until the sampling so far is within MOST_COST of the time."""
        return max(0.0, self.cost / MOST_COST - (time.perf_counter() - self.began))

    def begin(self, trainer, kind):
        """Has the next step sampled, which is one of this kind."""
        start = time.perf_counter()
        self.in_step.close()
        self.replace(trainer, "begin_step", self.around, "data", "other")
        self.replace(trainer, "train_step", self.to_the_end, trainer, kind)
        loader = (
            trainer.train_loader.loader
            if isinstance(trainer.train_loader, StreamedOnce)
            else trainer.train_loader
        )
        if isinstance(loader, HostLoader):
            self.replace(loader, "move", self.around, "data", "transfer")
        if trainer.execute is graph.eagerly:  # a graph would capture the marks
            self.replace(trainer, "compute_loss", self.around, "backward", "forward")
            self.replace(trainer.scaler, "unscale_", self.around, "backward", "optimizer")
            self.replace(trainer.scaler, "step", self.around, "backward", "optimizer")
        self.marks = [(None, devices.mark(self.device))]
        self.cost += 3 * (
            time.perf_counter() - start
        )  # as much again for the marks, and for the end

    def replace(self, *method):
        self.in_step.enter_context(replaced(*method))

    def mark(self, stage):
        self.marks.append((stage, devices.mark(self.device)))

    @contextlib.contextmanager
    def around(self, before, after):
        """Two marks: what is done within is the stage `after`, and what came between the last mark and it `before`."""
        self.mark(before)
        yield
        self.mark(after)

    @contextlib.contextmanager
    def to_the_end(self, trainer, kind):
        """The work of a sampled step; the next one is so far away that the cost of the marks is within MOST_COST."""
        self.mark("transfer")
        begins = len(self.marks)
        yield
        self.mark("optimizer")
        self.in_step.close()
        self.hosts.append(devices.has_caught_up(self.marks[-2][1]))
        self.marks[begins:] = named(self.marks[begins:])
        self.kind = kind
        # At random, since a loader may do more in each fourth step, say; but one of the others comes at any price.
        steps = trainer.step + 1 - self.first_step
        pause = (
            self.too_early() / (time.perf_counter() - self.began) * steps
            if len(self.hosts) > 1
            else 0.0
        )
        self.next = trainer.step + 1 + int(2 * self.random.random() * pause)

    def read(self):
        """Turns the marks that the device has come to into seconds."""
        for kind, marks in self.unread:
            seconds = Counter()
            for (_, start), (stage, end) in itertools.pairwise(marks):
                if stage is not None:  # it has been timed as a whole
                    seconds[stage] += devices.seconds_between(start, end)
            self.sampled[kind].append(seconds)
        self.unread = []

    def split(self, trainer):
        """{stage: seconds} of the fit so far, all of its time."""
        devices.synchronize(self.device)
        self.read()
        total = time.perf_counter() - self.began
        done, per_epoch = trainer.step - self.first_step, trainer.steps_per_epoch
        epochs = (
            max(0, trainer.step - 1) // per_epoch - self.first_step // per_epoch
        )  # that were begun in this fit
        count, steps = {"fit": 1, "epoch": epochs, "other": done - 1 - epochs}, Counter()
        for kind, samples in self.sampled.items():
            for seconds in samples:
                for stage in seconds:
                    steps[stage] += count[kind] / len(samples) * seconds[stage]
        # What the samples come to is an estimate, which may be more or less than there was.
        scale = (total - sum(self.whole.values())) / max(steps.total(), 1e-9)
        took = {stage: self.whole.get(stage, scale * steps[stage]) for stage in STAGES}
        return {stage: seconds for stage, seconds in took.items() if seconds > 0}

    def sentence(self, trainer):
        """`verdict` on the fit so far."""
        loader, facts = (
            trainer.train_loader,
            {"eval_every": trainer.eval_every or trainer.steps_per_epoch},
        )
        if isinstance(loader, HostLoader):
            facts |= {"workers": loader.workers.loader.num_workers}
            can_be = (
                getattr(loader.split, "tensors", None) is not None
            )  # resident: one of the user's own may lack it
            facts |= {"fits": can_be and loader.nbytes < devices.free_memory(trainer.device) / 2}
        elif isinstance(loader, DeviceLoader):
            augments = loader.augment.geometric or loader.augment.rest
            facts |= {"loader": "augmented" if augments else "resident"}
        else:
            facts |= {"loader": "decoded" if isinstance(loader, StreamedOnce) else "own"}
        saver = next(
            (callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)), None
        )
        return verdict(
            self.split(trainer),
            where="CPU" if trainer.device.type == "cpu" else "GPU",
            idle=sum(self.hosts) / max(1, len(self.hosts)),
            cores=launch.cores(),
            captured=trainer.execute is not graph.eagerly,
            batch_size=loader.batch_size,
            steps_per_epoch=trainer.steps_per_epoch,
            total_steps=trainer.total_steps,
            save_every=saver and reason_to_save(saver, trainer),
            **facts,
        )


def reason_to_save(saver, trainer):
    """(the setting, its value) that most checkpoints come from: evaluations too, each of which may be the best."""
    steps = saver.every or (saver.epochs and saver.epochs * trainer.steps_per_epoch)
    if (
        trainer.val_loader is not None
        and trainer.eval_every
        and (not steps or trainer.eval_every < steps)
    ):
        return "eval_every", trainer.eval_every
    keys = [(f"checkpoint.{key}", getattr(saver, key)) for key in ("every", "epochs", "minutes")]
    return next(((key, value) for key, value in keys if value), None)


def result_of(trainer):
    """What result.json says of the last fit: {stage: seconds}, and the sentence on them."""
    own = next((callback for callback in trainer.callbacks if isinstance(callback, Timing)), None)
    took = {stage: round(seconds, 6) for stage, seconds in own.took.items()} if own else {}
    return {"time": took, "speed": own and own.said} if took else {}


def verdict(
    seconds, *, where="CPU", idle=0.0, loader="streamed", workers=0, cores=1, fits=True, captured=False,
    batch_size=None, steps_per_epoch=sys.maxsize, total_steps=sys.maxsize, eval_every=1, save_every=None,
):  # fmt: skip
    """One sentence on {stage: seconds}: the one change that helps most and its setting, or that there is nothing to do.

    `idle`: in what share of the steps a device beside the CPU waited for Python. `loader`: whether the data is
    "resident" on the device, "augmented" there, "streamed" by that many `workers` though it `fits` or not, "decoded" in
    this run and resident then, or comes from a loader of the user's "own". `captured`: whether a step is one graph.
    `save_every`: the setting that says how often there are checkpoints, and its value. None for what was over within
    SOON.
    """
    total = sum(seconds.values())
    if total < SOON:
        return None
    share = {stage: seconds.get(stage, 0.0) / total for stage in STAGES}
    compute = sum(share[stage] for stage in ("forward", "backward", "optimizer", "step"))
    share |= {"fixed": share["optimizer"] + share["other"], "idle": idle * compute}
    names = [
        name for name in WORTH if (name, loader) != ("data", "resident")
    ]  # then it is work of the device's own
    worst = max(
        names, key=lambda name: (share[name] >= WORTH[name], share[name] - AIM.get(name, 0.0))
    )
    if share[worst] < WORTH[worst]:
        if (
            share["step"] > compute / 2 and not captured
        ):  # how much of it is the device's work, nobody has measured
            return f"the steps of this Trainer's own took {percent(compute)} of the time: profile=true says what in them"
        return f"compute bound: {percent(compute)} of the time is forward, backward and optimizer"
    aim = AIM.get(worst, 0.5)
    of, rest = f"{percent(share[worst])} of the time", max(0.01, 1 - share[worst])
    rarer = share[worst] / rest * (1 - aim) / aim
    growth = 2 ** math.floor(
        math.log2(min(2 * rarer, MOST_GROWTH, max(1, steps_per_epoch // FEWEST_STEPS)))
    )
    larger = f"set batch_size={batch_size * growth}" if batch_size else "set larger batches"
    if worst == "data":
        ways = [f"dataset.workers={cores}"] * (workers < cores) + ["dataset.resident=true"] * fits
        change = {
            "streamed": f"set {' or '.join(ways)}"
            if ways
            else "no setting helps, but smaller files or a faster disk",
            "own": f"give the DataLoader num_workers={cores} and persistent_workers=True",
            "augmented": "leave out some of dataset.augment",
            "decoded": "its images were decoded, which the next run finds done",
        }[loader]
        return f"the {where} waited {of} for data: {change}"
    if worst == "transfer":
        own = "give the DataLoader pin_memory=True, and send bytes instead of floats"
        ours = "set dataset.resident=true" if fits else "no setting helps, but smaller samples"
        change = own if loader == "own" else ours
        return f"the {where} waited {of} for batches to be copied to it: {change}"
    if worst == "evaluation":
        every = min(rounded_up(eval_every * rarer), total_steps)
        change = (
            f"set eval_every={every}" if every > eval_every else "make the validation part smaller"
        )
        return f"evaluations took {of}: {change}"
    if worst == "checkpoint":
        key, every = save_every or (None, 1)
        most = {
            "checkpoint.epochs": max(1, total_steps // steps_per_epoch),
            "checkpoint.minutes": 60,
            None: 1,
        }
        rarely = min(rounded_up(every * rarer), most.get(key, total_steps))
        change = f"set {key}={rarely}" if rarely > every else "that at the end has to be"
        return f"checkpoints took {of}: {change}"
    if worst == "logging":
        return f"loggers took {of}: leave out one of callbacks, or set a larger log_every"
    if worst == "idle":
        ways = [larger] * (growth >= 2) + ["set compile=graph"] * (not captured)
        change = " or ".join(ways) or "this data is too small for larger batches"
        return f"the {where} waited in {of} for Python to give it work: {change}"
    change = larger if growth >= 2 else "this data is too small for larger ones"
    return f"{of} went to the optimizer and the loop, which cost the same for any batch: {change}"


def percent(share):
    return f"{100 * share:.0f} %"


def rounded_up(number):
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 10 ** max(0, math.floor(math.log10(number)))
    return next(int(step * power) for step in (1, 2, 5, 10) if step * power >= number)


def named(marks):
    """The marks within a train_step, by what was called in which order."""
    stages = [stage for stage, _ in marks]
    if stages.count("optimizer") < 2:  # no scaler in between: nobody knows where its backward ended
        return [("step", mark) for _, mark in marks]
    # In front of the first forward there is no backward, and behind an unscale_ none either.
    for i, stage in enumerate(stages):
        if stage == "backward" and i == 0:
            stages[i] = "forward"
        if stage == "backward" and i and stages[i - 1] == "optimizer":
            stages[i] = "optimizer"
    return [(stage, mark) for stage, (_, mark) in zip(stages, marks, strict=True)]


@contextlib.contextmanager
def replaced(owner, name, around, *args):
    """Until the end, whoever calls this method of this object calls it within `around(*args)`."""
    method, own = getattr(owner, name), vars(owner).get(name)

    def timed(*given, **named):
        with around(*args):
            return method(*given, **named)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
