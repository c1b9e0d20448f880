"""Draw the report at the end of a run."""

from pathlib import Path

from stoker.command import invocation, shell
from stoker.trainer.errors import cause, log


def draw_report(folder: Path, state: str | None = None) -> None:
    """Draw the report. The run is complete without it, so an error only causes a warning."""
    from stoker.runs import report

    again = shell.command([], start=[*invocation.program(), "redraw", str(folder)])
    try:
        print(f"report   {report.write(folder, state)}")
    except Exception as error:
        log.warning("the report could not be written (%s). To try again: %s", cause(error), again)
