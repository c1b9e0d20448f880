"""The order of samples: DeviceLoader (all on the device) and HostLoader (worker processes), with the same batches."""

import functools

import torch
from stoker.data.augment import Augment
from stoker.data.workers import (
    Reader,
    Workers,
    choose_workers,
    decode_seconds,
)
from stoker.trainer import launch, settings
from stoker.trainer.device import MIB, free_memory, mix_seed, move, random_stream, to_device
from stoker.trainer.errors import TrainingError, UserError, cause, check_number
from stoker.trainer.loading import Seekable

# So many numbers are gathered and normalised at once, at most. On a CPU they stay in its cache: an epoch of MNIST takes
# 19 ms at 4 batches of 128, 30 ms at 16 (one thread of an Intel Xeon at 2.6 GHz); a GPU wants few large kernels.
AT_ONCE_CPU, AT_ONCE = 2**19, 2**24
WINDOW = 256  # blocks that are shuffled together
FEW_SECONDS = 5.0  # of decoding, for which nothing is streamed
AHEAD = 256 * MIB  # of batches that wait for the training
TIMEOUT = 300  # seconds to wait for one batch


def permutation(n, seed, epoch, block=1):
    """The order of the n samples in this epoch: an int64 tensor on the CPU.

    With a `block`, so many neighbours stay near each other: the blocks are permuted, and the samples of each WINDOW of
    blocks among themselves.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, "order", epoch))
    if block == 1:
        return torch.randperm(n, generator=generator)
    blocks = torch.randperm(-(-n // block), generator=generator)
    order = (blocks.unsqueeze(1) * block + torch.arange(block)).view(-1)
    windows = order[order < n].split(WINDOW * block)
    return torch.cat(
        [window[torch.randperm(len(window), generator=generator)] for window in windows]
    )


def make_loaders(
    data,
    *,
    batch_size,
    eval_batch_size=None,
    device="cpu",
    seed=0,
    augment=(),
    drop_last=False,
    resident="auto",
    workers="auto",
    timeout=TIMEOUT,
    only=None,
):
    """((train, val, test), why): a loader for each split or None, and a sentence on where the data lies and why.

    `resident` is true, false or auto: on the device if all splits have `tensors` and fit in half of its free memory;
    images that are not in their cache yet are streamed until they are, if it takes more than a few seconds to decode
    them. `workers` are the processes that read what is not resident; auto measures whether they are of use. `timeout`:
    seconds to wait for a batch from them. `only` names the one split that is wanted, to be evaluated: whatever can be
    learnt from it.
    """
    device = torch.device(device)
    settings.check("dataset.resident", resident)
    if workers != "auto":
        check_number("dataset.workers", workers, whole=True, least=0)
    check_number("dataset.timeout", timeout, least=0)
    splits = data.parts() if only is None else {only: getattr(data, only)}
    if only is None:
        data.check_classes()
    first = next(iter(splits.values()))
    for name, split in splits.items():
        check_first(data, name, split)
    size, free = sum(split.nbytes for split in splits.values()), free_memory(device)
    sharing = launch.local_world_size() if device.type == "cpu" else 1  # a GPU is one process's own
    apart = {type(split).__name__ for split in splits.values() if not hasattr(split, "tensors")}
    fits = size <= free / 2 / sharing and not apart
    reason = (
        f"{size / MIB:,.1f} MiB of {free / MIB:,.0f} free" if resident == "auto" else "as asked"
    )
    if apart and resident is not False:
        reason = f"{' and '.join(sorted(apart))} without tensors(), which would give all of a part"
        if resident != "auto":
            raise UserError(
                f"dataset.resident=true: this is {reason}.\nAdd it, or type dataset.resident=false."
            )
    # A cache is filled once: that workers are of no use afterwards is no mistake of who asked for them.
    cached = all(getattr(split, "cache", None) is not None for split in splits.values())
    if fits if resident == "auto" else resident:
        if not (cached and resident == "auto"):
            if workers not in ("auto", 0):
                refuse_unused("workers", workers, "auto")
            if timeout != TIMEOUT:
                refuse_unused("timeout", timeout, TIMEOUT)
        kind, options, why = DeviceLoader, {}, f"resident on {device}, {reason}"
        if (
            resident == "auto"
            and cached
            and sum(map(decode_seconds, splits.values())) > FEW_SECONDS
        ):
            kind, why = StreamedOnce, f"then {why}"
    else:
        kind, options, why = HostLoader, {}, reason
    if kind is not DeviceLoader:
        count = choose_workers(first, batch_size) if workers == "auto" else workers
        options = {"workers": count, "timeout": timeout}
        why = f"streamed with {count} worker{'s' * (count != 1)}, {why}"
    if place := getattr(first, "place", ""):
        why += f"; {place}"
    options |= {"device": device, "seed": seed}
    evaluated = batch_size if eval_batch_size is None else eval_batch_size
    loaders = {
        name: kind(data, name, evaluated, **options)
        for name in splits
        if name in (only, "val", "test")
    }
    if only is None:
        loaders["train"] = kind(
            data, "train", batch_size, shuffle=True, augment=augment, drop_last=drop_last, **options
        )
    return (loaders.get("train"), loaders.get("val"), loaders.get("test")), why


def refuse_unused(key, value, default):
    raise UserError(
        f"dataset.{key}={value}: a resident data set has no use for workers.\n"
        f"Type dataset.resident=false, or dataset.{key}={default}."
    )


def check_first(data, name, split):
    """Reads the first sample of a split of the user's own, which has to have the shape that the data claims.

    What lies in memory was checked by Data, and image files are checked as they are decoded.
    """
    if hasattr(split, "inputs") or hasattr(split, "missing"):
        return
    part = f"the {name} part of {data.name}"
    batch = Reader(split, part, 0)[0, [0]]
    if isinstance(batch, (UserError, TrainingError)):
        raise batch
    pair = (
        isinstance(batch, (tuple, list))
        and len(batch) == 2
        and all(isinstance(x, torch.Tensor) for x in batch)
    )
    if not pair or tuple(batch[0].shape) != (1, *data.in_shape) or len(batch[1]) != 1:
        given = " and ".join(str(tuple(x.shape)) for x in batch) if pair else type(batch).__name__
        raise UserError(
            f"{part}: split[[0]] gives {given}.\n"
            f"Give a pair of tensors, inputs of the shape {(1, *data.in_shape)} and targets."
        )


def normalizer(mean, std, device):
    """A function: uint8 -> float32, (pixel / 255 - mean) / std by channel; anything else as it is."""
    pairs = ((mean, 0.0), (std, 1.0))
    mean, std = (torch.tensor(default if x is None else x, device=device) for x, default in pairs)
    scale, offset = 1 / (255 * std), -mean / std
    if scale.ndim:  # one a channel, in front of rows and columns
        scale, offset = scale.view(-1, 1, 1), offset.view(-1, 1, 1)
    return lambda inputs: (
        inputs.float().mul_(scale).add_(offset) if inputs.dtype == torch.uint8 else inputs
    )


class Loader(Seekable):
    """What both loaders share; nothing in front of the position sought is read.

    A batch is (inputs, targets) on the device: uint8 images become float32 and normalised, floats keep their type. It
    is a function of (seed, epoch, number of the batch) alone and leaves every global random generator as it was.
    Without `shuffle` the order is the split's. Where several processes train together, each gets its part of every
    batch: samples rank, rank + ranks, ... of the `global_size` that the whole one had.
    """

    global_size = None  # samples of the batch given last, over all processes

    def __init__(
        self,
        data,
        split,
        batch_size,
        *,
        device="cpu",
        seed=0,
        shuffle=False,
        augment=(),
        drop_last=False,
    ):
        self.split = getattr(data, split)
        self.samples, self.nbytes = len(self.split), self.split.nbytes
        self.block = getattr(self.split, "block", 1)
        self.neighbours = self.split.neighbours() if self.block > 1 else None
        self.batch_size = settings.check("batch_size" if shuffle else "eval_batch_size", batch_size)
        if shuffle and batch_size > self.samples:
            raise UserError(
                f"batch_size={batch_size}: {data.name} has only {self.samples} training samples. "
                "Type a batch_size of at most that."
            )
        self.device, self.seed, self.shuffle, self.drop_last = (
            torch.device(device),
            seed,
            shuffle,
            drop_last,
        )
        # A function and no method: a cycle self -> augment -> self would leave the loader to the garbage collector,
        # which ends a DataLoader's workers in the wrong order and waits 5 s for each.
        self.augment = Augment(
            augment, data.num_classes, normalizer(data.mean, data.std, self.device)
        )
        self.augment.check(data.in_shape)
        self.in_shape = data.in_shape
        # What mixes samples of a batch has to have all of them: they are dealt out after it.
        self.mine, self.dealt_late = (
            slice(launch.rank(), None, launch.world_size()),
            bool(self.augment.rest),
        )
        self.share = batch_size if self.dealt_late else len(range(batch_size)[self.mine])
        if shuffle:
            self.check_share(launch.world_size())
        self.generator = torch.Generator()
        # Which epochs an alternating flip flips a sample in: the even ones or the odd ones.
        self.flip_parity = torch.rand(self.samples, generator=self.seeded("flip")) < 0.5

    def __len__(self):
        return (
            self.samples // self.batch_size
            if self.drop_last
            else -(-self.samples // self.batch_size)
        )

    def check_share(self, ranks):
        """UserError where a training batch has fewer samples than there are processes."""
        last = 0 if self.drop_last else self.samples % self.batch_size
        if self.batch_size < ranks:
            what = f"{ranks} processes cannot share such a batch. Type batch_size={ranks} or more, or start fewer."
            raise UserError(f"batch_size={self.batch_size}: {what}")
        if 0 < last < ranks:
            what = (
                f"the last batch of an epoch has {last}, fewer samples than the {ranks} processes"
            )
            raise UserError(
                f"batch_size={self.batch_size}: {what}.\nType drop_last=true, or another batch_size."
            )

    def seeded(self, *parts):
        """The loader's generator, at the beginning of the stream that the parts name."""
        return self.generator.manual_seed(mix_seed(self.seed, *parts))

    def order(self, epoch):
        """The indices of the split in the order of this epoch: an int64 tensor on the CPU."""
        if not self.shuffle:
            return torch.arange(self.samples)
        order = permutation(self.samples, self.seed, epoch, self.block)
        return order if self.neighbours is None else self.neighbours[order]

    def batches(self, epoch, position):
        order = self.order(epoch)[position * self.batch_size : len(self) * self.batch_size]
        whole, done = order.split(self.batch_size) if len(order) else (), 0
        for inputs, targets in self.read(self.dealt(whole), epoch):
            now = whole[done : done - (-len(inputs) // self.share)]
            inputs = self.augment.images(
                inputs, self.draws(epoch, position + done, now, inputs.shape[1:])
            )
            for batch in zip(inputs.split(self.share), targets.split(self.share), strict=True):
                if self.augment.rest:
                    batch = self.augment.mix(*batch, self.seeded("mix", epoch, position + done))
                if self.dealt_late:
                    batch = tuple(tensor[self.mine] for tensor in batch)
                self.global_size = len(whole[done])
                done += 1
                yield batch
        for samples in whole[
            done:
        ]:  # of which this process has none: the others may wait for it all the same
            inputs, targets = next(iter(self.read([samples[:1]], epoch)))
            self.global_size = len(samples)
            yield (
                self.augment.images(inputs, {}),
                targets,
            )  # lent: parallel.counts says that it does not count

    def dealt(self, whole):
        """This process's part of each of the whole batches, where there is any of it."""
        if self.dealt_late or launch.world_size() == 1:
            return list(whole)
        return [batch[self.mine] for batch in whole if len(batch) > launch.rank()]

    def draws(self, epoch, position, whole, shape):
        """What the augmentation needs for this process's part of the whole batches from number `position` on."""
        if not self.augment.geometric:
            return {}
        mine, draws = slice(None) if self.dealt_late else self.mine, []
        for number, batch in enumerate(whole, position):
            flips = self.flip_parity[batch] ^ bool(epoch % 2)
            generator = self.seeded("augment", epoch, number)
            draws.append(self.augment.draw((len(batch), *shape), generator, flips))
        return {name: torch.cat([draw[name][mine] for draw in draws]) for name in draws[0]}

    def read(self, batches, epoch):
        """Yields (inputs, targets) on the device of these lists of samples, of one or more of them at a time."""
        raise NotImplementedError

    def close(self):
        """Lets go of the data and ends the workers; the loader is of no use after this."""
        raise NotImplementedError


class DeviceLoader(Loader):
    """The split as two tensors on the device, images still uint8; many batches are gathered and normalised at once."""

    def __init__(self, data, split, batch_size, **options):
        super().__init__(data, split, batch_size, **options)
        try:
            with random_stream("read", self.seed, split):
                self.inputs, self.targets = (
                    tensor.to(self.device) for tensor in self.split.tensors()
                )
        except UserError:
            raise
        except Exception as error:
            what = f"The {split} part of {data.name}"
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(
                error
            ):
                there = f"{what} ({self.nbytes / MIB:,.0f} MiB) does not fit in the memory of {self.device}"
                raise TrainingError(f"{there}.\nType dataset.resident=false.") from error
            raise TrainingError(f"{what} cannot be read: {cause(error)}.") from error
        self.resident_bytes = self.nbytes
        self.split = None  # what is on the device is read from there alone
        numbers = max(1, self.share) * self.inputs[0].numel()
        most = AT_ONCE_CPU if self.device.type == "cpu" else AT_ONCE
        self.batches_at_once = max(1, min(16, most // numbers))

    def read(self, batches, epoch):
        if not batches:
            return
        order = to_device(torch.cat(batches), self.device)
        for indices in order.split(self.batches_at_once * len(batches[0])):
            # index_select: 0.04 ms for 256x3x32x32 bytes, where inputs[indices] takes 0.46.
            yield self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def close(self):
        self.inputs = self.targets = None


class HostLoader(Loader):
    """The split stays where it is; `workers` processes (0: this one) only read and decode.

    The rest happens on the device. A sample that cannot be read, a worker that dies, and one that gives no batch within
    `timeout` seconds (0: no limit) are a TrainingError that names the samples.
    """

    def __init__(self, data, split, batch_size, *, workers=0, timeout=TIMEOUT, **options):
        super().__init__(data, split, batch_size, **options)
        self.workers = Workers(
            Reader(self.split, f"the {split} part of {data.name}", workers, (self.seed, split)),
            workers,
            timeout=check_number("dataset.timeout", timeout, least=0),
            ahead=AHEAD * self.samples // (self.nbytes * self.batch_size * max(workers, 1)),
            pin_memory=self.device.type
            not in ("cpu", "mps"),  # on mps the memory is one and the same
        )

    def read(self, batches, epoch):
        drawn = epoch if self.shuffle else 0  # what is evaluated is the same each time
        # Lists, since the indices travel to the workers, where a tensor would need shared memory.
        for batch in self.workers.read([(drawn, batch.tolist()) for batch in batches]):
            with self.spans["transfer"]:
                batch = move(batch, self.device)
            yield batch

    def close(self):
        self.split = None
        self.workers.close()


class StreamedOnce(Seekable):
    """A HostLoader until the split's images are decoded, and a DeviceLoader from the epoch after."""

    def __init__(self, data, split, batch_size, *, workers=0, timeout=TIMEOUT, **options):
        self.loader = HostLoader(
            data, split, batch_size, workers=workers, timeout=timeout, **options
        )
        self.make_resident = functools.partial(DeviceLoader, data, split, batch_size, **options)
        self.samples, self.nbytes, self.batch_size = (
            self.loader.samples,
            self.loader.nbytes,
            self.loader.batch_size,
        )
        self.resident_bytes = self.nbytes  # it will be
        self.in_shape = data.in_shape

    @property
    def global_size(self):
        return self.loader.global_size

    def __len__(self):
        return len(self.loader)

    def batches(self, epoch, position):
        if isinstance(self.loader, HostLoader) and decode_seconds(self.loader.split) < FEW_SECONDS:
            self.loader.close()
            self.loader = self.make_resident()
        self.loader.spans = self.spans
        return self.loader.batches(epoch, position)

    def close(self):
        self.loader.close()
