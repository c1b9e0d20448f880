"""The only file that knows backends: choose a device and a precision, move batches, seed, memory, explain errors."""

import contextlib
import ctypes
import functools
import gc
import hashlib
import math
import os
import random
import shutil
import sys
import time
import warnings

import numpy
import torch
from stoker.trainer import batch as batches
from stoker.trainer import launch, settings
from stoker.trainer.errors import TrainingError, UserError, log

MIB = 2**20
NO_VIEW = "view size is not compatible"  # how torch says that a tensor's memory is in another order
# Errors that are no torch.OutOfMemoryError: of the CPU's allocator, of mps, of cuBLAS and cuDNN, of the driver.
NO_MEMORY = (
    "DefaultCPUAllocator:",
    "MPS backend out of memory",
    "STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)  # those that have a channels_last
GRAPHS = ("cuda",)  # the devices on which a whole step can be captured
FUSED = ("cpu", "cuda", "mps", "xpu")  # the devices for which torch has fused optimizers


def available():
    """The names that `device=` takes on this machine: cpu, the accelerator, and each of several by number."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    return ["cpu", accelerator.type] + [
        f"{accelerator.type}:{i}" for i in range(count) if count > 1
    ]


def choose(name="auto"):
    """The torch.device for `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`, made the current one.

    UserError where it is not there.
    """
    there = available()
    name = str(name)
    if name == "auto":
        name = there[1] if len(there) > 1 else "cpu"
    kind, _, number = name.partition(":")
    if number and launch.local_world_size() > 1:
        raise UserError(
            f"device={name}: {launch.local_world_size()} processes have a GPU each. Type device={kind}."
        )
    if name not in there and not (
        kind in there and number == "0"
    ):  # "cuda:0" is there where "cuda" is
        what = f"this machine has {' and '.join(there)}. Type device=auto or device={there[-1]}."
        raise UserError(f"device={name}: {what}")
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    index = int(number or launch.local_rank())
    if index >= torch.accelerator.device_count():
        count, wanted = torch.accelerator.device_count(), launch.local_world_size()
        raise UserError(
            f"device={name}: {wanted} processes on a machine with {count} GPUs. Start {count} at most."
        )
    # Before anything else touches a GPU, or device 0 would get a context of its own.
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def describe(device):
    """The device's name with its threads or its memory, for people."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    backend = torch.get_device_module(device)
    name = backend.get_device_name(device) if hasattr(backend, "get_device_name") else device.type
    return f"{device} ({name}, {free_memory(device) / 2**30:.0f} GiB free)"


def choose_precision(name, device):
    """(the autocast dtype or None for fp32, the reason) for `auto`, `fp32`, `bf16` or `fp16` on this device."""
    settings.check("precision", name)
    if name != "auto":
        slow = (
            "; slow on cpu" + ", bf16 is not" * has_bf16()
            if (name, device.type) == ("fp16", "cpu")
            else ""
        )
        return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[
            name
        ], f"as asked{slow}"
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


def grad_scaler(device, dtype):
    """A GradScaler that does something for fp16 only."""
    return torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)


def autocast(device, dtype):
    """A context that can be entered again and again: autocast to `dtype`, or nothing for None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def settle_layout(module, in_shape, device):
    """Takes channels_last back where the module's forward cannot do with it: a `view` of an image, as many have it."""
    if not any(isinstance(child, CONVOLUTIONS) for child in module.modules()):
        return
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            module(torch.zeros(2, *in_shape, device=device))
    except Exception as error:  # whatever else it is will come up in the first step
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


def place(module, device, channels_last="auto"):
    """The module on the device; the kernels of its 2-D convolutions in the order channels_last.

    That is 1.5 to 2.5 times as fast on CPUs, and what tensor cores work in. `auto` leaves it out on mps.
    """
    settings.check("channels_last", channels_last)
    try:
        module.to(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        memory = f"{device}: {describe_memory(device)}"
        raise TrainingError(
            f"{type(module).__name__} does not fit on {memory}.\nType a smaller model."
        ) from error
    convolutions = [child for child in module.modules() if isinstance(child, CONVOLUTIONS)]
    if channels_last is True and not convolutions:
        raise UserError(
            f"channels_last=true: {type(module).__name__} has no 2-D convolution. Type channels_last=auto."
        )
    if channels_last is True or (channels_last == "auto" and device.type != "mps"):
        for convolution in convolutions:
            convolution.to(memory_format=torch.channels_last)
    return module


def check_compiler(device):
    """UserError where `compile=true` cannot work.

    TorchInductor needs a C++ compiler on the CPU, nothing on mps, and Triton elsewhere.
    """
    if device.type == "mps":
        return  # Inductor writes Metal there
    if device.type == "cpu":
        compilers = [os.environ.get("CXX") or "g++", "clang++", "cl"]
        if not any(shutil.which(compiler) for compiler in compilers):
            raise UserError(
                "compile=true: there is no C++ compiler (g++, clang++ or cl) on the PATH.\n"
                "Install one, or type compile=false."
            )
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise UserError(
            f"compile=true: Triton does not work on {device}.\nInstall it (pip install triton), or type compile=false."
        )


def move(batch, device):
    """The batch on the device: any nesting of tensors and objects with `.to`; other things unchanged.

    From pinned memory the copy goes on beside the work of the device.
    """
    if isinstance(batch, (list, tuple)) and all(
        isinstance(x, torch.Tensor) and x.device == device for x in batch
    ):
        return batch  # what our loaders give is there already

    def to(_, leaf):
        pinned = (
            isinstance(leaf, torch.Tensor)
            and device.type not in ("cpu", "mps")
            and leaf.is_pinned()
        )
        return copy_beside(leaf, device) if pinned else leaf.to(device)

    return batches.walk(to, batch)


def copy_beside(tensor, device):
    """A pinned tensor's copy on the device, made while the steps before it are still being worked on.

    In the stream of the work it would wait for them.
    """
    backend = torch.get_device_module(device)
    work, beside = backend.current_stream(device), copy_stream(device)
    with backend.stream(beside):
        copied = tensor.to(device, non_blocking=True)
    work.wait_stream(beside)
    copied.record_stream(work)  # or its memory could be given away before the work on it is done
    return copied


@functools.cache
def copy_stream(device):
    """The one stream of the device for copies."""
    return torch.get_device_module(device).Stream(device)


def beside(work, batch, device):
    """`work(batch)` in the stream in which graphs are captured: what autograd makes in another cannot be in a graph."""
    backend = torch.get_device_module(device)
    here, aside = backend.current_stream(device), capture_stream(device)
    aside.wait_stream(here)
    with backend.stream(aside):
        result = work(batch)
    here.wait_stream(aside)
    return result


def record(work, batch, device):
    """A function that does `work(batch)` again on the same memory, as one graph; it gives the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(device)):
        result = work(batch)

    def replay():
        graph.replay()
        return result

    return replay


@functools.cache
def capture_stream(device):
    """The one stream of the device for captures, and for the steps in front of them."""
    return torch.get_device_module(device).Stream(device)


def to_device(tensor, device):
    """A tensor that was just made on the CPU, on the device; through pinned memory, so that nothing waits for it."""
    if device.type in ("cpu", "mps"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def mix_seed(*parts):
    """A 63-bit seed from any parts (numbers, strings).

    A real hash, since `seed + epoch` makes neighbours share their streams.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(device, seed, replicas=()):
    """Seeds the default generators of the CPU, the device and the GPUs with replicas.

    8 us, where torch.manual_seed walks through every backend (275 us).
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    for index in replicas:  # each GPU of a DataParallel draws from its own generator
        if index != device.index:
            torch.get_device_module(device).default_generators[index].manual_seed(
                mix_seed(seed, index)
            )


def random_states(device):
    """The states of the default generators of the CPU and the device, for `set_random_states`."""
    owners = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    return [(owner, owner.get_rng_state()) for owner in owners]


def set_random_states(states):
    """Has the generators go on where they stood when `random_states` was asked."""
    for owner, state in states:
        owner.set_rng_state(state)


@contextlib.contextmanager
def random_stream(*parts):
    """Within, the CPU's generators of torch, Python and numpy draw from a stream of these parts; then they go on."""
    seed = mix_seed(*parts)
    outside = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(outside[0])
        random.setstate(outside[1])
        numpy.random.set_state(outside[2])


def synchronize(device):
    """Waits for the device; a clock read after this tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def mark(device):
    """A point in the work of the device, for `seconds_between`; nothing waits for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def has_caught_up(mark):
    """Whether a device beside the CPU has come to the mark: it waits for what Python gives it next."""
    return not isinstance(mark, float) and mark.query()


def seconds_between(start, end):
    """The seconds from one mark to another one; the device has to have come to both."""
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1000


def has_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    # private: torch.cpu._is_*_supported, no public name yet, torch 2.15; a release without them gets no advice
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


def free_memory(device):
    """Bytes that can still be taken on the device (the machine's available memory for the CPU)."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if device.type != "cpu":
        return torch.get_device_module(device).mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(
                int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return 4 * 2**30  # no /proc (macOS, Windows): a size that any machine of today has


def describe_memory(device):
    """'0.4 of 24.0 GiB free, 23.1 held by this process', as far as it is known."""
    free, total, held = None, None, peak_memory(device)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        free, held = free_memory(device), torch.mps.driver_allocated_memory()
    elif device.type != "cpu":
        backend = torch.get_device_module(device)
        (free, total), held = backend.mem_get_info(device), backend.memory_reserved(device)
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = free_memory(device) if os.path.exists("/proc/meminfo") else None
    known = (
        []
        if total is None
        else [f"{gib(free)} of {gib(total)} GiB free" if free else f"{gib(total)} GiB in all"]
    )
    return ", ".join(known + [f"{gib(held)} GiB held by this process"] * (not math.isnan(held)))


def gib(size):
    return f"{size / 2**30:,.1f}"


def peak_memory(device):
    """The most bytes that this process has held: allocated on the device, or resident for the CPU and mps."""
    if device.type in ("cpu", "mps"):
        try:
            import resource
        except ImportError:  # Windows has no such module
            return float("nan")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return torch.accelerator.max_memory_allocated(device)


def reset_peak_memory(device: torch.device) -> None:
    """Start counting `peak_memory` from here, where the device can."""
    backend = None if device.type == "cpu" else torch.get_device_module(device)
    if hasattr(backend, "reset_peak_memory_stats"):
        backend.reset_peak_memory_stats(device)


def is_out_of_memory(error):
    """Whether an error says that the device's memory, or the machine's, is too small for what was asked."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def release(device):
    """Gives memory back: collects garbage, then empties the device's cache. For the end of a job, never for a step."""
    gc.collect()
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)  # what `process.keep_pages` has kept and nobody uses
    if device.type != "cpu":
        torch.get_device_module(
            device
        ).empty_cache()  # torch.accelerator's fails on mps in some releases


def explain(error, module, batch, device):
    """A UserError that says what to change, or None.

    For torch's "expected all tensors to be on the same device", of which it names the tensors in the wrong place, for
    a `view` of an image in channels_last order, and for statistics of one sample.
    """
    text = str(error)
    if "Expected more than 1 value per channel" in text:
        return UserError(
            f"{type(module).__name__}: BatchNorm has to see two samples at once, and a batch or micro-batch has one.\n"
            "Type drop_last=true, or another batch_size or micro_batch."
        )
    kernels = [parameter for parameter in module.parameters() if parameter.ndim == 4]
    if NO_VIEW in text and not all(kernel.is_contiguous() for kernel in kernels):
        return UserError(
            f"{type(module).__name__}: .view() of an image, whose memory is in the order channels_last.\n"
            "Write .flatten(1) or .reshape() there, or type channels_last=false."
        )
    if "on the same device" not in text and "is not on the expected device" not in text:
        return None
    found = [(f"parameter {name!r}", tensor) for name, tensor in module.named_parameters()]
    found += [(f"buffer {name!r}", tensor) for name, tensor in module.named_buffers()]
    # A tensor kept as a plain attribute does not move with the module: the usual mistake.
    for path, child in module.named_modules():
        plain = (
            (f"{path}.{name}".lstrip("."), value)
            for name, value in vars(child).items()
            if isinstance(value, torch.Tensor)
        )
        found += [
            (f"attribute {name!r} (make it a buffer: self.register_buffer)", tensor)
            for name, tensor in plain
        ]
    found += [(f"batch entry {name!r}", tensor) for name, tensor in batches.entries(batch)]
    wrong = [f"{name} is on {tensor.device}" for name, tensor in found if tensor.device != device]
    if not wrong:
        wrong = [
            "no parameter, buffer or batch entry; a tensor made inside forward, which wants device=inputs.device"
        ]
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return UserError(
        f"Tensors on two devices: the Trainer works on {device}, but {'; '.join(wrong[:3])}{more}."
    )
