"""The only file that knows strategies: single and dp (torch.nn.DataParallel); ddp and fsdp come here."""

import contextlib

import torch

from trainer.errors import UserError, log
from trainer.settings import check_strategy

NOTHING = contextlib.nullcontext()


def wrap(module, strategy, device):
    """The module as it is called in training: itself for `single`, its replicas for `dp`.

    `dp` takes all visible GPUs, `dp:0+2` those listed; with fewer than two it is the module itself. The wrapper shares
    the module's parameters, so state dicts are taken from the module and never carry a `module.` prefix.
    """
    name, listed = check_strategy(strategy)
    if name == "single":
        return module
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    indices = listed or list(range(count))
    missing = [index for index in indices if not 0 <= index < count]
    if missing:
        raise UserError(
            f"strategy={strategy}: there is no GPU {missing[0]}; this run sees {count} on {device.type}.\n"
            "Type strategy=single or strategy=dp."
        )
    if len(indices) < 2:
        log.warning("strategy=dp: %s, so it changes nothing.", "one GPU" if count else "no GPU in this run")
        return module
    if device.index not in indices:
        raise UserError(
            f"strategy={strategy}: device={device} is not among its GPUs.\nType device={device.type}:{indices[0]}."
        )
    if module._compiled_call_impl is not None:
        raise UserError(f"strategy={strategy}: replicas cannot be compiled. Type compile=false or strategy=single.")
    # DataParallel gathers on its first device, which has to be the one that holds the parameters.
    return torch.nn.DataParallel(module, device_ids=sorted(indices, key=lambda index: index != device.index))


def replicas(model):
    """The indices of the GPUs that hold a replica; none where there is one device."""
    return tuple(getattr(model, "device_ids", None) or ()) if isinstance(model, torch.nn.DataParallel) else ()


def gradient_sync(model, *, enabled):
    """A context in which backward passes exchange gradients, or do not: only the last micro-batch of a step has to."""
    return NOTHING
