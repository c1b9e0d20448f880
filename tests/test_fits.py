"""Random numbers and orders of one fit and of the next: equal runs are equal, and no fit repeats
another.
"""

import functools
import random

import numpy
import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer
from torch.utils.data import DataLoader, Dataset

from stoker import Trainer
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.diagnostics.lr_find import lr_find
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import EMA, Callback, Checkpoint
from stoker.trainer.errors import TrainingError
from stoker.trainer.loading import IterableLoader


class Killed(BaseException):
    """What no code is prepared for."""


class Dying(Callback):
    """Dies after a step of a fit, the second for example."""

    def __init__(self, step, fits=1):
        self.step, self.fits = step, fits

    def on_fit_start(self, trainer):
        self.fits -= 1

    def on_step_end(self, trainer):
        if trainer.step == self.step and self.fits == 0:
            raise Killed


def whole_state(trainer):
    state = trainer.state_dict()
    state["callbacks"].pop("Checkpoint", None)
    return state


# What a data set draws


class Noisy(Dataset):
    """Draws from each global generator, as data sets with augmentation do."""

    def __init__(self, data):
        self.inputs, self.targets = data.train.inputs, data.train.targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = [random.random(), numpy.random.rand(), torch.rand(()).item(), 0, 0, 0]
        return self.inputs[index] + torch.tensor(noise), self.targets[index]


class Collate:
    """Draws for a whole batch."""

    def __call__(self, samples):
        inputs, targets = torch.utils.data.default_collate(samples)
        return inputs * (1 + random.random() * numpy.random.rand()), targets


def noisy_loaders(workers):
    noisy = Noisy(make_data(24))
    options = {"num_workers": workers, "collate_fn": Collate()}
    return DataLoader(noisy, 8, shuffle=True, **options), DataLoader(noisy, 12, **options)


class RandomModel(torch.nn.Module):
    """Draws in its forward, as mixup and stochastic depth do."""

    def __init__(self):
        super().__init__()
        self.net = make_model(dropout=0.3)

    def forward(self, inputs):
        scale = 1 + random.random() * numpy.random.beta(0.5, 0.5)
        return self.net(inputs) * scale


class Rows(Callback):
    def __init__(self):
        self.rows = []

    def on_log(self, trainer, row):
        self.rows.append({name: row[name] for name in row if name != "train/seconds"})


def noisy_fit(workers, folder=None, die_at=None, resume=None, outside=0):
    """The trainer and the rows of a fit; `outside` is where the process's generators stand."""
    random.seed(outside)
    numpy.random.seed(outside)
    torch.manual_seed(outside)
    rows = Rows()
    callbacks = [rows]
    if folder is not None:
        callbacks.append(Checkpoint(folder, every=1))
    if die_at is not None:
        callbacks.append(Dying(die_at))
    trainer = make_trainer(RandomModel(), epochs=2, log_every=1, callbacks=callbacks)
    trainer.module.net.load_state_dict(make_model().state_dict())
    train_loader, val_loader = noisy_loaders(workers)
    try:
        trainer.fit(train_loader, val_loader, resume=resume)
    except Killed:
        assert trainer.step == die_at
    return trainer, rows.rows


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_a_plain_dataloader_s_data_set_draws_is_the_same_in_equal_runs(workers):
    (first, rows), (again, same) = (noisy_fit(workers, outside=seed) for seed in (1, 2))
    assert_same(whole_state(again), whole_state(first))
    assert rows == same and len({row["train/loss"] for row in rows if "train/loss" in row}) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_plain_dataloader_s_data_set_draws_is_the_same_after_a_resume(tmp_path, workers):
    whole, rows = noisy_fit(workers, tmp_path / "whole")
    _, before = noisy_fit(workers, tmp_path / "cut", die_at=4, outside=3)
    resumed, after = noisy_fit(workers, tmp_path / "cut", resume=tmp_path / "cut", outside=4)
    assert_same(whole_state(resumed), whole_state(whole))
    assert before + after == rows


def test_every_batch_of_every_epoch_has_draws_of_its_own():
    seen = []

    class Draws(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            seen.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
            return torch.ones(6), 0

    make_trainer(epochs=3).fit(DataLoader(Draws(), batch_size=2))
    assert len(seen) == 18
    for drawn in zip(*seen, strict=True):
        assert len(set(drawn)) == 18


def states():
    return [random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()]


def test_the_process_s_generators_are_as_they_were():
    train_loader, val_loader = noisy_loaders(0)
    trainer = make_trainer(RandomModel())
    before = states()
    for use in (
        lambda: trainer.fit(train_loader, val_loader),
        lambda: trainer.evaluate(val_loader),
        lambda: trainer.predict(val_loader),
        lambda: lr_find(make_trainer(RandomModel()), train_loader, steps=12),
    ):
        use()
        assert states() == before


# One fit after another

HOSTED = functools.partial(HostLoader, workers=0)


def our_loader(kind):
    return kind(make_data(), "train", 8, shuffle=True, seed=5)


LOADERS = {
    "resident": lambda: our_loader(DeviceLoader),
    "streamed": lambda: our_loader(HOSTED),
    "DataLoader": lambda: DataLoader(Noisy(make_data()), batch_size=8, shuffle=True),
}


class Watched(Trainer):
    """Notes each batch, and a draw of each step."""

    def train_step(self, batch):
        vars(self).setdefault("batches", []).append(batch[0].flatten().tolist())
        self.draws = [*vars(self).get("draws", []), self.drawn()]
        return super().train_step(batch)

    @staticmethod
    def drawn():
        states = [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]
        return [hash(str(state)) for state in states]


@pytest.mark.parametrize("loaders", LOADERS)
def test_no_fit_repeats_the_order_or_the_random_numbers_of_another(loaders):
    trainer = make_trainer(make_model(dropout=0.5), kind=Watched, epochs=2)
    loader = LOADERS[loaders]()
    for epochs in (2, 1, 3):
        trainer.epochs = epochs
        trainer.fit(loader)
        assert trainer.step == 8 * epochs
    orders = {str(trainer.batches[start : start + 8]) for start in range(0, 48, 8)}
    assert len(trainer.batches) == 48 and len(orders) == 6
    for draws in zip(*trainer.draws, strict=True):
        assert len(set(draws)) == 48


def test_a_fit_that_was_stopped_or_shorter_than_an_epoch_is_not_repeated_either():
    trainer = make_trainer(kind=Watched, max_steps=3)
    for _ in range(3):
        trainer.fit(LOADERS["resident"]())
    assert len({str(trainer.batches[i]) for i in (0, 3, 6)}) == 3
    assert len({draws[0] for draws in trainer.draws}) == 9


def test_a_fit_from_loaded_weights_repeats_none_of_those_before(tmp_path):
    trainer = make_trainer(kind=Watched, callbacks=[Checkpoint(tmp_path, keep=9)])
    trainer.fit(LOADERS["resident"]())
    trainer.callbacks = []
    other = make_trainer(kind=Watched)  # in another process, say
    for again in (trainer, other):
        again.load(tmp_path / "step_00000008.ckpt")
        again.fit(LOADERS["resident"]())
    for draws in (trainer.draws, trainer.draws[:24] + other.draws):
        assert len({draw[0] for draw in draws}) == 48
    assert trainer.epochs_before >= 3 and other.epochs_before == 1


@pytest.mark.parametrize(
    ("loaders", "die_at"), [("resident", 5), ("resident", 8), ("DataLoader", 5)]
)
def test_the_second_fit_resumes_exactly(tmp_path, loaders, die_at):
    def fits(*more):
        trainer = make_trainer(make_model(dropout=0.5), callbacks=[*more], epochs=2)
        trainer.fit(LOADERS[loaders]())
        trainer.callbacks.append(Checkpoint(tmp_path, every=1))
        trainer.fit(LOADERS[loaders]())
        return trainer

    with pytest.raises(Killed):
        fits(Dying(die_at + 1, fits=2))  # what there is is the checkpoint of the step before
    again = make_trainer(make_model(dropout=0.5, seed=3), epochs=2)
    again.fit(LOADERS[loaders](), resume=tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert_same(whole_state(again), whole_state(fits()))
    assert again.epochs_before == 2


def test_a_training_is_made_longer_by_its_state(tmp_path):
    """With a rate that does not depend on the length, it is the longer training bit for bit."""
    options = {"scheduler": None, "callbacks": [Checkpoint(tmp_path, overwrite=True)]}
    long = make_trainer(make_model(dropout=0.5), epochs=5, **options)
    long.fit(LOADERS["resident"]())
    for resume in (lambda trainer: trainer.state_dict(), lambda _: tmp_path):
        trainer = make_trainer(make_model(dropout=0.5), epochs=2, **options)
        trainer.fit(LOADERS["resident"]())
        trainer.epochs = 5
        trainer.fit(LOADERS["resident"](), resume=resume(trainer))
        assert_same(whole_state(trainer), whole_state(long))


# After an error


class Fragile:
    """A loader of a list of batches that fails once, at a batch of the n-th reading."""

    def __init__(self, batches, position, reading=0, error=None):
        self.batches = batches
        self.position = position
        self.left = reading
        self.error = error or OSError("lost")

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            if number == self.position:
                if self.left == 0:
                    raise self.error
                self.left -= 1
            yield batch


def lists():
    data = make_data()
    sizes = {"train": 8, "val": 5}
    splits = {"train": data.train, "val": data.val}
    return [
        list(zip(splits[name].inputs.split(n), splits[name].targets.split(n), strict=True))
        for name, n in sizes.items()
    ]


def fragile_fit(train, val, folder=None, resume=None, **settings):
    saver = [] if folder is None else [Checkpoint(folder, epochs=None)]
    callbacks = [EMA(0.9), *saver]
    trainer = make_trainer(
        make_model(dropout=0.5), callbacks=callbacks, max_steps=24, eval_every=5, **settings
    )
    trainer.fit(train, val, resume=resume)
    return trainer


@pytest.mark.parametrize(
    ("train_fails", "val_fails", "step"),
    [(None, (2, 1), 10), ((3, 1), None, 11), ((0, 2), None, 16)],
)
def test_an_error_between_two_steps_loses_no_step(tmp_path, train_fails, val_fails, step):
    train, val = lists()
    whole = fragile_fit(train, val)
    fragile = Fragile(train, *train_fails) if train_fails else train
    fragile_val = Fragile(val, *val_fails) if val_fails else val
    with pytest.raises((OSError, TrainingError), match="lost"):
        fragile_fit(fragile, fragile_val, tmp_path)
    assert max(checkpoint.files(tmp_path)) == step
    resumed = fragile_fit(train, val, resume=tmp_path)
    assert_same(whole_state(resumed), whole_state(whole))
    resumed_rows = [row for row in whole.history if row["step"] > resumed.history[0]["step"]]
    losses = [row["val/loss"] for row in resumed_rows if "val/loss" in row]
    assert [row["val/loss"] for row in resumed.history if "val/loss" in row][
        -len(losses) :
    ] == losses


class FailsInAStep(Trainer):
    def train_step(self, batch):
        loss = super().train_step(batch)
        if self.step == 11:
            raise OSError("lost")
        return loss


class ReadsInAStep(Trainer):
    """The second loader fails when the weights have been updated."""

    def train_step(self, batch):
        loss = super().train_step(batch)
        if self.step == 11:
            next(iter(IterableLoader(Fragile(lists()[0], 0))))
        return loss


def test_an_error_in_a_step_or_with_part_of_a_step_saves_nothing(tmp_path):
    train, val = lists()
    with pytest.raises(TrainingError, match="lost"):
        fragile_fit(train, val, tmp_path / "c", kind=ReadsInAStep)
    assert max(checkpoint.files(tmp_path / "c")) == 10
    with pytest.raises(OSError, match="lost"):
        fragile_fit(train, val, tmp_path / "a", kind=FailsInAStep)
    fragile = IterableLoader(Fragile(train, 5, 1), accumulate=2)
    with pytest.raises(TrainingError, match="lost"):
        fragile_fit(fragile, None, tmp_path / "b")
    assert max(checkpoint.files(tmp_path / "a")) == 10  # the best evaluation so far
    assert not checkpoint.files(tmp_path / "b")


def test_a_lack_of_memory_in_the_loader_loses_no_step(tmp_path):
    fragile = Fragile(lists()[0], 3, 1, torch.OutOfMemoryError("out of memory"))
    with pytest.raises(TrainingError, match="Out of memory"):
        fragile_fit(fragile, None, tmp_path)
    assert max(checkpoint.files(tmp_path)) == 11


def test_a_checkpoint_that_cannot_be_written_does_not_hide_the_error(tmp_path, caplog, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save", fail)
    train, val = lists()
    with pytest.raises(TrainingError, match="lost"):
        fragile_fit(Fragile(train, 3), val, tmp_path)
    assert "After the error, no checkpoint could be saved: OSError: disk full" in caplog.text


def test_weights_that_are_not_finite_are_not_saved_after_an_error(tmp_path, caplog):
    class Breaks(Callback):
        def on_eval_start(self, trainer):
            torch.nn.init.constant_(trainer.module[0].weight, float("nan"))
            raise OSError("lost")

    trainer = make_trainer(callbacks=[Breaks(), Checkpoint(tmp_path)])
    with pytest.raises(OSError, match="lost"):
        trainer.fit(*lists())
    assert not checkpoint.files(tmp_path)
    assert "After the error, no checkpoint could be saved: NotFinite: 0.weight has" in caplog.text
