"""model_summary=true: a table of the layers of a model."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from stoker.diagnostics import flops
from stoker.trainer import terminal
from stoker.trainer.modes import modes_restored

HEADER = ("layer", "type", "output", "parameters", "FLOPs")
NUMBERS = ("parameters", "FLOPs")
OPTIONAL = ("FLOPs", "output", "type")  # columns left out on a narrow terminal
GAP = "  "


def lines(module: torch.nn.Module, in_shape: tuple[int, ...] | None, tokens: bool) -> Iterator[str]:
    """Yield a table of the modules that have no others inside, or weights of their own.

    Shapes and FLOPs are of the forward pass of one sample. They are missing if the shape of a
    sample is not known, or if the model does not take it alone.
    """
    outputs = forward(module, in_shape, tokens) if in_shape is not None else {}
    rows = [HEADER]
    for name, layer in module.named_modules():
        parameters = sum(weight.numel() for weight in layer.parameters(recurse=False))
        if parameters or not any(layer.children()):
            shape, count = outputs.get(layer, ("", 0))
            texts = (name or "model", type(layer).__name__, shape, quantity(parameters))
            rows.append((*texts, quantity(count)))
    total = sum(weight.numel() for weight in module.parameters())
    _, count = outputs.get(module, ("", 0))
    rows.append(("total", "", "", quantity(total), quantity(count)))
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        align = str.rjust if column[0] in NUMBERS else str.ljust
        columns.append([align(text, width) for text in column])
    if terminal.is_terminal(sys.stdout):
        columns = narrowed(columns, terminal.width())
    for cells in zip(*columns, strict=True):
        yield GAP.join(cells).rstrip()


def narrowed(columns: list[list[str]], room: int) -> list[list[str]]:
    """Return the columns without as many of the OPTIONAL ones as it takes to fit."""
    for name in OPTIONAL:
        header = GAP.join(column[0] for column in columns)
        if len(header) > room:
            columns = [column for column in columns if column[0].strip() != name]
    return columns


def quantity(value: int) -> str:
    """Return "1,234", or nothing for 0."""
    return f"{value:,}" if value else ""


def forward(
    module: torch.nn.Module, in_shape: tuple[int, ...], tokens: bool
) -> dict[torch.nn.Module, tuple[str, int]]:
    """Return {layer: (the shape of its output, FLOPs)} of a sample of zeros; {} if it is refused.

    The model and the random states are left as they are.
    """
    outputs: dict[torch.nn.Module, tuple[str, int]] = {}
    begun: dict[torch.nn.Module, int] = {}
    counter = flops.counter()

    def before(layer: torch.nn.Module, _: Any) -> None:
        begun[layer] = counter.get_total_flops()

    def after(layer: torch.nn.Module, _: Any, output: Any) -> None:
        shape = ""
        if isinstance(output, torch.Tensor):
            shape = "x".join(map(str, output.shape[1:])) or "1"
        _, earlier = outputs.get(layer, ("", 0))  # in case the layer is called twice
        outputs[layer] = (shape, earlier + counter.get_total_flops() - begun[layer])

    hooks = []
    for layer in module.modules():
        hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    sample = torch.zeros(1, *in_shape, dtype=torch.int64 if tokens else torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), modes_restored(module), counter, torch.no_grad():
            module.eval()(sample)
    except Exception:  # user code may raise anything
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return outputs
