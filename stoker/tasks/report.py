"""Draw the report at the end of a run, unless report=false."""

from pathlib import Path

from omegaconf import DictConfig

from stoker.command import invocation, shell
from stoker.tasks.current_job import sweep_name
from stoker.trainer.errors import cause, log


def draws_report(cfg: DictConfig) -> bool:
    """Return whether this run draws its report. By default, the jobs of a sweep do not."""
    return sweep_name() is None if cfg.report == "auto" else bool(cfg.report)


def draw_report(folder: Path, state: str | None = None) -> None:
    """Draw the report. The run is complete without it, so an error only causes a warning."""
    from stoker.runs import report

    again = shell.command([], start=[*invocation.program(), "redraw", str(folder)])
    try:
        print(f"report   {report.write(folder, state)}")
    except Exception as error:
        log.warning("the report could not be written (%s). To try again: %s", cause(error), again)
