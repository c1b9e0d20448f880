"""The report of a run: report.html, built only from the files in its directory.

`stoker redraw DIR` redraws the page. templates/report.html contains the sections in
order, and calls the functions that most of them come from. The directory is untrusted, so all of
its contents are escaped as text.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.runs.confusion import classes_of, most_confused
from stoker.runs.directory import EVALUATION
from stoker.runs.evaluation import Evaluation
from stoker.runs.page import render
from stoker.runs.report import curves, evaluation, inputs, setup, summary, words
from stoker.runs.result import STAGES
from stoker.trainer import files
from stoker.trainer.errors import cause, log, printable

NAME = "report.html"
RELOAD = 30  # seconds after which an open page reloads itself during training
MEMORY = ("parameters", "gradients", "optimizer", "buffers", "data")


def write(folder: str | Path, state: str | None = None) -> Path:
    """Write report.html in a run directory and return its path. Raise OSError if that fails.

    The process that trains the run passes its `state`. Otherwise, the files determine the state.
    """
    path = Path(folder) / NAME
    files.write_text(path, html(folder, state))
    return path


def html(folder: str | Path, state: str | None = None) -> str:
    """Return the page. If evaluation.json is malformed, leave out the evaluation."""
    run = inputs.read_run(folder, state)
    try:
        return render("report.html", **facts(run))
    except Exception as error:  # only the types in this untrusted file have been checked
        if run.evaluation is None:
            raise
        log.warning("%s: %s cannot be shown (%s).", printable(folder), EVALUATION, cause(error))
        run.evaluation = None
        return render("report.html", **facts(run))


def facts(run: inputs.Run) -> dict[str, Any]:
    """Return the variables of the template."""
    now = time.time()
    shown = {
        "run": run,
        "summary": summary,
        "setup": setup,
        "words": words,
        "now": now,
        "as_of": time.strftime("%H:%M:%S", time.localtime(now)),
        "reload": RELOAD,
        "frames": curves.frames(run),
        "time": parts(run.result.time, STAGES),
        "memory": parts(run.result.memory_mib, MEMORY),
        "settings": setup.settings(run),
    }
    return shown | facts_of(run.evaluation)


def facts_of(seen: Evaluation | None) -> dict[str, Any]:
    """Return the variables of the template that describe an evaluation."""
    if seen is None:
        seen = Evaluation("test", "regression", 0)  # an empty evaluation
    classes = classes_of(seen)
    return {
        "split": inputs.SPLITS[seen.split],
        "classes": classes,
        "confused": most_confused(classes) if classes else [],
        "probabilities": evaluation.probabilities(seen),
        "regression": evaluation.regression(seen),
        "hardest": evaluation.hardest(seen),
    }


def parts(values: Mapping[str, float | None] | None, names: Iterable[str]) -> dict[str, float]:
    """Return {name: value} for the names with a positive value: the segments of a bar."""
    known = {name: (values or {}).get(name) or 0 for name in names}
    return {name: value for name, value in known.items() if value > 0}
