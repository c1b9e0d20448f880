"""Captured steps equal eager ones to the bit; here by a recorder that does the work again, on a GPU
by CUDA graphs.
"""

import ast
import copy
import functools
import random
import sys
from pathlib import Path

import numpy
import pytest
import torch
from conftest import GoBack, assert_same, make_data, make_model, make_trainer

from stoker import Trainer
from stoker.data.loader import DeviceLoader
from stoker.diagnostics.lr_find import lr_find
from stoker.trainer import batches, graph, optimizers, schedules
from stoker.trainer import device as devices
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
    with pytest.raises(
        UserError, match=r"compile=graph needs an NVIDIA or AMD GPU .*\nType compile=true or"
    ):
        make_trainer(compile="graph")


class Own(Trainer):
    def train_step(self, batch):
        return super().train_step(batch)


@pytest.mark.parametrize(
    ("kind", "dtype", "strategy", "words"),
    [
        (Trainer, torch.float16, "single", "precision=bf16 or fp32"),
        (Trainer, None, "dp", "strategy=single"),
        (Own, None, "single", "the Trainer's own train_step"),
    ],
)
def test_what_cannot_be_captured(monkeypatch, kind, dtype, strategy, words):
    monkeypatch.setattr(devices, "GRAPHS", ("cpu",))
    graph.check(make_trainer())
    trainer = make_trainer(kind=kind)
    trainer.dtype = dtype
    trainer.strategy = strategy
    with pytest.raises(UserError, match=words):
        graph.check(trainer)
    if dtype is None and strategy == "single":
        with pytest.raises(UserError, match=words):
            make_trainer(kind=kind, compile="graph")


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
        assert not captures(trainer)
    assert found[0] == found[1]


class Stepping(Trainer):
    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        return loss * self.weight_of_step(), outputs

    def weight_of_step(self):
        return 1 + self.step / 10


class Rated(Trainer):
    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        return loss * self.lr, outputs


class Unfit(Trainer):
    def compute_loss(self, batch):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Stepping, "'Stepping' object has no attribute 'step'"),
        (Rated, "'Rated' object has no attribute 'rates'"),
        (Unfit, "CUDA error: operation not permitted"),
    ],
)
def test_a_step_that_no_graph_can_repeat_is_refused(recorded, kind, words):
    trainer = make_trainer(kind=kind)
    trainer.special_step = GraphStep()
    with pytest.raises(UserError) as caught:
        trainer.fit(DeviceLoader(make_data(), "train", 8))
    message = str(caught.value)
    assert message.startswith(f"compile=graph: the step cannot be captured ({words}")
    assert message.endswith("or type compile=false.") and len(message.splitlines()) == 2
    assert trainer.step == 0 and trainer.lr == 0.0025  # hidden in the step alone
    if kind is Stepping:  # as it may be without graphs
        trainer = make_trainer(kind=kind)
        trainer.fit(DeviceLoader(make_data(), "train", 8))
        assert trainer.step == 24


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand, lambda: torch.rand(()).item()])
def test_a_step_that_draws_on_the_host_is_refused(recorded, draw):
    """On a device with a generator of its own, for which the meta device stands in."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    execute = graph.Captured(optimizer, torch.device("meta"))
    batch = [torch.ones(2)]
    with pytest.raises(UserError, match="draws random numbers on the CPU"):
        for _ in range(3):
            execute(lambda batch: batch[0] * (draw() < 0.9), batch)


CYCLING = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1)


@pytest.mark.parametrize(
    ("scheduler", "graphs"),
    [(CYCLING, 0), (functools.partial(CYCLING, cycle_momentum=False), 3)],
)
def test_a_schedule_that_cycles_momentum_runs_without_graphs(recorded, scheduler, graphs):
    settings = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "scheduler": scheduler,
        "max_steps": 24,
    }
    (eager, _), (captured, trainer) = (fitted(graphed, **settings) for graphed in (False, True))
    assert_same(captured["model"], eager["model"])
    assert len(trainer.special_step.captured.graphs) == len(recorded) == graphs


def test_a_state_that_is_loaded_in_the_middle_of_a_fit_gets_new_graphs(recorded):
    """Loading replaces the optimizer's tensors, and a graph has those that there were."""

    ends = []
    for captured in (False, True):
        trainer = make_trainer(callbacks=[GoBack()], scheduler=schedules.constant)
        optimizers.make_capturable(trainer.optimizer, trainer.device)
        if captured:
            trainer.special_step = GraphStep()
        trainer.fit(DeviceLoader(make_data(64), "train", 8))
        ends.append(copy.deepcopy(trainer.module.state_dict()))
    assert_same(*ends)
    assert len(recorded) == 2
    assert trainer.special_step.captured.state is trainer.optimizer.state


def test_to_know_the_kind_of_a_usual_step_is_three_calls():
    """A walk through the batch, and a text of each setting, took 18 to 39 us of each step."""
    captured = graph.Captured(make_trainer().optimizer, torch.device("cpu"))
    batch = (torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64))
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name != "<listcomp>":  # none since Python 3.12
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        graph.form_of(batch)
        captured.settings()
    finally:
        sys.setprofile(None)
    assert sorted(set(calls)) == ["<genexpr>", "form_of", "settings"] and len(calls) <= 5


def test_each_capture_leaves_the_calls_of_other_threads_alone():
    """In torch's default mode a thread that pins memory breaks it; tests/test_gpu.py does so."""
    folder = Path(graph.__file__).parent
    modes = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cuda.graph":
                options = {option.arg: ast.unparse(option.value) for option in node.keywords}
                modes.append(options.get("capture_error_mode"))
    assert modes == ["'thread_local'"]
