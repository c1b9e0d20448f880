"""Unusual trainings, each a function of the strategy: `corners.py STRATEGY FOLDER NAME...` does
them as a rank.

What each gives, or the explanation of its error, is in FOLDER/NAME.RANK.
"""

import functools
import sys

import torch
from conftest import make_data, make_model
from torch import nn, optim

from examples.gan import GAN, GANTrainer
from stoker import Trainer
from stoker.command import ranks
from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader
from stoker.models.recompute import checkpoint_blocks
from stoker.models.whitened_cnn import Whiten, WhitenedCNN
from stoker.trainer import checkpoint, launch, optimizers, parallel, schedules
from stoker.trainer.callbacks import EMA, Callback, Freeze, Lookahead, NaNGuard
from stoker.trainer.errors import explanation_of
from stoker.trainer.loading import IterableLoader
from stoker.trainer.metrics import Accuracy

DOUBLE = torch.float64  # in which a sum in another order makes no difference of 1e-9
partial = functools.partial


# models


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.head(self.second(self.first(inputs).tanh()).tanh())


class SometimesUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, inputs):
        self.calls += self.training
        return self.always(inputs) + (self.sometimes(inputs) if self.calls % 2 else 0)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        pairs = [nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]) for _ in range(3)]
        self.blocks, self.named = nn.ModuleList(pairs), nn.ModuleDict({"a": nn.Linear(6, 6)})
        self.loose, self.head = nn.ParameterList([nn.Parameter(torch.ones(6))]), nn.Linear(6, 3)

    def forward(self, inputs):
        for first, second in self.blocks:
            inputs = inputs + second(first(inputs).tanh())
        return {"outputs": self.head(self.named["a"](inputs) * self.loose[0])}


class WithFeatures(Nested):
    """Returns features too, which the loss does not use."""

    def forward(self, inputs):
        return {**super().forward(inputs), "features": self.head(inputs).exp()}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(24, 3)

    def forward(self, inputs):
        return self.head(self.table((inputs * 3).long().clamp(-9, 9) + 10).flatten(1))


class Attention(nn.Module):
    """Its blocks are worked through again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inputs, self.head = nn.Linear(1, 8), nn.Linear(8, 3)
        layers = (
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.blocks = nn.ModuleList(layers)
        checkpoint_blocks(self)

    def forward(self, inputs):
        hidden = self.inputs(inputs.unsqueeze(-1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 16))
        self.second, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.second(self.first(inputs).unsqueeze(-1))[0][:, -1])


class Centred(nn.Module):
    """With a buffer that depends on the data that this process has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(0), 0.1)
        return self.linear(inputs - self.mean)


class Steep(nn.Module):
    """The gradient of its last weight is too large for the scale of fp16, and that of no other
    one.
    """

    def __init__(self):
        super().__init__()
        self.linear, self.weights = nn.Linear(6, 3), nn.Parameter(torch.zeros(4))

    def forward(self, inputs):
        shift = self.weights @ torch.tensor([0.0, 0.0, 0.0, 3e37])
        return self.linear(inputs) + torch.stack([shift, 0 * shift, 0 * shift])


class OwnNorm(nn.BatchNorm1d):
    """A class of one's own, which works as torch's does."""


class Reshaping(nn.Module):
    """A forward that takes no batch without samples."""

    def __init__(self):
        super().__init__()
        self.inputs, self.norm, self.head = nn.Linear(6, 8, bias=False), OwnNorm(8), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(
            self.norm(self.inputs(inputs).view(len(inputs), 2, -1).view(len(inputs), -1)).tanh()
        )


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(scale)

    def forward(self, inputs):
        return (self.linear(inputs) * self.scale).float()


# trainers


class OfDict(Trainer):
    def compute_loss(self, batch):
        inputs, targets = batch
        outputs = self.model(inputs)["outputs"]
        return self.loss(outputs, targets), outputs


class OwnStep(Trainer):
    def train_step(self, batch):
        loss, _ = self.compute_loss(batch)
        (loss * self.process_weight).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()


class OfInputs(GAN):
    """Its fakes are those of the inputs, whatever process they are in."""

    def __init__(self):
        super().__init__((6,))

    def forward(self, inputs):
        return self.generator(inputs.repeat(1, 3)[:, :16])


class OfSamples(GANTrainer):
    """Its evaluation is a mean over samples."""

    def compute_loss(self, batch):
        outputs = self.module.judge(self.model(batch[0]))
        return outputs.mean(), outputs


class Bypassing(Trainer):
    """The mistake: not through `self.model`."""

    def compute_loss(self, batch):
        inputs, targets = batch
        outputs = self.module[3](self.module[1](self.module[0](inputs)))
        return self.loss(outputs, targets), outputs


class Watching(Callback):
    """Keeps what `look` sees after each step."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_step_end(self, trainer):
        self.seen.append(self.look(trainer))


def small_data(dtype=torch.float32):
    return make_data(57, dtype=dtype)


def images():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, 6, 6, generator=generator, dtype=DOUBLE)
    targets = torch.randint(3, (60,), generator=generator)
    parts = TensorSplit(inputs[:47], targets[:47]), TensorSplit(inputs[47:], targets[47:])
    return Data("images", *parts, None, (3, 6, 6), 3)


def loaders(data):
    return DeviceLoader(data, "train", 10, shuffle=True), DeviceLoader(data, "val", 7)


def shuffled(data):
    """A loader of one's own, in another order each time; the last batch has one sample."""
    few = torch.utils.data.TensorDataset(data.val.inputs[:9], data.val.targets[:9])
    return loaders(data)[0], torch.utils.data.DataLoader(few, 4, shuffle=True)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, part):
        self.part = part

    def __iter__(self):
        for inputs, target in zip(self.part.inputs, self.part.targets, strict=True):
            yield inputs + torch.rand((), dtype=inputs.dtype), target


def streamed(data):
    """Two batches a step from a stream, with noise in each batch."""
    batches = torch.utils.data.DataLoader(Stream(data.train), 7, drop_last=True)
    return IterableLoader(batches, accumulate=2, steps_per_epoch=3), loaders(data)[1]


def make(strategy, make_model=make_model, kind=Trainer, dtype=DOUBLE, block=2**20, **settings):
    torch.manual_seed(
        launch.rank()
    )  # each process has weights of its own, and gets those of rank 0
    parallel.BLOCK = block
    usual = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(optim.AdamW, lr=1e-2),
        "metrics": {"acc": Accuracy()},
    }
    usual |= {
        "scheduler": partial(schedules.cosine, warmup=3),
        "device": "cpu",
        "epochs": 2,
        "log_every": 4,
    }
    return kind(make_model().to(dtype), strategy=strategy, **usual | settings)


def trained(strategy, make_model=make_model, data=None, dtype=DOUBLE, loaders=loaders, **settings):
    """The whole state after two epochs, and after two that were interrupted; and the last
    evaluation.
    """
    data, states = data or small_data(dtype), []
    middle = {}

    def look(trainer):
        if trainer.step == 5:
            middle.update(
                checkpoint.copy(trainer.state_dict()) if launch.is_first() else copied(trainer)
            )

    for resumes in (False, True):
        callbacks = settings.get("callbacks", list)()
        options = settings | {"callbacks": [*callbacks, *([] if resumes else [Watching(look)])]}
        with make(strategy, make_model, dtype=dtype, **options) as trainer:
            resume = received(middle) if resumes else None
            if resumes:
                resume["callbacks"].pop("Watching", None)
            trainer.fit(*loaders(data), resume=resume)
            results = trainer.evaluate(loaders(data)[1])
            state = checkpoint.copy(trainer.state_dict())
            if launch.is_first():
                state["callbacks"].pop("Watching", None)
                states.append([state, results])
    return states


def copied(trainer):
    checkpoint.copy(trainer.state_dict())
    return {}


def received(state):
    """The state of rank 0 on all ranks."""
    if launch.world_size() == 1:
        return state
    box = [state]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]


def frozen():
    model = make_model()
    model[0].weight.requires_grad_(False)
    return model


class Thaw(Callback):
    """Trains the first weight from step 2 on; the Trainer is made when it is trained already."""

    def on_fit_start(self, trainer):
        self.on_step_end(trainer)

    def on_step_end(self, trainer):
        trainer.module[0].weight.requires_grad_(trainer.step >= 2)


def whitened():
    return WhitenedCNN((3, 6, 6), 3, widths=(4, 8))


def whiten():
    return [Whiten(images=30, bias_epochs=1), Lookahead(every=3), EMA(0.9)]


# what the numbers of one process are to be those of

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
SAME = {
    "a frozen weight, clipped": partial(trained, make_model=frozen, max_grad_norm=0.1),
    "a weight that is unfrozen": partial(trained, callbacks=lambda: [Thaw()]),
    "frozen and thawed by name": partial(
        trained,
        callbacks=lambda: [Freeze("0.*", 7)],
        groups=[{"match": "3.*", "lr": 0.1, "scheduler": "wsd"}],
    ),
    "tied weights": partial(trained, make_model=Tied, callbacks=lambda: [EMA(0.9)]),
    "weights that are not always used": partial(trained, make_model=SometimesUnused),
    "lists of modules, a dict": partial(trained, make_model=Nested, kind=OfDict, block=20),
    "outputs that the loss does not use": partial(trained, make_model=WithFeatures, kind=OfDict),
    "an embedding": partial(trained, make_model=Words),
    "recomputed blocks": partial(trained, make_model=Attention, block=20),
    "a parametrization, an LSTM": partial(trained, make_model=Normed, grad_accum_steps=2),
    "whitened, Lookahead, EMA": partial(
        trained,
        make_model=whitened,
        data=images(),
        callbacks=whiten,
        optimizer=partial(optimizers.decoupled_sgd, lr=1.0, batch_size=10),
    ),
    "momentum": partial(trained, optimizer=SGD),
    "Nesterov, foreach": partial(trained, optimizer=partial(SGD, nesterov=True, foreach=True)),
    "amsgrad": partial(trained, optimizer=partial(optim.Adam, lr=0.01, amsgrad=True)),
    "Adagrad": partial(trained, optimizer=partial(optim.Adagrad, lr=0.1)),
    "RMSprop": partial(trained, optimizer=partial(optim.RMSprop, lr=0.01, momentum=0.5)),
    "micro-batches": partial(trained, micro_batch=2, groups=[{"match": "*", "lr": 0.1}]),
    "a GAN": partial(
        trained,
        make_model=OfInputs,
        kind=OfSamples,
        metrics={},
        groups=[{"match": "judge.*", "lr": 3e-3, "scheduler": {"linear": {"warmup": 2}}}],
    ),
    "a stream, and two batches a step": partial(trained, loaders=streamed, max_grad_norm=0.1),
    "a norm, a step and an evaluation of one's own": partial(
        trained, make_model=Reshaping, kind=OwnStep, loaders=shuffled, eval_every=2
    ),
}

# what is the same on all ranks, and what is true of it


def skipped_steps(strategy):
    """(scale, rate) after each step in fp16, where only the last shard has a gradient that is too
    large.
    """
    watching = Watching(lambda trainer: [trainer.scaler.get_scale(), trainer.lr])
    with make(
        strategy, Steep, dtype=torch.float32, precision="fp16", callbacks=[watching]
    ) as trainer:
        trainer.fit(*loaders(small_data()))
    return watching.seen


def buffers(strategy):
    with make(strategy, Centred, dtype=torch.float32) as trainer:
        trainer.fit(*loaders(small_data()))
        trainer.evaluate(loaders(small_data())[1])
        return trainer.module.mean


def predicted_first(strategy):
    with make(strategy, callbacks=[EMA(0.9)]) as trainer:
        _, val_loader = loaders(small_data(DOUBLE))
        first, results = trainer.predict(val_loader), trainer.evaluate(val_loader)
        trainer.fit(*loaders(small_data(DOUBLE)))
        return first, results, trainer.predict(val_loader)


def twice(strategy):
    """Two fits, and a Trainer after another one."""
    results = []
    for _ in range(2):
        with make(strategy) as trainer:
            for _ in range(2):
                trainer.fit(*loaders(small_data(DOUBLE)))
            results.append(trainer.evaluate(loaders(small_data(DOUBLE))[1]))
    return results


def memory(strategy):
    """MiB of parameters, gradients and optimizer state in a step, with 4 blocks of 1 MiB."""
    parts = []
    with make(
        strategy,
        lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]),
        dtype=torch.float32,
    ) as trainer:
        step = trainer.optimizer.step

        def stepping(*arguments):
            step(*arguments)
            parts.append(trainer.memory_report())

        trainer.optimizer.step = stepping
        trainer.fit(DeviceLoader(make_data(20, features=512), "train", 10))
    return [round(parts[-1][name], 3) for name in ("parameters", "gradients", "optimizer")]


ALIKE = {
    "skipped steps": skipped_steps,
    "buffers": buffers,
    "predicted first": predicted_first,
    "twice": twice,
}


# what is refused


def fitted(strategy, *arguments, data=None, **settings):
    with make(strategy, *arguments, dtype=torch.float32, **settings) as trainer:
        trainer.fit(*loaders(data or small_data()))


def gan(strategy):
    options = {
        "optimizer": partial(optim.AdamW, lr=1e-3),
        "device": "cpu",
        "strategy": strategy,
        "log_every": 2,
    }
    GANTrainer(GAN((6,)), loss=None, **options).fit(loaders(small_data())[0])


def two_types(strategy):
    usual = {"loss": nn.CrossEntropyLoss(), "optimizer": SGD, "device": "cpu", "strategy": strategy}
    Trainer(Scaled(torch.ones(3, dtype=DOUBLE)), **usual).fit(loaders(small_data())[0])


def again(strategy):
    model = make_model()
    for _ in range(2):
        with make(strategy, lambda: model) as trainer:
            trainer.fit(*loaders(small_data(DOUBLE)))


REFUSED = {
    "bypassing": partial(fitted, kind=Bypassing),
    "gan": gan,
    "diverging": partial(
        fitted, optimizer=partial(optim.SGD, lr=1e38), callbacks=[NaNGuard()], log_every=3
    ),
    "two types": two_types,
    "0-dim": lambda strategy: fitted(strategy, lambda: Scaled(torch.tensor(1.0))),
    "Adafactor": partial(fitted, optimizer=partial(optim.Adafactor, lr=0.1)),
    "fused SGD": partial(fitted, optimizer=partial(SGD, fused=True)),
    "channels_last": lambda strategy: make(strategy, whitened, channels_last=True).close(),
    "again": again,
    "unfrozen": lambda strategy: fitted(strategy, frozen, callbacks=[Thaw()], log_every=4),
}


def main(strategy, folder, *names):
    ranks.quieten()
    ranks.join()
    work = SAME | ALIKE | REFUSED | {"memory": memory}
    for name in names:
        try:
            given = work[name](strategy)
        except Exception as error:
            given = explanation_of(error) or str(error)
        torch.save(given, f"{folder}/{name}.{launch.rank()}")
    parallel.leave()
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit()
