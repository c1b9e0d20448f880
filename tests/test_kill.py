"""Real processes, killed at any moment or hindered, and continued by the same command, end as if
nothing had been.

`pytest --large -n 0 tests/test_kill.py` kills 500 times, interrupts 100 times and says so;
KILL_SEED=N: other moments.
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import assert_same
from forks import Forks
from made_runs import MEASURED

from stoker.trainer import checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform")

SEED = int(os.environ.get("KILL_SEED", "0"))
# All that has a state: dropout, augmentation, a schedule a step, micro-batches, EMA, patience,
# evaluations within the epoch, a ragged last batch (of 12); 2.7 MB of it, so that a write takes
# some milliseconds.
JOB = ["dataset=synthetic", "dataset.n=380", "dataset.in_shape=[1,8,8]", "run_dir=run"]
JOB += [
    "dataset.augment=[flip,{crop: 2},{mixup: 0.2}]",
    "model.hidden=[512,256]",
    "model.dropout=0.2",
    "ema=0.9",
]
JOB += [
    "epochs=3",
    "batch_size=32",
    "grad_accum_steps=3",
    "max_grad_norm=1",
    "patience=7",
    "eval_every=4",
]
JOB += [
    "log_every=3",
    "checkpoint.every=3",
    "eval_batch_size=4",
    "+callbacks.marks._target_=marks.Marks",
]
WORKERS = ["dataset.resident=false", "dataset.workers=2"]
TOTAL = 30  # steps
PART = "run/checkpoints/.step_*.part"
LAST = f"run/checkpoints/{checkpoint.path_of('', TOTAL).name}"
OTHERS = (
    *MEASURED,
    "samples_per_second",
    "memory_mib",
    "overrides",
)  # in result.json: a clock's, and what was typed


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """The undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    done = forks.run(folder, *JOB)
    assert done.code == 0 and done.err == "", done.err
    return SimpleNamespace(seconds=done.seconds, left=left(folder))


def left(folder):
    """What a finished run has left, without what a clock says."""
    run = folder / "run"
    states = {
        number: checkpoint.load(path)
        for number, path in checkpoint.files(run / "checkpoints").items()
    }
    last, best = (
        states[max(states)],
        states[states[max(states)]["callbacks"]["Checkpoint"]["best"]["step"]],
    )
    for state in (last, best):
        state.get("about", {}).pop("config", None)  # the number of workers is in it
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rows = [{name: value for name, value in row.items() if name != "train/seconds"} for row in rows]
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    result = {name: value for name, value in result.items() if not name.endswith(OTHERS)}
    hidden = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    return {"last": last, "best": best, "rows": rows, "result": result, "hidden": hidden}


def assert_continues(forks, folder, whole, *arguments):
    """The same command completes the run, quietly, to what the undisturbed run has left."""
    done = forks.run(folder, *JOB, *arguments)
    assert done.code == 0 and done.err == "", (done.code, done.err)
    assert_same(left(folder), whole.left)
    return done


def moment_of_a_kill(draw, seconds, writing):
    """When to kill: while a checkpoint is being written, or at any moment, the first ones and the
    last ones often.
    """
    if writing:
        return {
            "watch": PART,
            "count": draw.randint(1, 4),
            "delay": draw.uniform(0, draw.choice([0.001, 0.005])),
        }
    kind = draw.choice(["any", "any", "start", "end"])
    if kind == "end":  # between the last checkpoint and result.json
        return {"watch": LAST, "delay": draw.uniform(0, 0.03)}
    return {"delay": draw.uniform(0, seconds if kind == "any" else 0.05)}


@pytest.mark.slow
def test_a_killed_run_ends_as_if_nothing_had_been(forks, whole, tmp_path, large, capsys):
    kills = writing = runs = 0
    failures, start = [], time.monotonic()
    while kills < (500 if large else 8):
        folder, draw = tmp_path / str(runs), random.Random(f"kill {SEED} {runs}")
        for _ in range(draw.choice([1, 1, 1, 3])):
            moment = moment_of_a_kill(draw, whole.seconds, writing=2 * writing <= kills)
            done = forks.run(folder, *JOB, signals=[{"signal": signal.SIGKILL, **moment}])
            kills, writing = kills + (done.code == -9), writing + (done.code == -9 and done.writing)
            if done.code != -9:  # it had ended before its time had come
                break
        try:
            assert done.code in (0, -9) and done.err == "", (done.code, done.err)
            assert_continues(forks, folder, whole)
        except AssertionError as error:
            failures.append(f"KILL_SEED={SEED}, run {runs}, {moment}: {str(error)[:1000]}")
        else:
            shutil.rmtree(folder)
        runs += 1
    minutes = (time.monotonic() - start) / 60
    with capsys.disabled():
        print(
            f"\n{kills} kills, {writing} of them while a checkpoint was being written, in {runs} runs: "
            f"{len(failures)} failures, {minutes:.1f} minutes"
        )
    assert not failures, "\n".join(failures)
    assert 2 * writing >= kills - 2


# SIGINT and SIGTERM


def moment_of_a_signal(draw, seconds):
    """(what is going on, when to send a signal)."""
    kind = draw.choice(["any", "any", "start", "evaluation", "evaluation", "save", "save", "end"])
    watch, longest = {
        "any": (None, seconds),
        "start": (None, 0.2),
        "evaluation": ("evaluating.*", 0.01),
        "save": (PART, 0.005),
        "end": (LAST, 0.05),
    }[kind]
    count = draw.randint(1, 4) if kind in ("evaluation", "save") else 1
    return kind, {"watch": watch, "count": count, "delay": draw.uniform(0, longest)}


def assert_interrupted(done, folder, number, times):
    """The code is the signal's, the words are few, and the newest checkpoint is of the very last
    step.
    """
    run = folder / "run"
    if (
        done.code == -number and not done.err
    ):  # before the first line of train.py, or after its last one
        assert done.out == "" or " evaluate run=" in done.out, done.out
        return
    # What a shell says of a process that was ended by a signal; Python's own end knows no handler
    # any more.
    code = 128 - done.code if times == 2 and done.code < 0 else done.code
    assert code == 128 + number, (done.code, done.err)
    lines = [line for line in done.err.splitlines() if line]
    assert "Traceback" not in done.err and len(lines) <= 3, done.err
    steps = (
        [int(line) for line in (folder / "steps").read_text().split()]
        if (folder / "steps").exists()
        else [0]
    )
    if times == 1 and max(steps) > 0:
        assert max(checkpoint.files(run / "checkpoints")) == max(steps)
        assert not list(folder.glob(PART))
    if checkpoint.files(run / "checkpoints"):
        checkpoint.newest(run / "checkpoints")  # good


def test_a_second_signal_adds_no_word_to_what_was_said():
    code = """
import signal
from stoker.command import signals
from stoker.trainer import stopping
signals.install()
signals.can_raise = True
signals.resume_command = "python train.py"
try:
    signal.raise_signal(signal.SIGTERM)
except stopping.Interrupted:
    {said}
    signal.raise_signal(signal.SIGTERM)
"""
    for said, err in [
        ("signals.print_advice('interrupted.')", "interrupted.\n"),
        ("pass", "ended immediately. To resume:\npython train.py\n"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code.format(said=said)], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (143, err)


def test_a_signal_that_a_finalizer_swallowed_ends_the_program_without_a_traceback():
    code = """
import signal
import sys
from stoker.command import exit_codes, signals

class Finalized:
    def __del__(self):
        {action}

def main():
    Finalized()
    print("goes on")

sys.argv = ["stoker"]
signals.install()
exit_codes.run(main)
"""
    advice = "Type the same command again to resume, or to start over if nothing was saved."
    for action, expected in [
        ("signal.raise_signal(signal.SIGTERM)", (143, f"\ninterrupted. {advice}\n")),
        ("raise ValueError('its own')", (0, "ValueError: its own\n")),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code.format(action=action)], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (expected[0], "goes on\n")
        assert done.stderr.endswith(expected[1])
        assert ("Traceback" in done.stderr) == (expected[0] == 0)


@pytest.mark.slow
def test_an_interrupted_run_ends_as_if_nothing_had_been(forks, whole, tmp_path, large, capsys):
    """By one signal or two, to the process or to its workers as well."""
    runs, failures, start, kinds = 0, [], time.monotonic(), collections.Counter()
    while sum(kinds.values()) < (100 if large else 6):
        folder, draw = tmp_path / str(runs), random.Random(f"signal {SEED} {runs}")
        more = WORKERS if draw.random() < 0.25 else []
        number, times = draw.choice([signal.SIGINT, signal.SIGTERM]), draw.choice([1, 1, 2])
        try:
            for _ in range(draw.choice([1, 1, 1, 3])):
                kind, moment = moment_of_a_signal(draw, whole.seconds)
                signals = [{"signal": number, "group": bool(more), **moment}]
                signals += [{"signal": number, "delay": draw.uniform(0, 0.02)}] * (times - 1)
                done = forks.run(folder, *JOB, *more, signals=signals)
                if done.sent and done.code:
                    kinds[kind] += 1
                    assert_interrupted(done, folder, number, times)
                else:
                    assert done.code == 0 and done.err == "", (done.code, done.err)
            assert_continues(forks, folder, whole, *more)
        except AssertionError as error:
            about = f"{number.name} {times} times, {kind}, {moment}, {more}"
            failures.append(f"KILL_SEED={SEED}, run {runs}, {about}: {str(error)[:1000]}")
        else:
            shutil.rmtree(folder)
        runs += 1
    minutes = (time.monotonic() - start) / 60
    with capsys.disabled():
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        print(
            f"\n{kinds.total()} interrupts ({shown}) in {runs} runs: {len(failures)} failures, {minutes:.1f} minutes"
        )
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_an_interrupt_while_workers_start(forks, whole, tmp_path, large):
    """Those of the test's loader, after the last checkpoint; what ends them has to know them by
    then.
    """
    for i in range(30 if large else 3):
        moment = {"watch": LAST, "delay": 0.06 * i / (30 if large else 3)}
        interrupt = {"signal": signal.SIGINT, "group": True, **moment}
        done = forks.run(tmp_path / str(i), *JOB, *WORKERS, signals=[interrupt])
        assert done.code in (130, 0, -signal.SIGINT), (
            done.code,
            done.err,
        )  # the last: at the end of Python itself
        assert_continues(forks, tmp_path / str(i), whole, *WORKERS)


# Other faults


@pytest.fixture(scope="module")
def killed(forks, tmp_path_factory):
    """The folder of a run that was killed after some checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("killed")
    moment = {"watch": "run/checkpoints/step_00000015.ckpt", "delay": 0, "signal": signal.SIGKILL}
    assert forks.run(folder, *JOB, signals=[moment]).code == -9
    return folder


@pytest.fixture
def cut(killed, tmp_path):
    """A folder with that run in it, moved from where it was."""
    return shutil.copytree(killed, tmp_path / "elsewhere")


def contents(folder, pattern="*"):
    """{path: bytes} of all files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob(pattern)
        if path.is_file()
    }


def assert_explained(done, *codes):
    assert done.code in codes, (done.code, done.err)
    assert "Traceback" not in done.err and 1 <= len(done.err.strip().splitlines()) <= 3, done.err
    assert done.err.startswith("error: "), done.err


@pytest.mark.slow
def test_a_directory_that_was_copied_elsewhere(forks, whole, killed, cut):
    before = contents(killed)
    done = assert_continues(forks, cut, whole)
    assert "continued at step 15" in done.out and contents(killed) == before


def test_a_clock_that_was_set_back(forks, whole, cut):
    """The newest checkpoint is by its step and not by its time."""
    found = checkpoint.files(cut / "run" / "checkpoints")
    for age, path in enumerate(found.values()):  # the newest is the oldest
        os.utime(path, (1000 * age, 1000 * age))
    assert f"continued at step {max(found)}" in assert_continues(forks, cut, whole).out


@pytest.mark.slow
def test_a_disk_that_is_full(forks, whole, cut, large):
    """No file may have more bytes: those of the configuration, of the rows, of a checkpoint at its
    begin or end.
    """
    before = contents(cut / "run", "*.ckpt")
    for limit in [1500, 2_600_000, 3000, 100_000, 2_000_000][: None if large else 2]:
        assert_explained(forks.run(cut, *JOB, file=limit), 3)
        assert contents(cut / "run", "*.ckpt") == before
    assert_continues(forks, cut, whole)


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_very_first_checkpoint(forks, whole, tmp_path):
    assert_explained(forks.run(tmp_path, *JOB, file=1_000_000), 3)
    assert_continues(forks, tmp_path, whole)


@pytest.mark.slow
def test_what_cannot_be_written(forks, whole, cut):
    before = contents(cut / "run", "*.ckpt")
    for part in (".", "checkpoints"):
        place = cut / "run" / part
        mode = place.stat().st_mode
        place.chmod(mode & ~0o222)
        assert_explained(forks.run(cut, *JOB, bound=True), 2, 3)
        place.chmod(mode)
        assert contents(cut / "run", "*.ckpt") == before
    assert_continues(forks, cut, whole)


@pytest.mark.slow
def test_a_folder_where_a_file_should_be_and_a_file_where_a_folder_should_be(
    forks, whole, cut, large
):
    run, aside = cut / "run", cut / "aside"
    for part in ["checkpoints", "metrics.jsonl", "result.json", "model.safetensors", "config.yaml"][
        : None if large else 3
    ]:
        place = run / part
        if place.exists():
            place.rename(aside)
        place.write_text("no folder") if part == "checkpoints" else place.mkdir()
        assert_explained(forks.run(cut, *JOB), 2, 3)
        place.unlink() if part == "checkpoints" else place.rmdir()
        if aside.exists():
            aside.rename(place)
    assert_continues(forks, cut, whole)


def test_too_long_a_path(forks, tmp_path):
    for name in ("a" * 300, "/".join(["a" * 100] * 50)):
        assert_explained(forks.run(tmp_path, *JOB, f"run_dir={name}"), 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "out"]


def test_two_runs_in_one_directory(forks, whole, tmp_path):
    """The second ends with code 75, whatever its settings, and the first does not notice; it waits
    meanwhile.
    """
    hold = tmp_path / "first" / "hold.16"
    hold.parent.mkdir()
    hold.touch()
    with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.closing(Forks()) as other:
        first = pool.submit(forks.run, hold.parent, *JOB)
        while not (hold.parent / "evaluating.16").exists() and not first.done():
            time.sleep(0.01)
        before = contents(
            hold.parent / "run", "*.*l"
        )  # .yaml, .jsonl; a checkpoint may still be in the writing
        for more in ([], ["seed=1"], ["resume=never", "overwrite=true"]):
            assert_explained(
                other.run(tmp_path / "second", *JOB, *more, f"run_dir={hold.parent / 'run'}"), 75
            )
        assert contents(hold.parent / "run", "*.*l") == before
        hold.unlink()
        assert first.result().code == 0, first.result().err
    assert_same(left(hold.parent), whole.left)


@pytest.mark.slow
def test_workers_that_outlive_a_killed_run_do_not_hold_its_directory(forks, whole, tmp_path):
    """They are stopped, so that they are there for sure; the next run starts at once."""
    moment = {"watch": "evaluating.16", "delay": 0, "signal": signal.SIGKILL}
    done = forks.run(tmp_path, *JOB, *WORKERS, signals=[moment])
    assert done.code == -9
    os.killpg(done.pid, signal.SIGSTOP)
    try:
        assert_continues(forks, tmp_path, whole, *WORKERS)
    finally:
        os.killpg(done.pid, signal.SIGKILL)  # which would fail if there were none
