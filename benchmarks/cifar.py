"""The recipe of experiment=cifar10_94 (Jordan 2024, arXiv 2404.00498): by this project, and by a hand-tuned loop.

Both train once to warm up (kernels, compilation, captures), then once per seed. The first steps of
a training are not timed.
"""

import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks import by_hand, work
from benchmarks.ours import configured
from stoker.data.loader import permutation
from stoker.models.whitened_cnn import WhitenedCNN
from stoker.trainer import device as devices
from stoker.trainer import optimizers
from stoker.trainer.callbacks import Callback

UNTIMED = 10  # steps at the start of a training
WHITENED = 5000  # images that whiten the first layer
BIAS_EPOCHS = 3  # after which that layer is frozen
LOOKAHEAD = 5  # steps between two moves of the slow weights
TINY_WIDTHS = [8, 16]


class Stopwatch(Callback):
    """Times a training without its first UNTIMED steps."""

    def __init__(self, job):
        self.device = job.device

    def on_step_end(self, trainer):
        self.at(trainer.step, trainer.total_steps)

    def at(self, step, total):
        if step == UNTIMED:
            work.synchronize(self.device)
            self.start = time.perf_counter()
        if step == total:
            work.synchronize(self.device)
            seconds = time.perf_counter() - self.start
            self.step_us = 1e6 * seconds / (total - UNTIMED)


def train_seeds(job, train):
    """The results of `train(seed)`, which returns (us per step, accuracy, loss), after a warm-up."""
    train(0)
    keys = ("step_us", "accuracy", "loss")
    seeds = range(job.trainings)
    return {"seeds": [dict(zip(keys, train(seed), strict=True)) for seed in seeds]}


def ours(job, clock):
    """The experiment as `python train.py` builds it; its settings as key=value."""
    settings = ["experiment=cifar10_94", f"device={job.device}", *job.variants]
    if job.tiny:
        settings += ["dataset=synthetic", "dataset.augment=[]", "precision=fp32"]
        settings += [f"model.widths={TINY_WIDTHS}", f"batch_size={job.batch_size}"]
        settings.append(f"epochs={job.epochs}")
        for name, value in work.synthetic_settings(job).items():
            settings.append(f"dataset.{name}={value}")
    else:
        settings.append("dataset.root=${oc.env:DATA_ROOT}/cifar10_jpeg")

    def train(seed):
        stopwatch = Stopwatch(job)
        with configured([*settings, f"seed={seed}"], lambda cfg: [stopwatch]) as parts:
            train_loader, _, test_loader = parts.loaders
            parts.trainer.fit(train_loader)
            row = parts.trainer.evaluate(test_loader, "test")
        return stopwatch.step_us, row["test/acc"], row["test/loss"]

    return train_seeds(job, train)


def hand(job, clock):
    """As fast as we know how: all images and weights on the device, in half precision.

    Variant compile. A dry run has fp32 and no augmentation, so it trains what the experiment does.
    """
    train_arrays, test_arrays, *scale = work.arrays(job)
    dtype = torch.float32 if job.tiny else torch.half
    if job.device != "cpu":
        by_hand.fast_kernels()

    def place(images, labels):
        images = work.normalize(images.to(job.device), *scale).to(dtype)
        return images.contiguous(memory_format=torch.channels_last), labels.to(job.device)

    images, labels = place(*train_arrays)
    test_images, test_labels = place(*test_arrays)

    def train(seed):
        model = whitened(job, images, seed, dtype)
        if "compile" in job.variants:
            model.compile()
        stopwatch = Stopwatch(job)
        fit(job, model, images, labels, seed, stopwatch)
        model.eval()
        with torch.no_grad():
            parts = [model(batch).float() for batch in test_images.split(work.EVAL_BATCH)]
        outputs = torch.cat(parts)
        correct = outputs.argmax(1) == test_labels
        loss = smoothed(outputs, test_labels)
        return stopwatch.step_us, correct.float().mean().item(), loss.item()

    return train_seeds(job, train)


def whitened(job, images, seed, dtype):
    """The network, its first layer whitened and its norms in fp32."""
    torch.manual_seed(devices.mix_seed(seed, "model"))
    options = {"widths": TINY_WIDTHS} if job.tiny else {}
    model = WhitenedCNN(job.in_shape, 10, **options).to(job.device)
    first = permutation(len(images), seed, 0)[:WHITENED]
    model.whiten([images[first.to(job.device)].float()])
    model.first.weight.requires_grad_(False)
    model.to(dtype=dtype, memory_format=torch.channels_last)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.float()
    return model


def fit(job, model, images, labels, seed, stopwatch):
    steps_per_epoch = len(images) // job.batch_size
    used = steps_per_epoch * job.batch_size
    total = job.epochs * steps_per_epoch
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizers.decoupled_sgd(
        [{"params": trained}],
        lr=11.5,
        batch_size=job.batch_size,
        fused=job.device in ("cpu", "cuda"),
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    state = dict(model.state_dict())
    for name in [name for name, tensor in state.items() if not tensor.is_floating_point()]:
        del state[name]  # BatchNorm's counters
    slow = {name: tensor.clone() for name, tensor in state.items()}
    orders = [permutation(len(images), seed, epoch) for epoch in range(job.epochs)]
    orders = torch.stack(orders).to(job.device)
    mirrored = torch.rand(len(images), 1, device=job.device) < 0.5
    padded = F.pad(images, (2, 2, 2, 2), mode="reflect")
    model.train()
    step = 0
    for epoch in range(job.epochs):
        if epoch == BIAS_EPOCHS:
            model.first.bias.requires_grad_(False)
            del state["first.bias"], slow["first.bias"]
        pictures = images
        if not job.tiny:
            pictures = by_hand.crop(padded, mirrored ^ bool(epoch % 2), margin=2)
        for batch in orders[epoch, :used].split(job.batch_size):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step, total)
            smoothed(model(pictures[batch]).float(), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOOKAHEAD == 0 or step == total:
                look_ahead(state, slow, 0.774 * (step / total) ** 3)
            stopwatch.at(step, total)


def smoothed(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.2)


def factor(step, total):
    """The triangle of the learning rate: up over 23 % of the steps, then down to 7 %."""
    warmup = round(0.23 * total)
    if step < warmup:
        return 0.2 + 0.8 * (step + 1) / (warmup + 1)
    return 1 - 0.93 * (step - warmup) / (total - warmup)


@torch.no_grad()
def look_ahead(state, slow, decay):
    trained = list(state.values())
    averages = list(slow.values())
    torch._foreach_lerp_(averages, trained, 1 - decay)
    torch._foreach_copy_(trained, averages)
