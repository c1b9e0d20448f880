"""A learning rate that is changed in the optimizer: before a fit, in it, after it."""

import copy
import functools

import pytest
import torch
from conftest import assert_same, make_model, make_trainer

from stoker.trainer import checkpoint, schedules
from stoker.trainer.callbacks import Callback, Checkpoint
from stoker.trainer.errors import UserError


def changed(when, schedule, tmp_path, resume=None, steps=8):
    """The Trainer after a fit of `steps` in which the rate becomes 0.02 at a time."""

    def change(trainer):
        trainer.optimizer.param_groups[0]["lr"] = 0.02

    class Change(Callback):
        def on_fit_start(self, trainer):
            if when == "at the start":
                change(trainer)

        def on_step_end(self, trainer):
            if when == trainer.step:
                change(trainer)

    saver = Checkpoint(tmp_path, every=1, keep=99, overwrite=True)
    trainer = make_trainer(
        make_model(dtype=torch.float64),
        optimizer=functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        scheduler=schedule,
        callbacks=[Change(), saver],
        max_steps=steps,
    )
    if when == "before":
        change(trainer)
    trainer.fit(make_batches(), resume=resume)
    return trainer


def make_batches():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8, 6, generator=generator, dtype=torch.float64)
    return [(batch, batch[:, :3].argmax(1)) for batch in inputs]


def in_plain_torch(when, schedule, steps=8):
    model = make_model(dtype=torch.float64)
    rate = 0.02 if when in ("before", "at the start") else 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    factor = schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0), steps).factor
    for step in range(steps):
        inputs, targets = make_batches()[step % 4]
        if when == step:
            rate = 0.02
        optimizer.param_groups[0]["lr"] = rate * factor(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


WARM = functools.partial(schedules.cosine, warmup=2)


@pytest.mark.parametrize("schedule", [schedules.constant, schedules.cosine, WARM])
@pytest.mark.parametrize("when", ["before", "at the start", 3])
def test_a_rate_that_is_changed_is_the_one_that_the_schedule_multiplies(tmp_path, when, schedule):
    whole = changed(when, schedule, tmp_path)
    expected = in_plain_torch(when, schedule)
    for name, weight in whole.module.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)
    for step in (2, 3, 5):
        again = changed(when, schedule, tmp_path, checkpoint.path_of(tmp_path, step), steps=8)
        assert_same(again.state_dict()["model"], whole.state_dict()["model"])
        assert_same(again.state_dict()["optimizer"], whole.state_dict()["optimizer"])


@pytest.mark.parametrize("schedule", [schedules.constant, schedules.cosine, WARM, "torch"])
def test_a_rate_that_is_changed_between_two_fits(tmp_path, schedule):
    """The second fit begins with it: as a first one that has it, from the same weights."""
    if schedule == "torch":
        schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    trainer = changed(None, schedule, tmp_path)
    rates = []
    begin_step = trainer.begin_step
    trainer.begin_step = lambda batch: [begin_step(batch), rates.append(trainer.lr)]
    for rate in (0.02, 0.03):
        trainer.optimizer.param_groups[0]["lr"] = rate
        rates.clear()
        trainer.fit(make_batches())
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
        expected = schedules.build(schedule, optimizer, 8)
        for found in rates:
            assert found == pytest.approx(expected.get_last_lr()[0], rel=1e-12)
            expected.step()
    assert len(rates) == 8


@pytest.mark.parametrize(
    "schedule",
    [schedules.cosine, functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)],
)
def test_a_resume_with_another_rate_is_refused_with_the_way_to_change_it(tmp_path, schedule):
    changed(None, schedule, tmp_path)
    with pytest.raises(
        UserError, match=r"is \[0\.5\], not \[0\.02\]\.\n.*param_groups\[i\]\['lr'\] in "
    ):
        changed("before", schedule, tmp_path, checkpoint.path_of(tmp_path, 3))
    again = changed(None, schedule, tmp_path, checkpoint.path_of(tmp_path, 3))
    assert again.step == 8


@pytest.mark.parametrize("schedule", [schedules.constant, schedules.cosine])
def test_a_fit_is_made_longer_with_another_rate(tmp_path, schedule):
    class Change(Callback):
        def on_fit_start(self, trainer):
            if trainer.step == 8:
                trainer.optimizer.param_groups[0]["lr"] = 0.02

    trainer = changed(None, schedule, tmp_path)
    before = copy.deepcopy(trainer.module.state_dict())
    trainer.callbacks.append(Change())
    trainer.max_steps = 9
    trainer.fit(make_batches(), resume=trainer.state_dict())
    assert trainer.step == 9
    assert trainer.lr == pytest.approx(0.02 * trainer.scheduler.factor(8), rel=1e-12)
    assert not torch.equal(trainer.module[0].weight, before["0.weight"])


@pytest.mark.parametrize("schedule", [schedules.constant, schedules.cosine])
def test_a_rate_that_is_changed_after_a_load_is_the_one_of_the_next_fit(tmp_path, schedule):
    path = checkpoint.path_of(tmp_path, 8)
    changed(None, schedule, tmp_path)
    given = torch.optim.SGD([torch.zeros(1)], lr=0.02)
    for fitted in (False, True):
        trainer = make_trainer(
            make_model(dtype=torch.float64),
            optimizer=functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
            scheduler=schedule,
            max_steps=8,
        )
        if fitted:
            trainer.fit(make_batches())
        trainer.load(path)
        trainer.optimizer.param_groups[0]["lr"] = 0.02
        trainer.fit(make_batches())
        assert trainer.lr == pytest.approx(schedule(given, 8).factor(7) * 0.02, rel=1e-12)


def test_a_rate_that_is_the_scheduled_one_becomes_the_base_rate_too():
    class Halve(Callback):
        def on_step_end(self, trainer):
            [group] = trainer.optimizer.param_groups
            if trainer.step == 4:
                assert group["lr"] == 0.25  # the rate of the cosine at half of its steps
                group["lr"] = group["initial_lr"] * 0.5

    trainer = make_trainer(
        optimizer=functools.partial(torch.optim.SGD, lr=0.5, weight_decay=0.0),
        scheduler=schedules.cosine,
        callbacks=[Halve()],
        max_steps=8,
        log_every=1,
    )
    batches = [(inputs.float(), targets) for inputs, targets in make_batches()]
    rows = trainer.fit(batches)
    factor = schedules.cosine(torch.optim.SGD([torch.zeros(1)], lr=1.0), 8).factor
    bases = [0.5] * 4 + [0.25] * 4
    expected = [base * factor(step) for step, base in enumerate(bases)]
    assert [row["train/lr"] for row in rows] == pytest.approx(expected, rel=1e-12)


def test_groups_have_rates_of_their_own():
    trainer = make_trainer(scheduler=schedules.constant)
    for group, rate in zip(trainer.optimizer.param_groups, (0.1, 0.2), strict=True):
        group["lr"] = rate
    trainer.fit(make_batches_float())
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.1, 0.2]


def make_batches_float():
    return [(inputs.float(), targets) for inputs, targets in make_batches()]
