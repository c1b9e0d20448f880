"""The run directory: its name, what it continues, and the files that are written whole or not at all."""

import atexit
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import shlex
from pathlib import Path

from omegaconf import OmegaConf

from trainer import files
from trainer.cli import flat
from trainer.errors import UserError, did_you_mean

# Settings that may differ when a run is continued.
HARMLESS = ("run_dir", "resume", "device", "strategy", "log_every", "task", "run", "trusted", "max_minutes")
HARMLESS += ("eval_batch_size", "checkpoint.", "dataset.workers", "dataset.resident", "dataset.root")


def claim(model, dataset):
    """Makes runs/<date>-<model>-<dataset>, with a number where that is taken, also by a run of the same second."""
    name = f"runs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{model}-{dataset}"
    for i in itertools.count(1):
        path = Path(f"{name}-{i}" if i > 1 else name)
        if make(path):
            return str(path)


def make(folder):
    """Makes the folder, and gives whether it was not there; UserError where nothing can be written into it.

    What is still empty of it at the end is removed: a mistake that is found before the training leaves nothing behind.
    """
    parts = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        parts = []
    except OSError as error:
        reason = f"it cannot be made ({error.strerror})"
        raise UserError(f"run_dir={folder}: {reason}. Type another run_dir.") from None
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"run_dir={folder}: this is a file or cannot be written. Type another run_dir.")
    atexit.register(remove_empty, parts)
    return bool(parts)


def seconds_before(folder, result):
    """The seconds of result.json where the run was complete already, and this one has only looked at it; else None."""
    path = folder / "result.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return before.get("seconds") if before.get("steps") == result["steps"] == result["total_steps"] else None


def remove_empty(folders):
    """Removes those of the folders, the inner ones first, into which nothing was written."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def to_resume(folder, resume, cfg):
    """The checkpoint file to go on from, or None: as `resume` says, never with other settings than the run's own."""
    from trainer import checkpoint

    if resume not in ("auto", "never"):
        if not isinstance(resume, str) or not Path(resume).is_file():
            raise UserError(f"resume={resume}: there is no such file. Type auto, never, or a checkpoint file.")
        try:
            checkpoint.load(resume)
        except checkpoint.DamagedCheckpoint as error:
            raise UserError(f"resume={resume}: {error}") from None
        run = Path(resume).absolute().parents[1]  # RUN/checkpoints/FILE, where the file still lies in its run
        if (run / "config.yaml").is_file():
            check_same(f"resume={resume}", load_config("resume", run), cfg, ("epochs", "max_steps", "patience"))
        return resume
    if not checkpoint.files(folder / "checkpoints"):
        return None
    if resume == "never":
        raise UserError(f"run_dir={folder} has checkpoints, which resume=never would replace. Type another run_dir.")
    check_same(f"run_dir={folder}", load_config("run_dir", folder), cfg)
    return checkpoint.newest(folder / "checkpoints")[0]


def check_same(what, before, now, also=()):
    """UserError where two configs differ in more than what is harmless and what `also` may differ."""
    harmless = (*HARMLESS, *also)
    before, now = flat(before), flat(now)
    other = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not key.startswith(harmless)]
    if other:
        differences = ", ".join(f"{key}={now.get(key)} (was {before.get(key)})" for key in other[:5])
        what_to_type = "Type the settings it had to continue it; for a new run, another run_dir and no resume."
        raise UserError(f"{what} holds a run with other settings: {differences}.\n{what_to_type}")


def load_config(key, folder):
    """The config that a run was started with; UserError where `folder` is no run directory."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        hint = did_you_mean(folder, (other for other in Path(folder).parent.glob("*") if str(other) != str(folder)))
        if jobs := sorted(Path(folder).glob("*/config.yaml")):
            hint = f" It is a sweep: type {key}={jobs[0].parent} or another of its {len(jobs)} jobs."
        raise UserError(f"{key}={folder}: there is no config.yaml in it, so it is no run directory.{hint}")
    return OmegaConf.load(path)


def command(overrides, *more):
    """`python train.py ...` with these settings, as a shell takes them; of each key the last one."""
    typed = {override.partition("=")[0]: override for override in [*overrides, *more]}
    return shlex.join(["python", "train.py", *typed.values()])


def result_of(trainer, saver):
    """What result.json says of a finished fit, beside its metrics."""
    from trainer import summary

    best = saver.best and {"name": saver.name, "mode": "max" if saver.sign > 0 else "min", **saver.best}
    length = {"steps": trainer.step, "total_steps": trainer.total_steps, "stopped": trainer.stop_reason}
    machine = {"device": str(trainer.device), "precision": summary.precision(trainer), "versions": versions()}
    parameters = sum(p.numel() for p in trainer.module.parameters())
    return {"best": best, **length, **machine, "parameters": parameters, "memory_mib": trainer.memory_report()}


def last_rows(folder):
    """The last value of each number in metrics.jsonl, and the speed over all of it."""
    from trainer.loggers import read_rows

    rows = read_rows(folder / "metrics.jsonl")
    samples, seconds = (sum(row.get(name) or 0 for row in rows) for name in ("train/samples", "train/seconds"))
    last = {name: value for row in rows for name, value in row.items()}
    return {**last, "samples_per_second": round(samples / seconds) if seconds else None}


def closing_lines(folder, result, packages):
    """The lines that end a run: the best, the test, the time, and what to type next."""
    from trainer.summary import number, numbers, seconds

    if best := result["best"]:
        yield f"best     {best['name']} {number(best['value'])} at step {best['step']:,}"
    if shown := numbers({name: value for name, value in result.items() if name.startswith("test/")}):
        yield f"test     {shown}"
    speed = result["samples_per_second"]
    yield f"time     {seconds(result['seconds'])}{f', with {speed:,} samples/s in training' if speed else ''}"
    yield f"run      {folder}"
    trusted = [f"trusted=[{','.join(packages)}]"] if packages else []
    yield f"         {command(['task=evaluate', f'run={folder}', *trusted])}"
    if result["steps"] < result["total_steps"]:
        yield f"         {command(result['overrides'], f'run_dir={folder}')}"


def write_json(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial:
        Path(partial).write_text(json.dumps(finite(contents), indent=2) + "\n", encoding="utf-8")


def finite(value):
    """The value with null for the numbers that JSON has not: nan and the infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions():
    """What a result depends on, beside its config."""
    import hydra
    import torch

    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**system, "torch": torch.__version__, "hydra": hydra.__version__}
