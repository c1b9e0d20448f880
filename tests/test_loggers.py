"""What the loggers write is what their tools read; one that fails costs the run nothing."""

import functools
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch
from conftest import assert_same, make_data, make_trainer
from test_cli import ENVIRONMENT, ROOT, forked, read

from stoker.data.loader import DeviceLoader
from stoker.runs import loggers
from stoker.runs.lock import lock
from stoker.runs.loggers import JSONL, Logger, MLflow, TensorBoard, WandB
from stoker.runs.rows import read_rows
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import Callback, Checkpoint
from stoker.trainer.metrics import Accuracy

TOOLS = ["tensorboard", "wandb", "mlflow"]
CONFIG = {
    "optimizer.lr": 0.01,
    "model._target_": "stoker.models.mlp.MLP",
    "ema": None,
    "tune": ["threads"],
    "drop_last": False,
    "deterministic": True,
    "device": "cpu",
}
FINAL = {"test/loss": 0.25, "test/acc": 0.75}
RESULT = {"result/test/loss": 0.25, "result/test/acc": 0.75}
CHARTS = {"train/loss": "loss/train", "val/loss": "loss/val"}  # others have the row's name


def need(*tools):
    for tool in tools:
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: pip install -e '.[{tool}]'")


def make(tool, folder):
    """The logger of a run in `folder`."""
    if tool == "tensorboard":
        return TensorBoard(folder / "tensorboard")
    if tool == "wandb":
        return WandB(folder, mode="offline")
    return MLflow(folder, f"sqlite:///{folder}/mlflow.db")


def numbers_of(tool, folder):
    """{name: [(step, value)]} as the tool's own reader has it."""
    return {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}[tool](folder)


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def of_tensorboard(folder):
    events = events_of(folder)
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def of_mlflow(folder):
    client, run = mlflow_of(folder)
    found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {
        name: [(metric.step, metric.value) for metric in values] for name, values in found.items()
    }


def mlflow_of(folder, uri=None):
    """(the client, the one run in it)."""
    from mlflow import MlflowClient

    client = MlflowClient(uri or f"sqlite:///{folder}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("stoker").experiment_id])
    return client, run


def of_wandb(folder, first=0):
    found = {}
    for record in records_of(folder, first):
        items = values_of(record.history.item)
        for name in items:
            if name[0] != "_":
                found.setdefault(name, []).append((items["_step"], items[name]))
    return found


def values_of(items):
    """{name: value} of wandb's records of them; an image is no value."""
    pairs = [
        ([item.key] if item.key else item.nested_key, json.loads(item.value_json)) for item in items
    ]
    return {
        name[0]: value for name, value in pairs if len(name) == 1 and not isinstance(value, dict)
    }


def records_of(folder, first=0):
    """What wandb's files hold from the `first` on.

    Its service still writes when it has said that a run has ended.
    """
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))[first:]:
        for _ in range(600):
            records = list(records_in(path.read_bytes()))
            if records and records[-1].WhichOneof("record_type") == "exit":
                break
            time.sleep(0.1)
        yield from records


def records_in(content):
    """The records of a file so far: blocks of 32 KB with fragments of records, as LevelDB's log has
    them.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # too little for a header: the rest of the block is empty
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole, at = whole + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4) and at <= len(content):  # the whole one, or its last fragment
            yield Record.FromString(whole)
            whole = b""


def of_rows(folder):
    """The same of metrics.jsonl, but for the epoch: it would be a chart of a straight line."""
    found = {}
    for row in read_rows(folder / "metrics.jsonl"):
        for name, value in row.items():
            if isinstance(value, float) and name != "epoch":
                found.setdefault(CHARTS.get(name, name), []).append((row["step"], value))
    return found


def as_kept(tool, numbers):
    """TensorBoard keeps float32; the others one value a step, so not the epoch of an evaluation's
    row once more.
    """
    if tool != "tensorboard":
        return {name: list(dict(values).items()) for name, values in numbers.items()}
    return {
        name: [(step, torch.tensor(value, dtype=torch.float32).item()) for step, value in values]
        for name, values in numbers.items()
    }


def fit(folder, *callbacks, resume=None, **settings):
    data = make_data()
    callbacks = [JSONL(folder / "metrics.jsonl"), *callbacks]
    trainer = make_trainer(
        metrics={"acc": Accuracy()}, callbacks=callbacks, log_every=3, **settings
    )
    trainer.fit(
        DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 8), resume=resume
    )
    return trainer


class Dies(Callback):
    def __init__(self, step, error=KeyboardInterrupt):
        self.step, self.error = step, error

    def on_fit_start(self, trainer):
        self.on_step_end(trainer)

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            raise self.error


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A function: tool -> the folder of a run that a logger was told all of."""

    @functools.cache
    def tell(tool):
        need(tool)
        folder = tmp_path_factory.mktemp(tool)
        logger = make(tool, folder)
        logger.describe(CONFIG, "a-sweep")
        fit(folder, logger)
        logger.finish(24, FINAL)
        return folder

    return tell


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_the_rows_and_the_result(told, tool):
    rows = of_rows(told(tool))
    assert set(rows) == {"loss/train", "loss/val", "train/lr", "train/seconds", "val/acc"}
    expected = rows | {name: [(24, value)] for name, value in RESULT.items()}
    if tool == "wandb":  # it has them in the summary
        expected = rows
        summary = [item for record in records_of(told(tool)) for item in record.summary.update]
        assert RESULT.items() <= values_of(summary).items()
    numbers = numbers_of(tool, told(tool))
    assert as_kept(tool, numbers) == as_kept(tool, expected)
    assert sorted(numbers)[:2] == ["loss/train", "loss/val"]  # the tools' order


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_a_run_that_was_killed_goes_on_in_the_same_place_and_has_no_row_twice(tmp_path, tool):
    """Killed at step 16, with a checkpoint of step 10, and rows up to 15."""
    need(tool)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fit(whole)
    with pytest.raises(KeyboardInterrupt):
        fit(cut, make(tool, cut), Dies(16), Checkpoint(cut / "checkpoints", every=10, epochs=None))
    fit(cut, make(tool, cut), resume=checkpoint.path_of(cut / "checkpoints", 10))
    expected, found = as_kept(tool, of_rows(whole)), numbers_of(tool, cut)
    del expected["train/seconds"], found["train/seconds"]
    if tool == "wandb":
        runs = [
            record.run for record in records_of(cut) if record.WhichOneof("record_type") == "run"
        ]
        assert (
            len({run.run_id for run in runs}) == 1
            and len(list(cut.glob("wandb/offline-run-*"))) == 2
        )
        found = of_wandb(cut, first=1)  # the second part of the same run
        del found["train/seconds"]
        expected = {
            name: [(step, value) for step, value in values if step > 10]
            for name, values in expected.items()
        }
    if tool == "mlflow":  # which keeps the rows after the checkpoint twice
        found = as_kept(tool, found)
    assert found == expected


def test_jobs_that_begin_at_once_make_one_database(tmp_path):
    """MLflow itself would have each of them make its tables, of which all fail."""
    need("mlflow")
    pytest.importorskip("fcntl")
    uri, found = f"sqlite:///{tmp_path}/mlflow.db", []
    with open(tmp_path / ".mlflow.lock", "w") as file:
        lock(file)
        thread = threading.Thread(target=lambda: found.append(loggers.open_experiment(uri, "mine")))
        thread.start()
        time.sleep(0.5)
        assert list(tmp_path.iterdir()) == [tmp_path / ".mlflow.lock"]
    thread.join()
    assert found[0][0].get_experiment_by_name("mine").experiment_id == found[0][1]


def test_a_run_that_begins_anew_is_another_run(tmp_path):
    need("wandb")
    for _ in range(2):
        fit(tmp_path, make("wandb", tmp_path), max_steps=1)
    ids = {
        record.run.run_id
        for record in records_of(tmp_path)
        if record.WhichOneof("record_type") == "run"
    }
    assert len(ids) == 2 and (tmp_path / "wandb-id.txt").read_text() in ids


@pytest.mark.parametrize("text", ["", "../x", "a/b", "a b", "x" * 101, "é", "a\n"])
def test_an_id_that_no_run_has_is_none(tmp_path, text):
    (tmp_path / "id").write_text(text, encoding="utf-8")
    logger = loggers.Logger()
    logger.begun_at = 1
    assert logger.kept_id(tmp_path / "id") is None and logger.kept_id(tmp_path / "no") is None


def test_tensorboards_hparams_tab_has_the_settings_and_compares_unlike_runs(told):
    """With a list of metrics, an experiment's, the tab of all runs would have those of the first
    run alone.
    """
    from tensorboard.plugins.hparams.metadata import (
        EXPERIMENT_TAG,
        SESSION_END_INFO_TAG,
        SESSION_START_INFO_TAG,
    )
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events_of(told("tensorboard")).summary_metadata
    session = HParamsPluginData.FromString(content[SESSION_START_INFO_TAG].plugin_data.content)
    assert EXPERIMENT_TAG not in content and SESSION_END_INFO_TAG in content
    session = session.session_start_info.hparams
    assert (
        session["optimizer.lr"].number_value == 0.01 and session["tune"].string_value == "[threads]"
    )
    assert session["deterministic"].string_value == "true"  # a bool would be shown as 1.0000
    assert session["model._target_"].string_value == "stoker.models.mlp.MLP" and not {
        "ema",
        "device",
    } & set(session)


def test_the_other_tools_have_the_settings_the_name_and_the_sweep(told):
    need("wandb", "mlflow")
    [run] = [
        record.run
        for record in records_of(told("wandb"))
        if record.WhichOneof("record_type") == "run"
    ]
    assert CONFIG.items() <= values_of(run.config.update).items()
    name = told("wandb").name
    assert (run.run_group, run.display_name, run.project) == (
        "a-sweep",
        f"a-sweep/{name}",
        "stoker",
    )
    _, run = mlflow_of(told("mlflow"))
    expected = {
        "optimizer.lr": "0.01",
        "ema": "null",
        "tune": "[threads]",
        "drop_last": "false",
        "deterministic": "true",
        "device": "cpu",
    }
    assert run.data.params == expected | {"model._target_": "stoker.models.mlp.MLP"}
    assert (
        run.info.run_name == f"a-sweep/{told('mlflow').name}"
        and run.data.tags["sweep"] == "a-sweep"
    )
    assert run.info.status == "FINISHED"


# A logger that fails


class Broken(Logger):
    """Fails where it is told to."""

    def __init__(self, where, error=OSError):
        self.where, self.error, self.calls = where, error, []

    def do(self, name):
        self.calls.append(name)
        if name == self.where:
            raise self.error("the disk\x1b[2J is full\nand more")

    def begin(self, trainer):
        self.do("begin")

    def write(self, numbers, step):
        self.do("write")

    def add_result(self, step, numbers):
        self.do("add_result")

    def end(self, outcome):
        self.do("end")


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("begin", ["begin", "end"]),
        ("write", ["begin", "write", "end"]),
        ("add_result", None),
        ("end", None),
        (None, None),
    ],
)
def test_a_logger_that_fails_costs_one_warning_and_no_bit(tmp_path, caplog, where, calls):
    broken = Broken(where)
    broken.describe({})
    trainer = fit(tmp_path / "a", broken)
    broken.finish(trainer.step, FINAL)
    without = fit(tmp_path / "b")
    assert_same(dict(trainer.module.state_dict()), dict(without.module.state_dict()))
    warnings = [record.getMessage() for record in caplog.records]
    expected = "callbacks=broken: the disk\\x1b[2J is full\nThe run continues without this logger."
    assert warnings == [expected] * (where is not None)
    usual = [
        "begin",
        *["write"] * len(read_rows(tmp_path / "a" / "metrics.jsonl")),
        "add_result",
        "end",
    ]
    assert broken.calls == (calls or usual)


def test_a_run_that_mlflow_lost_has_failed_there(tmp_path):
    need("mlflow")
    logger = make("mlflow", tmp_path)
    logger.describe({})
    trainer = fit(tmp_path, logger)
    logger.finish(trainer.step, {"no such/name?": 1.0})  # which MLflow refuses
    assert mlflow_of(tmp_path)[1].info.status == "FAILED"


def test_a_signal_in_a_logger_is_none_of_its_failures(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Broken("write", KeyboardInterrupt))


@pytest.mark.slow
def test_a_tool_hears_how_the_run_ended(tmp_path):
    class Stops(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 7:
                trainer.interrupt("asked to")

    class Ends(Broken):
        def end(self, outcome):
            self.calls.append(outcome)

    ends = [Ends(None) for _ in range(6)]
    fit(tmp_path, ends[0])
    fit(tmp_path, ends[1], Stops())
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, ends[2], Dies(7, ZeroDivisionError))
    ends[3].describe({})
    fit(tmp_path, ends[3])
    ends[3].finish(24, {}, "stopped")
    for logger, step in ((ends[4], 2), (ends[5], 0)):  # before its first row; before its first step
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path, logger, Dies(step, ZeroDivisionError))
    calls = [logger.calls for logger in ends]
    assert [each[-1:] for each in calls[:4]] == [["done"], ["stopped"], ["failed"], ["stopped"]]
    assert calls[4:] == [[], []]


@pytest.fixture
def silent_server():
    """The port of a server that takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield server.getsockname()[1]


SILENT = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from test_loggers import MLflow, WandB, fit, loggers, read_rows
loggers.PATIENCE = 1
folder = Path({folder!r})
fit(folder, WandB(folder, mode="online"), MLflow(folder, {url!r}), max_steps=3)
print([row["step"] for row in read_rows(folder / "metrics.jsonl")])
"""


@pytest.mark.slow
def test_a_server_that_never_answers_holds_no_run_up(tmp_path, silent_server):
    need("wandb", "mlflow")
    url = f"http://127.0.0.1:{silent_server}"
    script = SILENT.format(tests=str(ROOT / "tests"), root=str(ROOT), folder=str(tmp_path), url=url)
    servers = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
    command, options = (
        [sys.executable, "-c", script],
        {"capture_output": True, "text": True, "timeout": 120},
    )
    done = subprocess.run(command, env=ENVIRONMENT | servers, check=False, **options)
    assert done.returncode == 0 and done.stdout == "[3, 3]\n", done.stderr
    said = [
        line for line in done.stderr.splitlines() if not line.startswith("wandb:")
    ]  # where it has the key from
    assert [line.partition(" ")[0] for line in said] == [
        "callbacks=wandb:",
        "The",
        "callbacks=mlflow:",
        "The",
    ]


# Whole runs


@pytest.fixture
def server(tmp_path):
    """The address of MLflow's own server, with a database in `tmp_path`."""
    need("mlflow", "flask")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    places = [
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "artifacts"),
    ]
    command += ["--backend-store-uri", *places]
    options = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "start_new_session": True,
    }
    process = subprocess.Popen(
        command, env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}, cwd=tmp_path, **options
    )
    try:
        for _ in range(600):
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        (os.killpg if hasattr(os, "killpg") else os.kill)(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.slow
def test_mlflows_server_has_the_rows(tmp_path, server):
    logger = MLflow(tmp_path / "run", server)
    logger.describe(CONFIG)
    fit(tmp_path, logger)
    logger.finish(24, FINAL)
    client, run = mlflow_of(tmp_path, server)
    found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    found = {
        name: [(metric.step, metric.value) for metric in values] for name, values in found.items()
    }
    expected = as_kept("mlflow", of_rows(tmp_path)) | {
        name: [(24, value)] for name, value in RESULT.items()
    }
    assert as_kept("mlflow", found) == expected and run.info.status == "FINISHED"


TINY = [
    "device=cpu",
    "max_steps=2",
    "model.hidden=[8]",
    "log_every=1",
    "callbacks=[tensorboard,wandb,mlflow]",
]


@pytest.mark.slow
def test_the_jobs_of_a_sweep_are_together_and_nothing_from_the_environment_is_told(tmp_path):
    """On the command line, all three at once."""
    need(*TOOLS)
    typed = [*TINY, "-m", "seed=0,1", "hydra.sweep.dir=mine", "ema='${oc.decode:${oc.env:SECRET}}'"]
    secret = "0.98765454321"
    [done] = forked(tmp_path, [typed], "hydra", "torch", SECRET=secret)
    assert done.code == 0 and done.err == "", done.err
    folder = tmp_path / "0"
    runs = tracked(folder / "runs" / "mlflow.db")
    for i, run in enumerate(sorted(runs, key=lambda run: run.info.run_name)):
        job, result = folder / "mine" / str(i), read(folder / "mine" / str(i) / "result.json")
        assert (
            run.info.run_name == f"mine/{i}"
            and run.data.tags["sweep"] == "mine"
            and run.data.params["seed"] == str(i)
        )
        assert run.data.params["ema"] == "${oc.decode:${oc.env:SECRET}}"
        assert run.data.params["callbacks.jsonl.path"] == f"mine/{i}/metrics.jsonl"
        assert run.data.params["callbacks.ema.decay"] == "${oc.decode:${oc.env:SECRET}}"
        assert run.data.params["callbacks.time_limit.minutes"] == "null"
        [wandb_run] = [
            record.run for record in records_of(job) if record.WhichOneof("record_type") == "run"
        ]
        assert (wandb_run.run_group, wandb_run.display_name) == ("mine", f"mine/{i}")
        for numbers in (
            of_tensorboard(job),
            {name: [(0, value)] for name, value in run.data.metrics.items()},
        ):
            assert numbers["result/test/acc"][-1][1] == pytest.approx(result["test/acc"], rel=1e-6)
            best = result["best"]
            assert numbers[f"result/best/{best['name']}"][-1][1] == pytest.approx(
                best["value"], rel=1e-6
            )
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in left if secret.encode() in path.read_bytes()] == []


class Told(Logger):
    """Keeps what it was told of the run's end in the file `told`."""

    def begin(self, trainer):
        pass

    def write(self, row, step):
        pass

    def end(self, outcome):
        with open("told", "a") as file:
            file.write(f"{outcome}\n")


class DiesLate(Accuracy):
    """A metric of which the test's value is an error, or a signal."""

    def __init__(self, of):
        super().__init__()
        self.of, self.asked = of, 0

    def value(self, sums):
        self.asked += 1
        if self.asked == 2:
            if self.of == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            raise ZeroDivisionError
        return super().value(sums)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform")
@pytest.mark.parametrize(("of", "outcome"), [("error", "failed"), ("signal", "stopped")])
def test_what_ends_a_run_in_its_test_is_told_too(forks, tmp_path, of, outcome):
    late = ["+metrics.late._target_=test_loggers.DiesLate", f"+metrics.late.of={of}"]
    done = forks.run(
        tmp_path, *TINY[:-1], *late, "+callbacks.told._target_=test_loggers.Told", "run_dir=run"
    )
    assert done.code == {"error": 1, "signal": 143}[of], done.err
    assert (tmp_path / "told").read_text() == f"{outcome}\n"


def tracked(database):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    return client.search_runs([client.get_experiment_by_name("stoker").experiment_id])


@pytest.mark.slow
def test_of_several_processes_one_writes(forks, tmp_path):
    need("tensorboard")
    done = forks.ranks(
        tmp_path, 2, *TINY[:-1], "callbacks=tensorboard", "strategy=ddp", "run_dir=run"
    )
    assert done.codes == [0, 0] and done.errs == ["", ""] and done.outs[1] == "", (
        done.errs,
        done.outs,
    )
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    rows = as_kept("tensorboard", of_rows(tmp_path / "run"))
    assert rows.items() <= of_tensorboard(tmp_path / "run").items()
