"""overfit=N: check whether the model can memorize N batches."""

from omegaconf import DictConfig, open_dict

from stoker.tasks.parts import building
from stoker.trainer import terminal


def overfit(cfg: DictConfig) -> None:
    """Print that the model has memorized `overfit` batches, or raise TrainingError."""
    from stoker.diagnostics.overfit import learn

    with open_dict(cfg):
        cfg.dataset.augment = []
    with building(cfg) as parts:
        with parts.threads(cfg):
            verdict = learn(parts.trainer, parts.loaders[0], cfg.overfit, cfg.max_steps)
        terminal.show(f"verdict  {verdict}")
