"""The files of a run, checked once, so that the rest of the report can trust their types.

They are untrusted. An entry that is missing or malformed is None or empty here, and its part of
the page is left out.
"""

import base64
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.command import dotted
from stoker.runs import directory, saved_config, status
from stoker.runs.evaluation import Evaluation, Sample
from stoker.runs.json_files import is_number
from stoker.runs.report.words import one_line, shortened
from stoker.runs.result import RunResult, typed
from stoker.runs.status import Status
from stoker.trainer import checkpoint_names, files

MOST_BYTES = 2**25  # of a metrics.jsonl
MOST_ROWS = 100_000  # beyond that: the rows of evaluations, and some of the others
MOST_TEXTS = 5  # samples of a language model, from the first to the last
MOST_SAMPLE = 2000  # letters of each
MOST_JSON = 2**24  # bytes of an evaluation.json: 1,000 classes are 2 MB
MOST_TYPED = 10_000  # letters of the overrides
MOST_NAME = 100  # letters of a class, which appears in several places
MOST_SAMPLES = 24  # worst ones, and as many uncertain ones
MOST_NUMBERS = 100  # targets of a regression
MOST_BINS = 1000  # of a probability
MOST_PNG = 2**15  # bytes of a picture
MOST_SIDE = 256  # pixels of a picture
END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"
MOST_TOKENS = 200  # of a sequence
MOST_TOKEN = 20  # letters of a token
UNITS = ("samples", "tokens", "pixels")  # of which there are classes
LISTS = ("worst", "uncertain", "random")  # of samples
SPLITS = {"train": "training", "val": "validation", "test": "test"}  # in words
BETTER = {
    "val/perplexity": "min",
    "val/miou": "max",
    "val/acc": "max",
    "val/r2": "max",
    "val/loss": "min",
}  # the metrics that monitor=auto chooses from

Row = dict[str, float]  # a row of metrics.jsonl, its numbers alone; it has an "epoch"


@dataclass
class Best:
    """The best evaluation of a run; `epoch` and `step` are None if no row has it."""

    name: str
    value: float
    is_high: bool | None  # whether higher is better, if that is known
    epoch: float | None
    step: float | None = None


@dataclass
class Run:
    """The files of a run directory. `config` is flat; `overrides` is None if unknown."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    result: RunResult = field(default_factory=RunResult)
    has_ended: bool = False  # whether there is a result
    state: str = "stopped"  # or "running", "failed", "done"
    status: Status = field(default_factory=Status)
    rows: list[Row] = field(default_factory=list)
    texts: list[tuple[float, str]] = field(default_factory=list)  # (epoch, what the model wrote)
    evaluation: Evaluation | None = None
    overrides: list[str] | None = None

    @property
    def best(self) -> Best | None:
        """The evaluation whose weights were kept; None if unknown."""
        if self.has_ended:
            return best_of(self.result, self.rows)
        return best_so_far(self.config, self.rows)

    @property
    def total_steps(self) -> int | None:
        return self.result.total_steps or self.status.total_steps

    @property
    def step(self) -> float:
        """The step of the last row, or of the later checkpoint of an interrupted run."""
        if self.result.steps is not None:
            return self.result.steps
        steps = [row.get("step", 0) for row in self.rows]
        return max([*steps, *checkpoints(self.folder)], default=0)


def read_run(folder: str | Path, state: str | None = None) -> Run:
    """Read a run directory; UserError if it has no config.yaml of a run.

    The process that trains the run knows its `state`.
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
        rows=read_rows(folder / directory.METRICS),
        texts=read_texts(folder / directory.SAMPLES),
        evaluation=read_evaluation(folder / directory.EVALUATION),
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
        if min(row.get("epoch", -1), row.get("step", -1)) >= 0:
            rows.append(row)
    return rows


def read_texts(path: Path) -> list[tuple[float, str]]:
    """Return (epoch, text) of at most MOST_TEXTS rows of a samples.jsonl, spread over all."""
    texts = []
    for row in read_lines(path):
        if is_number(row.get("epoch")) and isinstance(row.get("text"), str):
            texts.append((row["epoch"], shortened(row["text"], MOST_SAMPLE)))
    shown = min(len(texts), MOST_TEXTS)
    return [texts[round(i * (len(texts) - 1) / max(1, shown - 1))] for i in range(shown)]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines; of very many, those of evaluations and some."""
    try:
        lines = files.read(path, MOST_BYTES).splitlines()
    except OSError:
        return
    every = math.ceil(len(lines) / MOST_ROWS)
    lines = [line for i, line in enumerate(lines) if i % every == 0 or b'"val/' in line]
    for line in lines[-2 * MOST_ROWS :]:
        try:
            entries = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entries, dict):
            yield entries


def best_of(result: RunResult, rows: list[Row]) -> Best | None:
    """Return the best evaluation of a run that has ended."""
    best = result.best
    if best is None or best.step is None:
        return None
    epochs = [row["epoch"] for row in rows if row.get("step") == best.step and best.name in row]
    epoch = epochs[0] if epochs else None
    return Best(best.name, best.value, best.mode == "max", epoch, best.step)


def best_so_far(config: dict[str, Any], rows: list[Row]) -> Best | None:
    """Return the best evaluation by the run's monitor, if it is known whether higher is better."""
    name = str(config.get("monitor"))
    if name == "auto":
        name = next((metric for metric in BETTER if any(metric in row for row in rows)), "")
    mode = config.get("monitor_mode")
    if mode == "auto":
        mode = BETTER.get(name)
    evaluated = [row for row in rows if name in row]
    if not evaluated or mode not in ("max", "min"):
        return None
    choose = max if mode == "max" else min
    row = choose(evaluated, key=lambda row: row[name])
    return Best(name, row[name], mode == "max", row["epoch"], row.get("step"))


def read_evaluation(path: Path) -> Evaluation | None:
    """Return the evaluation in evaluation.json; None if it is malformed."""
    try:
        return evaluation_of(json.loads(files.read(path, MOST_JSON)))
    except (OSError, ValueError, RecursionError, TypeError):
        return None


def evaluation_of(entries: Any) -> Evaluation:
    """Return the evaluation in a JSON object; TypeError or ValueError if it is malformed.

    Malformed points and samples are left out, such as predictions that are not finite.
    """
    lists = dict.fromkeys(LISTS)
    evaluation: Evaluation = typed({"unit": UNITS[0], **entries, **lists}, Evaluation)
    classes = [shortened(name, MOST_NAME) for name in evaluation.classes or []]
    evaluation.classes = classes
    evaluation.target = one_line(evaluation.target)
    is_known = evaluation.split in SPLITS and evaluation.samples > 0
    is_known = is_known and evaluation.unit in UNITS
    if evaluation.kind == "regression":
        evaluation.points = list(filter(is_pair, evaluation.points or []))
    elif evaluation.kind != "classification" or not classes:
        is_known = False
    if evaluation.confusion is not None:
        is_known = is_known and is_confusion(evaluation.confusion, len(classes))
    for counts in (evaluation.confidence, evaluation.second):
        is_known = is_known and (counts is None or are_bins(counts))
    if evaluation.second is not None:
        is_known = is_known and len(classes) == 2
    if evaluation.chance is not None:
        is_known = is_known and 0 < evaluation.chance <= 1
    if not is_known:
        raise ValueError
    for name in LISTS:
        setattr(evaluation, name, samples_of(entries.get(name), evaluation))
    return evaluation


def is_pair(value: Any) -> bool:
    """Whether this is [true numbers, as many predicted numbers]."""
    try:
        true, predicted = typed(value, list[list[float]])
    except (TypeError, ValueError):
        return False
    return len(true) == len(predicted) <= MOST_NUMBERS


def is_confusion(counts: list[list[int]], size: int) -> bool:
    """Whether these are counts of each pair of classes, not all of them 0."""
    if [len(row) for row in counts] != [size] * size:
        return False
    return min(map(min, counts)) >= 0 and sum(map(sum, counts)) > 0


def are_bins(counts: list[list[int]]) -> bool:
    """Whether these are the samples of each bin, and a part of them."""
    if len(counts) != 2 or not 10 <= len(counts[0]) == len(counts[1]) <= MOST_BINS:
        return False
    return all(0 <= part <= whole for whole, part in zip(*counts, strict=True))


def samples_of(entries: Any, evaluation: Evaluation) -> list[Sample]:
    """Return the samples that are well-formed."""
    samples = []
    for entry in typed(entries or [], list[Any])[:MOST_SAMPLES]:
        try:
            sample: Sample = typed(entry, Sample)
        except TypeError:
            continue
        labels = [sample.true, sample.predicted]
        is_known = True
        if evaluation.kind == "regression":
            is_known = is_pair(labels)
        elif evaluation.unit == "samples":
            places = range(len(evaluation.classes or []))
            is_known = all(isinstance(label, int) and label in places for label in labels)
        if is_known and has_sound_positions(sample):
            samples.append(sample)
    return samples


def has_sound_positions(sample: Sample) -> bool:
    """Whether its tokens, if any, have one loss each, and its masks are two pictures or none."""
    tokens = [shortened(token, MOST_TOKEN) for token in sample.tokens or []]
    sample.tokens = tokens[:MOST_TOKENS]
    masks = sample.masks or []
    if len(masks) not in (0, 2) or not all(map(is_small_png, masks)):
        return False
    return len(sample.tokens) == len(sample.losses or [])


def is_small_png(text: str) -> bool:
    """Whether this is a small PNG in base64, with nothing in it but pixels."""
    from PIL import Image

    try:
        data = base64.b64decode(text, validate=True)
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if len(data) > MOST_PNG or max(image.size) > MOST_SIDE:
                return False
            image.load()
            has_more = image.info or getattr(image, "private_chunks", None)
            return not has_more and data.endswith(END_OF_PNG)
    except Exception:  # the errors for damaged files are undocumented
        return False
