"""Read the files of a run, and check them so that the rest of the report can trust their types.

The files are untrusted. An entry that is missing or malformed becomes None or empty, and the page
leaves it out.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.command import dotted
from stoker.data.typed import is_number, typed
from stoker.runs import directory, saved_config, status
from stoker.runs.evaluation import Evaluation
from stoker.runs.json_files import read_json
from stoker.runs.report.words import one_line, shortened
from stoker.runs.result import Best, RunResult
from stoker.runs.rows import read_rows
from stoker.runs.status import Status
from stoker.trainer import checkpoint_names

MOST_TEXTS = 5  # maximum number of generated texts shown
MOST_SAMPLE = 2000  # maximum characters of each text
MOST_TYPED = 10_000  # maximum characters of all overrides together
MOST_NAME = 100  # maximum characters of a class name, which appears in several places
SPLITS = {"train": "training", "val": "validation", "test": "test"}  # names on the page

Row = dict[str, float]  # the numbers in a row of metrics.jsonl, including "step" and "epoch"


@dataclass
class Run:
    """The files of a run directory. `config` has dotted keys; `overrides` is None if unknown."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    result: RunResult = field(default_factory=RunResult)
    has_ended: bool = False  # whether the run finished or failed
    state: str = "stopped"  # or "running", "failed", "done"
    status: Status = field(default_factory=Status)
    overrides: list[str] | None = None

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The numbers in each row of metrics.jsonl that has a step and an epoch."""
        return list(filter(None, map(numbers_in, read_rows(self.folder / directory.METRICS))))

    @functools.cached_property
    def texts(self) -> list[tuple[Row, str]]:
        return read_texts(self.folder / directory.SAMPLES)

    @functools.cached_property
    def evaluation(self) -> Evaluation | None:
        return read_evaluation(self.folder / directory.EVALUATION)

    @property
    def best(self) -> Best | None:
        """The evaluation whose weights were kept, or the best one so far; None if unknown."""
        return self.result.best if self.has_ended else self.status.best

    @property
    def total_steps(self) -> int | None:
        return self.result.total_steps or self.status.total_steps

    @property
    def step(self) -> float:
        """The step of the last row, or of an interrupted run's checkpoint if that is later."""
        if self.result.steps is not None:
            return self.result.steps
        steps = [row["step"] for row in self.rows]
        steps += checkpoints(self.folder)
        return max(steps, default=0)


def read_run(folder: str | Path, state: str | None = None) -> Run:
    """Read a run directory. Raise UserError if it has no valid config.yaml.

    `state` is the current state of the run. Only the process that trains the run passes it.
    """
    folder = Path(folder)
    config = saved_config.load_config("run_dir", folder)
    result = RunResult.read(folder)
    before = status.Status.read(folder)
    overrides = result.overrides if result.has_ended else before.overrides
    if sum(map(len, overrides or [])) > MOST_TYPED:
        overrides = None
    return Run(
        folder=folder,
        config=dotted.flat(config),
        result=result,
        has_ended=result.has_ended,
        state=state or status.state_of(folder, result),
        status=before,
        overrides=overrides,
    )


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return {step: path} for the checkpoints of a run."""
    return checkpoint_names.files(folder / "checkpoints")


def read_texts(path: Path) -> list[tuple[Row, str]]:
    """Return (row, text) for rows of a samples.jsonl: the first, the last, and a few between."""
    texts = []
    for entries in read_rows(path):
        row = numbers_in(entries)
        if row and isinstance(entries.get("text"), str):
            texts.append((row, shortened(entries["text"], MOST_SAMPLE)))
    every = max(1, (len(texts) - 1) / (MOST_TEXTS - 1))
    return [texts[round(i * every)] for i in range(min(len(texts), MOST_TEXTS))]


def numbers_in(entries: dict[str, Any]) -> Row:
    """Return the numbers in a row, or {} if it has no step or no epoch."""
    row = {name: value for name, value in entries.items() if is_number(value)}
    is_placed = row.get("epoch", -1) >= 0 and row.get("step", -1) >= 0
    return row if is_placed else {}


def read_evaluation(path: Path) -> Evaluation | None:
    """Return the evaluation in evaluation.json, or None if the file is malformed."""
    try:
        return evaluation_of(read_json(path))
    except (ValueError, TypeError):
        return None


def evaluation_of(entries: Any) -> Evaluation:
    """Return the evaluation in a JSON object. Raise TypeError or ValueError if it is malformed.

    Invalid points and samples, such as non-finite predictions, are omitted.
    """
    evaluation: Evaluation = typed(entries, Evaluation)
    evaluation.classes = [shortened(name, MOST_NAME) for name in evaluation.classes]
    evaluation.target = one_line(evaluation.target)
    evaluation.points = list(filter(is_pair, evaluation.points))
    if evaluation.kind == "regression":
        for samples in (evaluation.worst, evaluation.random):
            samples[:] = [one for one in samples if is_pair([one.true, one.predicted])]
    return evaluation


def is_pair(value: Any) -> bool:
    """Return whether this is [true numbers, predicted numbers], in lists of the same length."""
    try:
        true, predicted = typed(value, list[list[float]])
    except (TypeError, ValueError):
        return False
    return len(true) == len(predicted)
