"""task=lr_find: raise the learning rate from step to step, suggest one, and draw the curve."""

from pathlib import Path

from omegaconf import DictConfig

from stoker.command import shell
from stoker.tasks.job import run_directory, typed_for_run
from stoker.tasks.parts import building


def lr_find(cfg: DictConfig) -> None:
    """Print a suggestion for `optimizer.lr`, and leave the curve in the run directory."""
    from stoker.diagnostics import lr_find as search

    with building(cfg) as parts:
        found = search.lr_find(parts.trainer, parts.loaders[0])
    picture = search.draw(found, Path(run_directory(cfg)) / "lr_find.png")
    lowest = f"{found.rates[0]:.1g}"
    highest = f"{found.rates[-1]:.1g}"
    print(
        f"lr       {found.suggestion:.2g}, a tenth of where the loss was lowest "
        f"in {len(found.rates)} steps from {lowest} to {highest}"
    )
    print(f"curve    {picture}")
    print(f"use it   {shell.command(typed_for_run(), f'optimizer.lr={found.suggestion:.2g}')}")
