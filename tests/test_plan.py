"""The plan: what it measures of a run, and the lines that say so."""

import math

import pytest
import torch
from conftest import make_data, make_model, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.diagnostics import plan
from stoker.runs.page import render
from stoker.trainer import checkpoint, schedules, summary
from stoker.trainer.callbacks import EMA, Callback, Freeze


@pytest.fixture(autouse=True)
def shortly(monkeypatch):
    """Ten steps are enough: what is measured here is no time."""
    monkeypatch.setattr(plan, "LONG", 0.0)


def loaders():
    data = make_data()
    return DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 7)


def look(*given, **settings):
    trainer = make_trainer(*given, **settings)
    return plan.look(trainer, *loaders()), trainer


class Loud(Callback):
    """A callback that must not be called: it could write."""

    def on_fit_start(self, trainer):
        raise AssertionError

    on_log = on_step_end = on_fit_end = on_fit_start


@pytest.mark.slow
def test_it_does_steps_of_the_run_and_no_more_than_it_has(capsys):
    found, trainer = look(callbacks=[Loud()], epochs=1000)
    assert found.steps == 8000 and plan.STEPS <= found.timed <= plan.MOST
    assert trainer.step == found.timed + plan.WARMUP
    assert found.step > 0 and found.evaluation > 0 and found.test == 0
    opening = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in opening] == ["model", "device", "plan"]
    for steps in (1, 3, 5):
        found, trainer = look(max_steps=steps, epochs=None)
        assert trainer.step == found.steps == steps and 1 <= found.timed <= steps and found.step > 0


def test_the_first_steps_do_not_count(monkeypatch):
    """The clock shows what the steps are said to take: 5 s, then 1 s until they are timed."""
    clock = [0.0]
    lasting = iter([5.0, *[1.0] * (plan.WARMUP - 1)])

    class Lasting(torch.nn.Linear):
        def forward(self, inputs):
            clock[0] += next(lasting, 0.1)
            return super().forward(inputs)

    monkeypatch.setattr(plan.time, "perf_counter", lambda: clock[0])
    found, _ = look(Lasting(6, 3), epochs=1000)
    assert found.timed == plan.STEPS
    assert found.step == pytest.approx(0.1) and found.first == pytest.approx(4.9)


def test_its_memory_is_that_of_the_parts():
    model = make_model()
    size = sum(p.numel() for p in model.parameters()) * 4
    found, trainer = look(model)
    mib = 2**20
    assert found.memory["parameters"] == found.memory["gradients"] == size / mib
    assert (
        found.memory["optimizer"]
        == summary.mib(summary.optimizer_tensors(trainer.optimizer))
        > 2 * size / mib
    )
    train_loader, val_loader = loaders()
    assert found.memory["data"] == (train_loader.nbytes + val_loader.nbytes) / mib
    parts = [train_loader, val_loader, val_loader]
    tested = plan.look(make_trainer(), *parts).memory["data"]
    assert tested == sum(part.nbytes for part in parts) / mib  # the test part is resident too
    frozen = make_model()
    frozen[0].requires_grad_(False)
    assert look(frozen)[0].memory["gradients"] < size / mib


def test_weights_that_stay_frozen_have_no_gradient_and_no_state():
    """Like those of a run; weights that thaw later have both by then."""
    run = make_trainer(callbacks=[Freeze("0.*")], max_steps=3, epochs=None)
    run.fit(loaders()[0])
    state = summary.mib(summary.optimizer_tensors(run.optimizer))
    [*_, weight, bias] = run.module.parameters()
    memory = look(callbacks=[Freeze("0.*")])[0].memory
    assert memory["gradients"] == summary.mib([weight, bias])
    assert memory["optimizer"] == state
    assert look(callbacks=[Freeze("0.*", 100)])[0].memory["optimizer"] > memory["optimizer"]


@pytest.mark.slow
def test_the_averages_are_a_part_of_it():
    size = summary.mib(make_model().parameters())
    memory = look(callbacks=[EMA(0.9)])[0].memory
    assert size <= memory["averages"] < size + 1e-3
    assert "averages" not in look()[0].memory


@pytest.mark.slow
def test_a_checkpoint_has_the_size_that_it_says(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.Linear(500, 3))
    found, trainer = look(model, callbacks=[EMA(0.9)], scheduler=schedules.constant)
    checkpoint.save(tmp_path / "step_00000001.ckpt", checkpoint.copy(trainer.state_dict()))
    written = (tmp_path / "step_00000001.ckpt").stat().st_size
    assert found.checkpoint * 2**20 <= written < found.checkpoint * 2**20 + 20_000  # the header
    assert found.checkpoint > 4 * found.memory["parameters"]  # weights, two moments, the average


def lines(estimate, minutes=None):
    facts = {"started": 1.0, "evaluations": 10, "keep": 2, "minutes": minutes}
    return render("plan.txt.jinja", run=estimate, **facts).splitlines()


def test_the_lines_add_up():
    memory = {"parameters": 1.0, "gradients": 1.0, "optimizer": 2.0, "data": 3.0, "peak": 500.0}
    found = plan.Estimate(
        steps=1000, timed=50, first=2.0, step=0.01, evaluation=0.5, test=1.0, checkpoint=1.0,
        memory=memory,
    )  # fmt: skip
    shown = lines(found)
    parts = "parameters 1.0", "gradients 1.0", "optimizer 2.0", "data 3.0"
    times = [
        "1.0 s before the first step",
        "2.0 s more for the first step",
        "10.0 s for 1,000 steps (10 ms each)",
    ]
    times += ["5.0 s for 10 evaluations", "1.0 s for the test"]
    rest = "the rest is activations, Python and PyTorch"
    assert shown == [
        f"memory   500 MiB at the peak: {', '.join(parts)} MiB; {rest}",
        "disk     1.0 MiB per checkpoint (the last 2 and the best are kept); 1.0 MiB for the weights",
        f"time     about 19.0 s, measured over 50 steps: {', '.join(times)}",
    ]
    *others, time, stopped = lines(found, minutes=0.1)
    assert others == shown[:2]
    assert time == shown[2].replace("19.0 s", "8.0 s")
    assert stopped == "         max_minutes=0.1 stops the run at about step 353"
    assert lines(found, minutes=1) == shown
    unknown = plan.Estimate(**{**vars(found), "memory": memory | {"peak": math.nan}})
    assert lines(unknown)[0].startswith("memory   parameters 1.0, ")
