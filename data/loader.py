"""Two data loaders that yield the same batches: DeviceLoader keeps all data on the device, and
HostLoader reads it in worker processes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.data import settings
from stoker.data.augment import Augment, Draws, Spec
from stoker.data.order import Limit, Ordered
from stoker.data.record import Data
from stoker.data.samples import make_loader
from stoker.data.splits import Split
from stoker.data.transforms import PerSample
from stoker.data.workers import TIMEOUT, Reader, Workers, choose_workers
from stoker.trainer import launch
from stoker.trainer.errors import TrainingError, UserError, cause
from stoker.trainer.loading import length_of
from stoker.trainer.memory import MIB, free_memory, is_out_of_memory
from stoker.trainer.number_format import counted, size_of
from stoker.trainer.seeding import mix_seed, random_stream
from stoker.trainer.transfer import move, to_device

# The number of values to gather and normalize at once. On a CPU, they should fit in the cache: an
# epoch of MNIST takes 19 ms with 4 batches of 128 at once, and 30 ms with 16 (one thread of an
# Intel Xeon at 2.6 GHz). A GPU is fastest with a few large kernels.
AT_ONCE_CPU = 2**19
AT_ONCE = 2**24
MOST_DECODED = 64 * MIB  # maximum size of images decoded before training; larger data is streamed
AHEAD = 256 * MIB  # maximum size of all prefetched batches

# (inputs, targets)
Batch = tuple[Tensor, Tensor]


def make_loaders(
    data: Data,
    *,
    batch_size: int,
    eval_batch_size: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    augment: Spec = (),
    drop_last: bool = False,
    resident: str | bool = "auto",
    workers: str | int = "auto",
    timeout: float = TIMEOUT,
    only: str | None = None,
    limit_train: Limit = None,
    limit_val: Limit = None,
) -> tuple[tuple[Any, Any, Any], str]:
    """Return ((train, val, test), why): a loader or None for each split, and a phrase that says
    where the data is kept. With several validation splits, val is {name: loader}.

    `resident`: True, False, or "auto", which keeps the data on the device if all splits have a
    `tensors` method and fit in half of its free memory. If more than 64 MiB of images are not
    cached yet, "auto" streams them in this run and fills the cache.
    `workers`: the number of processes that read data that is not resident; "auto" means one per
    core, up to 8, or 0 for tensors.
    `timeout`: seconds to wait for a batch from a worker.
    `only`: the one split to load, for an evaluation.
    `limit_train`, `limit_val`: the fraction or number of samples to use per epoch or evaluation.
    If `augment` contains torchvision transforms, the training split is streamed.
    """
    device = torch.device(device)
    reading: dict[str, Any] = {"workers": workers, "timeout": timeout}
    for key, value in {
        "dataset.resident": resident,
        "dataset.workers": workers,
        "dataset.timeout": timeout,
        "limit_train": limit_train,
        "limit_val": limit_val,
    }.items():
        settings.check(key, value)
    splits = data.parts()
    if only is None:
        data.check_classes()
    else:
        splits = {only: splits[only]}
    options: dict[str, dict[str, Any]] = {}
    for name, split in splits.items():
        options[name] = {
            "batch_size": eval_batch_size or batch_size,
            "device": device,
            "seed": seed,
        }
        # An evaluation of a single split reads all of it, unless the split has no length.
        if name not in ("train", "test") and (only is None or length_of(split) is None):
            options[name]["limit"] = limit_val
    if only is None:
        options["train"] |= {
            "batch_size": batch_size,
            "shuffle": True,
            "drop_last": drop_last,
            "limit": limit_train,
        }
    loaders: dict[str, Any] = {}
    if data.kind == "other":
        _refuse(
            {"augment": bool(augment), "resident": resident not in ("auto", False)},
            "this setting needs inputs of a known shape, but the samples of this data set can be "
            "anything.\nRemove the setting.",
        )
        for name, split in splits.items():
            where = f"the {name} split of {data.name}"
            loaders[name] = make_loader(split, where, **reading, **options[name])
        return _by_use(loaders), ""
    for name, split in splits.items():
        check_first(data, name, split)
    held = dict(splits)  # the splits that can become resident
    transforms: list[Any] = []
    if only is None:
        options["train"]["augment"] = augment
        transforms = Augment(augment).transforms
    if transforms:
        if resident is True:
            raise UserError(
                f"dataset.resident=true: {type(transforms[0]).__name__} can only be applied as "
                "samples are read, so the training split cannot be resident.\n"
                "Type dataset.resident=auto."
            )
        del held["train"]
    fits, why = _choose_place(held, device, resident)
    if fits:
        why = f"resident on {device}, {why}"
    else:
        held.clear()
    first = next(iter(splits.values()))
    if len(held) < len(splits):
        if workers == "auto":
            reading["workers"] = choose_workers(first, transforms)
        streamed = f"streamed with {counted(reading['workers'], 'worker')}"
        why = f"{why}; the training split {streamed}" if fits else f"{streamed}, {why}"
    elif resident is True or not hasattr(first, "missing"):
        # With resident=auto, images are streamed until all are decoded, so workers have an effect.
        _refuse(
            {"workers": workers not in (0, "auto"), "timeout": timeout != TIMEOUT},
            "a resident data set does not use workers.\n"
            "Type dataset.resident=false, or remove this key.",
        )
    place = getattr(first, "place", "")
    if place:
        why = f"{why}; {place}"
    for name in splits:
        if name in held:
            loaders[name] = DeviceLoader(data, name, **options[name])
        else:
            loaders[name] = HostLoader(data, name, **reading, **options[name])
    return _by_use(loaders), why


def _by_use(loaders: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the loaders as (train, val, test); with several validation splits, val is
    {name: loader}.
    """
    val = {name: loader for name, loader in loaders.items() if name not in ("train", "test")}
    usual = val.get("val") if val.keys() <= {"val"} else val
    return loaders.get("train"), usual, loaders.get("test")


def _refuse(typed: dict[str, bool], why: str) -> None:
    """Raise UserError if one of these loader settings was typed."""
    for key, is_typed in typed.items():
        if is_typed:
            raise UserError(f"dataset.{key}: {why}")


def _choose_place(
    splits: dict[str, Split], device: torch.device, resident: str | bool
) -> tuple[bool, str]:
    """Return whether to keep the splits on the device, and why."""
    if resident is False:
        return False, "as requested"
    for split in splits.values():
        if not hasattr(split, "tensors"):
            reason = f"{type(split).__name__} has no tensors(), which would return the whole split"
            if resident is True:
                raise UserError(
                    f"dataset.resident=true: {reason}.\nAdd this method, or type "
                    "dataset.resident=false."
                )
            return False, reason
    if resident is True:
        return True, "as requested"
    # The test split is only counted if it is the only one, because a run might not read it.
    read = [split for name, split in splits.items() if name != "test" or len(splits) == 1]
    if sum(getattr(split, "undecoded", 0) for split in read) > MOST_DECODED:
        return False, "because the images are not decoded yet; the next run keeps them if they fit"
    size = sum(split.nbytes for split in splits.values())
    free = free_memory(device)
    # Processes on a machine share its memory, but each GPU belongs to one process.
    sharing = launch.local_world_size() if device.type == "cpu" else 1
    return size <= free / 2 / sharing, f"{size_of(size)} ({size_of(free)} free)"


def check_first(data: Data, name: str, split: Split) -> None:
    """Read the first sample of a user-defined split, and check that it has the declared shape.

    Data has already checked tensors in memory, and image files are checked when they are decoded.
    """
    if hasattr(split, "inputs") or hasattr(split, "missing"):
        return
    where = f"the {name} split of {data.name}"
    match Reader(split, where).first():
        case Tensor() as inputs, Tensor() as targets:
            fits = inputs.shape == (1, *data.in_shape) and targets.shape[:1] == (1,)
        case _:
            fits = False
    if not fits:
        raise UserError(
            f"{where}: split[[0]] must return a pair of tensors: inputs of shape "
            f"{(1, *data.in_shape)} and one target."
        )


def normalizer(
    mean: Sequence[float] | None, std: Sequence[float] | None, device: torch.device | str
) -> Callable[[Tensor], Tensor]:
    """Return a function that maps uint8 to float32, (pixel / 255 - mean) / std per channel, and
    leaves other dtypes unchanged.
    """
    scale, offset = scaling(mean, std, device)

    def normalize(inputs: Tensor) -> Tensor:
        if inputs.dtype != torch.uint8:
            return inputs
        return inputs.float().mul_(scale).add_(offset)

    return normalize


def scaling(
    mean: Sequence[float] | None, std: Sequence[float] | None, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return (scale, offset) per channel: a normalized pixel is pixel * scale + offset."""
    means = torch.tensor(0.0 if mean is None else mean, device=device)
    stds = torch.tensor(1.0 if std is None else std, device=device)
    if means.ndim or stds.ndim:  # to broadcast over rows and columns
        means = means.view(-1, 1, 1)
        stds = stds.view(-1, 1, 1)
    return 1 / (255 * stds), -means / stds


class Loader(Ordered):
    """The base class of both loaders. A loader can start in the middle of an epoch without reading
    the earlier samples.

    A batch is (inputs, targets) on the device: uint8 images are converted to float32 and
    normalized; floats keep their dtype. A batch depends only on (seed, epoch, batch index), and
    reading it leaves all global random generators unchanged.
    """

    def __init__(
        self,
        data: Data,
        split: str,
        batch_size: int,
        *,
        augment: Spec = (),
        **options: Any,
    ) -> None:
        super().__init__(data.parts()[split], data.name, batch_size, **options)
        self.nbytes: int = self.split.nbytes
        self.targets_are_uniform = data.targets_are_uniform
        self.normalize = normalizer(data.mean, data.std, self.device)
        self.augment = Augment(augment, data.num_classes)
        self.augment.check(data.in_shape, data.target_shape)
        # Mixing needs the whole batch, so samples are divided among the processes afterward.
        self.dealt_late = bool(self.augment.rest)
        self.share = len(self._dealt(torch.empty(self.batch_size)))
        self.generator = torch.Generator()
        # True for samples that `flip: alternate` flips in even epochs, False for odd epochs.
        self.flip_parity = torch.rand(self.split_size, generator=self._seeded("flip")) < 0.5

    def _seeded(self, *parts: str | int) -> torch.Generator:
        """Return the loader's generator, seeded for the stream that `parts` identify."""
        return self.generator.manual_seed(mix_seed(self.seed, *parts))

    def _dealt(self, batch: Tensor) -> Tensor:
        """Return the samples of a whole batch that this process reads."""
        return batch if self.dealt_late else self.mine(batch)

    def batches(self, epoch: int, position: int) -> Iterator[Batch]:
        """Yield the batches of this epoch, starting at index `position`."""
        whole = self.whole_batches(epoch, position)
        done = 0
        for inputs, targets in self.read(list(map(self._dealt, whole)), epoch):
            count = -(-len(inputs) // self.share)  # `read` may return several batches at once
            drawn_for = whole[done : done + count]
            draws = self._draws(epoch, position + done, drawn_for, inputs.shape[1:])
            inputs, targets = self.augment.move(inputs, targets, draws)
            inputs = self.normalize(inputs)
            for batch in zip(inputs.split(self.share), targets.split(self.share), strict=True):
                if self.dealt_late:
                    generator = self._seeded("mix", epoch, position + done)
                    inputs, targets = self.augment.mix(*batch, generator)
                    batch = (self.mine(inputs), self.mine(targets))
                self.global_size = whole[done].numel()  # len() of a tensor takes 1 us
                done += 1
                yield batch

    def _draws(
        self,
        epoch: int,
        position: int,
        whole: Sequence[Tensor],
        shape: Sequence[int],
    ) -> Draws:
        """Draw the augmentation's random numbers for this process's share of the batches, starting
        at index `position`.
        """
        if not self.augment.geometric:
            return {}
        draws = []
        for number, batch in enumerate(whole, position):
            flips = self.flip_parity[batch] ^ bool(epoch % 2)
            generator = self._seeded("augment", epoch, number)
            draws.append(self.augment.draw((len(batch), *shape), generator, flips))
        return {name: torch.cat([self._dealt(draw[name]) for draw in draws]) for name in draws[0]}

    def read(self, batches: list[Tensor], epoch: int) -> Iterable[Batch]:
        """Yield (inputs, targets) on the device for these batches of indices; each item may hold
        several batches.
        """
        raise NotImplementedError


class DeviceLoader(Loader):
    """Keeps the split as two tensors on the device, with images as uint8, and gathers and
    normalizes several batches at once.
    """

    def __init__(self, data: Data, split: str, batch_size: int, **options: Any) -> None:
        super().__init__(data, split, batch_size, **options)
        try:
            with random_stream("read", self.seed, split):
                inputs, targets = self.split.tensors()
                self.inputs: Tensor | None = resident_view(inputs, self.device)
                self.targets: Tensor | None = resident_view(targets, self.device)
        except UserError:
            raise
        except Exception as error:
            reason = f"cannot be read: {cause(error)}."
            if is_out_of_memory(error):
                reason = (
                    f"({size_of(self.nbytes)}) does not fit in the memory of {self.device}.\n"
                    "Type dataset.resident=false."
                )
            raise TrainingError(f"The {split} split of {data.name} {reason}") from error
        self.resident_bytes = self.nbytes
        self.split = None  # from now on, data is read only from the device
        most = AT_ONCE_CPU if self.device.type == "cpu" else AT_ONCE
        self.batches_at_once = max(1, min(16, most // (self.share * inputs[0].numel())))

    def read(self, batches: list[Tensor], epoch: int) -> Iterator[Batch]:
        if not batches or self.inputs is None or self.targets is None:
            return
        order = to_device(torch.cat(batches), self.device)
        for indices in order.split(self.batches_at_once * len(batches[0])):
            # index_select takes 0.04 ms for 256x3x32x32 bytes; inputs[indices] takes 0.46 ms.
            yield self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def close(self) -> None:
        self.inputs = None
        self.targets = None


def resident_view(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device; overlapping windows stay views of shared storage."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    if size >= tensor.numel():
        return tensor.to(device)
    shared = tensor.as_strided((size,), (1,), 0).to(device)
    return shared.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class HostLoader(Loader):
    """Leaves the split on the host, where `workers` processes read and decode samples; with 0
    workers, this process reads them.

    Everything else happens on the device. If a sample cannot be read, or a worker dies or takes
    longer than `timeout` seconds (0: no limit) for a batch, a TrainingError names the samples.
    """

    def __init__(
        self,
        data: Data,
        split: str,
        batch_size: int,
        *,
        workers: int = 0,
        timeout: float = TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(data, split, batch_size, **options)
        where = f"the {split} split of {data.name}"
        reader = Reader(self.split, where, workers, (self.seed, split))
        if self.augment.transforms:
            reader.transforms = PerSample(self.augment.transforms, data.in_shape, self.seed)
            reader.first()
        batch_bytes = self.nbytes * self.batch_size // self.samples
        ahead = AHEAD // max(1, batch_bytes * max(workers, 1))
        self.workers = Workers(reader, workers, timeout, self.device, ahead)

    def read(self, batches: list[Tensor], epoch: int) -> Iterator[Batch]:
        # In evaluations, the epoch is always 0, so that every evaluation sees the same samples.
        for batch in self.workers.read(epoch if self.shuffle else 0, batches):
            with self.spans["transfer"]:
                batch = move(batch, self.device)
            yield batch
