"""The Python side of the simulated accelerator: what torch and programs expect as `torch.simulated`.

To be imported once the library is loaded, and before anything has run a backward pass: autograd
starts its threads for the devices that it knows then.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

NAME = "simulated"
COUNT = 2
TOTAL = 16 * 2**30  # bytes of each device

torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()

default_generators = tuple(torch.ops.simulated.default_generator(i) for i in range(COUNT))

# Devices

current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
synchronize = torch.accelerator.synchronize
device = torch.accelerator.device_index


def device_count() -> int:
    return COUNT


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def get_device_name(device: Any = None) -> str:
    return "simulated accelerator"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def index_of(device: Any) -> int:
    """Return the index of a device, a name or a number; of the current one for None and a name without one."""
    index = device if isinstance(device, int) else torch.device(device or NAME).index
    return current_device() if index is None else index


# Random numbers


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    default_generators[index_of(device)].set_state(state)


# Streams and events

current_stream = torch.accelerator.current_stream


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802
    return torch.Stream(torch.device(NAME, index_of(device)), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:  # noqa: N802
    return torch.Event(NAME, enable_timing=enable_timing)


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # it is its own context manager


# Memory

memory_allocated = torch.accelerator.memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_allocated = torch.accelerator.max_memory_allocated
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache


@contextlib.contextmanager
def limited_memory(size: int, device: Any = None) -> Iterator[None]:
    """Let a device have only `size` bytes more than are in use now."""
    index = index_of(device)
    torch.ops.simulated.limit_memory(index, memory_allocated(index) + size)
    try:
        yield
    finally:
        torch.ops.simulated.limit_memory(index, TOTAL)


# What torch.nn.DataParallel copies with; torch has it for CUDA alone, in `torch._C`


def _broadcast_coalesced(tensors: Any, devices: list[int], buffer_size: int) -> list[Any]:
    return [[tensor.to(f"{NAME}:{index}") for tensor in tensors] for index in devices]


def _scatter(tensor: torch.Tensor, devices: list[int], sizes: Any, dim: int, _: Any) -> list[Any]:
    chunks = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
    return [chunk.to(f"{NAME}:{i}") for i, chunk in zip(devices, chunks, strict=False)]


def _gather(tensors: Any, dim: int, destination: int) -> torch.Tensor:
    return torch.cat([tensor.to(f"{NAME}:{destination}") for tensor in tensors], dim)


# What is counted

WAITS = ("items", "blocking_copies", "copies_back", "synchronisations")


def waits() -> dict[str, int]:
    """Return the counts of what makes the host wait for a real accelerator."""
    return {name: count for name, count in counts().items() if name in WAITS}


def counts() -> dict[str, int]:
    """Return what the host has done since the process began; simulated.cpp says what each is."""
    return dict(torch.ops.simulated.counts())
