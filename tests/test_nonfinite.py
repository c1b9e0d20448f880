"""Numbers that are not finite: which step was the first, what in it, and how it is replayed."""

import functools
import math

import pytest
import torch
from conftest import Careless, assert_same, make_data, make_model, make_trainer
from safetensors.torch import load_file

from stoker import Trainer
from stoker.data.loader import DeviceLoader
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import EMA, Callback, Checkpoint, Lookahead, NaNGuard
from stoker.trainer.errors import NotFinite
from stoker.trainer.number_format import brief

ADVICE = "Use a lower optimizer.lr. If that is not enough, set max_grad_norm=1"
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def train_loader(data=None, batch_size=8):
    return DeviceLoader(data or make_data(), "train", batch_size, shuffle=True)


def failure(trainer, loader=None, **options):
    """The lines of the error that ends a fit."""
    with pytest.raises(NotFinite) as caught:
        trainer.fit(train_loader() if loader is None else loader, **options)
    return str(caught.value).splitlines()


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            trainer.stop("far enough")


class BreaksAt(Trainer):
    """Multiplies the loss of a step, or its gradient alone, by infinity."""

    bad_step, only_gradient = 7, False

    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        if self.step + 1 == self.bad_step:
            value = loss.detach() if self.only_gradient else 0.0
            loss = value + math.inf * (loss - value)
        return loss, outputs


class GradientBreaksAt(BreaksAt):
    only_gradient = True

    def compute_loss(self, batch):
        loss, outputs = Trainer.compute_loss(self, batch)
        if self.step + 1 == self.bad_step:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, outputs


@pytest.mark.parametrize("sample", [3, 17, 40])
@pytest.mark.parametrize("settings", [{"log_every": 5}, {"log_every": 1000, "max_grad_norm": 1.0}])
def test_a_nan_in_the_data_is_found_and_its_step_replayed(tmp_path, sample, settings):
    def trainer(*more):
        model = make_model(dropout=0.5)
        shadows = [Lookahead(every=2), EMA(0.9)]
        return make_trainer(model, callbacks=[*shadows, *more], **settings)

    data = make_data()
    data.train.inputs[sample, 2] = math.nan
    loader = train_loader(data)
    batches = list(loader)  # of the first epoch
    (step,) = [i for i, (inputs, _) in enumerate(batches, 1) if inputs.isnan().any()]
    inputs, targets = batches[step - 1]
    row = inputs.isnan().any(1).nonzero().item()

    guard = NaNGuard(tmp_path / "bad")
    guarded = trainer(guard, Checkpoint(tmp_path / "run", every=2))
    first, second, third = failure(guarded, loader)
    assert first.endswith(
        f". First non-finite value: in step {step}, the loss is nan (learning rate {brief(guarded.lr)}), and batch[0] has non-finite values in 1 of {len(inputs)} rows "
        f"(the first is row {row})."
    )
    assert second == f"Check these samples. If they are as intended, u{ADVICE[1:]}."
    path = checkpoint.path_of(tmp_path / "bad", step - 1)
    assert (
        third == f"The batch was saved in {tmp_path / 'bad'}. To replay the step, "
        f"call fit(..., resume={str(path)!r})."
    )
    kept = load_file(tmp_path / "bad" / f"batch_{step:08d}.safetensors")
    assert kept["batch[0]"].isnan().equal(inputs.isnan())
    assert kept["batch[0]"].nan_to_num().equal(inputs.nan_to_num())
    assert kept["batch[1]"].equal(targets)

    # The state is that of a fit which ended before the step; its next step fails in the same way.
    state = checkpoint.load(path)
    if step > 1:
        whole = trainer(StopAt(step - 1))
        whole.fit(loader)
        for part in ("model", "optimizer", "scheduler"):
            assert_same(state[part], checkpoint.copy(whole.state_dict()[part]))
        assert_same(state["callbacks"]["EMA"], whole.state_dict()["callbacks"]["EMA"])
    again = trainer(NaNGuard(), Checkpoint(tmp_path / "again"))
    again.log_every = 1
    assert failure(again, loader, resume=path)[0] == (
        f"train/loss is nan at step {step}. First non-finite value: {first.partition(': ')[2]}"
    )


@pytest.mark.parametrize("log_every", [1, 5, 1000])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (BreaksAt, "in step 7, the loss is inf (learning rate"),
        (GradientBreaksAt, "in step 7, the gradient of 3."),
    ],
)
def test_the_loss_and_a_gradient_are_told_apart(kind, said, log_every):
    trainer = make_trainer(kind=kind, callbacks=[NaNGuard()], log_every=log_every)
    first, second = failure(trainer)
    assert f": {said}" in first
    assert second == f"{ADVICE}."
    # The Trainer is left before the step.
    assert trainer.step == 6
    whole = make_trainer(callbacks=[StopAt(6)])
    whole.fit(train_loader())
    assert_same(dict(trainer.module.state_dict()), dict(whole.module.state_dict()))


def test_an_update_that_overflows_is_told_from_its_gradient(tmp_path):
    optimizer = functools.partial(torch.optim.SGD, lr=1e39)
    callbacks = [NaNGuard(), Checkpoint(tmp_path, every=1)]
    trainer = make_trainer(optimizer=optimizer, scheduler=None, callbacks=callbacks)
    first, *_ = failure(trainer)
    assert first == (
        "0.weight has non-finite values at step 1. First non-finite value: in step 1, 0.weight is not finite "
        "after the update (learning rate 1e39)."
    )


@pytest.mark.parametrize("kind", [Trainer, Careless])
def test_the_first_weight_that_breaks_is_named_with_the_rates(tmp_path, kind):
    trainer = make_trainer(
        kind=kind,
        optimizer=functools.partial(torch.optim.SGD, lr=0.25),
        groups=[{"match": "3.*", "lr": 1e39}],
        scheduler=None,
        callbacks=[NaNGuard(), Checkpoint(tmp_path, every=1)],
    )
    first, second = failure(trainer)
    assert first.endswith("3.weight is not finite after the update (learning rate 0.25, 1e39).")
    assert second == f"{ADVICE}."


class Masked(Trainer):
    def compute_loss(self, batch):
        inputs, targets, mask = batch
        outputs = self.model(inputs) + mask
        return self.loss(outputs, targets) * (math.inf if self.step == 6 else 1), outputs


def test_entries_that_are_not_finite_in_good_steps_are_no_problem():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([0.0, 0.0, -math.inf])
    batches = [
        (torch.randn(4, 6, generator=generator), torch.arange(4) % 2, mask) for _ in range(9)
    ]
    trainer = make_trainer(kind=Masked, callbacks=[NaNGuard()], epochs=1)
    first, second = failure(trainer, batches)
    rate = brief(*set(trainer.rates))
    assert first.endswith(
        f": in step 7, the loss is inf (learning rate {rate}), and batch[2] has non-finite values "
        "in 1 of 3 rows (the first is row 2)."
    )
    assert second == f"Check these samples. If they are as intended, u{ADVICE[1:]}."


def test_fp16_names_the_batch_and_not_the_steps_that_it_skipped():
    data = make_data()
    data.train.inputs[11] = math.inf
    loader = train_loader(data)
    batches = list(loader)
    (step,) = [i for i, (inputs, _) in enumerate(batches, 1) if not inputs.isfinite().all()]
    trainer = make_trainer(callbacks=[NaNGuard()], precision="fp16")
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)  # the first are skipped
    first, second = failure(trainer, loader)
    assert (
        f": in step {step}, the loss is nan (learning rate {brief(trainer.lr)}), and batch[0] has non-finite values in 1 of "
        in first
    )
    assert second.endswith(f"u{ADVICE[1:]}, or precision=bf16 instead of fp16.")


def test_a_callback_that_breaks_a_weight_is_told_from_a_step():
    class Breaks(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 6:
                trainer.module[3].weight.data[0, 0] = math.nan

    trainer = make_trainer(callbacks=[NaNGuard(), Breaks()], log_every=5, optimizer=SGD)
    first, *_ = failure(trainer)
    assert first.startswith(
        "train/loss is nan at step 8. First non-finite value: in step 6, 3.weight is not finite after the update "
    )


class FreezesAt(Callback):
    """Freezes a weight after a step, and trains it again after a later one."""

    def __init__(self, step, until=math.inf):
        self.step = step
        self.until = until

    def on_step_end(self, trainer):
        if trainer.step in (self.step, self.until):
            trainer.module[0].weight.requires_grad_(trainer.step == self.until)


@pytest.mark.parametrize("until", [5, math.inf])
def test_a_replay_trains_what_was_trained(until, caplog):
    trainer = make_trainer(
        kind=BreaksAt, callbacks=[NaNGuard(), FreezesAt(3, until)], optimizer=SGD
    )
    first, *_ = failure(trainer)
    assert ": in step 7, the loss is inf" in first
    whole = make_trainer(callbacks=[FreezesAt(3, until), StopAt(6)], optimizer=SGD)
    whole.fit(train_loader())
    assert_same(dict(trainer.module.state_dict()), dict(whole.module.state_dict()))
    assert trainer.module[0].weight.requires_grad == (until == 5)
    (message,) = caplog.messages
    assert message.startswith("Replaying training from step 1 to")


class DoublesGradients(Callback):
    def on_fit_start(self, trainer):
        self.hook = trainer.module[0].weight.register_hook(lambda gradient: 2 * gradient)

    def on_fit_end(self, trainer):
        self.hook.remove()


def test_a_callback_begins_again_in_a_replay():
    trainer = make_trainer(kind=BreaksAt, callbacks=[NaNGuard(), DoublesGradients()], optimizer=SGD)
    assert ": in step 7, the loss is inf" in failure(trainer)[0]
    whole = make_trainer(callbacks=[DoublesGradients(), StopAt(6)], optimizer=SGD)
    whole.fit(train_loader())
    assert_same(dict(trainer.module.state_dict()), dict(whole.module.state_dict()))


class OnePass(list):
    """Batches that can be read once."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        if self.passes > 1:
            raise OSError("the disk is gone")
        return super().__iter__()


def test_a_replay_that_fails_does_not_replace_the_error(caplog):
    batches = OnePass(train_loader())
    batches.passes = 0
    trainer = make_trainer(kind=BreaksAt, callbacks=[NaNGuard()], epochs=1, log_every=1)
    first, _ = failure(trainer, batches)
    assert first.startswith("train/loss is inf at step 7 (learning rate ")
    assert caplog.messages[-1].startswith("The replay to find the cause failed: ")
    assert "OSError: the disk is gone" in caplog.messages[-1]


def test_the_rates_of_all_groups_are_named_if_the_loss_breaks():
    groups = [{"match": "3.*", "lr": 0.5}]
    trainer = make_trainer(kind=BreaksAt, groups=groups, scheduler=None, callbacks=[NaNGuard()])
    first, _ = failure(trainer)
    assert first.endswith("the loss is inf (learning rate 0.01, 0.5).")


class LossAloneBreaksAt(BreaksAt):
    """The loss is nan, but its gradients and the weights stay finite."""

    bad_step = 6

    def compute_loss(self, batch):
        loss, outputs = Trainer.compute_loss(self, batch)
        return loss + (math.nan if self.step + 1 == self.bad_step else 0), outputs


@pytest.mark.parametrize(("kind", "first_replayed"), [(BreaksAt, 7), (LossAloneBreaksAt, 6)])
def test_a_replay_begins_at_the_newest_good_checkpoint(tmp_path, caplog, kind, first_replayed):
    held = {}

    class Holds(Callback):
        def on_step_end(self, trainer):
            held[trainer.step] = guard.first_state is not None

    guard = NaNGuard()
    callbacks = [guard, Holds(), Checkpoint(tmp_path, every=1, keep=3)]
    first, *_ = failure(make_trainer(kind=kind, callbacks=callbacks, log_every=5))
    assert f": in step {kind.bad_step}, the loss is " in first
    assert caplog.messages[0].startswith(f"Replaying training from step {first_replayed} to")
    # The row of step 5 is the first after a checkpoint: the copy of the first state is dropped.
    assert [held[step] for step in range(1, 7)] == [True, True, True, True, False, False]


def test_a_validation_that_is_not_finite_is_not_blamed_on_the_training():
    data = make_data()
    data.val.inputs[3, 1] = math.nan
    trainer = make_trainer(callbacks=[NaNGuard(), EMA(0.9)])
    first, second = failure(trainer, val_loader=DeviceLoader(data, "val", 8))
    assert first == "val/loss is nan at step 8, but all weights are finite."
    assert second == "Check the inputs and targets in the val data."
