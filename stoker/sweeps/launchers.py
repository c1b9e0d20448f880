"""Run the jobs of a sweep on this machine: one at a time, or several in separate processes."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher  # private: it runs the jobs
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from stoker.command import arguments, exit_codes, invocation, processes, settings, signals
from stoker.runs.directory import make
from stoker.runs.result import RunResult, write_failure
from stoker.sweeps import progress
from stoker.sweeps.jobs import Job, overrides_in
from stoker.trainer import stopping
from stoker.trainer.errors import UserError
from stoker.trainer.launch import cores

SLURM = "submitit_slurm"


def jobs_at_once(at_once: int | str, device: str) -> int:
    """Return how many jobs run at once. "auto" means one per GPU or, without GPUs, one per core."""
    if at_once == "auto":
        return processes.count_gpus(device) or cores()
    return int(at_once)


def trials_at_once(config: DictConfig) -> int:
    """Return how many trials a search proposes at once: as many as run in parallel."""
    if config.hydra.runtime.choices["hydra/launcher"] == SLURM:
        return int(config.hydra.launcher.array_parallelism)
    return jobs_at_once(config.sweep.at_once, config.device)


def check(config: DictConfig) -> None:
    """Register `Local`, and raise UserError for launchers other than `Local` and Slurm's."""
    Plugins.instance().register(Local)  # on its own, Hydra only finds the ones in hydra_plugins
    at_once = settings.check("sweep.at_once", config.sweep.at_once)
    launcher = config.hydra.runtime.choices["hydra/launcher"]
    if launcher != "local" and at_once != 1:
        raise UserError(
            f"sweep.at_once={at_once}: hydra/launcher={launcher} does not support this key. "
            "Remove hydra/launcher to run jobs on this machine."
        )
    if launcher not in ("local", SLURM):
        raise UserError(
            f"hydra/launcher={launcher}: choose local or {SLURM}. "
            "To run several jobs at once on this machine, type sweep.at_once=N."
        )
    if launcher == SLURM:
        check_installed()


def check_installed() -> None:
    """Raise UserError if Hydra's plugin for submitit is not installed."""
    plugin = None
    with contextlib.suppress(ModuleNotFoundError):  # no Hydra plugins are installed
        plugin = importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher")
    if plugin is None:
        raise UserError(
            f"hydra/launcher={SLURM}: the plugin for this launcher is not installed.\n"
            f"Type {invocation.pip_install('submitit')}, or remove hydra/launcher."
        )


class Local(BasicLauncher):
    """Run the jobs one after another in this process, or several at once in their own processes.

    The standard input of these processes is a pipe, which is closed when the sweep stops, and by
    the system if the sweep is killed. The jobs then save a checkpoint and end, as for SIGTERM.
    """

    def setup(self, *, config: DictConfig, **context: Any) -> None:
        super().setup(config=config, **context)
        self.sweep = config
        self.count = jobs_at_once(config.sweep.at_once, config.device)
        self.threads = max(1, cores() // self.count)
        self.has_launched = False

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        if self.count == 1:
            return super().launch(job_overrides, initial_job_idx)
        if not self.has_launched:  # a search launches its jobs in several groups
            print(f"jobs     {self.count} at once; threads per job: {self.threads}", flush=True)
        self.has_launched = True
        self.jobs = enumerate(job_overrides, initial_job_idx)
        self.failed: Job | None = None
        reading, writing = os.pipe()
        with (
            os.fdopen(reading) as self.stdin,
            ThreadPoolExecutor(self.count) as pool,
            os.fdopen(writing, "w") as self.lifeline,
            signals.calling(lambda _: self.stop("stopping")),
        ):
            list(pool.map(self.run, range(self.count)))
        if self.failed:
            raise SystemExit(self.failed.code)
        if stopping.received is not None:
            raise stopping.Interrupted
        return []

    def stop(self, reason: str) -> None:
        """Let the running jobs save a checkpoint and end, and start no more jobs."""
        wait = "waiting for the running jobs to save a checkpoint"
        print(f"\n{reason}; {wait}", file=sys.stderr, flush=True)
        self.lifeline.close()

    def run(self, slot: int) -> None:
        """Run jobs in this share of the machine until none is left or the sweep has stopped."""
        for number, typed in self.jobs:  # the threads share this iterator
            if self.lifeline.closed:
                return
            self.run_job(Path(self.sweep.hydra.sweep.dir, str(number)), typed, slot)
            failed = progress.show_ends()
            if failed and self.sweep.sweep.on_error == "stop" and not self.failed:
                self.failed = failed[0]
                self.stop(f"job {self.failed.name} failed (sweep.on_error=stop)")

    def run_job(self, folder: Path, typed: Sequence[str], slot: int) -> None:
        """Run a job in its own process. If the process fails, ensure that the job has a result."""
        job = {"folder": str(folder), "slot": slot, "threads": self.threads}
        of_hydra = arguments.settings_of_hydra(sys.argv[1:])
        reason = None
        with progress.open_output(folder) as file:
            start = file.tell()
            code = subprocess.run(
                [sys.executable, "-u", *invocation.script(), *of_hydra, *typed],
                env={**os.environ, processes.JOB: json.dumps(job)},
                stdin=self.stdin,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # leaves Ctrl-C to the sweep
            ).returncode
            is_known = code in exit_codes.FAILED
            if is_known:
                file.seek(start)
                reason = progress.last_error(file)
        if has_failed(folder, code):
            # The job may have failed after it wrote its result.
            exit_codes.codes.append(code if is_known else exit_codes.TRAINING_ERROR)
            make(folder)
            reason = reason or f"the process ended with exit code {code}."
            overrides = [arguments.with_one_plus(override) for override in typed]
            write_failure(folder, processes.JobFailed(reason, code), code, overrides=overrides)


def has_failed(folder: Path, code: int) -> bool:
    """Return whether a job failed, if its process ended with this exit code.

    User code may end the process with any code, even with 0 in the middle of a run.
    """
    if code == exit_codes.OK:
        return overrides_in(folder) is not None and not RunResult.read(folder).has_ended
    return code not in (exit_codes.IN_USE, *(128 + number for number in stopping.SIGNALS))


def begin_job() -> None:
    """If `Local` started this process, stop its job when the sweep stops."""
    if "slot" in processes.job():
        threading.Thread(target=stop_with_sweep, daemon=True).start()


def stop_with_sweep() -> None:
    """Wait until the sweep closes this process's standard input, and then stop the job."""
    os.read(0, 1)  # the buffer of sys.stdin would be locked when Python exits
    os.kill(os.getpid(), signal.SIGTERM)  # unlike raise_signal, wakes a main thread that sleeps


def limit_threads() -> None:
    """Let this job use its share of the cores, unless OMP_NUM_THREADS is set."""
    job = processes.job()
    if job and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(job["threads"])


def device(name: str, names: list[str]) -> str:
    """Return the device for `device=name`. `auto` picks a GPU in `names` by this job's slot."""
    slot = processes.job().get("slot")
    gpus = [each for each in names if ":" in each]
    if name != "auto" or slot is None or not gpus:
        return name
    return gpus[slot % len(gpus)]
