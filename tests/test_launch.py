"""Real processes that train together: who speaks, who is named, how all of them end, and what the
exit code is.

`pytest --large tests/test_launch.py` has each fault at more moments, with both strategies, and by
torchrun too.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import assert_same
from forks import PROGRAM
from test_cli import answers, run

from stoker.command import invocation, processes
from stoker.command.contact import is_lost
from stoker.data import loader
from stoker.models import mlp
from stoker.tasks import train
from stoker.trainer import checkpoint, launch, stopping
from stoker.trainer.errors import UserError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform")

HERE = Path(__file__).resolve().parent
TRAIN = str(HERE.parent / "train.py")
MODULE = str(HERE.parent / "stoker/__main__.py")
REPORT = str(HERE.parent / "stoker/runs/report/__main__.py")
TORCHRUN = ["-m", "torch.distributed.run"]
JOB = [
    "dataset=synthetic",
    "dataset.n=190",
    "model.hidden=[16]",
    "device=cpu",
    "epochs=2",
    "batch_size=8",
    "log_every=4",
]
JOB += ["checkpoint.every=5", "model.dropout=0.2", "ema=0.9", "strategy=ddp"]
STEPS = 38
SEED = int(os.environ.get("KILL_SEED", "0"))
ENDS = 30  # seconds in which all end where one has failed


def fault(kind, step=7, rank=1):
    """The settings that have a rank fail after a step."""
    return [
        f"+callbacks.fault.{key}={value}"
        for key, value in {"_target_": "faults.Fault", "kind": kind}.items()
    ] + [
        f"+callbacks.fault.step={step}",
        f"+callbacks.fault.rank={rank}",
    ]


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """What the undisturbed run on two processes leaves."""
    folder = tmp_path_factory.mktemp("whole")
    done = forks.ranks(folder, 2, "run_dir=run", *JOB, *fault("slow", STEPS))
    assert done.codes == [0, 0] and done.errs == ["", ""], done.errs
    return last(folder / "run")


def last(run):
    """The last checkpoint of a run, but for what is said about it."""
    states = checkpoint.files(run / "checkpoints")
    assert max(states) == STEPS
    return {name: part for name, part in checkpoint.load(states[STEPS]).items() if name != "about"}


def start(folder, *command, **environment):
    """A program in `folder`, with its output in files; in a group of its own, as a terminal has
    it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    own |= {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        command = [sys.executable, *map(str, command)]
        return subprocess.Popen(
            command, cwd=folder, env=own, stdout=out, stderr=err, start_new_session=True
        )


def end(process, folder, patience=120):
    """Its exit code and output; nothing of it is left."""
    try:
        code = process.wait(patience)
    finally:
        process.kill()
    return SimpleNamespace(
        code=code, **{name: (folder / name).read_text() for name in ("out", "err")}
    )


def steps_are(folder, count, patience=100):
    """Waits until so many steps are done."""
    limit = time.monotonic() + patience
    while time.monotonic() < limit:
        if (folder / "steps").exists() and int((folder / "steps").read_text() or 0) >= count:
            return
        time.sleep(0.01)
    raise AssertionError((folder / "err").read_text())


# faults


def test_a_killed_rank_is_named_once_and_ends_all(forks, tmp_path, large):
    for world, rank, strategy in [(2, 1, "ddp")] + [
        (4, 1, "ddp"),
        (4, 3, "fsdp"),
        (2, 1, "fsdp"),
    ] * large:
        folder = tmp_path / f"{world}{rank}{strategy}"
        begin = time.monotonic()
        done = forks.ranks(
            folder, world, "run_dir=run", *JOB, f"strategy={strategy}", *fault("kill", rank=rank)
        )
        assert done.codes.pop(rank) == -9 and set(done.codes) == {3}, (done.codes, done.errs)
        assert not done.late and time.monotonic() - begin < 2 * ENDS
        said = "".join(done.errs)
        assert said.startswith(f"error: no answer from ranks [{rank}]: they have ended, or did")
        assert said.count("error:") == 1 and "Traceback" not in said
        _, what, again = said.splitlines()
        assert what == "To resume from the last checkpoint:"
        assert (
            again.startswith(f"torchrun --nproc-per-node {world} {TRAIN} ")
            and again.count("run_dir=run") == 1
        )


@pytest.mark.slow
def test_a_signal_that_follows_a_killed_rank_does_not_hide_it(forks, tmp_path):
    """torchrun sends one to the other ranks, which may arrive before they report the loss."""
    done = forks.ranks(tmp_path, 2, "run_dir=run", *JOB, *fault("kill_then_signal"))
    assert done.codes == [3, -9] and done.errs[1] == "", (done.codes, done.errs)
    assert done.errs[0].startswith("error: no answer from ranks [1]"), done.errs


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_within_the_timeout(forks, tmp_path, large):
    done = forks.ranks(tmp_path / "nap", 2, "run_dir=run", *JOB, "rank_timeout=6", *fault("nap"))
    assert done.codes[0] == 3, done.errs
    assert done.errs[0].startswith("error: no answer from ranks [1]"), done.errs
    assert "did not respond for 6 s" in done.errs[0] and done.errs[0].count("\n") == 3
    if large:
        job = start(
            tmp_path / "hang",
            TRAIN,
            "run_dir=run",
            *JOB,
            "rank_timeout=6",
            "devices=4",
            *fault("hang", rank=2),
        )
        done = end(job, tmp_path / "hang")
        assert done.code == 3, done.err
        assert done.err.startswith("error: no answer from ranks [2]"), done.err
        assert "did not respond for 6 s" in done.err and done.err.count("error:") == 1


@pytest.mark.slow
def test_a_mistake_is_said_once_by_a_rank_that_made_it(forks, tmp_path):
    for kind, code, text in (
        ("mistake", 2, "callbacks.fault: a mistake."),
        ("bug", 1, "ZeroDivisionError: a bug"),
    ):
        done = forks.ranks(tmp_path / kind, 2, "run_dir=run", *JOB, *fault(kind))
        assert done.codes == [code, code] and done.errs[0] == "", (done.codes, done.errs)
        assert done.errs[1].strip().endswith(text)
        assert done.errs[1].count(text) == 1 and "gloo" not in done.errs[1]
    done = forks.ranks(tmp_path / "fails", 2, "run_dir=run", *JOB, *fault("fails"))
    assert done.codes == [3, 3] and done.errs == ["", "error: it is no good.\n"]
    for kind, error in (("fails", "it is no good."), ("mistake", "callbacks.fault: a mistake.")):
        result = json.loads((tmp_path / kind / "run" / "result.json").read_text())
        assert result["error"] == error
    done = forks.ranks(tmp_path / "all", 2, "run_dir=run", *JOB, *fault("mistake", rank=-1))
    assert done.codes == [2, 2]
    assert sorted(done.errs) == ["", "error: callbacks.fault: a mistake.\n"]


def test_more_ranks_than_samples_is_an_error(forks, tmp_path):
    done = forks.ranks(tmp_path, 4, "run_dir=run", *JOB, "batch_size=3")
    assert set(done.codes) == {2}, (done.codes, done.errs)
    (said,) = filter(None, done.errs)
    assert "batch_size" in said and "4 processes" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_with_another_config_or_data_are_refused(forks, tmp_path):
    cases = [
        (
            ["monitor=${oc.env:RANK}"],
            "config.",
        )
    ]
    cases += [(["dataset._target_=faults.other"], "data.")]
    for i, (typed, what) in enumerate(cases):
        done = forks.ranks(tmp_path / str(i), 2, "run_dir=run", *JOB[2:], *typed)
        assert done.codes == [2, 2], (done.codes, done.errs)
        (said,) = filter(None, done.errs)
        assert re.match(
            r"error: rank 1 and rank 0 have different " + re.escape(what),
            said,
        ), done.errs
        assert not (tmp_path / str(i) / "run").exists()


def test_ranks_with_other_code_are_refused(forks, tmp_path):
    script = tmp_path / "check.py"
    script.write_text(
        textwrap.dedent("""
        import os
        from stoker.command import exit_codes, ranks
        def main():
            ranks.check_alike({"code": os.environ["RANK"].encode()})
        exit_codes.run(main)
    """)
    )
    done = forks.ranks(tmp_path / "run", 3, script=script)
    assert done.codes == [2, 2, 2], done.errs
    (said,) = filter(None, done.errs)
    assert said.startswith("error: rank 1 and rank 0 have different code.\n")


def test_the_code_is_that_of_the_program_and_of_ones_own_packages():
    code = processes.source_code()
    for module in (train, launch, loader, mlp):
        assert Path(module.__file__).read_bytes() in code
    own = Path(sys.modules["forks"].__file__).read_bytes()
    assert own not in code and own in processes.source_code(["forks"])


# signals


@pytest.mark.slow
def test_a_stopped_run_is_saved_at_one_step_and_continued_by_the_same_command(
    forks, whole, tmp_path, large
):
    """SIGTERM to python train.py, which hands it on; Ctrl-C on a terminal reaches it alone, too."""
    cases = [(signal.SIGTERM, 143, [TRAIN, "devices=2"])]
    if large:
        cases += [(signal.SIGINT, 130, [TRAIN, "devices=2"])]
        cases += [(signal.SIGTERM, 1, [*TORCHRUN, "--nproc-per-node", "2", TRAIN])]
    for number, code, command in cases:
        folder = tmp_path / f"{number}{code}"
        typed = [*JOB, "run_dir=run", *fault("slow", 3)]
        process = start(folder, *command, *typed)
        steps_are(folder, 6)
        os.killpg(process.pid, number)
        done = end(process, folder)
        assert done.code == code, done.err
        step = int(
            re.search(r"^interrupted at step (\d+)\. To resume:$", done.err, re.MULTILINE)[1]
        )
        assert (
            done.err.count("interrupted") == 1
            and max(checkpoint.files(folder / "run" / "checkpoints")) == step
        )
        if code != 1:
            assert (
                done.err.count("\n") == 3 and f"\n{PROGRAM} devices=2 dataset=synthetic" in done.err
            ), done.err
        else:
            assert "\ntorchrun --nproc-per-node 2 train.py dataset=synthetic" in done.err
        again = forks.ranks(folder, 2, *typed)
        assert again.codes == [0, 0], again.errs
        assert_same(last(folder / "run"), whole)


def test_a_signal_that_comes_twice_is_one_and_later_ends_at_once(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        from stoker.command import signals
        from stoker.trainer import stopping
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell may have it ignored
        signals.install()
        signals.can_raise, stopping.on_signal = True, print
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        print("alive", flush=True)
        signals.received_at -= float(sys.argv[1])
        os.kill(os.getpid(), signal.SIGINT)
        print("still alive", flush=True)
    """)
    )
    environment = {"PYTHONPATH": str(HERE.parent), "RANK": "1"}
    done = run(tmp_path / "a", "2", python=[str(script)], **environment)
    assert (done.code, done.out, done.err) == (130, "SIGTERM\nalive\n", "")
    done = run(tmp_path / "b", "0", python=[str(script)], **environment)
    assert (done.code, done.out) == (0, "SIGTERM\nalive\nstill alive\n")


def test_a_kill_or_a_signal_at_any_moment_ends_all_and_the_run_goes_on(
    forks, whole, tmp_path, large, capsys
):
    if not large:
        pytest.skip("20 starts of the agent: pytest --large")
    slowest = 0.0
    for number in range(20):
        draw, folder = random.Random(f"launch {SEED} {number}"), tmp_path / str(number)
        typed = [*JOB, "run_dir=run", *fault("slow", 3)]
        process = start(folder, TRAIN, "devices=2", *typed)
        kind, ranks = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]), []
        while not ranks:
            found = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
            )
            ranks = [int(pid) for pid in found.stdout.split()]
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 12))
        with contextlib.suppress(ProcessLookupError):
            if kind == signal.SIGKILL:
                os.kill(draw.choice(ranks), kind)
            else:
                os.killpg(process.pid, kind)
        begin = time.monotonic()
        done = end(process, folder)
        slowest = max(slowest, time.monotonic() - begin)
        what = f"KILL_SEED={SEED}, {number}: {kind.name}, {done.code}, {done.err}"
        assert done.code in (0, {signal.SIGKILL: 3}.get(kind, 128 + kind)), what
        assert "Traceback" not in done.err and done.err.count("error:") == (done.code == 3), what
        assert done.err.count("interrupted") <= 1 and done.err.count("\n") <= 4, what
        again = forks.ranks(folder, 2, *typed)
        assert again.codes == [0, 0], (what, again.errs)
        assert_same(last(folder / "run"), whole)
    with capsys.disabled():
        print(f"\n20 kills and signals: the slowest end took {slowest:.1f} s")
    assert slowest < ENDS


# the agent


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_the_run_ends_as_if_nothing_had_been(
    whole, tmp_path, large
):
    for rank in (1, 0) if large else (1,):
        folder = tmp_path / str(rank)
        command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", TRAIN]
        done = end(start(folder, *command, *JOB, *fault("kill", 13, rank)), folder)
        assert done.code == 0 and f"no answer from ranks [{rank}]" in done.err, done.err
        (run,) = filter(
            Path.is_dir, (folder / "runs").iterdir()
        )  # named by itself, and found again
        assert_same(last(run), whole)


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path, large):
    cases = [("kill", 0, 3, "error: no answer from ranks [0]")]
    cases += [("mistake", 1, 2, "error: callbacks"), ("bug", 1, 1, "Traceback")] * large
    for kind, rank, code, said in cases:
        folder = tmp_path / f"{kind}{rank}"
        done = end(
            start(folder, TRAIN, *JOB, "devices=2", "run_dir=run", *fault(kind, rank=rank)), folder
        )
        assert done.code == code and done.err.startswith(said), (done.code, done.err)
        assert "torch.distributed" not in done.err and "closing signal" not in done.err


def test_a_sweep_has_jobs_of_several_processes(tmp_path, large):
    if not large:
        pytest.skip("three starts of the agent: pytest --large")
    done = run(
        tmp_path,
        "-m",
        "seed=0,1",
        "devices=2",
        "epochs=1",
        *JOB[:4],
        "strategy=ddp",
        "hydra.sweep.dir=sweep",
    )
    assert done.code == 0, done.err
    results = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("sweep/*/result.json"))
    ]
    assert [result["steps"] for result in results] == [3, 3]


@pytest.mark.slow
def test_a_job_of_several_processes_leaves_why_it_failed_and_its_code(tmp_path):
    typed = [
        "-m",
        "batch_size=20,1",  # a sweep whose first job is refused does not start
        "devices=2",
        "epochs=1",
        *JOB[:2],
        "strategy=ddp",
        "hydra.sweep.dir=sweep",
    ]
    done = run(tmp_path, *typed)
    left = json.loads((tmp_path / "sweep" / "1" / "result.json").read_text())
    assert done.code == left["code"] == 2 and done.err == f"error: {left['error']}\n"
    assert left["error"] == (
        "batch_size=1: this is too small for 2 processes. Type batch_size=2 or more, or reduce devices."
    )


REFUSED = [
    (
        "devices=2",
        "error: devices=2: strategy=auto uses only one process",
        "Type strategy=ddp devices=2.",
    ),
    ("devices=0", "error: devices=0: expected auto, or a whole number of at least 1.", ""),
    ("devices=atuo", "error: devices=atuo: expected auto, or a whole number", ""),
    ("rank_timeout=0", "error: rank_timeout=0: expected a number above 0", ""),
    (
        "task=lr_find strategy=ddp devices=2",
        "error: task=lr_find runs in one process.",
        "Remove strategy and devices.",
    ),
    (
        "task=evaluate run=x devices=2 strategy=fsdp",
        "error: task=evaluate runs in one process.",
        "Remove strategy and devices.",
    ),
    (
        "strategy=fsdp compile=true",
        "error: strategy=fsdp: a sharded model cannot be compiled, but compile=true is set.",
        "Type compile=false",
    ),
    (
        "strategy=fsdp compile=graph",
        "error: strategy=fsdp: a sharded model cannot be compiled",
        "Type compile=false",
    ),
    (
        "strategy=ddp devices=2 micro_batch=auto",
        "error: micro_batch=auto works only with a single process",
        "Type micro_batch=N.",
    ),
    (
        "strategy=ddp devices=5 batch_size=4",
        "error: batch_size=4: this is too small for 5 processes",
        "Type batch_size=5 or more",
    ),
]
REFUSED_AMONG_SEVERAL = [
    (
        "strategy=ddp devices=3",
        "error: devices=3: torchrun has started 2 processes.",
        "--nproc-per-node",
    ),
    (
        "-m seed=0,1",
        "error: -m: a sweep starts its own processes, so do not start it with torchrun.",
        f"Type {PROGRAM} -m ... strategy=ddp devices=N.",
    ),
    ("task=lr_find", "error: task=lr_find runs in one process.", f"Type {PROGRAM}"),
    (
        "micro_batch=auto",
        "error: micro_batch=auto works only with a single process",
        "Type micro_batch=N.",
    ),
    ("task=evaluate run=x", "error: task=evaluate runs in one process.", f"Type {PROGRAM}"),
]


def test_a_signal_that_a_library_swallowed_ends_the_wait_for_rank_0(monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(launch, "timeout", 1)
    with pytest.raises(launch.LostContact, match="rank 0 at localhost"):
        launch.connect()
    monkeypatch.setattr(stopping, "received", signal.SIGTERM)
    with pytest.raises(stopping.Interrupted):
        launch.connect()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["mine", "Connection closed by peer"])
def test_an_error_that_is_its_own_context_is_examined_once(text):
    with pytest.raises(RuntimeError) as caught:
        try:  # as Hydra and the command do with an error of a constructor
            try:
                raise RuntimeError(text)
            except RuntimeError as error:
                raise ValueError("Hydra's") from error
        except ValueError as error:
            raise error.__cause__ from None
    assert caught.value.__context__.__cause__ is caught.value
    assert is_lost(caught.value) == (text != "mine")
    assert is_lost(caught.value.__context__) == (text != "mine")


def test_what_cannot_be_is_refused_before_anything_is_started(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n")
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, table, environment in (
        ("one", REFUSED, {}),
        ("several", REFUSED_AMONG_SEVERAL, rank),
    ):
        (tmp_path / name).mkdir()
        found = answers(tmp_path / name, table, "hydra", PYTHONPATH=str(tmp_path), **environment)
        for typed, said, what_to_type in table:
            done = found[typed]
            assert done.code == 2 and done.err.startswith(said) and what_to_type in done.err, (
                typed,
                done.err,
            )
            assert done.files == []


def test_how_many_processes_there_are():
    assert processes.count("ddp", 4, "auto") == 4 and processes.count("fsdp", 2, "cpu") == 2
    assert (
        processes.count("single", 1, "auto") == 1 and processes.count("auto", "auto", "auto") == 1
    )
    assert processes.count("ddp", "auto", "cpu") == 1
    with pytest.raises(UserError, match="Type strategy=ddp devices=2"):
        processes.count("single", 2, "cpu")


# two machines


@pytest.mark.slow
def test_two_hosts_train_what_one_does(forks, whole, tmp_path):
    """Two network namespaces with addresses of their own, a cable between them, and torchrun on
    each.
    """
    if subprocess.run(
        ["unshare", "-rn", "ip", "link"], capture_output=True, check=False
    ).returncode:
        pytest.skip("network namespaces are not allowed here")
    environment = os.environ | {
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        "bash",
        HERE / "two_hosts.sh",
        "1",
        TRAIN,
        "run_dir=run",
        *JOB,
        *fault("slow", STEPS),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert_same(last(tmp_path / "run"), whole)


@pytest.mark.parametrize(
    "started, torchrun, words",
    [
        (TRAIN, False, PROGRAM),
        ("/venv/bin/stoker", False, "/venv/bin/stoker"),
        (MODULE, False, f"{invocation.python()} -m stoker"),
        (REPORT, False, f"{invocation.python()} -m stoker"),
        (TRAIN, True, f"torchrun --nproc-per-node 2 {TRAIN}"),
        (MODULE, True, "torchrun --nproc-per-node 2 -m stoker"),
    ],
)
def test_commands_are_printed_as_they_were_typed(started, torchrun, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    if torchrun:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert " ".join(invocation.command()) == words


def test_processes_show_the_command_that_started_them(tmp_path, monkeypatch):
    installed = tmp_path / "stoker"
    installed.touch()
    started = {str(installed): [str(installed)], TRAIN: [TRAIN], MODULE: ["-m", "stoker"]}
    for program, words in started.items():
        monkeypatch.setattr(sys, "argv", [program])
        assert invocation.script() == words
