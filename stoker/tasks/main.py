"""The entry point of the command: check the config, run the task, and record failures."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from stoker import project
from stoker.command import arguments, exit_codes, invocation, processes, shell
from stoker.command.check import check_config
from stoker.command.contact import is_lost
from stoker.command.new_targets import drop_leftovers
from stoker.command.trust import TRUSTED, patterns
from stoker.runs import index, resume, saved_config
from stoker.runs.directory import CONFIG
from stoker.sweeps import jobs, launchers, progress
from stoker.tasks import current_job, running
from stoker.tasks.new import new
from stoker.tasks.redraw import redraw
from stoker.trainer import launch, stopping
from stoker.trainer.errors import NotFinite, UserError, first_line


def run(start: float) -> None:
    """Run the command line; `start` is the `time.perf_counter()` at which the process began."""
    current_job.process_start = start
    launchers.begin_job()
    command = {"new": new, "redraw": redraw}.get("".join(sys.argv[1:2]))
    exit_codes.run(functools.partial(command, sys.argv[2:]) if command else compose)


def compose() -> None:
    """Let Hydra compose the config of each job, and call `main` with it."""
    arguments.check_values(sys.argv[1:])
    trusted = (*TRUSTED, *project.current().trusted)
    hydra.main(
        config_path="pkg://stoker.configs",
        config_name="train",
        execution_whitelist=patterns(trusted, sys.argv[1:]),
    )(main)()


def main(cfg: DictConfig) -> None:
    """Check the config (without importing torch), and run its task. Hydra calls this for each job.

    The failure of a job ends its sweep only if sweep.on_error is stop.
    """
    try:
        if current_job.in_sweep() and launch.world_size() == 1:
            do_job(cfg)
        else:
            prepare(cfg)
            do(cfg)
    except Exception as error:
        failed(cfg, error)


def do_job(cfg: DictConfig) -> None:
    """Run a job of a sweep, unless it is already finished."""
    folder = current_job.run_directory(cfg)
    if current_job.is_finished(cfg):
        prepare(cfg)
        resume.check_same(f"run_dir={folder}", saved_config.load_config("run_dir", folder), cfg)
        return
    print(f"\njob {Path(folder).name}    {' '.join(arguments.typed())}", flush=True)
    prepare(cfg)
    if not current_job.task_typed(cfg):
        jobs.begin(folder)
    launchers.limit_threads()
    do(cfg)


def prepare(cfg: DictConfig) -> None:
    """Check the config, and remove arguments of targets that were replaced."""
    check_config(cfg)
    drop_leftovers(cfg)
    task = current_job.in_one_process(cfg)
    # task=reproduce may itself start several processes.
    reproduces = cfg.task == "reproduce" and invocation.is_started()
    if task and launch.world_size() > 1 and not reproduces:
        raise UserError(
            f"{task} runs in one process. Type {shell.command([])} instead of torchrun."
        )


def do(cfg: DictConfig) -> None:
    """Run the task, in several processes if the config says so."""
    if cfg.task == "reproduce":
        if current_job.in_sweep():
            raise UserError("task=reproduce repeats a single run. Remove -m.")
        from stoker.tasks.reproduce import again, compare

        config = again(cfg)
        if cfg.run_dir is None:
            sys.argv.append(shell.setting("run_dir", config.run_dir))  # for the other processes
        do(config)
        if launch.world_size() == 1:
            compare(Path(cfg.run), Path(config.run_dir))
        return
    several = processes.count(cfg.strategy, cfg.devices, cfg.device)
    if several > 1:
        start_processes(several, cfg)
        return
    name = cfg.task if cfg.overfit is None else "overfit"
    task = getattr(importlib.import_module(f"stoker.tasks.{name}"), name)
    with debugging() if cfg.debug else contextlib.nullcontext():
        task(cfg)


def failed(cfg: DictConfig, error: Exception) -> None:
    """Report an error, and end the process unless the sweep continues."""
    if exit_codes.is_interruption(error):
        raise KeyboardInterrupt from None
    code = exit_codes.report(error, functools.partial(leave_reason, cfg, error))
    is_sweep = progress.ends is not None  # whether this process also runs the other jobs
    stops = is_sweep and OmegaConf.select(cfg, "sweep.on_error") == "stop"
    if not current_job.in_sweep() or isinstance(error, BrokenPipeError) or stops:
        # The error itself is not raised, because Hydra would print another line above it.
        raise SystemExit(code) from error


@contextlib.contextmanager
def debugging() -> Iterator[None]:
    """Raise NotFinite if a gradient is nan, and show the line that caused it.

    Also wait for the GPU after each call, so that errors are raised by the call that caused them.
    """
    import torch

    from stoker.trainer import device

    device.wait_for_each_call()
    with torch.autograd.set_detect_anomaly(True):
        try:
            yield
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            raise NotFinite(
                f"{first_line(error)}\nThe traceback of the forward call, "
                "printed above, ends at the line that caused it."
            ) from error


def start_processes(several: int, cfg: DictConfig) -> None:
    """Run this program again in several processes, each with a rank."""
    task = current_job.in_one_process(cfg)
    if task:
        raise UserError(f"{task} runs in one process. Remove strategy and devices.")
    typed = sys.argv[1:]
    job = None
    if current_job.in_sweep():
        typed = [*arguments.settings_of_hydra(typed), *HydraConfig.get().overrides.task]
        job = {"folder": current_job.run_directory(cfg)}
    code = processes.start(several, typed, job)
    if code and job is None:
        raise SystemExit(code)
    if code > 128:
        stopping.received = code - 128
        raise KeyboardInterrupt
    if code:
        raise processes.JobFailed(f"the {several} processes ended with exit code {code}.", code)


def leave_reason(cfg: DictConfig, error: Exception, code: int) -> None:
    """Record in the run directory why a run failed after its first step, and write its report.

    For a job of a sweep, do this even if the job failed before training began.
    """
    folder = running.begun
    if current_job.in_sweep():
        folder = Path(current_job.run_directory(cfg))
        if code == exit_codes.IN_USE:
            return
    elif not folder or not (folder / CONFIG).is_file():
        return  # nothing was trained, or rank 0 is on another machine
    elif launch.world_size() > 1 and is_lost(error):
        return  # a run that lost a process can be resumed like a killed one
    running.leave_reason(folder, error, code, draws=bool(cfg.report))
    index.update(folder)
