"""Overfitting a few batches: what can be learnt by heart is, and what cannot is said, with what to
look at.
"""

import functools

import pytest
import torch
from conftest import make_data, make_model, make_trainer
from torch import nn

from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader
from stoker.diagnostics import overfit
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.metrics import R2, Accuracy
from stoker.trainer.trainer import Trainer


def learn(model=None, data=None, count=1, metrics=None, steps=None, batch_size=8, **settings):
    data = make_data() if data is None else data
    metrics = {"acc": Accuracy()} if metrics is None else metrics
    trainer = make_trainer(model, metrics=metrics, **settings)
    return overfit.learn(
        trainer, DeviceLoader(data, "train", batch_size, shuffle=True), count, steps
    ), trainer


def of(inputs, targets, **more):
    return Data("own", TensorSplit(inputs, targets), None, None, tuple(inputs.shape[1:]), 3, **more)


def test_a_model_that_can_learn_does(capsys):
    said, trainer = learn(make_model())
    assert trainer.step % overfit.EVERY == 0 and trainer.step < overfit.MOST
    assert said.startswith(f"the model has learned after {trainer.step} steps on 8 samples: loss ")
    assert said.endswith(" -> 1.0000") and ", acc 0." in said
    out = capsys.readouterr().out
    assert "plan     1,000 epochs of 1 step, batch size" in out and "lr 0.01" in out


def test_evaluations_without_a_loss_are_refused():
    class Silent(Trainer):
        def compute_loss(self, batch):
            loss, outputs = super().compute_loss(batch)
            return (loss if self.model.training else None), outputs

    loader = DeviceLoader(make_data(), "train", 8, shuffle=True)
    trainer = Silent(make_model(), nn.CrossEntropyLoss(), torch.optim.AdamW, device="cpu")
    with pytest.raises(UserError, match="overfit: evaluations of this Trainer return no loss"):
        overfit.learn(trainer, loader, 1)


def test_it_is_the_first_batches_that_are_learnt_and_nothing_else():
    seen = []

    class Trace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, inputs):
            seen.append(inputs.detach().clone())
            return self.inner(inputs)

    learn(Trace(), count=2)
    loader = DeviceLoader(make_data(), "train", 8, shuffle=True)
    loader.seek(0, 0)
    first = [inputs for inputs, _ in loader][:2]
    assert all(any(torch.equal(inputs, batch) for batch in first) for inputs in seen)


def test_more_batches_than_an_epoch_has():
    with pytest.raises(TrainingError, match=" after 5 steps on 60 samples: "):
        learn(count=9, steps=5)


def test_the_rate_is_the_whole_one_and_other_callbacks_are_not_called():
    rates = set()

    class Watch(overfit.Watch):
        def on_step_end(self, trainer):
            rates.add(trainer.lr)
            super().on_step_end(trainer)

    class Loud(Callback):
        def on_fit_start(self, trainer):
            raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overfit, "Watch", Watch)
        learn(make_model(), callbacks=[Loud()])
    assert rates == {1e-2}


def test_regression_is_judged_by_r2():
    torch.manual_seed(0)
    inputs = torch.randn(24, 6)
    data = of(inputs, inputs[:, :3] * 2, kind="regression")
    said, _ = learn(make_model(), data, metrics={"r2": R2()}, loss=nn.MSELoss())
    assert "has learned" in said and "-> 0.99" in said and ", r2 " in said


def test_a_loss_alone_has_to_fall():
    said, _ = learn(make_model(), metrics={})
    assert "has learned" in said and "acc" not in said


@pytest.mark.parametrize("lr", [1e-9, 1e38])
def test_a_rate_that_is_wrong(lr):
    with pytest.raises(
        TrainingError,
        match=r"overfit=1: the model has not learned after .*\nCheck optimizer.lr .try ten times",
    ):
        learn(make_model(), steps=50, optimizer=functools.partial(torch.optim.SGD, lr=lr))


def test_weights_that_are_frozen_or_dead(caplog):
    model = make_model()
    model.requires_grad_(False)
    model[3].bias.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"160 parameters are frozen"):
        learn(model, steps=50)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[0].bias, -1000.0)
    with pytest.raises(TrainingError, match="has not learned"):
        learn(model, steps=50, optimizer=functools.partial(torch.optim.SGD, lr=1e-2))
    assert "doctor: dead units at step 3: 0 (" in caplog.text
