"""Data sets of any samples: dicts with ragged lists and strings, from a script and from the command
line.
"""

import functools
import json
import os
import random
import signal

import numpy
import pytest
import torch
from conftest import assert_same, make_trainer
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from stoker import Trainer
from stoker.data import record
from stoker.data.datasets import Data, DatasetSplit, TensorSplit
from stoker.data.description import data_line
from stoker.data.loader import make_loaders
from stoker.data.record import fingerprint
from stoker.data.samples import SampleLoader, data_of, make_loader
from stoker.runs import examine
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import Checkpoint
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import IterableLoader, seekable
from stoker.trainer.seeding import CPU, mix_seed, seed_generators, seed_own

HERE = os.path.dirname(__file__)


class Boxes(Dataset):
    """Dicts of a vector that is noisy in each reading, a ragged list and a name."""

    def __init__(self, n=23, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(n, 6, generator=generator)
        self.counts = torch.randint(1, 4, (n,), generator=generator).tolist()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        noise = torch.randn(6) + random.random() + numpy.random.rand()
        boxes = self.inputs[i, :2] + torch.arange(self.counts[i]).view(-1, 1)
        return {"inputs": self.inputs[i] + 0.1 * noise, "boxes": boxes, "name": f"{i}.png"}

    @staticmethod
    def collate_fn(samples):
        batch = {key: [sample[key] for sample in samples] for key in samples[0]}
        return {**batch, "inputs": torch.stack(batch["inputs"])}


class OfDicts(Trainer):
    def compute_loss(self, batch):
        outputs = self.model(batch["inputs"])
        return box_loss(outputs, batch), outputs


def box_loss(outputs, batch):
    means = torch.stack([boxes.mean(0) for boxes in batch["boxes"]])
    return (outputs[:, :2] - means).square().mean()


def make_data(n=23):
    return {"train": Boxes(n), "val": Boxes(9, 1), "hard": Boxes(5, 2), "test": Boxes(7, 3)}


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))


def by_hand(epoch, seed=5, batch_size=4, n=23):
    """The batches of an epoch in plain torch."""
    generator = torch.Generator().manual_seed(mix_seed(seed, "order", epoch))
    dataset = Boxes(n)
    for indices in torch.randperm(n, generator=generator).split(batch_size):
        samples = []
        for i in indices.tolist():
            own = mix_seed("sample", seed, epoch, i)
            random.seed(own)
            numpy.random.seed(own % 2**32)
            torch.manual_seed(own)
            samples.append(dataset[i])
        yield Boxes.collate_fn(samples)


def sample_loader(workers=0, n=23, **options):
    return SampleLoader(Boxes(n), "train", 4, seed=5, shuffle=True, workers=workers, **options)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_those_of_a_plain_loop(workers):
    loader = sample_loader(workers)
    expected = [*by_hand(0), *by_hand(1)]
    state = torch.get_rng_state()
    assert_same([*loader, *loader], expected)
    loader.seek(1, 3)
    assert_same([*loader], expected[len(loader) + 3 :])
    assert torch.equal(torch.get_rng_state(), state)
    loader.close()


def test_a_training_is_a_plain_loop_over_the_same_batches():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    trainer = make_trainer(
        torch.nn.Linear(6, 3),
        OfDicts,
        loss=None,
        epochs=2,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        scheduler=None,
    )
    trainer.module.load_state_dict(model.state_dict())
    trainer.fit(sample_loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in [*by_hand(0), *by_hand(1)]:
        optimizer.zero_grad()
        box_loss(model(batch["inputs"]), batch).backward()
        optimizer.step()
    assert_same(trainer.module.state_dict(), model.state_dict())


class OwnGenerators(Dataset):
    """Samples whose noise comes from generators that are attributes, seeded by the clock."""

    def __init__(self, n=23):
        self.n = n
        self.torch = torch.Generator()
        self.torch.seed()
        self.numpy = numpy.random.default_rng()
        self.second = numpy.random.default_rng()
        self.older = numpy.random.RandomState()
        self.python = random.Random()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        noise = [self.numpy.random(), self.older.rand(), self.python.random()]
        noise += [self.second.random(), numpy.random.rand(), random.random()]
        return torch.tensor([i, *noise]) + torch.rand(7, generator=self.torch), i % 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(20))])
def test_generators_that_a_data_set_keeps_are_seeded_for_each_sample(wrap, workers):
    def batches(start=0, workers=0):
        split = wrap(OwnGenerators())
        loader = SampleLoader(split, "train", 4, seed=5, shuffle=True, workers=workers)
        loader.seek(1, start)
        batches = [*loader]
        loader.close()
        return batches

    whole = batches()
    assert_same(batches(workers=workers), whole)
    assert_same(batches(3, workers), whole[3:])
    noise = torch.cat([inputs for inputs, _ in whole])
    assert len(noise.unique()) == noise.numel()


def test_generators_of_one_owner_and_the_global_ones_draw_different_numbers():
    owner = OwnGenerators()
    owner.other = torch.Generator()
    seed_generators(CPU, 7)
    seed_own(owner, 7)
    numbers = [torch.rand(()), *(torch.rand((), generator=g) for g in (owner.torch, owner.other))]
    numbers += [owner.numpy.random(), owner.second.random(), owner.older.rand()]
    numbers += [numpy.random.rand(), random.random(), owner.python.random()]
    assert len({round(float(number), 5) for number in numbers}) == 9


def test_generators_of_a_loader_and_its_data_set_draw_different_numbers():
    dataset = OwnGenerators()
    dataset.generator = torch.Generator()
    loader = DataLoader(dataset, 4, shuffle=True, generator=torch.Generator())
    next(iter(IterableLoader(loader, steps_per_epoch=2)))
    states = {g.initial_seed() for g in (loader.generator, dataset.generator, dataset.torch)}
    assert len(states) == 3


class OwnSplit(DatasetSplit):
    """A split with generators beside those of its data set."""

    def __init__(self):
        super().__init__(OwnGenerators(), [i % 3 for i in range(23)])
        self.numpy = numpy.random.default_rng()

    def __getitem__(self, indices):
        inputs, targets = super().__getitem__(indices)
        return inputs + self.numpy.random(), targets


def test_generators_that_a_split_keeps_are_seeded_for_each_batch():
    def inputs():
        data = Data("own", OwnSplit(), None, None, (7,), 3)
        (train, _, _), _ = make_loaders(data, batch_size=4, workers=0)
        return [batch[0] for batch in train]

    assert_same(inputs(), inputs())


@pytest.mark.parametrize("limit", [None, 0.6])
def test_a_resumed_training_ends_as_a_whole_one(tmp_path, limit):
    def fit(folder, steps, resume=None):
        torch.manual_seed(0)
        saver = Checkpoint(tmp_path / folder, every=2, keep=9)
        trainer = make_trainer(Net(), OfDicts, loss=None, max_steps=11, callbacks=[saver])
        trainer.fit(sample_loader(limit=limit), resume=resume)
        return trainer.module.state_dict()

    whole = fit("whole", 11)
    assert_same(fit("cut", 11, tmp_path / "whole" / "step_00000008.ckpt"), whole)


@pytest.mark.parametrize("n", [23, 21])
def test_processes_share_each_batch(monkeypatch, n):
    """The last batch of 21 samples has one, and is lent to the second process in an evaluation."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        loader = SampleLoader(Boxes(n), "val", 4, seed=5)
        parts.append([(loader.global_size, batch) for batch in loader])
    monkeypatch.undo()
    whole = [*SampleLoader(Boxes(n), "val", 4, seed=5)]
    for batch, (size, even), (_, odd) in zip(whole, *parts, strict=True):
        assert size == len(batch["name"])
        assert even["name"] == batch["name"][::2]
        assert odd["name"] == (batch["name"][1::2] or batch["name"])
        assert torch.equal(even["inputs"], batch["inputs"][::2])


@pytest.mark.parametrize("kind", ["resident", "streamed", "samples", "loader"])
def test_a_limited_epoch_and_evaluation(kind):
    """An epoch takes others each time, an evaluation the same ones."""
    numbers = torch.arange(20.0).view(-1, 1)
    dataset = TensorDataset(numbers, torch.arange(20) % 2)
    part = DataLoader(dataset, batch_size=2) if kind == "loader" else dataset
    data = data_of("mine", {"train": part, "val": part})
    if kind in ("resident", "streamed"):
        from stoker.data.datasets import Data, TensorSplit

        split = TensorSplit(numbers, torch.arange(20) % 2)
        data = Data("mine", split, split, None, (1,), 2)
    options = {"resident": kind == "resident"} if kind in ("resident", "streamed") else {}
    limits = {"limit_train": 0.5, "limit_val": 6}
    (train, val, _), _ = make_loaders(data, batch_size=2, workers=0, seed=1, **limits, **options)
    train = seekable(train, 1)
    train.steps = len(train)
    assert len(train) == 5 and len(val) == 3
    epochs = [[*train], [*train]]
    first, second = ({*torch.cat([x for x, _ in batches]).view(-1).tolist()} for batches in epochs)
    assert len(first) == len(second) == 10 and first != second
    assert_same([*val], [*val])
    assert sum(len(x) for x, _ in val) == 6


def test_two_validation_sets_are_two_evaluations(tmp_path):
    torch.manual_seed(0)
    saver = Checkpoint(tmp_path, monitor="hard/loss")
    trainer = make_trainer(Net(), OfDicts, loss=None, epochs=2, callbacks=[saver])
    val = {name: SampleLoader(part, name, 4) for name, part in make_data().items()}
    del val["train"]
    history = trainer.fit(sample_loader(), val)
    for name, loader in val.items():
        results = trainer.evaluate(loader, name)
        assert {key: history.last()[key] for key in results} == results
    best = min(row["hard/loss"] for row in history if "hard/loss" in row)
    assert saver.best["value"] == best


def test_a_limit_above_the_samples_of_a_loader_is_refused():
    mine = DataLoader(torch.arange(10.0), batch_size=4)
    assert len(make_loader(mine, "val", 4, limit=12)) == 3
    for shuffle in (False, True):
        with pytest.raises(UserError, match=r"DataLoader \(length: 3, batch size: 4\)\.\n"):
            make_loader(mine, "mine", 4, limit=13, shuffle=shuffle)


def test_labelled_data_sets_are_a_classification():
    class Pictures(Dataset):
        classes = ("cat", "dog")
        targets = [0, 1] * 5

        def __len__(self):
            return 10

        def __getitem__(self, i):
            return torch.full((1, 4, 4), float(i)), self.targets[i]

    data = data_of("mine", {"train": Subset(Pictures(), range(1, 7)), "val": Pictures()})
    assert (data.kind, data.in_shape, data.classes) == (
        "classification",
        (1, 4, 4),
        ["cat", "dog"],
    )
    assert data.train.targets.tolist() == [1, 0, 1, 0, 1, 0]
    inputs, targets = data.train[[2, 0]]
    assert inputs[:, 0, 0, 0].tolist() == [3, 1] and targets.tolist() == [1, 1]
    assert data_of("mine", {"train": Pictures(), "val": Boxes()}).kind == "other"
    changed = Pictures()
    changed.target_transform = lambda label: (
        1 - label
    )  # as torchvision's, of which targets know not
    assert data_of("mine", {"train": Subset(changed, range(4))}).kind == "other"


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"val": Boxes()}, "returns a dict without a train split"),
        ({"train": None}, "returns a dict without a train split"),
        ({"train": 3}, "returns an int as 'train'"),
        ({"train": "a.csv"}, "returns a str as 'train'"),
        ({"train": torch.ones(8, 6)}, "returns a Tensor as 'train'"),
        ({"train": Boxes(), "val": {"x": 1}}, "returns a dict as 'val'"),
        ({"train": Boxes(0)}, "is empty"),
    ],
)
def test_what_is_no_part_is_refused(parts, message):
    with pytest.raises(UserError, match=message):
        make_loaders(data_of("mine", parts), batch_size=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": ["flip"]}, r"dataset\.augment: this setting needs inputs of a known shape"),
        ({"resident": True}, r"dataset\.resident: this setting needs"),
        ({"limit_train": 30}, "limit_train=30: there are only 23 samples"),
        (
            {"limit_val": 0.5},
            r"limit_val=0\.5: not possible with this DataLoader \(length: unknown",
        ),
    ],
)
def test_settings_that_these_data_cannot_have(options, message):
    data = data_of("mine", {"train": Boxes(), "val": DataLoader(Stream())})
    with pytest.raises(UserError, match=message):
        make_loaders(data, batch_size=4, **options)


def test_samples_that_make_no_batch_are_explained():
    class Broken(Boxes):
        def __getitem__(self, i):
            return {"x": [0.0] * 10}[i]

    with pytest.raises(
        TrainingError, match="Sample 0 of the val split of mine cannot be read: Key"
    ):
        next(iter(SampleLoader(Broken(), "the val split of mine", 8)))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_different_shapes_are_named(workers):
    class Uneven(Boxes):
        collate_fn = None

        def __getitem__(self, i):
            return {"x": torch.ones(5 if i == 2 else 4)}

    expected = (
        r"4 samples of the val split of mine, starting at 0, cannot be read: "
        r".*equal size.*\n.*give the data set a collate_fn\(samples\)"
    )
    with pytest.raises(TrainingError, match=expected):
        next(iter(SampleLoader(Uneven(), "the val split of mine", 4, workers=workers)))


def test_a_class_in_place_of_a_data_set_is_refused():
    with pytest.raises(UserError, match="returns a type as 'train'. Return an instance of a torch"):
        data_of("mine", {"train": Boxes})


def test_an_iterable_data_set_is_batched():
    data = data_of("mine", {"train": Stream(), "val": [[torch.ones(2)]]})
    (train, _, _), _ = make_loaders(data, batch_size=4)
    assert [len(batch) for batch in train] == [4, 4, 2]
    line = data_line(data, {"train": train, "val": [1], "test": sample_loader()}, "")
    assert line == "data     mine: 23 test samples"
    assert data_line(data, {"train": [1], "val": [1]}, "") == "data     mine"
    assert fingerprint(data) == fingerprint(data_of("mine", {"train": Stream(), "val": [[1]]}))
    assert fingerprint(data) != fingerprint(data_of("mine", {"train": Stream(), "val": [1, 2]}))


class InArrays(Dataset):
    def __init__(self, values):
        self.data = values.numpy()


@pytest.mark.parametrize(
    "wrap",
    [
        TensorDataset,
        InArrays,
        lambda values: DatasetSplit(TensorDataset(values, torch.zeros(3))),
    ],
)
def test_a_fingerprint_covers_the_arrays_in_a_data_set(wrap):
    def of(*values):
        return fingerprint(Data("mine", wrap(torch.tensor(values)), None, None, kind="other"))

    assert of(1, 2, 3) == of(1, 2, 3)
    assert of(1, 2, 3) != of(1, 2, 4)


class Holds(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Holds(indices=[[1, 2], [3], []]),
        lambda: Holds(data=torch.eye(3).to_sparse()),
        lambda: Holds(data=torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
        lambda: Holds(data=numpy.array(["a", "b", "c"])),
    ],
)
def test_a_fingerprint_does_not_cover_values_that_it_cannot_read(make):
    of_length = fingerprint(data_of("mine", {"train": Holds()}))
    assert fingerprint(data_of("mine", {"train": make()})) == of_length


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.int64])
def test_a_fingerprint_covers_values_of_all_types(dtype):
    def of(*values):
        data = torch.tensor(values).to(dtype)
        return fingerprint(data_of("mine", {"train": Holds(data=data.conj())}))

    assert of(0, 1, 1) == of(0, 1, 1)
    assert of(0, 1, 1) != of(0, 1, 0)


def test_a_fingerprint_covers_the_shape_of_a_large_array(monkeypatch):
    monkeypatch.setattr(record, "LARGE", 20)

    def of(*values, size=1):
        data = torch.tensor(values).expand(size, -1)
        return fingerprint(data_of("mine", {"train": Holds(data=data)}))

    assert of(0.0, 1.0) != of(0.0, 2.0)
    assert of(0.0, 1.0, size=9) == of(0.0, 2.0, size=9) != of(0.0, 1.0, size=10)


@pytest.mark.parametrize("more", [{}, {"hard": [1]}])
def test_an_endless_train_split_is_not_evaluated_by_default(more):
    data = data_of("mine", {"train": Stream(), **more})
    with pytest.raises(UserError, match="no length, so add a val or test split"):
        data.part_to_evaluate()


RUN = ["dataset._target_=test_samples.make_data", "trainer._target_=test_samples.OfDicts"]
RUN += ["model._target_=test_samples.Net", "epochs=2", "batch_size=4", "checkpoint.every=1"]
RUN += ["eval_every=5", "monitor=hard/loss", "dataset.workers=0"]


def test_an_export_of_data_of_any_form_is_refused(forks, tmp_path):
    assert forks.run(tmp_path, *RUN, "report=false", "run_dir=run").code == 0
    refused = forks.run(
        tmp_path, "task=export", "run=run", "format=torch_export", "trusted=[test_samples]"
    )
    assert refused.code == 2
    assert "Use the run's model.safetensors, or call stoker.load and export" in refused.err
    card = (tmp_path / "run" / "model.md").read_text(encoding="utf-8")
    assert "## Limits\n- The test samples come from the same source" in card


def test_what_torch_refuses_is_two_lines_and_a_traceback_if_debugged(forks, tmp_path):
    (tmp_path / "configs" / "dataset").mkdir(parents=True)
    own = tmp_path / "configs" / "dataset" / "mine.yaml"
    own.write_text("_target_: test_samples.make_data\n", encoding="utf-8")
    wrong = ["dataset=mine", RUN[1], "model._target_=torch.nn.Linear", "+model.in_features=5"]
    wrong += ["+model.out_features=3", "trusted=[test_samples]", "run_dir=run"]
    done = forks.run(tmp_path, *wrong)
    assert done.code == 2 and not (tmp_path / "run").exists(), done.err
    first, second = done.err.splitlines()
    assert "mat1 and mat2 shapes cannot be multiplied (" in first and first.startswith("error: ")
    assert second.startswith("RuntimeError in compute_loss (") and "test_samples.py:" in second
    assert (
        "The batch: batch['inputs'] (23, 6) torch.float32, batch['boxes'] list of 23, batch['boxes'][0]"
        in second
    )
    assert second.endswith(". debug=true shows the traceback.")
    debugged = forks.run(tmp_path, *wrong, "debug=true")
    assert debugged.code == 2 and debugged.err.startswith("Traceback"), debugged.err
    assert debugged.err.endswith(done.err)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_any_number_of_workers(forks, tmp_path):
    whole = forks.run(tmp_path, *RUN, "run_dir=whole")
    assert whole.code == 0 and whole.err == "", whole.err
    assert "23 train, 9 val, 5 hard, 7 test samples" in whole.out
    kill = {"signal": signal.SIGKILL, "watch": "cut/checkpoints/step_*", "count": 4, "delay": 0}
    again = [*RUN[:-1], "run_dir=cut", "report=false"]
    cut = forks.run(tmp_path, *again, "dataset.workers=2", signals=[kill])
    assert cut.code == -9, cut.err
    assert forks.run(tmp_path, *again, "dataset.workers=0").code == 0
    states = [checkpoint.newest(tmp_path / name / "checkpoints")[1] for name in ("whole", "cut")]
    assert_same(states[0]["model"], states[1]["model"])
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["best"]["name"] == "hard/loss"


def test_chance_is_that_of_the_samples_that_limit_val_chooses():
    labels = (torch.arange(40) % 3 == 0).long()
    parts = [TensorSplit(torch.randn(40, 4), labels) for _ in range(2)]
    data = Data("tensors", *parts, None, (4,), 2)
    (_, loader, _), _ = make_loaders(data, batch_size=4, limit_val=7)
    examination = examine.Classes("val", loader, data)
    for inputs, targets in loader:
        examination.update(inputs[:, :2], targets)
    examination.compute()
    counts = labels[loader.order(0)].bincount()
    assert examination.evaluation.chance == counts.max().item() / 7
