"""The top of the report: a description, how far the run is, the verdict on quality, and tiles."""

import datetime
import math
from pathlib import Path
from typing import Any

from stoker.runs.page import render
from stoker.runs.readable import seconds
from stoker.runs.report import words
from stoker.runs.report.curves import metrics_of
from stoker.runs.report.inputs import SPLITS, Best, Row, Run
from stoker.runs.report.words import one_line, shortened
from stoker.trainer.readable import number
from stoker.trainer.typed import is_number

PLACES = {
    "csv": "dataset.path",
    "text": "dataset.path",
    "image_folder": "dataset.root",
}  # keys that locate the user's own data
MOST_ERROR = 600  # characters in an error, whose last line says what to type


def about(run: Run) -> str:
    """'MLP on digits, cpu, fp32, 1,258 training samples'; your own data has its file's name."""
    names = [target_name(run, "model"), data_name(run)]
    parts = [" on ".join(filter(None, names))]
    if run.evaluation is not None and run.evaluation.target:
        parts.append(f"target {run.evaluation.target}")
    parts.append(one_line(run.result.device))
    parts.append(one_line(run.result.precision))
    samples = run.result.samples or {}
    counts = []
    for name, word in SPLITS.items():
        if name in samples:
            counts.append(f"{samples[name]:,} {word}")
    if counts:
        parts.append(f"{' + '.join(counts)} samples")
    return ", ".join(filter(None, parts))


def progress(run: Run, now: float) -> str:
    """'running, step 1,200 of 4,000 (30%), about 4 min 10 s to go', 'done at step 200'."""
    total = run.total_steps
    text = f"{run.state} at step {run.step:,.0f}"
    if run.state == "running":
        text = f"running, step {run.step:,.0f}"
    if total and total != run.step:
        share = 100 * run.step / total
        text += f" of {total:,} ({share:.0f}%)"
    begun = run.status.resumed
    if run.state == "running" and total and begun is not None:
        done = run.step - (run.status.step or 0)
        if done >= 1:
            each = (now - begun) / done
            left = max(0, each * (total - run.step))
            text += f", about {seconds(left)} to go"
    if run.result.stopped is not None:
        text += f": {one_line(run.result.stopped.text)}"
    return text


def times(run: Run) -> str:
    """'Started 2026-11-23 09:30, ended 2026-11-23 09:40, on AMD EPYC 7763'."""
    parts = []
    moments = {
        "started": run.status.started,
        "ended": run.status.ended,
    }
    for name, moment in moments.items():
        if moment is not None and 0 < moment < 1e11:
            date = datetime.datetime.fromtimestamp(moment)
            parts.append(f"{name} {date:%Y-%m-%d %H:%M}")
    if run.status.machine:
        parts.append(f"on {one_line(run.status.machine)}")
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def target_name(run: Run, group: str) -> str:
    """Return the name of the class or function that a group of the config builds."""
    target = run.config.get(f"{group}._target_")
    if not isinstance(target, str):
        return ""
    return one_line(target).rpartition(".")[2]


def data_name(run: Run) -> str:
    """Return the name of your own data's file or folder, or that of the data set."""
    name = target_name(run, "dataset")
    place = run.config.get(PLACES.get(name, ""))
    if isinstance(place, str):
        name = shortened(Path(place).name) or name
    return name


def quality_verdict(run: Run) -> str:
    """Say in one sentence how good the run is, against chance and its first evaluation."""
    result = run.result
    if result.error:
        error, _ = words.without_commands(result.error)
        return f"The run failed: {shortened(' '.join(error.split()), MOST_ERROR)}"
    best = run.best
    if best is None and not run.has_ended:
        best = latest(run.rows)
    evaluated = []
    change = "went"
    if best is not None:
        evaluated = [row for row in run.rows if best.name in row]
        if best.is_high is not None:
            change = "rose" if best.is_high else "fell"
    text = render(
        "verdict.txt.jinja",
        words=words,
        number=number,
        evaluation=run.evaluation,
        split=SPLITS[run.evaluation.split] if run.evaluation else None,
        tests=result.tests(),
        best=best,
        change=change,
        first=evaluated[0] if evaluated else None,
        evaluations=len(evaluated),
        **scores(run),
    )
    parts = text.splitlines()
    if not parts:
        return "No evaluation yet." if run.rows else "No numbers yet."
    if parts[0].startswith("the "):  # the name of a metric stays as it is
        parts[0] = parts[0].replace("the", "The", 1)
    return f"{'; '.join(parts)}."


def scores(run: Run) -> dict[str, Any]:
    """Return the numbers that judge the evaluated weights; None for what is not known."""
    scores: dict[str, Any] = dict.fromkeys(("share", "chance", "beats_chance", "r2", "mae"))
    evaluation = run.evaluation
    if evaluation is None:
        return scores
    numbers = run.result.numbers
    if evaluation.kind == "regression":
        for name in ("r2", "mae"):
            value = numbers.get(f"{evaluation.split}/{name}")
            if is_number(value):
                scores[name] = value
        return scores
    share: Any = numbers.get(f"{evaluation.split}/acc")
    count = evaluation.samples
    if evaluation.confusion is not None:
        count = 0
        right = 0
        for i, row in enumerate(evaluation.confusion):
            count += sum(row)
            right += row[i]
        share = right / count
    chance = evaluation.chance
    if is_number(share) and chance is not None:
        variance = chance * (1 - chance)
        deviation = math.sqrt(variance / count)
        scores["share"] = share
        scores["chance"] = chance
        scores["beats_chance"] = share > chance + 2 * deviation
    return scores


def latest(rows: list[Row]) -> Best | None:
    """Return the last value of a metric, for a run whose best value is unknown."""
    name = next(iter(metrics_of(rows)), "val/loss")
    for row in reversed(rows):
        if name in row:
            return Best(name, row[name], None, row["epoch"])
    return None


def tests_in_units(run: Run) -> dict[str, float]:
    """Return the test numbers with rmse for mse, without errors that mix several targets."""
    tests = run.result.tests()
    several = run.evaluation is not None and run.evaluation.targets > 1
    shown = {}
    for name, value in tests.items():
        if several and name in ("test/mae", "test/mse"):
            continue
        if name == "test/mse" and value >= 0:
            shown["test/rmse"] = math.sqrt(value)
        else:
            shown[name] = value
    return shown
