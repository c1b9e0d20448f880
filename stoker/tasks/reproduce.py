"""task=reproduce: train a run again from its saved config, and compare the two runs bit for bit."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from stoker.command import exit_codes, settings
from stoker.command.dotted import is_interpolation
from stoker.runs import directory, resume, saved_config
from stoker.runs.json_files import read_text
from stoker.runs.result import RunResult, finished
from stoker.runs.rows import read_rows
from stoker.trainer.errors import UserError

MOST_CAUSES = 12
MOST_DIFFERENCES = 3
UNRECORDED = "something that is not recorded: the processor, its threads or an untracked file"
OF_TIME = "/seconds"  # the suffix of entries that differ in every run


def again(cfg: DictConfig) -> DictConfig:
    """Return the config of the run directory `run`, changed to train again in a new folder."""
    if cfg.run is None:
        raise UserError("task=reproduce needs a run directory. Type run=DIR.")
    saved_config.load_config("run", cfg.run)
    result = finished(cfg.run)
    if result is None or result.stopped_by("time_limit") or result.stopped_by("pruned"):
        raise UserError(f"run={cfg.run}: this run has not finished, so it cannot be compared.")
    if cfg.run_dir is not None and Path(cfg.run_dir).resolve() == Path(cfg.run).resolve():
        raise UserError(
            f"run_dir={cfg.run_dir}: this is the run itself. Choose a different run_dir."
        )
    run_dir = cfg.run_dir or directory.claim("reproduced", Path(cfg.run).resolve().name)
    return saved_config.to_train_again(cfg, str(run_dir))


def compare(before: Path, now: Path) -> None:
    """Print whether two runs match bit for bit or, if not, what differs."""
    new = outcome(now)
    differences = list(differing(outcome(before), new))
    if not differences:
        weights = new[directory.WEIGHTS][:12]
        count = len(read_rows(now / directory.METRICS))
        print(f"same     bit for bit: {directory.WEIGHTS} (SHA-256 {weights}...) and {count} rows")
        return
    exit_codes.codes.append(exit_codes.DIFFERENT)
    print_lines("differs", differences[:MOST_DIFFERENCES])
    old = facts(before)
    new = facts(now)
    causes = list(differing(old, {name: new.get(name) for name in old}))
    print_lines("because", causes[:MOST_CAUSES] or [UNRECORDED])


def print_lines(name: str, lines: list[str]) -> None:
    """Print the lines below each other, with the name in front of the first line."""
    print(f"{name:<9}" + f"\n{' ' * 9}".join(lines))


def outcome(folder: Path) -> dict[str, Any]:
    """Return {name: value} for the weights, the logged rows and the test results of a run."""
    path = folder / directory.WEIGHTS
    weights = path.read_bytes() if path.is_file() else b""
    values: dict[str, Any] = {directory.WEIGHTS: hashlib.sha256(weights).hexdigest()}
    for number, row in enumerate(read_rows(folder / directory.METRICS), 1):
        values[f"{directory.METRICS}, line {number}"] = {
            name: value for name, value in row.items() if not name.endswith(OF_TIME)
        }
    return {**values, **RunResult.read(folder).tests()}


def facts(folder: Path) -> dict[str, Any]:
    """Return {name: value} for everything on record that affects the result of a run."""
    from stoker.trainer import checkpoint

    newest = checkpoint.newest(folder / "checkpoints")
    about = {} if newest is None else resume.about(newest[1])
    result = RunResult.read(folder)
    lines = read_text(folder / directory.PACKAGES).splitlines()
    packages = dict(line.split("==", 1) for line in lines if "==" in line)
    diff = read_text(folder / directory.CHANGES)
    values = saved_config.for_reading(about.get("config", {}))
    fixed = [key for key in values if not settings.may_differ(key)]
    return {
        **{key: values[key] for key in fixed if not is_interpolation(values[key])},
        "fingerprint of the data": about.get("data"),
        "processes": about.get("processes"),
        "device": result.device,
        "precision": result.precision,
        **(result.versions or {}),
        **packages,
        "git": result.git and result.git.revision,
        "SHA-256 of changes.diff": hashlib.sha256(diff.encode()).hexdigest()[:12],
    }


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield 'torch=2.15 (was 2.14)' for each key whose value differs."""
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            yield f"{key}={now.get(key)} (was {before.get(key)})"
