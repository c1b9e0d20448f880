"""Count a model's FLOPs and measure the device's peak; together they yield the MFU."""

import contextlib
import functools
import inspect
import itertools
import logging
import time
from typing import Any

import torch

from stoker.command import tuning
from stoker.trainer import batches, parallel
from stoker.trainer import device as devices
from stoker.trainer.modes import modes_restored
from stoker.trainer.trainer import Trainer

ENOUGH = 0.2  # seconds to spend on matrix products; the fastest one counts
WIDTH_CPU = 384  # width of the square matrices, so that a product takes about a millisecond
WIDTH = 8192


def efficiency(
    trainer: Trainer,
    in_shape: tuple[int, ...] | None,
    samples_per_second: float | None,
    tokens: bool = False,
    threads: int | None = None,
) -> dict[str, float | None]:
    """Return the FLOPs fields of result.json; an unknown number is None.

    `mfu` is the achieved fraction of the combined peak of all devices. If training was faster than
    the measured peak, the measurement was wrong, and both `peak_flops` and `mfu` are None. On the
    CPU, the peak is that of `peak_threads` threads: the `threads` used for training (by default,
    the current number) in each process.
    """
    flops = per_sample(trainer.module, in_shape, tokens)
    achieved = flops * samples_per_second if flops and samples_per_second else None
    workers = parallel.process_count
    if trainer.device.type == "cpu":
        workers *= threads or torch.get_num_threads()
    best = None
    with contextlib.suppress(RuntimeError):  # not enough memory for the matrices
        best = peak(trainer.device, trainer.dtype) * workers
    if achieved and best and achieved > best:  # the device was busy when its peak was measured
        best = None
    return {
        "flops_per_sample": flops,
        "flops_per_second": achieved,
        "peak_flops": best,
        "peak_threads": workers if best and trainer.device.type == "cpu" else None,
        "mfu": achieved / best if achieved and best else None,
    }


def per_sample(
    module: torch.nn.Module, in_shape: tuple[int, ...] | None, tokens: bool = False
) -> int | None:
    """Count the FLOPs of one sample, forward and backward, with `torch.utils.flop_counter`.

    Only matrix products, convolutions and attention are counted. The sample consists of zeros,
    which are token IDs if `tokens` is true. The module runs in evaluation mode and does not change.
    Returns None if the module rejects such a sample or is sharded, or if the shape is not known.
    """
    if in_shape is None:
        return None
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters or any(map(parallel.is_shard, parameters)):
        return None
    counting = counter()
    try:
        with modes_restored(module), counting, torch.enable_grad():
            outputs = module.eval()(sample_of_zeros(in_shape, tokens).to(parameters[0].device))
            tensors = [leaf for _, leaf in batches.entries(outputs) if torch.is_tensor(leaf)]
            tensors = [tensor for tensor in tensors if tensor.requires_grad]
            zeros = [torch.zeros_like(tensor) for tensor in tensors]
            # backward() would start a collective that the other ranks do not join.
            torch.autograd.grad(tensors, parameters, zeros, allow_unused=True)
    except Exception:  # user code may raise anything
        return None
    return counting.get_total_flops() or None


def sample_of_zeros(in_shape: tuple[int, ...], tokens: bool) -> torch.Tensor:
    """Return a batch of one sample; its zeros are token IDs if `tokens` is true."""
    return torch.zeros(1, *in_shape, dtype=torch.int64 if tokens else torch.float32)


def counter() -> Any:
    """Return a context that counts FLOPs; its `get_total_flops` returns the number so far."""
    # Otherwise, the counter warns once per process if Triton is missing.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    from torch.utils import flop_counter  # takes 0.1 s

    # A wrapper marks the counter's dispatch method as excluded from compilation. To do so, it
    # imports the compiler, which takes 2 s, unless the method already has the mark.
    # private: _FlopCounterMode and __dynamo_disable, to start two seconds sooner, torch 2.15
    mode: Any = getattr(flop_counter, "_FlopCounterMode", flop_counter.FlopCounterMode)
    dispatch = inspect.unwrap(mode.__torch_dispatch__)
    vars(dispatch).setdefault("__dynamo_disable", dispatch)
    return flop_counter.FlopCounterMode(display=False)


@functools.cache
def peak(device: torch.device, dtype: torch.dtype | None) -> float:
    """Measure the FLOPs per second of a product of two large matrices of this type.

    The matrices are random, because a GPU draws less power and runs faster on constant matrices
    than in real work (by 13% on an H200). On the CPU, this measures one thread, because a short
    product in one thread is likely to finish undisturbed by other programs.
    """
    width = WIDTH_CPU if device.type == "cpu" else WIDTH
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(
        width, width, dtype=dtype or torch.float32, device=device, generator=generator
    )
    with tuning.one_thread() if device.type == "cpu" else contextlib.nullcontext():
        devices.synchronize(device)
        times = [time.perf_counter()]
        while len(times) < 3 or times[-1] - times[0] < ENOUGH:
            matrix @ matrix  # the first product chooses the kernel
            devices.synchronize(device)
            times.append(time.perf_counter())
    shortest = min(end - start for start, end in itertools.pairwise(times))
    return 2 * width**3 / shortest
