"""The recipe of experiment=cifar10_94 (Jordan 2024, arXiv 2404.00498), with Stoker and with a hand-tuned loop.

Both train once to warm up (kernels, compilation, captures), then once per seed. The first steps of
each training run are not timed.
"""

import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks import by_hand, work
from benchmarks.ours import configured
from stoker.data.order import permutation
from stoker.models.whitened_cnn import WhitenedCNN
from stoker.trainer import optimizers, seeding
from stoker.trainer.callbacks import Callback

UNTIMED = 10  # steps at the start of each training run that are not timed
WHITENED = 5000  # images from which the whitening of the first layer is computed
BIAS_EPOCHS = 3  # epochs after which the bias of that layer is frozen
LOOKAHEAD = 5  # steps between updates of the slow weights
TINY_WIDTHS = [8, 16]


class Stopwatch(Callback):
    """Time a run, except its first UNTIMED steps."""

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
    """Warm up, then return the results of `train(seed)`, which are (us per step, accuracy, loss), for each seed."""
    train(0)
    results = []
    for seed in range(job.trainings):
        step_us, accuracy, loss = train(seed)
        results.append({"step_us": step_us, "accuracy": accuracy, "loss": loss})
    return {"seeds": results}


def ours(job, clock):
    """Train the experiment as `python train.py` builds it. Variants are settings, as key=value."""
    settings = [
        "experiment=cifar10_94",
        f"device={job.device}",
        f"epochs={job.epochs}",
        f"run_dir={job.scratch}/run",
        *job.variants,
    ]
    if job.tiny:
        settings += ["dataset=synthetic", "dataset.augment=[]", "precision=fp32"]
        settings.append(f"model.widths={TINY_WIDTHS}")
        settings.append(f"batch_size={job.batch_size}")
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
    """Train with the fastest loop we know: all images and weights are on the device, in half precision.

    Variant: compile. A dry run uses fp32 and no augmentation, like the dry run of `ours`.
    """
    train_arrays, test_arrays, *scale = work.arrays(job)
    dtype = torch.float32 if job.tiny else torch.half
    if job.device != "cpu":
        by_hand.fast_kernels()

    def place(images, labels):
        images = work.normalize(images.to(job.device), *scale)
        images = images.to(dtype=dtype, memory_format=torch.channels_last)
        return images, labels.to(job.device)

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
        accuracy = correct.double().mean().item()
        loss = smoothed(outputs, test_labels).item()
        return stopwatch.step_us, accuracy, loss

    return train_seeds(job, train)


def whitened(job, images, seed, dtype):
    """Return the network, with a whitened first layer and with its norm layers in fp32."""
    torch.manual_seed(seeding.mix_seed(seed, "model"))
    options = {"widths": TINY_WIDTHS} if job.tiny else {}
    model = WhitenedCNN(job.in_shape, 10, **options)
    model.to(job.device)
    order = permutation(len(images), seed, 0)
    first = order[:WHITENED].to(job.device)
    model.whiten([images[first].float()])
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
    state = {}
    slow = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():  # not BatchNorm's batch counters
            state[name] = tensor
            slow[name] = tensor.clone()
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
            flips = mirrored if epoch % 2 == 0 else ~mirrored
            pictures = by_hand.crop(padded, flips, margin=2)
        for batch in orders[epoch, :used].split(job.batch_size):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step, total)
            outputs = model(pictures[batch]).float()
            smoothed(outputs, labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOOKAHEAD == 0 or step == total:
                progress = step / total
                look_ahead(state, slow, decay=0.774 * progress**3)
            stopwatch.at(step, total)


def smoothed(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.2)


def factor(step, total):
    """Return the factor of a triangular learning rate: it rises for 23% of the steps, then falls to 7%."""
    warmup = round(0.23 * total)
    if step < warmup:
        rise = (step + 1) / (warmup + 1)
        return 0.2 + 0.8 * rise
    fall = (step - warmup) / (total - warmup)
    return 1 - 0.93 * fall


@torch.no_grad()
def look_ahead(state, slow, decay):
    trained = list(state.values())
    averages = list(slow.values())
    torch._foreach_lerp_(averages, trained, 1 - decay)
    torch._foreach_copy_(trained, averages)
