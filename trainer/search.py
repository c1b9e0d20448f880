"""What the searches have in common: which end is good, what is searched, and what became of a trial."""

import math
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback as HydraCallback
from omegaconf import OmegaConf

from trainer import rundir
from trainer.errors import UserError
from trainer.metrics import default_metrics

KNOWN_END = {
    f"val/{name}": metric.higher_is_better
    for kind in ("classification", "regression")
    for name, metric in default_metrics(kind).items()
} | {"val/loss": False, "train/loss": False}


class Sweepers(HydraCallback):
    """Hydra's callback that makes our sweeper known to it, before it is looked for."""

    def on_multirun_start(self, config, **_):
        if config.hydra.runtime.choices["hydra/sweeper"] == "ax":
            from trainer.ax_search import AxSearch as Search
        else:
            from trainer.optuna_search import OptunaSearch as Search
        Plugins.instance().register(Search)


def maximizes(cfg):
    """Whether the search looks for the highest value. It has to know before the first trial builds any metric."""
    for override in cfg.hydra.overrides.hydra:
        key = override.partition("=")[0].lstrip("+")
        if key in ("hydra.sweeper.direction", "hydra.sweeper.ax_config.experiment.minimize"):
            raise UserError(
                f"{override}: what is good follows from the monitored number. Type monitor_mode=max or min."
            )
    if cfg.monitor_mode != "auto":
        return cfg.monitor_mode == "max"
    if cfg.monitor == "auto":
        return True  # val/acc or val/r2; a trial where it is another one ends the search
    if cfg.monitor in KNOWN_END:
        return KNOWN_END[cfg.monitor]
    node = cfg.metrics.get(str(cfg.monitor).removeprefix("val/"))
    if node is not None:
        from trainer.build import locate

        higher = getattr(locate(f"metrics.{cfg.monitor}", node._target_), "higher_is_better", None)
        if isinstance(higher, bool):
            return higher
    raise UserError(
        f"monitor={cfg.monitor}: a search has to know whether high or low is good.\n"
        "Type monitor_mode=max or monitor_mode=min."
    )


def check_mode(maximize, name, mode):
    """UserError where the number that the trials monitor has its good end on the other side."""
    if mode != ("max" if maximize else "min"):
        side, other = ("lowest", "highest") if mode == "min" else ("highest", "lowest")
        raise UserError(
            f"monitor: the trials look for the {side} {name}, and the search for the {other} value.\n"
            f"Type monitor={name} monitor_mode={mode}."
        )


def search_space(cfg, params, typed):
    """The overrides to search over: those of the option's `params` that the config has a key for, then those typed."""
    names = {override.partition("=")[0] for override in typed}
    swept = {override.partition("=")[0] for override in typed if is_group(cfg, override)}
    kept, left = [], []
    for name, value in (params or {}).items():
        there = OmegaConf.select(cfg, name, throw_on_missing=False) is not None and name.split(".")[0] not in swept
        if name not in names:
            (kept if there else left).append(f"{name}={value}")
    if left:
        print(f"search   without {', '.join(item.partition('=')[0] for item in left)}: not every trial has such a key")
    return [*kept, *typed]


def is_group(cfg, override):
    """Whether this is several options of a group, which have keys of their own each."""
    name, _, value = override.partition("=")
    return name in cfg.hydra.runtime.choices and "," in value


def outcome(folder):
    """What became of a trial, by its result.json: ("failed", None), ("pruned", its best) or ("complete", its best).

    The best is {"name", "mode", "step", "value"}. None for a trial that has no result yet.
    """
    result = rundir.read_result(Path(folder) / "result.json")
    if result is None:
        return None
    best = result.get("best")
    ok = isinstance(best, dict) and isinstance(best.get("value"), (int, float)) and math.isfinite(best["value"])
    if not ok or "error" in result:
        return "failed", None
    return ("pruned" if str(result.get("stopped")).startswith("pruned") else "complete"), best
