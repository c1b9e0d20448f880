"""The files of a run, checked once, so that the rest of the report can trust their types.

They are untrusted. An entry that is missing or malformed is None or empty here, and its part of
the page is left out.
"""

import base64
import functools
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.command import dotted
from stoker.runs import directory, saved_config, status
from stoker.runs.evaluation import Evaluation, Sample
from stoker.runs.json_files import parsed, read_json
from stoker.runs.report.words import one_line, shortened
from stoker.runs.result import Best, RunResult
from stoker.runs.status import Status
from stoker.trainer import checkpoint_names, files
from stoker.trainer.typed import is_number, typed

MOST_BYTES = 2**25  # size of a metrics.jsonl that is read in full
MOST_ROWS = 100_000  # of a larger file, keep the evaluation rows and some of the others
MOST_TEXTS = 5  # a language model's texts
MOST_SAMPLE = 2000  # characters in each text
MOST_TYPED = 10_000  # characters in the overrides
MOST_NAME = 100  # characters in a class name, which appears in several places
MOST_PNG = 2**15  # bytes in a picture
MOST_SIDE = 256  # pixels in a picture
END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"
SPLITS = {"train": "training", "val": "validation", "test": "test"}  # names of the splits
MODES = {
    "val/perplexity": "min",
    "val/miou": "max",
    "val/acc": "max",
    "val/r2": "max",
    "val/loss": "min",
}  # metrics that monitor=auto chooses from

Row = dict[str, float]  # a row of metrics.jsonl, numbers only; it has a "step" and an "epoch"


@dataclass
class Run:
    """The files of a run directory. `config` is flat; `overrides` is None if unknown."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    result: RunResult = field(default_factory=RunResult)
    has_ended: bool = False  # whether result.json exists
    state: str = "stopped"  # or "running", "failed", "done"
    status: Status = field(default_factory=Status)
    overrides: list[str] | None = None

    @functools.cached_property
    def rows(self) -> list[Row]:
        return read_rows(self.folder / directory.METRICS)

    @functools.cached_property
    def texts(self) -> list[tuple[float, str]]:
        return read_texts(self.folder / directory.SAMPLES)

    @functools.cached_property
    def evaluation(self) -> Evaluation | None:
        return read_evaluation(self.folder / directory.EVALUATION)

    @property
    def best(self) -> Best | None:
        """The evaluation whose weights were kept, or the best one so far; None if unknown."""
        return self.result.best if self.has_ended else best_so_far(self.config, self.rows)

    @property
    def total_steps(self) -> int | None:
        return self.result.total_steps or self.status.total_steps

    @property
    def is_one_epoch(self) -> bool:
        """Whether `max_steps` make a single epoch, as for a stream."""
        most = self.config.get("max_steps")
        last = self.rows[-1] if self.rows else None
        return bool(last and is_number(most) and abs(last["epoch"] * most - last["step"]) < 0.5)

    @property
    def step(self) -> float:
        """The step of the last row, or of an interrupted run's checkpoint if that is later."""
        if self.result.steps is not None:
            return self.result.steps
        steps = [row["step"] for row in self.rows]
        steps += checkpoints(self.folder)
        return max(steps, default=0)


def read_run(folder: str | Path, state: str | None = None) -> Run:
    """Read a run directory; UserError if it has no config.yaml of a run.

    The process that trains the run passes its `state`.
    """
    folder = Path(folder)
    config = saved_config.load_config("run_dir", folder)
    result = RunResult.read(folder)
    overrides = saved_config.overrides_in(folder) if result is None else result.overrides
    if sum(map(len, overrides or [])) > MOST_TYPED:
        overrides = None
    return Run(
        folder=folder,
        config=dotted.flat(config),
        result=result or RunResult(),
        has_ended=result is not None,
        state=state or status.state_of(folder, result),
        status=Status.read(folder),
        overrides=overrides,
    )


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return {step: path} of the checkpoints of a run."""
    return checkpoint_names.files(folder / "checkpoints")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl with a step and an epoch, each with its numbers alone."""
    rows = []
    for entries in read_lines(path):
        row = {name: value for name, value in entries.items() if is_number(value)}
        if row.get("epoch", -1) >= 0 and row.get("step", -1) >= 0:
            rows.append(row)
    return rows


def read_texts(path: Path) -> list[tuple[float, str]]:
    """Return (epoch, text) of the last MOST_TEXTS rows of a samples.jsonl."""
    texts = []
    for row in read_lines(path):
        if is_number(row.get("epoch")) and isinstance(row.get("text"), str):
            texts.append((row["epoch"], shortened(row["text"], MOST_SAMPLE)))
    return texts[-MOST_TEXTS:]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines; of very many, those of evaluations and some."""
    try:
        lines = files.read(path, MOST_BYTES).splitlines()
    except OSError:
        return
    every = math.ceil(len(lines) / MOST_ROWS)
    lines = [line for i, line in enumerate(lines) if i % every == 0 or b'"val/' in line]
    for line in lines[-2 * MOST_ROWS :]:
        entries = parsed(line)
        if entries is not None:
            yield entries


def best_so_far(config: dict[str, Any], rows: list[Row]) -> Best | None:
    """Return the best evaluation by the run's monitor, if it is known whether higher is better."""
    monitor = str(config.get("monitor"))
    for name in MODES if monitor == "auto" else [monitor]:
        evaluated = [row for row in rows if name in row]
        mode = config.get("monitor_mode")
        if mode == "auto":
            mode = MODES.get(name)
        if evaluated and mode in ("max", "min"):
            choose = max if mode == "max" else min
            row = choose(evaluated, key=lambda row: row[name])
            return Best(name, mode, int(row["step"]), row[name])
    return None


def read_evaluation(path: Path) -> Evaluation | None:
    """Return the evaluation in evaluation.json; None if it is malformed."""
    try:
        return evaluation_of(read_json(path))
    except (ValueError, TypeError):
        return None


def evaluation_of(entries: Any) -> Evaluation:
    """Return the evaluation in a JSON object; TypeError or ValueError if it is malformed.

    Points and samples that do not fit are left out, such as predictions that are not finite.
    """
    evaluation: Evaluation = typed(entries, Evaluation)
    evaluation.classes = [shortened(name, MOST_NAME) for name in evaluation.classes]
    evaluation.target = one_line(evaluation.target)
    evaluation.points = list(filter(is_pair, evaluation.points))
    if not are_counts(evaluation):
        raise ValueError
    for name in ("worst", "uncertain", "random"):
        samples = [sample for sample in getattr(evaluation, name) if fits(sample, evaluation)]
        setattr(evaluation, name, samples)
    return evaluation


def is_pair(value: Any) -> bool:
    """Whether this is [true numbers, predicted numbers], equally many of each."""
    try:
        true, predicted = typed(value, list[list[float]])
    except (TypeError, ValueError):
        return False
    return len(true) == len(predicted)


def are_counts(evaluation: Evaluation) -> bool:
    """Whether the counts fit the classes and each other; ValueError if they are not tables."""
    import numpy

    size = len(evaluation.classes)
    matrix = evaluation.confusion
    if matrix is not None and (numpy.shape(matrix) != (size, size) or numpy.min(matrix) < 0):
        return False
    for counts in (evaluation.confidence, evaluation.second):
        if counts is not None:
            samples, some = numpy.array(counts, dtype=float)
            if len(samples) % 10 or (some < 0).any() or (some > samples).any():
                return False
    return evaluation.second is None or size == 2


def fits(sample: Sample, evaluation: Evaluation) -> bool:
    """Whether a sample has everything that is shown for its kind."""
    if len(sample.masks) not in (0, 2) or not all(map(is_small_png, sample.masks)):
        return False
    if len(sample.tokens) != len(sample.losses):
        return False
    labels = [sample.true, sample.predicted]
    if evaluation.kind == "regression":
        return is_pair(labels)
    places = range(len(evaluation.classes))
    are_classes = all(type(label) is int and label in places for label in labels)
    return are_classes or evaluation.unit != "samples"


def is_small_png(text: str) -> bool:
    """Whether this is a small PNG in base64, with nothing in it but pixels."""
    from PIL import Image

    try:
        data = base64.b64decode(text, validate=True)
        if len(data) > MOST_PNG or not data.endswith(END_OF_PNG):
            return False
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if max(image.size) > MOST_SIDE:
                return False
            image.load()
            return not image.info and not getattr(image, "private_chunks", None)
    except Exception:  # the errors for damaged files are undocumented
        return False
