"""Examine the best weights while they are tested: the classes confused, the hardest samples, the
errors.
"""

import base64
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.data.record import Data
from stoker.data.splits import Split
from stoker.runs.evaluation import Evaluation, Sample
from stoker.runs.json_files import finite
from stoker.trainer import parallel
from stoker.trainer.errors import printable
from stoker.trainer.files import write_text
from stoker.trainer.metrics import class_of, default_metrics, wide
from stoker.trainer.trainer import Trainer

NAME = "examined"  # among the trainer's metrics, during that evaluation
MOST_CLASSES = 1000  # of a confusion matrix, which has the square of it
MOST_SAMPLES = 16  # of the worst, and of the most uncertain
MOST_POINTS = 2000  # (true, predicted) of a regression, evenly spread over the split
MOST_TARGETS = 8  # numbers per sample of a regression that are kept
MOST_COLUMNS = 12  # of a table's row
SIDE = 64  # pixels of a picture's longer side


class Examination:
    """A metric without a value of its own, which keeps a row of numbers for each sample.

    It does not wait for the device. In several processes, `loader` deals out each of its batches.
    """

    higher_is_better = None
    width: int  # of a row

    def __init__(self, split: str, loader: Any, data: Data) -> None:
        self.split = split
        self.data = data
        size = loader.batch_size
        self.sizes = [min(size, loader.samples - i) for i in range(0, loader.samples, size)]
        self.reset()

    def reset(self) -> None:
        self.rows: list[Tensor] = []
        self.is_usual = True
        # None where the outputs are not one row of numbers per sample.
        self.evaluation: Evaluation | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        if (
            not isinstance(outputs, Tensor)
            or not isinstance(targets, Tensor)
            or outputs.shape != (len(targets), self.data.num_classes)
        ):
            self.is_usual = False
        else:
            self.rows.append(self.rows_of(outputs.detach(), targets))

    def compute(self) -> float:
        """Make the record, and return nan; all processes have to call this."""
        usual_ranks = parallel.add_up(int(self.is_usual))
        if usual_ranks == parallel.ranks():
            rows = torch.empty(0, self.width)
            if self.rows:
                rows = torch.cat(self.rows).cpu()
            rows = parallel.gather(rows.double(), self.sizes)
            self.evaluation = Evaluation(self.split, self.data.kind, len(rows))
            if self.data.table is not None:
                self.evaluation.target = self.data.table["target"]
            self.complete(self.evaluation, rows)
        return math.nan

    def rows_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the rows (N, width) of a batch."""
        raise NotImplementedError

    def complete(self, evaluation: Evaluation, rows: Tensor) -> None:
        """Add what the rows of all samples, in their order, show to the record."""
        raise NotImplementedError


def highest(values: Tensor) -> list[int]:
    """Return the places of the highest values; the first of equal ones, and nan is the highest."""
    order = values.argsort(descending=True, stable=True)
    return order[:MOST_SAMPLES].tolist()


class Classes(Examination):
    """The confusion matrix, and the samples with the highest loss and the highest entropy.

    The loss is minus the logarithm of the true class's probability, whatever the model was trained
    with.
    """

    width = 5

    def rows_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logs = wide(outputs).log_softmax(-1)
        shares = logs.exp()
        true = class_of(targets, outputs)
        predicted = outputs.argmax(-1)
        probability = one_per_row(shares, predicted)
        losses = -one_per_row(logs, true)
        entropy = torch.special.entr(shares).sum(-1)
        return torch.stack([true, predicted, probability, losses, entropy], 1)

    def complete(self, evaluation: Evaluation, rows: Tensor) -> None:
        classes = self.data.num_classes
        evaluation.classes = list(map(str, self.data.classes or range(classes)))
        true, predicted = rows[:, :2].long().unbind(1)
        evaluation.chance = true.bincount().max().item() / len(rows)
        if 2 <= classes <= MOST_CLASSES:
            counts = (true * classes + predicted).bincount(minlength=classes**2)
            evaluation.confusion = counts.view(classes, classes).tolist()
        evaluation.worst = [classified(i, rows[i]) for i in highest(rows[:, 3])]
        evaluation.uncertain = [classified(i, rows[i]) for i in highest(rows[:, 4])]


def one_per_row(values: Tensor, classes: Tensor) -> Tensor:
    """Return the value of each row's class."""
    return values.gather(1, classes.unsqueeze(1)).squeeze(1)


def classified(index: int, row: Tensor) -> Sample:
    """Return the sample of a row of `Classes`."""
    true, predicted, *measures = row.tolist()
    return Sample(index, int(true), int(predicted), *measures)


class Numbers(Examination):
    """Evenly spread (true, predicted) of a regression, and the samples with the highest mean
    squared error.

    The record has the first `MOST_TARGETS` of several targets, in the user's units.
    """

    def __init__(self, split: str, loader: Any, data: Data) -> None:
        super().__init__(split, loader, data)
        self.targets = min(data.num_classes, MOST_TARGETS)
        self.width = 1 + 2 * self.targets

    def rows_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        true = wide(targets)
        predicted = wide(outputs)
        losses = (predicted - true).square().mean(1, keepdim=True)
        return torch.cat([losses, true[:, : self.targets], predicted[:, : self.targets]], 1)

    def complete(self, evaluation: Evaluation, rows: Tensor) -> None:
        scale = self.per_target(self.data.target_scale)
        pairs = rows[:, 1:].view(-1, 2, self.targets) * scale
        pairs += self.per_target(self.data.target_mean)
        evaluation.standardised = bool((scale != 1).any())
        every = math.ceil(len(rows) / MOST_POINTS)
        evaluation.points = pairs[::every].tolist()
        losses = rows[:, 0]
        evaluation.worst = []
        for i in highest(losses):
            true, predicted = pairs[i].tolist()
            evaluation.worst.append(Sample(i, true, predicted, loss=losses[i].item()))

    def per_target(self, value: float | list[float] | Tensor) -> Tensor:
        """Return a number or one per target as one for each that is kept."""
        values = torch.as_tensor(value, dtype=torch.float64)
        return values.expand(self.data.num_classes)[: self.targets]


def evaluate(
    trainer: Trainer, loader: Any, split: str, data: Data
) -> tuple[dict[str, float], Evaluation | None]:
    """Return what `trainer.evaluate` returns, and the record for `write`.

    The record is None if a subclass of the Trainer may mean something else by outputs, or if the
    model or the loss has other outputs than usual.
    """
    if not is_usual(trainer, data):
        return trainer.evaluate(loader, split), None
    kind = Classes if data.kind == "classification" else Numbers
    examination = kind(split, loader, data)
    trainer.metrics[NAME] = examination
    try:
        results = trainer.evaluate(loader, split)
    finally:
        del trainer.metrics[NAME]
    del results[f"{split}/{NAME}"]
    return results, examination.evaluation


def is_usual(trainer: Trainer, data: Data) -> bool:
    """Whether the trainer evaluates as Trainer does, with the default metrics of this data."""
    kind = type(trainer)
    if kind.evaluate is not Trainer.evaluate:
        return False
    if kind.update_metrics is not Trainer.update_metrics:
        return False
    needed = default_metrics(data.kind)
    return needed.keys() <= trainer.metrics.keys()


def write(path: Path, evaluation: Evaluation, data: Data) -> None:
    """Write evaluation.json: the record, with each of its samples as it can be shown."""
    part = data.parts()[evaluation.split]
    for samples in (evaluation.worst, evaluation.uncertain):
        for sample in samples or []:
            show(sample, part, data)
    contents = dataclasses.asdict(evaluation, dict_factory=without_none)
    text = json.dumps(finite(contents), separators=(",", ":"))
    write_text(path, f"{text}\n")


def without_none(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in entries if value is not None}


def show(sample: Sample, part: Split, data: Data) -> None:
    """Add the file, the line, the picture and the columns of a sample, as far as its split has
    them.
    """
    index = sample.index
    files: Any = getattr(part, "files", None)
    if hasattr(files, "root"):
        path = Path(files[index])
        sample.file = printable(path.relative_to(files.root))
    lines = getattr(part, "lines", None)
    if lines is not None:
        sample.line = int(lines[index])
    with torch.random.fork_rng(devices=[]):  # your own split may draw
        inputs, _ = part[[index]]
    if not isinstance(inputs, Tensor):
        return
    if inputs.ndim == 4:
        sample.png = png(inputs[0])
    elif inputs.ndim == 2:
        sample.columns = columns(inputs[0], data)


def png(image: Tensor) -> str:
    """Return a small PNG of an image (C, H, W), as base64: grey, or its first three channels.

    uint8 stays as it is; floats are scaled from the lowest to the highest.
    """
    from PIL import Image

    image = image.detach().cpu()
    if image.dtype != torch.uint8:
        low = image.min()
        span = image.max() - low
        shares = (image - low) / span.clamp_min(1e-12)
        image = (shares * 255).round().to(torch.uint8)
    pixels = image[:3].permute(1, 2, 0) if len(image) >= 3 else image[0]
    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    png = stream.getvalue()
    return base64.b64encode(png).decode()


def columns(inputs: Tensor, data: Data) -> dict[str, Any]:
    """Return {column: value} of a table's row; of other vectors their numbers."""
    values = inputs.tolist()
    if data.table is None:
        first = enumerate(values[:MOST_COLUMNS])
        return {f"x{i}": float(f"{value:.4g}") for i, value in first}
    fills_in = data.table.get("missing") == "mean"
    row: dict[str, Any] = {}
    place = 0
    for column in data.table["columns"][:MOST_COLUMNS]:
        categories = column.get("categories")
        if categories is None:
            row[column["name"]] = in_file(values[place], column, fills_in)
            place += 1
        else:
            end = place + len(categories)
            block = values[place:end]
            row[column["name"]] = categories[block.index(1)] if 1 in block else ""
            place = end
    return row


def in_file(value: float, column: dict[str, Any], fills_in: bool) -> float | str:
    """Return what a table's file has for a standardised value, which is 0 for a missing one that
    was filled in.
    """
    mean = column["mean"]
    if fills_in and value == 0:
        return f"{mean:.6g} (the mean)"
    return as_written(value, mean, column["std"])


def as_written(value: float, mean: float, std: float) -> float:
    """Return the number with the fewest decimals whose standardised value this is: float32 lost
    those of the file.
    """
    number = value * std + mean
    for digits in range(-15, 31):
        rounded = round(number, digits)
        standardised = (rounded - mean) / std
        if torch.tensor(standardised, dtype=torch.float32).item() == value:
            break
    return rounded + 0.0  # 0.0 for -0.0
