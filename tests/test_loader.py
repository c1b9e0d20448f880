"""The same batches from every loader, for any number of workers, after any seek; no global
generator is touched.
"""

import copy
import functools
import random
import re
import weakref

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stoker import Trainer
from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader, HostLoader, make_loaders
from stoker.data.order import permutation
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import IterableLoader, resident_bytes, seekable


def images(n=50, **changes):
    """Every pixel of image i is i, so that a batch tells which samples are in it."""
    inputs = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 1, 8, 8).contiguous()
    split = TensorSplit(inputs, torch.arange(n) % 5)
    return Data(
        "images", split, split, None, (1, 8, 8), 5, **{"mean": [0.5], "std": [0.25], **changes}
    )


def table(n=23, dtype=torch.float64):
    split = TensorSplit(torch.randn(n, 3, dtype=dtype), torch.randn(n, 2))
    return Data("table", split, None, split, (3,), 2, kind="regression")


def same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for (inputs, targets), (others, labels) in zip(first, second, strict=True):
        assert (
            inputs.dtype == others.dtype
            and torch.equal(inputs, others)
            and targets.dtype == labels.dtype
            and torch.equal(targets, labels)
        )
    return True


def test_permutation_is_a_function_of_seed_and_epoch():
    orders = [permutation(100, seed, epoch).tolist() for seed in range(5) for epoch in range(5)]
    assert (
        all(sorted(order) == list(range(100)) for order in orders)
        and len({tuple(order) for order in orders}) == 25
    )
    assert orders[7] == permutation(100, 1, 2).tolist()


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("n", "drop_last"), [(33, False), (33, True), (64, True), (70, False)])
def test_a_batch_size_above_the_number_of_samples_is_that_of_a_data_loader(n, drop_last, resident):
    data = images(n)
    dataset = TensorDataset(data.train.inputs, data.train.targets)
    expected = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=drop_last)
    options = {"batch_size": 64, "drop_last": drop_last, "resident": resident}
    if len(expected) == 0:
        with pytest.raises(
            UserError, match="33 training samples, so drop_last=true would drop all of them"
        ):
            make_loaders(data, **options)
        return
    (loader, _, _), _ = make_loaders(data, **options)
    assert len(loader) == len(expected)
    for epoch in range(2):
        given = [targets.tolist() for _, targets in loader]
        assert list(map(len, given)) == [len(targets) for _, targets in expected]
        drawn = sorted(label for targets in given for label in targets)
        assert drawn == sorted(data.train.targets.tolist()), epoch
    loader.seek(5)
    assert len(list(loader)) == len(expected)
    loader.close()


@pytest.mark.parametrize("resident", [True, False])
def test_a_training_in_one_batch_of_all_samples_is_plain_torch_s(resident):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, 33, 3, generator=generator, dtype=torch.float64)
    split = TensorSplit(inputs, targets)
    data = Data("table", split, None, split, (3,), 3, kind="regression")
    (loader, _, _), _ = make_loaders(data, batch_size=64, resident=resident)
    model = torch.nn.Linear(3, 3, dtype=torch.float64)
    expected = copy.deepcopy(model)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = sgd(expected.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(expected(inputs), targets).backward()
        optimizer.step()
    trainer = Trainer(model, torch.nn.MSELoss(), sgd, epochs=5, grad_accum_steps=2, device="cpu")
    trainer.fit(loader)
    loader.close()
    assert trainer.step == 5
    for weight, same in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight, same, rtol=0, atol=1e-12)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("augment", [[], ["flip", "crop", "cutout", "mixup"]])
def test_streamed_equals_resident(workers, augment, drop_last):
    options = {"seed": 3, "shuffle": True, "augment": augment, "drop_last": drop_last}
    resident, streamed = (
        DeviceLoader(images(), "train", 7, **options),
        HostLoader(images(), "train", 7, workers=workers, **options),
    )
    for _ in range(2):
        assert same(resident, streamed)
    for epoch, position in [(1, 3), (0, 0), (4, 7), (2, len(resident))]:
        resident.seek(epoch, position)
        streamed.seek(epoch, position)
        assert same(resident, streamed)


@pytest.mark.parametrize(
    "augment", [[], ["flip", {"crop": 2}, "shift", "cutout", "cutmix", "mixup"]]
)
def test_batches_gathered_together_equal_batches_gathered_one_by_one(augment):
    split = TensorSplit(
        torch.randint(0, 256, (53, 3, 9, 8), dtype=torch.uint8), torch.arange(53) % 5
    )
    data = Data(
        "noise", split, None, None, (3, 9, 8), 5, mean=[0.1, 0.5, 0.4], std=[0.2, 0.3, 0.25]
    )
    together, single = (
        DeviceLoader(data, "train", 4, shuffle=True, augment=augment) for _ in range(2)
    )
    assert together.batches_at_once == 16
    single.batches_at_once = 1
    for epoch, position in [(0, 0), (1, 5), (2, 13)]:
        together.seek(epoch, position)
        single.seek(epoch, position)
        assert same(together, single)


def test_an_alternating_flip_flips_each_sample_in_every_second_epoch():
    ramp = torch.arange(8, dtype=torch.uint8).expand(40, 1, 8, 8).contiguous()
    ramp[:, 0, 0] = torch.arange(40, dtype=torch.uint8).view(
        40, 1
    )  # the first row tells which sample it is
    data = Data("ramps", TensorSplit(ramp, torch.arange(40) % 5), None, None, (1, 8, 8), 5)
    loader, flipped = (
        DeviceLoader(data, "train", 7, shuffle=True, augment=[{"flip": "alternate"}]),
        [],
    )
    for _ in range(4):
        batches = torch.cat([(inputs * 255).round() for inputs, _ in loader])
        order = batches[:, 0, 0, 0].long().argsort()
        flipped.append(batches[order, 0, 1, 0] == 7)
    assert 5 < flipped[0].sum() < 35
    for epoch in range(1, 4):
        assert torch.equal(flipped[epoch], ~flipped[epoch - 1])


@pytest.mark.parametrize(
    "loader",
    [
        lambda data, **o: DeviceLoader(data, "train", 6, **o),
        lambda data, **o: HostLoader(data, "train", 6, workers=2, **o),
    ],
)
def test_a_seek_gives_the_tail_of_the_epoch(loader):
    loader = loader(images(), shuffle=True, augment=["shift"])
    epochs = [list(loader) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [9] * 3 == [len(loader)] * 3
    assert len({epoch[0][0].numpy().tobytes() for epoch in epochs}) == 3
    for epoch, position in [(2, 0), (0, 4), (1, 8), (1, 9)]:
        loader.seek(epoch, position)
        assert same(loader, epochs[epoch][position:])
        if epoch < 2:
            assert same(loader, epochs[epoch + 1])
    # A stop in the middle: the next iter() is the next epoch, and a seek goes back.
    loader.seek(0, 2)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    assert same(loader, epochs[1])
    loader.seek(0, 4)
    assert same(loader, epochs[0][4:])


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_is_every_sample_once(drop_last):
    loader = DeviceLoader(
        images(mean=[0.0], std=[1.0]), "train", 8, shuffle=True, drop_last=drop_last
    )
    seen = torch.cat([(inputs[:, 0, 0, 0] * 255).round().long() for inputs, _ in loader]).tolist()
    assert len(seen) == len(set(seen)) == (48 if drop_last else 50) and seen != sorted(seen)
    assert seen == permutation(50, 0, 0).tolist()[: len(seen)]


def test_epochs_are_augmented_differently():
    loader = DeviceLoader(images(), "train", 25, augment=["shift"])
    first, second = list(loader), list(loader)
    assert torch.equal(first[0][1], second[0][1]) and not torch.equal(first[0][0], second[0][0])


def test_only_what_is_needed_is_read():
    class Counted(TensorSplit):
        def __getitem__(self, index):
            read.extend(index)
            return super().__getitem__(index)

    read, data = [], images()
    data.train = Counted(data.train.inputs, data.train.targets)
    loader = HostLoader(data, "train", 6, seed=1, shuffle=True)
    loader.seek(2, 5)
    batches = iter(loader)
    next(batches)
    assert read == permutation(50, 1, 2)[30:36].tolist()
    assert len(list(batches)) == 3 and read == permutation(50, 1, 2)[30:].tolist()


@pytest.mark.parametrize("kind", [DeviceLoader, HostLoader])
def test_evaluation_keeps_file_order_and_normalises(kind):
    data = images()
    loader = kind(data, "val", 100)
    for _ in range(2):
        ((inputs, targets),) = loader
        torch.testing.assert_close(inputs, (data.val.inputs.float() / 255 - 0.5) / 0.25)
        assert torch.equal(targets, data.val.targets)
    next(iter(loader))
    assert len(next(iter(loader))[0]) == 50


@pytest.mark.parametrize("kind", [DeviceLoader, HostLoader])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_keep_their_type_and_are_copies(kind, dtype):
    data = table(dtype=dtype)
    before = data.test.inputs.clone()
    for inputs, targets in kind(data, "test", 10):
        assert (
            inputs.dtype == dtype and targets.dtype == torch.float32 and targets.shape[1:] == (2,)
        )
        inputs.zero_()
    assert torch.equal(data.test.inputs, before)


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_left_alone(workers):
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    loader = HostLoader(
        images(), "train", 7, workers=workers, shuffle=True, augment=["flip", "cutmix"]
    )
    list(loader), list(loader)
    list(DeviceLoader(images(), "train", 7, shuffle=True, augment=["flip", "mixup"]))
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state


def test_batches_do_not_depend_on_the_global_generator():
    torch.manual_seed(1)
    first = list(DeviceLoader(images(), "train", 7, shuffle=True, augment=["flip", "shift"]))
    torch.manual_seed(2)
    assert same(first, HostLoader(images(), "train", 7, shuffle=True, augment=["flip", "shift"]))


class Refusing(TensorSplit):
    def __getitem__(self, index):
        raise UserError("cat/7.jpg: this image cannot be read.\nReplace or remove the file.")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_mistake_in_a_worker_stays_two_lines(workers):
    data = images()
    data.train = Refusing(data.train.inputs, data.train.targets)
    with pytest.raises(UserError) as caught:
        list(HostLoader(data, "train", 7, workers=workers))
    assert str(caught.value) == "cat/7.jpg: this image cannot be read.\nReplace or remove the file."


def test_workers_end_with_the_loader():
    """A cycle of references would leave them to the garbage collector, which takes 5 s a worker to
    end them.
    """
    loader = HostLoader(images(), "train", 7, workers=1, shuffle=True, augment=["flip", "mixup"])
    list(loader)
    (worker,) = loader.workers.processes
    gone = weakref.ref(loader)
    del loader
    assert gone() is None and not worker.is_alive() and worker.exitcode == 0


def test_make_loaders_chooses_and_says_why(monkeypatch):
    data = images()
    (train, val, test), why = make_loaders(data, batch_size=10, eval_batch_size=25, seed=4)
    assert (
        isinstance(train, DeviceLoader)
        and test is None
        and re.fullmatch(r"resident on cpu, 8 KiB \([\d,]+ MiB free\)", why)
    )
    assert (len(train), len(val), val.batch_size, train.samples, train.nbytes) == (
        5,
        2,
        25,
        50,
        3600,
    )
    monkeypatch.setattr("stoker.data.loader.free_memory", lambda device: 2 * 7200 - 1)
    (streamed, _, _), why = make_loaders(data, batch_size=10, seed=4)
    assert isinstance(streamed, HostLoader)
    assert why == "streamed with 0 workers, 8 KiB (15 KiB free)"
    assert (
        resident_bytes(train, val) == train.nbytes + val.nbytes
        and resident_bytes(streamed, None) == 0
    )
    assert same(train, streamed)
    (forced, _, _), why = make_loaders(data, batch_size=10, seed=4, resident=True)
    assert isinstance(forced, DeviceLoader) and why == "resident on cpu, as requested"
    (asked, _, _), why = make_loaders(data, batch_size=10, resident=False, workers=1)
    assert asked.workers.loader.num_workers == 1 and why == "streamed with 1 worker, as requested"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 51, "drop_last": True}, "batch_size=51.* only 50 "),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 5, "eval_batch_size": -1}, "eval_batch_size=-1"),
        ({"batch_size": 5, "resident": "yes"}, "dataset.resident=yes"),
        ({"batch_size": 5, "workers": -1}, "dataset.workers=-1"),
        ({"batch_size": 5, "workers": 2, "resident": True}, "does not use workers"),
        (
            {"batch_size": 5, "timeout": 5},
            "dataset.timeout: .* does not use workers.\\n.*remove this key",
        ),
        (
            {"batch_size": 5, "timeout": 0, "resident": True},
            "dataset.timeout: .* does not use workers",
        ),
        ({"batch_size": 5, "timeout": 5, "resident": False, "workers": 0}, None),
        ({"batch_size": 5, "augment": ["crop"]}, None),
        ({"batch_size": 5, "augment": [{"crop": 8}]}, "choose a number less than 8"),
    ],
)
def test_refused(options, words):
    if words is None:
        assert make_loaders(images(), **options)
        return
    with pytest.raises(UserError, match=words):
        make_loaders(images(), **options)


class Own:
    """A split of the user's own: what a list of indices gives is told."""

    nbytes = 100

    def __init__(self, give):
        self.give, self.targets = give, torch.arange(20) % 2

    def __len__(self):
        return 20

    def __getitem__(self, indices):
        torch.rand(())
        return self.give(indices)


@pytest.mark.parametrize(
    ("give", "error", "words"),
    [
        (
            lambda indices: (torch.zeros(len(indices), 3, 9, 8), torch.zeros(len(indices))),
            None,
            None,
        ),
        (
            lambda indices: (torch.zeros(len(indices), 1, 9, 8), torch.zeros(1)),
            UserError,
            r"a pair of tensors: inputs of shape \(1, 3, 9, 8\)",
        ),
        (
            lambda indices: (torch.zeros(len(indices), 3, 9, 9), torch.zeros(1)),
            UserError,
            r"of shape \(1, 3, 9, 8\)",
        ),
        (
            lambda indices: (torch.zeros(3, 9, 8), torch.tensor([1])),
            UserError,
            "a pair of tensors",
        ),
        (lambda indices: torch.zeros(len(indices), 3, 9, 8), UserError, "a pair of tensors"),
        (
            lambda indices: (torch.zeros(len(indices), 3, 9, 8), torch.tensor(1)),
            UserError,
            "a pair of tensors",
        ),
        (
            lambda indices: {}[0],
            TrainingError,
            r"Sample 0 of the train split of own cannot be read: KeyError: 0 \(.*\)",
        ),
    ],
)
def test_the_first_sample_of_a_users_own_split_is_looked_at(give, error, words):
    data, state = Data("own", Own(give), None, None, (3, 9, 8), 2), torch.get_rng_state()
    if error is None:
        (train, _, _), why = make_loaders(data, batch_size=4, workers=0)
        assert isinstance(train, HostLoader) and "workers, Own has no tensors(), which would" in why
        with pytest.raises(
            UserError, match=r"resident=true: Own has no tensors\(\).*\n.*resident=false"
        ):
            make_loaders(data, batch_size=4, resident=True)
    else:
        with pytest.raises(error, match=words):
            make_loaders(data, batch_size=4, resident=False, workers=0)
    assert torch.equal(torch.get_rng_state(), state)


class Drawing:
    """A split of the user's own that draws as it reads, from each of the global generators."""

    nbytes, targets = 23 * 24, torch.arange(23) % 2

    def __len__(self):
        return 23

    def __getitem__(self, indices):
        drawn = [[torch.rand(()).item(), random.random(), numpy.random.rand()] for _ in indices]
        return torch.tensor(drawn), self.targets[indices]

    def tensors(self):
        return self[list(range(23))]


def test_what_a_users_own_split_draws_is_a_function_of_seed_part_epoch_and_batch():
    data = Data("drawing", Drawing(), Drawing(), None, (3,), 2)
    numbers = {}
    for workers in (0, 2):
        before = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
        for seed in (0, 1):
            loader = HostLoader(data, "train", 4, workers=workers, seed=seed, shuffle=True)
            numbers[seed, workers] = epochs = [list(loader), list(loader)]
            loader.seek(1, 2)
            assert same(loader, epochs[1][2:])
            loader.close()
        assert (torch.get_rng_state() == before[0]).all() and random.getstate() == before[1]
        assert str(numpy.random.get_state()) == before[2]
        [random.random(), numpy.random.rand(), torch.rand(1)]  # whatever else draws
    for seed in (0, 1):
        for epoch in (0, 1):
            assert same(numbers[seed, 0][epoch], numbers[seed, 2][epoch])
    val = HostLoader(data, "val", 4)
    epochs = [*numbers[0, 0], *numbers[1, 0], list(val)]
    assert same(epochs[-1], val)  # what is evaluated is the same each time
    for resident in (DeviceLoader(data, "train", 23, seed=seed) for seed in (0, 0, 1)):
        epochs.append(list(resident))
    assert same(epochs[-3], epochs.pop(-2))
    drawn = torch.cat([inputs for epoch in epochs for inputs, _ in epoch])
    assert len(drawn) == 7 * 23 and [len(column.unique()) for column in drawn.T] == [7 * 23] * 3


def test_what_does_not_fit_in_the_memory_says_so():
    class Large(TensorSplit):
        def tensors(self):
            return torch.empty(2**60, dtype=torch.uint8), self.targets

    split = Large(torch.zeros(4, 2), torch.arange(4) % 2)
    with pytest.raises(
        TrainingError,
        match="train split of huge .* does not fit in the memory of cpu.\nType dataset.res",
    ):
        make_loaders(Data("huge", split, None, None, (2,), 2), batch_size=2, resident=True)


class Noisy(Dataset):
    """A data set that draws from torch's global generator, as torchvision's transforms do."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor(index) + torch.rand(())


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"generator": torch.Generator()}])
@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(20.0)), Noisy()])
def test_a_plain_dataloader_becomes_seekable(dataset, options):
    def epoch(loader, number, position=0):
        loader.seek(number, position)
        return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader]

    loader = seekable(DataLoader(dataset, batch_size=6, shuffle=True, **options), seed=3)
    assert isinstance(loader, IterableLoader) and (
        len(loader),
        loader.batch_size,
        loader.samples,
    ) == (4, 6, 20)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    epochs = [epoch(loader, number) for number in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert len({str(batches) for batches in epochs}) == 3
    if isinstance(dataset, Noisy):  # every sample has its own noise
        assert len({round(value % 1, 5) for batch in epochs[0] for value in batch}) == 20
    assert (
        epoch(loader, 1, 2) == epochs[1][2:]
        and epoch(loader, 0) == epochs[0]
        and epoch(loader, 2, 4) == []
    )
    other = seekable(DataLoader(dataset, batch_size=6, shuffle=True, **options), seed=3)
    draws = []
    other.seek(2)
    for _ in other:  # a model that draws in between changes nothing, and is not changed
        draws.append(torch.rand(()).item())
    torch.manual_seed(2)
    assert draws == [torch.rand(()).item() for _ in range(4)] and epoch(other, 2) == epochs[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_profiler_sees_the_batches_of_a_dataloader(workers):
    def read():
        loader = DataLoader(range(4), 2, shuffle=True, num_workers=workers)
        return [batch.tolist() for batch in seekable(loader, 0)]

    unseen = read()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert read() == unseen
    names = [event.name for event in profiler.events()]
    assert sum(name.startswith("enumerate(DataLoader)") for name in names) == 3  # one is the end


def test_seekable_keeps_what_can_seek_and_reads_any_iterable():
    loader = DeviceLoader(images(), "train", 7)
    assert seekable(loader, 0) is loader
    assert list(seekable([1, 2, 3], 0)) == [1, 2, 3]
    assert list(seekable((i for i in range(3)), 0)) == [0, 1, 2]
