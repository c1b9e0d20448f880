"""A config node -> the object that it describes: only what is trusted is built, and with arguments that exist."""

import contextlib
import fnmatch
import importlib.util
import inspect
import math
import pkgutil
import sys

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict

from stoker.command import cli
from stoker.trainer.errors import UserError, as_typed, did_you_mean

# What a `_target_` may name. One that is typed on the command line is trusted as it is; one in a file of your own
# wants trusted=[mypackage].
TRUSTED = ["stoker", "examples", "torch.nn", "torch.optim", "torchvision.models", "torchmetrics"]
TRUSTED += ["optuna.pruners"]

# What it has to be, beside that: defined in this module (or below it), and one of these functions or a subclass of one
# of these classes. A name alone says little: torch.nn.modules.module.torch.load begins with torch.nn, and
# stoker.runs.json_files.write_json writes files. torchmetrics has more, which fetches models of others: trusted=[torchmetrics].
KINDS = {
    "torch.nn": ["torch.nn.Module"],
    "torch.optim": ["torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"],
    "torchvision.models": ["torch.nn.Module"],  # and its functions that build one: is_builder
    "torchmetrics.aggregation": ["torchmetrics.Metric"],
    "torchmetrics.classification": ["torchmetrics.Metric"],
    "torchmetrics.regression": ["torchmetrics.Metric"],
    "optuna.pruners": ["optuna.pruners.BasePruner"],
    "stoker.trainer.trainer": ["stoker.Trainer"],
    "stoker.trainer.callbacks": ["stoker.trainer.callbacks.Callback"],
    "stoker.runs.loggers": ["stoker.trainer.callbacks.Callback"],
    "stoker.diagnostics.timing": ["stoker.trainer.callbacks.Callback"],
    "stoker.diagnostics.doctor": ["stoker.trainer.callbacks.Callback"],
    "stoker.trainer.metrics": ["stoker.trainer.metrics.Sums"],
    "stoker.trainer.schedules": ["constant", "linear", "cosine", "step", "onecycle"],
    "stoker.trainer.optimizers": ["decoupled_sgd"],
    "stoker.models": ["torch.nn.Module", "stoker.trainer.callbacks.Callback"],
    "stoker.data.datasets": [
        "digits",
        "mnist",
        "fashion_mnist",
        "kmnist",
        "cifar10",
        "cifar100",
        "synthetic",
    ],
    "stoker.data.images": ["image_folder"],
    "stoker.data.tables": ["csv"],
    "examples.own_data": ["spirals", "tones"],
    "examples.multilabel": ["chords", "stoker.trainer.metrics.Sums"],
    "examples": [
        "torch.nn.Module",
        "stoker.Trainer",
        "stoker.trainer.metrics.Sums",
        "stoker.trainer.callbacks.Callback",
    ],
}
# Of Hydra's own keys those that a node may have: the others change how Hydra builds, and what it allows.
KEYS = ("_target_", "_partial_", "_args_")
FACTORIES = ("optimizer", "scheduler", "dataset.augment")  # what the Trainer, or the loader, calls
# What each part of a run is. A class that makes anything else is not called: it could take any memory first.
GIVES = {
    "dataset": ["stoker.data.datasets.Data"],
    "model": ["torch.nn.Module"],
    "loss": ["torch.nn.Module"],
    "optimizer": ["torch.optim.Optimizer"],
    "scheduler": ["torch.optim.lr_scheduler.LRScheduler"],
    "metrics": ["torchmetrics.Metric", "stoker.trainer.metrics.Sums"],
    "callbacks": ["stoker.trainer.callbacks.Callback"],
    "trainer": ["stoker.Trainer"],
    "sweep": ["optuna.pruners.BasePruner"],
}
# And whose functions do so, as there is no telling of a function.
MAKERS = {
    "dataset": ("stoker.data.", "examples."),
    "model": "torchvision.models.",
    "optimizer": "stoker.trainer.optimizers.",
    "scheduler": "stoker.trainer.schedules.",
}


def build(key, node, **offered):
    """The object of a node. Of the `offered` arguments it gets those that its constructor has and the node has not."""
    node = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise UserError(
            f"{key}: this needs a _target_, the dotted name of what to build. Type {key}._target_=..."
        )
    target, part = node["_target_"], key if key in FACTORIES else key.partition(".")[0]
    check_node(key, node, offered)
    if part in GIVES and not is_own(target) and not promises(part, locate(key, target)):
        raise UserError(f"{key}._target_={target}: this gives no {GIVES[part][0]}.")
    if node.get("_partial_") and key not in FACTORIES:
        raise UserError(f"{key}._partial_=true: a run needs what {target} gives. Leave it out.")
    try:
        # As a partial, which is called here: Hydra would copy the objects that it is handed.
        factory = hydra.utils.instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        reason = (
            str(cause).splitlines()[0]
            if cause
            else "not among what may be built, whatever is trusted."
        )
        raise UserError(f"{key}._target_={target}: {reason}") from error
    if key in FACTORIES:
        return factory
    arguments, takes_more = arguments_of(key, target)
    # Of those that hand **kwargs on, a Trainer of one's own gets all, and torchvision's models the number of classes.
    handed_on = (
        {"trainer": list(offered), "model": ["num_classes"]}.get(key, []) if takes_more else []
    )
    passed = [name for name in offered if name in arguments or name in handed_on]
    passed = {name: offered[name] for name in passed if name not in node or key == "trainer"}
    there = {*passed, *node, *list(arguments)[: len(node.get("_args_") or ())]}
    if missing := [name for name, needed in arguments.items() if needed and name not in there]:
        raise UserError(
            f"{key}.{missing[0]}: {target} needs this argument. Type +{key}.{missing[0]}=..."
        )
    try:
        found = factory(**passed)
        if part in GIVES and not is_part(part, found):
            given = f"this gives a {type(found).__name__}, and not a {GIVES[part][0]}"
            raise UserError(f"{key}._target_={target}: {given}.")
        return found
    except UserError:
        raise
    except (
        ValueError,
        TypeError,
        RuntimeError,
        OverflowError,
    ) as error:  # how torch refuses a value
        # Not an error in code of the user's own, which wants its traceback; but one of an argument of its **kwargs.
        if is_own(target) and not isinstance(error, ValueError) and "argument" not in str(error):
            raise
        if target.startswith("stoker.models."):  # whose messages begin with the argument's name
            argument = str(error).partition("=")[0]
            raise UserError(f"{key}{'.' if argument in arguments else ': '}{error}") from error
        raise UserError(
            f"{key} ({target}): {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error


@contextlib.contextmanager
def trusting(packages):
    """Where there is no command line: `build` trusts what it does there, and the packages as by trusted=[...]."""
    typed = [f"trusted=[{','.join(packages)}]"] if packages else []
    token = cli.in_place_of_typed.set([*cli.in_place_of_typed.get(), *typed])
    try:
        with hydra.utils.execution_whitelist(cli.trusted(TRUSTED, cli.typed())):
            yield
    finally:
        cli.in_place_of_typed.reset(token)


def promises(part, found):
    """Whether calling a trusted class or function gives this part of a run, as far as is known before."""
    if isinstance(found, type):
        return issubclass(found, classes_of(part))
    return part in MAKERS and f"{getattr(found, '__module__', None)}.".startswith(MAKERS[part])


def is_part(part, built):
    """Whether an object is this part of a run. A metric or a loss of one's own needs no base class."""
    if part == "metrics":
        return all(callable(getattr(built, name, None)) for name in ("update", "compute", "reset"))
    return callable(built) if part == "loss" else isinstance(built, classes_of(part))


def classes_of(part):
    """The classes of GIVES. torchmetrics is not there everywhere, and is not imported for the question."""
    return tuple(
        hydra.utils.get_object(name) for name in GIVES[part] if name.split(".")[0] in sys.modules
    )


def check_nested(key, node):
    """UserError for a `_target_` inside a node of somebody's config, the user's own excepted.

    Of a model and of a loss the size is known before they are built; of arguments it is not.
    """
    for name, item in (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    ):
        target = str(item["_target_"]) if isinstance(item, dict) and "_target_" in item else None
        if target is not None and not is_own(target):
            raise UserError(
                f"{key}.{name}._target_={target}: only a model and a loss may have a _target_ inside.\n"
                f"Type trusted=[{target.split('.')[0]}] if you know what it does."
            )
        check_nested(f"{key}.{name}", item)


def check_node(key, node, offered=()):
    """UserError where this node, or one inside it, names what is not trusted, or an argument that is not there."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            check_node(f"{key}.{i}", item)
    if not isinstance(node, dict):
        return
    for name in node:
        if (
            isinstance(name, str)
            and name.startswith("_")
            and name.endswith("_")
            and name not in KEYS
        ):
            raise UserError(
                f"{key}.{name}: this is not for a config. It may have {', '.join(KEYS)}."
            )
    if "_target_" in node:
        target = node["_target_"]
        if not isinstance(target, str):
            raise UserError(
                f"{key}._target_={as_typed(target)}: give the dotted name of what to build."
            )
        if not isinstance(node.get("_partial_", False), bool):
            raise UserError(f"{key}._partial_={as_typed(node['_partial_'])}: give true or false.")
        if not isinstance(node.get("_args_", []), list):
            raise UserError(f"{key}._args_={as_typed(node['_args_'])}: give a list.")
        arguments, takes_more = arguments_of(key, target)
        unknown = [name for name in node if name not in KEYS and name not in arguments]
        if unknown and not takes_more:
            there = [name for name in arguments if name not in offered]
            hint = did_you_mean(unknown[0], there)
            raise UserError(
                f"{key}.{unknown[0]}: {target} has no such argument.{hint}\nIt has {', '.join(there)}."
            )
    for name, item in node.items():
        check_node(f"{key}.{name}", item)


def is_own(target):
    """Whether the command line makes this target trusted: by its name, or by trusted=[...]."""
    return any(fnmatch.fnmatchcase(target, pattern) for pattern in cli.trusted([], cli.typed()))


def locate(key, target):
    """What `_target_` names; UserError if it is not there or not trusted, and then it is not imported either."""
    refused = f"{key}._target_={target}: not among what may be built."
    top = target.split(".")[0]
    if not is_own(target) and not target.startswith(tuple(f"{package}." for package in TRUSTED)):
        package = ".".join(target.split(".")[:2])
        near = did_you_mean(package, [package for package in TRUSTED if "." in package])
        raise UserError(f"{refused}{near}\nType trusted=[{top}] if it is your own.")
    try:
        found = hydra.utils.get_object(target)
    except InstantiationException:
        raise UserError(f"{refused[:-1]}, whatever is trusted.") from None
    except (ImportError, ValueError, RecursionError) as error:
        reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")
        raise UserError(f"{key}._target_={target}: {reason}.{nearest(target)}") from error
    if not is_own(target) and not is_of_kind(found):
        raise UserError(f"{refused}\nType trusted=[{top}] if you know what it does.")
    if not callable(found):
        raise UserError(
            f"{key}._target_={target}: this is no class or function. Type {key}._target_={target}.NAME."
        )
    return found


def is_of_kind(found):
    """Whether an object of a trusted package is what KINDS has there, or a module, of which the user wants a part."""
    if inspect.ismodule(found):
        return found.__name__.startswith(tuple(KINDS))
    where = getattr(found, "__module__", None) or ""
    kinds = [kinds for place, kinds in KINDS.items() if f"{where}.".startswith(f"{place}.")]
    for kind in kinds[0] if kinds else ():
        if "." not in kind and getattr(sys.modules[where], kind, None) is found:
            return True
        if (
            "." in kind
            and isinstance(found, type)
            and issubclass(found, hydra.utils.get_object(kind))
        ):
            return True
    return where.startswith("torchvision.models.") and is_builder(found)


def is_builder(found):
    """Whether this is one of torchvision's functions such as resnet18, and none that takes a name or a path."""
    return inspect.isfunction(found) and list(inspect.signature(found).parameters)[:2] == [
        "weights",
        "progress",
    ]


def nearest(target):
    """' Did you mean X?' for the name that is nearest to a target that is not there; or how it is installed."""
    parts = target.split(".")
    if importlib.util.find_spec(parts[0]) is None and parts[0] == "torchmetrics":
        return "\nType pip install -e '.[metrics]'."
    known = next((i for i in range(len(parts) - 1, 0, -1) if ".".join(parts[:i]) in sys.modules), 0)
    module = sys.modules.get(".".join(parts[:known]))
    names = dir(module) if module else [package.split(".")[0] for package in TRUSTED]
    names = [name for name in names if not name.startswith("_")]
    # Of what is beside train.py the names alone: nothing of it is imported to be proposed.
    names += [
        found.name
        for found in pkgutil.iter_modules(
            getattr(module, "__path__", [] if module else sys.path[:1])
        )
    ]

    def whole(name):  # as far as it is there
        found = ".".join([*parts[:known], name, *parts[known + 1 :]])
        return found if is_there(found) else ".".join([*parts[:known], name])

    return did_you_mean(parts[known], names, whole)


def is_there(target):
    """Whether there is something of this name in a trusted package."""
    if not target.startswith(tuple(f"{package}." for package in TRUSTED)):
        return False
    try:
        hydra.utils.get_object(target)
    except (ImportError, ValueError, RecursionError, InstantiationException):
        return False
    return True


def own_packages(typed):
    """The packages that what was typed makes trusted, beside those that always are."""
    packages = {pattern.split(".")[0] for pattern in cli.trusted([], typed)}
    return sorted(packages - {package.split(".")[0] for package in TRUSTED})


def arguments_of(key, target):
    """({name: whether it has no default}, whether there are **kwargs) of the constructor or function `target`."""
    try:
        parameters = inspect.signature(locate(key, target)).parameters.values()
    except (ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        return {}, True  # some of C have none
    named = {
        p.name: p.default is p.empty
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def without_downloads(key, node):
    """Has torchvision's builders in a node fetch no weights: a checkpoint's come next."""
    for name, item in enumerate(node) if isinstance(node, list) else list(node.items()):
        if isinstance(item, (dict, list)):
            without_downloads(f"{key}.{name}", item)
    target = node.get("_target_") if isinstance(node, dict) else None
    if isinstance(target, str) and target.startswith("torchvision."):
        for name in [name for name in node if name.startswith("pretrained")]:
            del node[name]
        node |= {name: None for name in arguments_of(key, target)[0] if name.startswith("weights")}


def check_size(key, node, weights=None, **offered):
    """UserError where a node's module is not that of `weights` (a state dict), or, without, larger than losses are.

    Without, one's own may have any size.

    It is built on the meta device, where a tensor takes no memory, and no further than there is reason for. What cannot
    be built there is not judged.
    """
    import torch
    from torch.nn.modules import module as modules

    target = node.get("_target_") if isinstance(node, (dict, DictConfig)) else None
    if weights is None and (not isinstance(target, str) or is_own(target)):
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in (weights or {}).items()}
    left = 4 * sum(map(math.prod, wanted.values())) + 2**20  # numbers; tied ones are counted twice
    modules_left = 100_000
    place = f"{key}._target_={target}"

    def count(module, name, part):
        nonlocal left, modules_left
        left -= (
            part.numel()
            if isinstance(part, torch.Tensor) and not torch.nn.parameter.is_lazy(part)
            else 0
        )
        modules_left -= isinstance(part, torch.nn.Module)
        if min(left, modules_left) < 0:
            raise MemoryError

    kinds = ("parameter", "buffer", "module")
    hooks = [getattr(modules, f"register_module_{kind}_registration_hook")(count) for kind in kinds]
    try:
        with torch.device("meta"):
            built = build(key, node, **offered)
        for name, state in getattr(
            built, "_defaults", {}
        ).items():  # what torchmetrics sum in is no buffer
            count(built, name, state)
        shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    except Exception as error:
        if min(left, modules_left) >= 0:
            return
        size = (
            f"{sum(map(math.prod, wanted.values())):,} of the checkpoint"
            if weights
            else "a loss or a metric has"
        )
        raise UserError(
            f"{place}: with its arguments it has far more numbers than {size}."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    for name in sorted(shapes.keys() | wanted) if weights is not None else ():
        if shapes.get(name) != wanted.get(name):
            here, there = shapes.get(name, "not there"), wanted.get(name, "not there")
            raise UserError(
                f"{place}: the checkpoint does not fit. {name} is {here} here, {there} in the file."
            )


def retarget(cfg, keep):
    """Drops a group's own keys, those in `keep` and typed ones excepted, from a node whose `_target_` was typed."""
    typed = {override.partition("=")[0].lstrip("+") for override in cli.typed()}
    for name in [name.removesuffix("._target_") for name in typed if name.endswith("._target_")]:
        node = OmegaConf.select(cfg, name)
        if not isinstance(node, DictConfig) or not isinstance(node.get("_target_"), str):
            raise UserError(f"{name}._target_: this takes the dotted name of what to build.")
        arguments, takes_more = arguments_of(name, node["_target_"])
        if takes_more and name == "trainer":
            continue
        with open_dict(cfg):
            for key in list(node):
                if not (
                    key.startswith("_")
                    or key in arguments
                    or key in keep
                    or f"{name}.{key}" in typed
                ):
                    del node[key]


def check_fit(model, loss, data):
    """UserError where the loss is not for this data, or the model does not take its inputs or gives other outputs."""
    from torch import nn

    name = type(loss).__name__
    if (
        isinstance(loss, (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss))
        and data.kind == "classification"
    ):
        there = f"{data.name} has {data.num_classes} classes"
        whole = data.table is not None and all(
            name.removeprefix("-").isdigit() for name in data.classes
        )
        other = ", or dataset.kind=regression" * whole  # of a column of few whole numbers
        raise UserError(f"loss={name} is for numbers, and {there}. Type loss=cross_entropy{other}.")
    if isinstance(loss, nn.CrossEntropyLoss) and data.kind == "regression":
        there = f"{data.name} has numbers to predict"
        other = ".\nWhere they are several labels a sample, 0 or 1, type loss._target_=torch.nn.BCEWithLogitsLoss."
        if data.table is not None:
            other = ", or dataset.kind=classification."
        raise UserError(
            f"loss={name} is for classes, and {there}. Type loss=mse, l1 or huber{other}"
        )
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

    inputs, targets = data.train[list(range(min(2, len(data.train))))]
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


def is_on(node):
    """Whether a callback is: it is off by a null in place of it, or among its settings."""
    return node is not None and not (hasattr(node, "values") and None in node.values())


def has_usual_outputs(model, loss, data):
    """Whether the usual metrics mean something for what this model gives, also under a loss of one's own."""
    from torch import nn

    # They train logits, of several labels a sample, or logarithms: no numbers like the targets.
    others = (
        nn.BCEWithLogitsLoss,
        nn.MultiLabelSoftMarginLoss,
        nn.SoftMarginLoss,
        nn.PoissonNLLLoss,
        nn.KLDivLoss,
    )
    if data.kind == "regression" and isinstance(loss, (*others, nn.BCELoss)):
        return False
    try:
        outputs_for(model, data)
    except UserError:
        return False
    return True
