"""State that a Trainer carries from batch to batch, such as the hidden state of an RNN."""

from typing import TYPE_CHECKING, Any

from stoker.trainer import batches

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


class Carried:
    """A Trainer attribute that is carried from batch to batch and saved in checkpoints::

        class LanguageModel(Trainer):
            hidden = Carried()

            def compute_loss(self, batch):
                inputs, targets = batch
                outputs, self.hidden = self.model(inputs, self.hidden)
                return self.loss(outputs, targets), outputs

    The value is None when a fit starts. Assign a tensor or a nested structure of tensors,
    which are detached so that the backward pass stays within the batch. An evaluation or a
    prediction also starts with None, and leaves the training value unchanged. To reset the value
    after each epoch, assign None in a callback's `on_epoch_end`.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: "Trainer | None", owner: type) -> Any:
        return self if trainer is None else trainer.carried.get(self.name)

    def __set__(self, trainer: "Trainer", value: Any) -> None:
        detached = batches.walk(lambda _, tensor: tensor.detach(), value)
        trainer.carried = {**trainer.carried, self.name: detached}
