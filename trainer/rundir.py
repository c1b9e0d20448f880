"""The run directory: its name, what it continues, and the files that are written whole or not at all."""

import datetime
import json
import os
import platform
import shlex
from pathlib import Path

from omegaconf import OmegaConf

from trainer.cli import flat
from trainer.errors import UserError, did_you_mean

# Settings that may differ when a run is continued, since they change no weight.
HARMLESS = ("run_dir", "resume", "device", "strategy", "log_every", "task", "run", "trusted")
HARMLESS += ("dataset.workers", "dataset.resident", "dataset.root")


def unused(model, dataset):
    """runs/<date>-<model>-<dataset>, with a number where that is taken."""
    name = f"runs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{model}-{dataset}"
    return next(path for path in (name, *(f"{name}-{i}" for i in range(2, 1000))) if not Path(path).exists())


def to_resume(folder, resume, cfg):
    """The checkpoint file to go on from, or None:
    as `resume` says, and never with other settings than the run's own.
    """
    from trainer import checkpoint

    if resume not in ("auto", "never"):
        if not Path(resume).is_file():
            raise UserError(f"resume={resume}: there is no such file. Type auto, never, or a checkpoint file.")
        return resume
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={folder}: this is a file. Type the name of a folder.")
    if not checkpoint.files(folder / "checkpoints"):
        return None
    if resume == "never":
        raise UserError(f"run_dir={folder} has checkpoints, which resume=never would replace. Type another run_dir.")
    before, now = flat(load_config("run_dir", folder)), flat(cfg)
    other = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not key.startswith(HARMLESS)]
    if other:
        differences = ", ".join(f"{key}={now.get(key)} (was {before.get(key)})" for key in other[:5])
        what_to_type = "Type the settings it had to continue it, or another run_dir."
        raise UserError(f"run_dir={folder} holds a run with other settings: {differences}.\n{what_to_type}")
    return checkpoint.newest(folder / "checkpoints")[0]


def load_config(key, folder):
    """The config that a run was started with; UserError where `folder` is no run directory."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        hint = did_you_mean(folder, Path(folder).parent.glob("*"))
        raise UserError(f"{key}={folder}: there is no config.yaml in it, so it is no run directory.{hint}")
    return OmegaConf.load(path)


def command(overrides, *more):
    """`python train.py ...` with these settings, as a shell takes them;
    a later one replaces an earlier one of its key.
    """
    typed = {override.partition("=")[0]: override for override in [*overrides, *more]}
    return shlex.join(["python", "train.py", *typed.values()])


def write_json(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def versions():
    """What a result depends on, beside its config."""
    import hydra
    import torch

    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**system, "torch": torch.__version__, "hydra": hydra.__version__}
