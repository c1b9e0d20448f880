"""The only file that knows backends.

Choose a device and a precision, move batches, seed generators, measure memory, explain errors.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import math
import os
import pickle
import random
import re
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy
import torch

from stoker.trainer import batch as batches
from stoker.trainer import launch, settings
from stoker.trainer.errors import TrainingError, UserError, did_you_mean, log

MIB = 2**20
# torch's message if the memory of a tensor is in another order.
NO_VIEW = "view size is not compatible"
# Errors without a type of their own: the CPU's allocator, mps, cuBLAS and cuDNN, the driver.
NO_MEMORY = (
    "DefaultCPUAllocator:",
    "MPS backend out of memory",
    "STATUS_ALLOC_FAILED",
    "error: out of memory",
)
# What torch says of tensors on two devices; the second of an RNN's hidden state.
TWO_DEVICES = (
    "on the same device",
    "at the same device",
    "is not on the expected device",
    "Expected object of device type",
)
DEVICE = r"\b(?:cpu|meta|[a-z]+:\d+)\b"  # its name in a message of torch's
HERE = os.path.dirname(__file__) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
CPU = torch.device("cpu")
UNIFIED = ("cpu", "mps", "meta")  # devices whose memory is the host's: nothing is pinned for them
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
        refuse(name, names)
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
    device = torch.device(kind, index)
    if kind == "cuda":
        check_kernels(device)
    return device


def refuse(name: str, names: Sequence[str]) -> NoReturn:
    """Raise UserError for a device that is not one of `names`, those of this machine."""
    advice = f"Type device=auto or device={names[-1]}."
    kind = name.partition(":")[0]
    try:
        torch.device(name)
    except RuntimeError:
        hint = did_you_mean(kind, names[1:])
        raise UserError(f"device={name}: torch knows no such device.{hint} {advice}") from None
    reason = ""
    if kind in names[1:]:
        listed = ", ".join(names[2:]) or f"only {kind}:0"
        visible = os.environ.get(settings.VISIBLE_GPUS)
        shown = f" with {settings.VISIBLE_GPUS}={visible}" if visible else ""
        reason = f", but {listed}{shown}"
    elif kind == "cuda":
        reason = f": {no_cuda(**cuda_facts())}"
    raise UserError(f"device={name}: this machine has no such device{reason}. {advice}")


# Why there is no GPU


def cuda_facts() -> dict[str, Any]:
    """Return the arguments of `no_cuda` for this machine."""
    driver = os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/kfd")
    error = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as failure:  # without CUDA, torch asserts that it has it
        error = str(failure)
    return {
        "has_driver": driver or shutil.which("nvidia-smi") is not None,
        "built_for": torch.version.cuda or torch.version.hip,
        "visible": os.environ.get(settings.VISIBLE_GPUS),
        "error": error,
    }


def no_cuda(has_driver: bool, built_for: str | None, visible: str | None, error: str) -> str:
    """Return why torch cannot use a GPU.

    Args:
        has_driver: Whether the driver of a GPU is installed.
        built_for: Version of CUDA or ROCm that torch was built for; None for a CPU build.
        visible: Value of CUDA_VISIBLE_DEVICES.
        error: Message of torch when it looked for a GPU.
    """
    if not has_driver:
        build = "" if built_for else ", and torch is a build for the CPU"
        return f"there is no driver of a GPU{build}"
    if not built_for:
        return "torch is a build for the CPU; https://pytorch.org/get-started has one for the GPU"
    if visible is not None and visible.strip() in ("", "-1"):
        return f"{settings.VISIBLE_GPUS}={visible} hides every GPU"
    if "too old" in error:
        return f"the driver is too old for torch's CUDA {built_for}; update it"
    if error:
        sentence = re.split(r"[.\n]", error)[0]
        return f"torch says: {sentence}"
    return "torch sees no GPU"


@functools.cache
def warn_of_idle_gpu() -> None:
    """Warn once if this machine has a GPU that torch cannot use, unless you have hidden it."""
    facts = cuda_facts()
    if facts["has_driver"] and facts["visible"] is None:
        log.warning("device=auto: training on the CPU, since %s.", no_cuda(**facts))


def check_kernels(device: torch.device) -> None:
    """Raise UserError if this build of torch has no kernels for the GPU."""
    capability = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    if not has_kernels(capability, built_for):
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"device={device}: torch {torch.__version__} has no kernels for {name} "
            f"(sm_{capability[0]}{capability[1]}), only for {', '.join(built_for)}.\n"
            "Install another build (https://pytorch.org/get-started), or type device=cpu."
        )


def has_kernels(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return whether one of these architectures (sm_90, compute_120) runs on such a GPU.

    Binaries (sm) run on the same major version from their minor version on, those with a letter
    (sm_90a) on theirs only; PTX (compute) is compiled for any later GPU. ROCm's names (gfx90a) are
    not compared.
    """
    names = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name) for name in built_for]
    for name in names:
        if name is None:
            return True
        version = (int(name[2]), int(name[3]))
        is_portable = not name[4] and (name[1] == "compute" or version[0] == capability[0])
        if version == capability or (version < capability and is_portable):
            return True
    return not names


def make_current(device: torch.device) -> None:
    """Let the calls that name no device be for this one: another Trainer may have chosen one."""
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
    free, _ = memory_info(device)
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


def check_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if matrix products under autocast are not of this dtype on the device."""
    if device.type == "cpu":
        return
    matrix = torch.ones(1, 1, device=device)
    reason = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch disables it
        try:
            with torch.autocast(device.type, dtype=dtype):
                works = (matrix @ matrix).dtype == dtype
        except (RuntimeError, AssertionError) as error:
            works = False
            reason = f" ({str(error).partition('.')[0]})"
    if not works:
        raise UserError(
            f"precision: {device.type} has no autocast to {dtype}{reason}.\nType precision=fp32."
        )


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
    check_autocast(device, dtype)
    return torch.autocast(device.type, dtype=dtype)


def settle_layout(module: torch.nn.Module, in_shape: Sequence[int], device: torch.device) -> None:
    """Undo channels_last if the module's forward cannot handle it: `view` of an image cannot."""
    if not any(isinstance(child, CONVOLUTIONS) for child in module.modules()):
        return
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            module(torch.zeros(2, *in_shape, device=device))
    except Exception as error:  # any other error will come up in the first step
        if NO_VIEW in str(error):
            module.to(memory_format=torch.contiguous_format)
            log.warning(
                "%s uses .view() on images: it stays out of channels_last.", type(module).__name__
            )
    finally:
        for child, training in modes:
            child.training = training


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
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"{name} does not fit on {device}: {describe_memory(device)}.\nType a smaller model."
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
    if device.type == "mps":
        return
    if device.type == "cpu":
        compilers = [os.environ.get("CXX") or "g++", "clang++", "cl"]
        if not any(shutil.which(compiler) for compiler in compilers):
            raise UserError(
                "compile=true: there is no C++ compiler (g++, clang++ or cl) on the PATH.\n"
                "Install one, or type compile=false."
            )
        return
    # private: torch.utils._triton.has_triton, no public check exists, torch 2.15
    from torch.utils._triton import has_triton

    if not has_triton():
        raise UserError(
            f"compile=true: Triton does not work on {device}.\n"
            "Install it (pip install triton), or type compile=false."
        )


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch on the device: any nesting of tensors and of objects with `.to`.

    The host's tensors are pinned and copied beside the work of the device: nothing waits for it.
    """
    if isinstance(batch, (list, tuple)) and all(
        isinstance(x, torch.Tensor) and x.device == device for x in batch
    ):
        return batch  # our loaders have moved it

    def to(_: str, leaf: Any) -> Any:
        is_plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if device.type not in UNIFIED and is_plain and leaf.is_cpu:
            return copy_beside(leaf.pin_memory(), device)
        return leaf.to(device)

    return batches.walk(to, batch)


def copy_beside(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a pinned tensor to the device while it works on earlier steps.

    In the stream of the work, the copy would wait for them.
    """
    backend = torch.get_device_module(device)
    work_stream = backend.current_stream(device)
    stream = copy_stream(device)
    with backend.stream(stream):
        copied = tensor.to(device, non_blocking=True)
    work_stream.wait_stream(stream)
    copied.record_stream(work_stream)  # keeps its memory until the work on it is done
    return copied


@functools.cache
def copy_stream(device: torch.device) -> Any:
    """Return the device's one stream for copies."""
    return torch.get_device_module(device).Stream(device)


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

    Each replay returns the same tensors. Other threads may go on to pin memory meanwhile.
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


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor that was just made on the CPU on the device, without waiting for it."""
    if device.type in UNIFIED:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU, which is there once its device is synchronized.

    What a GPU copies without being waited for goes into pinned memory.
    """
    return tensor.to(
        CPU,
        copy=True,
        non_blocking=tensor.device.type not in UNIFIED,
        memory_format=torch.contiguous_format,
    )


def mix_seed(*parts: object) -> int:
    """Return a 63-bit seed from any parts (numbers, strings).

    A hash: with `seed + epoch`, neighbours would share their streams.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(device: torch.device, seed: int, replicas: Sequence[int] = ()) -> None:
    """Seed the default generators: of Python, numpy, torch, the device and the GPUs with replicas.

    It takes 14 us; torch.manual_seed alone goes through every backend in 275 us.
    """
    random.seed(seed)  # as `seed_python`, in one call less per step
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cpu":
        return
    backend = torch.get_device_module(device)
    backend.manual_seed(seed)
    for index in replicas:  # each GPU of a DataParallel draws from its own generator
        if index != device.index:
            backend.default_generators[index].manual_seed(mix_seed(seed, index))


def seed_python(seed: int) -> None:
    """Seed the global generators of the modules random and numpy."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def host_random_states() -> bytes:
    """Return the states of the global generators of the modules random and numpy, to compare."""
    return pickle.dumps((random.getstate(), numpy.random.get_state()))


def random_states(
    device: torch.device, replicas: Sequence[int] = ()
) -> list[tuple[Callable[[Any], None], Any]]:
    """Return the states of the generators that `seed_generators` seeds."""
    states: list[tuple[Callable[[Any], None], Any]] = [
        (random.setstate, random.getstate()),
        (numpy.random.set_state, numpy.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        states.append((backend.set_rng_state, backend.get_rng_state()))
        for index in replicas:
            generator = backend.default_generators[index]
            states.append((generator.set_state, generator.get_state()))
    return states


def set_random_states(states: Sequence[tuple[Callable[[Any], None], Any]]) -> None:
    """Set the generators back to where `random_states` saw them."""
    for set_state, state in states:
        set_state(state)


@contextlib.contextmanager
def random_stream(*parts: object) -> Iterator[None]:
    """Draw from a stream of these parts in this context: torch's CPU generator, random, numpy."""
    states = random_states(CPU)
    seed_generators(CPU, mix_seed(*parts))
    try:
        yield
    finally:
        set_random_states(states)


def wait_for_each_call() -> None:
    """Let each call on a GPU wait for its kernels, if CUDA has not begun in this process."""
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
    # Unknown (macOS, Windows, some accelerators): a size that any device of today has.
    return 4 * 2**30 if free is None else free


def memory_info(device: torch.device) -> tuple[int | None, int | None]:
    """Return the bytes that are free and those in all, each None if nothing says so."""
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
    """Return what the backend's allocator counts under this name, NaN if it counts nothing."""
    ask = getattr(torch.get_device_module(device), name, getattr(torch.accelerator, name))
    try:
        return float(ask(device))
    except (RuntimeError, ValueError):
        return math.nan


def describe_memory(device: torch.device) -> str:
    """Return "0.4 of 24.0 GiB free, 23.1 GiB held by this process", as far as it is known."""
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
    """Start counting `peak_memory` from here, where the device can."""
    if device.type != "cpu":
        backend = torch.get_device_module(device)
        if hasattr(backend, "reset_peak_memory_stats"):
            backend.reset_peak_memory_stats(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device's or the machine's memory is too small."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def release(device: torch.device) -> None:
    """Collect garbage and return unused memory: at the end of a job, never in a step."""
    gc.collect()
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)  # what `tuning.keep_pages` has kept
    if device.type != "cpu":
        # torch.accelerator.empty_cache fails on mps in some releases.
        empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
        # A device whose kernel has failed refuses every call, and has nothing to give back.
        with contextlib.suppress(torch.AcceleratorError):
            if empty_cache is not None:
                empty_cache()


def explain(
    error: BaseException, module: torch.nn.Module, batch: Any, device: torch.device
) -> UserError | None:
    """Return a UserError that says what to change, or None.

    For tensors on two devices, of which it names those in the wrong place or the line, for a `view`
    of an image in channels_last order, and for statistics of one sample.
    """
    text = str(error)
    name = type(module).__name__
    if "device-side assert" in text:
        return UserError(
            f"A check inside a kernel on {device} has failed (device-side assert): usually a class "
            "in the targets, or an index into an Embedding, is out of range.\n"
            "Type device=cpu: there, the same step says which."
        )
    if "Expected more than 1 value per channel" in text:
        return UserError(
            f"{name}: BatchNorm has to see two samples at once, and a batch or micro-batch has "
            "one.\nType drop_last=true, or another batch_size or micro_batch."
        )
    kernels = [parameter for parameter in module.parameters() if parameter.ndim == 4]
    if NO_VIEW in text and not all(kernel.is_contiguous() for kernel in kernels):
        return UserError(
            f"{name}: .view() of an image, whose memory is in the order channels_last.\n"
            "Write .flatten(1) or .reshape() there, or type channels_last=false."
        )
    if not is_of_two_devices(text):
        return None
    begin = f"Tensors on two devices: the Trainer works on {device}, but"
    wrong = misplaced(module, batch, device)
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return UserError(f"{begin} {'; '.join(wrong[:3])}{more}.")
    line = innermost_line(error)
    place = "no parameter, buffer or batch entry is on another"
    if line is not None:
        named = [name for name in re.findall(DEVICE, text) if name != str(device)]
        where = f" on {named[0]}" if named else " on another"
        place = f"{line.filename}:{line.lineno} has one{where}:\n{line.line}"
    return UserError(
        f"{begin} {place}\nA tensor made in forward wants device=inputs.device; one that the model "
        "keeps is a buffer: self.register_buffer."
    )


def is_of_two_devices(text: str) -> bool:
    """Return whether a message of torch's says that tensors are on different devices."""
    if any(phrase in text for phrase in TWO_DEVICES):
        return True
    # "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same"
    backends = set(re.findall(r"\(torch\.(\w+\.)?\w+Tensor\)", text))
    return len(backends) > 1


def innermost_line(
    error: BaseException, libraries: tuple[str, ...] = (TORCH,)
) -> traceback.FrameSummary | None:
    """Return the line of yours, or of a model, in which a library raised the error; None if none.

    These are the paths of the libraries.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(libraries):
            continue
        return None if frame.filename.startswith(HERE) else frame
    return None


def misplaced(module: torch.nn.Module, batch: Any, device: torch.device) -> list[str]:
    """Return "buffer 'mask' is on cpu" for each tensor of these that is not on the device."""
    return [
        f"{place} is on {tensor.device}"
        for place, tensor in named_tensors(module, batch)
        if tensor.device != device
    ]


def named_tensors(module: torch.nn.Module, batch: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (how to call it, tensor) for all tensors of a module and a batch."""
    named: list[tuple[str, torch.Tensor]] = []
    for name, parameter in module.named_parameters():
        named.append((f"parameter {name!r}", parameter))
    for name, buffer in module.named_buffers():
        named.append((f"buffer {name!r}", buffer))
    # A tensor kept as a plain attribute does not move with the module: the usual mistake.
    advice = "(make it a buffer: self.register_buffer)"
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if not isinstance(value, (torch.Tensor, list, tuple)):
                continue
            place = f"{path}.{name}".lstrip(".")
            for entry, tensor in batches.entries(value):
                named.append((f"attribute {entry.replace('batch', place, 1)!r} {advice}", tensor))
    for name, tensor in batches.entries(batch):
        named.append((f"batch entry {name!r}", tensor))
    return named
