"""How many FLOPs a model takes, and how many the device can do: from both, how much of the device a training used."""

import functools
import inspect
import logging
import time

import torch

from stoker.trainer import batch as batches
from stoker.trainer import device as devices
from stoker.trainer import parallel

TRIES, ENOUGH = 5, 0.5  # of the product, of which the fastest one counts; seconds for all
WIDTH_CPU, WIDTH = 1024, 8192  # of its matrices


def efficiency(trainer, in_shape, samples_per_second):
    """What result.json says: FLOPs, and the share of the device's peak that the training came to (MFU).

    The share of all devices where several processes train. Null is what is not known.
    """
    flops = per_sample(trainer.module, in_shape)
    try:
        device = peak(trainer.device, trainer.dtype) * parallel.ranks()
    except RuntimeError:  # there is no memory for the matrices
        device = None
    used = flops * samples_per_second if flops and samples_per_second else None
    mfu = used / device if used and device else None
    return {"flops_per_sample": flops, "flops_per_second": used, "peak_flops": device, "mfu": mfu}


def per_sample(module, in_shape):
    """FLOPs of the forward and the backward of one sample of this shape, by `torch.utils.flop_counter`.

    Matrix products, convolutions and attentions are counted, in the work on a sample of zeros in evaluation mode; the
    module stays as it is. None where a module wants something else, or is cut up over several processes.
    """
    # Where there is no Triton it warns of that, in the lines of a run of several processes.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    from torch.utils import flop_counter  # 0.1 s

    # It imports the compiler, which takes a second, only to tell it to look away (as in optimizers.spare_the_compiler).
    mode = getattr(flop_counter, "_FlopCounterMode", flop_counter.FlopCounterMode)
    work = inspect.unwrap(mode.__torch_dispatch__)
    vars(work).setdefault("__dynamo_disable", work)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters or any(map(parallel.is_shard, parameters)):
        return None
    modes = [(part, part.training) for part in module.modules()]
    try:
        with flop_counter.FlopCounterMode(display=False) as counter, torch.enable_grad():
            outputs = module.eval()(torch.zeros(1, *in_shape, device=parameters[0].device))
            floats = [
                t
                for _, t in batches.entries(outputs)
                if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            # Not backward(): where several processes train, the others would have to come too.
            torch.autograd.grad(
                floats, parameters, [torch.zeros_like(t) for t in floats], allow_unused=True
            )
    except Exception:  # of the user's module, which may do anything
        return None
    finally:
        for part, training in modes:
            part.training = training
    return counter.get_total_flops() or None


@functools.cache
def peak(device, dtype):
    """FLOPs a second in the product of two large matrices of this type: what the device can do at best, measured."""
    width = WIDTH_CPU if device.type == "cpu" else WIDTH
    matrix = torch.ones(width, width, dtype=dtype or torch.float32, device=device)
    best, began = float("inf"), time.perf_counter()
    for _ in range(1 + TRIES):  # in the first one the kernel is chosen
        devices.synchronize(device)
        start = time.perf_counter()
        matrix @ matrix
        devices.synchronize(device)
        end = time.perf_counter()
        best = min(best, end - start)
        if end - began > ENOUGH:
            break
    return 2 * width**3 / best
