"""Tune the process for the CPU: the memory that glibc keeps, and the number of threads."""

import ctypes
import os

import torch
from stoker.trainer import settings

TUNINGS = settings.CHOICES["tune"]
# Multiply-adds of a step, forwards, below which one thread is enough.
FEW = 10_000_000


def tune(parts, device):
    """Tunes this process for the CPU, in those `parts` of TUNINGS that are asked for.

    `allocator` keeps the memory that a step frees (keep_pages). `threads` is for the time of a fit (use_threads).
    """
    settings.check("tune", parts)
    if device.type == "cpu" and "allocator" in parts:
        keep_pages()


def use_threads(module, samples):
    """One thread where a step of so many samples is too small for more.

    Threads wait for each other at each operator, and when any other program runs, that takes longer than such a step.
    Counted are the weights of dense layers; a model with other ones (which use a weight more than once a sample), and
    a number of threads that OMP_NUM_THREADS asks for, are left as they are.
    """
    layers = [
        layer
        for layer in module.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    dense = all(
        isinstance(layer, (torch.nn.Linear, torch.nn.BatchNorm1d, torch.nn.LayerNorm))
        for layer in layers
    )
    if dense and "OMP_NUM_THREADS" not in os.environ and samples:
        weights = sum(
            weight.numel() for layer in layers for weight in layer.parameters(recurse=False)
        )
        if samples * weights < FEW:
            torch.set_num_threads(1)


def keep_pages():
    """Has glibc keep the memory that a step frees for the next one; does nothing with another C library.

    Otherwise each large tensor is mapped and unmapped by the kernel, whose page faults take longer than the work on
    it. It stays so for the whole
    process; `give_back` returns what is not in use.
    """
    if libc := glibc():
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mappings of their own for large blocks
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not shrink the heap at each free


def glibc():
    """The C library if it is glibc, else None."""
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # Windows has no None
        return None


def give_back():
    """Gives the kernel the memory that is kept and not in use."""
    if libc := glibc():
        libc.malloc_trim(0)


def has_bf16():
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    # Not public yet in torch.cpu; a release without them gives no advice.
    known = [
        getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")
    ]
    return any(supported() for supported in known if supported is not None)
