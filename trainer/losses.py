"""What torch's own losses divide by in their mean: the weight of a batch among batches.

The class weights of `loss.weight=balanced` are computed from the data, in `data/record.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stoker.trainer import batch as batches
from stoker.trainer.device import wide_type
from stoker.trainer.errors import UserError

# Names of torch's losses whose mean divides by the class weights of the targets, or by the number
# of elements. The others divide by the number of samples.
DIVISORS = {
    **dict.fromkeys(("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"), "classes"),
    **dict.fromkeys(
        (
            "BCELoss",
            "BCEWithLogitsLoss",
            "GaussianNLLLoss",
            "HingeEmbeddingLoss",
            "HuberLoss",
            "KLDivLoss",
            "L1Loss",
            "MarginRankingLoss",
            "MSELoss",
            "PoissonNLLLoss",
            "SmoothL1Loss",
            "SoftMarginLoss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "gaussian_nll_loss",
            "hinge_embedding_loss",
            "huber_loss",
            "kl_div",
            "l1_loss",
            "margin_ranking_loss",
            "mse_loss",
            "poisson_nll_loss",
            "smooth_l1_loss",
            "soft_margin_loss",
        ),
        "elements",
    ),
}
Divisor = Callable[[torch.Tensor], int | torch.Tensor]
IGNORED = -100  # torch's default for ignore_index


def divides_by(loss: Any) -> str | None:
    """Return "classes" or "elements" for one of torch's losses (module or function), or else None.

    A functools.partial with only keywords counts as the function it calls. A class with its own
    forward counts as your own loss. KLDivLoss(reduction="batchmean") divides by the number of
    samples.
    """
    return kind_of(loss) if option(loss, "reduction", "mean") == "mean" else None


def kind_of(loss: Any) -> str | None:
    """Return what the mean of one of torch's losses divides by, whatever its reduction is."""
    loss = getattr(loss, "unchecked", loss)
    if isinstance(loss, functools.partial):
        loss = None if loss.args else loss.func
    # Look at the function that computes the loss: a subclass may have its own forward.
    function = type(loss).forward if isinstance(loss, nn.Module) else loss
    if getattr(function, "__module__", None) not in (functional.__name__, nn.modules.loss.__name__):
        return None
    return DIVISORS.get(function.__qualname__.partition(".")[0])


def option(loss: Any, name: str, default: Any = None) -> Any:
    """Return an option of a loss: a module's attribute, or a keyword of a functools.partial."""
    loss = getattr(loss, "unchecked", loss)
    if isinstance(loss, functools.partial):
        return loss.keywords.get(name, option(loss.func, name, default))
    return getattr(loss, name, default)


def ignored_class(loss: Any) -> int | None:
    """Return the class that the loss ignores, or None."""
    return option(loss, "ignore_index", IGNORED) if divides_by(loss) == "classes" else None


def has_class_weights(loss: Any) -> bool:
    """Return whether the loss has class weights."""
    return divides_by(loss) == "classes" and option(loss, "weight") is not None


def is_mean_over_samples(loss: Any, targets_are_uniform: bool) -> bool:
    """Return whether each sample is known to have the same weight in the mean.

    `targets_are_uniform` says that all samples have the same number of targets, and no class is
    negative.
    """
    if divides_by(loss) is None:
        return True
    ignored = ignored_class(loss)
    counts_all = ignored is None or ignored < 0
    return targets_are_uniform and counts_all and not has_class_weights(loss)


@contextlib.contextmanager
def examined(trainer: Any) -> Iterator[None]:
    """Find what the loss divides by, and check the shapes in the first call of one of torch's."""
    loss = trainer.loss
    trainer.divisor = divisor(loss)
    module = loss.func if isinstance(loss, functools.partial) else loss
    if kind_of(loss) is None:
        yield
    elif isinstance(module, nn.Module):

        def check(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            handle.remove()
            check_arguments(loss, arguments)

        handle = module.register_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()
    else:

        def checked(*arguments: Any, **options: Any) -> Any:
            trainer.loss = loss
            check_arguments(loss, arguments)
            return loss(*arguments, **options)

        checked.unchecked = loss  # type: ignore[attr-defined]
        trainer.loss = checked
        try:
            yield
        finally:
            if trainer.loss is checked:
                trainer.loss = loss


def check_arguments(loss: Any, arguments: tuple[Any, ...]) -> None:
    """Raise UserError if torch would broadcast, or a cross-entropy would always be 0.

    Also raise it if the model does not return a tensor.
    """
    if len(arguments) != 2 or not isinstance(arguments[1], torch.Tensor):
        return
    outputs, targets = arguments
    if not isinstance(outputs, torch.Tensor):
        raise UserError(
            f"The model returns a {type(outputs).__name__}, but the loss takes a tensor.\n"
            "Override compute_loss; 'Bring your own' in the documentation shows how."
        )
    if kind_of(loss) == "classes":
        if outputs.ndim > 1 and outputs.shape[1] == 1:
            raise UserError(
                f"loss: the outputs {tuple(outputs.shape)} have a single class, so a cross-entropy "
                "is always 0.\nGive the model an output per class, or use BCEWithLogitsLoss with "
                "targets of 0. and 1."
            )
    elif outputs.shape != targets.shape:
        raise UserError(
            f"loss: the outputs are {tuple(outputs.shape)}, the targets {tuple(targets.shape)}, "
            "and the loss would broadcast them, which is rarely meant.\n"
            "Give both the same shape: change the model's last layer, or reshape one of them."
        )


def divisor(loss: Any) -> Divisor | None:
    """Return a function that maps targets to what the mean of one of torch's losses divides by.

    Return None if that is the number of samples, or the loss is not one of torch's.
    """
    kind = divides_by(loss)
    if kind == "classes":
        ignored = option(loss, "ignore_index", IGNORED)
        return functools.partial(class_weight, option(loss, "weight"), ignored)
    return torch.Tensor.numel if kind == "elements" else None


def class_weight(
    weight: torch.Tensor | None, ignored: int, targets: torch.Tensor
) -> int | torch.Tensor:
    """Return the sum of the class weights of the targets that are not ignored, on their device.

    Probability targets (N, C, ...) all have weight 1.
    """
    if targets.is_floating_point():
        classes = targets.shape[1] if targets.ndim > 1 else targets.shape[0]
        return targets.numel() // max(1, classes)
    targets = targets.long()  # a uint8 cannot be -100, and a uint8 index would be a mask
    counts: torch.Tensor = targets != ignored
    if weight is None:
        return counts.sum()
    # Clamped, because the loss gives a clearer error for a class out of range.
    weights: torch.Tensor = weight.to(targets.device)[targets.clamp(0, len(weight) - 1)]
    return (weights * counts).sum()


def fractions(
    weights: Sequence[float | torch.Tensor], device: torch.device
) -> Sequence[float | torch.Tensor]:
    """Return each weight's fraction of their sum, as tensors if any weight is a tensor."""
    if all(isinstance(weight, (int, float)) and weight > 0 for weight in weights):
        total = sum(weights)
        return [weight / total for weight in weights]
    stacked = torch.stack([on_device(weight, device) for weight in weights])
    return list(fraction(stacked, stacked.sum()))


def on_device(weight: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a weight as a 0-dim tensor, float64 if the device supports it, without a sync."""
    dtype = wide_type(device.type)
    if isinstance(weight, torch.Tensor):
        return weight.detach().to(device, dtype).reshape(())
    return torch.full((), float(weight), dtype=dtype, device=device)


def take_rows(loss: Any) -> None:
    """Let a cross-entropy use outputs (N, C, ...) with classes last in memory as rows.

    torch would copy them to put the classes second. For 128 tokens and 8,192 classes, forward and
    backward with the last layer take 227 ms with the copy and 150 ms as rows (one core of an AMD
    EPYC).
    """
    if isinstance(loss, nn.CrossEntropyLoss):
        loss.register_forward_pre_hook(rows_of_classes)


def rows_of_classes(
    _: nn.Module, arguments: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return outputs (N, C, ...) and targets (N, ...) as views (M, C) and (M,), if possible."""
    outputs, targets = arguments
    if outputs.ndim < 3 or outputs.stride(1) != 1 or targets.ndim != outputs.ndim - 1:
        return None
    return outputs.movedim(1, -1).flatten(0, -2), targets.flatten()


def fraction(weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return weight / total, or 0 if the total is 0."""
    return (weight / total).masked_fill(total == 0, 0)


def scaled(loss: torch.Tensor, factor: float | torch.Tensor, outputs: Any) -> torch.Tensor:
    """Return the loss times this factor.

    If it is 0, the loss and the gradient of the outputs become 0. Otherwise they would be
    NaN: the loss is the mean of nothing, and its backward pass computes 0 * inf.
    """
    if not isinstance(factor, torch.Tensor):
        return loss * factor
    is_nothing = factor == 0

    def masked(gradient: torch.Tensor | None) -> torch.Tensor | None:
        # DistributedDataParallel passes None for an output that the loss does not use.
        return None if gradient is None else gradient.masked_fill(is_nothing, 0)

    for _, output in batches.entries(outputs):
        if output.requires_grad:
            output.register_hook(masked)
    return loss.masked_fill(is_nothing, 0) * factor.to(loss.dtype)
