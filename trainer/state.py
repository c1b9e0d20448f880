"""Helpers for the state of a Trainer: optimizer options and frozen parameters."""

import torch

# Options of an optimizer that do not change its results, and may differ between devices.
WAYS = ("foreach", "fused", "capturable")


def has_usual_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state of an optimizer has torch's usual form."""
    kind = type(optimizer)
    usual = torch.optim.Optimizer
    return kind.state_dict is usual.state_dict and kind.load_state_dict is usual.load_state_dict


def frozen(module: torch.nn.Module) -> list[str]:
    """Return the names of the frozen parameters, with all names of a shared parameter."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


def freeze(module: torch.nn.Module, names: list[str]) -> None:
    """Freeze the parameters with these names, and unfreeze all others."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(name not in names)
