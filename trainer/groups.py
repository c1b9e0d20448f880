"""Parameter groups: rules by parameter name, and no weight decay for vectors and scalars."""

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from stoker.trainer.errors import UserError, check_number, did_you_mean

# Matches a name up to its first number: encoder.layers.3 in encoder.layers.3.mlp.weight.
BLOCK = re.compile(r"(.*?\.)?\d+(?=\.)")
RULE = ("match", "lr_decay", "scheduler")  # keys of a rule that are not passed to the optimizer
REST = "rest"  # the group name of parameters that no rule matches

Groups = list[dict[str, Any]]
Rule = Mapping[str, Any]
Names = dict[torch.Tensor, list[str]]  # parameter -> its names, in the order of the model


def parameter_groups(module: torch.nn.Module, rules: Sequence[Rule] = ()) -> Groups:
    """Return the parameter groups. Vectors and scalars, such as biases, have no weight decay.

    A parameter belongs to the first rule that matches one of its names. The groups of a rule are
    named after its pattern, and follow the groups of unmatched parameters. Frozen parameters are
    included: an optimizer skips them while they have no gradient, and trains them once thawed.

    Raises:
        UserError: A rule matches no parameter, or only parameters that earlier rules match.
    """
    names = named(module)
    rest = list(names)
    groups: Groups = []
    for rule in rules:
        matched = matching(names, rule["match"], "groups")
        parameters = [p for p in rest if p in matched]
        if not parameters:
            raise UserError(
                f"groups: earlier rules already cover everything that match={rule['match']} "
                "matches. Put this rule first, because only the first match applies to a parameter."
            )
        rest = [p for p in rest if p not in matched]
        groups += by_layer(names, parameters, rule)
    options = {"name": REST} if rules else {}
    return by_decay(rest, options) + groups


def named(module: torch.nn.Module) -> Names:
    """Return {parameter: names} for trainable parameters; a shared one has several names."""
    names: Names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() or parameter.is_complex():
            names.setdefault(parameter, []).append(name)
    return names


def matching(names: Names, pattern: str, key: str) -> set[torch.Tensor]:
    """Return the parameters that match `pattern` (fnmatch) by name; raise UserError if none do."""
    matched = {p for p in names if any(fnmatchcase(name, pattern) for name in names[p])}
    if matched:
        return matched
    every_name = [name for several in names.values() for name in several]
    raise UserError(
        f"{key}: no parameter of the model matches {pattern}.{did_you_mean(pattern, every_name)}\n"
        f"Use names as in model.named_parameters(), such as {every_name[0]}."
    )


def by_layer(names: Names, parameters: list[torch.Tensor], rule: Rule) -> Groups:
    """Return the groups of one rule, with a group per layer if it has an `lr_decay`.

    The last layer has the rule's learning rate; each earlier layer has `lr_decay` times the rate of
    the next one (BEiT, Bao 2021, arXiv 2106.08254, and timm). Each numbered block is a layer. All
    parameters before the first block form a layer too, and so do all after the last block.
    """
    options = {key: value for key, value in rule.items() if key not in RULE}
    if "lr_decay" not in rule:
        return by_decay(parameters, options | {"name": rule["match"]})

    def block(parameter: torch.Tensor) -> str:
        match = BLOCK.match(names[parameter][0])
        return match[0] if match else ""

    layers = [list(layer) for _, layer in itertools.groupby(parameters, block)]
    groups: Groups = []
    for depth, layer in enumerate(layers):
        scale = rule["lr_decay"] ** (len(layers) - 1 - depth)
        settings = {**options, "name": f"{rule['match']} {depth}", "lr_scale": scale}
        groups += by_decay(layer, settings)
    return groups


def by_decay(parameters: list[torch.Tensor], options: Rule) -> Groups:
    """Return a group with weight decay and one without, or one group if the rule sets the decay."""
    group = {**options, "params": parameters}
    if "weight_decay" in options:
        return [group]
    others, decayed = divided(group, lambda parameter: parameter.ndim <= 1)
    return decayed + [{**other, "weight_decay": 0.0} for other in others]


def divided(
    group: dict[str, Any], belongs: Callable[[torch.Tensor], bool]
) -> tuple[Groups, Groups]:
    """Split a group by `belongs(parameter)`; return ([group that belongs], [group of the rest]).

    A list is empty if its group would have no parameters.
    """
    both: tuple[Groups, Groups] = ([], [])
    for parameter in group["params"]:
        groups = both[0] if belongs(parameter) else both[1]
        if not groups:
            groups.append({**group, "params": []})
        groups[0]["params"].append(parameter)
    return both


def rule_of(group: Mapping[str, Any]) -> str:
    """Return the pattern of the rule that a group comes from, without the number of the layer."""
    return str(group.get("name", REST)).partition(" ")[0]


def check_options(groups: Groups, known: Collection[str]) -> None:
    """Raise UserError if a rule sets an option that the optimizer does not have."""
    for group in groups:
        rule = rule_of(group)
        if rule == REST:
            continue
        for key, value in group.items():
            # A weight decay of 0 is fine even if the optimizer has no such option.
            if key not in ("params", "name", *known) and value:
                raise UserError(
                    f"groups: the rule {rule} sets {key}, but the optimizer has no such option."
                    f"{did_you_mean(key, [*known, *RULE])}"
                )
            if key in ("lr", "weight_decay"):
                check_number(f"groups: {key} of {rule}", value, least=0)


def scale_rates(groups: Groups, usual: Any) -> None:
    """Multiply the learning rate of each layer by its `lr_scale`.

    `usual` is the optimizer's rate, for rules that do not set one.
    """
    for group in groups:
        if "lr_scale" in group:
            if group.get("lr", usual) is None:
                raise UserError(
                    f"groups: lr_decay of {rule_of(group)} needs a learning rate. Add an lr to "
                    "the rule, because the optimizer has none."
                )
            group["lr"] = group.get("lr", usual) * group.pop("lr_scale")


def labels(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a name that loggers accept for each group: backbone for backbone.*, rest for *.

    The two groups of a rule have one name. If another rule has it, the number of the group follows.
    """
    result = []
    known: dict[Any, str] = {}  # name or number of the group -> label
    for i, group in enumerate(groups):
        name = group.get("name", i)
        if name not in known:
            label = re.sub(r"\W+", "_", str(name)).strip("_") or REST
            known[name] = f"{label}_{i}" if label in known.values() else label
        result.append(known[name])
    return result
