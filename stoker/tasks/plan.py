"""task=plan: estimate the cost of a run from a few real steps."""

import math
import time
from pathlib import Path

from omegaconf import DictConfig

from stoker import project
from stoker.command import dotted, shell
from stoker.command.retarget import not_default
from stoker.runs import resume, saved_config
from stoker.tasks.effects import check_effects
from stoker.tasks.job import names_of, started_at, typed_for_run
from stoker.tasks.parts import building
from stoker.trainer import terminal
from stoker.trainer.errors import as_typed


def plan(cfg: DictConfig) -> None:
    """Print what this run would cost, without writing anything."""
    began = started_at()
    from stoker.diagnostics.plan import lines, look
    from stoker.trainer.loading import epoch_length

    folder = None if cfg.run_dir is None else Path(cfg.run_dir)
    if folder is not None and cfg.resume == "auto" and (folder / "config.yaml").exists():
        resume.check_same(f"run_dir={folder}", saved_config.load_config("run_dir", folder), cfg)
    begins = newest_step(folder)
    with building(cfg, resumes=begins > 0) as parts:
        check_effects(cfg, parts)
        startup = time.perf_counter() - began
        per_epoch = epoch_length(parts.loaders[0], cfg.max_steps)
        evaluates = parts.loaders[1] is not None
        # Each evaluation may be the best, which is saved.
        between = [cfg.checkpoint.every, (cfg.checkpoint.epochs or 0) * per_epoch]
        if evaluates:
            between.append(cfg.eval_every or per_epoch)
        every = min((steps for steps in between if steps), default=math.inf)
        with parts.threads(cfg):
            estimate = look(parts.trainer, *parts.loaders, every=every)
    estimate.steps = max(0, estimate.steps - begins)
    evaluations = math.ceil(estimate.steps / (cfg.eval_every or per_epoch)) if evaluates else 0
    saves = 0
    if cfg.checkpoint.every:
        saves += estimate.steps // cfg.checkpoint.every
    if cfg.checkpoint.epochs:
        saves += math.ceil(estimate.steps / (per_epoch * cfg.checkpoint.epochs))
    text = lines(estimate, startup, evaluations, saves, cfg.checkpoint.keep, cfg.max_minutes)
    changed = not_default(dotted.plain(cfg))
    named = ", ".join(f"{key}={as_typed(value)}" for key, value in changed.items())
    terminal.show(
        f"set      {named or 'nothing'} (everything that differs from its class's default)"
    )
    terminal.show("\n".join(text))
    place = cfg.run_dir or f"{project.current().runs_folder}/<date>-{'-'.join(names_of(cfg))}"
    if begins:
        place += f", which would resume at step {begins:,}"
    terminal.show(
        f"run      {place}; nothing was written\n         {shell.command(typed_for_run())}"
    )


def newest_step(folder: Path | None) -> int:
    """Return the step of the newest checkpoint in a run directory, 0 if there is none."""
    from stoker.trainer import checkpoint

    if folder is None:
        return 0
    return next(iter(checkpoint.files(folder / "checkpoints")), 0)
