"""What a script may hand to the Trainer by mistake, each answered by what to give instead."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import device as devices
from stoker.trainer import launch, losses, parallel
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, first_few, log
from stoker.trainer.loading import Seekable

if TYPE_CHECKING:
    from stoker.trainer.micro_batch import MicroBatch
    from stoker.trainer.trainer import Trainer

HOW = "docs/own.md shows how"
METRIC = ("update", "compute", "reset")
LOADERS = (torch.utils.data.DataLoader, Seekable)
NO_LOSS = "give Trainer(loss=torch.nn.CrossEntropyLoss()), or override compute_loss"
HERE = Path(__file__).parent
# Functions that call a method of the Trainer, by the file and name that a traceback shows, and what
# that method has to return. Where they fail by themselves, it returned something else.
LOSS_AND_OUTPUTS = (
    "compute_loss has to return the mean loss, a tensor, and the outputs; this one returns "
    f"something else ({{error}}).\nLet it return loss, outputs; {HOW}."
)
CALLERS = {
    ("trainer.py", "train_step"): LOSS_AND_OUTPUTS,
    ("steps.py", "accumulate"): LOSS_AND_OUTPUTS,
    ("evaluation.py", "compute_losses"): LOSS_AND_OUTPUTS,
    ("evaluation.py", "evaluate"): LOSS_AND_OUTPUTS,
    ("trainer.py", "fit"): (
        "train_step has to return the mean loss of its batch, a tensor: "
        "let it return loss.detach()."
    ),
}


def check_parts(
    model: Any, loss: Any, optimizer: Any, scheduler: Any, metrics: Any, callbacks: Any
) -> None:
    """Raise UserError for a part of a Trainer that is a name, a class or another kind of object."""
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model: give a torch.nn.Module{instead_of(model)}.")
    check_loss_function(loss)
    if optimizer is not None and not callable(optimizer):
        raise UserError(
            "optimizer: give a factory, such as functools.partial(torch.optim.AdamW, lr=1e-3); "
            "the Trainer calls it with the parameters."
        )
    if scheduler is not None and not callable(scheduler):
        raise UserError(
            "scheduler: give a factory, such as functools.partial(stoker.trainer.schedules.cosine, "
            "warmup=0.1); the Trainer calls it with the optimizer."
        )
    if metrics is not None and not hasattr(metrics, "keys"):
        raise UserError("metrics: give them by their names, as in metrics={'acc': Accuracy()}.")
    for name, metric in (metrics or {}).items():
        check_metric(name, metric)
    if not isinstance(callbacks, (list, tuple)):
        raise UserError(
            f"callbacks: give a list, as in callbacks=[Progress()]{instead_of(callbacks)}."
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks: {callback!r} is not a stoker.trainer.callbacks.Callback.")


def check_loss_function(loss: Any) -> None:
    """Raise UserError for a loss that the Trainer cannot call, or that would train wrongly."""
    if loss is None:
        return
    if isinstance(loss, type) or not callable(loss):
        raise UserError(
            "loss: give a function of (outputs, targets) that returns their mean, "
            f"such as torch.nn.MSELoss(){instead_of(loss)}."
        )
    reduction = losses.option(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise UserError(f"loss: reduction={reduction!r}; the Trainer weighs means, so give 'mean'.")
    if isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
        raise UserError(
            f"loss: {type(loss).__name__} has parameters of its own; make it a part of the model."
        )


def check_metric(name: str, metric: Any) -> None:
    """Raise UserError for what is not one metric."""
    methods = [callable(getattr(metric, method, None)) for method in METRIC]
    if isinstance(metric, type) or not all(methods):
        raise UserError(
            f"metrics: {name!r} needs {', '.join(METRIC)}, as Accuracy() has{instead_of(metric)}."
        )
    if hasattr(metric, "keys"):  # torchmetrics' MetricCollection
        raise UserError(
            f"metrics: {name!r} is several. Give each by a name, as in metrics=dict(collection)."
        )


def instead_of(part: Any) -> str:
    """Return ', and not the class Linear', or what else was given."""
    if isinstance(part, type):
        return f", and not the class {part.__name__}: {part.__name__}(...) makes one"
    if isinstance(part, (str, type(None))):
        return f", and not {part!r}"
    return f", and not a {type(part).__name__}"


def check_fit(trainer: "Trainer", train_loader: Any, val_loader: Any) -> None:
    """Raise UserError if something that `fit` needs is missing."""
    check_loader(trainer, train_loader, "fit")
    if val_loader is not None:
        check_loader(trainer, val_loader, "fit")
    if trainer.optimizer is None:
        raise UserError(
            "fit needs an optimizer: "
            "Trainer(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))."
        )
    check_loss(trainer, "fit")


def check_loss(trainer: "Trainer", use: str) -> None:
    """Raise UserError if there is neither a loss nor a compute_loss that does without."""
    if trainer.loss is None and is_usual(trainer, "compute_loss"):
        raise UserError(f"{use} needs a loss: {NO_LOSS}.")


def check_loader(trainer: "Trainer", loader: Any, use: str) -> None:
    """Check what was given to fit, evaluate or predict (the `use`).

    Warn if the outputs would come in a shuffled order.

    Raises:
        UserError: This is not one loader of batches, or the Trainer is closed.
    """
    if trainer.module is None:
        raise UserError(
            f"{use}: this Trainer is closed. Call it before close(), or inside its `with`."
        )
    kind = type(loader).__name__
    several = isinstance(loader, (list, tuple)) and loader and isinstance(loader[0], LOADERS)
    if several or isinstance(loader, Mapping):
        raise UserError(
            f"{use}: give one loader, and not a {kind} of several.\n"
            "Call trainer.evaluate(loader, name) for each of the others, after the fit or in a "
            "callback."
        )
    if isinstance(loader, torch.Tensor) or not hasattr(loader, "__iter__"):
        raise UserError(
            f"{use}: give a loader, that is batches, and not a {kind}.\n"
            "One batch is [inputs]; DataLoader(..., batch_size=500) cuts a data set."
        )
    shuffles = isinstance(getattr(loader, "sampler", None), torch.utils.data.RandomSampler)
    shuffles = shuffles or getattr(loader, "shuffle", False)
    if use == "predict" and shuffles and launch.is_first():
        log.warning(
            "predict: the loader shuffles, and the outputs come in its order. "
            "Give one with shuffle=False."
        )


def check_layout(module: torch.nn.Module, channels_last: bool | str, compiled: bool) -> bool:
    """Return whether `fit` may still take channels_last back, when it knows the images.

    Raises:
        UserError: `channels_last` was asked for, and the parameters are sharded.
    """
    if not any(map(parallel.is_shard, module.parameters())):
        return channels_last == "auto" and not compiled
    if channels_last is True:
        raise UserError(
            "channels_last=true: shards have no memory format. "
            "Type channels_last=auto, or strategy=ddp."
        )
    return False


def check_epoch(expected: int, batches: int) -> None:
    """Raise UserError if the training loader gave more or fewer batches than its length."""
    if batches != expected:
        raise UserError(
            f"The training loader's len() is {expected}, and it gave {batches} batches."
        )


def check_outputs(outputs: Any) -> None:
    """Raise UserError if the loss was called with outputs that are not a tensor."""
    if not isinstance(outputs, torch.Tensor):
        raise UserError(
            f"The model returns a {type(outputs).__name__}, and the loss takes a tensor.\n"
            f"Override compute_loss; {HOW}."
        )


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch that is inputs, or (inputs, targets)."""
    if not isinstance(batch, (list, tuple)):
        return batch
    lengths = {len(part) for part in batch if isinstance(part, torch.Tensor) and part.ndim}
    if len(batch) > 2 or len(lengths) > 1:
        raise UserError(
            f"predict: a batch is {form(batch)}, and neither inputs nor (inputs, targets).\n"
            f"Override predict_batch, which returns the outputs for a batch; {HOW}."
        )
    return batch[0]


def as_tensor(outputs: Any) -> torch.Tensor:
    """Return the outputs for a batch, on the CPU."""
    if not isinstance(outputs, torch.Tensor):
        raise UserError(
            f"predict: the model returns a {type(outputs).__name__}, not a tensor.\n"
            f"Override predict_batch to return one; {HOW}."
        )
    return outputs.cpu()


def joined(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the outputs of all batches as one tensor."""
    if not outputs:
        raise UserError("predict: the loader gives no samples.")
    shapes = sorted({tuple(part.shape[1:]) for part in outputs})
    if len(shapes) > 1:
        raise UserError(
            f"predict: the outputs are {shapes[0]} per sample in one batch and {shapes[-1]} in "
            "another, which do not make one tensor.\n"
            f"Pad all batches alike, or override predict_batch to return equal shapes; {HOW}."
        )
    return torch.cat(outputs)


def number(name: str, value: Any) -> Any:
    """Return one number as a float, which loggers look for, and several as a nested list."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{name} is a {type(value).__name__}, not a number or a tensor. "
            "Make one metric for each number."
        ) from None
    return float(tensor) if tensor.numel() == 1 else tensor.tolist()


def warn_of_untrained(trainer: "Trainer") -> None:
    """Warn of weights that require a gradient and that no optimizer has, such as new ones."""
    trained: set[int] = set()
    for part in trainer.stateful().values():
        if isinstance(part, torch.optim.Optimizer):
            for group in part.param_groups:
                trained.update(map(id, group["params"]))
    names = []
    for name, parameter in trainer.module.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            names.append(name)
    is_news = not trainer.untrained.issuperset(names)
    trainer.untrained = set(names)
    if is_news and launch.is_first():
        log.warning(
            "No optimizer has %s: not trained. Give the optimizer all of the model's parameters, or "
            "name a second optimizer in stateful().",
            first_few(names, 3),
        )


def form(batch: Any) -> str:
    """Return 'a dict with 'x', 'y'' or 'a list of 3'."""
    text = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        text += f" with {', '.join(map(repr, list(batch)[:5]))}"
    if isinstance(batch, (list, tuple)):
        text += f" of {len(batch)}"
    return text


def is_usual(trainer: "Trainer", method: str) -> bool:
    """Return whether a method is that of Trainer itself, and not of a subclass."""
    module: str = getattr(type(trainer), method).__module__
    return module in ("stoker.trainer.trainer", "stoker.trainer.batching")


def raise_explained(
    trainer: "Trainer", error: BaseException, batch: Any, micro_batch: "MicroBatch"
) -> None:
    """Raise the error as the user should see it, if it is a known mistake or too little memory."""
    if not isinstance(error, Exception) or isinstance(error, UserError):
        return
    if devices.is_out_of_memory(error):
        samples = None if batch is None else trainer.samples(batch)
        raise micro_batch.explain(samples, trainer.module) from error
    text = wrong_batch(trainer, error, batch) or wrong_result(error)
    if text is not None:
        raise UserError(text) from error
    explained = devices.explain(error, trainer.module, batch, trainer.device)
    explained = explained or parallel.explain(error)
    if explained is not None:
        raise explained from error


def wrong_batch(trainer: "Trainer", error: Exception, batch: Any) -> str | None:
    """Return what to do if one of the Trainer's own methods cannot take the batch."""
    calls = places(error)
    is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2
    if is_pair or not calls or not isinstance(error, (TypeError, ValueError, AttributeError)):
        return None
    for name in ("compute_loss", "update_metrics"):
        place = ("trainer.py", name)
        cannot = calls[-1] == place or (isinstance(batch, Mapping) and place in calls)
        if cannot and is_usual(trainer, name):
            return (
                f"A batch is {form(batch)}, and {name} takes (inputs, targets).\n"
                f"Override {name}; {HOW}."
            )
    is_given_whole = isinstance(batch, Mapping) and ("trainer.py", "predict_batch") in calls
    if is_given_whole and is_usual(trainer, "predict_batch"):
        return (
            f"predict: a batch is {form(batch)}, and all of it was given to the model.\n"
            f"Override predict_batch; {HOW}."
        )
    return None


def wrong_result(error: Exception) -> str | None:
    """Return what to do if compute_loss or train_step has returned the wrong thing."""
    calls = places(error)
    # The mean of the losses fails inside, with what it is given.
    while calls and calls[-1][0] == "metrics.py":
        calls.pop()
    text = CALLERS.get(calls[-1]) if calls else None
    return text and text.format(error=error)


def places(error: Exception) -> list[tuple[str, str]]:
    """Return (file, function) of each call on the way to the error, the innermost last.

    Files of this package have short names. Unpacking a tensor counts for the function that does it.
    """
    calls = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        calls.append((path.name if path.parent == HERE else str(path), frame.name))
    while calls and calls[-1][0].endswith("_tensor.py"):
        calls.pop()
    return calls
