"""Data without a length, batches that are added up, and a state carried from batch to batch."""

import copy
import functools
import itertools
import random
from collections.abc import Iterator

import numpy
import pytest
import torch
from conftest import assert_same, make_model, make_trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from stoker import Trainer
from stoker.trainer import checkpoint, schedules
from stoker.trainer.callbacks import Callback, Checkpoint
from stoker.trainer.carried import Carried
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import IterableLoader

SAMPLES = 37


class Stream(IterableDataset):
    """Numbered samples with noise from every generator; each worker gives its own."""

    def __iter__(self):
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, SAMPLES, stride):
            noise = torch.rand(6) + random.random() + numpy.random.rand()
            yield torch.full((6,), number / 10) + noise, number % 3


class StatefulLoader:
    """Batches of a stream, as torchdata's StatefulDataLoader gives them; remembers its reading."""

    def __init__(self, dataset, batch_size):
        self.dataset = dataset
        self.batch_size = batch_size
        self.given = 0
        self.read = []

    def __iter__(self):
        torch.rand(())  # like a DataLoader, which draws a seed for its workers
        random.random()
        return self.batches()

    def batches(self):
        samples = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
        while self.given * self.batch_size < SAMPLES:
            rows = slice(self.given * self.batch_size, (self.given + 1) * self.batch_size)
            self.read.append(self.given)
            self.given += 1
            inputs = samples[rows] + torch.rand(()) + random.random()
            yield inputs, torch.arange(SAMPLES)[rows] % 3
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class RandomStream:
    """An endless stream whose state is its own generator."""

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        while True:
            yield torch.randn(5, 6, generator=self.generator), torch.arange(5) % 3

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class RandomPasses(RandomStream):
    """A stream of eight batches, whose state is its generator and how many it has yielded."""

    number = 0

    def __iter__(self):
        batches = super().__iter__()
        while self.number < 8:
            self.number += 1
            yield next(batches)
        self.number = 0

    def state_dict(self):
        return {**super().state_dict(), "number": self.number}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.number = state["number"]


class NoisyStream(IterableDataset):
    """A stream whose noise comes from a generator of numpy that it keeps, seeded by the clock."""

    def __init__(self):
        self.generator = numpy.random.default_rng()

    def __iter__(self):
        for number in range(SAMPLES):
            yield torch.full((6,), number / 10) + self.generator.random(), number % 3


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            trainer.stop("as asked")


def loader(batch_size=5, **options):
    return DataLoader(Stream(), batch_size, **options)


def states(trainer):
    """The state of a training, without where its reading stood."""
    state = trainer.state_dict()
    return {name: value for name, value in state.items() if name not in ("loader", "callbacks")}


# Streams


def test_a_stream_is_trained_like_data_with_a_length():
    class Counted(Stream):
        def __len__(self):
            return SAMPLES

    rows = []
    for train, epochs in (
        (loader(), None),
        (DataLoader(Counted(), 5), 3),
        (IterableLoader(loader(), steps_per_epoch=8), 3),
    ):
        trainer = make_trainer(
            epochs=epochs,
            max_steps=None if epochs else 24,
            scheduler=functools.partial(schedules.cosine, warmup=3),
            log_every=4,
            eval_every=8,
        )
        history = trainer.fit(train, loader())
        rows.append([{**row, "epoch": 0, "train/seconds": 0} for row in history])
    assert rows[0] == rows[1] == rows[2]
    assert [row["step"] for row in rows[0] if "val/loss" in row] == [8, 16, 24]


def numbered():
    """Samples and their targets."""
    numbers = torch.arange(SAMPLES)
    return numbers[:, None] / torch.arange(1, 7), numbers % 3


def collated(numbers):
    """A batch of samples without a stream, with noise as well."""
    targets = torch.tensor(numbers) % 3
    return targets[:, None] + torch.rand(len(numbers), 6) + random.random(), targets


class TooShort(list):
    """Batches whose length is wrong: an epoch ends in the middle of a pass."""

    def __len__(self):
        return 3


READINGS = {
    "without a state": loader,
    "with a state": lambda: StatefulLoader(Stream(), 5),
    "with a generator as its state": RandomStream,
    "with a generator of its own": lambda: DataLoader(NoisyStream(), 5),
    "with a length": lambda: DataLoader(range(SAMPLES), 5, shuffle=True, collate_fn=collated),
    "with too short a length": lambda: TooShort(DataLoader(TensorDataset(*numbered()), 5)),
    "in epochs": lambda: IterableLoader(loader(), steps_per_epoch=3),
    "in epochs with a state": lambda: IterableLoader(
        StatefulLoader(Stream(), 5), steps_per_epoch=3
    ),
    "added up": lambda: IterableLoader(loader(), steps_per_epoch=3, accumulate=3),
    "added up, with a generator in its state": lambda: IterableLoader(
        RandomPasses(), steps_per_epoch=3, accumulate=3
    ),
    "added up, epochs longer than passes": lambda: IterableLoader(
        loader(), steps_per_epoch=5, accumulate=3
    ),
}


@pytest.mark.parametrize("reading", READINGS)
def test_a_resumed_stream_is_the_uninterrupted_one(reading, tmp_path):
    """A pass has eight batches: the steps are in the first, at its end and in the second."""

    def fit(callbacks=(), resume=None):
        torch.manual_seed(1)
        trainer = make_trainer(make_model(dropout=0.2), callbacks=callbacks, max_steps=20)
        train = READINGS[reading]()
        trainer.fit(train, loader(), resume=resume)
        return trainer, train

    whole, _ = fit()
    for step in (3, 8, 12):
        folder = tmp_path / str(step)
        fit([Stop(step), Checkpoint(folder)])
        resumed, train = fit(resume=folder)
        assert_same(resumed.module.state_dict(), whole.module.state_dict())
        assert_same(states(resumed), states(whole))
        if reading == "with a state":
            assert train.read[:2] == ([step % 8, step % 8 + 1] if step != 8 else [0, 1])


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 1)])
def test_a_stream_does_not_resume_with_a_different_number_of_workers(tmp_path, before, now):
    make_trainer(max_steps=3, callbacks=[Checkpoint(tmp_path)]).fit(loader(num_workers=before))
    fresh = make_trainer(max_steps=6)
    weights = copy.deepcopy(fresh.module.state_dict())
    with pytest.raises(
        UserError, match=f"{before} workers, but .* now has {now} .*\n.*workers={before} "
    ):
        fresh.fit(loader(num_workers=now), resume=tmp_path)
    assert_same(fresh.module.state_dict(), weights)


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 0)])
def test_a_stream_resumes_with_one_worker_instead_of_none(tmp_path, before, now):
    make_trainer(max_steps=3, callbacks=[Checkpoint(tmp_path)]).fit(loader(num_workers=before))
    resumed = make_trainer(max_steps=6)
    resumed.fit(loader(num_workers=now), resume=tmp_path)
    assert resumed.step == 6


def test_an_evaluation_reads_the_first_batches_of_an_endless_stream():
    class Endless:
        def __iter__(self):
            return itertools.cycle(StatefulLoader(Stream(), 5))

    trainer = make_trainer(max_steps=4, eval_every=2)
    history = trainer.fit(loader(), IterableLoader(Endless(), steps_per_epoch=2))
    expected = trainer.evaluate(itertools.islice(IterableLoader(Endless()), 2))
    assert history.last()["val/loss"] == expected["val/loss"]


def test_an_evaluation_draws_the_same_numbers_each_time_and_none_of_the_global_ones():
    trainer = make_trainer()
    shuffled = TensorDataset(torch.randn(20, 6), torch.arange(20) % 3)
    for reader in (loader(), DataLoader(shuffled, 5, shuffle=True)):
        first = trainer.predict(reader)
        torch.rand(3)
        state = torch.get_rng_state()
        assert torch.equal(trainer.predict(reader), first)
        assert torch.equal(torch.get_rng_state(), state)


def test_an_evaluation_says_at_which_batch_the_loader_failed():
    def broken():
        yield torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)
        raise ValueError("no such file")

    with pytest.raises(TrainingError, match="The loader failed at batch 2 .*: .*no such file"):
        make_trainer().evaluate(broken())


def test_an_evaluation_or_prediction_reads_a_stream_to_its_end_or_to_its_steps():
    batches = [*DataLoader(Stream(), 5)]
    trainer = make_trainer(max_steps=2)
    assert trainer.fit(loader(), batches).last()["val/loss"] > 0
    first = trainer.evaluate(batches[:3])
    endless = IterableLoader(itertools.cycle(batches), steps_per_epoch=3)
    assert trainer.evaluate(endless) == first
    outputs = trainer.predict(IterableLoader(itertools.cycle(batches), steps_per_epoch=3))
    assert torch.equal(outputs, trainer.predict(iter(batches[:3])))


def test_epochs_of_a_stream_go_on_where_it_stands():
    trainer = make_trainer(epochs=5)
    train = StatefulLoader(Stream(), 5)
    trainer.fit(IterableLoader(train, steps_per_epoch=3))
    assert train.read == [*range(8), *range(7)] and trainer.step == 15


@pytest.mark.slow
def test_workers_read_each_sample_once():
    """0 == 2 workers, where the noise is the workers' own."""
    given = {}
    for workers in (0, 2):
        numbers = []

        class Noting(Trainer):
            def compute_loss(self, batch, numbers=numbers):
                numbers.extend(batch[1].tolist())
                return super().compute_loss(batch)

        trainer = make_trainer(kind=Noting, max_steps=16)
        trainer.fit(loader(num_workers=workers))
        given[workers] = sorted(numbers)
    assert given[0] == given[2] == sorted([number % 3 for number in range(SAMPLES)] * 2)


@pytest.mark.parametrize(
    ("train", "settings", "words"),
    [
        (loader(), {"epochs": 2}, "DataLoader has no len"),
        (
            (batch for batch in loader()),
            {"max_steps": 9},
            r"\(generator\) has no batches when it is",
        ),
        (iter(()), {"max_steps": 9}, "has no batches"),
        (IterableLoader(loader(), accumulate=2), {"max_steps": 9, "micro_batch": 2}, "micro_batch"),
    ],
)
def test_what_cannot_be_read_is_refused(train, settings, words):
    with pytest.raises(UserError, match=words):
        make_trainer(**{"epochs": None, **settings}).fit(train)


def test_a_generator_that_was_read_cannot_be_read_again_to_resume(tmp_path):
    def fit(train, steps, resume=None):
        callbacks = [Checkpoint(tmp_path / str(steps))]
        trainer = make_trainer(make_model(), callbacks=callbacks, max_steps=6)
        if steps < 6:
            trainer.callbacks.insert(0, Stop(steps))
        trainer.fit(train, resume=resume)
        return trainer.module.state_dict()

    def generator():
        yield from (batch for _ in range(9) for batch in DataLoader(TensorDataset(*numbered()), 5))

    begun = generator()
    torch.manual_seed(1)
    fit(begun, 3)
    with pytest.raises(UserError, match="this generator has already been read"):
        fit(begun, 6, tmp_path / "3")
    resumed = fit(generator(), 6, tmp_path / "3")
    torch.manual_seed(1)
    assert_same(resumed, fit(generator(), 7))


def test_a_validation_loader_that_goes_on_is_refused():
    class Endless(Iterator):
        def __next__(self):
            return next(iter(loader()))

    endings = (iter(loader()), IterableLoader(iter(loader()), steps_per_epoch=2), Endless())
    for val in endings:
        with pytest.raises(UserError, match="would yield other batches at each evaluation"):
            make_trainer(max_steps=2).fit(loader(), val)


class Restarts:
    """A loader that is its own iterator and starts over at each iter()."""

    def __iter__(self):
        self.batches = iter(loader())
        return self

    def __next__(self):
        return next(self.batches)


def test_a_validation_loader_that_starts_over_is_evaluated_each_time():
    results = [
        make_trainer(max_steps=4, eval_every=2, seed=0).fit(loader(), val)[-1]
        for val in (Restarts(), loader())
    ]
    names = [name for name in results[0] if name.startswith("val/")]
    assert names and [results[0][n] for n in names] == [results[1][n] for n in names]


def test_what_a_checkpoint_cannot_do_is_said_before_the_training(tmp_path, caplog):
    make_trainer(callbacks=[Checkpoint(tmp_path / "a")], max_steps=2).fit(loader())
    assert (
        "a stream that cannot save its state, so a resumed run reads it from the start"
        in caplog.text
    )
    caplog.clear()
    for number, times in enumerate(({"every": 1}, {"minutes": 9})):
        saver = Checkpoint(tmp_path / f"b{number}", **times)
        make_trainer(callbacks=[saver], max_steps=2).fit(StatefulLoader(Stream(), 5))
    assert not caplog.text


def test_a_state_that_no_checkpoint_holds_is_refused(tmp_path):
    class Odd(StatefulLoader):
        def state_dict(self):
            return {"generator": random.Random(0)}

    trainer = make_trainer(callbacks=[Checkpoint(tmp_path)], max_steps=3)
    with pytest.raises(UserError, match="state/loader/loader/generator: .* not a Random"):
        trainer.fit(Odd(Stream(), 5))


@pytest.mark.parametrize(
    "place",
    [
        3,
        {"number": 1},
        {"passes": 0, "number": 1, "loader": {}},
    ],
)
def test_a_place_that_no_reading_has_is_refused(place):
    trainer = make_trainer(max_steps=2)
    trainer.fit(StatefulLoader(Stream(), 5))
    fresh = make_trainer(max_steps=4)
    before = copy.deepcopy(fresh.module.state_dict())
    with pytest.raises(UserError, match="The checkpoint does not match"):
        fresh.fit(StatefulLoader(Stream(), 5), resume={**trainer.state_dict(), "loader": place})
    assert_same(fresh.module.state_dict(), before)


def test_a_stream_is_saved_every_ten_minutes(tmp_path, monkeypatch):
    trainer = make_trainer(max_steps=8, callbacks=[Checkpoint(tmp_path, keep=9)])
    monkeypatch.setattr(trainer.agreement, "now", lambda: 4 * 60 * trainer.step)
    trainer.fit(loader())
    assert sorted(checkpoint.files(tmp_path)) == [3, 6, 8]


# Accumulation over batches of the loader


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)])
def test_batches_that_are_added_up_are_one_batch(weights):
    """27 samples in batches of 4 are steps of 12, 12 and 3 samples."""
    torch.manual_seed(0)
    inputs = torch.randn(27, 6, dtype=torch.float64)
    targets = torch.randint(0, 3, (27,))
    model = make_model(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for _ in range(2):
        total = weight = 0.0
        for first in (0, 12, 24):
            rows = slice(first, first + 12)
            loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows], weights)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            counts = len(targets[rows]) if weights is None else weights[targets[rows]].sum().item()
            total += counts * loss.item()
            weight += counts
        expected.append(total / weight)
    trainer = Trainer(
        make_model(dtype=torch.float64),
        nn.CrossEntropyLoss(weights),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        epochs=2,
        device="cpu",
        max_grad_norm=0.5,
    )
    parts = DataLoader(TensorDataset(inputs, targets), 4)
    history = trainer.fit(IterableLoader(parts, accumulate=3))
    losses = [row["train/loss"] for row in history]
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    for name, tensor in model.state_dict().items():
        value = trainer.module.state_dict()[name]
        torch.testing.assert_close(value, tensor, rtol=1e-12, atol=1e-12)
    assert [row["train/samples"] for row in history] == [27, 27]
    assert trainer.steps_per_epoch == 3


# A state that is carried


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.memory = nn.LSTM(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs, hidden):
        outputs, hidden = self.memory(inputs, hidden)
        return self.head(outputs).transpose(1, 2), hidden


class LanguageModel(Trainer):
    hidden = Carried()

    def sample_dim(self, name, value):
        return 1

    def compute_loss(self, batch):
        inputs, targets = batch
        outputs, self.hidden = self.model(inputs, self.hidden)
        return self.loss(outputs, targets), outputs


class Anew(Callback):
    """An epoch begins at the start of the text."""

    def on_epoch_end(self, trainer):
        trainer.hidden = None


def texts():
    """Five batches (time, samples, features) of one text."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(20, 3, 2, generator=generator)
    targets = torch.randint(0, 3, (20, 3), generator=generator)
    return list(zip(inputs.split(4), targets.split(4), strict=True))


SGD = functools.partial(torch.optim.SGD, lr=0.5)


def language_model(*callbacks, optimizer=SGD, **settings):
    return LanguageModel(
        Recurrent(),
        nn.CrossEntropyLoss(),
        optimizer,
        callbacks=[Anew(), *callbacks],
        epochs=3,
        device="cpu",
        **settings,
    )


def test_a_carried_state_is_that_of_a_loop_by_hand():
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        hidden = None
        for inputs, targets in texts():
            outputs, hidden = model(inputs, hidden)
            hidden = tuple(part.detach() for part in hidden)
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, targets).backward()
            optimizer.step()
    with torch.no_grad():
        hidden, total = None, 0.0
        for inputs, targets in texts():
            outputs, hidden = model(inputs, hidden)
            total += nn.functional.cross_entropy(outputs, targets).item()
    for eval_every in (None, 2):  # an evaluation between two batches changes nothing
        trainer = language_model(eval_every=eval_every)
        history = trainer.fit(texts(), texts())
        torch.testing.assert_close(trainer.module.state_dict(), model.state_dict())
        assert history.last()["val/loss"] == pytest.approx(total / 5, rel=1e-6)


def test_each_evaluation_of_a_step_begins_with_the_same_carried_state():
    settings = {"lr": 0.5, "max_iter": 3}
    trainer = language_model(
        optimizer=functools.partial(torch.optim.LBFGS, **settings), max_steps=3
    )
    trainer.fit(texts())
    model = Recurrent()
    optimizer = torch.optim.LBFGS(model.parameters(), **settings)
    before = after = None
    for inputs, targets in texts()[:3]:

        def closure(inputs=inputs, targets=targets, before=before):
            nonlocal after
            optimizer.zero_grad()
            outputs, after = model(inputs, before)
            loss = nn.functional.cross_entropy(outputs, targets)
            loss.backward()
            return loss

        optimizer.step(closure)
        before = tuple(part.detach() for part in after)
    torch.testing.assert_close(trainer.module.state_dict(), model.state_dict())


@pytest.mark.parametrize("step", [5, 7])
def test_a_carried_state_resumes(step, tmp_path):
    whole = language_model()
    whole.fit(texts(), texts())
    language_model(Stop(step), Checkpoint(tmp_path)).fit(texts(), texts())
    resumed = language_model()
    resumed.fit(texts(), texts(), resume=tmp_path)
    assert_same(resumed.module.state_dict(), whole.module.state_dict())


@pytest.mark.parametrize("settings", [{"grad_accum_steps": 3}, {"micro_batch": "auto"}])
def test_a_carried_state_needs_whole_batches(settings):
    words = f"{next(iter(settings))}.*LanguageModel.hidden, which needs whole batches"
    with pytest.raises(UserError, match=words):
        language_model(**settings).fit(texts())


def test_each_fit_and_each_prediction_begins_without_a_state():
    trainer = language_model(max_steps=2)
    for _ in range(2):
        first = next(itertools.islice(texts(), 1))
        trainer.fit(texts())
        assert trainer.hidden is not None
        kept = trainer.hidden
        trainer.evaluate([first])
        assert trainer.hidden is kept
    trainer.close()
    assert trainer.hidden is None
