"""A training that was cut off and continued ends with the very bits of one that was not, whatever
changed between.
"""

import functools
import itertools

import pytest
import torch
from conftest import assert_same, make_data, make_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from stoker import Trainer
from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.models.cnn import CNN
from stoker.tasks.running import Run
from stoker.trainer import checkpoint, schedules
from stoker.trainer.callbacks import EMA, Callback, Checkpoint, EarlyStopping, Lookahead
from stoker.trainer.metrics import Accuracy

# 60 training images are 8 batches of 8, the last of 4; 3 epochs are 24 steps.
BATCH, STEPS = 8, 24


class Killed(BaseException):
    """What no code is prepared for: as after a kill, nothing of the step is finished."""


class Doomed(Trainer):
    """Dies at `die_at`: (steps done, number of the micro-batch), or (steps done, "evaluation")."""

    die_at = None

    def train_step(self, batch):
        self.number = itertools.count()
        return super().train_step(batch)

    def compute_loss(self, batch):
        here = next(self.number) if self.module.training else "evaluation"
        if (self.step, here) == self.die_at:
            raise Killed
        return super().compute_loss(batch)


def images():
    """60 training and 25 validation images with 3 classes, half of which can be learnt."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (85, 1, 8, 8), generator=generator, dtype=torch.uint8)
    targets = torch.randint(0, 3, (85,), generator=generator)
    inputs[::2] //= 1 + targets[::2].view(-1, 1, 1, 1).to(torch.uint8)
    train, val = TensorSplit(inputs[:60], targets[:60]), TensorSplit(inputs[60:], targets[60:])
    return Data("images", train, val, None, (1, 8, 8), 3, mean=(0.5,), std=(0.25,))


def ours(kind, batch=BATCH):
    def make():
        data = images()
        augment = ["flip", {"crop": 2}, {"mixup": 0.3}]
        return kind(data, "train", batch, shuffle=True, augment=augment, seed=5), kind(
            data, "val", 10, seed=5
        )

    return make


def plain(workers):
    """DataLoaders as everybody writes them, shuffled by the global generator."""

    def make():
        data = images()
        parts = [
            torch.utils.data.TensorDataset(part.inputs / 255, part.targets)
            for part in (data.train, data.val)
        ]
        train, val = (
            functools.partial(torch.utils.data.DataLoader, part, num_workers=workers)
            for part in parts
        )
        return train(batch_size=BATCH, shuffle=True), val(batch_size=10)

    return make


LOADERS = {
    "resident": ours(DeviceLoader),
    **{f"{n} workers": ours(functools.partial(HostLoader, workers=n)) for n in (0, 4, 2)},
    "DataLoader": plain(2),
    "one batch of all": ours(DeviceLoader, 64),
}


def fit(
    folder,
    loaders="resident",
    *,
    die_at=None,
    callbacks=lambda: [EMA(0.9)],
    every=3,
    patience=50,
    **settings,
):
    """The trainer after a fit from the newest checkpoint in `folder`, or from step 0, to its end or
    until it dies.

    It has all that has a state: dropout, BatchNorm, a schedule a step, micro-batches, clipping,
        EMA, patience.
    """
    torch.manual_seed(0)
    callbacks = [*callbacks(), EarlyStopping(patience), Checkpoint(folder, every=every, keep=100)]
    usual = {
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2),
        "scheduler": functools.partial(schedules.cosine, warmup=3),
        "grad_accum_steps": 3,
        "max_grad_norm": 0.5,
        "log_every": 5,
        "eval_every": 6,
    }
    scaler = settings.pop("scaler", None)
    trainer = Doomed(
        CNN((1, 8, 8), 3, channels=[4, 8], dropout=0.3),
        torch.nn.CrossEntropyLoss(),
        metrics={"acc": Accuracy()},
        callbacks=callbacks,
        device="cpu",
        **({"max_steps": STEPS} | usual | settings),
    )
    trainer.scaler, trainer.die_at = scaler() if scaler else trainer.scaler, die_at
    found, (train_loader, val_loader) = checkpoint.newest(folder), LOADERS[loaders]()
    try:
        trainer.fit(train_loader, val_loader, resume=found and found[0])
        assert die_at is None
    except Killed:
        assert trainer.step == die_at[0]
    for loader in (train_loader, val_loader):
        getattr(loader, "close", bool)()  # a DataLoader has none
    return trainer


def cut(folder, *deaths, loaders=("resident",), **settings):
    """The trainer after a fit that died so often and was continued each time, each time with the
    next loaders.
    """
    for die_at, kind in zip((*deaths, None), itertools.cycle(loaders)):
        trainer = fit(folder, kind, die_at=die_at, **settings)
    return trainer


def assert_same_end(trainer, whole, tmp_path, step=STEPS):
    """In memory and in the last checkpoint."""
    assert trainer.step == whole.step == step
    assert_same(trainer.state_dict(), whole.state_dict())
    states = [checkpoint.newest(tmp_path / name)[1] for name in ("cut", "whole")]
    assert states[0]["step"] == step
    assert_same(*states)


# Where it was cut off


IN_AN_EPOCH, IN_THE_LAST = (7, 0), (17, 0)
BETWEEN_MICRO_BATCHES, IN_AN_EVALUATION = (13, 1), (12, "evaluation")
DEATHS = [IN_AN_EPOCH, BETWEEN_MICRO_BATCHES, IN_AN_EVALUATION, IN_THE_LAST]


@pytest.mark.parametrize("loaders", LOADERS)
def test_a_training_that_died_ends_as_if_nothing_had_been(tmp_path, loaders, large):
    whole = fit(tmp_path / "whole", loaders)
    for i, die_at in enumerate(DEATHS if large or loaders == "resident" else DEATHS[1:2]):
        (tmp_path / "cut").rename(tmp_path / f"cut {i}") if i else None
        assert_same_end(cut(tmp_path / "cut", die_at, loaders=[loaders]), whole, tmp_path)


@pytest.mark.parametrize("every", [8, None])
def test_a_resume_at_the_boundary_of_an_epoch(tmp_path, every):
    whole = fit(tmp_path / "whole", every=every, eval_every=None)
    died = fit(tmp_path / "cut", every=every, eval_every=None, die_at=(8, 0))
    assert max(checkpoint.files(tmp_path / "cut")) == died.step == 8
    assert_same_end(cut(tmp_path / "cut", every=every, eval_every=None), whole, tmp_path)


def test_before_the_first_checkpoint_and_after_the_last_step(tmp_path):
    whole = fit(tmp_path / "whole")
    assert_same_end(cut(tmp_path / "cut", (0, 0), (0, 2), (2, 1)), whole, tmp_path)
    assert_same_end(fit(tmp_path / "cut"), whole, tmp_path)  # there is nothing left to do


def test_every_step_can_be_the_last_one_before_a_resume(tmp_path, large):
    """From the checkpoint of each step, to the end."""
    whole = fit(tmp_path / "whole", every=1)
    for step in range(1, STEPS, 1 if large else 5):
        folder = tmp_path / f"from {step}"
        folder.mkdir()
        path = checkpoint.path_of(tmp_path / "whole", step)
        (folder / path.name).write_bytes(path.read_bytes())
        trainer = fit(folder, every=STEPS)
        states = [trainer.state_dict(), whole.state_dict()]
        for state in states:  # a best one that lies in another folder is forgotten
            state["callbacks"].pop("Checkpoint")
        assert_same(*states, where=f"from step {step}")


# What was in it

FOUR_DEATHS = [(4, 1), (11, 2), (11, 0), (19, 1)]


def scaler():
    """One that skips the first steps, and then changes its scale every second step."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)


def of_torch(optimizer, total_steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=total_steps + 1)


JOBS = {
    "fp16 with a scale that changes, one cycle": {
        "precision": "fp16",
        "scaler": scaler,
        "scheduler": functools.partial(schedules.linear, warmup=0.3, start=0.04),
    },
    "Lookahead and EMA, an evaluation a step": {
        "callbacks": lambda: [Lookahead(every=5, decay=0.7, power=2), EMA(0.8)],
        "eval_every": 1,
        "log_every": 1,
    },
    "bf16, SGD, a schedule of torch, two EMAs": {
        "precision": "bf16",
        "optimizer": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        "scheduler": of_torch,
        "callbacks": lambda: [EMA(0.8), EMA(0.99)],
    },
    "Adagrad, more micro-batches than samples": {
        "optimizer": functools.partial(torch.optim.Adagrad, lr=0.05),
        "grad_accum_steps": 7,
        "precision": "fp16",
    },
    "no EMA, no clipping, so many steps": {
        "callbacks": list,
        "max_grad_norm": None,
        "epochs": None,
        "max_steps": 21,
    },
}


@pytest.mark.parametrize("job", JOBS)
def test_continued_four_times(tmp_path, job):
    """Died in the middle of the accumulation, twice at the same step."""
    settings = JOBS[job]
    whole = fit(tmp_path / "whole", **settings)
    last = settings.get("max_steps") or STEPS
    assert_same_end(cut(tmp_path / "cut", *FOUR_DEATHS, **settings), whole, tmp_path, last)
    if "scaler" in settings:
        done = int(next(iter(whole.optimizer.state.values()))["step"])
        assert done < STEPS and whole.scaler.get_scale() < 2.0**30


def test_the_patience_of_early_stopping_is_that_of_the_whole_run(tmp_path):
    impatient = {"patience": 6, "eval_every": 1}
    whole = fit(tmp_path / "whole", **impatient)
    assert 4 < whole.step < STEPS - 4
    deaths = [
        (step, 1) for step in range(whole.step - 4, whole.step)
    ]  # within the evaluations that were counted
    trainer = cut(tmp_path / "cut", *deaths, every=1, **impatient)
    assert trainer.stop_reason == whole.stop_reason
    assert_same_end(trainer, whole, tmp_path, step=whole.step)


# What was changed in between


@pytest.mark.slow
@pytest.mark.parametrize(
    "loaders",
    [["0 workers", "4 workers", "0 workers"], ["resident", "4 workers", "0 workers", "2 workers"]],
    ids=" -> ".join,
)
def test_another_number_of_workers_changes_no_bit(tmp_path, loaders):
    whole = fit(tmp_path / "whole", loaders[0])
    assert_same_end(
        cut(tmp_path / "cut", *FOUR_DEATHS[: len(loaders) - 1], loaders=loaders), whole, tmp_path
    )


@pytest.mark.parametrize(
    "changed",
    [{"log_every": 1, "eval_every": 1}, {"log_every": 7, "eval_every": None, "every": 1}],
    ids=str,
)
def test_logging_evaluating_and_saving_at_other_times_changes_no_weight(tmp_path, changed):
    whole = fit(tmp_path / "whole").state_dict()
    fit(tmp_path / "cut", die_at=IN_AN_EPOCH)
    fit(tmp_path / "cut", die_at=IN_THE_LAST, **changed)
    state = fit(tmp_path / "cut").state_dict()
    for name in ("step", "model", "optimizer", "scheduler", "scaler"):
        assert_same(state[name], whole[name], name)
    assert_same(state["callbacks"]["EMA"], whole["callbacks"]["EMA"])


# A resume is a seek


class Counted(torch.utils.data.Dataset):
    """A split of one's own that writes down what is read of it."""

    def __init__(self, split):
        self.split, self.targets, self.nbytes, self.read = split, split.targets, split.nbytes, []

    def __len__(self):
        return len(self.split)

    def __getitem__(self, indices):
        self.read.append(indices)
        return self.split[indices]


class Gathered(TorchDispatchMode):
    """Counts the gathers out of the tensor `inputs`, and writes down the first sample of each."""

    def __init__(self, inputs):
        super().__init__()
        self.inputs, self.first = inputs, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index_select.default and args[0] is self.inputs:
            self.first.append(int(args[2][0]))
        return function(*args, **(kwargs or {}))


class Reads(Callback):
    """How much had been read at the end of each step."""

    def __init__(self, read):
        self.read, self.counts = read, []

    def on_step_end(self, trainer):
        self.counts.append(len(self.read))


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """{step: a checkpoint that says it is from there}."""
    folder = tmp_path_factory.mktemp("far")
    trainer = make_trainer(callbacks=[Checkpoint(folder, every=10)], max_steps=10)
    trainer.fit(DeviceLoader(make_data(), "train", 8, shuffle=True))
    state = checkpoint.load(checkpoint.path_of(folder, 10))
    for step in (10, 10**6):
        state["step"] = state["scheduler"]["steps"] = step
        checkpoint.save(checkpoint.path_of(folder, step), state)
    return {step: checkpoint.path_of(folder, step) for step in (10, 10**6)}


@pytest.mark.parametrize("step", [10, 10**6])
def test_one_batch_is_read_before_the_first_new_step(far, step):
    data = make_data()
    epoch, position = divmod(step, 8)
    order = DeviceLoader(data, "train", 8, shuffle=True).order(epoch)
    data.train = Counted(data.train)
    watch = Reads(data.train.read)
    trainer = make_trainer(callbacks=[watch], max_steps=step + 3)
    trainer.fit(HostLoader(data, "train", 8, shuffle=True), resume=far[step])
    assert trainer.step == step + 3 and watch.counts == [1, 2, 3]
    assert data.train.read[0] == order[8 * position :][:8].tolist()


@pytest.mark.parametrize("step", [10, 10**6])
def test_one_gather_is_done_before_the_first_new_step(far, step):
    """Resident data: of some batches at once, the first of which is the next one."""
    loader = DeviceLoader(make_data(), "train", 8, shuffle=True)
    epoch, position = divmod(step, 8)
    with Gathered(loader.inputs) as gathered:
        watch = Reads(gathered.first)
        trainer = make_trainer(callbacks=[watch], max_steps=step + 3)
        trainer.fit(loader, resume=far[step])
    assert trainer.step == step + 3 and watch.counts[0] == 1
    assert gathered.first[0] == int(loader.order(epoch)[8 * position])


# Samplers with a generator of their own


def shuffled(dataset):
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(3))


class Around:
    """An iterable of your own around a DataLoader."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)


OWN_ORDERS = {
    "the sampler": lambda data: DataLoader(data, 4, sampler=shuffled(data)),
    "a sampler in a batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(shuffled(data), 4, False)
    ),
    "a batch sampler as the sampler": lambda data: DataLoader(
        data, batch_size=None, sampler=BatchSampler(shuffled(data), 4, False)
    ),
    "a loader in an iterable": lambda data: Around(
        DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    ),
}


@pytest.mark.parametrize("order", OWN_ORDERS)
def test_an_order_of_your_own_generator_is_that_of_the_whole_run(tmp_path, order):
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(12, 1), torch.arange(12) % 3)

    def trained(folder, epochs, **resume):
        batches = []

        class Watching(Trainer):
            def compute_loss(self, batch):
                batches.append((self.step, batch[0].flatten().tolist()))
                return super().compute_loss(batch)

        callbacks = [Checkpoint(folder, overwrite=True)]
        model = torch.nn.Linear(1, 3)
        trainer = make_trainer(model, Watching, epochs=epochs, callbacks=callbacks)
        trainer.fit(OWN_ORDERS[order](data), **resume)
        return batches

    whole = trained(tmp_path / "whole", 3)
    assert len({str(batches) for _, batches in whole}) > 6  # no epoch is like another
    begun = trained(tmp_path / "resumed", 2)
    assert begun + trained(tmp_path / "resumed", 3, resume=tmp_path / "resumed") == whole


@pytest.mark.parametrize("count", [torch.tensor([1, 2]), "\x1b]0;x", [2, 1], None, 1, 2])
def test_only_another_number_of_processes_is_a_warning(tmp_path, caplog, count):
    run = Run(tmp_path, Checkpoint(tmp_path / "checkpoints"), started=0.0)
    run.state = {"about": {"config": {}, "processes": count}}
    run.check_processes()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (type(count) is int and count == 2)
    assert all("has changed from 2 to 1: the weights" in warning for warning in warnings)
