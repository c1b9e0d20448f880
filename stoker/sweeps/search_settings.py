"""The settings of a search: how many trials run at once, and the search space."""

from omegaconf import DictConfig, OmegaConf

from stoker.command.new_targets import takes
from stoker.sweeps import launchers


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
