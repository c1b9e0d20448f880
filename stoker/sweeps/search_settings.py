"""The settings of a search: the number of trials, the direction and the search space."""

from omegaconf import DictConfig, OmegaConf

from stoker.command import settings
from stoker.command.new_targets import takes
from stoker.sweeps import launchers
from stoker.trainer.errors import UserError

# The data sets whose first metric is perplexity; others have val/acc, val/miou or val/r2.
PREDICTS_TOKENS = ("stoker.data.text.text",)


def at_once(cfg: DictConfig) -> int:
    """Return how many trials to propose at once: as many as the launcher runs in parallel."""
    if cfg.hydra.runtime.choices["hydra/launcher"] == launchers.SLURM:
        return int(cfg.hydra.launcher.array_parallelism)
    return launchers.jobs_at_once(cfg.sweep.at_once, cfg.device)


def space_of(cfg: DictConfig) -> list[str]:
    """Return the ranges of `sweep.space`, except those of arguments that the optimizer lacks."""
    kept = []
    for key, values in cfg.sweep.space.items():
        group, _, name = key.partition(".")
        target = OmegaConf.select(cfg, f"{group}._target_")
        if group != "optimizer" or takes(group, target, name):
            kept.append(f"{key}={values}")
    return kept


def maximizes(cfg: DictConfig) -> bool:
    """Return whether the search maximizes; this is decided before any trial builds its metrics."""
    if cfg.monitor_mode != "auto":
        return settings.check("monitor_mode", cfg.monitor_mode) == "max"
    if cfg.monitor == "auto":  # a guess; if it is wrong, check_mode ends the search
        return cfg.dataset._target_ not in PREDICTS_TOKENS
    if cfg.monitor.endswith("/loss"):  # val/loss, or the loss on a named validation set
        return False
    raise UserError(
        f"monitor={cfg.monitor}: a search needs to know whether higher or lower is better.\n"
        "Type monitor_mode=max or monitor_mode=min."
    )


def check_mode(maximize: bool, name: str, mode: str | None) -> None:
    """Raise UserError if the trials and the search optimize in opposite directions."""
    if mode != ("max" if maximize else "min"):
        raise UserError(
            f"monitor: the trials and the search disagree on whether a higher {name} is better.\n"
            f"Type monitor={name} monitor_mode={mode}, and a different hydra.sweep.dir."
        )
