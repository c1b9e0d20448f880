"""The index of runs: what it lists, which one is updated, and that it runs nothing of theirs."""

import itertools
import json
import os
import shutil
import statistics
import threading

import pytest
from made_runs import make_run

from stoker import project
from stoker.runs import index, lock
from stoker.sweeps.table import Sweep, list_in_index
from stoker.tasks.redraw import redraw
from stoker.trainer.errors import UserError


def read(folder):
    """Return {name: entry} of a folder's index."""
    text = (folder / "index.html").read_text(encoding="utf-8")
    lines = text.partition(index.START)[2].partition(index.END)[0].splitlines()
    return {name: entry for (name, *_), entry in map(json.loads, lines)}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The runs folder of the project here."""
    monkeypatch.chdir(tmp_path)
    project.of_folder.cache_clear()
    return tmp_path / "runs"


def test_an_entry_has_the_numbers_of_its_run(runs):
    typed = ["seed=3", "+model=mlp", "run_dir=runs/b"]
    accuracies = make_run(runs / "b", typed, at=1_700_000_000, rate=0.05)
    make_run(runs / "c", status="failed", data="csv, path: data/houses.csv")
    make_run(runs / "group" / "d", status="stopped")
    (runs / "c/status.json").write_text('{"resumed": 1000.0, "ended": 1007.0, "seconds": 7.5}')
    (runs / "group/d/status.json").write_text('{"started": 500.0, "resumed": 1000.0}')  # killed
    index.update(runs / "b")
    listed = read(runs)
    assert list(listed) == ["group/d", "c", "b"]
    entry = listed["b"]
    steps, values = entry["curves"].pop("val/acc")
    assert entry["curves"].keys() == {"train/loss", "val/loss"}
    assert steps[0] == 20 and steps[-1] == 800 and 20 < len(steps) <= index.MOST_POINTS
    assert values == [float(f"{accuracies[step // 20 - 1]:.4g}") for step in steps]
    assert entry | {"curves": {}} == {
        "status": "done",
        "time": 1_700_000_000,
        "seconds": 3.0,
        "since": None,
        "data": "digits",
        "model": "MLP",
        "settings": {"seed": "3", "model": "mlp"},
        "report": "report.html",
        "note": "",
        "best": ["val/acc", accuracies[-1], False],
        "test": ["test/acc", accuracies[-1]],
        "curves": {},
    }
    assert (listed["c"]["status"], listed["c"]["data"]) == ("failed", "houses.csv")
    assert listed["c"]["note"] == "The loss is nan. Lower the rate."
    assert (listed["c"]["seconds"], listed["group/d"]["seconds"]) == (7.5, None)
    assert listed["group/d"]["status"] == "stopped" and listed["group/d"]["report"] is None
    assert listed["group/d"]["since"] is None
    with lock.held(runs / "group" / "d"):
        index.update(runs / "b")
        running = read(runs)["group/d"]
        assert (running["status"], running["time"], running["since"]) == ("running", 500, 1000)


def test_a_run_that_has_not_ended_has_its_best_value_so_far(runs):
    accuracies = make_run(runs / "a", status="stopped")
    best = {"name": "val/acc", "mode": "max", "step": 800, "value": accuracies[-1]}
    (runs / "a/status.json").write_text(json.dumps({"best": best}))
    index.update(runs / "a")
    entry = read(runs)["a"]
    assert entry["best"] == ["val/acc", accuracies[-1], False] and "val/acc" in entry["curves"]


def test_a_sweep_is_one_row_with_its_best_row(runs):
    sweep = runs / "sweep"
    for i, status in enumerate(["done", "done", "failed"]):
        make_run(sweep / str(i), [f"seed={i}"], status, rate=0.1 * (i + 1))
        (sweep / str(i) / "job.json").write_text("{}")
    (sweep / "sweep.json").write_text(json.dumps({"typed": ["seed=0,1,2,3", "-m"], "jobs": 4}))
    (sweep / "sweep.html").write_text("")
    index.update(sweep / "0")
    assert not (runs / "index.html").exists()  # a job does not list its sweep
    with lock.held(sweep):
        list_in_index(Sweep(sweep))
        (entry,) = read(runs).values()
        assert (entry["status"], entry["note"]) == ("running", "3 of 4 jobs, 1 failed")
    index.update(sweep)
    (entry,) = read(runs).values()
    results = [json.loads((sweep / name / "result.json").read_text()) for name in "01"]
    mean = (results[0]["best"]["value"] + results[1]["best"]["value"]) / 2
    assert entry["best"] == ["val/acc", mean, False] and entry["jobs"] == ["0", "1"]
    assert entry["test"] == ["test/acc", (results[0]["test/acc"] + results[1]["test/acc"]) / 2]
    assert (entry["status"], entry["note"]) == ("stopped", "3 of 4 jobs, 1 failed")
    (sweep / "sweep.json").write_text(json.dumps({"typed": ["seed=0,1,2", "-m"], "jobs": 3}))
    list_in_index(Sweep(sweep))
    assert index.entry_of_sweep(sweep)["status"] == "failed"
    assert entry["report"] == "sweep.html" and entry["settings"]["seed"] == "0,1,2,3"
    assert entry["seconds"] == pytest.approx(6 + 12)


def test_the_index_and_the_table_of_a_sweep_name_the_same_best(runs):
    """The best mean over the seeds, not the best job; among equal ones, the first; none pruned."""
    rates = {"linear": (0.02, 0.4), "mlp": (0.15, 0.2), "cnn": (0.15, 0.2), "gpt": (0.9, 0.9)}
    sweep = runs / "sweep"
    for i, (model, seed) in enumerate(itertools.product(rates, (0, 1))):
        make_run(sweep / str(i), [f"model={model}", f"seed={seed}"], rate=rates[model][seed])
        (sweep / str(i) / "job.json").write_text("{}")
        if model == "gpt":
            result = json.loads((sweep / str(i) / "result.json").read_text())
            result["stopped"] = {"kind": "pruned", "text": "pruned at evaluation 1"}
            (sweep / str(i) / "result.json").write_text(json.dumps(result))
    malformed = '{"typed": ["-m", "seed=1,2"], "jobs": "x"}'
    for text in (malformed, '{"jobs": 8}'):
        (sweep / "sweep.json").write_text(text)
        list_in_index(Sweep(sweep))
        assert ((sweep / "sweep.json").read_text() == malformed) == (text == malformed)
    entry = index.entry_of_sweep(sweep)
    best = Sweep(sweep).groups[0]
    assert entry["jobs"] == [job.name for job in best] == ["2", "3"]
    assert entry["best"] == ["val/acc", statistics.fmean(job.best.value for job in best), False]
    assert entry["model"] == "MLP" and entry["data"] == "digits"


def test_only_what_has_changed_is_read_again(runs, monkeypatch):
    for i in range(5):
        make_run(runs / str(i), status="stopped" if i == 3 else "done")
    index.update(runs / "0")
    read_again = []
    entry_of = index.entry_of
    monkeypatch.setattr(
        index, "entry_of", lambda path, names: read_again.append(path.name) or entry_of(path, names)
    )
    before = read(runs)
    index.update(runs / "0")
    assert read_again == [] and read(runs) == before
    with (runs / "3" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9999, "epoch": 50, "val/loss": 0.5}\n')
    shutil.rmtree(runs / "1")
    index.update(runs / "0")
    assert read_again == ["3"] and list(read(runs)) == ["4", "3", "2", "0"]
    assert read(runs)["3"]["curves"]["val/loss"][0][-1] == 9999


def test_which_index_a_run_updates(runs, tmp_path):
    (runs / "begun").mkdir(parents=True)
    index.update(runs / "begun")  # without a config no run has begun, so nothing is left behind
    assert os.listdir(runs) == ["begun"]
    make_run(runs / "a", status="done")
    index.update(runs / "a")
    assert list(read(runs)) == ["a"]
    elsewhere = tmp_path / "elsewhere"
    make_run(elsewhere / "group" / "b")
    index.update(elsewhere / "group" / "b")
    assert os.listdir(elsewhere) == ["group"] and os.listdir(elsewhere / "group") == ["b"]
    redraw([str(elsewhere)])
    make_run(elsewhere / "group" / "c")
    index.update(elsewhere / "group" / "c")
    assert list(read(elsewhere)) == ["group/c", "group/b"]
    shutil.rmtree(runs / "a")
    index.update(runs / "a")
    assert list(read(runs)) == []


def test_a_page_of_another_kind_and_a_folder_that_cannot_be_written_stay(runs, capsys):
    make_run(runs / "a")
    (runs / "index.html").write_text("mine")
    index.update(runs / "a")
    assert (runs / "index.html").read_text() == "mine"
    with pytest.raises(UserError, match="not an index"):
        redraw([str(runs)])
    (runs / "index.html").unlink()
    (runs / ".index.lock").mkdir()
    index.update(runs / "a")
    assert not (runs / "index.html").exists() and capsys.readouterr() == ("", "")


def test_somebody_elses_runs_put_nothing_into_the_page(runs, tmp_path):
    bad = "</script><script>alert(1)</script>"
    make_run(runs / "a")
    make_run(runs / bad.replace("/", "\\"), [f"x={bad}"], data=f"'{bad}'", model="'<img src=x>'")
    make_run(runs / "broken")
    (runs / "broken" / "result.json").write_text('{"best": 3, "seconds": "x", "error": [')
    (runs / "broken" / "config.yaml").write_text("&a [*a, *a]")
    (runs / "broken" / "metrics.jsonl").write_text('[]\n{"step": "x"}\n{"step": 3, "val/loss": 1e')
    make_run(runs / "typed")
    (runs / "typed" / "result.json").write_text(
        '{"error": {"<b>": 1}, "best": ["<"], "test/acc": "x"}'
    )
    os.symlink(tmp_path, runs / "link")
    os.mkfifo(runs / "broken" / "pipe")
    sweep = runs / "sweep"
    (sweep / "0").mkdir(parents=True)
    (sweep / "0" / "job.json").write_text(bad)
    (sweep / "sweep.json").write_text(
        json.dumps({"typed": [bad], "best_jobs": ["..", bad], "best": None})
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    redraw([str(runs)])
    index.write(empty)
    listed = read(runs)
    assert len(listed) == 5 and listed["broken"]["status"] == "stopped"
    count = (empty / "index.html").read_text().lower().count("<script")
    text = (runs / "index.html").read_text()
    assert text.lower().count("<script") == count and "<img" not in text
    # A line that somebody put into the page is not taken over.
    line = next(line for line in text.splitlines() if line.startswith('[["a"'))
    (runs / "index.html").write_text(text.replace(line, line.replace("digits", bad)))
    index.update(runs / "a")
    assert read(runs) == listed


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "status.json"])
def test_an_odd_number_in_somebody_elses_run_spoils_nothing(runs, name):
    huge = 10**400
    make_run(runs / "a", at=1_700_000_000)
    make_run(runs / "b", at=1_700_000_000)
    expected = json.loads(index.escaped(index.entry_of(runs / "b", set(os.listdir(runs / "b")))))
    path = runs / "b" / name
    if name == "metrics.jsonl":
        added = f'{{"step": {huge}, "epoch": 1, "val/acc": 0.5, "train/loss": {huge}}}\n'
        path.write_text(added + path.read_text())
    else:
        contents = json.loads(path.read_text())
        added = {"result.json": {"val/acc": huge}, "status.json": {"started": 1e98}}[name]
        path.write_text(json.dumps(contents | added))
    index.update(runs / "a")
    listed = read(runs)
    assert listed.keys() == {"a", "b"}
    assert listed["b"].pop("time") < 1e11
    del expected["time"]
    assert listed["b"] | {"curves": 0} == expected | {"curves": 0}
    assert listed["b"]["curves"]["val/acc"][1][-1] == expected["curves"]["val/acc"][1][-1]


def test_a_script_in_somebody_elses_index_goes(runs):
    make_run(runs / "a")
    index.update(runs / "a")
    page = runs / "index.html"
    expected = page.read_text()
    page.write_text(expected.replace("<main", "<script>theirs()</script><main"))
    index.write(runs)
    assert page.read_text() == expected


def test_a_run_without_a_name_in_unicode_is_left_out(runs):
    make_run(runs / "a")
    shutil.copytree(runs / "a", runs / "b\udcff")
    index.update(runs / "a")
    assert read(runs).keys() == {"a"}


def test_runs_that_end_at_once_are_all_listed(runs):
    runs.mkdir()

    def end(i):
        for j in range(4):
            make_run(runs / f"{i}-{j}", epochs=2)
            index.update(runs / f"{i}-{j}")

    threads = [threading.Thread(target=end, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(runs)) == 16 and {entry["status"] for entry in read(runs).values()} == {"done"}


@pytest.mark.slow
def test_the_command_lists_its_runs(forks, tmp_path):
    quick = ("max_steps=2", "report=false")
    assert forks.run(tmp_path, *quick, "run_dir=runs/a").code == 0
    assert forks.run(tmp_path, *quick, "run_dir=runs/b", "optimizer.lr=1e30").code == 3
    sweep = ["-m", *quick, "seed=0,1", "hydra.sweep.dir=runs/c", "sweep.at_once=1"]
    assert forks.run(tmp_path, *sweep).code == 0
    listed = read(tmp_path / "runs")
    statuses = {name: entry["status"] for name, entry in listed.items()}
    assert statuses == {"a": "done", "b": "failed", "c": "done"}
    assert (listed["a"]["report"], listed["c"]["report"]) == (None, "sweep.html")
    assert listed["c"]["note"] == "2 of 2 jobs"
    # The time counts from the start of the process, whether the run finished or failed.
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    ends = [json.loads((tmp_path / f"runs/{name}/status.json").read_text()) for name in "ab"]
    assert listed["a"]["seconds"] == result["seconds"] <= ends[0]["seconds"]
    assert listed["b"]["seconds"] == ends[1]["seconds"] > 0
