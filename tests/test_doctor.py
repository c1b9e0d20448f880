"""The doctor: what it finds in networks that cannot learn, what it says of those that can, and that
it changes none.
"""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer
from torch import nn

from stoker.data import datasets
from stoker.data.loader import DeviceLoader, make_loaders
from stoker.diagnostics.doctor import Doctor
from stoker.models.cnn import CNN
from stoker.models.mlp import MLP
from stoker.trainer import schedules
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError
from stoker.trainer.steps import GraphStep, adaptive_step


def examined(model, lr=1e-2, optimizer=torch.optim.AdamW, every=5, **settings):
    """The doctor of a fit on small data; `said` are its warnings, {kind: [layers]}."""
    doctor = Doctor(every)
    settings = {"optimizer": functools.partial(optimizer, lr=lr), "callbacks": [doctor], **settings}
    make_trainer(model, **settings).fit(DeviceLoader(make_data(), "train", 8, shuffle=True))
    return doctor


class Stop(Callback):
    """Ends the fit after so many steps, of which the schedule knows nothing."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, trainer):
        if trainer.step == self.steps:
            trainer.stop("enough")


def three_layers(activation=nn.ReLU):
    layers = [nn.Linear(6, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


def test_a_layer_that_is_dead_is_named(caplog, capsys):
    model = three_layers()
    nn.init.constant_(model[2].bias, -1000.0)
    doctor = examined(model, optimizer=torch.optim.SGD)
    # In front of it and behind it nothing arrives.
    assert doctor.said == {"dead units": ["0", "2", "4"]}
    (dead,) = caplog.messages  # and not again at each of the samples after it
    assert dead.startswith(
        "doctor: dead units at step 3: 0 (no gradient in 16 of 16 units), 2 (no gradient in 16 of 16"
    )
    assert capsys.readouterr().out == "doctor   checked 24 of 24 steps: dead units in 3 layers\n"


class Functional(nn.Module):
    """An activation that is no module."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        return self.two(torch.relu(self.one(inputs)))


def test_units_are_counted_also_where_the_activation_is_no_module(caplog):
    model = Functional()
    with torch.no_grad():
        model.one.bias[:10] = -1000.0
    assert examined(model, optimizer=torch.optim.SGD).said == {"dead units": ["one"]}
    assert "one (no gradient in 10 of 16 units)" in caplog.messages[0]
    few = Functional()
    with torch.no_grad():
        few.one.bias[:4] = -1000.0  # some dead units are nothing to warn of
    assert examined(few, optimizer=torch.optim.SGD).said == {}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_rate_that_is_far_too_high(optimizer, caplog):
    high = examined(three_layers(nn.Tanh), 1e3, optimizer, scheduler=schedules.constant)
    assert set(high.said["large updates"]) >= {"0", "2"}
    assert re.search(
        r"updates at step \d+: 0 \(a step changes it by \d+% of its size\)", caplog.text
    )


def test_gradients_vanish_in_fifty_sigmoid_layers_and_are_there_in_fifty_with_norms(caplog):
    def deep(*between):
        middle = [
            layer for _ in range(50) for layer in (nn.Linear(16, 16), *(make() for make in between))
        ]
        return nn.Sequential(nn.Linear(6, 16), *middle, nn.Linear(16, 3))

    doctor = examined(deep(nn.Sigmoid), 1e-3, every=50)
    assert (
        set(doctor.said) == {"vanishing gradients"} and len(doctor.said["vanishing gradients"]) > 30
    )
    assert (
        doctor.said["vanishing gradients"][0] == "0"
        and "101" not in doctor.said["vanishing gradients"]
    )
    assert "), ...." in caplog.messages[0] and len(caplog.messages[0]) < 500
    healthy = deep(functools.partial(nn.LayerNorm, 16), nn.ReLU)
    assert "vanishing gradients" not in examined(healthy, 1e-3, every=50).said


def test_gradients_that_explode():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)), nn.Linear(16, 3))
    model = nn.Sequential(nn.Linear(6, 16), *model)
    for layer in list(model)[1:]:
        nn.init.orthogonal_(layer.weight, gain=4.0)
    assert "exploding gradients" in examined(model, 1e-6).said


@pytest.mark.parametrize("make", [MLP, CNN])
def test_healthy_trainings_on_the_digits_get_no_warning(make, capsys, caplog):
    data = datasets.digits()
    (train, val, _), _ = make_loaders(data, batch_size=64)
    torch.manual_seed(0)
    doctor = Doctor(every=20)
    model = make(data.in_shape, data.num_classes)
    cosine = functools.partial(schedules.cosine, warmup=0.05)
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    trainer = make_trainer(
        model, optimizer=optimizer, scheduler=cosine, callbacks=[doctor], epochs=5
    )
    trainer.fit(train, val)
    assert not doctor.said and not caplog.messages
    assert "doctor   checked 23 of 100 steps: no warnings" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings", [{}, {"grad_accum_steps": 3}, {"max_grad_norm": 0.5}, {"eval_every": 2}]
)
def test_it_changes_nothing_and_leaves_nothing(settings):
    def fitted(*callbacks):
        data = make_data()
        loaders = DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 7)
        trainer = make_trainer(make_model(dropout=0.3), callbacks=callbacks, **settings)
        trainer.fit(*loaders)
        return trainer

    with_it, without = fitted(Doctor(every=1)), fitted()
    assert_same(
        with_it.state_dict() | {"callbacks": None}, without.state_dict() | {"callbacks": None}
    )
    for part in [*with_it.module.modules(), *with_it.module.parameters()]:
        assert not getattr(part, "_forward_hooks", None)
        assert not getattr(part, "_post_accumulate_grad_hooks", None)


def test_micro_batches_have_the_gradient_of_the_whole_batch():
    doctors = []
    for parts in (1, 4):
        doctor = Doctor(every=1)
        make_trainer(callbacks=[doctor], grad_accum_steps=parts, max_steps=1, epochs=None).fit(
            DeviceLoader(make_data(), "train", 8)
        )
        doctors.append(doctor.samples[-1])
    for name, size in doctors[0].gradients.items():
        assert size == pytest.approx(doctors[1].gradients[name], rel=1e-5)
        assert doctors[0].updates[name] == pytest.approx(doctors[1].updates[name], rel=1e-3)


def test_sizes_are_those_of_the_step():
    model = nn.Sequential(nn.Linear(6, 3, bias=False))
    before = model[0].weight.detach().clone()
    batch = next(iter(DeviceLoader(make_data(), "train", 8)))
    loss = nn.functional.cross_entropy(batch[0] @ before.requires_grad_().T, batch[1])
    (gradient,) = torch.autograd.grad(loss, before)
    doctor = Doctor()
    settings = {
        "scheduler": functools.partial(schedules.cosine, warmup=4),
        "max_steps": 8,
        "epochs": None,
    }
    optimizer = functools.partial(torch.optim.SGD, lr=0.25)
    trainer = make_trainer(model, optimizer=optimizer, callbacks=[doctor, Stop(1)], **settings)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # as fp16 has one
    trainer.special_step = adaptive_step
    trainer.fit(DeviceLoader(make_data(), "train", 8))
    size = (gradient.norm() / before.norm()).item()
    [sample] = doctor.samples
    assert sample.gradients["0"] == pytest.approx(size, rel=1e-5)
    assert sample.updates["0"] == pytest.approx(
        0.25 / 5 * size, rel=1e-4
    )  # four steps of warmup come first


def test_steps_that_the_scaler_skips_are_no_samples():
    doctor = Doctor(every=1)
    trainer = make_trainer(
        loss=lambda *given: 100 * nn.functional.cross_entropy(*given), callbacks=[doctor, Stop(6)]
    )
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-127)
    trainer.special_step = adaptive_step
    trainer.fit(DeviceLoader(make_data(), "train", 8))
    assert doctor.count == 5 and doctor.said == {}


def test_steps_in_between_have_no_hooks():
    seen = []

    class Watch(Doctor):
        def on_step_end(self, trainer):
            seen.append((trainer.step, bool(self.hooks)))
            super().on_step_end(trainer)

    make_trainer(callbacks=[Watch(every=10)], epochs=25).fit(DeviceLoader(make_data(), "train", 8))
    assert [step for step, looked in seen if looked] == [1, 2, 3, *range(10, 201, 10)]
    seen.clear()
    make_trainer(callbacks=[Watch(every=10)], epochs=15).fit(DeviceLoader(make_data(), "train", 8))
    assert [step for step, looked in seen if looked] == [
        1,
        2,
        3,
        *range(6, 121, 6),
    ]  # of few steps more are looked at


def test_what_cannot_be_looked_into_is_refused():
    def begin(strategy, special_step):
        trainer = SimpleNamespace(strategy=strategy, special_step=special_step, step=0)
        Doctor().on_fit_start(trainer)

    with pytest.raises(
        UserError,
        match="callbacks=doctor: layers cannot be inspected with strategy=fsdp.\nType strategy=ddp",
    ):
        begin("fsdp", None)
    with pytest.raises(
        UserError, match="steps in a CUDA graph cannot be inspected. Type compile=false"
    ):
        begin("single", GraphStep())
    with pytest.raises(
        UserError, match="callbacks.doctor.every=0: expected a whole number of at least 1"
    ):
        Doctor(every=0)
