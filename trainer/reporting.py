"""The part of a Trainer that calls hooks, logs rows and reports memory."""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from stoker.trainer import memory, misuse, parallel, steps, summary
from stoker.trainer.groups import labels
from stoker.trainer.history import NUMBERS, History
from stoker.trainer.stateful import Stateful


class Reporting(Stateful):
    """The part of a Trainer that calls hooks, logs rows and reports memory."""

    model: Any
    history: History  # rows of the last fit
    data_bytes: int = 0  # size of the data that loaders keep on the device
    # names of parameters without an optimizer, for which a warning was logged
    untrained: AbstractSet[str] = frozenset()
    schedule_is_checked = False

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook on every callback, in the order of the list."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    @property
    def lr(self) -> float:
        """The first group's learning rate in the last step."""
        return self.rates[0]

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Log a row of numbers at this step. Give your own numbers names such as "my/number".

        All callbacks receive the row immediately: loggers write it, `Progress` shows it, and
        `EarlyStopping` and `Checkpoint` can monitor its numbers. With several processes, log the
        same numbers on all of them.

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
        # Do not keep lists, because they may be large, as in a confusion matrix of many classes.
        numbers_alone = {name: value for name, value in row.items() if not isinstance(value, list)}
        self.history.add(numbers_alone)
        self.call("on_log", row)

    def training_numbers(self) -> dict[str, Any]:
        """Return the numbers for the steps since the last row, and start a new row."""
        row = dict(self.window.row(self.rates, labels(self.optimizer.param_groups)))
        if self.device.type != "cpu":
            held = memory.counted("memory_reserved", self.device) / memory.MIB
            if not math.isnan(held):
                row["device/memory_mib"] = held
        return row

    def check_and_log(self) -> None:
        """Log the steps since the last row, with checks that are too expensive for every step.

        The checks make sure that unfrozen weights are trained and are equal on all processes, and
        that your own train_step advances the schedule. The fp16 scale is checked after logging, so
        that the row shows what led to the error.
        """
        trainer: Any = self
        parallel.check_exchanged(self.model, self.module)
        parallel.check_same_weights(self.model)
        misuse.warn_of_untrained(trainer)
        misuse.warn_of_schedule(trainer)
        self.log(self.training_numbers())
        steps.check_scale(trainer)
        self.window.start_clock()

    def memory_report(self) -> dict[str, float]:
        """Return {use: MiB}. The peak is that of the device, or of the process on CPU and mps.

        The gradients are counted as in a step, even after a fit, which frees them.
        """
        parameters = list(self.module.parameters())
        return {
            "parameters": summary.mib(parameters),
            "gradients": summary.mib(p for p in parameters if p.requires_grad),
            "optimizer": summary.mib(summary.optimizer_tensors(self.optimizer)),
            "buffers": summary.mib(self.module.buffers()),
            "data": self.data_bytes / memory.MIB,
            "peak": memory.peak_memory(self.device) / memory.MIB,
        }
