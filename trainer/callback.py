"""The base class of all callbacks, which run between steps."""

import copy
from typing import TYPE_CHECKING, Any, ClassVar

from stoker.trainer.state import ANYTHING

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

Row = dict[str, Any]
State = dict[str, Any]


class Callback:
    """Base class with seven hooks, each called with the trainer.

    A callback with state that must survive a restart returns it from `state_dict` (tensors and
    plain values) and takes it back in `load_state_dict`. By default, that is the attributes named
    in `state_forms`.

    In distributed training, each process has its own callbacks and calls them at the same steps. A
    callback that stops training must do so on all processes. With `first_rank_only`, only rank 0
    runs the callback, for example to print or to write files.
    """

    first_rank_only: bool = False
    state_forms: ClassVar[
        dict[str, Any]
    ] = {}  # {attribute: form of its value, as in trainer/state.py}

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Called before the first step; `trainer.step` is above 0 in a resumed run."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """Called after each step, including any evaluation or end of epoch at this step."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """Called after each pass over the training set, but not if the run stops before its end."""

    def on_eval_start(self, trainer: "Trainer") -> None:
        """Called before an evaluation or a prediction, unless it is part of another one."""

    def on_eval_end(self, trainer: "Trainer") -> None:
        """Called after an evaluation or a prediction, even if it failed."""

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        """Called with each row of numbers: {"step": ..., "epoch": ..., "train/loss": ...}."""

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Called after a fit, even one that failed (`trainer.failed`) before `on_fit_start`."""

    def state_dict(self) -> State:
        """Return what to save in a checkpoint: tensors and plain values."""
        return {name: getattr(self, name) for name in self.state_forms}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned."""
        for name in self.state_forms:
            setattr(self, name, copy.copy(state[name]))

    def state_form(self, trainer: "Trainer") -> Any:
        """Return the form of the states that can be loaded, as in `trainer/state.py`.

        Called before `load_state_dict`; a state that does not match is refused. In a dict, only the
        keys that `state_dict` returns are compared, so that a subclass may save others.
        """
        return self.state_forms or ANYTHING
