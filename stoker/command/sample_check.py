"""Before training starts, check on two samples that model, loss and data are compatible."""

from typing import Any

import torch
from torch import nn

from stoker.data.record import Data
from stoker.trainer.errors import UserError, first_line, kind_of

LOSSES_OF_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss)
# These losses take logits, logarithms or probabilities, so the outputs are not on the scale of the
# targets.
LOSSES_OF_LOGITS = (
    nn.BCEWithLogitsLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
    nn.BCELoss,
)
# kind of data -> (losses that do not suit it, the kind that they suit, the losses to type instead)
UNSUITED: dict[str, tuple[Any, str, str]] = {
    "classification": (LOSSES_OF_NUMBERS, "regression", "loss=cross_entropy"),
    "regression": (nn.CrossEntropyLoss, "classification", "loss=mse (or l1, huber)"),
}
REFUSALS = (RuntimeError, ValueError, TypeError)  # raised by `forward` for unsuitable inputs


def check_fit(model: nn.Module, loss: Any, data: Data) -> None:
    """Raise UserError if the loss or the model does not suit the data."""
    function = getattr(loss, "func", loss)  # unwraps a partial
    name = getattr(function, "__name__", type(loss).__name__)
    unsuited, other, advice = UNSUITED[data.kind]
    if isinstance(loss, unsuited):
        raise UserError(
            f"{name} is a loss for {other}, but {data.name} is a data set for {data.kind}.\n"
            f"Type {advice}, or dataset.kind={other} for a table."
        )
    outputs, targets = outputs_for(model, data)
    try:
        loss(outputs, targets)
    except REFUSALS as error:
        raise UserError(f"loss={name}: {first_line(error)}") from error


def outputs_for(model: nn.Module, data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs, targets) of two samples on the CPU. Raise UserError if they are
    incompatible.

    They are computed on the CPU because a class index that is too large would fail an assertion in
    a GPU kernel and end the process.
    """
    inputs, targets = data.train[list(range(min(2, len(data.train))))]
    if inputs.dtype == torch.uint8:
        inputs = inputs.float() / 255
    name = type(model).__name__
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except (*REFUSALS, IndexError) as error:
        raise UserError(
            f"model={name} does not accept {inputs.dtype} inputs of shape "
            f"{tuple(data.in_shape)}: {first_line(error)}"
            f"{'' if data.tokens is None else '. Type model=gpt.'}"
        ) from error
    finally:
        model.train()
    if not isinstance(outputs, torch.Tensor):
        raise UserError(
            f"model={name} returns {kind_of(outputs)}, but the loss needs a tensor.\nOverride "
            "compute_loss in your own Trainer (trainer._target_=...); 'Bring your own' in the "
            "documentation shows how."
        )
    shape = tuple(outputs.shape)[1:]
    needed = (data.num_classes, *data.target_shape)
    if shape != needed:
        raise UserError(
            f"model={name} returns outputs of shape {shape} per sample, "
            f"but {data.name} needs {needed}."
        )
    return outputs, targets


def has_usual_outputs(model: nn.Module, loss: Any, data: Data) -> bool:
    """Return whether the usual metrics make sense for the outputs of this model and this loss."""
    if data.kind == "regression" and isinstance(loss, LOSSES_OF_LOGITS):
        return False
    try:
        outputs_for(model, data)
    except UserError:
        return False
    return True
