"""Name the tensors in the model and the first batch that are on the wrong device."""

from typing import Any

import torch

from stoker.trainer import step_errors
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import log
from stoker.trainer.trainer import Trainer


class DeviceAudit(Callback):
    """Warn if the first forward pass of a fit uses tensors on the wrong device.

    Such a tensor slows down each step, or makes it fail. The warning names every parameter, buffer,
    attribute and input that is not on the Trainer's device.
    """

    handle: Any = None  # the hook's handle
    tensors: int = 0  # the number of tensors; 0 if any is on the wrong device

    def on_fit_start(self, trainer: Trainer) -> None:
        def look(module: torch.nn.Module, inputs: Any, named_inputs: Any) -> None:
            self.remove_hook()
            batch = (*inputs, *named_inputs.values())
            wrong = step_errors.misplaced(module, batch, trainer.device)
            if wrong:
                log.warning("device=%s, but %s.", trainer.device, "; ".join(wrong))
            else:
                self.tensors = len(step_errors.named_tensors(module, batch))

        self.handle = trainer.module.register_forward_pre_hook(look, with_kwargs=True)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.remove_hook()
        if self.tensors:
            place = f"on {trainer.device}"
            print(f"devices  all {self.tensors} tensors of the first forward pass were {place}")
            self.tensors = 0

    def remove_hook(self) -> None:
        if self.handle is not None:  # an earlier callback may have ended the fit
            self.handle.remove()
            self.handle = None
