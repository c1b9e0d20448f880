"""Memory of a device and of the host: how much is free, held and was held at most; release it."""

import contextlib
import ctypes
import gc
import math
import os
import sys

import torch

MIB = 2**20
# Out-of-memory errors that have no type of their own: CPU allocator, mps, cuBLAS, cuDNN, driver.
NO_MEMORY = (
    "DefaultCPUAllocator:",
    "MPS backend out of memory",
    "STATUS_ALLOC_FAILED",
    "error: out of memory",
)


def glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, else None."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no None
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on the device (available on the machine for the CPU)."""
    free, _ = memory_info(device)
    # Unknown (macOS, Windows, some accelerators): assume what any device has today.
    return 4 * 2**30 if free is None else free


def memory_info(device: torch.device) -> tuple[int | None, int | None]:
    """Return the (free, total) bytes, each None if unknown."""
    if device.type == "cpu":
        return host_memory()
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    backend = torch.get_device_module(device)
    ask = getattr(backend, "mem_get_info", torch.accelerator.get_memory_info)
    try:
        free, total = ask(device)
    except (RuntimeError, ValueError):  # the backend counts no memory
        return None, None
    return int(free), int(total)


def host_memory() -> tuple[int | None, int | None]:
    """Return `memory_info` of the machine."""
    free = None
    total = None
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable"):
                free = int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free, total


def counted(name: str, device: torch.device) -> float:
    """Return a count of the backend's allocator, NaN if it does not count."""
    ask = getattr(torch.get_device_module(device), name, getattr(torch.accelerator, name))
    try:
        return float(ask(device))
    except (RuntimeError, ValueError):
        return math.nan


def describe_memory(device: torch.device) -> str:
    """Return "0.4 of 24.0 GiB free, 23.1 GiB held by this process", as far as known."""
    free, total = memory_info(device)
    if device.type == "cpu":
        held = peak_memory(device)
    elif device.type == "mps":
        held = torch.mps.driver_allocated_memory()
    else:
        held = counted("memory_reserved", device)
    parts = []
    if total is not None and free:
        parts.append(f"{gib(free)} of {gib(total)} GiB free")
    elif total is not None:
        parts.append(f"{gib(total)} GiB in all")
    if not math.isnan(held):
        parts.append(f"{gib(held)} GiB held by this process")
    return ", ".join(parts)


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"


def peak_memory(device: torch.device) -> float:
    """Return the most bytes that this process has held: on the device, or resident (CPU, mps)."""
    if device.type in ("cpu", "mps"):
        try:
            import resource
        except ImportError:  # Windows does not have it
            return math.nan
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return counted("max_memory_allocated", device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset `peak_memory`, if the device can."""
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        if hasattr(backend, "reset_peak_memory_stats"):
            backend.reset_peak_memory_stats(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def release(device: torch.device) -> None:
    """Collect garbage and release unused memory: at the end of a job, never in a step."""
    gc.collect()
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)  # what `tuning.keep_pages` has kept
    if device.type != "cpu":
        # torch.accelerator.empty_cache fails on mps in some releases.
        empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
        # After a failed kernel, a device refuses every call.
        with contextlib.suppress(torch.AcceleratorError):
            if empty_cache is not None:
                empty_cache()
        # Pinned memory; not all releases and devices have such a cache.
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_host_cache is not None:
            with contextlib.suppress(RuntimeError):
                empty_host_cache()
