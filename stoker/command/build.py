"""Build the object that a config node describes, if it is trusted and its arguments exist."""

import inspect
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig

from stoker.command.contact import is_lost
from stoker.command.dotted import plain
from stoker.command.trust import (
    PART_CLASSES,
    classes_of,
    is_trusted_by_user,
    locate,
    part_of,
    trusting_setting,
)
from stoker.trainer.errors import (
    UserError,
    as_typed,
    cause,
    check_number,
    did_you_mean,
    first_line,
    kind_of,
    with_article,
)

if TYPE_CHECKING:
    from stoker.data.record import Data

# The special Hydra keys that a node may contain. Hydra's other special keys change how it builds
# objects, or what it allows.
KEYS = ("_target_", "_partial_", "_args_")
FACTORIES = ("optimizer", "scheduler", "dataset.augment")  # the Trainer or the loader calls them
# How error messages describe the parts that need no base class.
WITHOUT_BASE_CLASS = {
    "dataset": 'a stoker.data.datasets.Data, or {"train": ..., "val": ..., "test": ...}',
    "loss": "a function of (outputs, targets)",
    "metrics": "an object with update, compute and reset methods",
}
# Targets inside dataset.augment that need no trust (trust.py allows only subclasses of
# v2.Transform). They are safe, because their constructors store plain values and call nothing.
TRANSFORMS = "torchvision.transforms.v2."
REQUIRED = inspect.Parameter.empty
# What torch and torchvision raise for a bad value.
REFUSALS = (ValueError, TypeError, RuntimeError, OverflowError, LookupError)


def build(key: str, node: DictConfig | dict[str, Any], **offered: Any) -> Any:
    """Build the object that a node describes.

    The target also gets each `offered` argument that it accepts and that the node does not set.

    Raises:
        UserError: the target does not exist, is not trusted, or builds a different part of a run.
    """
    if isinstance(node, DictConfig):
        node = plain(node, resolve=True)
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise UserError(
            f"{key}: this needs a _target_, the dotted name of a class or function. Type "
            f"+{key}._target_=..."
        )
    target = node["_target_"]
    check_node(key, node, offered)
    is_class = isinstance(locate(key, target), type)
    if node.get("_partial_") and key not in FACTORIES:
        raise UserError(
            f"{key}._partial_=true: a run needs the object that {target} returns, not a partial. "
            "Remove this key."
        )
    try:
        # Build a partial and call it below, because Hydra itself would copy the arguments.
        factory = hydra.utils.instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        reason = "this is not a class or function that a config may call."
        if error.__cause__ is not None:
            reason = first_line(error.__cause__)
        raise UserError(f"{key}._target_={target}: {reason}") from error
    passed = arguments_to_pass(key, node, offered)
    names, _ = arguments_of(key, target)
    given = {*node, *passed}
    missing = [name for name in names if names[name] is REQUIRED and name not in given]
    # a function of (outputs, targets)
    is_loss = key == "loss" and not is_class and len(missing) == 2
    if is_loss or (key in FACTORIES and not (key == "dataset.augment" and is_class)):
        return factory
    if target.startswith("torch.nn."):
        passed.update(weights_in(key, node))
    try:
        built = factory(**passed)
    except REFUSALS as error:
        # A data set may wait for the first process.
        if isinstance(error, UserError) or is_lost(error):
            raise
        # If an argument is missing, no line of the target has run.
        has_run = is_trusted_by_user(target) and not missing
        reason = cause(error) if has_run else first_line(error)
        raise UserError(f"{key} ({target}): {reason}") from error
    part = part_of(key)
    if not is_part(part, built):
        wanted = WITHOUT_BASE_CLASS.get(part, with_article(PART_CLASSES[part][0]))
        raise UserError(f"{key}._target_={target}: this returns {kind_of(built)}, not {wanted}.")
    return built


def build_dataset(node: dict[str, Any], **offered: Any) -> "Data":
    """Build the data set that a node describes; a mapping {split: data set} becomes a Data."""
    built: Data | Mapping[str, Any] = build("dataset", node, **offered)
    if isinstance(built, Mapping):
        from stoker.data.samples import data_of

        return data_of(node["_target_"].rpartition(".")[2], built)
    return built


def weights_in(key: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class weights of a torch loss as tensors; in a config, they are lists."""
    import torch

    weights = {}
    for name in ("weight", "pos_weight"):
        value = node.get(name)
        if isinstance(value, list):
            numbers = [check_number(f"{key}.{name}", number, least=0) for number in value]
            weights[name] = torch.tensor(numbers, dtype=torch.get_default_dtype())
        elif value is not None:
            raise UserError(
                f"{key}.{name}={as_typed(value)}: expected a list with one number per class."
            )
    return weights


def arguments_to_pass(
    key: str, node: Mapping[str, Any], offered: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the offered arguments that the target accepts."""
    target = node["_target_"]
    names, takes_more = arguments_of(key, target)
    accepted = set(names)
    # With **kwargs, the user's own Trainer accepts every argument, and a torchvision model accepts
    # num_classes.
    if takes_more and key == "trainer":
        accepted.update(offered)
    if takes_more and target.startswith("torchvision.models."):
        accepted.add("num_classes")
    if key != "trainer":
        accepted -= node.keys()
    return {name: value for name, value in offered.items() if name in accepted}


def is_part(part: str, built: Any) -> bool:
    """Return whether an object can serve as this part of a run.

    A metric or loss needs no base class, and a data set may be a mapping of splits.
    """
    if part == "dataset" and isinstance(built, Mapping):
        return True
    if part == "metrics":
        return all(callable(getattr(built, name, None)) for name in ("update", "compute", "reset"))
    is_function = part in ("loss", "dataset.augment")
    return callable(built) if is_function else isinstance(built, classes_of(part))


def mappings(key: str, node: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield (dotted key, mapping) for a node and, after it, for all mappings inside it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        yield key, node
        items = list(node.items())
    elif isinstance(node, list):
        items = enumerate(node)
    for name, item in items:
        yield from mappings(f"{key}.{name}", item)


def check_nested(key: str, node: Any) -> None:
    """Raise UserError for a nested `_target_` that the user does not trust.

    Only a model or a loss needs nested targets. In other parts, they could escape the checks of
    the outer node: a callback inside a callback could write anywhere.
    """
    for place, item in mappings(key, node):
        if place == key or "_target_" not in item:
            continue
        target = str(item["_target_"])
        if target.startswith(TRANSFORMS) and place.startswith("dataset.augment."):
            locate(place, target)
        elif not is_trusted_by_user(target):
            raise UserError(
                f"{place}._target_={target}: only a model or a loss may contain another _target_.\n"
                f"If you trust this target, type {trusting_setting(target)}."
            )


def check_node(key: str, node: Any, offered: Collection[str] = ()) -> None:
    """Raise UserError if a node or a nested node has an untrusted target or unknown arguments."""
    for place, item in mappings(key, node):
        for name in item:
            if re.fullmatch(r"_.*_", str(name)) and name not in KEYS:
                raise UserError(
                    f"{place}.{name}: a config cannot set this special key. The allowed keys "
                    f"are {', '.join(KEYS)}."
                )
        if isinstance(item.get("_target_"), str):
            check_target(place, item, offered if item is node else ())


def check_target(key: str, node: Mapping[str, Any], offered: Collection[str]) -> None:
    """Raise UserError unless Hydra's keys have the right types and the other keys are arguments."""
    target = node["_target_"]
    if not isinstance(node.get("_args_", []), list):
        raise UserError(f"{key}._args_={as_typed(node['_args_'])}: expected a list.")
    names, takes_more = arguments_of(key, target)
    unknown = [name for name in node if name not in KEYS and name not in names]
    if unknown and not takes_more:
        known = [name for name in names if name not in offered]
        listed = f"\nIts arguments are: {', '.join(known)}." if known else ""
        hint = did_you_mean(unknown[0], known)
        raise UserError(f"{key}.{unknown[0]}: {target} has no such argument.{hint}{listed}")


def arguments_of(key: str, target: str) -> tuple[dict[str, Any], bool]:
    """Return ({argument: default or REQUIRED}, whether the callable takes **kwargs)."""
    located = locate(key, target)
    try:
        parameters = list(inspect.signature(located).parameters.values())
    except (ValueError, TypeError):  # some C callables have no signature
        return {}, True
    names = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return names, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def without_downloads(key: str, node: Any) -> None:
    """Keep torchvision builders from downloading weights, since the checkpoint has the weights."""
    for place, item in mappings(key, node):
        target = str(item.get("_target_"))
        if target.startswith("torchvision."):
            for name in [name for name in item if name.startswith("pretrained")]:
                del item[name]
            for name in arguments_of(place, target)[0]:
                if name.startswith("weights"):
                    item[name] = None


def check_shapes(node: Any, weights: Mapping[str, Any], **offered: Any) -> None:
    """Raise UserError if the model that a node describes does not have the shapes of `weights`.

    The model is built on the meta device, where tensors take no memory. A model that cannot be
    built there is accepted.
    """
    import torch

    try:
        with torch.device("meta"), warnings.catch_warnings():
            # torch warns about a constructor that loads weights into a module on the meta device
            warnings.simplefilter("ignore")
            state = build("model", node, **offered).state_dict()
    except Exception:
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(shapes.keys() | wanted):
        if shapes.get(name) != wanted.get(name):
            raise UserError(
                f"model._target_={node['_target_']}: the checkpoint does not fit this model.\n"
                f"Shape of {name}: {shapes.get(name, 'missing')} in the model, "
                f"{wanted.get(name, 'missing')} in the checkpoint."
            )


def is_on(node: Any) -> bool:
    """Return whether a callback is on. If its node or one of its settings is null, it is off."""
    if node is None:
        return False
    return not (isinstance(node, (dict, DictConfig)) and None in node.values())
