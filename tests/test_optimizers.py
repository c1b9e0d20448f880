"""decoupled_sgd against a loop written with the paper's numbers, and what it refuses."""

import functools

import pytest
import torch
from conftest import make_data, make_trainer

from data.loader import DeviceLoader
from trainer import schedules
from trainer.errors import UserError
from trainer.optimizers import decoupled_sgd


def make_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).double()


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("batch_size", [10, 20])
def test_it_is_sgd_on_the_sum_of_the_losses_with_the_papers_numbers(batch_size, decay_all):
    """The paper adds the losses of a batch up, where the Trainer's loss is their mean."""
    lr, momentum, weight_decay, bias_scale = 11.5, 0.85, 0.0153, 8.0
    settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "bias_scale": bias_scale}
    trainer = make_trainer(
        make_model(),
        optimizer=functools.partial(decoupled_sgd, batch_size=batch_size, **settings),
        scheduler=functools.partial(schedules.linear, warmup=2, final=0.1),
        decay_all=decay_all,
    )
    loader = DeviceLoader(make_data(dtype=torch.float64), "train", batch_size, shuffle=True)
    trainer.fit(loader)

    model, kilostep = make_model(), 1024 * (1 + 1 / (1 - momentum))
    rate, bias_rate, decay = lr / kilostep, bias_scale * lr / kilostep, weight_decay * batch_size / kilostep
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "lr": rate, "weight_decay": decay / rate},
        {"params": vectors, "lr": bias_rate, "weight_decay": decay / bias_rate if decay_all else 0.0},
    ]
    optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=True)
    scheduler = schedules.linear(optimizer, total_steps=3 * len(loader), warmup=2, final=0.1)
    for epoch in range(3):
        loader.seek(epoch)
        for inputs, targets in loader:
            torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    for ours, theirs in zip(trainer.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == pytest.approx(rate * batch_size)  # the one that is shown


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0), ("batch_size", 0), ("momentum", 1), ("momentum", 0), ("weight_decay", -1), ("bias_scale", 0)],
)
def test_impossible_settings_name_their_key(key, value):
    settings = {"lr": 1.0, "batch_size": 10, key: value}
    with pytest.raises(UserError, match=f"^optimizer.{key}="):
        make_trainer(optimizer=functools.partial(decoupled_sgd, **settings))
