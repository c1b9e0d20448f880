"""What a Trainer tells others: hooks and rows for its callbacks, and where its tensors are."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from stoker.trainer import misuse, parallel, steps, summary
from stoker.trainer.callbacks import Callback
from stoker.trainer.groups import labels
from stoker.trainer.history import History
from stoker.trainer.window import NUMBERS, Window


class Reporting:
    """The part of a Trainer that reports."""

    model: Any
    callbacks: list[Callback]
    window: Window
    step: int
    steps_per_epoch: int
    history: History  # of the last fit
    rates: Sequence[float]  # of the parameter groups, in the last step or set since
    batch_layout: str = "nothing yet"  # of the last batch that was logged
    data_bytes: int = 0  # of the data that the loaders hold on the device
    untrained: AbstractSet[str] = frozenset()  # what no optimizer has, as far as it was said

    def call(self, hook: str, *args: Any) -> None:
        """Call one hook of every callback, in the order of the list."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    @property
    def lr(self) -> float:
        """The rate of the first parameter group, in the last step or set since by `set_lr`."""
        return self.rates[0]

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Log a row of numbers at this step; your own have names such as "my/number".

        Loggers write them and `Progress` shows them. `EarlyStopping` and `Checkpoint` can monitor
        them, and read them here and now. With several processes, log the same numbers on each.

        Raises:
            UserError: A value is neither a number nor a tensor.
        """
        row: dict[str, Any] = {"step": self.step, "epoch": self.step / self.steps_per_epoch}
        for name, value in numbers.items():
            is_count = name in NUMBERS and isinstance(value, int)
            if is_count or isinstance(value, list):
                row[name] = value
            else:
                row[name] = misuse.number(name, value)
        # Lists may be large, such as a confusion matrix of many classes.
        numbers_alone = {name: value for name, value in row.items() if not isinstance(value, list)}
        self.history.add(numbers_alone)
        self.call("on_log", row)

    def training_numbers(self) -> dict[str, Any]:
        """Return the numbers of the steps since the last row, and forget these steps."""
        trainer: Any = self
        return dict(self.window.row(self.rates, labels(trainer.optimizer.param_groups)))

    def log_training(self, batch: Any) -> None:
        """Log the steps since the last row, of which this is the last batch."""
        trainer: Any = self
        parallel.check_exchanged(self.model, trainer.module)
        parallel.check_same_weights(self.model)
        misuse.warn_of_untrained(trainer)
        self.batch_layout = summary.layout_of(batch)
        self.log(self.training_numbers())
        steps.check_scale(trainer)
        self.window.restart()

    def where(self, batch: Any = None) -> None:
        """Print device, types and MiB of model, optimizer state and the last (or this) batch."""
        trainer: Any = self
        print("\n".join(summary.where(trainer, batch)))

    def memory_report(self, batch: Any = None) -> dict[str, float]:
        """Return MiB of parameters, gradients, optimizer state, buffers and data, and the peak.

        With a batch, also of the activations of a step on it, unless the model is compiled or has
        replicas (strategy=dp).
        """
        trainer: Any = self
        return summary.memory_report(trainer, batch)
