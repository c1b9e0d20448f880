"""The weight of a batch: what torch's losses divide by when they take the mean.

The class weights of `loss.weight=balanced` are computed from the data, in `data/record.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.trainer import batches
from stoker.trainer.device import wide_type
from stoker.trainer.errors import UserError

# torch's losses that divide by the class weights of the targets ("classes"), or by the number of
# elements. All others divide by the number of samples.
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
Divisor = Callable[[Tensor], float | Tensor]
IGNORED = -100  # torch's default for ignore_index
SMALL = 1024  # up to this number of targets, their minimum takes less time than their count


def divides_by(loss: Any) -> str | None:
    """Return "classes" or "elements" if a loss is one of DIVISORS and takes the mean, else None.

    A functools.partial with only keywords counts as the function that it calls. A subclass with its
    own forward counts as a custom loss. KLDivLoss(reduction="batchmean") divides by the number of
    samples.
    """
    return kind_of(loss) if option(loss, "reduction", "mean") == "mean" else None


def kind_of(loss: Any) -> str | None:
    """Return what a loss would divide by if it took the mean, ignoring its reduction."""
    if isinstance(loss, functools.partial):
        loss = None if loss.args else loss.func
    # Check the function that computes the loss, because a subclass may have its own forward.
    function = type(loss).forward if isinstance(loss, nn.Module) else loss
    if getattr(function, "__module__", None) not in (functional.__name__, nn.modules.loss.__name__):
        return None
    return DIVISORS.get(function.__qualname__.partition(".")[0])


def option(loss: Any, name: str, default: Any = None) -> Any:
    """Return an option of a loss: an attribute of a module, or a keyword of a functools.partial."""
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
    """Return whether it is certain that all samples have the same weight in the mean.

    `targets_are_uniform` means that all samples have the same number of targets, and that no class
    is negative.
    """
    if divides_by(loss) is None:
        return True
    ignored = ignored_class(loss)
    counts_all = ignored is None or ignored < 0
    return targets_are_uniform and counts_all and not has_class_weights(loss)


@contextlib.contextmanager
def examined(trainer: Any) -> Iterator[None]:
    """Find what the loss divides by. For torch's modules, check the arguments of the first call."""
    loss = trainer.loss
    trainer.divisor = divisor(loss)
    module = loss.func if isinstance(loss, functools.partial) else loss
    if kind_of(loss) is None or not isinstance(module, nn.Module):
        yield
        return

    def check(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        handle.remove()
        check_arguments(loss, arguments)

    handle = module.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def check_arguments(loss: Any, arguments: tuple[Any, ...]) -> None:
    """Check the outputs and targets passed to one of torch's losses.

    Raises:
        UserError: The outputs are not a tensor, torch would broadcast them, or a cross-entropy
            would always be 0.
    """
    if len(arguments) != 2 or not isinstance(arguments[1], Tensor):
        return
    outputs, targets = arguments
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"The model returns a {type(outputs).__name__}, but the loss takes a tensor.\n"
            "Override compute_loss; 'Bring your own' in the documentation shows how."
        )
    if kind_of(loss) == "classes":
        if outputs.ndim > 1 and outputs.shape[1] == 1:
            raise UserError(
                f"loss: the outputs {tuple(outputs.shape)} have a single class, so a cross-entropy "
                "is always 0.\nGive the model an output for each class, or use BCEWithLogitsLoss "
                "with targets 0.0 and 1.0."
            )
    elif outputs.shape != targets.shape:
        raise UserError(
            f"loss: the outputs have shape {tuple(outputs.shape)}, and the targets have shape "
            f"{tuple(targets.shape)}. The loss would broadcast them, which is rarely intended.\n"
            "Give both the same shape: change the model's last layer, or reshape one of them."
        )


def divisor(loss: Any) -> Divisor | None:
    """Return a function that maps targets to what the loss divides by.

    Return None if the loss divides by the number of samples, or is not one of torch's.
    """
    kind = divides_by(loss)
    if kind == "classes":
        ignored = option(loss, "ignore_index", IGNORED)
        return functools.partial(class_weight, option(loss, "weight"), ignored)
    return Tensor.numel if kind == "elements" else None


def class_weight(weight: Tensor | None, ignored: int, targets: Tensor) -> float | Tensor:
    """Return the sum of the class weights of all targets that are not ignored.

    The sum is a tensor on the device of the targets, so that nothing waits for the device. On the
    CPU, it is a number, which is faster. With class probabilities (N, C, ...) as targets, every
    target has weight 1.
    """
    if targets.is_floating_point():
        classes = targets.shape[1] if targets.ndim > 1 else targets.shape[0]
        return targets.numel() // max(1, classes)
    targets = targets.long()  # uint8 cannot represent -100, and as an index it would be a mask
    # Fast path: if the lowest class is above `ignored`, no target is ignored.
    is_small = targets.is_cpu and 0 < targets.numel() <= SMALL
    if weight is None and is_small and targets.amin().item() > ignored:
        return targets.numel()
    counts: Tensor = targets != ignored
    if weight is not None:
        # Clamp out-of-range classes, for which the loss raises a clearer error.
        counts = weight.to(targets.device)[targets.clamp(0, len(weight) - 1)] * counts
    total = counts.sum()
    return total.item() if total.is_cpu else total


def fractions(weights: Sequence[float | Tensor], device: torch.device) -> Sequence[float | Tensor]:
    """Return each weight divided by their sum, as tensors if any weight is a tensor or 0."""
    if all(isinstance(weight, (int, float)) and weight > 0 for weight in weights):
        total = sum(weights)
        return [weight / total for weight in weights]
    stacked = torch.stack([on_device(weight, device) for weight in weights])
    return list(fraction(stacked, stacked.sum()))


def on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-dim tensor (float64 if supported), without waiting for the device."""
    dtype = wide_type(device.type)
    if isinstance(number, Tensor):
        return number.detach().to(device, dtype).reshape(())
    # Copying from the host would wait for the device.
    return torch.full((), float(number), dtype=dtype, device=device)


def fraction(weight: Tensor, total: Tensor) -> Tensor:
    """Return weight / total, or 0 if the total is 0."""
    return (weight / total).masked_fill(total == 0, 0)


def scaled(loss: Tensor, factor: float | Tensor, outputs: Any) -> Tensor:
    """Return the loss times this factor.

    If the factor is 0, the loss is the mean over no targets, which is NaN, and its backward pass
    would compute 0 * inf. So set the loss and the gradient of the outputs to 0.
    """
    if not isinstance(factor, Tensor):
        return loss * factor
    is_nothing = factor == 0

    def masked(gradient: Tensor | None) -> Tensor | None:
        # DistributedDataParallel passes None for an output that the loss does not use.
        return None if gradient is None else gradient.masked_fill(is_nothing, 0)

    for _, output in batches.entries(outputs):
        if output.requires_grad:
            output.register_hook(masked)
    return loss.masked_fill(is_nothing, 0) * factor.to(loss.dtype)
