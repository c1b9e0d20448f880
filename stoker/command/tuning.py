"""Tune the whole process for training: memory allocator, threads, kernels, garbage collection.

The Trainer itself never changes process-wide settings. The command `stoker` calls `tune_process`,
and a script may call it too.
"""

import atexit
import contextlib
import functools
import gc
import inspect
import os
import sys
from collections.abc import Iterator, Sequence

import torch

from stoker.command import settings
from stoker.trainer import device as devices
from stoker.trainer import memory

# If a batch's forward pass has fewer multiply-adds than this, one thread is enough.
FEW = 10_000_000
DENSE = (torch.nn.Linear, torch.nn.BatchNorm1d, torch.nn.LayerNorm)


def tune_process(
    device: str | torch.device,
    parts: Sequence[str] = settings.TUNINGS,
    deterministic: bool = False,
) -> None:
    """Tune this process for training on `device`; call it once, after your imports.

    Args:
        device: The device that you will train on, such as "auto", "cpu" or `Trainer.device`.
        parts: `"allocator"` makes glibc keep the memory that a step frees, for training on the CPU.
            `"threads"` changes nothing here, because it depends on the model's size. In a script
            that trains a tiny model on the CPU, call `torch.set_num_threads(1)`.
        deterministic: Use only deterministic kernels, without TF32. Otherwise, a GPU may use TF32,
            and cuDNN searches for the fastest kernels.

    Raises:
        UserError: `parts` is not a list of these names, or this machine does not have the device.
    """
    if isinstance(device, str):
        device = devices.choose(device)
    settings.check("tune", parts)
    freeze_imports()
    spare_the_compiler()
    devices.choose_kernels(device, deterministic)
    if device.type == "cpu" and "allocator" in parts:
        keep_pages()


@functools.cache
def freeze_imports() -> None:
    """Exclude all existing objects from garbage collection, once.

    Otherwise, each full collection visits every object that the import of torch created, which
    takes 0.08 s. A run has about four full collections.
    """
    gc.freeze()
    # At exit, nanobind reports any of triton's objects that are still alive as leaks.
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


def spare_the_compiler() -> None:
    """Keep optimizers from importing torch's compiler, which takes a second.

    The methods below import the compiler only to exclude themselves from compilation. This function
    marks them as already excluded for the whole process, so do not compile a function that calls
    one of them.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        if not hasattr(method, "__dynamo_disable"):
            # private: __dynamo_disable, which torch._compile checks before the import, torch 2.15
            method.__dynamo_disable = method


def keep_pages() -> None:
    """Make glibc keep freed memory for the next step; do nothing with another C library.

    Otherwise, the kernel maps and unmaps the memory of each large tensor, and the page faults take
    longer than the work on the tensor. `memory.release` returns unused memory to the kernel.
    """
    libc = memory.glibc()
    if libc is not None:
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings for large blocks
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not shrink the heap at each free


def few_threads(
    module: torch.nn.Module, batch_size: int | None
) -> contextlib.AbstractContextManager[None]:
    """Return a context that uses one thread if the steps are too small for several threads.

    Threads wait for each other at each operator. If other programs are running, the waiting takes
    longer than a small step. Only models of dense layers on the CPU are affected, and only if
    OMP_NUM_THREADS is not set.
    """
    return one_thread() if is_small(module, batch_size) else contextlib.nullcontext()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run CPU operators on one thread within this context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_small(module: torch.nn.Module, batch_size: int | None) -> bool:
    """Return whether one thread is enough for a step: dense layers with few multiply-adds."""
    if not batch_size or "OMP_NUM_THREADS" in os.environ:
        return False
    weights = 0
    for layer in module.modules():
        parameters = list(layer.parameters(recurse=False))
        # Other layers use each weight several times per sample.
        if parameters and not isinstance(layer, DENSE):
            return False
        weights += sum(parameter.numel() for parameter in parameters)
    return batch_size * weights < FEW
