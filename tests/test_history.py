"""The rows that `fit` returns, numbers of your own in them, metrics of training batches, and
rates.
"""

import functools
import json
import re
from pathlib import Path

import numpy
import pytest
import torch
from conftest import make_data, make_model, make_trainer
from sklearn.metrics import recall_score

from stoker import Trainer
from stoker.data.loader import DeviceLoader
from stoker.runs.loggers import JSONL, charted
from stoker.trainer.callbacks import Callback, Checkpoint, EarlyStopping, Progress
from stoker.trainer.errors import UserError
from stoker.trainer.metrics import Accuracy, Confusion, Sums


def loaders(data=None):
    data = data or make_data()
    return DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 8)


class Rows(Callback):
    def __init__(self):
        self.rows = []

    def on_log(self, trainer, row):
        self.rows.append(row)


class Own(Callback):
    """Logs the next of these numbers at the end of each epoch."""

    def __init__(self, values, name="my/number"):
        self.values, self.name = values, name

    def on_epoch_end(self, trainer):
        value = self.values[trainer.step // trainer.steps_per_epoch - 1]
        trainer.log({self.name: value})


# The history


def test_fit_returns_the_rows_joined_by_step():
    rows = Rows()
    trainer = make_trainer(
        callbacks=[rows, Own([0.1, 2, 3])], metrics={"acc": Accuracy()}, log_every=3
    )
    history = trainer.fit(*loaders())
    steps = [3, 6, 8, 9, 12, 15, 16, 18, 21, 24]
    assert [row["step"] for row in history] == steps
    joined = {}
    for row in rows.rows:
        joined.setdefault(row["step"], {}).update(row)
    assert list(history) == list(joined.values())
    assert {"val/acc", "val/loss", "train/loss", "my/number"} <= history[-1].keys()
    assert [row["my/number"] for row in history if "my/number" in row] == [0.1, 2.0, 3.0]
    assert len(trainer.fit(*loaders())) == 10  # of the second fit alone
    assert "10 rows" in repr(history) and "'my/number': 3" in repr(history)


def test_lists_go_to_the_callbacks_and_not_into_the_history():
    rows = Rows()
    metrics = {"confusion": Confusion(3), "acc": Accuracy()}
    trainer = make_trainer(callbacks=[rows], metrics=metrics, epochs=1)
    history = trainer.fit(*loaders())
    table = numpy.array(rows.rows[-1]["val/confusion"])
    assert history[-1]["val/acc"] == pytest.approx(table.trace() / table.sum())
    assert "val/confusion" not in history[-1]


def test_a_history_is_a_table_for_pandas():
    pandas = pytest.importorskip("pandas")
    history = make_trainer().fit(*loaders())
    table = pandas.DataFrame(history)
    assert table["step"].tolist() == [8, 16, 24]
    assert table["val/loss"].tolist() == [row["val/loss"] for row in history]


# Numbers of your own


@pytest.mark.parametrize(
    "value", [0.1, numpy.float32(0.5), numpy.float64(0.1), torch.tensor(0.25), 3, True, [1, 2.5]]
)
def test_numbers_of_any_kind_reach_the_file_as_they_are(tmp_path, value):
    trainer = make_trainer(callbacks=[Own([value]), JSONL(tmp_path / "rows.jsonl")], epochs=1)
    trainer.fit(loaders()[0])
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[-1])
    assert row["my/number"] == (value.item() if hasattr(value, "item") else value)
    assert isinstance(value, list) or charted(row) == {"my/number": float(value)}


def test_early_stopping_and_checkpoints_monitor_a_number_that_is_logged(tmp_path):
    values = [3, 5, 4, 4, 4, 4]
    watching = {"monitor": "my/number", "mode": "max"}
    trainer = make_trainer(
        epochs=6,
        callbacks=[
            EarlyStopping(2, **watching),
            Own(values),
            Checkpoint(tmp_path, keep=2, **watching),
        ],
    )
    trainer.fit(*loaders())
    assert (
        trainer.step == 32
        and "my/number did not improve in 2 evaluations (best: 5.0000)" in str(trainer.stop_reason)
    )
    assert trainer.callbacks[2].best == {"step": 16, "value": 5.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000016.ckpt",
        "step_00000024.ckpt",
        "step_00000032.ckpt",
    ]


def test_numbers_of_compute_loss_are_logged_too():
    class Logging(type(make_trainer())):
        def compute_loss(self, batch):
            loss, outputs = super().compute_loss(batch)
            if self.module.training:
                self.log({"my/size": outputs.detach().abs().mean()})
            return loss, outputs

    stop = EarlyStopping(3, monitor="my/size", mode="min")
    trainer = make_trainer(kind=Logging, callbacks=[stop], log_every=100)
    history = trainer.fit(loaders()[0])
    assert all(isinstance(row["my/size"], float) for row in history[:-1])
    assert "my/size did not improve" in str(trainer.stop_reason)


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("my/number", "auto"), ("train/lss", "min"), ("val/los", "max"), ("number", "max")],
)
def test_a_name_that_is_a_typo_or_has_no_mode_is_refused_at_once(monitor, mode):
    with pytest.raises(UserError, match="no such number is logged") as raised:
        make_trainer(callbacks=[EarlyStopping(2, monitor=monitor, mode=mode)]).fit(*loaders())
    assert len(str(raised.value).splitlines()) <= 3


def test_a_metric_that_does_not_say_which_direction_is_better_is_not_monitored_unasked():
    class MeanOutput(Sums):
        def update(self, outputs, targets):
            self.add(torch.stack([outputs.sum(), torch.tensor(outputs.numel())]))

        def value(self, sums):
            return sums[0] / sums[1]

    def stop_of(monitor="auto", mode="auto"):
        stop = EarlyStopping(2, monitor=monitor, mode=mode)
        make_trainer(callbacks=[stop], metrics={"mean": MeanOutput()}).fit(*loaders())
        return stop.name, stop.sign

    assert stop_of() == ("val/loss", -1)
    assert stop_of("val/mean", "max") == ("val/mean", 1)
    with pytest.raises(UserError, match="unknown whether higher is better") as raised:
        stop_of("val/mean")
    assert "For another metric, or a number that you log, also type monitor_mode=" in str(
        raised.value
    )


def test_a_number_that_never_comes_is_warned_of_once(caplog):
    stop = EarlyStopping(2, monitor="my/numbr", mode="max")
    make_trainer(callbacks=[stop, Own([1, 2, 3])]).fit(*loaders())
    (record,) = caplog.records
    assert record.message == (
        "EarlyStopping: my/numbr was never logged, so there is no best value.\n"
        "Add a metric with +metrics.NAME._target_=CLASS, or type monitor=train/loss."
    )
    make_trainer(callbacks=[stop], epochs=1).fit(*loaders())
    assert "was never logged, so" in caplog.records[1].message


def test_without_a_loss_or_a_metric_the_user_is_told_what_to_monitor(caplog):
    class NoLoss(type(make_trainer())):
        def compute_loss(self, batch):
            loss, outputs = super().compute_loss(batch)
            return loss if self.model.training else None, outputs

    stop = EarlyStopping(2)
    make_trainer(kind=NoLoss, metrics={}, callbacks=[stop]).fit(*loaders())
    (record,) = caplog.records
    assert record.message == (
        "EarlyStopping: val/loss was never logged, so there is no best value.\n"
        "Add a metric with +metrics.NAME._target_=CLASS, or type monitor=train/loss."
    )
    stop = EarlyStopping(2, monitor="train/loss")
    make_trainer(kind=NoLoss, metrics={}, callbacks=[stop]).fit(*loaders())
    assert stop.best is not None and len(caplog.records) == 1


def test_a_list_cannot_be_monitored():
    stop = EarlyStopping(2, monitor="my/number", mode="max")
    with pytest.raises(UserError, match="monitor=my/number: this metric is a list"):
        make_trainer(callbacks=[stop, Own([[1.0, 2.0]] * 3)]).fit(*loaders())


@pytest.mark.parametrize("first", [True, False])
def test_the_lines_show_numbers_of_your_own(capsys, first):
    class Late(Own):
        def on_epoch_end(self, trainer):
            pass

        def on_step_end(self, trainer):
            if trainer.step % trainer.steps_per_epoch == 0:
                super().on_epoch_end(trainer)

    late = Late([7, 8, 9], "my/late")
    callbacks = [Progress(), Own([0.25, 0.5, 0.75]), late]
    make_trainer(callbacks=callbacks if first else callbacks[::-1]).fit(*loaders())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    shown = [line.partition("my/number ")[2].split()[0] for line in lines[:3]]
    assert shown == ["0.2500", "0.5000", "0.7500"]
    assert "my/late 9" in lines[-1] and len(lines) == (4 if first else 3)
    assert "train/lr" not in "".join(lines) and "samples " not in lines[0]


# Metrics of training batches


def of_the_docs():
    """The class TrainMetrics as docs/own.md shows it."""
    page = Path(__file__).resolve().parents[1] / "docs" / "own.md"
    text = page.read_text(encoding="utf-8")
    names = {"Trainer": Trainer}
    exec(re.search(r"```python\n(.{,90}class TrainMetrics.*?)\n\n\n", text, re.DOTALL)[1], names)
    return names["TrainMetrics"]


class Outputs(of_the_docs()):
    """Keeps what the metrics should be of."""

    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        if self.module.training:
            vars(self).setdefault("seen", []).append((self.step, outputs.argmax(1), batch[1]))
        return loss, outputs


@pytest.mark.parametrize("parts", [1, 3])
def test_metrics_of_training_batches_are_scikit_learn_s(parts):
    from torchmetrics.classification import MulticlassAccuracy

    metrics = {"acc": Accuracy(), "balanced": MulticlassAccuracy(3, average="macro")}
    options = {"metrics": metrics, "log_every": 3, "eval_every": 4, "grad_accum_steps": parts}
    trainer = make_trainer(make_model(dropout=0.5), kind=Outputs, **options)
    train_loader, val_loader = loaders()
    history = trainer.fit(train_loader, val_loader)
    done = 0
    for row in history:
        window = [part for part in trainer.seen if done <= part[0] < row["step"]]
        predicted, targets = (torch.cat(column) for column in list(zip(*window, strict=True))[1:])
        assert row["train/samples"] == len(targets)
        assert row["train/acc"] == pytest.approx((predicted == targets).double().mean().item())
        expected = recall_score(targets, predicted, average="macro", zero_division=0)
        assert row["train/balanced"] == pytest.approx(expected, rel=1e-6)
        done = row["step"]
    last = trainer.evaluate(val_loader)
    assert last["val/acc"] == history[-1]["val/acc"] and done == 24
    plain = make_trainer(make_model(dropout=0.5), **(options | {"metrics": {"acc": Accuracy()}}))
    rows = plain.fit(train_loader, val_loader)
    for name in ("train/loss", "val/loss", "val/acc"):
        assert [row.get(name) for row in rows] == [row.get(name) for row in history]


def test_a_line_has_their_mean_over_the_epoch_as_it_has_of_the_loss(capsys):
    settings = {"metrics": {"acc": Accuracy()}, "log_every": 3, "callbacks": [Progress()]}
    trainer = make_trainer(make_model(), kind=Outputs, **settings)
    train_loader, _ = loaders()
    trainer.fit(train_loader)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    per_epoch = trainer.steps_per_epoch
    assert per_epoch % 3 and len(lines) * per_epoch == trainer.step
    for epoch, line in enumerate(lines):
        batches = [part for part in trainer.seen if part[0] // per_epoch == epoch]
        predicted, targets = (torch.cat(column) for column in list(zip(*batches, strict=True))[1:])
        accuracy = (predicted == targets).double().mean().item()
        assert f"train/acc {accuracy:.4f}" in line


def test_metrics_of_training_batches_ignore_the_class_that_the_loss_ignores():
    inputs, targets = torch.randn(16, 6), torch.arange(16) % 3
    metrics = {"acc": Accuracy()}
    loss = torch.nn.CrossEntropyLoss(ignore_index=0)
    trainer = make_trainer(kind=Outputs, loss=loss, metrics=metrics, max_steps=1)
    row = trainer.fit([(inputs, targets)])[0]
    [(_, predicted, _)] = trainer.seen
    hits = (predicted == targets)[targets != 0].double()
    assert row["train/acc"] == pytest.approx(hits.mean().item())


# Rates


def test_the_rates_of_all_groups_are_logged_where_they_differ():
    def two_rates(groups):
        groups = [group | {"lr": 0.1 * 10**-i} for i, group in enumerate(groups)]
        return torch.optim.SGD(groups)

    halved = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=8, gamma=0.5)
    history = make_trainer(optimizer=two_rates, scheduler=halved).fit(loaders()[0])
    assert [row["train/lr"] for row in history] == pytest.approx([0.1, 0.05, 0.025])
    assert [row["train/lr/1"] for row in history] == pytest.approx([0.01, 0.005, 0.0025])
    assert "train/lr/2" not in history[0]
    same = make_trainer()
    assert len(same.optimizer.param_groups) == 2
    assert not any(name.startswith("train/lr/") for name in same.fit(loaders()[0])[0])
