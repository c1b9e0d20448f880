"""Jobs of a sweep in processes of their own: each is the run that it would be alone, and none
outlives its sweep.

`pytest --large tests/test_launchers.py` stops and kills a sweep of each launcher.
"""

import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from test_cli import answers, run

from stoker.runs import lock
from stoker.sweeps import launchers
from stoker.trainer.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = ("joblib", "submitit_local")
JOB = (
    "dataset=synthetic",
    "dataset.n=100",
    "batch_size=8",
    "model.hidden=[8]",
    "model.dropout=0.1",
)  # 10 steps an epoch
CNN = (
    "model=cnn",
    "epochs=1",
    "max_grad_norm=1",
)  # whose sums have another order with other threads
PATIENCE = 300  # seconds for one sweep: for a hang, no limit to be near to
HOLD = """
import os, pathlib, time
from stoker.trainer import stopping
from stoker.trainer.callbacks import Callback
class Hold(Callback):
    def on_step_end(self, trainer):
        if trainer.step == 13:
            pathlib.Path(f"holds.{os.getpid()}").touch()
        while trainer.step == 13 and not stopping.received and pathlib.Path("hold").exists():
            time.sleep(0.01)
"""  # a callback beside train.py, for what is on the PYTHONPATH


def is_installed(launcher):
    try:
        launchers.check_installed(launcher)
    except UserError:
        return False
    return True


def needs(launcher):
    if not is_installed(launcher):
        extra = launchers.EXTRAS[launcher]
        pytest.skip(f"hydra/launcher={launcher} is not installed: pip install -e '.[{extra}]'")


def start(folder, *arguments):
    """A process of `python train.py -m ...` in `folder`, whose output goes to the files out and
    err.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder)}
    command = [sys.executable, str(ROOT / "train.py"), "-m", *arguments]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def end(process, folder):
    try:
        code = process.wait(PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return SimpleNamespace(
        code=code, out=(folder / "out").read_text(), err=(folder / "err").read_text()
    )


def sweep(folder, *arguments):
    return end(start(folder, *arguments), folder)


def wait(what):
    limit = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )


def alone(folder, *arguments):
    """The weights of a run by itself, with one thread."""
    done = run(folder, *arguments, "run_dir=alone")
    assert done.code == 0, done.err
    return weights(folder / "alone")


def test_each_job_has_its_own_slot_first():
    for gpus in (4, 2):
        names = ["cpu", "cuda", *(f"cuda:{i}" for i in range(gpus))]
        assert [device_in(i, names) for i in range(8)] == [f"cuda:{i % gpus}" for i in range(8)]


def device_in(slot, names, name="auto"):
    launchers.slot, before = slot, launchers.slot
    try:
        return launchers.device(name, names)
    finally:
        launchers.slot = before


def test_only_auto_is_dealt_out_and_only_where_there_are_several():
    several = ["cpu", "cuda", "cuda:0", "cuda:1"]
    assert device_in(1, several, "cuda") == "cuda" and device_in(1, several, "cuda:0") == "cuda:0"
    assert (
        device_in(1, ["cpu", "cuda"]) == device_in(1, ["cpu"]) == device_in(None, several) == "auto"
    )


def test_how_many_jobs(monkeypatch):
    for at_once, gpus, jobs in (("auto", 0, 8), ("auto", 2, 2), (3, 0, 3), (16, 2, 16)):
        monkeypatch.setattr(launchers, "cores", lambda: 8)
        monkeypatch.setattr(launchers, "count_gpus", lambda device, gpus=gpus: gpus)
        assert launchers.jobs_at_once(at_once, "auto") == jobs


@pytest.mark.slow
def test_a_slot_is_one_process_alone(tmp_path):
    """As long as the process lives; where all are taken, a job asks whether to go on, and waits."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from stoker.sweeps import launchers; from pathlib import Path\n"
    code += (
        f"print(launchers.claim(Path({str(tmp_path)!r}), 0, 2, None), flush=True); sys.stdin.read()"
    )
    taken = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert sorted(int(each.stdout.readline()) for each in taken) == [0, 1]
    asked = []

    def go_on():
        asked.append(1)
        if len(asked) == 2:
            taken[1].communicate()
        assert len(asked) < 50

    before = set(lock.locks)
    assert launchers.claim(tmp_path, 0, 2, go_on) in (0, 1) and len(asked) >= 2
    taken[0].communicate()
    for file in lock.locks - before:
        lock.locks.discard(file)
        file.close()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_is_the_run_that_it_would_be_alone(tmp_path, launcher):
    """Two at once have a thread each on two cores, and a job with a mistake is none of the others'
    business.
    """
    needs(launcher)
    at_once = max(2, launchers.cores())
    done = sweep(
        tmp_path,
        f"hydra/launcher={launcher}",
        "seed=0,-1,1",
        *CNN,
        f"sweep.at_once={at_once}",
        "hydra.sweep.dir=all",
    )
    assert done.code == 2 and "Traceback" not in done.err, done.err
    lines = done.out.splitlines()
    assert lines[1] == f"jobs     {at_once} at once; threads per job: 1"
    assert lines[0] == "sweep    3 jobs; output in all/jobs"
    told = [re.split(" {2,}", line) for line in lines[2:5]]
    assert [line[0] for line in told] == ["1/3", "2/3", "3/3"]
    results = {line[-1].split()[-1]: line[1].removesuffix(" (best)") for line in told}
    assert results.pop("seed=-1") == "failed, seed=-1: expected a whole number of at least 0."
    assert sorted(results) == ["seed=0", "seed=1"]
    assert all(re.fullmatch(r"val/acc 0\.\d+", result) for result in results.values())
    for job in (0, 2):
        said = (tmp_path / "all" / "jobs" / f"{job}.txt").read_text()
        assert "device   cpu, 1 thread" in said and f"run      all/{job}" in said
    assert same(weights(tmp_path / "all" / "2"), alone(tmp_path, *CNN, "seed=1"))
    assert not same(weights(tmp_path / "all" / "0"), weights(tmp_path / "all" / "2"))
    left = {path.name for path in (tmp_path / "all").iterdir()} - {".submitit"}
    assert left == {"0", "1", "2", "jobs", "multirun.yaml", "sweep.json", "sweep.csv", "sweep.html"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_whose_loader_has_workers_is_the_run_that_it_would_be_alone(tmp_path, launcher):
    needs(launcher)
    typed = (*JOB, "epochs=1", "dataset.resident=false", "dataset.workers=1")
    command = (f"hydra/launcher={launcher}", "seed=0,1", *typed, "hydra.sweep.dir=all")
    done = sweep(tmp_path, *command, "sweep.at_once=2")
    assert done.code == 0, done.out
    said = (tmp_path / "all" / "jobs" / "1.txt").read_text()
    assert "streamed with 1 worker, as requested" in said
    assert same(weights(tmp_path / "all" / "1"), alone(tmp_path, *typed, "seed=1"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_jobs_end_with_their_sweep_and_go_on_with_it(tmp_path, launcher, number, large):
    """Each saves the step it is at, none is begun any more, and the same command ends them as they
    would have been.
    """
    needs(launcher)
    if not large and (launcher, number) != ("joblib", signal.SIGTERM):
        pytest.skip("one of them without --large")
    (tmp_path / "mine.py").write_text(HOLD)
    (tmp_path / "hold").touch()
    command = [
        f"hydra/launcher={launcher}",
        "seed=0,1,2,3",
        *JOB,
        "epochs=3",
        "hydra.sweep.dir=all",
        "sweep.at_once=2",
    ]
    command += ["+callbacks.hold._target_=mine.Hold"]
    process = start(tmp_path, *command)
    wait(
        lambda: (
            process.poll() is not None
            or len(glob.glob(f"{tmp_path}/holds.*")) == 2  # both are at step 13
        )
    )
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    done = end(process, tmp_path)
    assert done.code == (-9 if number == signal.SIGKILL else 128 + number), done.err
    wait(lambda: not any(lock.is_held(tmp_path / "all" / str(job)) for job in range(4)))
    begun = [job for job in range(4) if (tmp_path / "all" / str(job) / "checkpoints").exists()]
    assert len(begun) == 2 and all(
        (tmp_path / "all" / f"{job}/checkpoints/step_00000013.ckpt").exists() for job in begun
    )
    if number != signal.SIGKILL:
        assert (
            "stopping; waiting for the running jobs to save a checkpoint" in done.err
            and "2 unfinished, 2 not started" in done.out
        )
    (tmp_path / "hold").unlink()
    done = sweep(tmp_path, *command)
    assert done.code == 0 and "all: 4 done" in done.out, done.err
    assert same(
        weights(tmp_path / "all" / str(begun[0])),
        alone(tmp_path, *JOB, "epochs=3", f"seed={begun[0]}"),
    )


def test_a_failed_job_ends_the_sweep_with_on_error_stop(tmp_path, large):
    needs("joblib")
    if not large:
        pytest.skip("--large")
    (tmp_path / "mine.py").write_text(HOLD)
    (tmp_path / "hold").touch()
    command = [
        "hydra/launcher=joblib",
        "seed=0,-1,2,3",
        *JOB,
        "epochs=3",
        "hydra.sweep.dir=all",
        "sweep.at_once=2",
    ]
    done = sweep(tmp_path, *command, "sweep.on_error=stop", "+callbacks.hold._target_=mine.Hold")
    assert (
        done.code == 2
        and "job 1 failed (sweep.on_error=stop); waiting for the running jobs to save" in done.err
    ), done.err
    assert not (tmp_path / "all" / "3").exists() and "Traceback" not in done.err


def test_a_job_that_submitit_interrupts_is_put_into_the_queue_and_goes_on(tmp_path, large):
    """As Slurm does it before a job's time is over, and when it is preempted."""
    needs("submitit_local")
    if not large:
        pytest.skip("--large")
    (tmp_path / "mine.py").write_text(HOLD)
    (tmp_path / "hold").touch()
    command = ["hydra/launcher=submitit_local", "seed=0,1", *JOB, "epochs=3", "hydra.sweep.dir=all"]
    process = start(tmp_path, *command, "+callbacks.hold._target_=mine.Hold")
    wait(
        lambda: (
            process.poll() is not None
            or glob.glob(f"{tmp_path}/all/0/checkpoints/step_00000010.ckpt")
        )
    )
    owner = int((tmp_path / "all" / "0" / lock.LOCK).read_text().split()[1])
    os.kill(owner, signal.SIGUSR2)
    wait(lambda: (tmp_path / "all/0/checkpoints/step_00000013.ckpt").exists())
    (tmp_path / "hold").unlink()
    done = end(process, tmp_path)
    assert done.code == 0 and "all: 2 done" in done.out, done.err
    assert "interrupted at step 13." in (tmp_path / "all" / "jobs" / "0.txt").read_text()
    assert same(weights(tmp_path / "all" / "0"), alone(tmp_path, *JOB, "epochs=3", "seed=0"))


MISTAKES = [
    (
        "hydra/launcher=joblib",
        "hydra/launcher=joblib: this setting is for sweeps.",
        "Add -m to start a sweep",
    ),
    (
        "-m seed=0,1 hydra/launcher=jobib",
        "hydra/launcher=jobib: not a valid choice.",
        "Did you mean 'joblib'?",
    ),
    (
        "-m seed=0,1 sweep.at_once=2",
        "sweep.at_once=2: hydra/launcher=basic does not support this key",
        "Type hydra/launcher=joblib",
    ),
]
WITH = [
    (
        "joblib",
        "sweep.at_once=x",
        "sweep.at_once=x: expected auto, or a whole number of at least 1",
        "",
    ),
    (
        "joblib",
        "hydra.launcher.n_jobs=0",
        "hydra.launcher.n_jobs=0: expected a whole number of at least 1",
        "",
    ),
    (
        "joblib",
        "hydra.launcher.n_jobs=-1",
        "hydra.launcher.n_jobs=-1: expected a whole number of at least 1",
        "",
    ),
    ("joblib", "hydra.launcher.jobs=2", "hydra.launcher.jobs: no such key.", ""),
    (
        "submitit_slurm",
        "sweep.at_once=2",
        "sweep.at_once=2: hydra",
        "Type hydra/launcher=joblib",
    ),
]


@pytest.mark.slow
def test_what_cannot_be_is_said_in_a_line_and_leaves_nothing(tmp_path):
    table = [(typed, *said) for typed, *said in MISTAKES]
    for launcher, typed, *said in WITH:
        if is_installed(launcher):
            table.append((f"-m seed=0,1 hydra/launcher={launcher} {typed}", *said))
    for typed, done in answers(tmp_path, table).items():
        what, hint = next(said for mistake, *said in table if mistake == typed)
        assert done.code == 2 and done.err.startswith(f"error: {what}") and hint in done.err, (
            typed,
            done.err,
        )
        assert len(done.err.splitlines()) <= 3 and done.files == [], typed


def test_a_plugin_that_is_missing_is_named_with_its_extra(monkeypatch):
    """Where there are others, and where there is none."""
    others = types.ModuleType("hydra_plugins")
    others.__path__ = []
    for name in [name for name in sys.modules if name.startswith("hydra_plugins.")]:
        monkeypatch.delitem(sys.modules, name)
    for plugins in (others, None):
        monkeypatch.setitem(sys.modules, "hydra_plugins", plugins)
        for launcher, extra in launchers.EXTRAS.items():
            said = (
                rf"hydra/launcher={launcher}: the plugin for this launcher is not installed.\n"
                rf"Type pip install -e '.\[{extra}\]'"
            )
            with pytest.raises(UserError, match=said):
                launchers.check_installed(launcher)
        launchers.check_installed("basic")


@pytest.mark.parametrize("launcher", launchers.EXTRAS)
def test_the_keys_of_a_launcher_are_its_constructors(launcher):
    """Of submitit's, which takes any, those that its executor knows."""
    needs(launcher)
    with initialize_config_dir(str(ROOT / "configs")):
        node = compose(
            "train", [f"hydra/launcher={launcher}"], return_hydra_config=True
        ).hydra.launcher
    keys = {key for key in node if key != "_target_"}
    if launcher == "joblib":
        import joblib

        assert keys - {"inner_max_num_threads"} <= {*joblib.Parallel.__init__.__code__.co_varnames}
        assert node.n_jobs == launchers.cores() or torch.accelerator.is_available()
    else:
        from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

        known = SlurmQueueConf if launcher == "submitit_slurm" else LocalQueueConf
        assert keys <= {*known.__dataclass_fields__, "setup"}
