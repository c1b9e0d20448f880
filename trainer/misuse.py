"""Check what a script gives to the Trainer, and say what to give instead."""

import re
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import batch as batches
from stoker.trainer import (
    device_errors,
    graph,
    launch,
    losses,
    memory,
    nonfinite,
    parallel,
    schedules,
    settings,
)
from stoker.trainer.callbacks import Callback
from stoker.trainer.carried import Carried
from stoker.trainer.errors import NotFinite, UserError, did_you_mean, first_few, kind_of
from stoker.trainer.loading import Seekable, by_name
from stoker.trainer.overrides import is_usual

if TYPE_CHECKING:
    from stoker.trainer.micro_batch import MicroBatch
    from stoker.trainer.trainer import Trainer

HOW = "docs/own.md shows how"
# Methods that are given a batch, the outermost last.
GIVEN_A_BATCH = ("compute_loss", "update_metrics", "predict_batch", "train_step")
FORM_ERRORS = (TypeError, ValueError, AttributeError)
# What your method has to return, and the functions that fail if it returns something else.
RESULTS = {
    "compute_loss": ("loss, outputs", ("__iter__", "train_step", "accumulate", "compute_losses")),
    "train_step": ("the mean loss, a tensor", ("update",)),
}
METRIC = ("update", "compute", "reset")
LOADERS = (torch.utils.data.DataLoader, Seekable)
# Methods of the trainers of other libraries.
METHODS = (
    "training_step",
    "validation_step",
    "test_step",
    "prediction_step",
    "predict_step",
    "configure_optimizers",
    "create_optimizer",
    "create_scheduler",
)
# Wrappers of a module, each with the setting that does its work.
WRAPPERS = {
    "DataParallel": "strategy='dp'",
    "DistributedDataParallel": "strategy='ddp'",
    "FullyShardedDataParallel": "strategy='fsdp'",
    "OptimizedModule": "compile=True",
}


def check_parts(
    trainer: "Trainer",
    model: Any,
    loss: Any,
    optimizer: Any,
    scheduler: Any,
    metrics: Any,
    callbacks: Any,
    groups: Any,
) -> None:
    """Raise UserError for a part of a Trainer that is a name, a class or another kind of object."""
    check_methods(trainer)
    check_model(model)
    check_loss_function(loss)
    settings.check("groups", groups)
    check_optimizer(trainer, optimizer, groups)
    if scheduler is not None and not callable(scheduler):
        raise UserError(
            "scheduler: give a factory, such as functools.partial(stoker.trainer.schedules.cosine, "
            f"warmup=0.1){instead_of(scheduler)}.\n"
            "Each fit calls it with the optimizer; torch's schedulers count optimizer steps here."
        )
    if metrics is not None and not hasattr(metrics, "keys"):
        raise UserError("metrics: give a dict, as in metrics={'acc': Accuracy()}.")
    for name, metric in (metrics or {}).items():
        check_metric(name, metric)
    if not isinstance(callbacks, (list, tuple)):
        raise UserError(
            f"callbacks: give a list, as in callbacks=[Progress()]{instead_of(callbacks)}."
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks: give objects of stoker.Callback{instead_of(callback)}.")
        check_hooks(callback)


def check_methods(trainer: "Trainer") -> None:
    """Raise UserError for a subclass with a method that is never called."""
    kind = type(trainer)
    for name in dir(kind):
        if name in METHODS or (name.startswith("on_") and callable(getattr(kind, name))):
            raise UserError(
                f"{kind.__name__}.{name}: Trainer never calls this.\nOverride train_step or "
                f"compute_loss, or move hooks to a callback; {HOW}."
            )


def check_hooks(callback: Callback) -> None:
    """Raise UserError for a callback with a hook that is never called."""
    kind = type(callback)
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
            raise UserError(
                f"callbacks: {kind.__name__}.{name} is not a hook, so it is never called."
                f"{did_you_mean(name, hooks)}\nThe hooks are {', '.join(hooks)}. To change what "
                "happens inside a step, override Trainer.train_step or compute_loss."
            )


def check_model(model: Any) -> None:
    """Raise UserError for what is not a module, or is one in a wrapper of torch's."""
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model: give a torch.nn.Module{instead_of(model)}.")
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS:
            raise UserError(
                f"model: pass the module itself, not {kind.__name__}, which renames every weight.\n"
                f"Trainer(model, {WRAPPERS[kind.__name__]}) does the same."
            )


def check_optimizer(trainer: "Trainer", optimizer: Any, groups: Any) -> None:
    """Raise UserError for what is not an optimizer, or one that leaves a setting without effect."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise UserError(
                "optimizer: give one, such as torch.optim.SGD(model.parameters(), lr=0.01), or a "
                "factory, such as functools.partial(torch.optim.AdamW, lr=1e-3)."
            )
        return
    setting = "groups=" if groups else None
    if not is_usual(type(trainer), "parameter_groups"):
        setting = f"{type(trainer).__name__}.parameter_groups"
    if setting is not None:
        name = type(optimizer).__name__
        raise UserError(
            f"optimizer: {setting} cannot change the parameter groups of this {name}.\n"
            f"Give a factory: optimizer=functools.partial({name}, lr=...)."
        )


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
        raise UserError(f"loss: reduction={reduction!r} is not supported. Use reduction='mean'.")
    for name in ("size_average", "reduce"):  # torch's older names for it
        if losses.option(loss, name) is False:
            raise UserError(f"loss: {name}=False is not supported. Leave {name} out.")
    if isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
        raise UserError(f"loss: {type(loss).__name__} has parameters. Make it part of the model.")


def check_metric(name: str, metric: Any) -> None:
    """Raise UserError for what is not one metric."""
    methods = [callable(getattr(metric, method, None)) for method in METRIC]
    # torchmetrics' MetricCollection has keys.
    if isinstance(metric, type) or not all(methods) or hasattr(metric, "keys"):
        raise UserError(
            f"metrics: {name!r} has to be one object with {', '.join(METRIC)}, such as Accuracy()"
            f"{instead_of(metric)}."
        )


def instead_of(part: Any) -> str:
    """Return ', not the class Linear', or what else was given."""
    if isinstance(part, type):
        return f", not the class {part.__name__}"
    if isinstance(part, (str, type(None))):
        return f", not {part!r}"
    return f", not {kind_of(part)}"


def check_fit(trainer: "Trainer", train_loader: Any, val_loader: Any) -> None:
    """Raise UserError if something that `fit` needs is missing."""
    check_loader(trainer, train_loader, "fit")
    named = by_name(val_loader)
    if val_loader is not None and not named:
        raise UserError("fit: val_loader is empty. Leave it out, or give {name: loader}.")
    for name, loader in named.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name == "train":
            raise UserError(
                f"fit: a validation loader is named {name!r}. Use letters, digits and _, and not "
                "'train': its loss is logged as NAME/loss."
            )
        check_loader(trainer, loader, "fit")
    if trainer.optimizer is None:
        raise UserError(
            "fit needs an optimizer: "
            "Trainer(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))."
        )
    check_loss(trainer, "fit")


def check_loss(trainer: "Trainer", use: str) -> None:
    """Raise UserError if there is neither a loss nor a compute_loss that does without.

    Also for one whose parts do not add up where batches are cut.
    """
    if trainer.loss is None and is_usual(type(trainer), "compute_loss"):
        raise UserError(
            f"{use} needs a loss: give Trainer(loss=torch.nn.CrossEntropyLoss()), or override "
            "compute_loss."
        )
    cuts = trainer.micro_batch
    is_cut = cuts.adapts or cuts.size is not None or cuts.parts > 1 or parallel.ranks() > 1
    sums_over_first = losses.option(trainer.loss, "reduction") == "batchmean"
    if is_cut and sums_over_first and not is_usual(type(trainer), "sample_dim"):
        raise UserError(
            "loss: reduction='batchmean' divides by the first dimension, and "
            f"{type(trainer).__name__}.sample_dim may cut along another.\n"
            "Give reduction='mean', or a function of (outputs, targets) that divides by samples."
        )


def check_uncut(trainer: "Trainer", loader: Any) -> None:
    """Raise UserError where a setting cuts or captures batches that have to stay whole."""
    kind = type(trainer)
    names = [name for name in dir(kind) if isinstance(getattr(kind, name), Carried)]
    setting = trainer.micro_batch.cut_by()
    if trainer.special_step is not None and trainer.special_step.captures:
        setting = "compile=graph"
    if names:
        reason = f"{kind.__name__}.{names[0]} is carried from one whole batch to the next"
        if parallel.ranks() > 1 or trainer.replicas:
            setting = f"strategy={trainer.strategy}"
    elif getattr(loader, "accumulate", 1) > 1:
        reason = f"with accumulate={loader.accumulate} the loader's batches are the micro-batches"
    else:
        return
    if setting is not None:
        raise UserError(f"{setting}: {reason}.\nLeave {setting.partition('=')[0]} out.")


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
    is_list = isinstance(loader, (list, tuple)) and len(loader) > 0
    is_several = isinstance(loader, Mapping) or (is_list and isinstance(loader[0], LOADERS))
    # A fit on a list of tensors needs a compute_loss that takes one.
    is_batch = is_list and isinstance(loader[0], torch.Tensor)
    is_batch = is_batch and use != "predict" and is_usual(type(trainer), "compute_loss")
    is_wrong = isinstance(loader, (torch.Tensor, str)) or not hasattr(loader, "__iter__")
    if is_several or is_batch or is_wrong:
        raise UserError(
            f"{use}: give one loader, or a list of batches{instead_of(loader)}.\n"
            "DataLoader(dataset, batch_size=64) makes one. For several validation loaders, use "
            "fit(..., val_loader={name: loader})."
        )
    shuffles = isinstance(getattr(loader, "sampler", None), torch.utils.data.RandomSampler)
    shuffles = shuffles or getattr(loader, "shuffle", False)
    if use == "predict" and shuffles:
        launch.warn(
            "predict: the loader shuffles, so the outputs come in a random order. "
            "Use shuffle=False."
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
            f"The model returns {form(outputs)}, but the loss takes a tensor.\n"
            f"Override compute_loss; {HOW}."
        )


def inputs_of(batch: Any, sample_dim: batches.SampleDimOf = batches.usual_dim) -> Any:
    """Return the inputs of a batch that is inputs, or (inputs, targets)."""
    if not batches.is_list(batch):
        return batch
    lengths: set[int] = set()
    for i, part in enumerate(batch):
        dim = sample_dim(f"batch[{i}]", part)
        if isinstance(part, torch.Tensor) and isinstance(dim, int):
            lengths.add(part.shape[dim])
    if len(batch) > 2 or len(lengths) > 1:
        raise UserError(
            f"predict: a batch is {form(batch)}, and neither inputs nor (inputs, targets).\n"
            f"Override predict_batch, which returns the outputs for a batch; {HOW}."
        )
    return batch[0]


def number(name: str, value: Any) -> Any:
    """Return one number as a float, which loggers look for, and several as a nested list."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{name} is {kind_of(value)}, not a number or a tensor. "
            "Make one metric for each number."
        ) from None
    return float(tensor) if tensor.numel() == 1 else tensor.tolist()


def warn_of_untrained(trainer: "Trainer") -> None:
    """Warn of weights that require a gradient and that no optimizer has, such as new ones."""
    names = []
    for name, parameter in trainer.without_optimizer().items():
        if parameter.requires_grad:
            names.append(name)
    is_news = not trainer.untrained >= set(names)
    trainer.untrained = set(names)
    if is_news:
        launch.warn(
            f"No optimizer trains {first_few(names, 3)}. Give the optimizer all of the model's "
            "parameters, or return a second optimizer from stateful()."
        )


def warn_of_epochs(trainer: "Trainer") -> None:
    """Warn of a schedule of torch's with numbers that take no effect, or that look like epochs."""
    total = trainer.total_steps
    per_epoch = trainer.steps_per_epoch
    kind = type(trainer.scheduler).__name__
    for attribute, counts in schedules.counts(trainer.scheduler).items():
        name = attribute.removeprefix("_")
        is_often_epochs = schedules.COUNTS[attribute]
        if max(counts) > total:
            launch.warn(
                f"scheduler: {kind}'s {name}={max(counts)} is after the last step, {total:,}."
            )
        elif per_epoch < total and min(counts) < per_epoch and is_often_epochs:
            launch.warn(
                f"scheduler: {kind} counts optimizer steps here, {per_epoch:,} per epoch: "
                f"{name}={min(counts)} is {min(counts) / per_epoch:.2g} epochs. "
                f"For {min(counts)} epochs, give {min(counts) * per_epoch}."
            )


def form(batch: Any) -> str:
    """Return 'a dict with 'x', 'y'' or 'a list of 3'."""
    text = kind_of(batch)
    if isinstance(batch, Mapping):
        text += f" with {', '.join(map(repr, list(batch)[:5]))}"
    if isinstance(batch, (list, tuple)):
        text += f" of {len(batch)}"
    return text


def raise_explained(
    trainer: "Trainer", error: BaseException, batch: Any, micro_batch: "MicroBatch"
) -> None:
    """Raise the error as the user should see it, if it is a known mistake or too little memory."""
    if not isinstance(error, Exception) or isinstance(error, UserError):
        return
    if isinstance(error, NotFinite):
        raise nonfinite.explained(trainer, error) from None
    if memory.is_out_of_memory(error):
        samples = None if batch is None else trainer.samples(batch)
        raise micro_batch.explain(samples) from error
    calls = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    text = wrong_batch(trainer, error, batch, calls) or wrong_result(trainer, error, calls)
    if text is not None:
        raise UserError(text) from error
    explained = device_errors.explain(error, trainer.module, batch, trainer.device)
    explained = explained or parallel.explain(error)
    if trainer.special_step is not None and trainer.special_step.captures:
        explained = explained or graph.explain(error, trainer)
    if explained is not None:
        raise explained from error
    in_step = any(name in calls for name in GIVEN_A_BATCH)
    if in_step and hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(f"The model is {type(trainer.module).__name__}, the batch {shapes(batch)}.")


def shapes(batch: Any) -> str:
    """Return "(float32 of 20x8, int64 of 20)", the contents of a batch."""
    if isinstance(batch, torch.Tensor):
        size = "x".join(map(str, batch.shape)) or "one number"
        return f"{str(batch.dtype).removeprefix('torch.')} of {size}"
    if isinstance(batch, Mapping):
        parts = [f"{name}: {shapes(part)}" for name, part in batch.items()]
        return "{" + ", ".join(parts) + "}"
    if isinstance(batch, (list, tuple)):
        return f"({', '.join(map(shapes, batch[:5]))}{', ...' if len(batch) > 5 else ''})"
    return type(batch).__name__


def wrong_batch(trainer: "Trainer", error: Exception, batch: Any, calls: list[str]) -> str | None:
    """Return what to do if one of the Trainer's own methods cannot take the batch."""
    is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2
    if batch is None or is_pair or not isinstance(error, FORM_ERRORS):
        return None
    for name in GIVEN_A_BATCH[:3]:
        # `predict_batch` gives any batch to the model, whose errors may be its own.
        is_refused = name != "predict_batch" or isinstance(batch, Mapping)
        if name in calls and is_usual(type(trainer), name) and is_refused:
            return (
                f"A batch is {form(batch)}, and {name} takes (inputs, targets): {error}.\n"
                f"Override {name}; {HOW}."
            )
    return None


def wrong_result(trainer: "Trainer", error: Exception, calls: list[str]) -> str | None:
    """Return what to do if your compute_loss or train_step has returned the wrong thing."""
    if "compute_loss" in calls or not isinstance(error, FORM_ERRORS):
        return None
    for name, (result, callers) in RESULTS.items():
        if not is_usual(type(trainer), name) and calls[-1] in callers:
            return f"{name} has to return {result}: {error}.\nChange its return statement; {HOW}."
    return None
