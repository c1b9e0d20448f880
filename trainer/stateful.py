"""The part of a Trainer that is saved in checkpoints, and loaded to resume."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stoker.trainer import checkpoint, schedules, transfer
from stoker.trainer.callback import Callback
from stoker.trainer.errors import UserError
from stoker.trainer.loading import IterableLoader
from stoker.trainer.splitter import Splitter
from stoker.trainer.state import freeze, frozen, has_usual_state
from stoker.trainer.window import Window

# name -> type of the attributes that are saved unchanged
SAVED = {"step": int, "steps_per_epoch": int, "epochs_before": int, "evaluation_due": bool}


class Stateful:
    """The part of a Trainer that is saved in checkpoints, and loaded to resume."""

    device: torch.device
    module: Any
    optimizer: Any = None
    optimizer_step: Any = None  # `optimizer.step` with less overhead
    scheduler: Any = None  # built by `fit`, once the number of steps is known
    scaler: torch.amp.GradScaler
    window: Window
    splitter: Splitter
    callbacks: list[Callback]
    train_loader: Any = None  # only during a fit
    val_loader: Any = None
    step: int  # number of completed optimizer steps, on which all schedules depend
    total_steps = 0
    steps_per_epoch = 0
    # Number of epochs started by earlier fits, so that each fit has its own random numbers.
    epochs_before = 0
    evaluation_due = False  # whether the step is complete except for its evaluation
    is_evaluating = False  # whether the context `evaluating()` is active
    rates: Sequence[float]  # learning rate of each group in the last step
    carried: Mapping[str, Any] = {}  # name -> value of each Carried attribute
    # Parameters without an optimizer at the start of the fit.
    unoptimized: Sequence[torch.Tensor] = ()

    def is_due(self, every: int) -> bool:
        """Return whether this step is a multiple of `every`, or the last step of the fit."""
        return self.step % every == 0 or self.step == self.total_steps

    @property
    def epochs_begun(self) -> int:
        """The number of epochs started by all fits so far."""
        return self.epochs_before + math.ceil(self.step / max(1, self.steps_per_epoch))

    def stateful(self) -> dict[str, Any]:
        """Return {name: object with a state_dict} to save; override it to add an optimizer."""
        parts = {
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "train_loss": self.window.loss,
            "grad_norm": self.window.grad_norm,
            "micro_batch": self.splitter,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def without_optimizer(self) -> dict[str, torch.nn.Parameter]:
        """Return {name: parameter} for parameters without an optimizer, including frozen ones."""
        optimized: set[torch.Tensor] = set()
        for part in self.stateful().values():
            if isinstance(part, torch.optim.Optimizer):
                for group in part.param_groups:
                    optimized.update(group["params"])
        parameters = self.module.named_parameters()
        return {name: p for name, p in parameters if p not in optimized}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training depends on except settings, without copying tensors."""
        if isinstance(self.scheduler, schedules.Schedule):
            self.scheduler.take_over()
        state: dict[str, Any] = {name: getattr(self, name) for name in SAVED}
        state.update(states(self.stateful()))
        state["frozen"] = frozen(self.module)
        state["optimizer_class"] = type(self.optimizer).__name__
        if isinstance(self.train_loader, IterableLoader):
            state["loader"] = self.train_loader.state_dict()
        if self.carried:
            state["carried"] = self.carried
        state["callbacks"] = states(self.named_callbacks())
        return state

    def load(self, path: Any) -> None:
        """Load a checkpoint file, or the best one in a folder: weights, step, callbacks, ..."""
        begun = self.epochs_begun
        self.load_state_dict(checkpoint.loaded(path, checkpoint.best))
        self.epochs_before = max(self.epochs_before, begun)  # the next fit must not repeat epochs

    def load_state_dict(self, state: Any, loader: Any = None) -> None:
        """Restore a state from `state_dict`, including the position of `loader` or `train_loader`.

        Raises:
            UserError: The state is from a different model, optimizer or Trainer. Nothing is loaded.
        """
        if loader is None:
            loader = self.train_loader
        self.check_state(state)
        is_lazy = any(map(torch.nn.parameter.is_lazy, self.module.parameters()))
        before = {} if is_lazy else checkpoint.copy(self.state_dict(), everywhere=True)
        try:
            self.restore(state)
            if isinstance(loader, IterableLoader):
                checkpoint.restore("loader", loader, state.get("loader", {}))
        except UserError:
            # A part that has just rejected the state may reject its own state too.
            with contextlib.suppress(UserError, KeyError):
                self.restore(before)
            raise
        if self.optimizer is not None and self.scheduler is None:
            schedules.reset(self.optimizer)
        for name in SAVED:
            setattr(self, name, state[name])
        self.carried = transfer.move(state.get("carried", {}), self.device)
        trainer: Any = self
        for callback in self.callbacks:
            callback.loaded(trainer)

    def check_state(self, state: Any) -> None:
        """Raise UserError for a mismatch that loading the state would not detect."""
        kinds: dict[str, type] = {**SAVED, "frozen": list, "callbacks": dict}
        problem = "The checkpoint does not match this Trainer:"
        with checkpoint.state_fits("Trainer"):
            for name, kind in kinds.items():
                if type(state.get(name)) is not kind:
                    raise UserError(f"{problem} {name} is {state.get(name)!r:.60}.")
            if self.optimizer is not None:
                saved = state["optimizer_class"]
                optimizer = type(self.optimizer).__name__
                if saved != optimizer:
                    raise UserError(f"{problem} optimizer_class is {saved!r}, not {optimizer!r}.")
            if self.scheduler is not None:
                schedules.check_state(self.scheduler, state["scheduler"])
            for name, part in self.stateful().items():
                if isinstance(part, torch.optim.Optimizer) and has_usual_state(part):
                    checkpoint.check_options(name, part, state[name])

    def restore(self, state: dict[str, Any]) -> None:
        """Load the states of all parts and callbacks.

        Raises:
            UserError: A state is missing, or does not fit.
        """
        pairs = ((state, self.stateful()), (state["callbacks"], self.named_callbacks()))
        for states, parts in pairs:
            for name, part in parts.items():
                if name in states:
                    checkpoint.restore(name, part, states[name])
                elif part.state_dict():
                    raise UserError(
                        f"The checkpoint does not match this Trainer: {name} is missing."
                    )

    def resume_from(self, state: Any, loader: Any = None) -> None:
        """Load a state to continue training, and freeze the parameters that were frozen in it."""
        self.load_state_dict(state, loader)
        freeze(self.module, state["frozen"])

    def named_callbacks(self) -> dict[str, Callback]:
        """Return {class name: callback}; the second callback of the same class is "Name.1"."""
        named: dict[str, Callback] = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            earlier = sum(type(one).__name__ == kind for one in named.values())
            named[f"{kind}.{earlier}" if earlier else kind] = callback
        return named


def states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name: state} of objects with a `state_dict`."""
    return {name: part.state_dict() for name, part in parts.items()}
