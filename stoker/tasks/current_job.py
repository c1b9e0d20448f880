"""The job of this process: its task, its sweep if any, and its run directory."""

import time
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from stoker import configs
from stoker.command import arguments, processes
from stoker.runs import directory
from stoker.runs.result import finished

process_start = 0.0  # time.perf_counter() when the command started


def started_at() -> float:
    """Return the start time of the process or, in a sweep, the current time (in seconds)."""
    return time.perf_counter() if in_sweep() else process_start


def in_sweep() -> bool:
    """Return whether this process is running a job of a sweep."""
    is_multirun = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    return is_multirun or bool(processes.job())


def sweep_name() -> str | None:
    """Return the name of this job's sweep; None outside a sweep."""
    return folder_in_sweep().parent.name if in_sweep() else None


def folder_in_sweep() -> Path:
    """Return the folder of this job of a sweep."""
    job = processes.job()
    if job:
        return Path(job["folder"])
    sweep = HydraConfig.get().sweep
    return Path(sweep.dir, sweep.subdir)


def task_typed(cfg: DictConfig) -> str:
    """Return "task=plan" or "overfit=1" as it was typed; "" for a training run."""
    if cfg.task != "train":
        return f"task={cfg.task}"
    return f"overfit={cfg.overfit}" if cfg.overfit is not None else ""


def in_one_process(cfg: DictConfig) -> str:
    """Return "task=plan" or "debug=true" if it rules out several processes; otherwise ""."""
    return task_typed(cfg) or ("debug=true" if cfg.debug else "")


def is_finished(cfg: DictConfig) -> bool:
    """Return whether an earlier process of the same sweep finished this job."""
    may_be_finished = not task_typed(cfg) and cfg.resume != "never"
    return may_be_finished and finished(folder_in_sweep()) is not None


def typed_for_run() -> list[str]:
    """Return the typed settings without `task=`, for a command that trains."""
    return [override for override in arguments.typed() if not override.startswith("task=")]


def run_directory(cfg: DictConfig) -> str:
    """Return the job's folder in a sweep; otherwise `run_dir`, or a new folder in runs/."""
    if in_sweep():
        return str(folder_in_sweep())
    return str(cfg.run_dir or directory.claim(*names_of(cfg)))


def names_of(cfg: DictConfig) -> tuple[str, str]:
    """Return the names of the model and the data set, to use in the name of the run directory."""
    return name_of(cfg, "model"), name_of(cfg, "dataset")


def name_of(cfg: DictConfig, group: str) -> str:
    """Return the option chosen for a group, or the class name if another `_target_` was set."""
    choice = str(HydraConfig.get().runtime.choices[group])
    target = str(cfg[group]._target_)
    file: Any = configs.file_of(f"{group}/{choice.removesuffix('.yaml')}")
    usual = OmegaConf.select(OmegaConf.load(file), "_target_", default=target)
    return choice if target == usual else target.rpartition(".")[2]
