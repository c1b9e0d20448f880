"""What a script may hand to the Trainer in place of what it takes, each answered by what to give."""

import traceback
from collections.abc import Mapping

import torch
from stoker.trainer import launch
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, log
from stoker.trainer.loading import Seekable

HOW = "docs/own.md shows how"
MADE_OF = ("update", "compute", "reset")  # a metric
LOADERS = (torch.utils.data.DataLoader, Seekable)


def check_parts(model, loss, optimizer, scheduler, metrics, callbacks):
    """UserError for a part of a Trainer that is a name, a class or an object of another kind."""
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model: give a torch.nn.Module{instead_of(model)}.")
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        what = "a function of (outputs, targets) that gives their mean, such as torch.nn.MSELoss()"
        raise UserError(f"loss: give {what}{instead_of(loss)}.")
    if getattr(loss, "reduction", "mean") != "mean":
        raise UserError(
            f"loss: reduction={loss.reduction!r}; a batch is weighted by its samples, so give 'mean'."
        )
    if isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
        raise UserError(
            f"loss: {type(loss).__name__} has parameters of its own; make it a part of the model."
        )
    examples = {
        "optimizer": (optimizer, "torch.optim.AdamW, lr=1e-3", "parameters"),
        "scheduler": (scheduler, "stoker.trainer.schedules.cosine, warmup=0.1", "optimizer"),
    }
    for name, (part, example, argument) in examples.items():
        if part is not None and not callable(part):
            what = f"what makes one, such as functools.partial({example}); the Trainer calls it with the {argument}"
            raise UserError(f"{name}: give {what}.")
    if metrics is not None and not hasattr(metrics, "keys"):
        raise UserError("metrics: give them by their names, as in metrics={'acc': Accuracy()}.")
    for name, metric in (metrics or {}).items():
        if isinstance(metric, type) or not all(
            callable(getattr(metric, do, None)) for do in MADE_OF
        ):
            raise UserError(
                f"metrics: {name!r} wants {', '.join(MADE_OF)}, as Accuracy() has{instead_of(metric)}."
            )
        if hasattr(metric, "keys"):  # torchmetrics' MetricCollection
            raise UserError(
                f"metrics: {name!r} is several. Give each by a name, as in metrics=dict(collection)."
            )
    if not isinstance(callbacks, (list, tuple)):
        raise UserError(
            f"callbacks: give a list, as in callbacks=[Progress()]{instead_of(callbacks)}."
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks: {callback!r} is no stoker.trainer.callbacks.Callback.")


def instead_of(part):
    """', and not the class Linear', or what else was given."""
    if isinstance(part, type):
        return f", and not the class {part.__name__}: {part.__name__}(...) makes one"
    return (
        f", and not {part!r}"
        if isinstance(part, (str, type(None)))
        else f", and not a {type(part).__name__}"
    )


def check_loader(trainer, loader, use):
    """UserError where this is not one loader of batches, or the Trainer is closed; `use` is fit, evaluate or predict.

    A warning where the outputs would come in a shuffled order.
    """
    if trainer.module is None:
        raise UserError(
            f"{use}: this Trainer is closed. What it is to do comes before close(), or inside its `with`."
        )
    several = isinstance(loader, (list, tuple)) and loader and isinstance(loader[0], LOADERS)
    if several or isinstance(loader, Mapping):
        what = "Call trainer.evaluate(loader, name) for each of the others, after the fit or in a callback"
        raise UserError(
            f"{use}: give one loader, and not a {type(loader).__name__} of several.\n{what}."
        )
    if isinstance(loader, torch.Tensor) or not hasattr(loader, "__iter__"):
        what = f"a loader, that is batches, and not a {type(loader).__name__}"
        raise UserError(
            f"{use}: give {what}.\nOne batch is [inputs]; DataLoader(..., batch_size=500) cuts a data set."
        )
    shuffles = isinstance(getattr(loader, "sampler", None), torch.utils.data.RandomSampler)
    if use == "predict" and (shuffles or getattr(loader, "shuffle", False)) and launch.is_first():
        log.warning(
            "predict: the loader shuffles, and the outputs come in its order. Give one with shuffle=False."
        )


def inputs_of(batch):
    """The inputs of a batch that is them, or (inputs, targets)."""
    if not isinstance(batch, (list, tuple)):
        return batch
    lengths = [len(part) for part in batch if isinstance(part, torch.Tensor) and part.ndim]
    if len(batch) > 2 or len(set(lengths)) > 1:
        what = f"a batch is {form(batch)}, and neither inputs nor (inputs, targets)"
        raise UserError(
            f"predict: {what}.\nOverride predict_batch, which gives the outputs for a batch; {HOW}."
        )
    return batch[0]


def as_tensor(outputs):
    """The outputs for a batch, on the CPU."""
    if not isinstance(outputs, torch.Tensor):
        what = f"predict: the model gives a {type(outputs).__name__}, and no tensor"
        raise UserError(f"{what}.\nOverride predict_batch to give one; {HOW}.")
    return outputs.cpu()


def joined(outputs):
    """The outputs of all batches as one tensor."""
    if not outputs:
        raise UserError("predict: the loader gives no samples.")
    shapes = sorted({tuple(part.shape[1:]) for part in outputs})
    if len(shapes) > 1:
        some = f"{shapes[0]} a sample in one batch and {shapes[-1]} in another"
        raise UserError(
            f"predict: the outputs are {some}, and are no one tensor.\n"
            f"Pad all batches alike, or override predict_batch to give what all have alike; {HOW}."
        )
    return torch.cat(outputs)


def number(name, value):
    """One number as a float, which those who show numbers look for; the nested list of a tensor of several."""
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"a {type(value).__name__}, and no number or tensor"
        raise UserError(f"{name} is {what}. Of several numbers make several metrics.") from None
    return float(value) if value.numel() == 1 else value.tolist()


def warn_of_untrained(trainer):
    """A warning for weights that want a gradient and that no optimizer has: unfrozen after the Trainer was made."""
    optimizers = [
        part for part in trainer.stateful().values() if isinstance(part, torch.optim.Optimizer)
    ]
    trained = {
        id(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    left = [
        name
        for name, p in trainer.module.named_parameters()
        if p.requires_grad and id(p) not in trained
    ]
    if left and launch.is_first():
        names = ", ".join(left[:3]) + ", ..." * (len(left) > 3)
        log.warning(
            "No optimizer has %s: not trained. Unfreeze them before the Trainer is made, or name a second optimizer "
            "in stateful().",
            names,
        )


def form(batch):
    """'a dict with 'x', 'y'' or 'a list of 3'."""
    with_keys = (
        f" with {', '.join(map(repr, list(batch)[:5]))}" if isinstance(batch, Mapping) else ""
    )
    return f"a {type(batch).__name__}{with_keys}" + f" of {len(batch)}" * isinstance(
        batch, (list, tuple)
    )


def explain(error):
    """The UserError for an error that came of batches, a compute_loss or a train_step of another form, or None.

    It is told by where the error was raised, so that no step has to look at anything.
    """
    if isinstance(error, UserError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = {
        frame.f_code.co_name: frame
        for frame in frames
        if frame.f_globals.get("__name__") == "stoker.trainer.trainer"
    }
    for name in ("compute_loss", "update_metrics"):  # those of the Trainer itself
        seen = ours[name].f_locals if name in ours else {"targets": None}
        batch = seen.get("batch")
        if isinstance(batch, Mapping) or "targets" not in seen:
            return UserError(
                f"A batch is {form(batch)}, and {name} takes (inputs, targets).\nOverride {name}; {HOW}."
            )
        if "outputs" in seen and name == "compute_loss":
            if seen["self"].loss is None:
                return UserError(
                    "A loss is needed: give Trainer(loss=torch.nn.CrossEntropyLoss()), say."
                )
            if not isinstance(seen["outputs"], torch.Tensor):
                what = f"The model gives a {type(seen['outputs']).__name__}, and the loss takes a tensor"
                return UserError(f"{what}.\nOverride compute_loss; {HOW}.")
    if "predict_batch" in ours and isinstance(error, (TypeError, AttributeError)):
        batch = ours["predict_batch"].f_locals["batch"]
        if isinstance(batch, Mapping):
            what = f"predict: a batch is {form(batch)}, and all of it was given to the model"
            return UserError(f"{what}.\nOverride predict_batch; {HOW}.")
    # The Mean of the losses, and the unpacking of a tensor, fail where they are handed something else.
    while frames and frames[-1].f_globals.get("__name__") in (
        "stoker.trainer.metrics",
        "torch._tensor",
    ):
        frames.pop()
    place = frames[-1].f_code.co_name if frames else None
    if not frames or frames[-1] is not ours.get(place):
        return None
    if place == "fit":
        return UserError(
            "train_step gives the mean loss of its batch, a tensor: let it return loss.detach()."
        )
    if place in ("accumulate", "evaluate"):
        what = f"compute_loss gives the mean loss, a tensor, and the outputs, and this one something else ({error})"
        return UserError(f"{what}.\nLet it return loss, outputs; {HOW}.")
    return None
