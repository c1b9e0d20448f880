"""The table of layers that model_summary=true prints."""

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch

from stoker.runs.readable import aligned
from stoker.trainer.modes import modes_restored

HEADER = ("layer", "type", "output", "parameters", "FLOPs per sample (forward)")


def lines(module: torch.nn.Module, in_shape: tuple[int, ...] | None, tokens: bool) -> Iterator[str]:
    """Return a table of the modules that have no submodules, or that have weights of their own.

    Shapes and FLOPs are for the forward pass of one sample. They are omitted if the shape of a
    sample is not known, or if the model rejects a single sample.
    """
    shapes, counts = forward(module, in_shape, tokens) if in_shape is not None else ({}, {})
    rows = [HEADER]
    for name, layer in module.named_modules():
        parameters = sum(weight.numel() for weight in layer.parameters(recurse=False))
        if parameters or not any(layer.children()):
            count = quantity(counts.get(name, 0))
            kind = type(layer).__name__
            rows.append((name or "model", kind, shapes.get(name, ""), quantity(parameters), count))
    total = sum(weight.numel() for weight in module.parameters())
    rows.append(("total", "", "", quantity(total), quantity(counts.get("", 0))))
    return aligned(rows, slice(3, None))


def quantity(value: int) -> str:
    """Return a number such as "1,234", or "" for 0."""
    return f"{value:,}" if value else ""


def forward(
    module: torch.nn.Module, in_shape: tuple[int, ...], tokens: bool
) -> tuple[dict[str, str], dict[str, int]]:
    """Return {layer: output shape} and {layer: FLOPs} for a sample of zeros.

    Both are empty if the model rejects the sample. The model and the random states do not change.
    """
    shapes: dict[str, str] = {}
    counter = flop_counter()
    hooks = []
    for name, layer in module.named_modules():

        def note(_: Any, __: Any, output: Any, name: str = name) -> None:
            if isinstance(output, torch.Tensor):
                shapes[name] = "x".join(map(str, output.shape[1:])) or "1"

        hooks.append(layer.register_forward_hook(note))
    try:
        with torch.random.fork_rng(devices=[]), modes_restored(module), counter, torch.no_grad():
            dtype = torch.int64 if tokens else torch.float32
            module.eval()(torch.zeros(1, *in_shape, dtype=dtype))
    except Exception:  # user code may raise anything
        return {}, {}
    finally:
        for hook in hooks:
            hook.remove()
    counts = {}
    root = type(module).__name__
    for path, operations in counter.get_flop_counts().items():
        counts[path.removeprefix(root).removeprefix(".")] = sum(operations.values())
    return shapes, counts


def flop_counter() -> Any:
    """Return a context that counts FLOPs."""
    # Otherwise, the counter warns once per process if Triton is missing.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    from torch.utils import flop_counter  # takes 0.1 s

    # A wrapper marks the counter's dispatch method as excluded from compilation. To do so, it
    # imports the compiler, which takes 2 s, unless the method already has the mark.
    # private: _FlopCounterMode and __dynamo_disable, to start two seconds sooner, torch 2.15
    mode: Any = getattr(flop_counter, "_FlopCounterMode", flop_counter.FlopCounterMode)
    dispatch = inspect.unwrap(mode.__torch_dispatch__)
    vars(dispatch).setdefault("__dynamo_disable", dispatch)
    return flop_counter.FlopCounterMode(display=False)
