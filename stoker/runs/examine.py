"""Examine the best weights while they are tested: the classes confused, the hardest samples, the errors."""

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
from stoker.trainer import launch, parallel
from stoker.trainer.errors import printable
from stoker.trainer.files import write_text
from stoker.trainer.metrics import Confusion, class_of, default_metrics, wide
from stoker.trainer.trainer import Trainer

NAME = "examined"  # among the trainer's metrics, during that evaluation
MOST_CLASSES = 1000  # of a confusion matrix, which has the square of it
MOST_SAMPLES = 16  # of the worst, and of the most uncertain
MOST_POINTS = 2000  # (true, predicted) of a regression, evenly spread over the split
MOST_TARGETS = 8  # numbers per sample of a regression that are kept
MOST_COLUMNS = 12  # of a table's row
SIDE = 64  # pixels of a picture's longer side


class Highest:
    """The `MOST_SAMPLES` rows with the highest value in a column, of all batches and processes.

    Of equal values the first one wins; nan is the highest value.
    """

    def __init__(self, column: int, width: int) -> None:
        self.column = column
        self.width = width
        self.kept: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Take the rows of a batch, without waiting for the device."""
        rows = torch.cat([*self.kept, rows])
        self.kept = [self.select(rows)]

    def compute(self) -> list[list[float]]:
        """Return the rows, the highest first; all processes have to call this."""
        rows = gather(self.kept, MOST_SAMPLES, self.width)
        return self.select(rows).tolist()

    def select(self, rows: Tensor) -> Tensor:
        values = rows[:, self.column]
        order = values.argsort(descending=True, stable=True)
        return rows.index_select(0, order[:MOST_SAMPLES])


class Examination:
    """A metric without a value of its own, which makes the record of an evaluation.

    It does not wait for the device, and takes the same memory for any size of a split. A sample's number in the split
    comes from the order of the batches, all but the last of which have `batch_size` samples; of each batch a process
    has every `ranks`-th sample. (float32, the widest type of mps, counts up to 2**24.)
    """

    higher_is_better = None

    def __init__(self, split: str, loader: Any, data: Data) -> None:
        self.split = split
        self.data = data
        self.samples: int = loader.samples
        self.batch_size: int = loader.batch_size
        self.ranks = parallel.ranks()
        self.rank = launch.rank() if self.ranks > 1 else 0
        share = len(range(self.rank, self.batch_size, self.ranks))
        self.share = max(1, share)
        self.reset()

    def reset(self) -> None:
        self.count = 0  # samples of this process so far
        self.is_usual = True
        # None where the outputs are not one row of numbers per sample.
        self.evaluation: Evaluation | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            self.is_usual = False
            return
        size = len(outputs)
        shape = (len(targets), self.data.num_classes)
        if outputs.shape != shape:
            self.is_usual = False
        if self.is_usual:
            samples = torch.arange(self.count, self.count + size, device=outputs.device)
            self.add(outputs.detach(), targets, self.numbers(samples))
            self.count += size

    def numbers(self, samples: Tensor) -> Tensor:
        """Return the places in the split of samples of this process."""
        batches = samples // self.share
        places = samples % self.share * self.ranks + self.rank
        return batches * self.batch_size + places

    def compute(self) -> float:
        """Make the record, and return nan; all processes have to call this."""
        usual_ranks = parallel.add_up(int(self.is_usual))
        if usual_ranks == self.ranks:
            data = self.data
            self.evaluation = Evaluation(self.split, data.kind, self.samples)
            if data.table is not None:
                self.evaluation.target = data.table["target"]
            self.complete(self.evaluation)
        return math.nan

    def add(self, outputs: Tensor, targets: Tensor, numbers: Tensor) -> None:
        """Take a batch whose samples have these numbers."""
        raise NotImplementedError

    def complete(self, evaluation: Evaluation) -> None:
        """Add what the batches have shown to the record."""
        raise NotImplementedError


class Classes(Examination):
    """The confusion matrix, and the samples with the highest loss and the highest entropy.

    The loss is minus the logarithm of the true class's probability, whatever the model was trained with.
    """

    def reset(self) -> None:
        super().reset()
        self.worst = Highest(column=4, width=6)
        self.uncertain = Highest(column=5, width=6)
        self.confusion: Confusion | None = None
        classes = self.data.num_classes
        if 2 <= classes <= MOST_CLASSES:
            self.confusion = Confusion(classes)

    def add(self, outputs: Tensor, targets: Tensor, numbers: Tensor) -> None:
        logs = wide(outputs).log_softmax(-1)
        shares = logs.exp()
        true = class_of(targets, outputs)
        predicted = outputs.argmax(-1)
        probability = one_per_row(shares, predicted)
        losses = -one_per_row(logs, true)
        entropy = torch.special.entr(shares).sum(-1)
        columns = [numbers, true, predicted, probability, losses, entropy]
        rows = torch.stack([column.to(losses.dtype) for column in columns], 1)
        self.worst.add(rows)
        self.uncertain.add(rows)
        if self.confusion is not None:
            self.confusion.update(outputs, targets)

    def complete(self, evaluation: Evaluation) -> None:
        data = self.data
        classes = data.num_classes
        evaluation.classes = list(map(str, data.classes or range(classes)))
        labels = data.parts()[self.split].targets
        counts = torch.bincount(labels, minlength=classes)
        evaluation.chance = counts.max().item() / self.samples
        if self.confusion is not None:
            evaluation.confusion = self.confusion.compute().tolist()
        evaluation.worst = list(map(classified, self.worst.compute()))
        evaluation.uncertain = list(map(classified, self.uncertain.compute()))


def one_per_row(values: Tensor, classes: Tensor) -> Tensor:
    """Return the value of each row's class."""
    values = values.gather(1, classes.unsqueeze(1))
    return values.squeeze(1)


def classified(row: list[float]) -> Sample:
    """Return the sample of a row of `Classes`."""
    index, true, predicted, probability, loss, entropy = row
    return Sample(int(index), int(true), int(predicted), probability, loss, entropy)


class Numbers(Examination):
    """Evenly spread (true, predicted) of a regression, and the samples with the highest mean squared error.

    The record has the first `MOST_TARGETS` of several targets, in the user's units.
    """

    def __init__(self, split: str, loader: Any, data: Data) -> None:
        self.targets = min(data.num_classes, MOST_TARGETS)
        super().__init__(split, loader, data)

    def reset(self) -> None:
        super().reset()
        self.worst = Highest(column=1, width=2 + 2 * self.targets)
        self.points: list[Tensor] = []
        every = math.ceil(self.samples / MOST_POINTS)
        self.every = max(1, every)

    def add(self, outputs: Tensor, targets: Tensor, numbers: Tensor) -> None:
        true = wide(targets)
        predicted = wide(outputs)
        losses = (predicted - true).square().mean(1)
        pairs = torch.stack([true, predicted], 1)
        pairs = pairs[..., : self.targets].flatten(1)
        columns = [numbers.to(losses.dtype), losses, *pairs.unbind(1)]
        self.worst.add(torch.stack(columns, 1))
        start = -self.count % self.every
        self.points.append(pairs[start :: self.every])

    def complete(self, evaluation: Evaluation) -> None:
        scale = torch.as_tensor(self.data.target_scale)
        evaluation.standardised = bool((scale != 1).any())
        points = gather(self.points, MOST_POINTS + 1, 2 * self.targets)
        evaluation.points = self.in_units(points)
        evaluation.worst = []
        for index, loss, *numbers in self.worst.compute():
            row = torch.tensor(numbers, dtype=torch.float64)
            [(true, predicted)] = self.in_units(row)
            sample = Sample(int(index), true, predicted, loss=loss)
            evaluation.worst.append(sample)

    def in_units(self, rows: Tensor) -> list[list[list[float]]]:
        """Return [true numbers, predicted numbers] of each row, in the user's units."""
        scale = self.per_target(self.data.target_scale)
        mean = self.per_target(self.data.target_mean)
        pairs = rows.view(-1, 2, self.targets) * scale + mean
        return pairs.tolist()

    def per_target(self, value: float | list[float] | Tensor) -> Tensor:
        """Return a number or one per target as one for each that is kept."""
        values = torch.as_tensor(value, dtype=torch.float64)
        return values.expand(self.data.num_classes)[: self.targets]


def gather(batches: list[Tensor], most: int, width: int) -> Tensor:
    """Return the rows (n, width) of all processes, as float64 on the CPU; each process has at most `most`."""
    rows = torch.empty(0, width, dtype=torch.float64)
    if batches:
        rows = torch.cat(batches).cpu().double()
    if parallel.ranks() == 1:
        return rows
    slots = torch.zeros(launch.world_size(), most, 1 + width, dtype=torch.float64)
    slot = slots[launch.rank(), : len(rows)]
    slot[:, 0] = 1  # taken
    slot[:, 1:] = rows
    slots = parallel.add_up(slots).flatten(0, 1)
    is_taken = slots[:, 0] == 1
    return slots[is_taken, 1:]


def evaluate(
    trainer: Trainer, loader: Any, split: str, data: Data
) -> tuple[dict[str, float], Evaluation | None]:
    """Return what `trainer.evaluate` returns, and the record for `write`.

    The record is None if a subclass of the Trainer may mean something else by outputs, or if the model or the loss has
    other outputs than usual.
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
    """Add the file, the line, the picture and the columns of a sample, as far as its split has them."""
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
    """Return what a table's file has for a standardised value, which is 0 for a missing one that was filled in."""
    mean = column["mean"]
    if fills_in and value == 0:
        return f"{mean:.6g} (the mean)"
    return as_written(value, mean, column["std"])


def as_written(value: float, mean: float, std: float) -> float:
    """Return the number with the fewest decimals whose standardised value this is: float32 lost those of the file."""
    number = value * std + mean
    for digits in range(-15, 31):
        rounded = round(number, digits)
        standardised = (rounded - mean) / std
        if torch.tensor(standardised, dtype=torch.float32).item() == value:
            break
    return rounded + 0.0  # 0.0 for -0.0
