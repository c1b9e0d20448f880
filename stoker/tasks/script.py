"""`stoker.fit`: train in a run directory from a script."""

import contextlib
import functools
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import yaml

import __main__
from stoker.command import exit_codes, invocation, signals
from stoker.data.record import Data
from stoker.runs import directory, index, rows
from stoker.runs.loggers import JSONL
from stoker.runs.saved_config import SCRIPT
from stoker.tasks import running
from stoker.tasks.parts import Parts, in_order
from stoker.trainer import launch, misuse
from stoker.trainer.callbacks import EMA, Checkpoint
from stoker.trainer.errors import UserError
from stoker.trainer.history import History
from stoker.trainer.loading import length_of
from stoker.trainer.state import WAYS
from stoker.trainer.trainer import Trainer


def fit(
    trainer: Trainer,
    train_loader: Any,
    val_loader: Any = None,
    test_loader: Any = None,
    *,
    run_dir: str | Path,
) -> History:
    """Train in a run directory, as the command does; return the rows of the whole run.

    This function writes metrics.jsonl and the checkpoints, and at the end result.json,
    model.safetensors, model.md and the report. Afterward, the trainer has the tested weights: the
    best ones on the validation set. If you call `fit` again with the same settings, it resumes from
    the newest checkpoint, or only repeats the test if the run has ended. Ctrl-C and SIGTERM save a
    checkpoint after the current step, and end the process.

    To choose when to save and which weights are best, add a `Checkpoint` to the Trainer's
    callbacks; its folder must be `run_dir`/checkpoints. With several processes, rank 0 writes the
    files.

    Raises:
        UserError: The directory holds a run with different settings, or is in use.
        TrainingError: Training failed. result.json says why, as for any other error after the
            first step.
        SystemExit: A signal stopped the run.
    """
    started = time.perf_counter()
    misuse.check_fit(trainer, train_loader, val_loader)
    if test_loader is not None:
        misuse.check_loader(trainer, test_loader, "evaluate")
    folder = Path(run_dir)
    with (
        index.held(folder) if launch.is_first() else contextlib.nullcontext(),
        signals.for_script(command()),
    ):
        outer = trainer.callbacks
        running.begun = None
        try:
            train(trainer, (train_loader, val_loader, test_loader), folder, started)
        except Exception as error:
            is_begun = running.begun and (folder / directory.CONFIG).is_file()
            if launch.is_first() and is_begun:
                code = exit_codes.code_of(error)
                running.leave_reason(folder, error, code, draws=True, script=command())
            raise
        finally:
            trainer.callbacks = outer
    if not launch.is_first():
        return trainer.history
    history = History()
    for row in rows.read_rows(folder / directory.METRICS):
        history.add(numbers(row))
    return history


def train(trainer: Trainer, loaders: tuple[Any, Any, Any], folder: Path, started: float) -> None:
    """Train in a run directory that this process has locked."""
    saver = saver_of(trainer, folder)
    config = settings_of(trainer, loaders[0], saver)
    run = running.Run(folder, saver, started, script=command())
    run.begin(config)
    if run.state is not None and launch.is_first():
        print(f"resumed  {folder} at step {run.state['step']:,}")
    name = Path(getattr(__main__, "__file__", "python")).stem
    data = Data(name, *loaders, kind="other")
    run.describe(config, data)
    files = run.files(yaml.safe_dump(config, sort_keys=False))
    others = [callback for callback in trainer.callbacks if callback is not saver]
    trainer.callbacks = in_order([JSONL(folder / directory.METRICS), *others, *files])
    run.train(Parts(trainer, data, loaders))
    run.close()


def command() -> str:
    """Return the command that started this script."""
    if not hasattr(__main__, "__file__"):
        return "python"  # a notebook or an interactive session
    words = sys.argv
    if __main__.__spec__ is not None:
        words = ["-m", __main__.__spec__.name.removesuffix(".__main__"), *sys.argv[1:]]
    return shlex.join(invocation.command([invocation.python(), *words]))


def saver_of(trainer: Trainer, folder: Path) -> Checkpoint:
    """Return the callbacks' Checkpoint, or a new one; raise UserError if its folder is wrong."""
    place = folder / "checkpoints"
    savers = (callback for callback in trainer.callbacks if isinstance(callback, Checkpoint))
    saver = next(savers, Checkpoint(place))
    if saver.folder.resolve() != place.resolve():
        raise UserError(
            f"run_dir={folder}: the Checkpoint callback saves to {saver.folder}. "
            f"Set its folder to {str(place)!r}, or remove the callback."
        )
    return saver


def settings_of(trainer: Trainer, train_loader: Any, saver: Checkpoint) -> dict[str, Any]:
    """Return the settings for config.yaml. A resumed run must have the same settings.

    A setting that the command also has gets the same key. The shapes of the model are not included,
    because the Trainer compares them.
    """
    averages = (callback.decay for callback in trainer.callbacks if isinstance(callback, EMA))
    settings = {
        SCRIPT: command(),
        "model": part(trainer.module),
        "loss": part(trainer.loss),
        "optimizer": optimizer_settings(trainer.optimizer),
        "scheduler": part(trainer.make_scheduler),
        "epochs": trainer.epochs,
        "max_steps": trainer.max_steps,
        "batch_size": getattr(train_loader, "batch_size", None),
        "steps_per_epoch": length_of(train_loader),
        "grad_accum_steps": trainer.splitter.parts,
        "micro_batch": "auto" if trainer.splitter.adapts else trainer.splitter.size,
        "max_grad_norm": trainer.max_grad_norm,
        "precision": trainer.precision,
        "ema": next(averages, None),
        "seed": trainer.seed,
        "device": str(trainer.device),
        "strategy": trainer.strategy,
        "log_every": trainer.log_every,
        "eval_every": trainer.eval_every,
        "monitor": saver.monitor,
        "monitor_mode": saver.mode,
    }
    return dict(plain(settings))


def optimizer_settings(optimizer: Any) -> dict[str, Any] | None:
    """Return the class of an optimizer, its settings, and the settings that its groups override."""
    settings = part(optimizer)
    if settings is None:
        return None
    defaults = {key: plain(value) for key, value in optimizer.defaults.items() if key not in WAYS}
    groups = []
    for group in optimizer.param_groups:
        values = {**group, "lr": group.get("initial_lr", group.get("lr"))}  # before the schedule
        typed = {key: plain(values.get(key)) for key in defaults}
        groups.append({key: typed[key] for key in defaults if typed[key] != defaults[key]})
    return {**settings, **defaults, "groups": groups}


def part(value: Any) -> dict[str, Any] | None:
    """Return the class or function of a part as `_target_`, and the arguments of a partial."""
    if value is None:
        return None
    arguments: dict[str, Any] = {}
    if isinstance(value, functools.partial):
        arguments = value.keywords
        value = value.func
    kind = value if hasattr(value, "__qualname__") else type(value)
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **arguments}


def plain(value: Any) -> Any:
    """Return a value in the form of a config: numbers, strings, and lists and dicts of these.

    Any other object is replaced by the name of its class.
    """
    return json.loads(json.dumps(value, default=simple, skipkeys=True))


def simple(value: Any) -> Any:
    """Return a scalar of numpy or torch as a number, and the class name of any other object."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return type(value).__name__


def numbers(row: rows.Row) -> rows.Row:
    """Return a row of metrics.jsonl as `fit` returns it: nan instead of null, and no lists."""
    values = {name: value for name, value in row.items() if not isinstance(value, list)}
    return {name: math.nan if value is None else value for name, value in values.items()}
