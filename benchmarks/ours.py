"""Stoker's Trainer, with its own callbacks."""

import contextlib
import json
import os
import time

import torch

from benchmarks import work
from stoker import Trainer
from stoker.command.tuning import few_threads, tune_process
from stoker.data.loader import make_loaders
from stoker.diagnostics.timing import Timing
from stoker.runs.loggers import JSONL
from stoker.trainer.callbacks import Callback, Checkpoint, NaNGuard, Progress
from stoker.trainer.metrics import Accuracy


class Watch(Callback):
    """Report steps and evaluations to the clock."""

    def __init__(self, clock):
        self.clock = clock

    def on_step_end(self, trainer):
        self.clock.step()

    def on_eval_start(self, trainer):
        self.clock.evaluating()

    def on_log(self, trainer, row):
        if "val/acc" in row:
            self.clock.evaluated(row["val/acc"], row["val/loss"])


class FirstStep(Callback):
    """Print the time of the first row, which is the time of the first step if a run has only one step."""

    def on_log(self, trainer, row):
        if "train/loss" in row:
            print("first step", time.time(), flush=True)


def ours(job, clock):
    """Train with Stoker. Variants: writing (rows and checkpoints, like train.py), timed, streamed, and Trainer arguments as key=value."""
    clock.begin()
    if {"ready", "one"} & set(job.variants):
        train, val = work.loaders(job)
    else:
        (train, val, _), _ = make_loaders(
            work.read(job),
            batch_size=job.batch_size,
            eval_batch_size=work.EVAL_BATCH,
            device=job.device,
            seed=job.seed,
            augment=[{"crop": 4}, "flip"] if job.work in work.PHOTOGRAPHS else [],
            resident=False if "streamed" in job.variants else "auto",
        )
    clock.steps = len(train)
    if "streamed" not in job.variants:
        clock.data_mib = sum(getattr(loader, "nbytes", 0) for loader in (train, val)) / 2**20
    writers = [
        JSONL(os.path.join(job.scratch, "metrics.jsonl")),
        Checkpoint(os.path.join(job.scratch, "checkpoints")),
    ]
    extras = (writers if "writing" in job.variants else []) + (
        [Timing()] if "timed" in job.variants else []
    )
    more = variant_settings(job)
    tunings = more.pop("tune", ["allocator", "threads"])
    tune_process(torch.device(job.device), tunings)  # as the command does
    with Trainer(
        work.model(job),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=work.optimizer(job),
        metrics={"acc": Accuracy()},
        callbacks=[Watch(clock), Progress(), NaNGuard(), *extras],
        epochs=job.epochs,
        device=job.device,
        precision=job.precision,
        seed=job.seed,
        **more,
    ) as trainer:
        with few_threads(trainer.module, job.batch_size if "threads" in tunings else None):
            trainer.fit(train, val)
        return trainer.module


@contextlib.contextmanager
def configured(settings, callbacks=lambda cfg: []):
    """Yield the parts that `python train.py` builds from these settings, and close them at the end.

    `callbacks` returns callbacks to add to those of the config.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from stoker import configs
    from stoker.command import trust
    from stoker.tasks.parts import building

    with (
        hydra.initialize_config_dir(str(configs.FOLDER)),
        hydra.utils.execution_whitelist(trust.patterns(trust.TRUSTED, [])),
    ):
        cfg = hydra.compose("train", settings, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        with building(cfg, callbacks(cfg)) as parts:
            yield parts


def variant_settings(job):
    """Return the Trainer arguments among the variants."""
    pairs = [variant.split("=") for variant in job.variants if "=" in variant]
    return {key: plain(value) for key, value in pairs}


def plain(text):
    """Return a JSON value, such as a number or true; any other text stays a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
