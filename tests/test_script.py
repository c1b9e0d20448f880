"""`stoker.fit`: a script's training in a run directory, against the uninterrupted one, the plain
`Trainer.fit` and the command's own.
"""

import functools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import assert_same, make_data, make_model, make_trainer
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import stoker
from stoker import Callback, TrainingError, UserError
from stoker.data import datasets
from stoker.data.loader import make_loaders
from stoker.models.mlp import MLP
from stoker.runs import report
from stoker.tasks import script
from stoker.trainer import schedules
from stoker.trainer.callbacks import EMA, Checkpoint, NaNGuard
from stoker.trainer.metrics import Accuracy
from stoker.trainer.seeding import mix_seed, seed_generators

SECONDS = ("train/seconds", "seconds", "samples_per_second", "memory_mib")


class Killed(Callback):
    """Ends the process's work at a step, as SIGKILL would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            raise RuntimeError("killed")


def loaders():
    data = make_data(train=60, val=50)
    inputs, targets = data.val.tensors()
    train = TensorDataset(*data.train.tensors())
    val = TensorDataset(inputs[:25], targets[:25])
    test = TensorDataset(inputs[25:], targets[25:])
    return (
        DataLoader(train, batch_size=8, shuffle=True),
        DataLoader(val, batch_size=10),
        DataLoader(test, batch_size=10),
    )


def begun(*callbacks, model=None, **settings):
    """A Trainer as a script makes it each time it is started."""
    torch.manual_seed(len(callbacks))  # whatever the script has drawn before
    return make_trainer(
        model or make_model(dropout=0.3),
        metrics={"acc": Accuracy()},
        callbacks=[EMA(0.9), *callbacks],
        **({"epochs": 3, "log_every": 3} | settings),
    )


def numbers(folder):
    """The result and the rows of a run, without what a clock measures."""
    result = json.loads((folder / "result.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for entries in [result, *rows]:
        for name in SECONDS:
            entries.pop(name, None)
    return result, rows


def test_a_script_that_was_killed_goes_on_to_the_same_bits_and_then_is_complete(tmp_path, capsys):
    whole = begun()
    history = stoker.fit(whole, *loaders(), run_dir=tmp_path / "whole")
    plain = begun()
    expected = plain.fit(*loaders()[:2])
    for row in [*history, *expected]:
        del row["train/seconds"]
    assert history == expected
    best = max(expected, key=lambda row: row.get("val/acc", 0))  # the first of equal ones

    for step in (5, 11, 20):
        saver = Checkpoint(tmp_path / "cut" / "checkpoints", every=2)
        with pytest.raises(RuntimeError, match="killed"):
            stoker.fit(begun(Killed(step), saver), *loaders(), run_dir=tmp_path / "cut")
    capsys.readouterr()
    last = begun(Checkpoint(tmp_path / "cut" / "checkpoints", every=2))
    resumed = stoker.fit(last, *loaders(), run_dir=tmp_path / "cut")
    assert "at step 18\n" in capsys.readouterr().out
    for row in resumed:
        del row["train/seconds"]
    assert resumed == history
    assert_same(numbers(tmp_path / "cut"), numbers(tmp_path / "whole"))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert weights[0] == weights[1]

    # The trainer has the weights that were tested.
    result, _ = numbers(tmp_path / "whole")
    assert whole.step == result["best"]["step"] == best["step"]
    for name, value in whole.evaluate(loaders()[2], "test").items():
        assert result[name] == value
    model = make_model(seed=1)
    stoker.init_from(model, tmp_path / "whole")
    with last.evaluating():
        assert_same(dict(model.state_dict()), dict(last.module.state_dict()))

    again = begun(Checkpoint(tmp_path / "cut" / "checkpoints", every=2))
    complete = stoker.fit(again, *loaders(), run_dir=tmp_path / "cut")
    for row in complete:
        del row["train/seconds"]
    assert complete == history and again.step == whole.step
    assert_same(numbers(tmp_path / "cut"), numbers(tmp_path / "whole"))


def test_a_script_and_the_command_write_the_same_result(forks, tmp_path):
    typed = ["max_steps=12", "report=false", "run_dir=command"]
    done = forks.run(tmp_path, *typed)
    assert done.code == 0, done.err
    digits = datasets.digits()
    (train, val, test), _ = make_loaders(digits, batch_size=64, eval_batch_size=512)
    seed_generators(torch.device("cpu"), mix_seed(0, "model"))
    trainer = stoker.Trainer(
        MLP(digits.in_shape, digits.num_classes),
        torch.nn.CrossEntropyLoss(),
        functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01),
        functools.partial(schedules.cosine, warmup=0.05),
        {"acc": Accuracy()},
        max_steps=12,
        device="cpu",
    )
    stoker.fit(trainer, train, val, test, run_dir=tmp_path / "script")
    (by_script, rows), (by_command, expected) = map(
        numbers, (tmp_path / "script", tmp_path / "command")
    )
    assert rows == expected
    own = {"script", "overrides", "git", "versions"}  # of the two folders
    measured = {"time", "speed"}
    assert by_script.keys() == by_command.keys()
    for name in by_script.keys() - own - measured:
        assert by_script[name] == by_command[name], name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    stoker.fit(begun(max_steps=2), *loaders(), run_dir=folder)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 5}, "epochs=5 (was 3)"),
        ({"seed": 1}, "seed=1 (was 0)"),
        ({"optimizer": functools.partial(torch.optim.AdamW, lr=0.1)}, "optimizer.lr=0.1 (was 0.01"),
        ({"optimizer": torch.optim.SGD}, "optimizer._target_=torch.optim.sgd.SGD (was torch."),
        ({"scheduler": schedules.cosine}, "scheduler.warmup=null (was 0.125)"),
        ({"model": make_model(features=6, classes=4)}, "3.weight"),
        ({"loss": torch.nn.MultiMarginLoss()}, "loss._target_=torch.nn.modules.loss.MultiMargin"),
    ],
)
def test_another_run_is_not_taken_for_this_one_and_what_differs_is_named(made, change, words):
    with pytest.raises(UserError) as error:
        stoker.fit(begun(**({"max_steps": 2} | change)), *loaders(), run_dir=made)
    text = str(error.value)
    assert words in text and len(text.splitlines()) <= 3, text


def test_the_numbers_of_numpy_are_settings_like_those_of_python(tmp_path):
    saved = []
    for kind in (np.float64, float):  # of np.logspace, and what the same script may have later
        rates = {"lr": kind(0.01), "betas": (kind(0.9), 0.99)}
        optimizer = functools.partial(torch.optim.AdamW, **rates)
        trainer = begun(max_steps=2, optimizer=optimizer, max_grad_norm=kind(1))
        settings = script.settings_of(trainer, [], Checkpoint(tmp_path))
        saved.append(yaml.safe_dump(settings))
    assert saved[0] == saved[1]


def test_a_task_that_builds_the_model_refuses_a_script_s_run_in_a_line(forks, made, tmp_path):
    with pytest.raises(UserError, match="init_from"):
        stoker.load(made)
    with pytest.raises(UserError, match=r"run_dir=.* different settings: epochs=4 "):
        stoker.fit(begun(max_steps=2, epochs=4), *loaders(), run_dir=made)
    page = report.html(made)
    assert "Started by this script" in page
    for typed in (["task=evaluate", f"run={made}"], [f"run_dir={made}"]):
        done = forks.run(tmp_path, *typed)
        assert done.code == 2 and len(done.err.splitlines()) <= 3, done.err
    elsewhere = begun(Checkpoint(tmp_path / "mine"))
    with pytest.raises(UserError, match="the Checkpoint callback saves to"):
        stoker.fit(elsewhere, *loaders(), run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"run_dir": "taken"},
            "result.json, which a run would overwrite. Choose a different run_dir.",
        ),
        ({"test_loader": 3}, "evaluate: this int is not a loader"),
        ({"val_loader": {"train": []}}, "'train' is not a valid name"),
    ],
)
def test_a_mistake_is_found_before_the_training(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "result.json").write_text("{}")
    train, val, _ = loaders()
    usual = {"trainer": begun(), "train_loader": train, "val_loader": val, "run_dir": "run"}
    with pytest.raises(UserError, match=re.escape(words)):
        stoker.fit(**(usual | given))
    assert not (tmp_path / "run").exists()


def test_a_mistake_that_the_first_step_finds_leaves_no_run_directory(tmp_path):
    trainer = begun()
    trainer.loss = torch.nn.MSELoss()
    batch = (torch.zeros(4, 6), torch.zeros(4))
    with pytest.raises(UserError, match="The loss would broadcast them"):
        stoker.fit(trainer, [batch] * 3, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_failure_is_in_the_result_and_the_callbacks_are_the_script_s_own(tmp_path):
    class Diverging(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 4:
                trainer.module[0].weight.data.fill_(torch.nan)

    trainer = begun(NaNGuard(), Diverging())
    before = list(trainer.callbacks)
    with pytest.raises(TrainingError):
        stoker.fit(trainer, *loaders(), run_dir=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["code"] == 3 and "not finite" in result["error"] and result["script"]
    assert trainer.callbacks == before


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (KeyError, 1)])
def test_any_error_after_the_first_step_is_in_the_result(tmp_path, kind, code):
    class Failing(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 4:
                raise kind("give 2")

    with pytest.raises(kind):
        stoker.fit(begun(Failing()), *loaders(), run_dir=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["code"] == code and "give 2" in result["error"]
    assert (tmp_path / "report.html").exists()


def test_an_uncaught_mistake_is_one_to_three_lines(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: seen.append(given))
    stoker.short_errors()
    for error, code in ((UserError("a=1: give 2.\nOr 3."), 2), (TrainingError("No memory."), 3)):
        with pytest.raises(SystemExit) as end:
            sys.excepthook(type(error), error, None)
        assert end.value.code == code
        assert capsys.readouterr().err == f"error: {error}\n"
    error = KeyError("x")
    sys.excepthook(KeyError, error, None)
    assert seen == [(KeyError, error, None)]


class Slow(Callback):
    def on_step_end(self, trainer):
        time.sleep(0.02)


SCRIPT = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import stoker
from test_script import Slow, begun, loaders

stoker.fit(begun(Slow()), *loaders(), run_dir="run")
sys.exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_script_that_gets_a_signal_saves_its_step_and_goes_on(forks, tmp_path, number):
    (tmp_path / "script.py").write_text(SCRIPT)
    moment = {"signal": number, "delay": 0.1, "watch": "run/checkpoints/step_*.ckpt"}
    done = forks.run(tmp_path, "--lr", "3", script="script.py", signals=[moment])
    if number == signal.SIGKILL:
        assert done.code == -9
    else:
        assert done.code == 128 + number, done.err
        said = done.err.strip().splitlines()
        assert re.fullmatch(r"interrupted at step \d+\. To resume:", said[0]), said
        assert said[1].endswith("script.py --lr 3"), said
    done = forks.run(tmp_path, "--lr", "3", script="script.py")
    assert done.code == 0 and done.out.startswith("resumed  run at step "), done.err
    stoker.fit(begun(Slow()), *loaders(), run_dir=tmp_path / "whole")
    (cut, rows), (whole, expected) = (numbers(tmp_path / name) for name in ("run", "whole"))
    assert rows == expected
    for name in cut.keys() - {"script", "git", "versions", "overrides"}:
        assert cut[name] == whole[name], name
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole")]
    assert_same(*weights)


@pytest.mark.slow
def test_a_script_ends_with_the_codes_of_the_command(tmp_path):
    mistake = 'raise stoker.UserError("a=1: give 2.")'
    for first, code in (("stoker.short_errors()", 2), ("", 1)):
        text = f"import stoker\n{first}\n{mistake}"
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert done.returncode == code
        assert (done.stderr == "error: a=1: give 2.\n") == (code == 2)
