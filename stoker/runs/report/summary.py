"""The top of the report: a description, the verdict on quality, and tiles of numbers."""

import math
import re
from pathlib import Path

from stoker.runs.evaluation import Evaluation
from stoker.runs.json_files import is_number
from stoker.runs.report.curves import metric_of
from stoker.runs.report.inputs import SPLITS, Best, Row, Run
from stoker.runs.report.words import epoch, one_line, percent, shortened
from stoker.runs.result import RunResult
from stoker.trainer.readable import number

PLACES = {
    "csv": "dataset.path",
    "image_folder": "dataset.root",
}  # the keys that locate your own data


def about(run: Run) -> str:
    """'MLP on digits, cpu, fp32, 1,258 training samples'; your own data has its file's name."""
    names = [target_name(run, "model"), data_name(run)]
    parts = [" on ".join(filter(None, names))]
    if run.evaluation is not None and run.evaluation.target:
        parts.append(f"target {run.evaluation.target}")
    parts += [one_line(run.result.device), one_line(run.result.precision)]
    samples = run.result.samples or {}
    counts = [f"{samples[name]:,} {word}" for name, word in SPLITS.items() if name in samples]
    if counts:
        parts.append(f"{' + '.join(counts)} samples")
    return ", ".join(filter(None, parts))


def target_name(run: Run, group: str) -> str:
    """Return the name of the class or function that a group of the config builds."""
    target = run.config.get(f"{group}._target_")
    return one_line(target).rpartition(".")[2] if isinstance(target, str) else ""


def data_name(run: Run) -> str:
    name = target_name(run, "dataset")
    place = run.config.get(PLACES.get(name, ""))
    return (shortened(Path(place).name) if isinstance(place, str) else "") or name


def quality_verdict(run: Run) -> str:
    """Say in one sentence how good the run is, against chance and its first evaluation."""
    if run.result.error:
        return f"The run failed: {one_line(run.result.error)}"
    best = run.best
    if best is None and not run.has_ended:
        best = latest(run.rows)
    parts = [judged(run)]
    if best is not None:
        parts.append(progress(run.rows, best))
    if not any(parts):
        return f"No evaluation yet at step {run.step:,.0f}." if run.rows else "No numbers yet."
    if run.rows and not run.has_ended:
        parts.append(f"the run has not finished (step {run.step:,.0f})")
    text = "; ".join(filter(None, parts))
    if not re.match(r"[a-z]+/", text):  # the name of a metric stays as it is
        text = text[0].upper() + text[1:]
    return f"{text}."


def judged(run: Run) -> str:
    """Return how good the evaluated weights are; '' without a test."""
    text = None
    if run.evaluation is not None and run.evaluation.kind == "classification":
        text = judged_classes(run.result, run.evaluation)
    elif run.evaluation is not None:
        text = judged_numbers(run.result, run.evaluation)
    if text is not None:
        return text
    for name, value in run.result.tests().items():
        return f"{shortened(name)} is {number(value)}"
    return ""


def judged_classes(result: RunResult, evaluation: Evaluation) -> str | None:
    """Return 'the model gets 97.2 % of 360 test samples right, where ... would be 10.3 %'."""
    total = evaluation.samples
    share = number_in(result, f"{evaluation.split}/acc")
    chance = evaluation.chance
    counts = evaluation.confusion
    if counts is not None:
        total = sum(map(sum, counts))
        share = sum(row[i] for i, row in enumerate(counts)) / total
        chance = chance or max(map(sum, counts)) / total
    if share is None or chance is None:
        return None
    text = f"the model gets {percent(share)} of {total:,} {SPLITS[evaluation.split]} samples right"
    deviation = math.sqrt(chance * (1 - chance) / total)
    if share > chance + 2 * deviation:
        return f"{text}, where the most frequent class alone would be {percent(chance)}"
    return (
        f"{text}, which is no better than chance: "
        f"the most frequent class alone would be {percent(chance)}"
    )


def judged_numbers(result: RunResult, evaluation: Evaluation) -> str | None:
    """'the model explains 90.0 % of the variance of price in 80 test samples, ...'."""
    r2 = number_in(result, f"{evaluation.split}/r2")
    mae = number_in(result, f"{evaluation.split}/mae")
    if r2 is None or r2 > 1:
        return None
    samples = f"{evaluation.samples:,} {SPLITS[evaluation.split]} samples"
    if r2 <= 0:
        text = (
            f"the model is no better on {samples} than always predicting their mean "
            f"(r2 {number(r2)})"
        )
    else:
        variance = f"{evaluation.target} in {samples}" if evaluation.target else samples
        text = (
            f"the model explains {percent(r2)} of the variance of {variance}, "
            "where always predicting their mean would explain none"
        )
    if mae is None or evaluation.targets > 1:  # their units may differ
        return text
    return f"{text}, and is off by {number(mae)} on average"


def number_in(result: RunResult, name: str) -> float | None:
    value = result.numbers.get(name)
    return value if is_number(value) else None


def progress(rows: list[Row], best: Best) -> str:
    """'val/acc rose from 0.8436 after epoch 1 to 0.9777 after epoch 9'."""
    name = shortened(best.name)
    value = number(best.value)
    evaluated = [row for row in rows if best.name in row]
    if not evaluated or best.epoch is None:
        return f"{name} is {value} at its best"
    first = evaluated[0]
    start = f"{number(first[best.name])} after {epoch(first['epoch'])}"
    if first["epoch"] == best.epoch:
        later = ", and not better later" if len(evaluated) > 1 else ""
        return f"{name} was {start}{later}"
    way = {True: "rose", False: "fell", None: "went"}[best.is_high]
    return f"{name} {way} from {start} to {value} after {epoch(best.epoch)}"


def latest(rows: list[Row]) -> Best | None:
    """Return the last value of a metric, for a run whose best value is unknown."""
    name = metric_of(rows) or "val/loss"
    evaluated = [row for row in rows if name in row]
    if not evaluated:
        return None
    return Best(name, evaluated[-1][name], None, evaluated[-1]["epoch"])


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
