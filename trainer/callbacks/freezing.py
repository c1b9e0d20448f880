"""Freeze parameters for part or all of training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import settings
from stoker.trainer.callback import Callback
from stoker.trainer.errors import UserError, as_typed
from stoker.trainer.groups import matching, named
from stoker.trainer.parallel import NORMS

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


class Freeze(Callback):
    """Freeze the parameters whose names match one of the patterns, until `thaw_at`.

    `thaw_at` is a number of steps or "never". A frozen BatchNorm uses its running
    statistics and does not update them, as in evaluation.
    """

    def __init__(self, match: str | Sequence[str], thaw_at: int | str = "never") -> None:
        self.patterns = [match] if isinstance(match, str) else match
        is_list = isinstance(self.patterns, (list, tuple)) and len(self.patterns) > 0
        if not is_list or not all(isinstance(pattern, str) for pattern in self.patterns):
            raise UserError(
                f"freeze={as_typed(match)}: expected a list of name patterns, "
                "such as 'freeze=[\"backbone.*\"]'."
            )
        self.thaw_step = settings.check_thaw_at(thaw_at)  # thaw the parameters after this step
        self.frozen: set[torch.Tensor] = set()
        self.norms: dict[torch.nn.Module, Any] = {}  # frozen norm -> hook that keeps its statistics

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Freeze the parameters, or thaw them if the run resumes after `thaw_at`.

        Raises:
            UserError: A pattern matches no parameter, or nothing is left to train.
        """
        names = named(trainer.module)
        self.frozen = set().union(*[matching(names, one, "freeze") for one in self.patterns])
        if not any(p.requires_grad for p in names.keys() - self.frozen):
            raise UserError(
                f"freeze={as_typed(list(self.patterns))}: the patterns match all parameters, so "
                "nothing is left to train."
            )
        is_thawed = trainer.step >= self.thaw_step
        self.set_trained(is_thawed)
        if is_thawed:
            return
        for module in trainer.module.modules():
            weights = list(module.parameters(recurse=False))
            if isinstance(module, NORMS) and weights and self.frozen.issuperset(weights):
                self.norms[module] = module.register_forward_pre_hook(keep_statistics)

    def set_trained(self, is_trained: bool) -> None:
        for parameter in self.frozen:
            parameter.requires_grad_(is_trained)

    def on_step_end(self, trainer: "Trainer") -> None:
        if trainer.step == self.thaw_step:
            self.set_trained(True)
            self.release_norms()

    def on_fit_end(self, trainer: "Trainer") -> None:
        self.release_norms()

    def release_norms(self) -> None:
        """Let the norms update their statistics again."""
        for norm, hook in self.norms.items():
            hook.remove()
            norm.train()
        self.norms.clear()


def keep_statistics(norm: torch.nn.Module, _: Any) -> None:
    """Put a norm in evaluation mode before its forward; `fit` sets training mode every epoch."""
    norm.eval()
