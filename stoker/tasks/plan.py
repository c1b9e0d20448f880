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
        evaluates = parts.loaders[1] is not None
        # Any evaluation may be the best so far. If so, a checkpoint is saved.
        between = [cfg.checkpoint.every, (cfg.checkpoint.epochs or 0) * per_epoch]
        if evaluates:
            between.append(cfg.eval_every or per_epoch)
        every = min((steps for steps in between if steps), default=math.inf)
        with parts.threads(cfg):
            estimate = look(parts.trainer, *parts.loaders, every=every)
    evaluations = math.ceil(estimate.steps / (cfg.eval_every or per_epoch)) if evaluates else 0
    saves = 0
    if cfg.checkpoint.every:
        saves += estimate.steps // cfg.checkpoint.every
    if cfg.checkpoint.epochs:
        saves += math.ceil(estimate.steps / (per_epoch * cfg.checkpoint.epochs))
    if cfg.checkpoint.minutes:
        saves += int(estimate.steps * estimate.step / (60 * cfg.checkpoint.minutes))
    text = lines(estimate, startup, evaluations, saves, cfg.checkpoint.keep, cfg.max_minutes)
    terminal.show("\n".join(text))
    place = cfg.run_dir or f"{project.current().runs}/<date>-{'-'.join(names_of(cfg))}"
    terminal.show(
        f"run      {place}; nothing was written\n         {shell.command(typed_for_run())}"
    )
