"""Explain errors in a step, such as a tensor on the wrong device, and say what to change."""

import re
from typing import Any

import torch

from stoker.trainer import batches
from stoker.trainer.errors import UserError

# regular expression for an error message of torch -> what to do about it
ADVICE = {
    "device-side assert": (
        "An assertion inside a GPU kernel failed (device-side assert). Usually, a class in the "
        "targets or an index into an Embedding is out of range.\n"
        "Type device=cpu, where the same step fails with a clear message."
    ),
    "index out of range in self": (
        "An index is out of range. An index into an Embedding must be at least 0 and below its "
        "num_embeddings."
    ),
    "Expected more than 1 value per channel": (
        "BatchNorm needs at least two samples, but a batch or micro-batch has only one.\n"
        "Type drop_last=true, or change batch_size or micro_batch."
    ),
    "view size is not compatible": (
        "The model calls .view() on an image whose memory format may be channels_last.\n"
        "Use .flatten(1) or .reshape() instead, or type channels_last=false."
    ),
    r"InvalidCxxCompiler|No working C\+\+ compiler|TritonMissing|Cannot find a working triton": (
        "compile=true needs a compiler, but none is installed.\n"
        "On the CPU, install g++, clang++ or cl (on the PATH); on a GPU, install Triton. Or type "
        "compile=false."
    ),
    "DTensor|FSDP|[Ss]harding (strategy|propagation)": (
        "strategy=fsdp: torch does not support this operation on sharded parameters.\n"
        "Type strategy=ddp, or, if the optimizer causes the error, choose a different one. "
        "A step must call self.model as a whole, not parts of it."
    ),
    "mark a variable ready only once|marked as ready twice": (
        "strategy=ddp: a parameter got two gradients in one backward().\n"
        "A step must call self.model (not self.module) once per backward()."
    ),
}
# torch's messages about tensors on two devices.
TWO_DEVICES = "(on|at) the same device|not on the expected device|Expected object of device type"


def explain(
    error: BaseException, module: torch.nn.Module, batch: Any, device: torch.device
) -> UserError | None:
    """Return a UserError that says what to change, or None if the cause is not known."""
    text = str(error)
    for pattern, advice in ADVICE.items():
        if re.search(pattern, text):
            return UserError(advice)
    wrong = misplaced(module, batch, device)
    if wrong and re.search(TWO_DEVICES, text):
        return UserError(
            f"Tensors on two devices: the Trainer uses {device}, but {'; '.join(wrong[:3])}."
        )
    return None


def misplaced(module: torch.nn.Module, batch: Any, device: torch.device) -> list[str]:
    """Return "buffer 'mask' is on cpu" for each tensor that is not on the device."""
    return [
        f"{place} is on {tensor.device}"
        for place, tensor in named_tensors(module, batch)
        if tensor.device != device
    ]


def named_tensors(module: torch.nn.Module, batch: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (description, tensor) for all tensors in a module and a batch."""
    # The usual mistake is a tensor in a plain attribute, which does not move with the module.
    attributes = []
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, (torch.Tensor, list, tuple)):
                attributes += batches.entries(value, f"{path}.{name}".lstrip("."))
    named = []
    for kind, tensors, advice in (
        ("parameter", module.named_parameters(), ""),
        ("buffer", module.named_buffers(), ""),
        ("attribute", attributes, " (make it a buffer: self.register_buffer)"),
        ("batch entry", batches.entries(batch), ""),
    ):
        named += [(f"{kind} {name!r}{advice}", tensor) for name, tensor in tensors]
    return named
