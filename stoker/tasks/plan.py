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
    from stoker.diagnostics.plan import look
    from stoker.runs.page import render
    from stoker.trainer.loading import epoch_length

    with building(cfg) as parts:
        check_unused(cfg, parts)
        startup = time.perf_counter() - began
        every = cfg.eval_every or epoch_length(parts.loaders[0], cfg.max_steps)
        with parts.threads(cfg):
            estimate = look(parts.trainer, *parts.loaders)
    evaluations = 0 if parts.loaders[1] is None else math.ceil(estimate.steps / every)
    text = render(
        "plan.txt.jinja",
        run=estimate,
        started=startup,
        evaluations=evaluations,
        keep=cfg.checkpoint.get("keep", 2),
        minutes=cfg.max_minutes,
    )
    terminal.show(text.rstrip())
    place = cfg.run_dir or f"{project.current().runs}/<date>-{'-'.join(names_of(cfg))}"
    terminal.show(
        f"run      {place}; nothing was written\ntrain    {shell.command(typed_for_run())}"
    )
