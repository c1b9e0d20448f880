"""Choose a device, a precision and kernels; capture graphs, and wait for the device."""

import contextlib
import functools
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stoker.trainer import launch, memory, settings
from stoker.trainer.errors import TrainingError, UserError, first_line, log
from stoker.trainer.modes import modes_restored

# torch's message if the memory of a tensor is in another order.
NO_VIEW = "view size is not compatible"
CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)  # with a channels_last order
GRAPHS = ("cuda",)  # devices that can capture a whole step
REPLICAS = ("cuda",)  # devices between which torch.nn.DataParallel copies: its kernels are CUDA's


def available() -> list[str]:
    """Return the names for `device=` on this machine: cpu, the accelerator, each of several."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    names = ["cpu", accelerator.type]
    count = torch.accelerator.device_count()
    if count > 1:
        names += [f"{accelerator.type}:{i}" for i in range(count)]
    return names


def choose(name: object = "auto") -> torch.device:
    """Return the torch.device for `auto`, `cpu`, `cuda:1` and so on; make it current.

    It may be any device of torch's accelerator, also of one that another package has registered.

    Raises:
        UserError: This machine does not have it.
    """
    settings.check("device", name)
    names = available()
    name = str(name)
    if name == "auto":
        name = names[1] if len(names) > 1 else "cpu"
        if name == "cpu":
            warn_of_idle_gpu()
    kind, _, number = name.partition(":")
    processes = launch.local_world_size()
    if number and processes > 1:
        raise UserError(
            f"device={name}: {processes} processes have a GPU each. Type device={kind}."
        )
    is_only_one = kind in names and number == "0"  # "cuda:0" of a single GPU
    if name not in names and not is_only_one:
        reason = f": {no_cuda()}" if kind == "cuda" and kind not in names else ""
        raise UserError(
            f"device={name}: this machine has no such device{reason}.\n"
            f"Type device=auto, or one of: {', '.join(names)}."
        )
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    index = int(number or launch.local_rank())
    count = torch.accelerator.device_count()
    if index >= count:
        raise UserError(
            f"device={name}: {processes} processes on a machine with {count} GPUs. "
            f"Start {count} at most."
        )
    # Before anything else touches a GPU, or device 0 would get a context.
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


@functools.cache
def warn_of_idle_gpu() -> None:
    """Warn once if this machine has a GPU that torch cannot use, unless you have hidden it."""
    if has_driver() and settings.VISIBLE_GPUS not in os.environ:
        log.warning("device=auto: training on the CPU, since %s.", no_cuda())


def has_driver() -> bool:
    """Return whether the driver of a GPU is installed."""
    drivers = ("/proc/driver/nvidia/version", "/dev/kfd")
    return any(map(os.path.exists, drivers)) or shutil.which("nvidia-smi") is not None


def no_cuda() -> str:
    """Return why torch cannot use a GPU of this machine."""
    if not has_driver():
        return "no GPU driver is installed"
    if torch.version.cuda is None and torch.version.hip is None:
        return "this is a CPU-only build of torch; https://pytorch.org/get-started has one for GPUs"
    visible = os.environ.get(settings.VISIBLE_GPUS)
    if visible in ("", "-1"):
        return f"{settings.VISIBLE_GPUS}={visible} hides every GPU"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # that the driver is too old, for example
        return f"torch says: {first_line(error).partition('.')[0]}"
    return "torch sees no GPU"


def make_current(device: torch.device) -> None:
    """Use this device for calls that name none: another Trainer may have chosen one."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def describe(device: torch.device) -> str:
    """Return the device's name with its threads or its memory, for people."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'' if threads == 1 else 's'}"
    backend = torch.get_device_module(device)
    facts = []
    if hasattr(backend, "get_device_name"):
        facts.append(backend.get_device_name(device))
    free, _ = memory.memory_info(device)
    if free is not None:
        facts.append(f"{free / 2**30:.0f} GiB free")
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        facts.append("cuDNN benchmark on")
    return f"{device} ({', '.join(facts)})" if facts else str(device)


def choose_precision(name: str, device: torch.device) -> tuple[torch.dtype | None, str]:
    """Return (the autocast dtype or None for fp32, the reason) for a `precision` on this device."""
    settings.check("precision", name)
    if name == "auto":
        return auto_precision(device)
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if name == "fp16" and device.type == "cpu":
        better = ", bf16 is not" if has_bf16() else ""
        return dtype, f"as asked; slow on cpu{better}"
    return dtype, "as asked"


def auto_precision(device: torch.device) -> tuple[torch.dtype | None, str]:
    """Return what `precision=auto` means: half precision where the hardware multiplies it."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or major >= 8:
            return torch.bfloat16, "native here"
        if major == 7:
            return torch.float16, f"tensor cores of sm_{major}{minor}, which have no bf16"
        return None, f"no tensor cores in sm_{major}{minor}"
    if device.type == "xpu":
        return torch.bfloat16, "native here"
    if device.type == "cpu" and has_bf16():
        return None, "the default on cpu; precision=bf16 is faster on this one"
    return None, f"the default on {device.type}"


@functools.cache
def wide_type(kind: str) -> torch.dtype:
    """Return the type to sum in on a kind of device: float64, or float32 where it is missing."""
    try:
        torch.zeros(1, dtype=torch.float64, device=kind).sum()
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def has_fused(device: torch.device) -> bool:
    """Return whether torch or the device's package has fused optimizers for it."""
    if device.type == "meta":  # its kernels only tell shapes
        return False
    # private: torch._C._dispatch_*, no public name says whose kernel would run, torch 2.15
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key)


def grad_scaler(device: torch.device, dtype: torch.dtype | None) -> torch.amp.GradScaler:
    """Return a GradScaler, which does nothing except for fp16."""
    return torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)


def autocast(
    device: torch.device, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    """Return a reusable context: autocast to `dtype`, or nothing for None.

    Raises:
        UserError: The device does not autocast to it.
    """
    if dtype is None:
        return contextlib.nullcontext()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns that it does nothing
            return torch.autocast(device.type, dtype=dtype)
    except (RuntimeError, UserWarning) as error:
        raise UserError(
            f"precision: {device.type} has no autocast to {dtype} ({first_line(error)}).\n"
            "Type precision=fp32."
        ) from None


def settle_layout(module: torch.nn.Module, in_shape: Sequence[int], device: torch.device) -> None:
    """Undo channels_last if the module's forward cannot handle it, as `view` of an image."""
    if not any(isinstance(child, CONVOLUTIONS) for child in module.modules()):
        return
    try:
        with modes_restored(module), torch.no_grad():
            module.eval()
            module(torch.zeros(2, *in_shape, device=device))
    except Exception as error:  # any other error will show up in the first step
        if NO_VIEW in str(error):
            module.to(memory_format=torch.contiguous_format)
            log.warning(
                "%s uses .view() on images: it does not use channels_last.", type(module).__name__
            )


def choose_kernels(device: torch.device, deterministic: bool) -> None:
    """Turn TF32 and cuDNN's search for kernels on, or allow only deterministic kernels."""
    # The call imports torch's compiler, which takes a second.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    if device.type != "cuda":
        return
    # cuBLAS is deterministic only with a fixed workspace, and reads this once, at its first use:
    # a later job of the same process may be the deterministic one.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = not deterministic
    # Some releases deprecate these names. The newer names must not be mixed with them.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = not deterministic
        torch.set_float32_matmul_precision("highest" if deterministic else "high")


def place(
    module: torch.nn.Module, device: torch.device, channels_last: bool | str = "auto"
) -> torch.nn.Module:
    """Return the module on the device, the kernels of its 2-D convolutions in channels_last.

    That order is 1.5 to 2.5 times as fast on CPUs, and tensor cores work in it. `auto` leaves it
    out on mps.

    Raises:
        UserError: `channels_last` is True and there is no 2-D convolution.
        TrainingError: The module does not fit into the device's memory.
    """
    settings.check("channels_last", channels_last)
    name = type(module).__name__
    try:
        module.to(device)
    except RuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
        raise TrainingError(
            f"{name} does not fit on {device}: {memory.describe_memory(device)}.\n"
            "Type a smaller model."
        ) from error
    convolutions = [child for child in module.modules() if isinstance(child, CONVOLUTIONS)]
    if channels_last is True and not convolutions:
        raise UserError(
            f"channels_last=true: {name} has no 2-D convolution. Type channels_last=auto."
        )
    if channels_last is True or (channels_last == "auto" and device.type != "mps"):
        for convolution in convolutions:
            convolution.to(memory_format=torch.channels_last)
    return module


def check_compiler(device: torch.device) -> None:
    """Raise UserError if `compile=true` cannot work.

    TorchInductor needs a C++ compiler on the CPU, nothing on mps, and Triton elsewhere.
    """
    missing = None
    if device.type == "cpu":
        compilers = [os.environ.get("CXX") or "g++", "clang++", "cl"]
        if not any(map(shutil.which, compilers)):
            missing = "a C++ compiler (g++, clang++ or cl) on the PATH"
    elif device.type != "mps":
        # private: torch.utils._triton.has_triton, no public check exists, torch 2.15
        from torch.utils._triton import has_triton

        if not has_triton():
            missing = "Triton (pip install triton)"
    if missing is not None:
        raise UserError(
            f"compile=true: {device} needs {missing}.\nInstall it, or type compile=false."
        )


def beside(work: Callable[[Any], Any], batch: Any, device: torch.device) -> Any:
    """Return `work(batch)`, done in the stream that captures graphs.

    What autograd creates in another stream cannot be part of a graph.
    """
    backend = torch.get_device_module(device)
    current = backend.current_stream(device)
    stream = capture_stream(device)
    stream.wait_stream(current)
    with backend.stream(stream):
        result = work(batch)
    current.wait_stream(stream)
    return result


@contextlib.contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError in this context where Python would wait for the device, if torch can."""
    if device.type == "cpu":  # waits for nothing
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def record(work: Callable[[Any], Any], batch: Any, device: torch.device) -> Callable[[], Any]:
    """Capture `work(batch)` as one graph; return a function that replays it on the same memory.

    Each replay returns the same tensors. Other threads may pin memory meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream = capture_stream(device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = work(batch)

    def replay() -> Any:
        graph.replay()
        return result

    return replay


@functools.cache
def capture_stream(device: torch.device) -> Any:
    """Return the device's one stream for captures, and for the steps before them."""
    return torch.get_device_module(device).Stream(device)


def wait_for_each_call() -> None:
    """Let each call on a GPU wait for its kernels, if CUDA has not started in this process."""
    os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")


def synchronize(device: torch.device) -> None:
    """Wait for the device; a clock that is read after this includes its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def mark(device: torch.device) -> Any:
    """Return a point in the work of the device, for `seconds_between`; nothing waits for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def has_caught_up(mark: Any) -> bool:
    """Return whether a device other than the CPU has reached the mark, and waits for Python."""
    return not isinstance(mark, float) and bool(mark.query())


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks, both of which the device has reached."""
    seconds: float = end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
    return seconds


def has_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    # private: torch.cpu._is_*_supported, no public name yet, torch 2.15
    # A release without them gets no advice.
    checks = [
        getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")
    ]
    return any(check() for check in checks if check is not None)
