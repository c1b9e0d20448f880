"""Callbacks and loggers: what they keep, when they stop a run, what they write."""

import contextlib
import csv
import functools
import json
import math
import os

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.diagnostics import lr_find as search
from stoker.diagnostics.lr_find import lr_find
from stoker.runs.loggers import JSONL, TensorBoard
from stoker.trainer import checkpoint, stopping
from stoker.trainer.callbacks import (
    EMA,
    Callback,
    Checkpoint,
    EarlyStopping,
    Lookahead,
    NaNGuard,
    Progress,
    TimeLimit,
    progress,
)
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.metrics import Accuracy, Confusion


def loaders(batch_size=8, **options):
    data = make_data(**options)
    return DeviceLoader(data, "train", batch_size, shuffle=True), DeviceLoader(data, "val", 7)


class Feed(Callback):
    """Adds a number of the test's choice to each validation row, so that what watches it is told
    what to see.
    """

    def __init__(self, values, name="val/score"):
        self.values, self.name = iter(values), name
        self.higher_is_better = True

    def on_log(self, trainer, row):
        if "val/loss" in row:
            row[self.name] = next(self.values)


class Score(Accuracy):
    """A metric of the name that Feed writes over."""


def scored(values, *callbacks, **settings):
    """A fitted trainer with an evaluation after each of 3 * 8 steps whose val/score is what
    `values` says.
    """
    trainer = make_trainer(
        metrics={"score": Score()}, callbacks=[Feed(values), *callbacks], eval_every=1, **settings
    )
    trainer.fit(*loaders())
    return trainer


# EMA


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_ema_is_the_average_by_its_formula(decay):
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )
    expected, seen = {name: t.clone() for name, t in model.state_dict().items()}, {}

    class Watch(Callback):
        def on_step_end(self, trainer):
            share = min(decay, (1 + trainer.step) / (10 + trainer.step))
            for name, tensor in trainer.module.state_dict().items():
                if tensor.is_floating_point():
                    expected[name] += (tensor - expected[name]) * (1 - share)

        def on_eval_end(self, trainer):
            pass

        def on_eval_start(self, trainer):
            seen.update({name: t.clone() for name, t in trainer.module.state_dict().items()})

    ema = EMA(decay)
    trainer = make_trainer(model, callbacks=[ema, Watch()], epochs=2)
    train_loader, val_loader = loaders()
    trainer.fit(train_loader)
    raw = {name: t.clone() for name, t in trainer.module.state_dict().items()}
    trainer.evaluate(val_loader)
    for name, tensor in ema.shadow.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(seen[name], tensor), name  # evaluated with the average
        assert not torch.equal(raw[name], tensor), name
    assert_same(dict(trainer.module.state_dict()), raw)  # and back again


def test_an_evaluation_within_the_fit_has_the_average_of_its_own_step(tmp_path):
    """Or the numbers in the log would not be those that the checkpoint of that step gives."""
    train_loader, val_loader = loaders()
    rows = []

    class Watch(Callback):
        def on_log(self, trainer, row):
            rows.extend([row] if "val/loss" in row else [])

    trainer = make_trainer(
        callbacks=[EMA(0.9), Watch(), Checkpoint(tmp_path, every=1, keep=100)], eval_every=3
    )
    trainer.fit(train_loader, val_loader)
    assert len(rows) == 8
    for row in rows:
        other = make_trainer(
            make_model(seed=5), callbacks=[EMA(0.9)], scheduler=None, optimizer=None
        )
        state = checkpoint.load(checkpoint.path_of(tmp_path, row["step"]))
        other.load_state_dict(state)
        assert other.evaluate(val_loader)["val/loss"] == row["val/loss"]


def test_ema_is_taken_back_when_an_evaluation_fails():
    trainer = make_trainer(callbacks=[EMA(0.9)], epochs=1)
    trainer.fit(loaders()[0])
    before = {name: t.clone() for name, t in trainer.module.state_dict().items()}
    with pytest.raises(UserError, match="A batch must be .inputs, targets."):
        trainer.evaluate([(torch.zeros(2, 6), torch.zeros(2), "too much")])
    assert_same(dict(trainer.module.state_dict()), before)


# Lookahead


class Seen(Callback):
    """Keeps a copy of the weights and statistics after each step, as they are at its place in the
    list.
    """

    def __init__(self):
        self.states = []

    def on_step_end(self, trainer):
        self.states.append({name: t.clone() for name, t in trainer.module.state_dict().items()})


@pytest.mark.parametrize(("every", "decay", "power"), [(5, 0.5, 0), (4, 0.774, 3), (1, 0.9, 1)])
def test_lookahead_is_its_formula(every, decay, power):
    """24 steps: the last one ends with the slow weights also where 24 is no multiple of `every`."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )
    slow = {name: t.clone() for name, t in model.state_dict().items() if t.is_floating_point()}
    trained, after = Seen(), Seen()
    trainer = make_trainer(model, callbacks=[trained, Lookahead(every, decay, power), after])
    trainer.fit(loaders()[0])
    assert trainer.step == len(trained.states) == 24
    for step, (before, now) in enumerate(zip(trained.states, after.states, strict=True), 1):
        goes_back = step % every == 0 or step == 24
        for name in slow:
            if goes_back:
                slow[name] += (before[name] - slow[name]) * (1 - decay * (step / 24) ** power)
            torch.testing.assert_close(
                now[name], slow[name] if goes_back else before[name], rtol=1e-5, atol=1e-6
            )
    assert_same(after.states[-1], dict(trainer.module.state_dict()))


def test_an_evaluation_sees_what_lookahead_makes_of_its_step_and_changes_nothing(tmp_path):
    train_loader, val_loader = loaders()

    def run(folder, **settings):
        callbacks = [Lookahead(every=3, decay=0.5), EMA(0.9), Checkpoint(folder, every=1, keep=100)]
        trainer, rows = make_trainer(callbacks=callbacks, **settings), []
        log, trainer.log = (
            trainer.log,
            lambda row: (rows.append({"step": trainer.step, **row}), log(row)),
        )
        trainer.fit(train_loader, val_loader)
        return trainer, [row for row in rows if "val/loss" in row]

    often, rows = run(tmp_path / "often", eval_every=1)
    seldom, _ = run(tmp_path / "seldom", eval_every=24)
    assert_same(dict(often.module.state_dict()), dict(seldom.module.state_dict()))
    assert len(rows) == 24
    for row in rows:
        callbacks = [Lookahead(every=3, decay=0.5), EMA(0.9)]
        other = make_trainer(
            make_model(seed=5), callbacks=callbacks, scheduler=None, optimizer=None
        )
        other.load_state_dict(checkpoint.load(checkpoint.path_of(tmp_path / "often", row["step"])))
        assert other.evaluate(val_loader)["val/loss"] == row["val/loss"]


@pytest.mark.parametrize("step", [2, 10, 15])
def test_lookahead_continues_where_it_was(tmp_path, step):
    def run(folder, resume=None):
        trainer = make_trainer(
            callbacks=[Lookahead(every=5, decay=0.7, power=3), Checkpoint(folder, 1, keep=99)]
        )
        trainer.fit(loaders()[0], resume=resume)
        return trainer.state_dict()

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", resume=checkpoint.path_of(tmp_path / "whole", step))
    for part in ("model", "optimizer"):
        assert_same(again[part], whole[part])
    assert_same(again["callbacks"]["Lookahead"], whole["callbacks"]["Lookahead"])


def test_lookahead_stands_in_front_of_ema():
    with pytest.raises(UserError, match="Put Lookahead first"):
        make_trainer(callbacks=[EMA(0.9), Lookahead()]).fit(loaders()[0])


# Early stopping, time limit, NaN guard


@pytest.mark.parametrize(
    ("values", "settings", "stopped_at"),
    [
        ([1, 2, 3, 3, 2, 1, 9], {"patience": 3}, 6),
        ([1, 2, 3, 4, 5, 4, 5, 9], {"patience": 3}, 8),  # 9 comes in time, and then the feed ends
        ([5, 4, 3, 3, 4, 5], {"patience": 2, "mode": "min"}, 5),
        ([1, 1.05, 1.09, 1.15, 1.2, 1.25], {"patience": 2, "min_delta": 0.1}, 3),
        ([math.nan, math.nan, 1], {"patience": 2}, 2),
    ],
)
def test_early_stopping_waits_for_patience_evaluations(values, settings, stopped_at):
    trainer = scored(
        values,
        EarlyStopping(monitor="val/score", **settings),
        max_steps=max(stopped_at, len(values)) if stopped_at == len(values) else None,
    )
    assert trainer.step == stopped_at
    assert bool(trainer.stop_reason) == (values[stopped_at - 1] != 9)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_never_the_best(tmp_path, caplog, value):
    stopping = EarlyStopping(2, monitor="val/score")
    saver = Checkpoint(tmp_path, monitor="val/score")
    trainer = scored([value, 0.25, value, value, 9], stopping, saver)
    assert stopping.best == saver.best == {"step": 2, "value": 0.25}
    assert trainer.step == 4
    assert caplog.messages == [
        f"{name}: val/score is {value} at step 1, which cannot be the best value."
        for name in ("EarlyStopping", "Checkpoint")
    ]


def test_numbers_that_are_never_finite_stop_early_and_say_so(tmp_path):
    saver = Checkpoint(tmp_path, monitor="val/score")
    trainer = scored([math.inf] * 3, EarlyStopping(3, monitor="val/score"), saver)
    assert trainer.stop_reason.text == "val/score did not improve in 3 evaluations"
    assert saver.best is None


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path):
    callbacks = [EarlyStopping(2, monitor="val/score"), Checkpoint(tmp_path)]
    assert scored([3, 2, 1, 0], *callbacks).step == 3
    path, _ = checkpoint.newest(tmp_path)
    trainer = make_trainer(
        metrics={"score": Score()},
        callbacks=[EarlyStopping(2, monitor="val/score"), Checkpoint(tmp_path)],
        eval_every=1,
    )
    trainer.fit(*loaders(), resume=path)
    assert trainer.step == 3


def test_a_time_limit_stops_after_a_step_and_saves_it(tmp_path):
    trainer = make_trainer(callbacks=[TimeLimit(1e-9), Checkpoint(tmp_path, every=100)])
    trainer.fit(*loaders())
    assert trainer.step == 1
    assert list(checkpoint.files(tmp_path)) == [1]
    whole = make_trainer()
    whole.fit(*loaders())
    continued = make_trainer()
    continued.fit(*loaders(), resume=checkpoint.path_of(tmp_path, 1))
    assert_same(dict(continued.module.state_dict()), dict(whole.module.state_dict()))


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    data = make_data()
    data.train.inputs[:] = math.inf
    trainer = make_trainer(callbacks=[NaNGuard(), Checkpoint(tmp_path)], log_every=5)
    with pytest.raises(
        TrainingError,
        match=r"train/loss is nan at step 5. First non-finite value: in step 1, the loss is nan \(learning rate .*\), and batch",
    ):
        trainer.fit(DeviceLoader(data, "train", 8, shuffle=True))
    assert not checkpoint.files(tmp_path)


class Times(torch.nn.Module):
    """The outputs of a linear layer in float32, times a number in the backward pass alone."""

    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = torch.nn.Linear(6, 3), factor

    def forward(self, inputs):
        outputs = self.layer(inputs).float()
        return outputs.detach() + self.factor * (outputs - outputs.detach())


def test_a_gradient_that_overflows_where_the_loss_is_finite_is_seen():
    """Its squares have no sum in float32, and clipped by an infinite norm it is 0: nothing would
    ever be learnt.
    """
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    trainer = make_trainer(
        Times(1e30), callbacks=[NaNGuard()], max_grad_norm=1.0, log_every=3, optimizer=optimizer
    )
    before = trainer.module.layer.weight.detach().clone()
    with pytest.raises(
        TrainingError,
        match=r"is inf at step 3. First non-finite value: in step 1, the gradient of layer.bias has norm inf",
    ):
        trainer.fit(*loaders())
    assert torch.equal(trainer.module.layer.weight, before)


def test_a_validation_loss_that_is_not_finite_ends_the_run():
    data = make_data()
    data.val.inputs[:] = math.inf
    trainer = make_trainer(callbacks=[NaNGuard()], eval_every=3)
    with pytest.raises(TrainingError, match="val/loss is nan at step 3, but all weights are"):
        trainer.fit(DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 7))


def test_an_overflow_in_fp16_says_bf16():
    trainer = make_trainer(callbacks=[NaNGuard()], precision="fp16", max_grad_norm=1.0, log_every=1)
    with torch.no_grad():
        trainer.module[3].bias.fill_(1e5)
    with pytest.raises(
        TrainingError,
        match="train/loss is nan at step 1. First non-finite value: in step 1, the loss is nan .*\n.*set .*precision=bf16",
    ):
        trainer.fit(*loaders())


# Checkpoints


def test_the_last_and_the_best_are_kept(tmp_path):
    values = [1, 5, 2, 3, 7, 4, 4, 4]
    for count, kept in ((1, [1]), (3, [3, 2]), (4, [4, 3, 2]), (8, [8, 7, 5])):
        folder = tmp_path / str(count)
        saver = Checkpoint(folder, every=1, keep=2, monitor="val/score")
        scored(values, saver, max_steps=count)
        assert list(checkpoint.files(folder)) == kept
        path, state = checkpoint.best(folder)
        assert path == checkpoint.path_of(folder, saver.best["step"])
        assert state["step"] == values.index(max(values[:count])) + 1


@pytest.mark.parametrize(
    ("every", "steps"), [(None, [24, 16, 8]), (5, [24, 20, 15, 10, 5]), (100, [24])]
)
def test_checkpoints_come_at_epochs_or_steps_and_at_the_end(tmp_path, every, steps):
    trainer = make_trainer(
        callbacks=[Checkpoint(tmp_path, every=every, epochs=None if every else 1, keep=100)]
    )
    trainer.fit(loaders()[0])
    # The training loss is watched, as there is no validation: its best rows are saved too.
    assert sorted({*checkpoint.files(tmp_path)} - {8, 16}, reverse=True) == sorted(
        {*steps} - {8, 16}, reverse=True
    )


def test_a_folder_with_another_run_is_refused_and_later_steps_do_not_outlive_a_step_back(tmp_path):
    make_trainer(callbacks=[Checkpoint(tmp_path, every=5, keep=9)]).fit(loaders()[0])
    with pytest.raises(UserError, match="contains checkpoints"):
        make_trainer(callbacks=[Checkpoint(tmp_path)], max_steps=3).fit(loaders()[0])
    assert next(iter(checkpoint.files(tmp_path))) == 24
    back = make_trainer(callbacks=[Checkpoint(tmp_path, every=5)], max_steps=12)
    back.fit(loaders()[0], resume=checkpoint.path_of(tmp_path, 10))
    assert checkpoint.newest(tmp_path)[1]["step"] == 12


def test_a_second_fit_into_a_folder_is_refused_in_one_message(tmp_path, caplog):
    trainer = make_trainer(callbacks=[Checkpoint(tmp_path)], max_steps=3)
    trainer.fit(loaders()[0])
    with pytest.raises(UserError, match="contains checkpoints"):
        trainer.fit(loaders()[0])
    assert not caplog.messages


def test_a_best_of_another_folder_is_forgotten(tmp_path):
    make_trainer(callbacks=[Checkpoint(tmp_path / "a")], epochs=1).fit(*loaders())
    saver = Checkpoint(tmp_path / "b")
    make_trainer(callbacks=[saver]).fit(*loaders(), resume=checkpoint.path_of(tmp_path / "a", 8))
    assert checkpoint.path_of(tmp_path / "b", saver.best["step"]).exists()
    assert checkpoint.best(tmp_path / "b")[1]["step"] == saver.best["step"]


def test_a_new_best_in_the_middle_of_an_epoch_is_saved(tmp_path):
    scored([1, 2, 9, 3, 3, 3, 3], Checkpoint(tmp_path, monitor="val/score"), max_steps=7)
    assert list(checkpoint.files(tmp_path)) == [7, 3]


@pytest.mark.parametrize(
    "watcher", [functools.partial(EarlyStopping, 3), functools.partial(Checkpoint, "nowhere")]
)
def test_what_is_monitored_is_checked_before_the_first_step(watcher):
    trainer = make_trainer(
        metrics={"acc": Accuracy(), "table": Confusion(3)}, callbacks=[watcher(monitor="val/ac")]
    )
    with pytest.raises(UserError, match="Did you mean 'val/acc'") as error:
        trainer.fit(*loaders())
    assert trainer.step == 0
    assert "val/loss" in str(error.value)
    trainer.callbacks = [watcher(monitor="val/table")]
    with pytest.raises(UserError, match="monitor_mode=max"):
        trainer.fit(*loaders())
    trainer.callbacks = [watcher(monitor="val/loss")]
    with pytest.raises(UserError, match="one of: train/loss"):
        trainer.fit(loaders()[0])  # nothing is validated


@pytest.mark.parametrize(
    ("metrics", "val", "name", "sign"),
    [
        ({"acc": Accuracy()}, True, "val/acc", 1),
        ({}, True, "val/loss", -1),
        ({}, False, "train/loss", -1),
    ],
)
def test_auto_watches_what_there_is(metrics, val, name, sign):
    watcher = EarlyStopping(100)
    train_loader, val_loader = loaders()
    make_trainer(metrics=metrics, callbacks=[watcher]).fit(
        train_loader, val_loader if val else None
    )
    assert (watcher.name, watcher.sign) == (name, sign)


def test_of_the_training_loss_the_mean_over_an_epoch_counts(tmp_path):
    """Its rows are of 3, 3 and 2 batches, the last of which has 4 samples; a resume from any step
    comes to the same.
    """

    class Rise(Callback):
        def on_epoch_end(self, trainer):  # epoch 2 is the best, and no row of it
            for group in trainer.optimizer.param_groups:
                group["lr"] = 3.0 if trainer.step == 16 else 0.01

    def run(folder, resume=None, **settings):
        rows, saver, stopping = [], Checkpoint(folder, every=1, keep=99), EarlyStopping(9)
        watch = Callback()
        watch.on_log = lambda trainer, row: rows.append(row)
        trainer = make_trainer(
            callbacks=[Rise(), watch, stopping, saver], log_every=3, epochs=4, **settings
        )
        trainer.fit(loaders()[0], resume=resume)
        return saver, stopping, rows

    saver, stopping, rows = run(tmp_path / "whole")
    means = {}
    for end in range(8, 33, 8):
        epoch = [row for row in rows if end - 8 < row["step"] <= end]
        assert len({row["train/samples"] for row in epoch}) > 1
        means[end] = sum(row["train/loss"] * row["train/samples"] for row in epoch) / 60
    best = min(means, key=means.get)
    assert (
        saver.best
        == stopping.best
        == {"step": best, "value": pytest.approx(means[best], rel=1e-12)}
    )
    assert (best, stopping.waited) == (16, 2) and min(rows, key=lambda row: row["train/loss"])[
        "step"
    ] != best
    for step in (3, 13, 16, 17, 31):
        folder = tmp_path / str(step)
        again, _, _ = run(folder, resume=checkpoint.path_of(tmp_path / "whole", step))
        if step < 16:
            assert again.best == saver.best
        ends = [
            checkpoint.load(checkpoint.path_of(place, 32))["callbacks"]
            for place in (folder, tmp_path / "whole")
        ]
        assert ends[0]["EarlyStopping"] == ends[1]["EarlyStopping"]
    saver, _, rows = run(tmp_path / "short", max_steps=7)  # no whole epoch: that of all steps
    assert saver.best["value"] == pytest.approx(
        sum(row["train/loss"] * row["train/samples"] for row in rows) / 56
    )


@pytest.mark.parametrize("log_every", [1, 4])
def test_an_epoch_whose_last_targets_are_ignored_counts(tmp_path, log_every):
    """The means are those of the plain loop; the last row of each epoch may have no loss."""
    inputs = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0))
    data = [(x, x[:, :3].argmax(1)) for x in inputs]
    data[4][1].fill_(-100)
    model = make_model()
    means = []
    for _ in range(3):
        losses = []
        for x, y in data[:4]:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.1 * weight.grad  # uphill, so that the first epoch is the best
            losses.append(loss.item())
        means.append(sum(losses) / 4)
    assert means[0] < min(means[1:])

    class Ascent(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for weight in group["params"]:
                    with torch.no_grad():
                        weight += 0.1 * weight.grad

    ascent = functools.partial(Ascent, lr=0.1)
    saver, stopping = Checkpoint(tmp_path), EarlyStopping(2)
    settings = {"optimizer": ascent, "scheduler": None, "epochs": 6, "log_every": log_every}
    trainer = make_trainer(callbacks=[stopping, saver], **settings)
    trainer.fit(data)
    assert trainer.step == 15
    assert stopping.best == saver.best == {"step": 5, "value": pytest.approx(means[0], rel=1e-5)}


# Progress and loggers


def test_one_plain_line_an_epoch_where_there_is_no_terminal(capsys):
    trainer = make_trainer(metrics={"acc": Accuracy()}, callbacks=[Progress()], log_every=3)
    rows = []

    class Watch(Callback):
        def on_log(self, trainer, row):
            rows.append(row)

    trainer.callbacks.append(Watch())
    trainer.fit(*loaders())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "model",
        "device",
        "plan",
        "epoch",
        "epoch",
        "epoch",
    ]
    last = [row for row in rows if 16 < row["step"] <= 24 and "train/loss" in row]
    mean = sum(row["train/loss"] * row["train/samples"] for row in last) / 60
    assert lines[-1].startswith(
        f"epoch 3/3  loss {mean:.4f}  val/loss {rows[-1]['val/loss']:.4f}  val/acc {rows[-1]['val/acc']:.4f}  "
    )
    assert (
        "3 epochs of 8 steps, batch 8, AdamW (fused) lr 0.01, cosine after 3 steps of warmup"
        in lines[2]
    )


def test_the_plan_of_less_than_an_epoch_counts_its_steps(capsys):
    make_trainer(callbacks=[Progress()], max_steps=3).fit(loaders()[0])
    assert "plan     3 of 8 steps, batch 8, " in capsys.readouterr().out


def test_in_a_long_epoch_a_line_says_now_and_then_where_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", -1)  # seconds: after each step
    make_trainer(callbacks=[Progress()], log_every=3, epochs=1).fit(loaders()[0])
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [line[0] for line in lines] == [
        *(f"epoch {round(i / 8, 2)}/1" for i in range(1, 8)),
        "epoch 1/1",
    ]
    assert [line[1][:5] for line in lines[2:]] == ["loss "] * 6  # of what has been logged by then
    assert lines[0][1:] == []


class StopsAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            trainer.stop("that is enough")


@pytest.mark.parametrize("step", [8, 11])
def test_the_last_line_has_what_was_logged_of_an_epoch_that_was_stopped(capsys, step):
    trainer = make_trainer(callbacks=[StopsAt(step), Progress()], log_every=3)
    rows = trainer.fit(*loaders())
    *_, last, why = capsys.readouterr().out.splitlines()
    assert why == f"stopped at step {step}: that is enough"
    if step == 8:  # the line of the epoch
        assert last.startswith("epoch 1/3  loss ")
    else:
        assert last.startswith(f"epoch 1.38/3  loss {rows[-1]['train/loss']:.4f}  ")
        assert rows[-1]["step"] == 9


def test_jsonl_has_one_row_an_event_and_a_continued_run_none_twice(tmp_path):
    def run(folder, resume=None):
        trainer = make_trainer(
            metrics={"acc": Accuracy()},
            callbacks=[JSONL(folder / "metrics.jsonl"), Checkpoint(folder, every=5, keep=9)],
            log_every=2,
        )
        trainer.fit(*loaders(), resume=resume)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [
            {name: value for name, value in row.items() if name != "train/seconds"} for row in rows
        ]

    whole = run(tmp_path / "whole")
    assert [row["step"] for row in whole] == [2, 4, 6, 8, 8, 10, 12, 14, 16, 16, 18, 20, 22, 24, 24]
    run(tmp_path / "again")
    with open(tmp_path / "again" / "metrics.jsonl", "a") as file:
        file.write('{"step": 25, "train')  # as a kill in the middle of a line would leave it
    assert run(tmp_path / "again", resume=tmp_path / "again" / "step_00000010.ckpt") == whole


def test_tensorboard_has_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(
        metrics={"acc": Accuracy()},
        callbacks=[TensorBoard(tmp_path / "tb"), JSONL(tmp_path / "metrics.jsonl")],
    )
    trainer.fit(*loaders())
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    charts = {"train/loss": "loss/train", "val/loss": "loss/val", "val/acc": "val/acc"}
    for name, chart in charts.items():
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert expected
        assert [
            (event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars(chart)
        ] == expected


# The learning-rate finder


def test_lr_find_records_a_curve_and_suggests_a_tenth_of_the_lowest(tmp_path):
    trainer = make_trainer(make_model(dropout=0.1))
    train_loader, _ = loaders()
    rates, losses = lr_find(trainer, train_loader, steps=40)
    assert math.isclose(rates[1] / rates[0], 1e6 ** (1 / 39))
    assert search.suggestion([0.1, 0.2, 0.3], [2, 1, 2]) == 0.02
    first = make_trainer(
        make_model(dropout=0.1),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-6),
        scheduler=functools.partial(schedule_constant),
        max_steps=1,
    )
    rows = []

    class Watch(Callback):
        def on_log(self, trainer, row):
            rows.append(row)

    first.callbacks = [Watch()]
    first.fit(train_loader)
    assert math.isclose(losses[0], rows[0]["train/loss"], rel_tol=1e-6)
    search.write(rates, losses, tmp_path / "new" / "curve.csv")
    with open(tmp_path / "new" / "curve.csv", encoding="utf-8", newline="") as file:
        read = [(float(row["lr"]), float(row["loss"])) for row in csv.DictReader(file)]
    expected = list(zip(rates, losses, strict=True))
    for row, pair in zip(read, expected, strict=True):
        assert row == pytest.approx(pair, rel=1e-5)


def schedule_constant(optimizer, total_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


# Stopped in an evaluation


class Breaks(Callback):
    """Interrupts the training in the evaluation after step `at`; `dies` is a kill after this step,
    before the rest.
    """

    def __init__(self, at=None, dies=None):
        self.at, self.dies = at, dies

    def on_eval_start(self, trainer):
        if trainer.step == self.at and trainer.train_loader is not None:
            trainer.interrupt("asked to")

    def on_step_end(self, trainer):
        if trainer.step == self.dies:
            raise KeyboardInterrupt


class Noisy(torch.nn.Module):
    """A model whose evaluation draws random numbers, as that of an autoencoder may."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs):
        return self.inner(inputs + torch.randn_like(inputs))


def rows_of(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: row[name] for name in row if name != "train/seconds"} for row in rows]


def test_an_evaluation_that_is_done_anew_gives_the_same_row_once(tmp_path):
    """Stopped in the evaluation after step 6; killed after step 7, before a checkpoint has the row
    of the step.
    """

    def fit(folder, resume=None, **breaks):
        file = tmp_path / folder
        callbacks = [JSONL(file / "metrics.jsonl"), EMA(0.9), Breaks(**breaks)]
        saver = Checkpoint(file / "checkpoints", epochs=None, monitor="train/loss")
        trainer = make_trainer(Noisy(), eval_every=3, callbacks=[*callbacks, saver])
        trainer.fit(*loaders(), resume=resume and checkpoint.newest(file / "checkpoints")[0])
        return trainer

    whole = fit("whole")
    stopped = fit("cut", at=6)
    assert stopped.step == 6 and stopped.state_dict()["evaluation_due"]
    assert max(checkpoint.files(tmp_path / "cut" / "checkpoints")) == 6
    with pytest.raises(KeyboardInterrupt):
        fit("cut", resume=True, dies=7)
    assert rows_of(tmp_path / "cut" / "metrics.jsonl") != rows_of(
        tmp_path / "whole" / "metrics.jsonl"
    )
    again = fit("cut", resume=True)
    assert rows_of(tmp_path / "cut" / "metrics.jsonl") == rows_of(
        tmp_path / "whole" / "metrics.jsonl"
    )
    assert_same(again.module.state_dict(), whole.module.state_dict())
    assert not again.state_dict()["evaluation_due"]


@pytest.mark.parametrize("hook", ["on_eval_start", "on_step_end"])
def test_a_signal_that_nobody_defers_ends_the_fit_itself(hook):
    """As Ctrl-C does in task=overfit and task=plan, which have nothing to save."""

    def be_interrupted(trainer):
        raise stopping.Interrupted

    callback = Callback()
    setattr(callback, hook, be_interrupted)
    trainer = make_trainer(eval_every=1, callbacks=[callback])
    with pytest.raises(stopping.Interrupted):
        trainer.fit(*loaders())
    assert trainer.failed and trainer.step == 1 and not trainer.interrupted


def test_a_stop_after_the_checkpoints_turn_is_saved_at_the_end(tmp_path):
    class Late(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 7:
                trainer.interrupt("asked to")

    trainer = make_trainer(callbacks=[Checkpoint(tmp_path / "plain"), Late()])
    trainer.fit(*loaders())
    assert trainer.step == 7 and checkpoint.newest(tmp_path / "plain")[1]["step"] == 7
    trainer = make_trainer(callbacks=[Checkpoint(tmp_path / "within"), Late()])
    try:
        raise OSError("an error of somebody else's")
    except OSError:
        trainer.fit(*loaders())  # as one tries again
    assert checkpoint.newest(tmp_path / "within")[1]["step"] == 7


@pytest.mark.parametrize("error", [None, OSError("full"), KeyboardInterrupt()])
def test_a_callback_knows_whether_the_fit_has_failed(error):
    class Fails(Callback):
        def on_step_end(self, trainer):
            if error is not None:
                raise error

        def on_fit_end(self, trainer):
            self.seen = trainer.failed

    fails = Fails()
    with contextlib.suppress(OSError, KeyboardInterrupt):
        make_trainer(callbacks=[fails]).fit(*loaders())
    assert fails.seen == (error is not None)


def test_an_evaluation_that_a_callback_asks_for_is_not_cut(tmp_path):
    class Asks(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 7:
                trainer.interrupt("asked to")
                self.asked = trainer.evaluate(loaders()[1], "again")

    asks = Asks()
    make_trainer(callbacks=[asks, Checkpoint(tmp_path)]).fit(*loaders())
    assert "again/loss" in asks.asked and checkpoint.newest(tmp_path)[1]["step"] == 7


def test_an_average_that_the_checkpoint_has_not_is_refused(tmp_path):
    make_trainer(callbacks=[Checkpoint(tmp_path)], epochs=1).fit(*loaders())
    with pytest.raises(UserError, match="Trainer: EMA is missing"):
        make_trainer(callbacks=[EMA(0.9), Checkpoint(tmp_path)]).fit(
            *loaders(), resume=checkpoint.newest(tmp_path)[0]
        )


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_row_that_the_disk_takes_in_part_is_no_row(tmp_path):
    """And the next one begins a line of its own."""
    import resource

    logger = JSONL(tmp_path / "metrics.jsonl")
    trainer = make_trainer()
    trainer.step = 0
    logger.on_fit_start(trainer)
    logger.on_log(trainer, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, before[1])
    )
    try:
        with pytest.raises(OSError, match="metrics.jsonl"):
            logger.on_log(trainer, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    logger.on_log(trainer, {"step": 3})
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1, 3]


def test_an_error_at_the_end_of_a_fit_does_not_stop_the_next_one():
    class Fails(Callback):
        def on_step_end(self, trainer):
            trainer.stop("asked to")

        def on_fit_end(self, trainer):
            raise OSError("full")

    fails = Fails()
    trainer = make_trainer(callbacks=[fails])
    with pytest.raises(OSError, match="full"):
        trainer.fit(*loaders())
    trainer.callbacks = []
    trainer.fit(*loaders())
    assert trainer.step == trainer.total_steps


def test_a_validation_loss_that_is_not_finite_in_a_resumed_evaluation_is_explained(tmp_path):
    make_trainer(callbacks=[Breaks(at=8), Checkpoint(tmp_path)]).fit(*loaders())
    train, val = loaders()
    val.inputs[:] = math.nan
    resumed = make_trainer(callbacks=[Checkpoint(tmp_path), NaNGuard()])
    with pytest.raises(
        TrainingError, match="all weights are finite.\nCheck the inputs and targets in the val data"
    ):
        resumed.fit(train, val, resume=checkpoint.newest(tmp_path)[0])
