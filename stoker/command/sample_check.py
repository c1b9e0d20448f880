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
SUITED = {"classification": "loss=cross_entropy", "regression": "loss=mse (or l1, huber)"}
TARGETS = {"classification": "a class", "regression": "a number"}
REFUSALS = (RuntimeError, ValueError, TypeError)  # raised by `forward` for unsuitable inputs


def check_fit(model: nn.Module, loss: Any, data: Data) -> None:
    """Raise UserError if the loss or the model does not suit the data."""
    function = getattr(loss, "func", loss)  # unwraps a partial
    name = getattr(function, "__name__", type(loss).__name__)
    other = {"classification": "regression", "regression": "classification"}
    unsuited = {"classification": LOSSES_OF_NUMBERS, "regression": (nn.CrossEntropyLoss,)}
    if isinstance(loss, unsuited[data.kind]):
        advice = f"Type {SUITED[data.kind]}."
        if data.table is not None:
            kind = other[data.kind]
            advice += f" If {data.table['target']} is {TARGETS[kind]}, type dataset.kind={kind}."
        elif data.kind == "regression":
            several = "loss._target_=torch.nn.BCEWithLogitsLoss"
            advice += f" If each sample has several labels, type {several}."
        raise UserError(
            f"{name} is a loss for {other[data.kind]}, but {data.name} is a data set for "
            f"{data.kind}.\n{advice}"
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
        is_last = shape == (*data.target_shape, data.num_classes)
        advice = " Put the classes first: return outputs.movedim(-1, 1)." if is_last else ""
        raise UserError(
            f"model={name} returns outputs of shape {shape} per sample, "
            f"but {data.name} needs {needed}.{advice}"
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
