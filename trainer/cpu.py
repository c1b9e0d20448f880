"""What is fitted to the processor: glibc's memory, oneDNN's linear layers, the number of threads."""

import ctypes
import os

import torch

from trainer import settings

TUNINGS = settings.CHOICES["tune"]
# Multiply-adds of a step, forwards, below which one thread is enough.
FEW = 10_000_000
# The same fp32 arithmetic; 1.6 times as fast on a Zen 4. On an Intel processor MKL is the faster one.
product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def tune(parts, device, module, compiled):
    """Fits this process and the module to the CPU, in those `parts` of TUNINGS that are asked for.

    `allocator` keeps the memory that a step frees (keep_pages). `linear` gives fp32 linear layers to oneDNN where the
    processor is an AMD one with AVX-512, which MKL runs at half its width. By the kind of processor, and not by a
    clock: the last bits of the result depend on the choice, and the same run has to end the same way twice. `threads`
    is for the time of a fit (use_threads).
    """
    settings.check("tune", parts)
    if device.type == "cpu" and "allocator" in parts:
        keep_pages()
    if device.type == "cpu" and "linear" in parts and not compiled and has_wide_amd():
        use_onednn(module)


def use_threads(module, samples):
    """One thread where a step of so many samples is too small for more.

    Threads wait for each other at each operator, and when any other program runs, that takes longer than such a step.
    Counted are the weights of dense layers; a model with other ones (which use a weight more than once a sample), and
    a number of threads that OMP_NUM_THREADS asks for, are left as they are.
    """
    layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    dense = all(isinstance(layer, (torch.nn.Linear, torch.nn.BatchNorm1d, torch.nn.LayerNorm)) for layer in layers)
    if dense and "OMP_NUM_THREADS" not in os.environ and samples:
        weights = sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False))
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


def has_wide_amd():
    """Whether the processor is AMD's and has AVX-512."""
    try:
        with open("/proc/cpuinfo") as lines:
            vendor = next(line for line in lines if line.startswith("vendor_id"))
    except (OSError, StopIteration):  # no Linux, or no x86
        return False
    return "AuthenticAMD" in vendor and "AVX512" in torch.backends.cpu.get_cpu_capability()


def has_bf16():
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    # Not public yet in torch.cpu; a release without them gives no advice.
    known = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return any(supported() for supported in known if supported is not None)


class Product(torch.autograd.Function):
    """`inputs @ weight.T + bias`, and its derivatives, of matrices."""

    @staticmethod
    def forward(ctx, inputs, weight, bias):
        ctx.save_for_backward(inputs, weight)
        return product(inputs, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        # With create_graph=True the derivative is differentiated again, which oneDNN's product cannot be.
        times = torch.mm if torch.is_grad_enabled() else lambda a, b: product(a, b.t(), None, "none", [], "")
        return (
            times(gradient, weight) if needs_inputs else None,
            times(gradient.t(), inputs) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


class Linear(torch.nn.Linear):
    """torch.nn.Linear by oneDNN for fp32 matrices on the CPU; as it always was for anything else."""

    def forward(self, inputs):
        plain = type(self.weight) is torch.nn.Parameter and type(inputs) is torch.Tensor and inputs.ndim == 2
        watched = torch.jit.is_tracing() or any(map(in_transform, (inputs, self.weight)))
        fp32 = inputs.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if plain and fp32 and not watched and inputs.device.type == "cpu" and len(inputs):
            return Product.apply(inputs, self.weight, self.bias)
        return super().forward(inputs)


def in_transform(tensor):
    """Whether the tensor is one of torch.func's (vmap, jvp, grad), which want operators that they know."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def use_onednn(module):
    """Makes each torch.nn.Linear of the module one of these, in place; names, weights and hooks stay."""
    exchange(module, torch.nn.Linear, Linear if product is not None else torch.nn.Linear)


def use_torch(module):
    """Undoes use_onednn."""
    exchange(module, Linear, torch.nn.Linear)


def exchange(module, one, other):
    for child in module.modules():
        if type(child) is one:
            child.__class__ = other
