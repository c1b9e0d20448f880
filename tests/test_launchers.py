"""Jobs of a sweep in processes of their own: each is the run that it would be alone, and none
outlives its sweep.

`pytest --large tests/test_launchers.py` stops and kills a sweep in every way.
"""

import contextlib
import glob
import importlib.util
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

from stoker.command import arguments, processes
from stoker.runs import lock
from stoker.runs.result import RunResult
from stoker.sweeps import launchers
from stoker.trainer.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
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
ONLY_SLURM = (  # the keys that submitit's launcher for this machine lacks
    "partition",
    "account",
    "qos",
    "constraint",
    "array_parallelism",
    "max_num_timeout",
    "signal_delay_s",
    "additional_parameters",
)
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

DIES = """
import os, signal, torch
class Dies(torch.nn.Linear):
    def __init__(self, how):
        super().__init__(64, 10)
        self.how = str(how)
    def forward(self, x):
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raise":
            raise SystemExit(9)
        if self.how in ("0", "7"):
            os._exit(int(self.how))
        return super().forward(x.flatten(1))
"""  # a model whose process ends at its first batch
CODES = {"kill": -9, "raise": 9, "7": 7, "0": 0}

REFUSES = """
import os
if "STOKER_JOB" in os.environ:
    print("error: seed: not today. Try again tomorrow.", flush=True)
    os._exit(2)
"""  # what Python runs as it starts


def needs_submitit():
    if not importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher"):
        pytest.skip("hydra/launcher=submitit_slurm is not installed: pip install -e '.[submitit]'")


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
    job = {} if slot is None else {"slot": slot}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "job", lambda: job)
        return launchers.device(name, names)


def test_only_auto_is_dealt_out_and_only_where_there_are_several():
    several = ["cpu", "cuda", "cuda:0", "cuda:1"]
    assert device_in(1, several, "cuda") == "cuda" and device_in(1, several, "cuda:0") == "cuda:0"
    assert (
        device_in(1, ["cpu", "cuda"]) == device_in(1, ["cpu"]) == device_in(None, several) == "auto"
    )


def test_how_many_jobs(monkeypatch):
    for at_once, gpus, jobs in (("auto", 0, 8), ("auto", 2, 2), (3, 0, 3), (16, 2, 16)):
        monkeypatch.setattr(launchers, "cores", lambda: 8)
        monkeypatch.setattr(processes, "count_gpus", lambda device, gpus=gpus: gpus)
        assert launchers.jobs_at_once(at_once, "auto") == jobs


@pytest.mark.slow
def test_a_job_is_the_run_that_it_would_be_alone(tmp_path):
    """Two at once have a thread each on two cores, and a job with a mistake is none of the others'
    business.
    """
    at_once = max(2, launchers.cores())
    done = sweep(
        tmp_path,
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
    left = {path.name for path in (tmp_path / "all").iterdir()}
    assert left == {"0", "1", "2", "jobs", "multirun.yaml", "sweep.json", "sweep.csv", "sweep.html"}


@pytest.mark.slow
def test_a_job_whose_loader_has_workers_is_the_run_that_it_would_be_alone(tmp_path):
    typed = (*JOB, "epochs=1", "dataset.resident=false", "dataset.workers=1")
    command = ("seed=0,1", *typed, "hydra.sweep.dir=all")
    done = sweep(tmp_path, *command, "sweep.at_once=2")
    assert done.code == 0, done.out
    said = (tmp_path / "all" / "jobs" / "1.txt").read_text()
    assert "streamed with 1 worker, as requested" in said
    assert same(weights(tmp_path / "all" / "1"), alone(tmp_path, *typed, "seed=1"))


def test_a_job_gets_the_settings_of_hydra_that_were_typed():
    typed = ["-m", "seed=0,1", "hydra.sweep.dir=all", "epochs=1"]
    kept = ["hydra.sweep.dir=all", "+hydra.job.env_set.A=1"]
    kept += ["~hydra.launcher.qos", "hydra/job_logging=none"]
    assert arguments.settings_of_hydra([*typed, *kept[1:]]) == kept


@pytest.mark.slow
def test_jobs_find_the_configs_of_the_project(tmp_path):
    """In a process of their own each, and in several for one job."""
    experiment = tmp_path / "configs" / "experiment" / "short.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\nepochs: 1\n")
    command = ("experiment=short", *JOB, "report=false")
    done = sweep(tmp_path, *command, "seed=0,1", "sweep.at_once=2", "hydra.sweep.dir=all")
    assert done.code == 0 and "all: 2 done" in done.out, done.out + done.err
    done = sweep(tmp_path, *command, "strategy=ddp", "devices=2", "device=cpu", "seed=0")
    assert done.code == 0 and ": 1 done" in done.out, done.out + done.err


@pytest.mark.slow
def test_a_job_whose_process_dies_is_named_by_its_own_settings(tmp_path):
    (tmp_path / "mine.py").write_text(DIES)
    command = ["model._target_=mine.Dies", f"+model.how={','.join(CODES)},not", "epochs=1"]
    command += ["report=false", "sweep.at_once=2", "hydra.sweep.dir=all"]
    done = sweep(tmp_path, *command)
    assert done.code == 3 and f"all: 1 done, {len(CODES)} failed" in done.out, done.out + done.err
    for job, (how, code) in enumerate(CODES.items()):
        result = RunResult.read(tmp_path / "all" / str(job))
        assert f"+model.how={how}" in result.overrides
        assert result.error == f"the process ended with exit code {code}."
        line = rf"/{len(CODES) + 1}  failed, {result.error} .*job {job} model.how={how}$"
        assert re.search(line, done.out, re.MULTILINE)


@pytest.mark.slow
def test_the_reason_of_jobs_that_fail_before_they_begin_is_said(tmp_path):
    """Also if they leave nothing, so that the folder of the sweep is removed."""
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    done = sweep(tmp_path, "seed=0,1", "sweep.at_once=2", "hydra.sweep.dir=all")
    assert done.code == 2 and not (tmp_path / "all").exists(), done.out + done.err
    assert done.out.count("/2  failed, seed: not today. ") == 2, done.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_jobs_end_with_their_sweep_and_go_on_with_it(tmp_path, number, large):
    """Each saves the step it is at, none is begun any more, and the same command ends them as they
    would have been.
    """
    if not large and number != signal.SIGTERM:
        pytest.skip("one of them without --large")
    (tmp_path / "mine.py").write_text(HOLD)
    (tmp_path / "hold").touch()
    command = [
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
    if not large:
        pytest.skip("--large")
    (tmp_path / "mine.py").write_text(HOLD)
    (tmp_path / "hold").touch()
    command = [
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


def test_a_killed_job_is_a_failure_of_its_own(tmp_path, large):
    """The others go on, and the same command ends it."""
    if not large:
        pytest.skip("--large")
    (tmp_path / "mine.py").write_text(HOLD)
    (tmp_path / "hold").touch()
    command = ["seed=0,1,2", *JOB, "epochs=3", "hydra.sweep.dir=all", "sweep.at_once=2"]
    command += ["+callbacks.hold._target_=mine.Hold"]
    process = start(tmp_path, *command)
    wait(lambda: process.poll() is not None or len(glob.glob(f"{tmp_path}/holds.*")) == 2)
    killed = int((tmp_path / "all" / "0" / lock.LOCK).read_text().split()[1])
    os.kill(killed, signal.SIGKILL)
    (tmp_path / "hold").unlink()
    done = end(process, tmp_path)
    assert done.code == 3 and "2 done, 1 failed" in done.out, done.err
    assert "failed, the process ended with exit code -9." in done.out
    done = sweep(tmp_path, *command)
    assert done.code == 0 and "all: 3 done" in done.out, done.err


def test_a_job_that_submitit_interrupts_is_put_into_the_queue_and_goes_on(tmp_path, large):
    """As Slurm does it before a job's time is over, and when it is preempted; submitit's launcher
    for this machine takes the place of Slurm's.
    """
    needs_submitit()
    if not large:
        pytest.skip("--large")
    (tmp_path / "mine.py").write_text(HOLD)
    (tmp_path / "hold").touch()
    command = ["hydra/launcher=submitit_slurm", "seed=0,1", *JOB, "epochs=3", "hydra.sweep.dir=all"]
    command += [f"~hydra.launcher.{key}" for key in ONLY_SLURM]
    local = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
    command += [f"hydra.launcher._target_={local}"]
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
    assert [line.split()[0] for line in done.out.splitlines()[1:3]] == ["1/2", "2/2"]
    assert same(weights(tmp_path / "all" / "0"), alone(tmp_path, *JOB, "epochs=3", "seed=0"))


MISTAKES = [
    (
        "sweep.at_once=2",
        "sweep.at_once=2: this setting is for sweeps.",
        "Add -m to start a sweep",
    ),
    (
        "hydra/launcher=submitit_slurm",
        "hydra/launcher=submitit_slurm: this setting is for sweeps.",
        "Add -m to start a sweep",
    ),
    (
        "-m seed=0,1 hydra/launcher=loca",
        "hydra/launcher=loca: not a valid choice.",
        "Did you mean 'local'?",
    ),
    (
        "-m seed=0,1 sweep.at_once=2 hydra/launcher=basic",
        "sweep.at_once=2: hydra/launcher=basic does not support this key",
        "Remove hydra/launcher",
    ),
    (
        "-m seed=0,1 hydra/launcher=basic",
        "hydra/launcher=basic: choose local or submitit_slurm.",
        "type sweep.at_once=N",
    ),
    (
        "-m seed=0,1 hydra/launcher=joblib",
        "hydra/launcher=joblib: to run several jobs at once, type sweep.at_once=N",
        "",
    ),
    (
        "-m seed=0,1 sweep.at_once=x",
        "sweep.at_once=x: expected auto, or a whole number of at least 1",
        "",
    ),
    (
        "-m seed=0,1 sweep.at_once=0",
        "sweep.at_once=0: expected auto, or a whole number of at least 1",
        "",
    ),
    ("-m seed=0,1 hydra.launcher.jobs=2", "hydra.launcher.jobs: no such key.", ""),
    (
        "-m seed=0,1 sweep.at_once=2 hydra/launcher=submitit_slurm",
        "sweep.at_once=2: hydra",
        "Remove hydra/launcher",
    ),
]


@pytest.mark.slow
def test_what_cannot_be_is_said_in_a_line_and_leaves_nothing(tmp_path):
    for typed, done in answers(tmp_path, MISTAKES).items():
        what, hint = next(said for mistake, *said in MISTAKES if mistake == typed)
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
        said = (
            r"hydra/launcher=submitit_slurm: the plugin for this launcher is not installed.\n"
            r"Type pip install -e '.\[submitit\]'"
        )
        with pytest.raises(UserError, match=said):
            launchers.check_installed()


def test_the_keys_of_slurm_are_those_that_submitit_knows():
    needs_submitit()
    from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

    with initialize_config_dir(str(ROOT / "configs")):
        node = compose(
            "train", ["hydra/launcher=submitit_slurm"], return_hydra_config=True
        ).hydra.launcher
    keys = {key for key in node if key != "_target_"}
    assert keys <= {*SlurmQueueConf.__dataclass_fields__, "setup"}
    assert keys - {*ONLY_SLURM} <= {*LocalQueueConf.__dataclass_fields__, "setup"}
