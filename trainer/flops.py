"""How many FLOPs a model takes, and how many the device can do: from both, how much of the device a training used."""

import copy
import functools
import logging
import time

import torch

from trainer import batch as batches
from trainer import device as devices
from trainer import parallel

TRIES = 5  # of the product; the fastest one counts
WIDTH_CPU, WIDTH = 1024, 8192  # of its matrices


def efficiency(trainer, in_shape, samples_per_second):
    """What result.json says: FLOPs, and the share of the device's peak that the training came to (MFU).

    The share of all devices where several processes train. Null is what is not known.
    """
    flops = per_sample(trainer.module, in_shape)
    device = peak(trainer.device, trainer.dtype) * parallel.ranks()
    used = flops * samples_per_second if flops and samples_per_second else None
    return {"flops_per_sample": flops, "flops_per_second": used, "peak_flops": device, "mfu": used and used / device}


def per_sample(module, in_shape):
    """FLOPs of the forward and the backward of one sample of this shape, by `torch.utils.flop_counter`.

    Matrix products, convolutions and attentions are counted, on the meta device, where nothing is computed; the module
    stays as it is. None where a module cannot do without numbers, or is in parts.
    """
    # Where there is no Triton it warns of that, in the lines of a run of several processes.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    from torch.utils.flop_counter import FlopCounterMode  # 0.1 s

    samples = 2  # a BatchNorm wants two
    try:
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            outputs = without_numbers(module).train()(torch.empty(samples, *in_shape, device="meta"))
            floats = [t for _, t in batches.entries(outputs) if t.is_floating_point() and t.requires_grad]
            torch.autograd.backward(floats, [torch.empty_like(tensor) for tensor in floats])
    except Exception:  # of the user's module, which may do anything
        return None
    return counter.get_total_flops() / samples or None


def without_numbers(module):
    """A copy of the module whose parameters and buffers are on the meta device."""
    copies = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        is_weight = isinstance(tensor, torch.nn.Parameter)
        copies[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
    return copy.deepcopy(module, copies)  # which takes these for the copies, so that no memory is needed


@functools.cache
def peak(device, dtype):
    """FLOPs a second in the product of two large matrices of this type: what the device can do at best, measured."""
    width = WIDTH_CPU if device.type == "cpu" else WIDTH
    matrix = torch.ones(width, width, dtype=dtype or torch.float32, device=device)
    best = float("inf")
    for _ in range(1 + TRIES):  # in the first one the kernel is chosen
        devices.synchronize(device)
        start = time.perf_counter()
        matrix @ matrix
        devices.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * width**3 / best
