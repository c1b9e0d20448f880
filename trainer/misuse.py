"""Check the arguments of the Trainer and its methods."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stoker.trainer import (
    batches,
    launch,
    losses,
    parallel,
    settings,
    steps,
    summary,
)
from stoker.trainer.callback import Callback
from stoker.trainer.carried import Carried
from stoker.trainer.errors import (
    UserError,
    did_you_mean,
    first_few,
    kind_of,
)
from stoker.trainer.loading import by_name
from stoker.trainer.overrides import is_usual, step_uses

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

# The modules whose iterators do not start over at iter().
EXHAUSTED = ("builtins", "itertools", "torch.utils.data.dataloader")
HOW = "'Bring your own' in the documentation shows how"
HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
# Method names used by trainers in other libraries.
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
# torch's wrappers of a module, which rename its weights.
WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
)


def check_parts(
    trainer: "Trainer",
    model: Any,
    loss: Any,
    optimizer: Any,
    metrics: Any,
    callbacks: Any,
    groups: Any,
) -> None:
    """Raise UserError for arguments that a Trainer would ignore or use incorrectly."""
    check_methods(type(trainer), ())
    if not isinstance(model, nn.Module):
        raise UserError(f"model: must be a torch.nn.Module, not {kind_of(model)}.")
    if type(model).__name__ in WRAPPERS:
        raise UserError(
            'model: pass the module itself. Trainer(strategy="dp", "ddp" or "fsdp") or '
            "Trainer(compile=True) wraps it."
        )
    for part in (loss, *(metrics or {}).values(), *callbacks):
        if isinstance(part, type):
            raise UserError(f"{part.__name__}: pass an instance, not the class.")
    check_loss_function(trainer, loss)
    if isinstance(optimizer, (list, tuple, Mapping)):
        raise UserError(
            f"optimizer: pass one optimizer, or a function that creates one, not "
            f"{kind_of(optimizer)}. To use several, return "
            "stoker.trainer.combined.Combined([first, second])."
        )
    settings.check("groups", groups)
    has_rules = bool(groups) or not is_usual(type(trainer), "parameter_groups")
    if isinstance(optimizer, torch.optim.Optimizer) and has_rules:
        raise UserError(
            "optimizer: groups= and parameter_groups() cannot change the parameter groups of an "
            f"optimizer instance ({type(optimizer).__name__}).\n"
            "Pass a factory: optimizer=functools.partial(torch.optim.SGD, lr=...)."
        )
    for callback in callbacks:
        check_methods(type(callback), HOOKS)
    if len(set(map(id, callbacks))) < len(callbacks):
        raise UserError("callbacks: the list contains the same callback twice.")


def check_methods(kind: type, called: Collection[str]) -> None:
    """Raise UserError for a method that looks like a hook but is never called."""
    for name in dir(kind):
        is_expected = name in METHODS or name.startswith("on_")
        if is_expected and name not in called and callable(getattr(kind, name)):
            raise UserError(
                f"{kind.__name__}.{name} is never called.{did_you_mean(name, HOOKS)}\n"
                f"The hooks of a callback are {', '.join(HOOKS)}. To change what happens inside a "
                "step, override Trainer.train_step or compute_loss."
            )


def check_loss_function(trainer: "Trainer", loss: Any) -> None:
    """Raise UserError for a loss with which the Trainer would train incorrectly."""
    reduction = losses.option(loss, "reduction", "mean")
    # batchmean divides by the first dimension, usually the number of samples.
    is_fine = reduction == "batchmean" and is_usual(type(trainer), "sample_dim")
    if reduction != "mean" and not is_fine:
        raise UserError(f"loss: reduction={reduction!r} is not supported. Use reduction='mean'.")
    if isinstance(loss, nn.Module) and list(loss.parameters()):
        raise UserError(f"loss: {type(loss).__name__} has parameters. Make it part of the model.")


def check_fit(trainer: "Trainer", train_loader: Any, val_loader: Any) -> None:
    """Raise UserError if something that `fit` needs is missing."""
    check_loader(trainer, train_loader, "fit")
    named = by_name(val_loader)
    if val_loader is not None and not named:
        raise UserError("fit: val_loader is an empty dict. Remove it, or pass {name: loader}.")
    for name, loader in named.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name == "train":
            raise UserError(
                f"fit: {name!r} is not a valid name for a validation loader, whose loss is logged "
                "as NAME/loss.\nUse letters, digits and underscores, but not 'train'."
            )
        check_loader(trainer, loader, "fit")
        iterable = getattr(loader, "loader", loader)
        kind = type(iterable)
        goes_on = kind.__module__ in EXHAUSTED or kind.__iter__ is Iterator.__iter__
        if hasattr(iterable, "__next__") and goes_on:
            raise UserError(
                f"fit: the validation loader is {kind_of(iterable)}, which would yield other "
                "batches at each evaluation.\nPass an object that starts over at each iter(), such "
                "as a DataLoader or a list of batches."
            )
    if trainer.optimizer is None:
        raise UserError(
            "fit needs an optimizer. Pass one, as in "
            "Trainer(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))."
        )


def check_whole_batches(trainer: "Trainer", loader: Any) -> None:
    """Raise UserError for a setting that splits or captures batches that must stay whole."""
    kind = type(trainer)
    carried = [name for name in dir(kind) if isinstance(getattr(kind, name), Carried)]
    whole = [f"{kind.__name__}.{name}" for name in carried]
    setting = trainer.splitter.cut_by()
    if steps.captures(trainer):
        setting = "compile=graph"
    if whole and (parallel.process_count > 1 or trainer.replica_indices):
        setting = f"strategy={trainer.strategy}"
    if getattr(loader, "accumulate", 1) > 1:
        whole.append(f"accumulate={loader.accumulate}")
    if setting is not None and whole:
        raise UserError(f"{setting} cannot be used with {whole[0]}, which needs whole batches.")


def check_loader(trainer: "Trainer", loader: Any, use: str) -> None:
    """Check the loader passed to `use`: fit, evaluate or predict.

    Warn if predictions would be in shuffled order.

    Raises:
        UserError: This is not a single loader of batches, or the Trainer is closed, or has no loss.
    """
    check_built(trainer)
    if trainer.module is None:
        raise UserError(
            f"{use}: this Trainer is closed. Call {use} before close(), or inside the `with` block."
        )
    uses_loss = use != "predict" and is_usual(type(trainer), "compute_loss")
    if uses_loss and trainer.loss is None:
        raise UserError(
            f"{use} needs a loss. Pass one, as in Trainer(loss=torch.nn.CrossEntropyLoss()), or "
            "override compute_loss."
        )
    first = loader[0] if isinstance(loader, (list, tuple)) and loader else None
    if (
        not hasattr(loader, "__iter__")
        or isinstance(loader, (Tensor, Mapping, str))
        or isinstance(first, torch.utils.data.DataLoader)
        or (uses_loss and isinstance(first, Tensor))  # a pair (inputs, targets)
    ):
        raise UserError(
            f"{use}: this {type(loader).__name__} is not a loader. Pass one loader, such as "
            "DataLoader(dataset, batch_size=64), or a list of batches.\n"
            "Only fit accepts several validation loaders: val_loader={name: loader}."
        )
    shuffles = isinstance(getattr(loader, "sampler", None), torch.utils.data.RandomSampler)
    shuffles = shuffles or getattr(loader, "shuffle", False)
    if use == "predict" and shuffles:
        launch.warn(
            "predict: the loader shuffles, so the outputs are in random order. Use shuffle=False."
        )


def check_built(trainer: "Trainer") -> None:
    """Raise UserError if the constructor of a subclass does not call the one of Trainer."""
    if not hasattr(trainer, "spans"):  # the last attribute that it sets
        raise UserError(
            f"{type(trainer).__name__}.__init__ must call super().__init__(*args, **kwargs)."
        )


def check_layout(module: nn.Module, channels_last: bool | str) -> None:
    """Raise UserError if channels_last is True and the parameters are sharded."""
    if channels_last is True and any(map(parallel.is_shard, module.parameters())):
        raise UserError(
            "channels_last=true: sharded parameters have no memory format. "
            "Type channels_last=auto, or strategy=ddp."
        )


def check_epoch(expected: int, batches: int) -> None:
    """Raise UserError if the training loader yielded more or fewer batches than its length."""
    if batches != expected:
        raise UserError(
            f"The training loader's len() is {expected}, but it yielded {batches} batches."
        )


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch that is either inputs or (inputs, targets)."""
    if not batches.is_list(batch):
        return batch
    if len(batch) > 2:
        raise UserError(
            "predict: a batch must be inputs or (inputs, targets), "
            f"not {kind_of(batch)} of length {len(batch)}.\n"
            f"Override predict_batch, which returns the outputs for a batch; {HOW}."
        )
    return batch[0]


def number(name: str, value: Any) -> Any:
    """Return a single number as a float, as loggers expect, or several as a nested list."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{name} is {kind_of(value)}, not a number or a tensor. Log one number per name."
        ) from None
    return float(tensor) if tensor.numel() == 1 else tensor.tolist()


def warn_of_untrained(trainer: "Trainer") -> None:
    """Warn about new parameters that require a gradient but belong to no optimizer."""
    weights = trainer.without_optimizer()
    names = [name for name, parameter in weights.items() if parameter.requires_grad]
    if not trainer.untrained >= set(names):
        launch.warn(
            f"These parameters have no optimizer: {first_few(names, 3)}. Pass all parameters of "
            "the model to the optimizer, or return a second optimizer from stateful()."
        )
    trainer.untrained = set(names)


def warn_of_own_step(trainer: "Trainer") -> None:
    """Warn about settings that your own train_step ignores, because your class never uses them."""
    kind = type(trainer)
    cut = "splitter" if trainer.splitter.adapts else "split_with_fractions"
    cast = "scaler" if trainer.scaler.is_enabled() else "autocast"
    uses = {
        "max_grad_norm": trainer.max_grad_norm and f"max_grad_norm={trainer.max_grad_norm}",
        cut: trainer.splitter.cut_by(),
        cast: trainer.dtype and f"precision={summary.precision(trainer)}",
    }
    for name, setting in uses.items():
        if setting and not step_uses(kind, name):
            launch.warn(
                f"{kind.__name__}.train_step seems to ignore {setting}: the class does not use "
                f"self.{name}.\nUse self.{name} in your train_step; {HOW}."
            )


def warn_of_schedule(trainer: "Trainer") -> None:
    """Warn, once per Trainer, if your own train_step does not advance the schedule at each step."""
    kind = type(trainer)
    if trainer.schedule_is_checked or is_usual(kind, "train_step"):
        return
    trainer.schedule_is_checked = True
    scheduler = trainer.scheduler
    # Schedules of stoker.trainer.schedules have `steps`, and torch's have `last_epoch`.
    calls = getattr(scheduler, "steps", getattr(scheduler, "last_epoch", None))
    is_constant = getattr(scheduler, "description", None) == "constant"
    if not is_constant and calls not in (None, trainer.step):
        launch.warn(
            f"{kind.__name__}.train_step does not call self.scheduler.step() once per step, so the "
            f"learning rate does not follow the scheduler.\nCall it once in your train_step; {HOW}."
        )
