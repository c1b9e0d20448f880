"""Everything that depends on the device: precision, kernels, graph capture, streams and timing."""

import functools
import inspect
import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from stoker.trainer import launch, memory, settings
from stoker.trainer.errors import TrainingError, UserError, first_line
from stoker.trainer.number_format import counted
from stoker.trainer.spans import SILENT

CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)  # support channels_last
GRAPHS = ("cuda",)  # devices that can capture a whole step
# Messages of errors caused by the device or by torch itself, not by a batch.
NOT_OF_A_BATCH = re.compile("CUDA|cuDNN|CUBLAS|NCCL|INTERNAL ASSERT|^Caught ")
# precision -> dtype of autocast, or None for fp32, which needs no autocast
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
REPLICAS = ("cuda",)  # devices that torch.nn.DataParallel supports


def available() -> list[str]:
    """Return the valid names for `device=` on this machine, such as cpu, cuda and cuda:1."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    names = ["cpu", accelerator.type]
    count = torch.accelerator.device_count()
    if count > 1:
        names += [f"{accelerator.type}:{i}" for i in range(count)]
    return names


def choose(name: object = "auto") -> torch.device:
    """Return the torch.device for `auto`, `cpu`, `cuda:1` and so on, and make it current.

    Any accelerator that torch knows is supported, including one that another package registers.

    Raises:
        UserError: This machine does not have the device.
    """
    settings.check("device", name)
    names = available()
    name = str(name)
    if name == "auto":
        name = names[1] if len(names) > 1 else "cpu"
    kind, _, number = name.partition(":")
    processes = launch.local_world_size()
    # On a machine with one GPU, "cuda:0" is valid too.
    if name not in names and name.removesuffix(":0") not in names:
        reason = f": {no_cuda()}" if kind == "cuda" and kind not in names else ""
        raise UserError(
            f"device={name}: this machine has no such device{reason}.\n"
            f"Type device=auto, or one of: {', '.join(names)}."
        )
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    index = int(number or launch.local_rank())
    count = torch.accelerator.device_count()
    if index >= count or (number and processes > 1):
        raise UserError(
            f"device={name}: each of the {processes} processes needs its own GPU, and this machine "
            f"has {count}.\nType device={kind}, and start at most one process per GPU."
        )
    # Set this before anything else uses a GPU, which would create a context on device 0.
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def no_cuda() -> str:
    """Return the reason why torch cannot use a GPU on this machine."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "torch is a CPU-only build; for a GPU build, see https://pytorch.org/get-started"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # for example, the driver is too old
        return f"torch says: {first_line(error).partition('.')[0]}"
    return "torch does not find a GPU"


def make_current(device: torch.device) -> None:
    """Make this device current again, because another Trainer may have chosen a different one."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def describe(device: torch.device) -> str:
    """Return a description such as "cpu, 2 threads" or "cuda:0 (NVIDIA A100)"."""
    if device.type == "cpu":
        return f"cpu, {counted(torch.get_num_threads(), 'thread')}"
    backend = torch.get_device_module(device)
    if not hasattr(backend, "get_device_name"):
        return str(device)
    return f"{device} ({backend.get_device_name(device)})"


def choose_precision(name: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast for a `precision` on this device; None means fp32.

    `auto` is half precision if the hardware supports it, else fp32.
    """
    settings.check("precision", name)
    if name != "auto":
        return DTYPES[name]
    if device.type not in ("cuda", "xpu"):
        return None
    if device.type == "xpu" or torch.version.hip is not None:
        return torch.bfloat16
    major, _ = torch.cuda.get_device_capability(device)
    if major >= 8:
        return torch.bfloat16
    return torch.float16 if major == 7 else None


@functools.cache
def wide_type(kind: str) -> torch.dtype:
    """Return the dtype for sums on this type of device: float64, or float32 if unsupported."""
    try:
        torch.zeros(1, dtype=torch.float64, device=kind).sum()
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def has_fused(device: torch.device) -> bool:
    """Return whether fused optimizers support the device."""
    if device.type == "meta":  # meta kernels only compute shapes
        return False
    # private: torch._C._dispatch_*, because no public API lists kernels, torch 2.15
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a reusable context that autocasts to `dtype`, or does nothing if it is None."""
    if dtype is None:
        return SILENT
    return torch.autocast(device.type, dtype=dtype)


def choose_kernels(device: torch.device, deterministic: bool) -> None:
    """Turn on TF32 and cuDNN's kernel search, or allow only deterministic kernels."""
    # Call this only to change the mode, because it imports torch's compiler (one second).
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    if device.type != "cuda":
        return
    # cuBLAS is deterministic only with a fixed workspace. It reads this variable once, at its first
    # use, so set it even if only a later job in this process is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = not deterministic
    # Some torch releases deprecate these settings, but old and new ones must not be mixed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = not deterministic
        torch.set_float32_matmul_precision("highest" if deterministic else "high")


def place(
    module: torch.nn.Module, device: torch.device, channels_last: bool | str = "auto"
) -> torch.nn.Module:
    """Move the module to the device, and put the weights of 2-D convolutions in channels_last.

    This memory format is 1.5 to 2.5 times as fast on CPUs, and tensor cores use it. `auto` skips it
    on mps, for models that call `.view()`, which cannot flatten images in this format, and for
    models with a convolution for which `overruns_memory` returns True.

    Raises:
        UserError: `channels_last` is True, but there is no 2-D convolution, or it is not safe.
        TrainingError: The module does not fit into the device's memory.
    """
    settings.check("channels_last", channels_last)
    name = type(module).__name__
    try:
        module.to(device)
    except RuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
        message = f"{name} does not fit into the memory of {device}.\nChoose a smaller model."
        raise TrainingError(message) from error
    convolutions = [child for child in module.modules() if isinstance(child, CONVOLUTIONS)]
    is_unsafe = device.type == "cpu" and any(map(overruns_memory, convolutions))
    if channels_last == "auto":
        is_possible = bool(convolutions) and device.type != "mps" and not is_unsafe
        channels_last = is_possible and not any(map(calls_view, module.modules()))
    elif channels_last and not convolutions:
        raise UserError(
            f"channels_last=true: {name} has no 2-D convolution. Type channels_last=auto."
        )
    elif channels_last and is_unsafe:
        raise UserError(
            f"channels_last=true: {name} has a strided 1x1 convolution with fewer than 16 "
            "channels, for which torch computes incorrect gradients on a CPU.\n"
            "Type channels_last=auto."
        )
    if channels_last:
        for convolution in convolutions:
            convolution.to(memory_format=torch.channels_last)
    return module


def overruns_memory(convolution: Any) -> bool:
    """Return whether torch writes past its memory in this convolution's backward pass on the CPU.

    In channels_last, oneDNN's kernel does so for strided 1x1 convolutions with fewer channels than
    a vector register holds (8 with AVX2, 16 with AVX-512), which crashes or gives wrong gradients
    (oneDNN issue 6035).
    """
    is_transposed = isinstance(convolution, torch.nn.ConvTranspose2d)
    channels = convolution.out_channels if is_transposed else convolution.in_channels
    is_strided = convolution.kernel_size == (1, 1) and max(convolution.stride) > 1
    return bool(is_strided and convolution.groups == 1 and channels < 16)


def calls_view(module: torch.nn.Module) -> bool:
    """Return whether a method or a function attribute of the module calls `.view()`."""
    functions = list(vars(module).values())
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            functions += vars(kind).values()
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    return any("view" in getattr(code, "co_names", ()) for code in codes)


def beside(work: Callable[[Any], Any], batch: Any, device: torch.device) -> Any:
    """Run `work(batch)` in the stream used to capture graphs, and return its result.

    Tensors that autograd has created in another stream cannot be part of a graph.
    """
    backend = torch.get_device_module(device)
    current = backend.current_stream(device)
    aside = stream(device, "captures")
    aside.wait_stream(current)
    with backend.stream(aside):
        result = work(batch)
    current.wait_stream(aside)
    return result


def record(work: Callable[[Any], Any], batch: Any, device: torch.device) -> Callable[[], Any]:
    """Capture `work(batch)` as one graph; return a function that replays it on the same memory.

    Every replay returns the same tensors with new values. Other threads can pin memory during the
    capture.
    """
    graph = torch.cuda.CUDAGraph()
    aside = stream(device, "captures")
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        result = work(batch)

    def replay() -> Any:
        graph.replay()
        return result

    return replay


@functools.cache
def stream(device: torch.device, use: str) -> Any:
    """Return the device's stream for "copies" from the host or for graph "captures"."""
    return torch.get_device_module(device).Stream(device)


def wait_for_each_call() -> None:
    """Make each GPU call wait for its kernels; no effect if this process has already used CUDA."""
    os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock read after this includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def mark(device: torch.device) -> Any:
    """Mark a point in the device's work for `seconds_between`, without waiting for the device."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def has_caught_up(mark: Any) -> bool:
    """Return whether the accelerator has reached the mark, and is therefore idle."""
    return not isinstance(mark, float) and bool(mark.query())


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks. The device must have reached both."""
    seconds: float = end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
    return seconds
