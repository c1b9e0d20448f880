"""Counts on a device: the memory that a Trainer releases, and how often the host waits for the device."""

import gc
import warnings

import torch

from benchmarks import run, work
from benchmarks.ours import variant_settings
from stoker import Trainer
from stoker.data.loader import make_loaders
from stoker.trainer import device as devices
from stoker.trainer.callbacks import EMA, Callback
from stoker.trainer.memory import release

FIRST, LAST = 6, 14  # steps between which waits are counted


def machine(job, clock):
    """Return the device as torch describes it, the processor with the GPU and its driver, and the versions."""
    device = devices.choose(job.device)
    return {
        "device": devices.describe(device),
        "processor": run.processor(job.device),
        "versions": run.versions(),
    }


def fit(job, callback=None):
    """Train for 16 steps with an EMA, micro-batches and the variants' Trainer arguments, then close the Trainer."""
    device = torch.device(job.device)
    (train, _, _), _ = make_loaders(
        work.read(job), batch_size=job.batch_size, device=device, seed=job.seed, drop_last=True
    )
    with Trainer(
        work.model(job),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=work.optimizer(job),
        callbacks=[EMA(0.9), callback or Callback()],
        max_steps=16,
        grad_accum_steps=2,
        device=device,
        log_every=1000,
        **({"precision": job.precision} | variant_settings(job)),
    ) as trainer:
        trainer.fit(train)


def memory(job, clock):
    """Return the memory in use before and during training, and what remains after the Trainer is closed.

    A first training run allocates the memory that libraries keep until the process exits.
    """
    device = torch.device(job.device)
    training = []

    class Look(Callback):
        def on_step_end(self, trainer):
            if trainer.step == LAST:
                training.append(held(device))

    fit(job)
    release(device)
    before = held(device)
    fit(job, Look())
    release(device)
    after = held(device)
    return {
        "before_bytes": before,
        "training_bytes": training[0],
        "left_bytes": after - before,
    }


def held(device):
    """Return the bytes of all tensors: allocated on the device or, on a CPU, known to Python's garbage collector."""
    backend = torch.get_device_module(device)
    if hasattr(backend, "memory_allocated"):
        return backend.memory_allocated(device)
    tensors = [
        value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def waits(job, clock):
    """Return how often a step waits for the device."""
    set_mode = getattr(torch.get_device_module(job.device), "set_sync_debug_mode", None)
    if set_mode is None:
        raise work.NotOffered(f"{job.device} does not report synchronizations")

    class Watch(Callback):
        def on_step_end(self, trainer):
            set_mode("warn" if FIRST <= trainer.step < LAST else "default")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(job, Watch())
    # Setting the mode also warns, once per process, about "all synchronizing operations".
    synchronizations = [
        warning for warning in caught if "called a synchronizing" in str(warning.message)
    ]
    return {"waits_per_step": len(synchronizations) / (LAST - FIRST)}
