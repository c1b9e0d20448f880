"""The report of a run: report.html, made from the files in its directory alone.

`python -m stoker.runs.report DIR [--open]` draws it again. The order of its parts is in
templates/report.html, and `facts` names the function that each part comes from. The directory is
untrusted: whatever it contains is escaped as text.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.command import subcommand
from stoker.runs.confusion import confusion
from stoker.runs.readable import duration, seconds
from stoker.runs.report import curves, evaluation, inputs, setup, summary, words
from stoker.runs.result import STAGES
from stoker.trainer import files
from stoker.trainer.errors import UserError
from stoker.trainer.readable import number

NAME = "report.html"
MOST_PAGE = 1_000_000  # bytes
RELOAD = 30  # seconds after which the page of a running training checks for a newer version
MEMORY = ("parameters", "gradients", "optimizer", "buffers", "data")


def write(folder: str | Path, state: str | None = None) -> Path:
    """Draw report.html in a run directory and return its path; OSError if it cannot be written.

    The process that trains the run knows its `state`; anybody else finds out.
    """
    path = Path(folder) / NAME
    files.write_text(path, html(folder, state))
    return path


def html(folder: str | Path, state: str | None = None) -> str:
    """Return the page. Beyond MOST_PAGE bytes it loses its pictures, and then its settings."""
    from stoker.runs.page import render

    shown = facts(inputs.read_run(folder, state))
    text = render("report.html", **shown)
    for names in (["hardest"], ["settings", "confusion"]):
        if len(text.encode()) < MOST_PAGE:
            break
        shown.update(dict.fromkeys(names))
        text = render("report.html", **shown)
    return text


def facts(run: inputs.Run) -> dict[str, Any]:
    """Return what the template shows; a part that is not known is None or empty."""
    seen = run.evaluation
    best = run.best
    drawn = time.time()
    is_running = run.state == "running"
    return {
        "run": run,
        "result": run.result,
        "evaluation": seen,
        "best": best,
        "words": words,
        "number": number,
        "seconds": seconds,
        "duration": duration,
        "about": summary.about(run),
        "progress": summary.progress(run, drawn),
        "times": summary.times(run),
        "reload": RELOAD if is_running else None,
        "drawn": round(drawn) if is_running else None,
        "as_of": time.strftime("%H:%M:%S", time.localtime(drawn)),
        "doctor": run.result.doctor or run.status.doctor,
        "verdict": summary.quality_verdict(run),
        "chosen_by": seen and seen.split == "val" and best and best.name.startswith("val/"),
        "split": inputs.SPLITS[seen.split] if seen else None,
        "tests": summary.tests_in_units(run),
        "curves": curves.frames(run),
        "confusion": confusion(seen) if seen else None,
        "probabilities": evaluation.probabilities(seen) if seen else [],
        "regression": evaluation.regression(seen) if seen else [],
        "hardest": evaluation.hardest(seen) if seen else [],
        "time": parts(run.result.time, STAGES),
        "memory": parts(run.result.memory_mib, MEMORY),
        "settings": setup.settings(run),
        "origin": setup.origin(run),
        "commands": setup.commands(run),
        "trusted": setup.trusted(run),
    }


def parts(values: Mapping[str, float | None] | None, names: Iterable[str]) -> dict[str, float]:
    """Return the values of these names that are above 0: the parts of a bar."""
    known = {}
    for name in names:
        value = (values or {}).get(name) or 0
        if value > 0:
            known[name] = value
    return known


def main(arguments: list[str]) -> int:
    """Run `python -m stoker.runs.report DIR [--open]`, and return the exit code."""

    def draw(folder: Path) -> None:
        try:
            path = write(folder)
        except UserError as error:  # the error names a setting that the user did not type
            raise UserError(str(error).replace("run_dir=", "")) from None
        print(f"report   {path}")
        if "--open" in arguments:
            import webbrowser

            webbrowser.open(path.resolve().as_uri())

    usage = (
        "python -m stoker.runs.report DIR, a run directory; --open opens the report in a browser."
    )
    names = [argument for argument in arguments if argument != "--open"]
    return subcommand.run(names, usage, draw)
