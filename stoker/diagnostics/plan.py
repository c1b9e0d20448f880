"""What a run will take, found out by a few real steps: memory, disk, time; and its schedule as a small picture."""

import contextlib
import itertools
import math
import sys
import time
import warnings
from dataclasses import dataclass

import torch

from stoker.trainer import checkpoint, graph, schedules, summary
from stoker.trainer import device as devices
from stoker.trainer.batch import entries
from stoker.trainer.callbacks import EMA, Callback, Lookahead
from stoker.trainer.loading import resident_bytes
from stoker.trainer.readable import duration, seconds

WARMUP = graph.WARMUP  # steps in which kernels are chosen and the optimizer makes its state
STEPS, LONG, MOST = (
    10,
    1.0,
    200,
)  # steps that are timed at least; more of them up to so many seconds, or so many steps
BATCHES = 10  # of an evaluation
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"
WIDTH = 60  # letters of the picture


@dataclass
class Found:
    """What was measured: seconds, MiB, and the rate of each step of the picture, {step: rate} from step 1 on."""

    steps: int  # of the whole run
    timed: int
    first: float  # the first step beyond a usual one: compilation, the choice of kernels
    step: float
    evaluation: float  # of the validation part
    test: float
    copy: float  # of the state, for a checkpoint
    checkpoint: float
    memory: dict
    rates: dict


class Watch(Callback):
    """Times steps after the first ones, measures what one keeps for its backward pass, and ends the fit.

    The step that is measured has a copy of the state beside it, as one has while a checkpoint is written: there is one
    `every` so many steps, and at the end. And the largest weight once more: what the copies of a run give back is not
    always in one piece, and its peak was so much higher, twice that at the most (12 runs on a slow disk).
    """

    def __init__(self, every):
        self.every, self.copy = every, None

    def on_fit_start(self, trainer):
        for line in summary.plan(trainer):
            print(line, flush=True)
        self.timed, self.steps = 0, trainer.total_steps
        self.weights = {
            parameter.untyped_storage().data_ptr() for parameter in trainer.module.parameters()
        }
        self.kept, self.most_kept, self.backward = (
            {},
            0,
            False,
        )  # bytes for a backward pass, by their place
        self.settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in trainer.optimizer.param_groups
        ]
        self.seeing = contextlib.ExitStack()
        self.begun = self.start = time.perf_counter()
        self.seconds = self.first = 0.0

    def on_step_end(self, trainer):
        self.seeing.close()
        self.copy = None
        if trainer.step == WARMUP - 1 and self.every < trainer.total_steps:
            largest = max(parameter.nbytes for parameter in trainer.module.parameters())
            self.copy = (
                checkpoint.copy(trainer.state_dict()),
                torch.ones(largest, dtype=torch.uint8),
            )
        if (
            trainer.step == WARMUP - 1 and trainer.module._compiled_call_impl is None
        ):  # or another graph is compiled
            self.seeing.enter_context(torch.autograd.graph.saved_tensors_hooks(self.keep, self.use))
        count = trainer.step - WARMUP
        if (
            trainer.step == 1
            or count == 0
            or (count > 0 and count % STEPS == 0)
            or trainer.step == trainer.total_steps
        ):
            devices.synchronize(trainer.device)
            now = time.perf_counter()
            if trainer.step == 1:
                self.first = now - self.start
            if count > 0 or trainer.step == trainer.total_steps:
                self.timed = count if count > 0 else trainer.step
                self.seconds = (now - self.begun) / self.timed
            if count == 0 and trainer.step < trainer.total_steps:
                self.begun = now
            if count >= MOST or (count >= STEPS and now - self.begun >= LONG):
                trainer.stop("planned")

    def on_fit_end(self, trainer):
        self.seeing.close()

    def keep(self, tensor):
        if self.backward:  # the next micro-batch begins, and what the one before it kept is gone
            self.kept, self.backward = {}, False
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.kept[storage.data_ptr()] = storage.nbytes()
            self.most_kept = max(self.most_kept, sum(self.kept.values()))
        return tensor

    def use(self, tensor):
        self.backward = True
        return tensor


def look(trainer, train_loader, val_loader=None, test_loader=None, every=math.inf):
    """Trains a few steps, without the callbacks but for averages of weights, and gives what was Found.

    `every`: how many steps the run has between two checkpoints, one at its end being what each has. The trainer is of
    no more use after this: its weights are those after these steps.
    """
    watch = Watch(every)
    averages = [
        callback for callback in trainer.callbacks if isinstance(callback, (EMA, Lookahead))
    ]
    trainer.callbacks = [*averages, watch]
    trainer.fit(train_loader)
    evaluation, test = (seconds_of(trainer, loader) for loader in (val_loader, test_loader))
    start = time.perf_counter()
    state = checkpoint.copy(trainer.state_dict())
    copy = time.perf_counter() - start
    found = summary.memory_of_a_step(trainer)
    memory = {part: found[part] for part in ("parameters", "gradients", "optimizer")}
    memory |= {"data": resident_bytes(train_loader, val_loader) / devices.MIB}
    memory |= {"activations": watch.most_kept / devices.MIB} if watch.most_kept else {}
    memory |= (
        {"averages": mib_of([average.state_dict() for average in averages])} if averages else {}
    )
    memory |= {"a checkpoint's copy": mib_of(state)} if trainer.device.type == "cpu" else {}
    memory |= {"peak": found["peak"]}
    return Found(
        steps=watch.steps,
        timed=watch.timed,
        first=max(0.0, watch.first - watch.seconds),
        step=watch.seconds,
        evaluation=evaluation,
        test=test,
        copy=copy,
        checkpoint=mib_of(state),
        memory=memory,
        rates=rates(trainer, watch.settings, watch.steps),
    )


def mib_of(state):
    """MiB of all tensors in a nesting of them."""
    return summary.mib(tensor for _, tensor in entries(state))


def seconds_of(trainer, loader):
    """How long an evaluation takes on all batches of the loader, by some of them; 0 without a loader."""
    if loader is None:
        return 0.0
    trainer.evaluate(itertools.islice(iter(loader), 1))
    count = min(BATCHES, len(loader))
    start = time.perf_counter()
    trainer.evaluate(
        itertools.islice(iter(loader), count)
    )  # ends with the numbers on the host: the device is done
    return (time.perf_counter() - start) / count * len(loader)


def rates(trainer, before, steps):
    """{step: the first group's rate} of WIDTH steps of a schedule, or of all; `before` is what the groups began with.

    Empty where it is too long to be gone through.
    """
    for group, settings in zip(trainer.optimizer.param_groups, before, strict=True):
        for key in set(group) - {"params", *settings}:
            del group[key]
        group |= settings
    with warnings.catch_warnings():  # torch's schedulers miss the optimizer's steps
        warnings.simplefilter("ignore")
        scheduler = schedules.build(trainer.make_scheduler, trainer.optimizer, steps)
        shown = sorted({round(i * (steps - 1) / (WIDTH - 1)) for i in range(WIDTH)})
        if isinstance(scheduler, schedules.Schedule):
            height = trainer.optimizer.param_groups[0]["initial_lr"]
            top = max(shown, key=scheduler.factor)
            nearby = range(max(0, top - steps // WIDTH - 1), min(steps, top + steps // WIDTH + 2))
            top = max(nearby, key=scheduler.factor) if len(nearby) < 10**5 else top
            return {step + 1: height * scheduler.factor(step) for step in sorted({*shown, top})}
        found = {}
        for step in range(steps if steps <= 10**5 else 0):
            found[step + 1] = float(scheduler.get_last_lr()[0])
            scheduler.step()
        return found


def picture(values, width=WIDTH, encoding="utf-8"):
    """The values as a line of blocks, the highest one being full: at most `width` of them, evenly spaced."""
    width = min(width, len(values))
    values = [values[round(i * (len(values) - 1) / max(1, width - 1))] for i in range(width)]
    highest = max(values)
    if not highest > 0 or not math.isfinite(highest):
        return ""
    text = "".join(BLOCKS[min(7, int(8 * max(0.0, value) / highest))] for value in values)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(str.maketrans(BLOCKS, PLAIN))
    return text


def lines(found, started, evaluations, saves, keep, minutes=None):
    """The lines of the plan behind those that open each run.

    `started`: seconds until the first step; `evaluations` and `saves`: how many the run has; `keep`: checkpoints;
    `minutes`: after which it stops.
    """
    if found.rates:
        steps, values = list(found.rates), list(found.rates.values())
        top = steps[values.index(max(values))]
        said = {1: "at step 1", top: f"at step {top:,}", steps[-1]: f"at step {steps[-1]:,}"}
        named = ", ".join(f"{found.rates[step]:.3g} {text}" for step, text in sorted(said.items()))
        yield f"schedule {picture(values, encoding=getattr(sys.stdout, 'encoding', None) or 'utf-8')}"
        yield f"         lr {named}"
    parts = ", ".join(
        f"{name} {size:,.1f}" for name, size in found.memory.items() if name != "peak"
    )
    peak = found.memory["peak"]
    if math.isnan(peak):
        peak = sum(size for name, size in found.memory.items() if name != "peak")
    yield f"memory   {peak:,.0f} MiB at the peak: {parts} MiB; the rest is Python and PyTorch"
    size, kept = found.checkpoint, f"the last {keep} and the best"
    weights = found.memory["parameters"]
    yield f"disk     {size:,.1f} MiB a checkpoint, of which {kept} stay; {weights:,.1f} MiB of weights"
    yield from time_lines(found, started, evaluations, saves, minutes)


def time_lines(found, started, evaluations, saves, minutes):
    """The lines that say how long it takes, and of what that is the sum."""
    parts = {
        "to the first step": started,
        "more for that one": found.first,
        f"of {count(found.steps, 'step')} ({duration(found.step)} each)": found.steps * found.step,
        f"of {count(evaluations, 'evaluation')}": evaluations * found.evaluation,
        f"of {count(saves, 'checkpoint')}": saves * found.copy,
        "of the test": found.test,
    }
    total, limit = sum(parts.values()), 60 * (minutes or math.inf)
    training = total - started - found.test
    yield f"time     about {seconds(total - max(0.0, training - limit))}, by {count(found.timed, 'step')} of it:"
    shown = [f"{seconds(value)} {text}" for text, value in parts.items() if value >= 0.05]
    yield f"         {', '.join(shown) or 'next to nothing'}"
    if training > limit:
        last = found.steps * limit / training
        yield f"         of which max_minutes={minutes:g} is the end at about step {last:,.0f}"


def count(number, what):
    return f"{number:,} {what}{'s' * (number != 1)}"
