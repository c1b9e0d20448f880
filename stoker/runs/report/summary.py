"""The top of the report: a description, the progress of the run, and the verdict on its quality."""

import time
from pathlib import Path

from stoker.data.typed import is_number
from stoker.runs.page import render
from stoker.runs.readable import seconds
from stoker.runs.report import words
from stoker.runs.report.inputs import SPLITS, Row, Run
from stoker.runs.report.words import one_line, shortened

MOST_ERROR = 1000  # maximum characters of an error, whose last line says what to type


def about(run: Run) -> str:
    """Return a line such as 'MLP on digits, cpu, fp32, 1,258 training samples'."""
    known = run.result if run.result.device else run.status
    samples = known.samples or {}
    counts = [f"{samples[name]:,} {word}" for name, word in SPLITS.items() if name in samples]
    names = [target_name(run, "model"), data_name(run)]
    parts = [" on ".join(filter(None, names))]
    if run.evaluation is not None and run.evaluation.target:
        parts.append(f"target {run.evaluation.target}")
    parts += [one_line(known.device), one_line(known.precision)]
    if counts:
        parts.append(f"{' + '.join(counts)} samples")
    return ", ".join(filter(None, parts))


def progress(run: Run, now: float) -> str:
    """Return 'done at step 200' or 'running, step 1,200 of 4,000 (30%), about 4 min 10 s to go'."""
    is_running = run.state == "running"
    step = run.step
    total = run.total_steps
    text = f"{run.state}{', ' if is_running else ' at '}step {step:,.0f}"
    if total and total != step:
        text += f" of {total:,} ({step / total:.0%})"
    if is_running and total and run.status.resumed is not None:
        done = step - (run.status.step or 0)
        if done >= 1:
            left = (now - run.status.resumed) / done * (total - step)
            text += f", about {seconds(max(0, left))} to go"
    if run.result.stopped is not None:
        text += f": {one_line(run.result.stopped.text)}"
    return text


def times(run: Run) -> str:
    """Return 'Started 2026-11-23 09:30, ended 2026-11-23 09:40, on AMD EPYC 7763'."""
    known = {
        "started": date(run.status.started),
        "ended": date(run.status.ended),
        "on": one_line(run.status.machine),
    }
    text = ", ".join(f"{name} {value}" for name, value in known.items() if value)
    return text[:1].upper() + text[1:]


def date(moment: float | None) -> str:
    """Format a Unix timestamp as local time, like '2026-11-23 09:30'; '' if it is out of range."""
    if moment is None or not 0 < moment < 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def target_name(run: Run, group: str) -> str:
    """Return the name of the class or function that a group of the config builds."""
    target = one_line(str(run.config.get(f"{group}._target_", "")))
    return target.rpartition(".")[2]


def data_name(run: Run) -> str:
    """Return the name of the user's data file or folder, or else the name of the data set."""
    name = target_name(run, "dataset")
    # For other data sets, the root is only the download folder.
    place = run.config.get("dataset.root" if name == "image_folder" else "dataset.path")
    if isinstance(place, str) and Path(place).name and "${" not in place:
        return one_line(Path(place).name)
    return name


def quality_verdict(run: Run) -> str:
    """Say in one sentence how good the run is, compared with chance and its first evaluation."""
    if run.result.error:
        return f"The run failed: {shortened(' '.join(run.result.error.split()), MOST_ERROR)}"
    best = run.best
    evaluated = [row for row in run.rows if best is not None and best.name in row]
    text = render(
        "verdict.txt.jinja",
        words=words,
        evaluation=run.evaluation,
        split=SPLITS[run.evaluation.split] if run.evaluation else None,
        scores=scores(run),
        tests=run.result.tests(),
        best=best,
        first=evaluated[0] if evaluated else None,
        moments={row["step"]: moment(run, row) for row in reversed(evaluated)},
        evaluations=len(evaluated),
    )
    parts = text.splitlines()
    if not parts:
        return "Not evaluated." if run.has_ended else "Not evaluated yet."
    return f"{'; '.join(parts)}."


def moment(run: Run, row: Row) -> str:
    """Return 'epoch 2' at the end of an epoch, else 'step 500' (always in the first epoch)."""
    epoch = row["epoch"]
    is_end = epoch == round(epoch) and run.rows[-1]["epoch"] > 1
    return f"epoch {epoch:,.0f}" if is_end else f"step {row['step']:,.0f}"


def scores(run: Run) -> dict[str, float]:
    """Return those of "acc", "r2" and "mae" that are known for the evaluated weights.

    "luck" is the highest accuracy that guessing might reach: two standard errors above chance.
    """
    seen = run.evaluation
    if seen is None:
        return {}
    start = f"{seen.split}/"
    numbers = run.result.best_metrics().items()
    known = {name.removeprefix(start): value for name, value in numbers if is_number(value)}
    count: float = seen.samples
    if seen.confusion is not None:  # the best metrics of a validation split might lack the accuracy
        count = sum(map(sum, seen.confusion))
        right = sum(row[i] for i, row in enumerate(seen.confusion))
        known["acc"] = right / max(1, count)
    if seen.chance is not None:
        variance = seen.chance * (1 - seen.chance) / max(1, count)
        known["luck"] = seen.chance + 2 * max(0, variance) ** 0.5
    return known
