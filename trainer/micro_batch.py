"""Micro-batches: how many samples are worked on at once, and fewer of them where the device's memory is too small."""

import math

import torch
from stoker.trainer import batch as batches
from stoker.trainer import device as devices
from stoker.trainer import settings
from stoker.trainer.errors import TrainingError, check_number, log


class MicroBatch:
    """At most `size` samples at once, or `parts` equal parts; "auto" begins with whole batches and halves when it must.

    For messages, `what` is done with the batches, whose size is set by `key`.
    """

    def __init__(self, device, size=None, parts=1, what="training", key="batch_size"):
        size = settings.check_micro_batch(size, parts)
        self.adapts = size == "auto"
        self.size = None if self.adapts else size
        self.device, self.parts, self.what, self.key = device, parts, what, key

    def work(self, function, batch, module=None, undo=None, shares=None):
        """`function` of the list of (micro_batch, share).

        As many as other processes make of theirs: `shares` are the most and the fewest samples that one has.
        When that is out of memory under "auto", the size is halved, the buffers of the `module` become what they were,
        `undo()` is called, and all of the batch is worked through again.
        """
        most, fewest = shares or (None, None)
        parts = (
            self.parts
            if self.size is None
            else math.ceil((most or batches.size(batch)) / self.size)
        )
        parts = min(parts, fewest or parts)
        if not self.adapts:
            return function(batches.split(batch, parts) if parts > 1 else [(batch, 1.0)])
        buffers = [] if module is None else list(module.buffers())
        before = [buffer.clone() for buffer in buffers]
        while True:
            try:
                return function(batches.split(batch, parts))
            except (RuntimeError, MemoryError) as error:
                parts = self.halve(error, batch)
            # Not in the except clause: until its end the error keeps the tensors of the frames that it came through.
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
            if undo is not None:
                undo()
            devices.release(self.device)

    def halve(self, error, batch):
        """Halves the size, says so, and gives the number of parts; raises the error where that cannot help."""
        samples = batches.size(batch)
        most = min(self.size or samples, samples)
        if most == 1 or not devices.is_out_of_memory(error):
            raise error
        self.size = most // 2
        size = f"{self.size} sample{'s' * (self.size != 1)}"
        log.warning(
            "Out of memory with %d samples at once: the %s goes on with %s, same result.",
            most,
            self.what,
            size,
        )
        return math.ceil(samples / self.size)

    def explain(self, batch):
        """The TrainingError for a batch (None where there was none yet) that does not fit all the same."""
        cut = (
            f" in micro-batches of {self.size}"
            if self.size
            else f" in {self.parts} parts"
            if self.parts > 1
            else ""
        )
        size = "" if batch is None else f" with a batch of {batches.size(batch)}{cut}"
        advice = f"micro_batch=auto (the same result in less memory), or a lower {self.key}"
        if self.size and not self.adapts:
            advice = f"a lower micro_batch or {self.key}"
        elif self.adapts:
            advice = "precision=bf16, optimizer=sgd (less state), or a smaller model: no micro-batch is small enough"
        where = f"{self.device}{size}, in the {self.what}"
        return TrainingError(
            f"Out of memory on {where}: {devices.describe_memory(self.device)}.\nType {advice}."
        )

    def description(self):
        """' in micro-batches of 8' for the plan, '' for whole batches."""
        if self.size is not None:
            return f" in micro-batches of {self.size}"
        return f" in {self.parts} micro-batches" if self.parts > 1 else ""

    def state_dict(self):
        return {"size": self.size}

    def load_state_dict(self, state):
        """The size that was found; one that was set stays."""
        if self.adapts:
            self.size = check_number(
                "micro_batch", state["size"], whole=True, least=1, optional=True
            )
