"""Memory of the device and the host: measure free memory and peak usage, and release memory."""

import contextlib
import ctypes
import gc
import math
import re
import sys
from pathlib import Path

import torch

MIB = 2**20
# Messages of out-of-memory errors that have no class of their own: CPU, mps, cuBLAS, cuDNN, driver.
NO_MEMORY = re.compile(
    "DefaultCPUAllocator:|MPS backend out of memory|STATUS_ALLOC_FAILED|error: out of memory"
)


def glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, or None."""
    libc = None if sys.platform == "win32" else ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def free_memory(device: torch.device) -> int:
    """Return the free memory in bytes: of the device or, for the CPU, of the machine.

    If it is unknown (macOS, Windows, some accelerators), assume an amount that every device has.
    """
    try:
        if device.type == "cpu":
            kilobytes = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
            return 1024 * int(kilobytes[0])
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free)
    except (OSError, RuntimeError, ValueError):
        return 4 * 2**30


def counted(name: str, device: torch.device) -> float:
    """Return a counter of the backend's allocator, or NaN if it does not have this counter."""
    ask = getattr(torch.get_device_module(device), name, getattr(torch.accelerator, name))
    try:
        return float(ask(device))
    except (RuntimeError, ValueError):
        return math.nan


def peak_memory(device: torch.device) -> float:
    """Return this process's peak memory in bytes: on the device, or resident for CPU and mps."""
    if device.type in ("cpu", "mps"):
        try:
            import resource
        except ImportError:  # not available on Windows
            return math.nan
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return counted("max_memory_allocated", device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset `peak_memory`, if the device supports it."""
    with contextlib.suppress(AttributeError):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this error means that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def release(device: torch.device) -> None:
    """Collect garbage and release unused memory. Slow: call it after a job, never in a step."""
    gc.collect()
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)  # also releases the pages that `tuning.keep_pages` has kept
    if device.type != "cpu":
        backend = torch.get_device_module(device)  # torch.accelerator.empty_cache fails on mps
        # Not every torch version and device has these caches. Once a kernel has failed, every call
        # to the device raises an error.
        with contextlib.suppress(RuntimeError, AttributeError):
            backend.empty_cache()
            torch.accelerator.empty_host_cache()  # pinned memory
