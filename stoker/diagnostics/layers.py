"""model_summary=true: a table of the layers of a model."""

from collections.abc import Iterator
from typing import Any

import torch

from stoker.diagnostics import flops
from stoker.trainer.modes import modes_restored

HEADER = ("layer", "type", "output", "parameters", "FLOPs")


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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left = [text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True)]
        right = [text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True)]
        yield "  ".join([*left, *right]).rstrip()


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
        _, earlier = outputs.get(layer, ("", 0))  # of a layer that is called twice
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
