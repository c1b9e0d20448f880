"""Move batches and tensors between the host and a device, through pinned memory."""

from typing import Any

import torch

from stoker.trainer import batches
from stoker.trainer import device as devices

UNIFIED = ("cpu", "mps", "meta")  # devices to which copies do not need pinned memory


def move(batch: Any, device: torch.device) -> Any:
    """Move a batch, a nested structure of tensors and objects with `.to`, to the device.

    Host tensors are pinned and copied asynchronously, while the device works.
    """
    if isinstance(batch, (list, tuple)):
        for tensor in batch:
            if not (isinstance(tensor, torch.Tensor) and tensor.device == device):
                break
        else:
            return batch  # already on the device

    def to(_: str, leaf: Any) -> Any:
        is_plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if device.type not in UNIFIED and is_plain and leaf.is_cpu:
            return copy_beside(leaf.pin_memory(), device)
        return leaf.to(device)

    return batches.walk(to, batch)


def copy_beside(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a pinned tensor to the device while the device works on earlier steps.

    The copy has its own stream. In the compute stream, it would wait for the earlier steps.
    """
    backend = torch.get_device_module(device)
    work_stream = backend.current_stream(device)
    copy_stream = devices.stream(device, "copies")
    with backend.stream(copy_stream):
        copied = tensor.to(device, non_blocking=True)
    work_stream.wait_stream(copy_stream)
    copied.record_stream(work_stream)  # keeps the memory allocated until its last use has ended
    return copied


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor just created on the CPU to the device, without waiting for the copy."""
    if device.type in UNIFIED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU, which is complete once the device is synchronized.

    Copies from a GPU are asynchronous and use pinned memory.
    """
    return tensor.to(
        "cpu",
        copy=True,
        non_blocking=tensor.device.type not in UNIFIED,
        memory_format=torch.contiguous_format,
    )
