"""Jobs of a sweep in processes of their own: what Hydra's launchers leave open about devices, threads and signals."""

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from stoker.command import exit_codes, settings
from stoker.runs import rundir
from stoker.sweeps.jobs import read_job, typed_for
from stoker.trainer import stopping
from stoker.trainer.errors import RunInUse, UserError, check_number, printable
from stoker.trainer.launch import cores
from stoker.trainer.readable import number
from stoker.trainer.settings import GPUS, VISIBLE_GPUS

EXTRAS = {
    "joblib": "joblib",
    "submitit_local": "submitit",
    "submitit_slurm": "submitit",
    "ray": "ray",
}
JOBS = "jobs"  # the folder of a sweep for what its jobs print, and for the locks below
POLL = 0.3  # seconds
USR2 = getattr(
    signal, "SIGUSR2", None
)  # by which submitit tells a job that its time is over, or that it is preempted

apart = False  # whether this process has been launched for jobs of a sweep
slot = None  # which share of the machine this process has
job = contextlib.ExitStack()  # what is undone when its job has ended
holding = contextlib.ExitStack()  # in the process of the sweep: what its jobs are to see of it


def check_installed(launcher):
    """UserError where the plugin of one of our launchers is not there."""
    extra = EXTRAS.get(launcher)
    try:
        there = not extra or importlib.util.find_spec(f"hydra_plugins.hydra_{extra}_launcher")
    except ModuleNotFoundError:  # no plugin at all
        there = False
    if not there:
        what = f"Type pip install -e '.[{extra}]', or leave this out for one job after the other."
        raise UserError(f"hydra/launcher={launcher}: its plugin is not installed.\n{what}")


def how_many(at_once, per_gpu, gpus, cores):
    """(jobs at the same time, threads of each): `auto` is what the GPUs hold, without one a job on each core.

    The cores are divided among the jobs; each has one at least.
    """
    jobs = (gpus * per_gpu or cores) if at_once == "auto" else at_once
    return jobs, max(1, cores // jobs)


def count_gpus(device):
    """How many GPUs there are for jobs with this `device`."""
    if device not in GPUS:
        return 0
    from stoker.trainer.device import available

    names = available()[1:]  # the kind, and each of several by number
    return 0 if not names or names[0] == "mps" else max(len(names) - 1, 1)


# What configs/hydra/launcher/ asks for: a launcher's node of the config has to be whole before its sweep begins.
OmegaConf.register_resolver(
    "jobs_at_once",
    lambda at_once, per_gpu, device: how_many(at_once, per_gpu, count_gpus(device), cores())[0],
)
OmegaConf.register_resolver(
    "gpus_of_a_job", lambda per_gpu, device: 1 / per_gpu if count_gpus(device) else 0
)


def order(number, slots):
    """The slots in which job `number` may run, first the one that is its own, number % slots, then those after it."""
    return [(number + i) % slots for i in range(slots)]


def device(name, names):
    """What `device=name` is for this process, where `names` are there: of several GPUs, `auto` is that of its slot."""
    numbered = [each for each in names if ":" in each]
    return (
        numbered[slot % len(numbered)] if name == "auto" and slot is not None and numbered else name
    )


def claim(folder, number, slots, go_on):
    """The first of the job's slots that no other process has, which is this process's until its end.

    By the number alone two jobs would share a GPU while another is idle, since they do not end in the order in which
    they began. Where all are taken it waits for one, while `go_on` says so.
    """
    while True:
        for each in order(number, slots):
            file = open(folder / f"slot_{each}", "a+b")  # noqa: SIM115 (the lock lives as long as the process)
            try:
                rundir.lock(file)
            except BlockingIOError:
                file.close()
                continue
            except OSError:  # a file system without locks
                return number % slots
            rundir.locks.add(file)
            return each
        go_on()
        time.sleep(POLL)


class Jobs(Callback):
    """Hydra's callback for a sweep whose jobs run in processes of their own; does nothing for its basic launcher.

    It is made in the process of the sweep, and each job gets a copy. The sweep holds a lock for as long as its jobs
    should go on: when it is let go of, by a signal or by the end of the process however it ends, those that run on
    this machine save their step and stop, and no other one begins.
    """

    def __init__(self, at_once, per_gpu, device, on_error):
        self.at_once, self.per_gpu, self.device, self.on_error = at_once, per_gpu, device, on_error
        self.launcher = None

    def on_multirun_start(self, config, **_):
        self.launcher = config.hydra.runtime.choices.get("hydra/launcher")
        try:
            self.check()
            if self.launcher not in EXTRAS:
                self.launcher = None
                return
            self.prepare(config.hydra.launcher)
            if self.launcher == "joblib" and self.jobs == 1:  # it runs them in this process
                self.launcher = None
            else:
                self.hold(Path(config.hydra.sweep.dir))
        except Exception as error:  # Hydra would make a warning of it
            raise SystemExit(exit_codes.report(error)) from None

    def check(self):
        """UserError for settings that cannot be, or that this launcher does not look at."""
        for name in ("at_once", "per_gpu"):
            value = settings.check(f"sweep.{name}", getattr(self, name))
            if value not in ("auto", 1) and self.launcher not in (
                "joblib",
                "submitit_local",
                "ray",
            ):
                what = "hydra/launcher=joblib for jobs side by side on this machine"
                if self.launcher == "submitit_slurm":
                    what = "hydra.launcher.array_parallelism= for jobs at the same time"
                raise UserError(
                    f"sweep.{name}={value}: hydra/launcher={self.launcher} has no use for it. Type {what}."
                )
        check_installed(self.launcher)

    def prepare(self, node):
        """What a job is to find, by the launcher's `node` of the config: its share of the machine, and its place."""
        if self.launcher == "joblib":
            check_number("hydra.launcher.n_jobs", node.n_jobs, whole=True, least=-1)
            if node.n_jobs == 0:
                raise UserError(
                    "hydra.launcher.n_jobs=0: give a whole number at least 1, or -1 for one on each core."
                )
            self.at_once = cores() if node.n_jobs == -1 else node.n_jobs
        gpus = count_gpus(self.device) if self.launcher != "submitit_slurm" else 0
        self.jobs, self.threads = how_many(self.at_once, self.per_gpu, gpus, cores())
        self.environ = {name: os.environ.get(name) for name in (VISIBLE_GPUS, "OMP_NUM_THREADS")}
        # Where another process finds train.py's packages, and those beside it.
        path = [str(Path(sys.argv[0]).resolve().parent), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self.argv, self.cwd = sys.argv, os.getcwd()
        if self.launcher == "ray":
            self.start_ray(OmegaConf.to_container(node.ray, resolve=True))

    def start_ray(self, node):
        """Starts Ray, or finds the cluster at `address`; it has answers of its own to signals, which are taken back."""
        import ray

        if node["init"]["address"] is None:
            node["init"].setdefault("num_cpus", self.jobs)
        else:  # the machines are others
            self.threads = node["remote"]["num_cpus"]
        ray.init(**node["init"])
        stopping.listen()

    def hold(self, folder):
        """Takes the lock of the sweep, and says from now on what becomes of its jobs."""
        self.sweep, self.folder = folder.resolve(), folder.resolve() / JOBS
        try:
            holding.enter_context(rundir.held(self.folder))
        except RunInUse:
            raise RunInUse(
                f"hydra.sweep.dir={folder} is in use by another process. Wait until it has ended."
            ) from None
        self.locks = (
            rundir.is_held(self.folder) and self.launcher != "submitit_slurm"
        )  # its nodes are other machines
        self.owner = self.read_owner()
        stopping.gentle = self.stop
        self.watch()
        said = f"what they print is in {folder / JOBS}"
        if self.launcher != "submitit_slurm":
            threads = f"{self.threads} threads" if self.threads > 1 else "a thread"
            said = f"{self.jobs} at once, with {threads} each; {said}"
        print(f"jobs     {said}", flush=True)

    def watch(self):
        """Has a thread print a line for each job that ends; a signal is raised where one has failed that should not."""
        before = {path: path.stat().st_mtime_ns for path in self.sweep.glob("*/result.json")}
        ended, on_error = threading.Event(), self.on_error

        def look():
            for path in sorted(self.sweep.glob("*/result.json")):
                with contextlib.suppress(OSError):  # it may be replaced at this moment
                    if (when := path.stat().st_mtime_ns) != before.get(path):
                        before[path] = when
                        done = read_job(path.parent)
                        print(line(done), flush=True)
                        if done.status == "failed" and on_error == "stop" and not failed:
                            failed.append(done)
                            signal.raise_signal(signal.SIGTERM)

        def keep_looking():
            while not ended.wait(POLL):
                look()
            look()

        thread = threading.Thread(target=keep_looking, daemon=True)
        thread.start()
        holding.callback(thread.join)
        holding.callback(ended.set)

    def stop(self, _):
        """The answer to a signal: the jobs save their step and end, none is begun any more, and so the sweep ends."""
        why = f"job {failed[0].name} failed, and sweep.on_error=stop" if failed else "stopping"
        others = "each job saves its step"
        if self.launcher == "submitit_slurm":
            others = (
                "the jobs that are in Slurm's queue stay there (scancel --name=stoker ends them)"
            )
        print(f"\n{why}: {others}", file=sys.stderr, flush=True)
        holding.close()
        while self.locks and any(
            rundir.is_held(path.parent) for path in self.sweep.glob(f"*/{rundir.LOCK}")
        ):
            time.sleep(POLL)
        stopping.code = failed[0].code if failed else None
        raise stopping.Interrupted

    def on_multirun_end(self, config, **_):
        if self.launcher is None:
            return
        stopping.gentle = None
        holding.close()
        folder = Path(config.hydra.sweep.dir) / JOBS
        if not any(folder.glob("*.txt")):  # nothing was run
            for path in folder.glob("slot_*"):
                path.unlink()
            rundir.remove_empty([folder])

    def on_job_start(self, config, **_):
        """In the process of the job, which the launcher may have used for one before."""
        global apart, slot
        if self.launcher is None:
            return
        apart = True
        os.chdir(self.cwd)
        self.go_on()
        sys.argv = self.argv
        name = f"{Path(config.hydra.runtime.output_dir).name}.txt"
        file = job.enter_context((self.folder / name).open("a", buffering=1, encoding="utf-8"))
        job.enter_context(contextlib.redirect_stdout(file))
        job.enter_context(contextlib.redirect_stderr(file))
        if self.launcher in ("joblib", "submitit_local"):
            put_environ(VISIBLE_GPUS, self.environ)  # which submitit empties
            if slot is None:
                slot = claim(self.folder, config.hydra.job.num, self.jobs, self.go_on)
        if self.launcher != "submitit_slurm" and self.environ["OMP_NUM_THREADS"] is None:
            import torch

            torch.set_num_threads(self.threads)
            # The launchers set it; by it a run would know that its user has asked for so many.
            put_environ("OMP_NUM_THREADS", self.environ)
        self.listen()

    def listen(self):
        """A job answers its launcher's signals as a run does those of a terminal; Ctrl-C is for the sweep alone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, stopping.hear)
        if self.launcher.startswith("submitit") and USR2:
            job.callback(hand_back, signal.signal(USR2, stopping.hear))
        stopping.ready = True
        job.callback(setattr, stopping, "ready", False)
        ended = threading.Event()
        thread = threading.Thread(target=self.look, args=(ended,), daemon=True)
        thread.start()
        job.callback(thread.join)
        job.callback(ended.set)

    def look(self, ended):
        """Stops the job when the sweep has let go of its lock."""
        while not ended.wait(POLL):
            if self.is_over():
                signal.raise_signal(signal.SIGTERM)
                return

    def is_over(self):
        """Whether the sweep has ended, also where another one has begun in its folder."""
        return self.locks and not (rundir.is_held(self.folder) and self.read_owner() == self.owner)

    def read_owner(self):
        try:
            return (self.folder / rundir.LOCK).read_bytes()
        except OSError:  # Windows lets nobody read it
            return None

    def go_on(self):
        """Ends a job that was to begin when the sweep was over."""
        if stopping.received is not None or self.is_over():
            raise KeyboardInterrupt

    def on_job_end(self, config, **_):
        if not apart:
            return
        job.close()
        if stopping.received is not None:
            if self.launcher == "joblib":  # its processes would wait for a sweep that was killed
                os._exit(stopping.exit_code())
            raise KeyboardInterrupt  # Ray would take a SystemExit for the loss of the process


def put_environ(name, environ):
    os.environ.pop(name, None)
    if environ[name] is not None:
        os.environ[name] = environ[name]


def hand_back(before):
    """After a job that submitit's signal has stopped: what submitit does then, which is to put it into the queue."""
    signal.signal(USR2, before)
    if stopping.received == USR2:
        before(USR2, None)


failed = []  # the job that ends a sweep with sweep.on_error=stop


def line(done):
    """What is said of a job that has ended."""
    said = f"failed, {done.note.partition(chr(10))[0]}"
    if done.status == "done":
        best = f", {done.best['name']} {number(done.best['value'])}" if done.best else ""
        said = f"done{best}, {done.seconds:.1f} s"
    elif done.status == "pruned":
        said = done.note
    return printable(f"job {done.name}    {typed_for(done, list(done.settings))}: {said}")
