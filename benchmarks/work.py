"""What all contestants share: the models, the data, the optimizers, and the clock."""

import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import time

import torch
from torch import nn

BATCH = {
    "linear": 64,
    "mlp": 128,
    "cnn": 128,
    "cifar": 256,
    "folder": 256,
    "cifar10_94": 1024,
    "resnet50": 256,
}
EVAL_BATCH = 1000
TINY_BATCH = 25
TINY_SAMPLES = 400  # samples in a dry run, a quarter of which are for testing
RESNET_SAMPLES = 2560  # random images for ten steps per epoch
SHAPES = {"cifar10_94": (3, 32, 32), "resnet50": (3, 224, 224)}
TINY_SHAPES = SHAPES | {"resnet50": (3, 32, 32)}
CNN_SAMPLES = (
    20_000  # of the 60,000 MNIST images; the linear model and the MLP train on all of them
)
PHOTOGRAPHS = ("cifar", "folder")  # CIFAR-10 from JPEG files, with random crops and flips
MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2452, 0.2428, 0.2606)


@dataclasses.dataclass
class Job:
    """A training run of a contestant. `started` is the Unix time just before its process starts."""

    name: str
    variants: tuple = ()  # "ready": batches in memory; "one": a single random batch; others depend on the contestant
    work: str = "mlp"
    epochs: int = 3
    seed: int = 0
    precision: str = "fp32"
    device: str = "cpu"
    workers: int = 0  # workers of the DataLoader in the bare loop
    images: str = ""  # folder with train/CLASS/*.jpg and test/CLASS/*.jpg
    scratch: str = "."  # folder for files that a contestant writes
    trainings: int = 1  # training runs in one process, each with its own seed
    tiny: bool = False  # a dry run, with small models and a little generated data
    started: float = 0.0

    @property
    def batch_size(self):
        return TINY_BATCH if self.tiny else BATCH[self.work]

    @property
    def in_shape(self):
        return (TINY_SHAPES if self.tiny else SHAPES).get(self.work, (1, 28, 28))


class NotOffered(Exception):
    """Raised if a contestant cannot run a job. The table shows the reason in its row."""


def model(job):
    """Build the model, with the same weights for the same seed."""
    torch.manual_seed(job.seed)
    if job.work == "resnet50":
        return resnet(job)
    if job.work == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    if job.work == "mlp":
        sizes = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(nn.Flatten(), *sizes)

    def block(channels, width):
        return nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)

    if job.work == "cnn":
        head = [nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)]
        return nn.Sequential(*block(1, 32), *block(32, 64), nn.Flatten(), *head)
    blocks = [*block(3, 32), *block(32, 64), *block(64, 128)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


def resnet(job):
    """Build torchvision's ResNet-50, or a small ResNet in a dry run."""
    if job.tiny:
        from stoker.models.resnet import ResNet

        return ResNet(job.in_shape, 10, widths=(16, 32), blocks=(1, 1))
    from torchvision.models import resnet50

    return resnet50()


def optimizer(job):
    """Return an optimizer factory, which takes the parameters."""
    if job.work == "cnn":
        return functools.partial(torch.optim.Adam, lr=1e-3)
    return functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def autocast(job):
    if job.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(job.device, dtype=torch.bfloat16)


def read(job):
    """Read the data set with Stoker, using the test images as the validation split."""
    from stoker.data import datasets, images

    if job.tiny or job.work == "resnet50":
        data = datasets.synthetic(**synthetic_settings(job))
    elif job.work == "cifar10_94":
        data = images.image_folder(
            os.path.join(os.environ["DATA_ROOT"], "cifar10_jpeg"), val_fraction=0
        )
    elif job.work in PHOTOGRAPHS:
        data = images.image_folder(job.images, val_fraction=0, mean=CIFAR_MEAN, std=CIFAR_STD)
    else:
        data = datasets.mnist(
            os.environ["DATA_ROOT"], val_fraction=0, mean=MNIST_MEAN, std=MNIST_STD
        )
    train = data.train
    most = {"cnn": CNN_SAMPLES, "resnet50": RESNET_SAMPLES}.get(job.work)
    if most is not None:
        train = datasets.TensorSplit(train.inputs[:most], train.targets[:most])
    if "10x" in job.variants and job.work not in PHOTOGRAPHS:
        train = datasets.TensorSplit(train.inputs.repeat(10, 1, 1, 1), train.targets.repeat(10))
    return dataclasses.replace(data, train=train, val=data.test, test=None)


def synthetic_settings(job):
    """Return the settings of the data set `synthetic`, which has no validation split."""
    n = TINY_SAMPLES if job.tiny else RESNET_SAMPLES * 4 // 3 + 100
    return {"n": n, "in_shape": list(job.in_shape), "val_fraction": 0.0, "test_fraction": 0.25}


def arrays(job):
    """Return (training arrays, test arrays, mean, std). Arrays are (uint8 inputs (N, C, H, W), int64 targets (N,))."""
    data = read(job)
    return data.train.tensors(), data.val.tensors(), data.mean, data.std


def normalize(inputs, mean, std):
    """Return normalized uint8 inputs as a new float32 tensor."""
    mean, std = (
        torch.tensor(values, device=inputs.device).view(-1, 1, 1) for values in (mean, std)
    )
    return inputs.float().div_(255).sub_(mean).div_(std)


def loaders(job):
    """Return (train, test) DataLoaders, as in the PyTorch tutorials or over ready-made batches."""
    if "one" in job.variants:
        generator = torch.Generator().manual_seed(job.seed)
        images, labels = (
            torch.randn(job.batch_size, 1, 28, 28, generator=generator),
            torch.arange(job.batch_size) % 10,
        )
        return ready([(images, labels)]), ready([(images, labels)])
    if "ready" in job.variants:
        train, test, *scale = arrays(job)
        cut = ((train, job.batch_size), (test, EVAL_BATCH))
        return tuple(
            ready(
                list(zip(normalize(inputs, *scale).split(size), targets.split(size), strict=True))
            )
            for (inputs, targets), size in cut
        )
    train, test = tutorial_datasets(job)
    options = {"num_workers": job.workers, "persistent_workers": job.workers > 0}
    return (
        torch.utils.data.DataLoader(train, job.batch_size, shuffle=True, **options),
        torch.utils.data.DataLoader(test, EVAL_BATCH, **options),
    )


def ready(batches):
    """Return a DataLoader that yields these batches unchanged, because every contestant accepts a DataLoader."""
    return torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=unchanged)


def unchanged(batch):
    return batch


def tutorial_datasets(job):
    """Return torchvision's (train, test) data sets, which transform each sample."""
    from torchvision import datasets, transforms

    if job.tiny:
        train, test, *scale = arrays(job)
        steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(*scale)])
        return Photographs(*train, steps), Photographs(*test, steps)
    if job.work not in PHOTOGRAPHS:
        steps = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize(MNIST_MEAN, MNIST_STD)]
        )
        train, test = (
            datasets.MNIST(os.environ["DATA_ROOT"], part, steps) for part in (True, False)
        )
        return (
            torch.utils.data.Subset(train, range(CNN_SAMPLES)) if job.work == "cnn" else train
        ), test
    steps = [transforms.ToTensor(), transforms.Normalize(CIFAR_MEAN, CIFAR_STD)]
    augmented = transforms.Compose(
        [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), *steps]
    )
    if job.work == "folder":
        parts = (("train", augmented), ("test", transforms.Compose(steps)))
        return tuple(
            datasets.ImageFolder(os.path.join(job.images, part), each) for part, each in parts
        )
    train, test, _, _ = arrays(job)
    return Photographs(*train, augmented), Photographs(*test, transforms.Compose(steps))


class Photographs(torch.utils.data.Dataset):
    """Turn an array into a PIL image and transform it, like torchvision.datasets.CIFAR10."""

    def __init__(self, inputs, targets, transform):
        # Grayscale PIL images have no channel dimension.
        self.images = inputs.permute(0, 2, 3, 1).squeeze(-1).numpy()
        self.targets = targets.tolist()
        self.transform = transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.targets[index]


class Clock:
    """Record the times of a run, from which its numbers are computed."""

    def __init__(self, job):
        self.job, self.first_step, self.steps = (
            job,
            None,
            None,
        )  # the contestant sets the number of steps per epoch
        self.data_mib = 0.0  # size of the data set, if the contestant keeps it in memory
        self.ends, self.evaluation_starts, self.accuracies = [], [], []
        self.loss = None  # test loss of the last evaluation

    def begin(self):
        """Start timing. Call this before the data is read."""
        self.ends.append(time.perf_counter())

    def watch(self, optimizer):
        """Record the first step of the optimizer, and return the optimizer."""

        def after_step(*_):
            self.step()
            hook.remove()

        hook = optimizer.register_step_post_hook(after_step)
        return optimizer

    def step(self):
        """Call this after each step. Only the first call counts."""
        if self.first_step is None:
            self.first_step = time.time() - self.job.started

    def evaluating(self):
        """Call this after the training steps of an epoch."""
        synchronize(self.job.device)
        self.evaluation_starts.append(time.perf_counter())

    def evaluated(self, accuracy, loss=None):
        """Call this after an evaluation. The accuracy is a Python number, so the device has finished its work.

        Some contestants also pass the loss.
        """
        self.ends.append(time.perf_counter())
        self.accuracies.append(float(accuracy))
        self.loss = loss

    def results(self):
        """Return the numbers. Medians exclude the first epoch, which is a warm-up and also reads the data."""
        train = [
            start - end for start, end in zip(self.evaluation_starts, self.ends[:-1], strict=True)
        ]
        evaluation = [
            end - start for start, end in zip(self.evaluation_starts, self.ends[1:], strict=True)
        ]
        train_s, evaluation_s = (
            statistics.median(train[1:] or train),
            statistics.median(evaluation[1:] or evaluation),
        )
        return {
            "train_s": train_s,
            "evaluation_s": evaluation_s,
            "sum_s": train_s + evaluation_s,
            "total_s": self.ends[-1] - self.ends[0],
            "first_epoch_s": self.ends[1] - self.ends[0],
            "step_us": 1e6 * train_s / self.steps,
            "first_step_s": self.first_step,
            "peak_mib": peak_mib(self.job.device),
            "data_mib": self.data_mib,
            "accuracy": self.accuracies[-1],
            "loss": self.loss,
        }


def synchronize(device):
    """Wait until the device has finished its work."""
    if device != "cpu":
        torch.accelerator.synchronize()


def peak_mib(device):
    """Return the peak memory of this process: allocated on the device, or resident."""
    from stoker.trainer import memory

    return memory.peak_memory(torch.device(device)) / 2**20


def mfu(job, step_us):
    """Return the fraction of the device's measured peak that these steps reach (MFU)."""
    from torch.utils.flop_counter import FlopCounterMode  # importing it takes 0.1 s

    counter = FlopCounterMode(display=False)
    with counter:
        model(job).eval()(torch.zeros(1, *job.in_shape)).sum().backward()
    flops = counter.get_total_flops() * job.batch_size
    return flops / (1e-6 * step_us) / peak_flops(job)


def peak_flops(job):
    """Return the FLOPs per second of the device's fastest product of two large matrices.

    The matrices are random, because a GPU draws less power and runs faster on constant matrices
    than in real work (by 13% on an H200).
    """
    width = 384 if job.tiny or job.device == "cpu" else 8192
    dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16
    matrix = torch.randn(width, width, dtype=dtype, device=job.device)
    synchronize(job.device)
    times = [time.perf_counter()]
    while len(times) < 3 or times[-1] - times[0] < 0.2:
        matrix @ matrix  # the first product chooses the kernel
        synchronize(job.device)
        times.append(time.perf_counter())
    return 2 * width**3 / min(end - start for start, end in itertools.pairwise(times))
