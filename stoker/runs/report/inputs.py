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
from stoker.runs.report.words import one_line, shortened
from stoker.runs.result import RunResult
from stoker.runs.status import Status
from stoker.trainer import checkpoint_names, files
from stoker.trainer.typed import is_number, typed

MOST_BYTES = 2**25  # size of a metrics.jsonl that is read in full
MOST_ROWS = 100_000  # of a larger file, keep the evaluation rows and some of the others
MOST_TEXTS = 5  # a language model's texts, from the first to the last
MOST_SAMPLE = 2000  # characters in each text
MOST_JSON = 2**24  # bytes in an evaluation.json: 1,000 classes take 2 MB
MOST_TYPED = 10_000  # characters in the overrides
MOST_NAME = 100  # characters in a class name, which appears in several places
MOST_SAMPLES = 24  # worst samples, and as many uncertain ones
MOST_NUMBERS = 100  # targets in a regression
MOST_BINS = 1000  # bins for a probability
MOST_PNG = 2**15  # bytes in a picture
MOST_SIDE = 256  # pixels in a picture
END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"
MOST_TOKENS = 200  # tokens in a sequence
MOST_TOKEN = 20  # characters in a token
UNITS = ("samples", "tokens", "pixels")  # things that a class can be predicted for
LISTS = ("worst", "uncertain", "random")  # lists of samples
SPLITS = {"train": "training", "val": "validation", "test": "test"}  # names of the splits
BETTER = {
    "val/perplexity": "min",
    "val/miou": "max",
    "val/acc": "max",
    "val/r2": "max",
    "val/loss": "min",
}  # metrics that monitor=auto chooses from

Row = dict[str, float]  # a row of metrics.jsonl, numbers only; it has an "epoch"


@dataclass
class Best:
    """The best evaluation of a run; `epoch` and `step` are None if no row has it."""

    name: str
    value: float
    is_high: bool | None  # whether higher is better, if known
    epoch: float | None
    step: float | None = None


@dataclass
class Run:
    """The files of a run directory. `config` is flat; `overrides` is None if unknown."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    result: RunResult = field(default_factory=RunResult)
    has_ended: bool = False  # whether result.json exists
    state: str = "stopped"  # or "running", "failed", "done"
    status: Status = field(default_factory=Status)
    rows: list[Row] = field(default_factory=list)
    texts: list[tuple[float, str]] = field(default_factory=list)  # (epoch, text)
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
        steps = [row["step"] for row in self.rows]
        steps += checkpoints(self.folder)
        return max(steps, default=0)


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
        has_epoch = row.get("epoch", -1) >= 0
        if has_epoch and row.get("step", -1) >= 0:
            rows.append(row)
    return rows


def read_texts(path: Path) -> list[tuple[float, str]]:
    """Return (epoch, text) of at most MOST_TEXTS rows of a samples.jsonl, spread over all."""
    texts = []
    for row in read_lines(path):
        if is_number(row.get("epoch")) and isinstance(row.get("text"), str):
            texts.append((row["epoch"], shortened(row["text"], MOST_SAMPLE)))
    if len(texts) <= MOST_TEXTS:
        return texts
    every = (len(texts) - 1) / (MOST_TEXTS - 1)
    return [texts[round(i * every)] for i in range(MOST_TEXTS)]


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
    shown = Best(best.name, best.value, best.mode == "max", None, best.step)
    for row in rows:
        if row["step"] == best.step and best.name in row:
            shown.epoch = row["epoch"]
            break
    return shown


def best_so_far(config: dict[str, Any], rows: list[Row]) -> Best | None:
    """Return the best evaluation by the run's monitor, if it is known whether higher is better."""
    name = config.get("monitor")
    mode = config.get("monitor_mode")
    names = BETTER if name == "auto" else [str(name)]
    for name in names:
        evaluated = [row for row in rows if name in row]
        if evaluated:
            break
    else:
        return None
    if mode == "auto":
        mode = BETTER.get(name)
    if mode not in ("max", "min"):
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
    if evaluation.kind == "regression":
        evaluation.points = list(filter(is_pair, evaluation.points or []))
    is_known = [
        evaluation.split in SPLITS,
        evaluation.samples > 0,
        evaluation.unit in UNITS,
        evaluation.kind == "regression" or (evaluation.kind == "classification" and classes),
        evaluation.confusion is None or is_confusion(evaluation.confusion, len(classes)),
        evaluation.confidence is None or are_bins(evaluation.confidence),
        evaluation.second is None or (are_bins(evaluation.second) and len(classes) == 2),
        evaluation.chance is None or 0 < evaluation.chance <= 1,
    ]
    if not all(is_known):
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
    if len(counts) != size:
        return False
    for row in counts:
        if len(row) != size or min(row) < 0:
            return False
    return sum(map(sum, counts)) > 0


def are_bins(counts: list[list[int]]) -> bool:
    """Whether these are the sample counts of bins, and counts of some of those samples."""
    if len(counts) != 2:
        return False
    wholes, parts = counts
    if len(wholes) != len(parts) or not 10 <= len(wholes) <= MOST_BINS:
        return False
    return all(0 <= part <= whole for whole, part in zip(wholes, parts, strict=True))


def samples_of(entries: Any, evaluation: Evaluation) -> list[Sample]:
    """Return the samples that are well-formed."""
    samples = []
    for entry in typed(entries or [], list[Any])[:MOST_SAMPLES]:
        try:
            sample: Sample = typed(entry, Sample)
        except TypeError:
            continue
        if has_sound_labels(sample, evaluation) and has_sound_positions(sample):
            samples.append(sample)
    return samples


def has_sound_labels(sample: Sample, evaluation: Evaluation) -> bool:
    """Whether the true and the predicted label are numbers of a target, or classes."""
    if evaluation.kind == "regression":
        return is_pair([sample.true, sample.predicted])
    if evaluation.unit != "samples":
        return True
    places = range(len(evaluation.classes or []))
    for label in (sample.true, sample.predicted):
        if not isinstance(label, int) or label not in places:
            return False
    return True


def has_sound_positions(sample: Sample) -> bool:
    """Whether its tokens, if any, have one loss each, and its masks are two pictures or none."""
    tokens = [shortened(token, MOST_TOKEN) for token in sample.tokens or []]
    sample.tokens = tokens[:MOST_TOKENS]
    losses = sample.losses or []
    if len(sample.tokens) != len(losses):
        return False
    masks = sample.masks or []
    if len(masks) not in (0, 2):
        return False
    return all(map(is_small_png, masks))


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
