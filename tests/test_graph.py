"""Captured steps equal eager ones to the bit; here by a recorder that does the work again, on a GPU
by CUDA graphs.
"""

import copy
import functools

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer

from stoker import Trainer
from stoker.data.loader import DeviceLoader
from stoker.diagnostics.lr_find import lr_find
from stoker.trainer import batch as batches
from stoker.trainer import device as devices
from stoker.trainer import graph, optimizers
from stoker.trainer.callbacks import EMA, Callback
from stoker.trainer.errors import UserError
from stoker.trainer.steps import GraphStep, captures


@pytest.fixture
def recorded(monkeypatch):
    """Stands in for CUDA: a replay does the work once more, on the memory of the recording.

    Gives the recordings.
    """
    recordings = []

    def record(work, batch, device):
        recordings.append(batch)
        result = None

        def replay():
            nonlocal result
            fresh = work(batch)
            if result is None:
                result = fresh
            for own, new in zip(batches.entries(result), batches.entries(fresh), strict=True):
                own[1].copy_(new[1])
            return result

        return replay

    monkeypatch.setattr(devices, "record", record)
    monkeypatch.setattr(devices, "beside", lambda work, batch, device: work(batch))
    return recordings


class FreezeHalfway(Callback):
    def on_step_end(self, trainer):
        trainer.module[0].bias.requires_grad_(trainer.step < 9)


def fitted(captured, **settings):
    """A training of 24 steps with a ragged last batch in each of its 3 epochs."""
    settings = {"max_grad_norm": 0.5, "grad_accum_steps": 2, **settings}
    trainer = make_trainer(
        make_model(dropout=0.3), callbacks=[EMA(0.9), FreezeHalfway()], **settings
    )
    # On both sides: a rate in a tensor is rounded to float32.
    optimizers.make_capturable(trainer.optimizer, trainer.device)
    if captured:
        trainer.special_step = GraphStep()
    data = make_data()
    trainer.fit(DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 8))
    return copy.deepcopy(trainer.state_dict()), trainer


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)]
)
def test_captured_equals_eager(recorded, optimizer):
    optimizer = functools.partial(optimizer, lr=1e-2)
    (eager, _), (captured, trainer) = (
        fitted(captured, optimizer=optimizer) for captured in (False, True)
    )
    for name in ("model", "callbacks", "scheduler", "step"):
        assert_same(captured[name], eager[name], name)
    # Whole batches with and without the bias, ragged ones without; one of those with it came but
    # once.
    assert len(recorded) == len(trainer.special_step.captured.graphs) == 3 and {
        len(batch[0]) for batch in recorded
    } == {8, 4}


def test_more_kinds_than_graphs_run_as_they_are(recorded, monkeypatch):
    monkeypatch.setattr(graph, "MOST", 1)
    (eager, _), (captured, trainer) = (fitted(captured) for captured in (False, True))
    assert_same(captured["model"], eager["model"])
    assert len(trainer.special_step.captured.graphs) == 1


def test_the_rate_that_is_logged_is_a_number_and_the_one_used(recorded):
    _, trainer = fitted(True)
    rate = trainer.optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor) and isinstance(trainer.lr, float)
    assert rate.item() == pytest.approx(trainer.scheduler.get_last_lr()[0])


def test_where_there_are_no_graphs():
    with pytest.raises(UserError, match=r"compile=graph: cpu has no graphs. Type compile=true"):
        make_trainer(compile="graph")


class Own(Trainer):
    def train_step(self, batch):
        return super().train_step(batch)


@pytest.mark.parametrize(
    ("kind", "dtype", "strategy", "words"),
    [
        (Trainer, torch.float16, "single", "fp16"),
        (Trainer, None, "dp", "one GPU"),
        (Own, None, "single", "Own has its own train_step"),
    ],
)
def test_what_cannot_be_captured(monkeypatch, kind, dtype, strategy, words):
    monkeypatch.setattr(devices, "GRAPHS", ("cpu",))
    graph.check(torch.device("cpu"), None, "single")
    if dtype is None and strategy == "single":
        with pytest.raises(UserError, match=words):
            make_trainer(kind=kind, compile="graph")
        return
    with pytest.raises(UserError, match=words):
        graph.check(torch.device("cpu"), dtype, strategy)


def test_an_optimizer_without_a_fused_form_is_refused():
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(UserError, match="RMSprop is not fused"):
        optimizers.make_capturable(optimizer, torch.device("cpu"))


def test_plain_values_of_a_batch_are_no_part_of_a_graph_and_objects_are_refused(recorded):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    execute = graph.Captured(optimizer, torch.device("cpu"))
    given = [{"x": torch.tensor(1.0), "w": float(i % 3)} for i in range(12)]
    assert [execute(lambda batch: batch["x"] * batch["w"], batch).item() for batch in given] == [
        0.0,
        1.0,
        2.0,
    ] * 4
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    with pytest.raises(UserError, match=r"batch\[0\] is a PackedSequence, not a tensor"):
        execute(lambda batch: None, [packed])


def test_the_learning_rate_finder_finds_the_same_with_graphs(recorded):
    found = []
    for captured in (False, True):
        trainer = make_trainer()
        if captured:
            trainer.special_step = GraphStep()
        found.append(
            lr_find(trainer, DeviceLoader(make_data(), "train", 8, shuffle=True), steps=30)
        )
        assert captures(trainer) == captured
    assert found[0].losses == found[1].losses
