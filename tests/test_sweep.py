"""Sweeps: what is in the table is what the jobs left, each job is the run that it would be alone,
none is run twice.

`pytest --large -n 0 tests/test_sweep.py` kills a sweep of 24 jobs 20 times.
"""

import csv
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote_to_bytes

import hydra
import numpy
import pytest
import torch
from forks import PROGRAM, TRAIN
from hydra.experimental.callback import Callback
from safetensors.torch import load_file
from sklearn.feature_selection import f_classif

from stoker.command import arguments, exit_codes, shell
from stoker.runs import json_files, lock
from stoker.runs.result import Best
from stoker.runs.rows import read_rows
from stoker.runs.sweep_record import SweepRecord
from stoker.sweeps import jobs, page, progress, sweep, table
from stoker.tasks.redraw import redraw
from stoker.trainer.callbacks import Callback as TrainerCallback
from stoker.trainer.errors import UserError

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform"),
    pytest.mark.usefixtures("as_train_py"),
]
JOB = (
    "dataset=synthetic",
    "dataset.n=100",
    "batch_size=8",
    "epochs=2",
    "model.hidden=[8]",
)  # 10 steps an epoch
FILES = {
    "job.json",
    "result.json",
    "config.yaml",
    "metrics.jsonl",
    "checkpoints",
    "model.safetensors",
    "model.md",
}
FILES |= {"evaluation.json", "provenance", "status.json"}


# Two sweeps at once.
AT_ONCE = f"""
import os, runpy, sys

child = os.fork()
sys.argv = [{str(TRAIN)!r}, *sys.argv[1:], "seed=0,1" if child else "seed=2,3"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if child:
        assert os.waitpid(child, 0)[1] == 0
"""


class Written(Callback):
    """Appends the files that each job writes to the file `written`."""

    def on_multirun_start(self, config, **_):
        write = json_files.write_json

        def told(path, contents):
            with open("written", "a") as file:
                file.write(f"{path.parent.name}/{path.name}\n")
            write(path, contents)

        json_files.write_json = told


class Sparsity(TrainerCallback):
    """Stops the training for a reason whose words sound like a search's."""

    def on_epoch_end(self, trainer):
        trainer.stop("pruned to 90% sparsity")


class Broken(torch.nn.Module):
    """A model of the user's own with a bug for some of its settings."""

    def __init__(self, in_shape, num_classes, width):
        super().__init__()
        self.layer = torch.nn.Linear(in_shape[0], num_classes if width else 1 / 0)

    def forward(self, inputs):
        return self.layer(inputs)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def rows_of(out):
    """The cells of the table at the end of a sweep's output, the header first."""
    lines = out.rpartition("\n\n")[2].splitlines()
    end = next(i for i, line in enumerate(lines) if re.match(r"(best|sweep) {4}", line))
    return [re.split(" {2,}", line) for line in lines[:end]]


def line_of(out, name):
    """What stands behind `name` in the lines after the table."""
    [line] = [
        line for line in out.rpartition("\n\n")[2].splitlines() if line.startswith(f"{name:<9}")
    ]
    return line[9:]


def arguments_of(command):
    python, script, *arguments = shlex.split(command)
    assert f"{python} {script}" == PROGRAM
    return arguments


def identities(folder):
    """{job: (inode, time of its last change)} of each result: what is run again to its end has
    another.
    """
    found = {path.parent.name: path.stat() for path in folder.glob("*/result.json")}
    return {job: (status.st_ino, status.st_mtime_ns) for job, status in found.items()}


def weights(folder):
    return {
        name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def swept(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    written = "+hydra.callbacks.written._target_=test_sweep.Written"
    grid = ("optimizer.lr=1e-3,1e-2", "seed=0,1,2", "model.dropout=0.0,2.0")
    done = forks.run(folder, "-m", *JOB, *grid, "hydra.sweep.dir=all", written)
    assert done.code == 2 and "Callback" not in done.err, done.err
    assert (
        done.err.splitlines()
        == ["error: model.dropout=2.0: expected a number of at least 0 and at most 0.95."] * 6
    )
    done.folder = folder / "all"
    done.jobs = [read_json(done.folder / str(i) / "result.json") for i in range(12)]
    return done


def test_a_typed_number_is_short():
    shown = {"0.0019645312": "0.001965", "10000.0": "10000", "1e-05": "1e-05", "mlp": "mlp"}
    assert {text: table.short(text) for text in shown} == shown


def test_the_importance_of_a_setting_is_beyond_the_other_settings():
    rates, widths = zip(*itertools.product(range(3), range(3)), strict=True)
    exact = page.fractions([rates, widths], [0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 7.0, 8.0, 9.0])
    assert exact == pytest.approx([54 / 60, 6 / 60])  # of the sum of squares of the ranks
    rng = numpy.random.default_rng(0)
    groups = rng.integers(0, 4, 30)
    values = rng.normal(size=30) + groups
    [[ratio], _] = f_classif(values.argsort().argsort().reshape(-1, 1), groups)
    adjusted = 3 * (ratio - 1) / (3 * ratio + 26)  # epsilon squared, from the F statistic
    assert page.fractions([groups], values) == pytest.approx([adjusted])
    few = page.fractions([range(6), groups[:6] > 1], values[:6])  # each setting by itself
    assert few == [0.0, *page.fractions([groups[:6] > 1], values[:6])]
    together = page.fractions([groups, groups + 1], values)  # cannot be told apart
    assert together == pytest.approx([adjusted, adjusted])


@pytest.mark.slow
def test_seeds_are_one_row_with_their_mean_and_deviation(swept):
    header, *rows = rows_of(swept.out)
    assert header == ["job", "val/acc", "test/acc", "seconds", "settings"]
    expected = []
    for first, lr in ((0, "0.001"), (6, "0.01")):
        jobs = [swept.jobs[first + i] for i in (0, 2, 4)]
        assert [job["overrides"][-3:] for job in jobs] == [
            [f"optimizer.lr={lr}", f"seed={i}", "model.dropout=0.0"] for i in range(3)
        ]
        parts = [[job["best"]["value"] for job in jobs], [job["test/acc"] for job in jobs]]
        shown = [f"{statistics.mean(part):.4f} +- {statistics.stdev(part):.4f}" for part in parts]
        seconds = f"{statistics.fmean(job['seconds'] for job in jobs):.1f}"
        row = [f"{first} (+2)", *shown, seconds, f"optimizer.lr={lr} model.dropout=0.0"]
        expected.append((statistics.mean(parts[0]), row))
    expected.sort(reverse=True)
    assert rows[:2] == [row for _, row in expected]
    assert [row[:2] for row in rows[2:]] == [[str(i), "failed"] for i in (1, 3, 5, 7, 9, 11)]
    failed = "optimizer.lr=0.001 seed=0"
    reason = "model.dropout=2.0: expected a number of at least 0 and at most 0.95."
    assert rows[2][2] == f"{failed}: {reason}"
    assert line_of(swept.out, "sweep") == "all: 6 done, 6 failed; the table is in sweep.csv"
    assert line_of(swept.out, "report") == "all/sweep.html"
    assert line_of(swept.out, "best") == f"{PROGRAM} {shlex.join(JOB)} {expected[0][1][-1]}"
    reports = {path.parent.name for path in swept.folder.glob("*/report.html")}
    assert reports == {str(i) for i in (0, 2, 4, 6, 8, 10)}


def test_a_row_of_the_csv_is_a_job(swept):
    with open(swept.folder / "sweep.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    keys = ["optimizer.lr", "seed", "model.dropout"]
    assert list(rows[0]) == [
        "job",
        "status",
        *keys,
        "val/acc",
        "test/acc",
        "test/loss",
        "seconds",
        "error",
    ]
    for i, (row, job) in enumerate(zip(rows, swept.jobs, strict=True)):
        assert (
            row["job"] == str(i) and [f"{key}={row[key]}" for key in keys] == job["overrides"][-3:]
        )
        if job["error"]:
            assert (row["status"], row["error"], row["val/acc"]) == ("failed", job["error"], "")
        else:
            numbers = [job["best"]["value"], job["test/loss"], job["test/acc"], job["seconds"]]
            assert row["status"] == "done" and row["error"] == ""
            assert [
                float(row[name]) for name in ("val/acc", "test/loss", "test/acc", "seconds")
            ] == numbers


class Page(HTMLParser):
    """Counts what is in a page; each element that is opened has to be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in ("meta", "line", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def plotted(text):
    """The numbers from which the page draws."""
    return json.loads(
        re.search(r'<script type="application/json" id="sweep">(.*?)</script>', text)[1]
    )


def test_the_page_has_the_numbers_of_each_job_and_stands_alone(swept):
    text = (swept.folder / "sweep.html").read_text(encoding="utf-8")
    assert '<th class="number">optimizer.<wbr>lr</th>' in text and "differ only in seed." in text
    assert "Train the best settings again, with the default seed:" in text
    page = Page(text)
    plots = plotted(text)
    assert [key["name"] for key in plots["keys"]] == ["optimizer.lr", "seed", "model.dropout"]
    assert [key["values"] for key in plots["keys"]] == [
        ["0.001", "0.01"],
        list("012"),
        ["0.0", "2.0"],
    ]
    assert len(plots["jobs"]) == 12
    for job in plots["jobs"]:
        result = swept.jobs[int(job["name"])]
        assert job["value"] == (result.get("best") or {}).get("value")
        settings = [
            f"{key['name']}={key['values'][place]}"
            for key, place in zip(plots["keys"], job["settings"], strict=True)
        ]
        assert settings == result["overrides"][-3:]
        rows = read_rows(swept.folder / job["name"] / "metrics.jsonl")
        curve = [[row["epoch"], row["val/acc"]] for row in rows if "val/acc" in row]
        assert numpy.allclose(job["curve"], curve, rtol=1e-4) and len(curve) == len(job["curve"])
    links = [attributes["href"] for tag, attributes in page.seen if tag == "a"]
    assert links[0] in links[1:]
    assert all((swept.folder / link).is_file() for link in links)
    assert not {"link", "img", "iframe"} & {tag for tag, _ in page.seen}
    assert not re.search(r"url\((?!#)", text) and not re.search(
        r"https?:(?!//www.w3.org/2000/svg)", text
    )
    assert "prefers-color-scheme: dark" in text and line_of(swept.out, "best") in page.text


def test_all_of_it_is_built_again_from_the_directories(swept, tmp_path, capsys):
    shutil.copytree(swept.folder, tmp_path / "all")
    for name in ("sweep.csv", "sweep.html", "multirun.yaml"):
        (tmp_path / "all" / name).unlink()
    redraw([str(tmp_path / "all")])
    assert rows_of("\n\n" + capsys.readouterr().out) == rows_of(swept.out)
    assert (tmp_path / "all" / "sweep.csv").read_bytes() == (
        swept.folder / "sweep.csv"
    ).read_bytes()
    before, now = (
        (folder / "sweep.html").read_text().splitlines()
        for folder in (swept.folder, tmp_path / "all")
    )
    assert [
        line
        for line, other in zip(now, before, strict=True)
        if line != other and "hydra.sweep.dir" not in line
    ] == []


def test_the_result_of_a_job_is_written_once(swept):
    """Who watches a sweep tells of a job when its result.json is a new one."""
    written = (swept.folder.parent / "written").read_text().splitlines()
    assert sorted(name for name in written if name.endswith("/result.json")) == sorted(
        f"{job}/result.json" for job in range(12)
    )
    assert all(job["versions"] for job in swept.jobs if job["best"])


def test_the_learning_rate_finder_prints_the_command_of_the_run(forks, tmp_path):
    done = forks.run(
        tmp_path, *JOB[:3], "task=lr_find", "~optimizer.lr", "max_steps=12", "run_dir=found"
    )
    assert done.code == 0, done.err
    curve = (tmp_path / "found" / "lr_find.csv").read_text().splitlines()
    first, second = (float(row.split(",")[0]) for row in curve[1:3])
    assert second / first == pytest.approx(1e6 ** (1 / 99), rel=1e-4)  # max_steps is the run's
    train = line_of(done.out, "train")
    assert "max_steps=12" in train and "~optimizer.lr" not in train


def test_a_job_is_the_run_that_it_would_be_alone(forks, tmp_path, large):
    """Whatever the jobs before it have left in the process: a mode, threads, a compiled optimizer,
    an error.
    """
    job = ("dataset=synthetic", "dataset.n=100", "dataset.in_shape=[1,8,8]", "epochs=1")
    # ema=2 is a mistake; deterministic=true imports the compiler, which takes long.
    modes = "deterministic=true,false" if large else "precision=bf16,fp32"
    done = forks.run(
        tmp_path, "-m", *job, "model=cnn,mlp", "ema=0.9,2", modes, "hydra.sweep.dir=all"
    )
    assert done.code == 2 and line_of(done.out, "sweep").startswith("all: 4 done, 4 failed;"), (
        done.err
    )
    for job in (1, 5):
        alone = read_json(tmp_path / "all" / str(job) / "job.json")["overrides"]
        assert forks.run(tmp_path, *alone, f"run_dir=alone{job}").code == 0
        assert weights(tmp_path / "all" / str(job)) == weights(tmp_path / f"alone{job}")


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_and_no_job_is_run_twice_to_its_end(
    forks, tmp_path, large, capsys
):
    kills, jobs, generator = 20 if large else 2, 24, random.Random(0)
    arguments = (
        "-m",
        *JOB[:-1],
        "model=linear,mlp",
        "optimizer.lr=1e-3,1e-2,1e-1",
        "seed=0,1,2,3",
        "hydra.sweep.dir=all",
    )
    killed, seen, cut = 0, {}, {"23"}
    while killed < kills:
        what = (
            "checkpoints/step_*.ckpt"
            if killed % 2 == 0
            else generator.choice(("result.json", "job.json"))
        )
        moment = {"watch": f"all/*/{what}", "count": generator.randint(1, 9), "delay": 0}
        done = forks.run(tmp_path, *arguments, signals=[{"signal": signal.SIGKILL, **moment}])
        now = identities(tmp_path / "all")
        assert seen.items() <= now.items()
        killed, seen = killed + (done.code == -9), now
        cut |= {
            path.parent.parent.name for path in tmp_path.glob("all/*/checkpoints/*.ckpt")
        } - set(now)
        if done.code != -9:  # it came to its end first
            assert done.code == 0 and len(now) == jobs
            shutil.rmtree(tmp_path / "all")
            seen = {}
    done = forks.run(tmp_path, *arguments)
    assert done.code == 0, done.err
    assert (
        seen.items() <= identities(tmp_path / "all").items()
        and len(identities(tmp_path / "all")) == jobs
    )
    assert line_of(done.out, "sweep").startswith("all: 24 done;") and "resume" not in done.out
    if seen:
        assert f"24 jobs, {len(seen)} already done;" in done.out
    for job in range(jobs):
        left = {path.name for path in (tmp_path / "all" / str(job)).iterdir()}
        assert (
            left - {".lock", "report.html"} == FILES
        )  # which a kill just after the result leaves, and which locks nothing
    for job in sorted(cut)[: 6 if large else 2]:
        alone = read_json(tmp_path / "all" / job / "job.json")["overrides"]
        assert forks.run(tmp_path, *alone, f"run_dir=alone{job}").code == 0
        assert weights(tmp_path / "all" / job) == weights(tmp_path / f"alone{job}")
    with capsys.disabled():
        print(
            f"\n{killed} kills, {len(seen)} of {jobs} jobs done at the last one, jobs cut in two: {len(cut) - 1}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_that_is_stopped_says_how_to_go_on(forks, tmp_path, number, code):
    folder = "hydra.sweep.dir='mit ä = b'"
    marks = "+callbacks.marks._target_=marks.Marks"
    longer = ["epochs=100" if one == "epochs=2" else one for one in JOB]  # lasts about a second
    job = ("-m", *longer, "seed=0,1,2", "log_every=1", marks, folder)
    moment = {"signal": number, "watch": "mit*/1/metrics.jsonl", "delay": 0}
    stopped = forks.run(tmp_path, *job, signals=[moment])
    assert stopped.code == code and "Traceback" not in stopped.err, stopped.err
    assert re.search(r"^interrupted at step \d+\.$", stopped.err, re.MULTILINE)
    assert [row[1] for row in rows_of(stopped.out)[2:]] == ["unfinished"]
    assert line_of(stopped.out, "sweep").startswith(
        "mit ä = b: 1 done, 1 unfinished, 1 not started;"
    )
    before = identities(tmp_path / "mit ä = b")
    on = arguments_of(line_of(stopped.out, "resume"))
    assert sorted(on) == sorted(job)
    done = forks.run(tmp_path, *on)
    assert done.code == 0 and line_of(done.out, "sweep").startswith("mit ä = b: 3 done;"), done.err
    assert before.items() <= identities(tmp_path / "mit ä = b").items()
    output = (tmp_path / "mit ä = b" / "jobs" / "1.txt").read_text()
    assert re.search(r"continued at step [1-9]", output)


@pytest.mark.slow
def test_a_failed_job_is_run_again_and_the_others_are_not(forks, tmp_path):
    sweep_of = (
        "-m",
        "dataset=csv",
        "dataset.path=table.csv",
        "dataset.target=y",
        "batch_size=4",
        "epochs=1",
    )
    sweep_of += ("loss=mse,l1", "hydra.sweep.dir=all")
    refused = forks.run(tmp_path, *sweep_of)
    assert refused.code == 2 and refused.err.count("error: ") == 2
    assert not (tmp_path / "all").exists()
    (tmp_path / "table.csv").write_text(
        "a,y\n" + "".join(f"{i},{i * 0.5 + 0.25}\n" for i in range(40))
    )
    done = forks.run(tmp_path, *sweep_of)
    assert done.code == 0 and line_of(done.out, "sweep").startswith("all: 2 done;"), done.err
    before = identities(tmp_path / "all")
    (tmp_path / "all" / "1" / "result.json").write_text(
        '{"overrides": [], "error": "x", "code": 3}'
    )
    assert forks.run(tmp_path, *sweep_of).code == 0
    now = identities(tmp_path / "all")
    assert now["0"] == before["0"] and now["1"] != before["1"]
    assert not any(read_json(tmp_path / "all" / job / "result.json")["error"] for job in "01")


def test_a_bug_in_a_model_of_ones_own_does_not_end_the_sweep(forks, tmp_path):
    models = (
        "dataset=synthetic",
        "dataset.n=100",
        "max_steps=2",
        "model._target_=test_sweep.Broken",
    )
    done = forks.run(tmp_path, "-m", *models, "+model.width=0,1", "hydra.sweep.dir=all")
    assert done.code != 0 and "division by zero" in done.err
    assert [row[:2] for row in rows_of(done.out)[2:]] == [["0", "failed"]]
    assert "division by zero" in rows_of(done.out)[2][2]
    assert read_json(tmp_path / "all" / "1" / "result.json")["steps"] == 2


def test_a_sweep_can_stop_at_the_first_failure(forks, tmp_path):
    grid = ("-m", *JOB, "seed=0,-1,1", "sweep.on_error=stop", "hydra.sweep.dir=all")
    done = forks.run(tmp_path, *grid)
    assert done.code == 2 and line_of(done.out, "sweep").startswith(
        "all: 1 done, 1 failed, 1 not started;"
    )
    assert (
        not (tmp_path / "all" / "2").exists()
        and "  seed=-1: expected a whole number of at least 0.\n" in done.out
    )
    go_on = arguments_of(line_of(done.out, "resume"))
    assert go_on == [*grid]
    typo = forks.run(
        tmp_path, *JOB, "-m", "seed=0,1", "sweep.on_error=stopp", "hydra.sweep.dir=new"
    )
    assert typo.code == 2 and "Did you mean 'stop'?" in typo.err and not (tmp_path / "new").exists()
    typo = forks.run(tmp_path, *JOB, "-m", "model.dropuot=0,1", "hydra.sweep.dir=new")
    assert typo.code == 2 and typo.out == "" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("typed", "errors"), [("seed=", 1), ("+model.width=1,2", 2)])
def test_a_sweep_whose_jobs_are_all_refused_leaves_nothing(forks, tmp_path, typed, errors):
    done = forks.run(tmp_path, "-m", *JOB, typed, "hydra.sweep.dir=all")
    assert done.code == 2 and done.err.count("error: ") == errors
    assert "sweep.csv" not in done.out and not (tmp_path / "all").exists()


@pytest.mark.parametrize("typed", [("seed=0,1", "epochs=0"), ("epochs=0,1",)])
def test_a_sweep_whose_first_job_is_invalid_is_refused_before_it_is_announced(
    forks, tmp_path, typed
):
    done = forks.run(tmp_path, "-m", *JOB, *typed, "hydra.sweep.dir=all")
    assert done.code == 2 and done.out == "" and not (tmp_path / "all").exists()
    assert done.err.count("error: ") == 1 and done.err.startswith("error: epochs=0: ")


def test_a_setting_may_depend_on_the_number_of_the_job(forks, tmp_path):
    typed = ("seed=${hydra:job.num}", "optimizer.lr=0.1,0.2", "hydra.sweep.dir=all")
    done = forks.run(tmp_path, "-m", *JOB, *typed)
    assert done.code == 0 and "2 done" in line_of(done.out, "sweep    all"), done.err


@pytest.mark.slow
def test_another_sweep_in_the_directory_is_refused_before_its_first_job(forks, tmp_path):
    assert forks.run(tmp_path, "-m", *JOB, "seed=0,1", "hydra.sweep.dir=all").code == 0
    before = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name not in ("out", "err")
    }
    done = forks.run(tmp_path, "-m", *JOB, "seed=2,1", "hydra.sweep.dir=all")
    first, second, third = done.err.splitlines()
    assert done.code == 2 and done.out == ""
    assert first == "error: hydra.sweep.dir=all: this sweep was started with seed=0,1, not 2,1."
    assert second.startswith("Choose a different hydra.sweep.dir") and arguments_of(third)[-2:] == [
        "seed=0,1",
        "hydra.sweep.dir=all",
    ]
    assert {path: path.read_bytes() for path in before} == before
    done = forks.run(tmp_path, "-m", *JOB, "seed=0,1", "log_every=7", "hydra.sweep.dir=all")
    assert done.code == 2 and "was started with log_every=(default), not 7." in done.err
    done = forks.run(tmp_path, "-m", "sweep=optuna", *JOB, "seed=0,1", "hydra.sweep.dir=all")
    assert done.code == 2 and "was started with sweep=(default), not optuna." in done.err
    assert {path: path.read_bytes() for path in before} == before
    # The order of the fixed settings, and those of the sweep as a whole, make no other sweep.
    typed = ("seed=0,1", *JOB, "sweep.on_error=stop", "hydra.sweep.dir=all")
    done = forks.run(tmp_path, "--multirun", *typed)
    assert done.code == 0 and line_of(done.out, "sweep").startswith("all: 2 done;")
    # A directory in which no training has begun is nobody's.
    assert forks.run(tmp_path, "-m", *JOB, "seed=-1,-2", "hydra.sweep.dir=typo").code == 2
    assert forks.run(tmp_path, "-m", *JOB, "seed=1,2", "hydra.sweep.dir=typo").code == 0


def test_the_order_of_the_swept_settings_makes_another_sweep(tmp_path, monkeypatch):
    """Their order decides which settings a number of a job stands for."""
    varied = ["model", "seed"]
    typed = ["-m", "model=linear,mlp", "epochs=1", "seed=0,1"]
    SweepRecord(typed, 4).write(tmp_path)
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "epochs=1", *typed])
    jobs.check_command(tmp_path, varied)
    monkeypatch.setattr(sys, "argv", [sys.argv[0], *reversed(typed)])
    with pytest.raises(UserError, match="started with model before seed, not seed before model"):
        jobs.check_command(tmp_path, varied)


def test_what_the_jobs_differ_in_is_never_harmless(forks, tmp_path):
    one = ("-m", *JOB[:3], "max_steps=8", "hydra.sweep.dir=all")
    assert forks.run(tmp_path, *one, "eval_every=1,4").code == 0
    before = identities(tmp_path / "all")
    done = forks.run(tmp_path, *one, "eval_every=4,1")
    assert done.code == 2 and "this sweep was started with eval_every=1,4, not 4,1." in done.err
    assert forks.run(tmp_path, *one, "eval_every=1,4").code == 0
    assert identities(tmp_path / "all") == before


def test_a_job_that_is_running_is_told_from_one_that_was_left_off(tmp_path, capsys):
    for job in "012":
        json_files.write_json(
            tmp_path / job / "job.json",
            {"number": int(job), "overrides": [f"seed={job}", "epochs=9"]},
        )
        row = {"step": 20, "epoch": 1.0, "val/loss": 0.5, "val/acc": 0.75}
        (tmp_path / job / "metrics.jsonl").write_text(
            f'{json.dumps(row)}\n{{"step": 30, "train/loss": 1'
        )
    (tmp_path / "2" / "metrics.jsonl").unlink()
    json_files.write_json(
        tmp_path / "sweep.json", {"typed": ["-m", "seed=0,1,2,3", "epochs=9"], "jobs": 4}
    )
    with lock.held(tmp_path / "1"):
        redraw([str(tmp_path)])
    *rows, last, _ = capsys.readouterr().out.splitlines()
    assert [re.split(" {2,}", row)[:2] for row in rows[1:]] == [
        ["1", "running"],
        ["0", "unfinished"],
        ["2", "unfinished"],
    ]
    assert "1 running, 2 unfinished, 1 not started" in last
    redraw([str(tmp_path)])  # nobody is at work any more
    go_on = arguments_of(line_of(capsys.readouterr().out, "resume"))
    assert go_on == ["-m", "seed=0,1,2,3", "epochs=9", shell.setting("hydra.sweep.dir", tmp_path)]


def test_on_a_terminal_a_row_is_wrapped_at_words_and_a_command_is_not(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    typed = ["model=linear", "optimizer.lr=0.01"]
    best = {"name": "val/acc", "mode": "max", "value": 0.5}
    results = [{"best": best, "seconds": 2.0}, {"error": "several words " * 9, "code": 3}]
    for i, result in enumerate(results):
        json_files.write_json(tmp_path / str(i) / "job.json", {"number": i, "overrides": typed})
        json_files.write_json(tmp_path / str(i) / "result.json", {"overrides": typed, **result})
    json_files.write_json(tmp_path / "sweep.json", {"typed": ["-m", *typed], "jobs": 2})
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    redraw([str(tmp_path)])
    table, command, _ = re.split("^(best .*)$", sys.stdout.getvalue(), maxsplit=1, flags=re.M)
    assert all(len(line) <= 50 for line in table.splitlines()) and "several words" in table
    assert command.endswith(" ".join(typed)) and len(command) > 50


def test_folds_are_one_row_with_their_mean_and_deviation(tmp_path, capsys):
    """As seeds are, and numpy computes them."""
    values = {"1e-2": [0.5, 0.625, 0.9375], "1e-3": [0.25, 0.5, 0.375]}
    for i, (rate, fold) in enumerate(itertools.product(values, range(3))):
        typed = [f"optimizer.lr={rate}", "dataset.folds=3", f"dataset.fold={fold}"]
        best = {"name": "val/acc", "mode": "max", "value": values[rate][fold]}
        result = {"overrides": typed, "best": best, "seconds": 2.0}
        json_files.write_json(tmp_path / str(i) / "job.json", {"number": i, "overrides": typed})
        json_files.write_json(tmp_path / str(i) / "result.json", result)
    json_files.write_json(tmp_path / "sweep.json", {"typed": ["-m"], "jobs": 6})
    redraw([str(tmp_path)])
    header, *rows, best, _ = capsys.readouterr().out.splitlines()[:5]
    assert header.split()[:2] == ["job", "val/acc"]
    for row, rate, names in zip(rows, values, ("0 (+2)", "3 (+2)"), strict=True):
        mean, deviation = numpy.mean(values[rate]), numpy.std(values[rate], ddof=1)
        shown = f"{mean:.4f} +- {deviation:.4f}"
        assert re.split(" {2,}", row)[:2] == [names, shown] and row.endswith(f"lr={rate}")
    assert best == f"best     {PROGRAM} optimizer.lr=1e-2 dataset.folds=3"
    assert shown.replace("+-", "±") in (tmp_path / "sweep.html").read_text(encoding="utf-8")


def test_many_seeds_are_one_row(tmp_path, capsys):
    for i, seed in enumerate((3, 1, 4, 1, 5, 9, 2)):
        overrides = ["epochs=1", f"seed={seed}"]
        best = {"name": "val/acc", "mode": "max", "value": 0.5}
        json_files.write_json(tmp_path / str(i) / "job.json", {"number": i, "overrides": overrides})
        result = {"overrides": overrides, "best": best, "seconds": 2.0}
        json_files.write_json(tmp_path / str(i) / "result.json", result)
    json_files.write_json(tmp_path / "sweep.json", {"typed": ["-m"], "jobs": 7})
    redraw([str(tmp_path)])
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith("0 (+6)  ") and "=" not in row


@pytest.mark.parametrize(("of", "while_it"), [(jobs, "is_held"), (jobs.RunResult, "read")])
def test_a_job_that_ends_while_it_is_looked_at(tmp_path, monkeypatch, of, while_it):
    result = {"overrides": ["seed=0"], "best": None, "seconds": 1.0}
    json_files.write_json(tmp_path / "0" / "job.json", {"number": 0, "overrides": ["seed=0"]})
    ask = getattr(of, while_it)

    def ends(path):
        found = ask(path)
        json_files.write_json(tmp_path / "0" / "result.json", result)
        return found

    monkeypatch.setattr(of, while_it, ends)
    assert jobs.read_job(tmp_path / "0").status == (
        "done" if while_it == "is_held" else "unfinished"
    )
    assert jobs.read_job(tmp_path / "0").status == "done"


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_page_of_a_large_sweep_of_anybody_has_only_text_of_theirs(tmp_path, mode, capsys):
    evil = "</svg></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[31m"
    for i in range(500):
        typed = [
            f"optimizer.lr=1e-{i % 9}",
            f"model={evil if i % 7 else 'mlp'}",
            f"{evil}.a={i % 3}",
            f"b=[{i},1]",
        ]
        best = {"name": f"val/{evil}", "mode": mode, "value": (i * 37 % 101) / 10}
        result = {"overrides": typed, "best": best, "seconds": 1.0, f"test/{evil}": 1.0}
        result = {"overrides": typed, "error": evil} if i % 50 == 49 else result
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "result.json").write_text(json.dumps(result))
    (tmp_path / "sweep.json").write_text(json.dumps({"typed": ["-m", evil], "jobs": evil}))
    redraw([str(tmp_path)])
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines()) and len(out.splitlines()) < 50
    text = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    page = Page(text)
    scripts = [attributes for tag, attributes in page.seen if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "sweep"}, {}]
    assert "img" not in {tag for tag, _ in page.seen}
    assert not any(name.startswith("on") for _, attributes in page.seen for name in attributes)
    plots = plotted(text)
    values = {str(i): (i * 37 % 101) / 10 for i in range(500) if i % 50 != 49}
    assert {job["name"]: job["value"] for job in plots["jobs"] if job["row"] < 490} == values
    assert [job["value"] for job in plots["jobs"] if job["row"] >= 490] == [None] * 10
    best = (max if mode == "max" else min)(values.values())
    assert values[rows_of("\n\n" + out)[1][0]] == plots["jobs"][0]["value"] == best
    assert plots["jobs"][0]["row"] == 0


def test_the_link_to_a_job_whose_name_is_not_unicode_leads_to_its_report(tmp_path):
    name = "a \udcff"
    (tmp_path / name).mkdir()
    (tmp_path / name / "report.html").touch()
    link = page.link_of(table.Sweep(tmp_path), jobs.Job(name, []))
    assert unquote_to_bytes(link) == os.fsencode(f"{name}/report.html")


def test_names_are_sorted_by_their_numbers_of_any_length(tmp_path):
    names = ["b2", "b10", "b" + "9" * 200]
    for name in reversed(names):
        json_files.write_json(tmp_path / name / "job.json", {})
    assert [job.name for job in jobs.read_jobs(tmp_path)] == names


def test_a_spreadsheet_runs_nothing_of_the_csv(tmp_path):
    evil = ["=1+1", "+cmd|x", "-a", "@SUM(A1)", "\x1b[31m", " =1", "-1", "1e-3", "-inf", "a\nb"]
    for i, value in enumerate(evil):
        result = {
            "overrides": [f"lr={value}", f"@key={i}"],
            "seconds": 1.0,
            "test/loss": -1.5,
            "best": None,
        }
        json_files.write_json(tmp_path / str(i) / "result.json", result)
    json_files.write_json(tmp_path / "sweep.json", {})
    redraw([str(tmp_path)])
    with open(tmp_path / "sweep.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    expected = [
        "'=1+1",
        "'+cmd|x",
        "'-a",
        "'@SUM(A1)",
        "\\x1b[31m",
        "' =1",
        "-1",
        "1e-3",
        "-inf",
        "a b",
    ]
    assert header[:3] == ["job", "status", "lr"] and [row[2] for row in rows] == expected
    assert {row[header.index("test/loss")] for row in rows} == {"-1.5"}
    assert "'@key" in header


def test_a_pruned_job_has_its_best_value_and_comes_after_the_finished_ones(tmp_path, capsys):
    for i in range(5):
        best = {"name": "val/acc", "mode": "max", "value": i}
        result = {"overrides": [f"lr={i}"], "best": best, "seconds": 1.0}
        if i > 1:
            result["stopped"] = {"kind": "pruned", "text": "pruned at evaluation 2"}
        json_files.write_json(tmp_path / str(i) / "result.json", result)
    json_files.write_json(tmp_path / "sweep.json", {})
    redraw([str(tmp_path)])
    text = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert [(job["status"], job["value"]) for job in plotted(text)["jobs"]] == [
        ("done", 1),
        ("done", 0),
        ("pruned", 4),
        ("pruned", 3),
        ("pruned", 2),
    ]
    assert "; finished jobs first, sorted by val/acc (higher is better)" in text
    rows = capsys.readouterr().out.splitlines()[3:6]
    assert [re.split(" {2,}", row) for row in rows] == [
        [i, "pruned", f"lr={i}: pruned at evaluation 2"] for i in "432"
    ]
    ends = progress.Ends(tmp_path, 7, ["lr"])
    assert re.fullmatch(
        r"5/7  val/acc 3.0000 pruned {4,7}\d\.\d s left  job 3 lr=3",
        ends.line(jobs.read_job(tmp_path / "3")),
    )
    ends.line(jobs.Job("5", [], best=Best("val/f1", "max", 1, 9.0)))
    assert ends.best.name == "1"  # the numbers of two metrics are not compared


def test_the_line_of_a_job_has_the_settings_that_vary(tmp_path):
    typed = ["optimizer.lr=0.001", "groups.0.lr=1e-4", "seed=2"]
    ends = progress.Ends(tmp_path, 2, ["optimizer.lr", "seed"])
    shown = "optimizer.lr=0.001 seed=2"
    lines = []
    for i, value in enumerate([0.5, 0.25]):
        lines.append(ends.line(jobs.Job(str(i), typed, best=Best("val/loss", "max", 1, value))))
    assert re.fullmatch(
        rf"1/2  val/loss 0.5000 \(best\) {{7}}\d\.\d s left  job 0 {shown}", lines[0]
    )
    assert lines[1] == f"2/2  val/loss 0.2500{' ' * 26}job 1 {shown}"
    failed = jobs.Job(
        "2", [], "failed", note="The loss is 0.5 nan. First non-finite value: no.\nType x."
    )
    assert progress.outcome(failed) == "failed, The loss is 0.5 nan."


def test_two_sweeps_at_once_have_two_folders(forks, tmp_path):
    script = tmp_path / "both.py"
    script.write_text(AT_ONCE)
    done = forks.run(tmp_path, "-m", *JOB, script=script)
    assert done.code == 0, done.err
    folders = sorted((tmp_path / "runs").glob("*-sweep"))
    seeds = []
    for folder in folders:
        with open(folder / "sweep.csv", newline="", encoding="utf-8") as file:
            seeds.append({row["seed"] for row in csv.DictReader(file) if row["status"] == "done"})
    assert sorted(map(sorted, seeds)) == [["0", "1"], ["2", "3"]]


def test_a_job_is_pruned_by_its_search_and_not_by_the_words_of_a_callback(forks, tmp_path):
    callback = "+callbacks.sparsity._target_=test_sweep.Sparsity"
    done = forks.run(tmp_path, "-m", *JOB, "seed=0,1", "hydra.sweep.dir=all", callback)
    assert done.code == 0, done.err
    assert line_of(done.out, "sweep").startswith("all: 2 done;")
    results = [read_json(tmp_path / "all" / job / "result.json") for job in "01"]
    stopped = {"kind": "asked", "text": "pruned to 90% sparsity"}
    assert [result["stopped"] for result in results] == [stopped] * 2
    best = [result["best"]["value"] for result in results]
    [row] = rows_of(done.out)[1:]
    mean_and_deviation = f"{statistics.mean(best):.4f} +- {statistics.stdev(best):.4f}"
    assert row[:2] == ["0 (+1)", mean_and_deviation]
    with open(tmp_path / "all" / "sweep.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["status"], float(row["val/acc"])) for row in rows] == [
        ("done", value) for value in best
    ]


def test_what_is_typed_in_quotes_is_what_hydra_reads():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for value in (
        "runs/a",
        "mit ä = b",
        "it's",
        "a,b",
        "x(1)",
        "C:\\runs",
        "~",
        "a#b",
        "[1]",
        "trailing ",
        "100%",
    ):
        assert (
            str(OverridesParser.create().parse_override(shell.setting("run_dir", value)).value())
            == value
        )


def test_a_setting_with_two_plusses_is_recorded_so_that_hydra_reads_it():
    """Of the two plusses of a dotted key, `for_hydra` adds the second again."""
    for typed, recorded in (
        ("++epochs=1", "++epochs=1"),
        ("+mine=a.b", "+mine=a.b"),
        ("++model.mine=1", "+model.mine=1"),
        ("+model.mine=1", "+model.mine=1"),
    ):
        assert arguments.with_one_plus(arguments.for_hydra([typed])[0]) == recorded
        hydra_reads = arguments.for_hydra([recorded])
        with hydra.initialize_config_module("stoker.configs"):
            hydra.compose("train", hydra_reads)


def test_a_reason_has_no_traceback():
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        assert re.fullmatch(
            r"ZeroDivisionError: division by zero \(.*test_sweep\.py:\d+\)",
            exit_codes.failure_text(error),
        )
    assert (
        exit_codes.failure_text(FileNotFoundError(2, "No such file", "a.csv"))
        == "a.csv: no such file.\n"
    )
    assert Path(sweep.__file__).is_file()
