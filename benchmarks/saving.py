"""The cost of checkpoints: the default job with and without them, and how long large ones delay training."""

import contextlib
import functools
import itertools
import os
import statistics
import sys
import time

import torch

from benchmarks.ours import configured
from stoker import Trainer
from stoker.trainer.callbacks import Callback, Checkpoint

MIB = {"1mb": 1, "100mb": 100, "1gb": 1024}
SAVES = 3  # number of large checkpoints


class Timed(Checkpoint):
    """Record when each save begins and when its file is in place."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.begun, self.written = [], []

    def save(self, trainer):
        self.begun.append(time.perf_counter())
        super().save(trainer)

    def write(self, *args):
        super().write(*args)
        self.written.append(time.perf_counter())


class Ticks(Callback):
    """Record the time after each step, before the callbacks that come later in the list."""

    def __init__(self):
        self.times = []

    def on_step_end(self, trainer):
        self.times.append(time.perf_counter())


def default(job, clock):
    """Run the default job, as `python train.py` builds it. Variant: saving (with the config's checkpoints)."""
    settings = [
        f"epochs={job.epochs}",
        f"seed={job.seed}",
        f"device={job.device}",
        f"run_dir={job.scratch}/run",
    ]
    savers = []

    def callbacks(cfg):
        if "saving" in job.variants:
            savers.append(Timed(os.path.join(job.scratch, "run", "checkpoints"), **cfg.checkpoint))
        return savers

    with configured(settings, callbacks) as parts:
        trainer = parts.trainer
        train_loader, val_loader, _ = parts.loaders
        start, start_cpu = time.perf_counter(), time.thread_time()
        trainer.fit(train_loader, val_loader)
        fit_s, cpu_s = time.perf_counter() - start, time.thread_time() - start_cpu
        return {
            "fit_s": fit_s,
            "cpu_s": cpu_s,
            "step_us": 1e6 * fit_s / trainer.step,
            "saves": sum(len(saver.begun) for saver in savers),
        }


class Ballast(torch.nn.Module):
    """A small network with `mib` MiB of additional, unused weights."""

    def __init__(self, mib):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
        )
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(2**18), requires_grad=False) for _ in range(mib)
        )

    def forward(self, inputs):
        return self.layers(inputs)


def large(job, clock, every=1500):
    """Train with steps of a few milliseconds, and save a checkpoint of the variant's size every `every` steps."""
    [mib] = [MIB[variant] for variant in job.variants if variant in MIB]
    torch.manual_seed(job.seed)
    batch = (torch.randn(256, 256), torch.randint(0, 10, (256,)))
    ticks, saver = (
        Ticks(),
        Timed(os.path.join(job.scratch, "checkpoints"), every=every, epochs=None),
    )
    with (
        Trainer(
            Ballast(mib),
            loss=torch.nn.CrossEntropyLoss(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.01),
            callbacks=[ticks, saver],
            max_steps=SAVES * every + every // 2,
            device=job.device,
            log_every=10**9,
        ) as trainer,
        contextlib.redirect_stdout(sys.stderr),
    ):
        trainer.fit([batch] * ((SAVES + 1) * every))
    return held_up(ticks.times, saver.begun[:SAVES], saver.written[:SAVES])


def held_up(times, begun, written):
    """Return medians over the saves: the longest wait of a step, the total wait, and the time until the file is in place.

    The wait of a step is the time it takes beyond the median step.
    """
    gaps = [(start, end - start) for start, end in itertools.pairwise(times)]
    usual = statistics.median(gap for _, gap in gaps)
    waits = [
        [gap - usual for start, gap in gaps if begin - usual < start < end]
        for begin, end in zip(begun, written, strict=True)
    ]
    return {
        "blocked_s": statistics.median(max(wait) for wait in waits),
        "delayed_s": statistics.median(sum(wait) for wait in waits),
        "written_s": statistics.median(
            end - begin for begin, end in zip(begun, written, strict=True)
        ),
        "step_us": 1e6 * usual,
    }
