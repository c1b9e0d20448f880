"""The report of a run: report.html, made from the files in its directory alone.

`python -m stoker.runs.report DIR [--open]` draws it again. The order of its parts is in
templates/report.html, and `facts` names the function that each part comes from. The directory is
untrusted: whatever it contains is escaped as text.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.command import subcommand
from stoker.runs.report import costs, curves, evaluation, inputs, setup, summary, words
from stoker.runs.report.words import shortened
from stoker.runs.result import STAGES
from stoker.trainer import files
from stoker.trainer.errors import UserError
from stoker.trainer.readable import duration, seconds

NAME = "report.html"
MOST_PAGE = 1_000_000  # bytes
MOST_WARNINGS = 20  # from the doctor
MOST_WARNING = 500  # letters of each


def write(folder: str | Path) -> Path:
    """Draw report.html in a run directory and return its path; OSError if it cannot be written."""
    path = Path(folder) / NAME
    files.write_text(path, html(folder))
    return path


def html(folder: str | Path) -> str:
    """Return the page. Beyond MOST_PAGE bytes it loses its pictures, and then its settings."""
    from stoker.runs.page import render

    parts = facts(inputs.read_run(folder))
    text = render("report.html", **parts)
    for names in (["hardest"], ["settings", "confusion"]):
        if len(text.encode()) < MOST_PAGE:
            break
        parts.update(dict.fromkeys(names))
        text = render("report.html", **parts)
    return text


def facts(run: inputs.Run) -> dict[str, Any]:
    """Return what the template shows; a part that is not known is None or empty."""
    time = run.result.time or {}
    seen = run.evaluation
    best = run.best
    return {
        "run": run,
        "result": run.result,
        "evaluation": seen,
        "words": words,
        "seconds": seconds,
        "about": summary.about(run),
        "verdict": summary.quality_verdict(run),
        "chosen_by": seen and seen.split == "val" and best and best.name.startswith("val/"),
        "split": inputs.SPLITS[seen.split] if seen else None,
        "tiles": summary.tiles(run),
        "curves": curves.frames(run.rows, best),
        "doctor": warnings(run.result.doctor or []),
        "confusion": evaluation.confusion(seen) if seen else None,
        "regression": evaluation.regression(seen) if seen else [],
        "hardest": evaluation.hardest(seen) if seen else [],
        "time": costs.shares(time, STAGES, duration),
        "trained": duration(math.fsum(time.get(stage, 0) for stage in STAGES)),
        "memory": costs.shares(run.result.memory_mib or {}, costs.MEMORY, words.mib),
        "settings": setup.settings(run),
        "commands": setup.commands(run),
        "trusted": setup.trusted(run),
    }


def warnings(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (what is wrong, what to type) for each warning of the doctor."""
    rows = []
    for text in texts[:MOST_WARNINGS]:
        wrong, _, advice = text.partition("\n")
        wrong = wrong[:1].upper() + wrong[1:]
        rows.append((shortened(wrong, MOST_WARNING), shortened(advice, MOST_WARNING)))
    return rows


def main(arguments: list[str]) -> int:
    """Run `python -m stoker.runs.report DIR [--open]`, and return the exit code."""

    def draw(folder: Path) -> None:
        try:
            path = write(folder)
        except UserError as error:  # it names a setting that nobody typed here
            raise UserError(str(error).replace("run_dir=", "")) from None
        print(f"report   {path}")
        if "--open" in arguments:
            import webbrowser

            webbrowser.open(path.resolve().as_uri())

    usage = (
        "python -m stoker.runs.report DIR, a run directory; --open opens the report in a browser."
    )
    names = [argument for argument in arguments if argument != "--open"]
    return subcommand.run(names, usage, lambda path: (path / "config.yaml").exists(), draw)
