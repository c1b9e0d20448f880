"""Reject typed settings that cannot take effect in this run."""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from stoker.command import arguments
from stoker.command.build import arguments_of
from stoker.command.new_targets import arguments_given
from stoker.command.settings import LOADER_KEYS
from stoker.trainer import launch
from stoker.trainer.errors import UserError
from stoker.trainer.number_format import counted

if TYPE_CHECKING:
    from stoker.tasks.parts import Parts


# {key: the key that overrides it}
DECIDED_BY = {
    "limit_train": "steps_per_epoch",
    "dataset.val_fraction": "dataset.folds",
}


def check_unused(cfg: DictConfig, parts: "Parts") -> None:
    """Raise UserError for the first typed setting that would change nothing."""
    typed = arguments.typed_keys()
    for key, reason in without_effect(cfg, parts):
        value = OmegaConf.select(cfg, key)
        if key in typed and value is not None:
            raise UserError(f"{key}={value}: {reason}")
    check_own_function(cfg)
    warn_of_own_loss(type(parts.trainer))


def check_own_function(cfg: DictConfig) -> None:
    """Raise UserError for a loader setting that is also an argument of your own data function.

    The function would not get it. Only settings that you typed or that a file sets for this
    function count, since other settings are just the loader's defaults.
    """
    target = cfg.dataset._target_
    for name in arguments_of("dataset", target)[0]:
        key = f"dataset.{name}"
        if name in LOADER_KEYS and name in arguments_given("dataset", target):
            raise UserError(
                f"{key}={OmegaConf.select(cfg, key)}: this key configures the loader and is not "
                f"passed to {target}, which has an argument of the same name. Rename the argument."
            )


def warn_of_own_loss(kind: type) -> None:
    """Warn about a typed loss that your own compute_loss ignores, because its code never uses it.

    This is not an error, because the code that uses the loss may be in a different module.
    """
    from stoker.trainer.overrides import is_usual, reads_any

    # loss.ignore_index also affects the metrics.
    given = [one for one in arguments.typed() if re.match(r"\+*loss(=|\.(?!ignore_index=))", one)]
    is_used = is_usual(kind, "compute_loss") or reads_any(kind, "loss", "compute_loss")
    if given and not is_used:
        launch.warn(
            f"{kind.__name__}.compute_loss seems to ignore {', '.join(given)}: the class does not "
            "use self.loss.\nUse self.loss in your compute_loss, or remove the setting."
        )


def without_effect(cfg: DictConfig, parts: "Parts") -> Iterator[tuple[str, str]]:
    """Yield the keys that would change nothing in this run, with the reason and what to type."""
    from stoker.trainer.groups import rule_of

    yield from beyond_the_end(cfg, parts)
    if parts.loaders[1] is None:
        has_fraction = "val_fraction" in cfg.dataset
        advice = "type dataset.val_fraction=0.1" if has_fraction else "add a val split to the data"
        reason = f"there is no validation split to evaluate. Remove eval_every, or {advice}."
        yield "eval_every", reason
    own = {rule["match"] for rule in cfg.groups if "lr" in rule}
    if own and all(rule_of(group) in own for group in parts.trainer.optimizer.param_groups):
        reason = "every parameter gets its learning rate from a rule in groups. Remove this key."
        yield "optimizer.lr", reason
    yield from ignored_by_own_loaders(parts)
    for key, other in DECIDED_BY.items():
        deciding = OmegaConf.select(cfg, other)
        if deciding:
            yield key, f"{other}={deciding} overrides this setting. Remove one of the two."


def ignored_by_own_loaders(parts: "Parts") -> Iterator[tuple[str, str]]:
    """Yield the settings that the user's own loaders ignore."""
    from stoker.data.samples import has_samples, is_stream

    if parts.data.kind != "other":
        return
    keys = {"train": ("batch_size", "drop_last"), "val": ("eval_batch_size",)}
    for part, for_part in keys.items():
        given = parts.data.parts().get(part)
        if given is None or has_samples(given) or is_stream(given):
            continue
        reason = (
            f"the {part} split is your own {type(given).__name__}, which ignores this key. "
            "Remove this key, or return a data set instead of a loader."
        )
        for key in (*for_part, "dataset.workers", "dataset.timeout"):
            yield key, reason


def beyond_the_end(cfg: DictConfig, parts: "Parts") -> Iterator[tuple[str, str]]:
    """Yield the settings that would only take effect after the end of the run."""
    from stoker.trainer.loading import epoch_length
    from stoker.trainer.settings import check_thaw_at

    per_epoch = epoch_length(parts.loaders[0], cfg.max_steps)
    steps = cfg.max_steps or cfg.epochs * per_epoch
    every = per_epoch
    if parts.loaders[1] is not None and cfg.eval_every is not None:
        every = cfg.eval_every
    evaluations = math.ceil(steps / every)
    in_steps = counted(steps, "step")
    beyond = {  # key -> the largest value that has an effect, and the length of the run
        # The first evaluation is the best so far, so patience only counts the others.
        "patience": (evaluations - 1, counted(evaluations, "evaluation")),
        "eval_every": (steps, in_steps),
        "checkpoint.every": (steps, in_steps),
        "callbacks.lookahead.every": (steps, in_steps),
        "callbacks.freeze.thaw_at": (steps - 1, in_steps),
    }
    if steps > per_epoch:  # then eval_every replaces the evaluation after each epoch
        del beyond["eval_every"]
    for key, (most, length) in beyond.items():
        value = OmegaConf.select(cfg, key)
        count = check_thaw_at(value) if key.endswith("thaw_at") else value
        if most < (count or 0) < math.inf:
            reason = f"this run has only {length}, so this setting would have no effect."
            yield key, f"{reason} Lower the value, train longer, or remove the key."
