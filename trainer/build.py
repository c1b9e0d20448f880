"""A config node -> the object that it describes: only what is trusted is built, and with arguments that exist."""

import fnmatch
import inspect

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer import cli
from trainer.errors import UserError, did_you_mean

# What a `_target_` may name. One that is typed on the command line is trusted as it is; one in a file of your own
# wants trusted=[mypackage].
TRUSTED = ["trainer", "models", "data", "examples", "torch.nn", "torch.optim", "torchvision.models", "torchmetrics"]


def build(key, node, **offered):
    """The object of a node. Of the `offered` arguments it gets those that its constructor has and the node has not."""
    node = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise UserError(f"{key}: this needs a _target_, the dotted name of what to build. Type {key}._target_=...")
    target = node["_target_"]
    arguments, takes_more = arguments_of(key, target)
    unknown = [name for name in node if not name.startswith("_") and name not in arguments]
    if unknown and not takes_more:
        there = [name for name in arguments if name not in offered]
        hint = did_you_mean(unknown[0], there)
        raise UserError(f"{key}.{unknown[0]}: {target} has no such argument.{hint}\nIt has {', '.join(there)}.")
    try:
        # As a partial, which is called here: Hydra would copy the objects that it is handed.
        factory = hydra.utils.instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        raise UserError(f"{key}._target_={target}: not among what may be built, whatever is trusted.") from error
    if node.get("_partial_"):
        return factory
    # Of those that hand **kwargs on, a Trainer of one's own gets all, and torchvision's models the number of classes.
    passed = [n for n in offered if n in arguments or (takes_more and (key == "trainer" or n == "num_classes"))]
    passed = {name: offered[name] for name in passed if name not in node or key == "trainer"}
    if missing := [name for name, needed in arguments.items() if needed and name not in passed and name not in node]:
        raise UserError(f"{key}.{missing[0]}: {target} needs this argument. Type +{key}.{missing[0]}=...")
    try:
        return factory(**passed)
    except UserError:
        raise
    except (ValueError, TypeError) as error:  # how torch refuses a value, and a function an argument of its **kwargs
        if isinstance(error, TypeError) and "argument" not in str(error):
            raise
        raise UserError(f"{key} ({target}): {str(error).splitlines()[0]}") from error


def locate(key, target):
    """What `_target_` names; UserError if it is not there or not trusted, and then it is not imported either."""
    patterns = cli.trusted(TRUSTED, cli.typed())
    if not any(fnmatch.fnmatchcase(target, pattern) for pattern in patterns):
        message = f"not among what may be built. Type trusted=[{target.split('.')[0]}] if it is your own."
        raise UserError(f"{key}._target_={target}: {message}")
    try:
        found = hydra.utils.get_object(target)
    except InstantiationException:
        raise UserError(f"{key}._target_={target}: not among what may be built, whatever is trusted.") from None
    except (ImportError, ValueError) as error:
        cause = error.__cause__ or error
        raise UserError(f"{key}._target_={target}: {str(cause).splitlines()[0]}.") from error
    if not callable(found):
        raise UserError(f"{key}._target_={target}: this is no class or function. Type {key}._target_={target}.NAME.")
    return found


def own_packages(typed):
    """The packages that what was typed makes trusted, beside those that always are."""
    packages = {pattern.split(".")[0] for pattern in cli.trusted([], typed)}
    return sorted(packages - {package.split(".")[0] for package in TRUSTED})


def arguments_of(key, target):
    """({name: whether it has no default}, whether there are **kwargs) of the constructor or function `target`."""
    parameters = inspect.signature(locate(key, target)).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def retarget(cfg, keep):
    """Drops a group's own keys, those in `keep` and typed ones excepted, from a node whose `_target_` was typed."""
    typed = {override.partition("=")[0].lstrip("+") for override in cli.typed()}
    for name in [name.removesuffix("._target_") for name in typed if name.endswith("._target_")]:
        node = OmegaConf.select(cfg, name)
        arguments, takes_more = arguments_of(name, node["_target_"])
        if takes_more and name == "trainer":
            continue
        with open_dict(cfg):
            for key in list(node):
                if not (key.startswith("_") or key in arguments or key in keep or f"{name}.{key}" in typed):
                    del node[key]


def check_fit(model, loss, data):
    """UserError where the loss is not for this data, or the model does not take its inputs or gives other outputs."""
    from torch import nn

    name = type(loss).__name__
    if isinstance(loss, (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss)) and data.kind == "classification":
        there = f"{data.name} has {data.num_classes} classes"
        raise UserError(f"loss={name} is for numbers, and {there}. Type loss=cross_entropy.")
    if isinstance(loss, nn.CrossEntropyLoss) and data.kind == "regression":
        there = f"{data.name} has numbers to predict"
        raise UserError(f"loss={name} is for classes, and {there}. Type loss=mse, l1 or huber.")
    outputs, targets = outputs_for(model, data)
    try:
        loss(outputs, targets)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"loss={name}: {str(error).splitlines()[0]}") from error


def outputs_for(model, data):
    """(outputs, targets) of two samples, on the CPU; UserError where the outputs are not of the data's shape.

    On a GPU, one class too many would be an assertion in a kernel, which ends the process.
    """
    import torch

    samples = [data.train[i] for i in range(min(2, len(data.train)))]
    inputs, targets = (torch.stack([torch.as_tensor(sample[i]) for sample in samples]) for i in (0, 1))
    inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
    name = type(model).__name__
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        what, reason = f"{inputs.dtype} of shape {tuple(data.in_shape)}", str(error).splitlines()[0]
        raise UserError(f"model={name} does not take inputs of {what}: {reason}") from error
    finally:
        model.train()
    shape = tuple(getattr(outputs, "shape", ()))[1:]
    if shape != (data.num_classes,):
        wanted = f"{data.name} needs ({data.num_classes},)"
        raise UserError(f"model={name} gives outputs of shape {shape} a sample, and {wanted}.")
    return outputs, targets


def has_usual_outputs(model, data):
    """Whether the usual metrics mean something for this model, also under a loss of one's own."""
    try:
        outputs_for(model, data)
    except UserError:
        return False
    return True
