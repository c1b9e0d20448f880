"""Combine several optimizers into one, such as Muon for hidden matrices and AdamW for the rest."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoker.trainer.groups import Groups, divided


class Combined(torch.optim.Optimizer):
    """Several torch optimizers as one, with the parameter groups and the state of all of them.

    Calling `step` steps each of them. You can also step the `optimizers` individually.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self.share()
        self.steps = [bare_step(optimizer) for optimizer in optimizers]

    def share(self) -> None:
        """Make the optimizers share the groups and the state of this object."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Share the new groups and state that `load_state_dict` has created."""
        super().__setstate__(state)
        self.share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for step in self.steps:
            step()


def is_torchs(kind: type) -> bool:
    """Return whether this is one of torch's own optimizers."""
    return f"{kind.__module__}.".startswith("torch.optim.")


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step` without torch's wrappers, which Combined.step already has."""
    kind = type(optimizer)
    if not is_torchs(kind):
        return optimizer.step
    return functools.partial(inspect.unwrap(kind.step), optimizer)


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the parts of a Combined optimizer, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, Combined) else [optimizer]


def muon(
    params: Groups,
    lr: float,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    betas: Sequence[float] = (0.9, 0.999),
    fused: bool | None = None,
    foreach: bool | None = None,
    module: torch.nn.Module | None = None,
) -> Combined:
    """Train hidden matrices with Muon; train embeddings, the output matrix and the rest with AdamW.

    Jordan 2024, kellerjordan.github.io/posts/muon. Updates are scaled as in Liu 2025, arXiv
    2502.16982, section 2.2, so that AdamW's learning rate and weight decay work for both.

    Args:
        params: Parameter groups.
        lr: The learning rate of both optimizers.
        weight_decay: The decoupled weight decay of both optimizers.
        momentum: Muon's momentum.
        betas: AdamW's decay rates for the running averages of the gradient and its square.
        fused: As for torch.optim.AdamW.
        foreach: As for torch.optim.AdamW.
        module: The model, used to find the embeddings and the output matrix.
    """
    others: set[torch.Tensor] = set()
    if module is not None:
        every_name = module.named_parameters(remove_duplicate=False)
        every_matrix = [parameter for _, parameter in every_name if parameter.ndim == 2]
        widths = set()
        for child in module.modules():
            if isinstance(child, torch.nn.Embedding):
                others.add(child.weight)
                widths.add(child.embedding_dim)
        # The last matrix computes the outputs, unless it has as many rows as an embedding has
        # columns. In that case, the embedding computes the outputs too, as in GPT-2.
        others.update(matrix for matrix in every_matrix[-1:] if len(matrix) not in widths)
    hidden: Groups = []
    rest: Groups = []
    for group in params:
        matrices, remaining = divided(group, lambda p: p.ndim == 2 and p not in others)
        hidden += matrices
        rest += remaining
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        scale = "match_rms_adamw"
        optimizers.append(torch.optim.Muon(hidden, lr, weight_decay, momentum, adjust_lr_fn=scale))
    if rest:
        beta1, beta2 = betas
        adamw = torch.optim.AdamW(
            rest, lr, (beta1, beta2), weight_decay=weight_decay, fused=fused, foreach=foreach
        )
        optimizers.append(adamw)
    return Combined(optimizers)
