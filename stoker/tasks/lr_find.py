"""task=lr_find: raise the learning rate at every step, suggest a rate, and write the curve."""

from pathlib import Path

from omegaconf import DictConfig

from stoker.command import shell
from stoker.tasks.current_job import run_directory, typed_for_run
from stoker.tasks.parts import building
from stoker.trainer import terminal


def lr_find(cfg: DictConfig) -> None:
    """Print a suggestion for `optimizer.lr`, and write the curve into the run directory."""
    from stoker.diagnostics import lr_find as search

    steps = max(search.FEWEST, min(cfg.max_steps or search.MOST, search.MOST))
    with building(cfg) as parts:
        curve = search.lr_find(parts.trainer, parts.loaders[0], steps=steps)
    path = Path(run_directory(cfg)) / "lr_find.csv"
    search.write(curve, path)
    terminal.show(
        f"lr       {curve.suggestion:.2g}, a tenth of the rate with the lowest loss "
        f"({len(curve.rates)} steps, with rates from {curve.rates[0]:.1g} to {curve.rates[-1]:.1g})"
    )
    if curve.end:
        terminal.show(
            f"         the {curve.end} rate had the lowest loss, so a better rate may be outside "
            "this range"
        )
    terminal.show(f"curve    {path}")
    rate = f"optimizer.lr={curve.suggestion:.2g}"
    terminal.show(f"train    {shell.command(typed_for_run(), rate)}")
