"""task=plan: estimate the cost of a run from a few real steps."""

import math
import time

from omegaconf import DictConfig

from stoker import project
from stoker.command import shell
from stoker.tasks.current_job import names_of, started_at, typed_for_run
from stoker.tasks.parts import building
from stoker.tasks.unused_settings import check_unused
from stoker.trainer import terminal


def plan(cfg: DictConfig) -> None:
    """Print what this run would cost, without writing anything."""
    began = started_at()
    from stoker.diagnostics.plan import lines, look
    from stoker.trainer.loading import epoch_length

    with building(cfg) as parts:
        check_unused(cfg, parts)
        startup = time.perf_counter() - began
        per_epoch = epoch_length(parts.loaders[0], cfg.max_steps)
        # Steps between two evaluations, and between two checkpoints for each reason to save one.
        evaluation = math.inf if parts.loaders[1] is None else cfg.eval_every or per_epoch
        save = cfg.checkpoint.every or math.inf
        save_epochs = (cfg.checkpoint.epochs or math.inf) * per_epoch
        with parts.threads(cfg):
            # Any evaluation may be the best so far. If so, a checkpoint is saved.
            every = min(evaluation, save, save_epochs)
            estimate = look(parts.trainer, *parts.loaders, every=every)
    minutes = estimate.steps * estimate.step / 60
    evaluations = math.ceil(estimate.steps / evaluation)
    saves = int(estimate.steps / save) + math.ceil(estimate.steps / save_epochs)
    saves += int(minutes / (cfg.checkpoint.minutes or math.inf))
    text = lines(estimate, startup, evaluations, saves, cfg.checkpoint.keep, cfg.max_minutes)
    terminal.show("\n".join(text))
    place = cfg.run_dir or f"{project.current().runs}/<date>-{'-'.join(names_of(cfg))}"
    terminal.show(
        f"run      {place}; nothing was written\n         {shell.command(typed_for_run())}"
    )
