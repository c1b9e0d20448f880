"""Split batches into micro-batches, whose size can adapt to the available memory."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from stoker.trainer import batches, memory, parallel, settings
from stoker.trainer.errors import TrainingError, UserError, log

Result = TypeVar("Result")


class Splitter:
    """Splits batches into micro-batches.

    Args:
        device: The device that processes the batches.
        sample_dim: A function like `Trainer.sample_dim`.
        size: The maximum number of samples at once. "auto" starts with whole batches and halves the
            size when memory runs out. None splits into `parts`.
        parts: The number of equal parts.
        key: The name of the setting for the batch size, used in messages.

    Attributes:
        global_samples: Samples in the current batch across all processes; None for one process.

    Raises:
        UserError: Both `size` and `parts` are set, one of them is out of range, or several
            processes would split a batch differently.
    """

    def __init__(
        self,
        device: torch.device,
        sample_dim: batches.SampleDimOf,
        size: int | str | None = None,
        parts: int = 1,
        key: str = "batch_size",
    ) -> None:
        settings.check("grad_accum_steps", parts)
        settings.check_micro_batch(size, parts)
        self.adapts: bool = size == "auto"
        if self.adapts and parallel.process_count > 1:
            raise UserError(
                "micro_batch=auto supports only one process, because all processes must split a "
                "batch in the same way.\nType micro_batch=N."
            )
        self.size: int | None = None if isinstance(size, str) else size
        self.device = device
        self.sample_dim = sample_dim
        self.parts = parts
        self.key = key
        self.global_samples: int | None = None

    def cut_by(self) -> str | None:
        """Return the setting that splits batches, such as "micro_batch=8", or None."""
        if self.parts > 1:
            return f"grad_accum_steps={self.parts}"
        if self.size is not None:
            return f"micro_batch={self.size}"
        return "micro_batch=auto" if self.adapts else None

    def for_evaluation(self) -> "Splitter":
        """Return the Splitter for evaluations, which splits batches only if the size adapts."""
        size = "auto" if self.adapts else None
        return Splitter(self.device, self.sample_dim, size, key="eval_batch_size")

    def split(self, batch: Any) -> list[Any]:
        """Split a batch into the same number of micro-batches on every process."""
        if isinstance(batch, batches.Accumulated):
            return batch.parts
        parts = self.parts
        if self.size is not None:
            samples = self.global_samples or batches.size(batch, self.sample_dim)
            parts = math.ceil(samples / (parallel.process_count * self.size))
        if self.global_samples is not None:  # each rank needs a sample per micro-batch
            parts = min(parts, self.global_samples // parallel.process_count)
        return batches.split(batch, parts, self.sample_dim)

    def apply(
        self,
        function: Callable[[list[Any]], Result],
        batch: Any,
        module: torch.nn.Module | None = None,
        undo: Callable[[], None] | None = None,
    ) -> Result:
        """Return `function(micro_batches)`.

        If memory runs out and the size is adaptive (`micro_batch=auto`), halve it, restore the
        buffers of the `module`, call `undo`, and start over with the whole batch.
        """
        if not self.adapts:
            return function(self.split(batch))
        buffers = [] if module is None else list(module.buffers())
        before = [buffer.clone() for buffer in buffers]
        while True:
            try:
                return function(self.split(batch))
            except (RuntimeError, MemoryError) as error:
                samples = batches.size(batch, self.sample_dim)
                most = min(self.size or samples, samples)
                if most == 1 or not memory.is_out_of_memory(error):
                    raise  # a smaller size cannot help
            self.size = most // 2
            log.warning(
                "Out of memory with %d samples at once. Continuing with %d.", most, self.size
            )
            # Not inside `except`, where the error keeps the tensors of its frames alive.
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
            if undo is not None:
                undo()
            memory.release(self.device)

    def explain(self, samples: int | None) -> TrainingError:
        """Return the error for running out of memory; `samples` is None before the first batch."""
        place = f"{self.device}"
        if samples is not None:
            place += f" with a batch of {samples}{self.description()}"
        advice = f"micro_batch=auto, or a lower {self.key}"
        if self.adapts:
            advice = "precision=bf16, or choose a smaller model or an optimizer with less state"
        return TrainingError(f"Out of memory on {place}.\nType {advice}.")

    def description(self) -> str:
        """Return " (micro_batch=8)" for the plan of a run, "" for whole batches."""
        setting = self.cut_by()
        return f" ({setting})" if setting else ""

    def state_dict(self) -> dict[str, int | None]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load an adapted size, but keep a size that you have set."""
        if self.adapts:
            self.size = settings.check("micro_batch", state["size"], optional=True)
