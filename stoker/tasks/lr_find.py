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

    with building(cfg) as parts:
        rates, losses = search.lr_find(parts.trainer, parts.loaders[0])
    suggestion = search.suggestion(rates, losses)
    path = Path(run_directory(cfg)) / "lr_find.csv"
    search.write(rates, losses, path)
    terminal.show(
        f"lr       {suggestion:.2g}, a tenth of the rate with the lowest loss "
        f"({len(rates)} steps, with rates from {rates[0]:.1g} to {rates[-1]:.1g})"
    )
    terminal.show(f"curve    {path}")
    typed = [one for one in typed_for_run() if one != "~optimizer.lr"]
    terminal.show(f"train    {shell.command(typed, f'optimizer.lr={suggestion:.2g}')}")
