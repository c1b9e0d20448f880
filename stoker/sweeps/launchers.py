"""Run jobs in separate processes, and manage their devices, threads and signals."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from stoker import project
from stoker.command import exit_codes, invocation, settings, signals
from stoker.runs import lock
from stoker.runs.directory import remove_empty
from stoker.sweeps import progress
from stoker.sweeps.jobs import Job
from stoker.trainer import stopping
from stoker.trainer.errors import RunInUse, UserError, check_number
from stoker.trainer.launch import cores
from stoker.trainer.settings import VISIBLE_GPUS

EXTRAS = {
    "joblib": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
}
SIDE_BY_SIDE = ("joblib", "submitit_local")  # launchers that run sweep.at_once jobs in parallel
THREADS = "OMP_NUM_THREADS"
POLL = 0.3  # seconds
# Submitit sends this signal to a job that times out or is preempted. Windows does not have it.
USR2: signal.Signals | None = getattr(signal, "SIGUSR2", None)

apart = False  # whether a launcher started this process to run jobs of a sweep
slot: int | None = None  # which share of the machine this process uses
job = contextlib.ExitStack()  # closed at the end of this process's job
holding = contextlib.ExitStack()  # in the sweep's process: holds the lock that its jobs watch
failed: list[Job] = []  # with sweep.on_error=stop: the job that ended the sweep


def check_installed(launcher: str) -> None:
    """Raise UserError if the plugin for one of the built-in launchers is not installed."""
    extra = EXTRAS.get(launcher)
    plugin = None
    with contextlib.suppress(ModuleNotFoundError):  # no Hydra plugins are installed
        plugin = importlib.util.find_spec(f"hydra_plugins.hydra_{extra}_launcher")
    if extra and not plugin:
        raise UserError(
            f"hydra/launcher={launcher}: the plugin for this launcher is not installed.\n"
            f"Type {invocation.pip_install(extra)}, or remove hydra/launcher to run one job at a "
            "time."
        )


def count_gpus(device: str) -> int:
    """Return the number of GPUs that jobs with this `device` can use."""
    if device == "cpu" or ":" in device:
        return 0
    from stoker.trainer.device import available

    names = available()[1:]  # the device type, and each device if there are several
    if not names or device not in ("auto", names[0]) or names[0] == "mps":
        return 0
    return max(len(names) - 1, 1)


def jobs_at_once(at_once: int | str, device: str) -> int:
    """Return how many jobs run at once. "auto" means one per GPU or, without GPUs, one per core."""
    if at_once == "auto":
        return count_gpus(device) or cores()
    return int(at_once)


# Used in configs/hydra/launcher/, since Hydra needs the number before the sweep begins.
OmegaConf.register_resolver("jobs_at_once", jobs_at_once)


def device(name: str, names: list[str]) -> str:
    """Return the device for `device=name`. `auto` picks a GPU in `names` by this process's slot."""
    gpus = [each for each in names if ":" in each]
    if name != "auto" or slot is None or not gpus:
        return name
    return gpus[slot % len(gpus)]


def claim(folder: Path, number: int, slots: int, go_on: Callable[[], None]) -> int:
    """Lock and return the first free slot for the job; the process keeps the slot until it ends.

    Jobs do not end in the order in which they start. If the job number alone set the slot, two jobs
    could share a GPU while another GPU is idle. If all slots are taken, wait for a free one, unless
    `go_on` raises an exception.
    """
    while True:
        for i in range(slots):
            each = (number + i) % slots
            # Not closed, since the process holds the lock until it ends.
            file = open(folder / f"slot_{each}", "a+b", buffering=0)  # noqa: SIM115
            try:
                lock.lock(file)
            except BlockingIOError:
                file.close()
                continue
            except OSError:  # a file system without locks
                return number % slots
            lock.locks.add(file)
            return each
        go_on()
        time.sleep(POLL)


class Jobs(Callback):
    """Hydra's callback for a sweep whose jobs run in separate processes.

    It is created in the process of the sweep, and each job gets a copy. The sweep holds a lock for
    as long as its jobs should continue. When the lock is released, by a signal or because the
    process has ended, the jobs on this machine save a checkpoint and stop, and no new job starts.
    With Hydra's basic launcher, the callback does nothing.
    """

    launcher: str | None = None  # None if jobs run in this process

    def __init__(self, at_once: int | str, device: str, on_error: str) -> None:
        self.at_once = at_once
        self.device = device
        self.on_error = on_error

    # In the sweep's process:

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        launcher = config.hydra.runtime.choices.get("hydra/launcher")
        try:
            self.check(launcher)
            if launcher not in EXTRAS:
                return
            self.prepare(launcher, config.hydra.launcher)
            # with one job at a time, joblib runs the jobs in this process
            if launcher == "joblib" and self.jobs == 1:
                return
            self.launcher = launcher
            self.hold(Path(config.hydra.sweep.dir))
        except Exception as error:  # Hydra would turn the error into a warning
            raise SystemExit(exit_codes.report(error)) from None

    def check(self, launcher: str) -> None:
        """Raise UserError for settings that are out of range, or that this launcher ignores."""
        settings.check("sweep.at_once", self.at_once)
        if self.at_once not in ("auto", 1) and launcher not in SIDE_BY_SIDE:
            raise UserError(
                f"sweep.at_once={self.at_once}: hydra/launcher={launcher} does not support this "
                "key. Type hydra/launcher=joblib to run jobs in parallel on this machine."
            )
        check_installed(launcher)

    def prepare(self, launcher: str, node: DictConfig) -> None:
        """Set up what a job needs: its share of the machine, its folder and its import path."""
        if launcher == "joblib":
            self.at_once = check_number("hydra.launcher.n_jobs", node.n_jobs, whole=True, least=1)
        self.jobs = jobs_at_once(self.at_once, self.device)
        self.threads = max(1, cores() // self.jobs)
        self.environ = {name: os.environ.get(name) for name in (VISIBLE_GPUS, THREADS)}
        # Job processes need this path to import the packages beside train.py.
        here = project.import_folders()
        path = [*here, str(Path(sys.argv[0]).resolve().parent), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self.argv = sys.argv
        self.cwd = os.getcwd()

    def hold(self, folder: Path) -> None:
        """Take the lock of the sweep, and print a line for each job that ends from now on."""
        self.sweep = folder.resolve()
        self.folder = self.sweep / progress.OUTPUT
        try:
            holding.enter_context(lock.held(self.folder))
        except RunInUse:
            raise RunInUse(
                f"hydra.sweep.dir={folder} is in use by another process. Wait until it ends."
            ) from None
        self.locks = self.launcher != "submitit_slurm" and lock.is_held(self.folder)
        stopping.on_signal = self.stop
        holding.callback(self.look_for_ends)
        poll(self.look_for_ends, holding)
        if self.launcher != "submitit_slurm":
            print(f"jobs     {self.jobs} at once; threads per job: {self.threads}", flush=True)

    def look_for_ends(self) -> bool:
        """Print a line for each new result. With sweep.on_error=stop, a failure raises a signal."""
        for job in progress.ends.show_new() if progress.ends else []:
            if job.status == "failed" and self.on_error == "stop" and not failed:
                failed.append(job)
                signal.raise_signal(signal.SIGTERM)
        return False

    def stop(self, _: str) -> None:
        """Handle a signal: the jobs save a checkpoint, no new job starts, and the sweep ends."""
        why = f"job {failed[0].name} failed (sweep.on_error=stop)" if failed else "stopping"
        wait = "waiting for the running jobs to save a checkpoint"
        print(f"\n{why}; {wait}", file=sys.stderr, flush=True)
        if self.launcher == "submitit_slurm":
            print("Remove queued jobs with: scancel --name=stoker", file=sys.stderr, flush=True)
        holding.close()
        self.wait_for_jobs()
        signals.code = failed[0].code if failed else None
        raise stopping.Interrupted

    def wait_for_jobs(self) -> None:
        """Wait until every job has saved a checkpoint and ended."""
        folders = [folder for folder in self.sweep.glob("*/") if folder != self.folder]
        while self.locks and any(map(lock.is_held, folders)):
            time.sleep(POLL)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if self.launcher is None:
            return
        stopping.on_signal = None
        holding.close()
        remove_empty([self.folder])  # if no job ran

    # In a job's process, which may have run other jobs before:

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        global apart, slot
        if self.launcher is None:
            return
        apart = True
        os.chdir(self.cwd)
        self.go_on()
        sys.argv = self.argv
        progress.redirect(self.sweep, Path(config.hydra.runtime.output_dir).name, job)
        job.enter_context(contextlib.redirect_stderr(sys.stdout))
        if self.launcher == "joblib":
            # joblib's own start method, which this process inherits, cannot start other processes.
            multiprocessing.set_start_method(None, force=True)
        if self.launcher in SIDE_BY_SIDE:
            self.restore(VISIBLE_GPUS)  # submitit empties this variable
            if slot is None:
                slot = claim(self.folder, config.hydra.job.num, self.jobs, self.go_on)
        if self.launcher != "submitit_slurm" and self.environ[THREADS] is None:
            import torch

            torch.set_num_threads(self.threads)
            # The launchers set this variable, and a run would take it for the user's choice.
            self.restore(THREADS)
        self.listen()

    def restore(self, name: str) -> None:
        """Set an environment variable to its value in the process of the sweep."""
        value = self.environ[name]
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value

    def listen(self) -> None:
        """Handle the launcher's signals as in a single run, and leave Ctrl-C to the sweep."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signals.handle)
        if str(self.launcher).startswith("submitit") and USR2:
            job.callback(hand_back, signal.signal(USR2, signals.handle))
        signals.can_raise = True
        job.callback(setattr, signals, "can_raise", False)
        poll(self.stop_with_sweep, job)

    def stop_with_sweep(self) -> bool:
        """Stop the job if the sweep has released its lock, and return whether it was released."""
        is_over = self.is_over()
        if is_over:
            signal.raise_signal(signal.SIGTERM)
        return is_over

    def is_over(self) -> bool:
        """Return whether the sweep has ended."""
        return self.locks and not lock.is_held(self.folder)

    def go_on(self) -> None:
        """Raise KeyboardInterrupt if the sweep has ended or a signal has arrived."""
        if stopping.received is not None or self.is_over():
            raise KeyboardInterrupt

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:
        if not apart:
            return
        job.close()
        if stopping.received is not None:
            if self.launcher == "joblib":
                self.wait_for_jobs()  # joblib kills the other processes when one ends
                # If the sweep was killed, joblib's processes would wait for more jobs.
                os._exit(signals.exit_code())
            raise KeyboardInterrupt


def poll(look: Callable[[], bool], stack: contextlib.ExitStack) -> None:
    """Call `look` every POLL seconds in a thread, until it returns True or the stack is closed."""
    closed = threading.Event()

    def keep_looking() -> None:
        while not closed.wait(POLL) and not look():
            pass

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(closed.set)


def hand_back(before: Any) -> None:
    """Restore submitit's signal handler, and let it requeue the job if the signal stopped it."""
    assert USR2 is not None
    signal.signal(USR2, before)
    if stopping.received == USR2:
        before(USR2, None)
