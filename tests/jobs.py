"""What the tests of several processes run in each: a data set, Trainers and callbacks that write
down, scripts.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from stoker import Trainer, load
from stoker.data.datasets import Data, TensorSplit, synthetic
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.models.cnn import CNN
from stoker.trainer.callbacks import EMA, Callback, Checkpoint
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.metrics import MAE, MSE, R2, Accuracy, Confusion, TopK

RANK = int(os.environ.get("RANK", "0"))


def numbered(n=57, val=31, test=9, features=8, classes=4, kind="classification"):
    """Samples that can be learnt; the first feature of each is its number, divided by 100."""
    generator = torch.Generator().manual_seed(0)
    total = n + val + test
    inputs = torch.randn(total, features, generator=generator)
    targets = inputs[:, -classes:] + 0.5 * torch.randn(total, classes, generator=generator)
    inputs[:, 0] = torch.arange(total) / 100
    if kind == "classification":
        targets = targets.argmax(1)
    parts = zip(inputs.split([n, val, test]), targets.split([n, val, test]), strict=True)
    train, val, test = (TensorSplit(*part) if len(part[0]) else None for part in parts)
    return Data("numbered", train, val, test, (features,), classes, kind=kind)


def pictures():
    """80 images in float64, and 4 classes that can be learnt."""
    data = synthetic(n=80, in_shape=(1, 8, 8), num_classes=4)
    for part in (data.train, data.val, data.test):
        part.inputs = part.inputs.double() / 64
    return data


def double_cnn(in_shape, num_classes):
    return CNN(in_shape, num_classes, channels=[4, 8]).double()


class Recording(Trainer):
    """Writes the number of each step and of the samples in its batch to `given.<rank>`, a line a
    step.
    """

    def train_step(self, batch):
        numbers = (batch[0][:, 0] * 100).round().int().tolist()
        with open(f"given.{RANK}", "a") as file:
            file.write(json.dumps([self.step + 1, numbers]) + "\n")
        return super().train_step(batch)


class Penalised(Recording):
    """A loss of one's own."""

    def compute_loss(self, batch):
        inputs, targets = batch
        outputs = self.model(inputs)
        return self.loss(outputs, targets) + 0.1 * outputs.square().mean(), outputs


class Scaled(Recording):
    """Its fp16 scaler begins so high that the first steps are skipped, and changes its scale every
    second step.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.scaler.load_state_dict(
            self.scaler.state_dict() | {"scale": 2.0**22, "growth_interval": 2}
        )


class StopAt(Callback):
    """Stops after a step: `stop` on all ranks, `interrupt` on one."""

    def __init__(self, step, rank=-1):
        self.step, self.rank = step, rank

    def on_step_end(self, trainer):
        if trainer.step == self.step and self.rank in (-1, RANK):
            (trainer.stop if self.rank == -1 else trainer.interrupt)(
                f"{self.step} steps are enough"
            )


class Slow(Callback):
    """Waits so many seconds after each step, on all ranks or on one."""

    def __init__(self, seconds, rank=-1):
        self.seconds, self.rank = seconds, rank

    def on_step_end(self, trainer):
        if self.rank in (-1, RANK):
            time.sleep(self.seconds)


# Scripts: python jobs.py NAME STRATEGY


def make_trainer(strategy, model=None, **settings):
    torch.manual_seed(0)
    model = model or torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    )
    defaults = {
        "loss": torch.nn.CrossEntropyLoss(),
        "device": "cpu",
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    }
    return Trainer(model, strategy=strategy, **(defaults | settings))


def write(**results):
    """For the test: `results.<rank>`."""
    Path(f"results.{RANK}").write_text(json.dumps(results))


def evaluate(strategy):
    """Evaluates and predicts 1 to 9 samples in batches of 1 to 9, of which some ranks have none."""
    results = {}
    metrics = {"acc": Accuracy(), "top2": TopK(2), "confusion": Confusion(4)}
    with make_trainer(strategy, metrics=metrics) as trainer:
        for samples, size in [
            (1, 1),
            (2, 1),
            (3, 2),
            (4, 3),
            (5, 4),
            (6, 9),
            (7, 3),
            (8, 5),
            (9, 4),
            (9, 2),
            (9, 1),
        ]:
            loader = DeviceLoader(numbered(val=samples), "val", size)
            results[f"{samples} in {size}"] = [
                trainer.evaluate(loader),
                trainer.predict(loader).tolist(),
            ]
        loader = HostLoader(numbered(val=9), "val", 4, workers=2)
        results["workers"] = [trainer.evaluate(loader), trainer.predict(loader).tolist()]
        loader.close()
        data = numbered(val=9).val
        loader = DataLoader(TensorDataset(*data.tensors()), batch_size=4)
        results["DataLoader"] = [trainer.evaluate(loader), trainer.predict(loader).tolist()]
        loader = DataLoader(data.inputs, batch_size=2)
        results["inputs alone"] = trainer.predict(loader).tolist()
        results["a list of batches"] = trainer.predict(
            [data.inputs[:1], data.inputs[1:7], data.inputs[7:]]
        ).tolist()
        usual = trainer.predict_batch

        def nested(batch):
            outputs = usual(batch)
            return outputs[:, 0], [
                row[: 1 + i % 2].tolist() for i, row in enumerate(outputs[:, 1:])
            ]

        trainer.predict_batch = nested
        first, ragged = trainer.predict(data.inputs.split(4))
        results["nested"] = [first.tolist(), [row[0] for row in ragged]]
    metrics = {"r2": R2(), "mse": MSE(2.0), "mae": MAE(2.0)}
    with make_trainer(strategy, loss=torch.nn.MSELoss(), metrics=metrics) as trainer:
        for samples, size in [(1, 1), (2, 2), (3, 1), (5, 2), (7, 7), (9, 5)]:
            loader = DeviceLoader(numbered(val=samples, kind="regression"), "val", size)
            results[f"{samples} numbers in {size}"] = trainer.evaluate(loader)
        data = numbered(val=7, kind="regression")
        data.val.targets[:] = 0.1  # the mean over processes of such numbers is not 0.1
        results["constant"] = trainer.evaluate(DeviceLoader(data, "val", 3))
    write(**results)


def plain(strategy):
    """A fit as in a notebook, on DataLoaders as everybody writes them; one run is cut off and
    continued.
    """
    data = numbered()
    train, val = (TensorDataset(*part.tensors()) for part in (data.train, data.val))
    loaders = DataLoader(train, batch_size=10, shuffle=True), DataLoader(val, batch_size=9)
    for folder, steps, resume in [
        ("whole", None, None),
        ("cut", 8, None),
        ("cut", None, "cut/step_00000008.ckpt"),
    ]:
        callbacks = [EMA(0.9), *([StopAt(steps)] if steps else []), Checkpoint(folder, every=8)]
        with make_trainer(
            strategy, callbacks=callbacks, metrics={"acc": Accuracy()}, epochs=3, log_every=4
        ) as trainer:
            trainer.fit(*loaders, resume=resume)


def with_distributed_sampler(strategy):
    data = TensorDataset(*numbered().train.tensors())
    loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data, 2, RANK))
    make_trainer(strategy).fit(loader)


class Median:
    """A metric that cannot be added up."""

    def reset(self):
        self.values = []

    def update(self, outputs, targets):
        self.values.append(outputs)

    def compute(self):
        return torch.cat(self.values).median()


def with_a_median(strategy):
    make_trainer(strategy, metrics={"median": Median()}).evaluate(
        DeviceLoader(numbered(), "val", 9)
    )


def small_batches(strategy):
    data = TensorDataset(*numbered().train.tensors())
    make_trainer(strategy).fit(DataLoader(data, batch_size=1))


def loads(strategy):
    """A run, as a teacher is loaded in each process of a training."""
    with make_trainer(strategy):
        weights = load("run").module.state_dict()
    save_file(weights, f"loaded.{RANK}")


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](*sys.argv[2:])
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 3)
    sys.stdout.flush()
    os._exit(0)
