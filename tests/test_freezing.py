"""Weights that are frozen and trained again in a fit: as in plain torch, and the same in every
file.
"""

import copy
import functools
import gc
import weakref

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import EMA, Callback, Checkpoint, Lookahead
from stoker.trainer.errors import UserError

STEPS = 12  # of 4 an epoch
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def batches():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8, 6, generator=generator, dtype=torch.float64)
    return [(batch, batch[:, :3].argmax(1)) for batch in inputs]


class Freeze(Callback):
    """Freezes and thaws the first layer's weight and the last one's bias after the given steps."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, trainer):
        set_trained(trainer.module, self.after, trainer.step)


def set_trained(module, after, step):
    if step in after:
        first, last = after[step]
        module[0].weight.requires_grad_(first)
        module[3].bias.requires_grad_(last)


# {step: (whether the first weight is trained from then on, whether the last bias is)}
TIMES = {
    "frozen": {3: (False, True), 7: (False, False)},
    "frozen and thawed": {2: (False, False), 6: (True, False), 9: (True, True)},
    "frozen at the end": {12: (False, False)},
    "thawed": {0: (False, False), 5: (True, False), 8: (True, True)},
    "frozen from the start": {0: (False, False)},
}


def in_plain_torch(after, optimizer, decay=None, every=None):
    """The weights and the averages after STEPS, of a loop that is written out."""
    model = make_model(dtype=torch.float64)
    set_trained(model, after, 0)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = optimizer([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    average = copy.deepcopy(dict(model.state_dict()))
    for step in range(1, STEPS + 1):
        inputs, targets = batches()[(step - 1) % 4]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        for name, weight in model.named_parameters():
            with torch.no_grad():
                if not weight.requires_grad:
                    average[name] = weight.clone()
                elif decay is not None:
                    share = min(decay, (1 + step) / (10 + step))
                    average[name] = share * average[name] + (1 - share) * weight
                elif step % every == 0:
                    average[name] = (average[name] + weight) / 2
                    weight.copy_(average[name])
        set_trained(model, after, step)
    return model.state_dict(), average


def fitted(after, *callbacks, last=False, **settings):
    """A Trainer after STEPS; it freezes before the other callbacks have their turn, or after it."""
    model = make_model(dtype=torch.float64)
    set_trained(model, after, 0)
    freeze = Freeze(after)
    order = [*callbacks, freeze] if last else [freeze, *callbacks]
    settings = {"optimizer": SGD, "scheduler": None, "callbacks": order, **settings}
    return make_trainer(model, **settings)


def evaluated(trainer):
    """The weights that are evaluated."""
    with trainer.evaluating():
        return copy.deepcopy(dict(trainer.module.state_dict()))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_a_fit_trains_what_is_trained_at_each_step(times, optimizer):
    after = TIMES[times]
    trainer = fitted(after, optimizer=optimizer)
    trainer.fit(batches())
    expected, _ = in_plain_torch(after, optimizer, decay=0.5)
    for name, weight in trainer.module.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("last", [False, True])
def test_an_ema_of_weights_that_are_frozen(tmp_path, times, last):
    """The run evaluates the averages of a plain loop, and so does whoever loads its checkpoint."""
    after = TIMES[times]
    tested = []
    trainer = fitted(after, EMA(0.9), last=last)
    trainer.callbacks += [Checkpoint(tmp_path, every=1, keep=99), Evaluated(tested)]
    trainer.fit(batches(), batches())
    tested.append((trainer.step, evaluated(trainer)))
    if last:  # as the reference does it: average, then freeze
        _, expected = in_plain_torch(after, SGD, decay=0.9)
        for name, weight in evaluated(trainer).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)
    assert len(tested) == 4
    for step, weights in tested:
        other = make_trainer(
            make_model(dtype=torch.float64, seed=5), callbacks=[EMA(0.9)], optimizer=None
        )
        other.load(checkpoint.path_of(tmp_path, step))
        assert_same(evaluated(other), weights)
        other.module.requires_grad_(False)  # as stoker.load does
        assert_same(evaluated(other), weights)


class Evaluated(Callback):
    def __init__(self, tested):
        self.tested = tested

    def on_eval_start(self, trainer):
        if trainer.train_loader is not None:
            weights = copy.deepcopy(dict(trainer.module.state_dict()))
            self.tested.append((trainer.step, weights))


@pytest.mark.parametrize("times", TIMES)
def test_lookahead_pulls_no_weight_back_to_before_it_was_frozen(times):
    after = TIMES[times]
    trainer = fitted(after, Lookahead(every=4, decay=0.5), last=True)
    trainer.fit(batches())
    expected, _ = in_plain_torch(after, SGD, every=4)
    for name, weight in trainer.module.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("step", [4, 7, 9])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_a_resumed_fit_trains_what_was_trained_then(tmp_path, step, optimizer):
    """Also if nothing in the script says so again: these freeze at one step only."""
    after = TIMES["frozen and thawed"]
    whole = fitted(after, EMA(0.9), Checkpoint(tmp_path, every=1, keep=99), optimizer=optimizer)
    whole.fit(batches())
    again = fitted(after, EMA(0.9), optimizer=optimizer)
    again.fit(batches(), resume=checkpoint.path_of(tmp_path, step))
    for part in ("model", "optimizer", "frozen"):
        assert_same(again.state_dict()[part], whole.state_dict()[part])
    assert_same(again.callbacks[1].state_dict(), whole.callbacks[1].state_dict())


def test_a_resume_freezes_what_was_frozen_and_a_load_freezes_nothing(tmp_path, caplog):
    trainer = fitted({2: (False, True)}, Checkpoint(tmp_path))
    trainer.fit(batches())
    other = fitted({})
    other.load(tmp_path)
    assert other.module[0].weight.requires_grad and not caplog.records
    other.fit(batches(), resume=tmp_path)
    assert not other.module[0].weight.requires_grad


class EvaluatesWithin(Callback):
    """Evaluates and predicts within an evaluation, after each step; keeps what that was of."""

    def __init__(self):
        self.outputs = []

    def on_step_end(self, trainer):
        with trainer.evaluating():
            trainer.evaluate(batches())
            self.outputs.append(trainer.predict([batches()[0]]))


def test_an_evaluation_within_another_has_the_averages_and_leaves_the_weights():
    within = EvaluatesWithin()
    trainer = fitted({}, EMA(0.9), within)
    trainer.fit(batches())
    weights, average = in_plain_torch({}, SGD, decay=0.9)
    for name, weight in trainer.module.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-12, atol=1e-14)
    model = make_model(dtype=torch.float64)
    model.load_state_dict(average)
    expected = model(batches()[0][0])
    torch.testing.assert_close(within.outputs[-1], expected, rtol=1e-12, atol=1e-14)


def test_averages_are_not_saved_as_the_weights_of_a_training():
    trainer = fitted({}, EMA(0.9))
    trainer.fit(batches())
    state = trainer.state_dict()
    with trainer.evaluating():
        with pytest.raises(UserError, match="the model holds the averaged weights"):
            trainer.state_dict()
        with pytest.raises(UserError, match="the model holds the averaged weights"):
            trainer.load_state_dict(state)
    assert_same(trainer.state_dict(), state)


class AddsGroup(Callback):
    """Gives the optimizer the first layer as well, after a step."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, trainer):
        if trainer.step == self.after:
            trainer.optimizer.add_param_group({"params": trainer.module[0].parameters()})
            trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, factor=1.0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_of_what_the_optimizer_lacks_do_not_add_up(precision):
    """The norm that clips is that of the step, and a layer that is added begins with its step."""
    dtype, close = (torch.float64, 1e-12) if precision == "fp32" else (torch.float32, 1e-2)
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    data = [(inputs.to(dtype), targets) for inputs, targets in batches()]
    model = make_model(dtype=dtype)
    plain = optimizer(model[3].parameters())
    for step in range(STEPS):
        if step == 7:
            plain.add_param_group({"params": model[0].parameters()})
        inputs, targets = data[step % 4]
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        plain.step()

    module = make_model(dtype=dtype)
    ready = optimizer(module[3].parameters())
    settings = {"max_grad_norm": 0.3, "scheduler": None, "precision": precision}
    trainer = make_trainer(module, optimizer=ready, callbacks=[AddsGroup(7)], **settings)
    trainer.fit(data)
    for weight, expected in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=close)
        assert weight.grad is None


@pytest.mark.parametrize("source", ["a fit", "a checkpoint"])
def test_an_average_of_weights_that_were_changed_since_is_not_used(tmp_path, caplog, source):
    trainer = fitted({}, EMA(0.9), Checkpoint(tmp_path))
    trainer.fit(batches())
    if source == "a checkpoint":
        trainer = fitted({}, EMA(0.9))
        trainer.load(tmp_path)
    state = copy.deepcopy(trainer.state_dict())
    average = state["callbacks"]["EMA"]["average"]
    assert_same(evaluated(trainer), average)  # also a second time
    assert_same(evaluated(trainer), average)
    assert not caplog.messages
    other = make_model(dtype=torch.float64, seed=5)
    trainer.module.load_state_dict(other.state_dict())
    assert_same(evaluated(trainer), dict(other.state_dict()))
    (message,) = caplog.messages
    assert message.startswith(
        "EMA: the weights have changed since the fit, or since the checkpoint"
    )
    assert trainer.state_dict()["callbacks"]["EMA"]["average"] is None
    trainer.load_state_dict(state)  # brings its average
    assert_same(evaluated(trainer), average)
    trainer.module.load_state_dict(other.state_dict())
    trainer.load_state_dict(state)
    assert caplog.messages == [message]  # nothing is discarded, so nothing is said
    assert_same(evaluated(trainer), average)
    with torch.no_grad():
        trainer.module[0].bias.data[0] += 1e-6
    assert_same(evaluated(trainer), dict(trainer.module.state_dict()))


def flip(module):
    """Permute weights, which leaves their sum and norm."""
    module[0].weight.copy_(module[0].weight.flip(0))


def move_statistics(module):
    module[1].running_mean += 1


def reverse_integers(module):
    module.scale.copy_(torch.tensor([2, 1, 0]))


@pytest.mark.parametrize("change", [flip, move_statistics, reverse_integers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("callback", [functools.partial(EMA, 0.9), Lookahead])
def test_each_change_of_the_tensors_is_seen(caplog, callback, dtype, change):
    layers = [torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)]
    module = torch.nn.Sequential(*layers)
    fixed = torch.arange(3).to(dtype)
    module.scale = torch.nn.Parameter(fixed, requires_grad=False)
    shadow = callback()
    trainer = make_trainer(module, epochs=1, callbacks=[shadow])
    data = DeviceLoader(make_data(), "train", 8)
    trainer.fit(data)
    average = evaluated(trainer)
    assert shadow.shadow is not None and not caplog.messages
    with torch.no_grad():
        change(module)
    changed = copy.deepcopy(module.state_dict())
    assert_same(evaluated(trainer), dict(changed))
    assert shadow.shadow is None and len(caplog.messages) == 1
    assert average.keys() == changed.keys()


def test_an_average_keeps_no_module_alive():
    trainer = fitted({}, EMA(0.9))
    trainer.fit(batches())
    callback = trainer.callbacks[-1]
    module = weakref.ref(trainer.module)
    trainer.close()
    gc.collect()
    assert module() is None
    assert callback.state_dict()["average"] is not None


def test_a_failed_fit_does_not_read_the_weights():
    """They may be on a device that does not answer any more; a tensor without data stands in."""

    class Fails(Callback):
        def on_step_end(self, trainer):
            trainer.module.lost = torch.nn.Parameter(torch.empty(2, device="meta"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fitted({}, EMA(0.9), Fails()).fit(batches())


class Reloads(Callback):
    """Loads the state of the training within its fit."""

    def on_step_end(self, trainer):
        trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))


def test_a_state_that_is_loaded_within_a_fit_keeps_its_average(caplog):
    trainer = fitted({}, EMA(0.9), Reloads())
    trainer.fit(batches(), batches())
    _, average = in_plain_torch({}, SGD, decay=0.9)
    for name, weight in evaluated(trainer).items():
        torch.testing.assert_close(weight, average[name], rtol=1e-12, atol=1e-14)
    assert not caplog.messages
