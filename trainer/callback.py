"""The base class of all callbacks, which run between steps."""

import copy
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

Row = dict[str, Any]
State = dict[str, Any]


class Callback:
    """Base class with seven hooks, each called with the trainer.

    If a resumed run needs the state of a callback, return it from `state_dict` (tensors and plain
    values) and restore it in `load_state_dict`. By default, both use the attributes named in
    `state_attributes`.

    In distributed training, each process has its own callbacks and calls them at the same steps. A
    callback that stops training must do so on all processes. Set `first_rank_only` to run a
    callback only on rank 0, for example to print or to write files.
    """

    first_rank_only: bool = False
    state_attributes: ClassVar[tuple[str, ...]] = ()

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Called before the first step of a fit; in a resumed run, `trainer.step` is not 0."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """Called after each step, and after the evaluation and `on_epoch_end` of that step."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """Called after each complete pass over the training set."""

    def on_eval_start(self, trainer: "Trainer") -> None:
        """Called before an evaluation or a prediction, but not before a nested one."""

    def on_eval_end(self, trainer: "Trainer") -> None:
        """Called after an evaluation or a prediction, even if it raised an error."""

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        """Called with each logged row: {"step": ..., "epoch": ..., "train/loss": ...}."""

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Called after every fit, even if it failed (`trainer.failed`) before `on_fit_start`."""

    def state_dict(self) -> State:
        """Return what to save in a checkpoint: tensors and plain values."""
        return {name: getattr(self, name) for name in self.state_attributes}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""
        for name in self.state_attributes:
            setattr(self, name, copy.copy(state[name]))

    def loaded(self, trainer: "Trainer") -> None:
        """Called after a state was loaded, in a fit or not. Only EMA and Lookahead use it."""
