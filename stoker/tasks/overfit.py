"""overfit=N: check whether the model can memorize N batches."""

from omegaconf import DictConfig, open_dict

from stoker.tasks.parts import building
from stoker.trainer import terminal
from stoker.trainer.errors import UserError


def overfit(cfg: DictConfig) -> None:
    """Print that the model has memorized `overfit` batches, or raise TrainingError."""
    from stoker.diagnostics.overfit import learn
    from stoker.trainer.overrides import is_usual

    with open_dict(cfg):
        cfg.dataset.augment = []
    with building(cfg) as parts:
        kind = type(parts.trainer)
        if not is_usual(kind, "train_step"):
            raise UserError(
                f"overfit={cfg.overfit}: {kind.__name__} overrides train_step, so its loss need "
                "not fall. Remove overfit, and type max_steps=100 for a short run."
            )
        with parts.threads(cfg):
            verdict = learn(parts.trainer, parts.loaders[0], cfg.overfit, cfg.max_steps)
        terminal.show(f"verdict  {verdict}")
