"""The sample order, and each process's share of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.data import settings
from stoker.data.splits import shuffled
from stoker.trainer import launch
from stoker.trainer.errors import UserError
from stoker.trainer.loading import Seekable

Limit = int | float | None


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """Return the order of n samples in this epoch, int64 on the CPU."""
    return shuffled(n, seed, "order", epoch)


def limited(n: int, limit: Limit, part: str) -> int:
    """Return how many of n samples a pass over a split uses; `limit` is a fraction or a number."""
    if limit is None:
        return n
    if isinstance(limit, float):
        return max(1, round(limit * n))
    if limit > n:
        raise UserError(
            f"limit_{part}={limit}: there are only {n:,} samples. Remove this setting, or type "
            "a lower number."
        )
    return limit


class Ordered(Seekable):
    """The order of a split's samples, and this process's share of each batch.

    Without `shuffle`, samples keep the order of the split. With a `limit` (a fraction or a number
    of samples), an epoch uses only the first samples of its shuffled order or, without `shuffle`,
    the same random subset each time. In distributed training, each process gets its share of every
    batch: samples rank, rank + world_size, ... of the `global_size` samples of the whole batch.
    """

    global_size: int | None = None  # samples in the latest batch, across all processes
    workers: Any = None  # the Workers that read the batches, if there are any

    def __init__(
        self,
        split: Any,
        name: str,
        batch_size: int,
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        limit: Limit = None,
    ) -> None:
        self.split = split
        self.split_size = len(split)
        self.samples = limited(self.split_size, limit, "train" if shuffle else "val")
        settings.check("batch_size" if shuffle else "eval_batch_size", batch_size)
        if shuffle and batch_size > self.samples:
            if drop_last:
                raise UserError(
                    f"batch_size={batch_size}: {name} has only {self.samples} training "
                    "samples, so drop_last=true would drop all of them.\n"
                    f"Type drop_last=false, or a batch_size of at most {self.samples}."
                )
            batch_size = self.samples
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.world_size = launch.world_size()
        last = 0 if drop_last else self.samples % batch_size
        smallest = last or batch_size
        if shuffle and smallest < self.world_size:
            raise UserError(
                f"batch_size={batch_size}: each of the {self.world_size} processes needs at "
                f"least one sample from every batch, but the smallest batch has only {smallest}.\n"
                "Type another batch_size or drop_last=true, or start fewer processes."
            )

    def __len__(self) -> int:
        if self.drop_last:
            return self.samples // self.batch_size
        return -(-self.samples // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Return the sample indices in the order of this epoch, int64 on the CPU."""
        if self.shuffle:
            return permutation(self.split_size, self.seed, epoch)[: self.samples]
        if self.samples < self.split_size:
            return permutation(self.split_size, self.seed, 0)[: self.samples].sort().values
        return torch.arange(self.split_size)

    def whole_batches(self, epoch: int, position: int) -> Sequence[Tensor]:
        """Return the sample indices of this epoch's batches, starting at batch `position`."""
        order = self.order(epoch)[position * self.batch_size : len(self) * self.batch_size]
        return order.split(self.batch_size) if len(order) else ()

    def mine(self, batch: Tensor) -> Tensor:
        """Return this process's share of a whole batch.

        If the batch has fewer samples than there are processes, a process without a sample gets
        a copy of the first one, because the other processes wait for every process to take part:
        see parallel.has_samples.
        """
        if self.world_size == 1:
            return batch  # slicing takes a few us
        if len(batch) <= launch.rank():
            return batch[:1]
        return batch[launch.rank() :: self.world_size]

    def close(self) -> None:
        """Release the data and stop the workers; the loader cannot be used afterward."""
        self.split = None
        if self.workers is not None:
            self.workers.close()
