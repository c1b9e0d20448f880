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
from torch.nn import functional

from stoker.data.record import Data
from stoker.data.splits import Split
from stoker.runs.evaluation import Evaluation, Sample, class_colour
from stoker.runs.json_files import finite
from stoker.trainer import launch, parallel
from stoker.trainer.errors import printable
from stoker.trainer.files import write_text
from stoker.trainer.losses import IGNORED
from stoker.trainer.metrics import Confusion, class_of, default_metrics, wide
from stoker.trainer.trainer import Trainer

NAME = "examined"  # this metric's name during that evaluation
MOST_CLASSES = 1000  # classes in a confusion matrix, whose size is the square of this
MOST_SAMPLES = 16  # samples in each list: the worst, and the most uncertain
MOST_POINTS = 2000  # (true, predicted) pairs of a regression, evenly spread over the split
MOST_TARGETS = 8  # target values kept per sample of a regression
MOST_COLUMNS = 12  # columns shown of a table's row
SIDE = 64  # pixels on a picture's longer side
BINS = 200  # bins for a probability
MOST_TOKENS = 200  # tokens shown of a sequence


class Examination:
    """A metric without a value of its own, which keeps what the record shows of the samples.

    That takes the same memory for any number of samples, and does not wait for the device. In
    several processes, `loader` deals out each of its batches.
    """

    higher_is_better = None

    def __init__(self, split: str, loader: Any, data: Data) -> None:
        self.split = split
        self.data = data
        self.batch_size: int = loader.batch_size  # over all processes
        self.order: Tensor | None = None  # the samples chosen by limit_val
        if loader.samples < getattr(loader, "whole", 0):
            self.order = loader.order(0)
        self.reset()

    def reset(self) -> None:
        self.samples = 0  # samples seen by this process
        self.is_usual = True
        # None if the outputs are not one row of numbers per sample.
        self.evaluation: Evaluation | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        if (
            not isinstance(outputs, Tensor)
            or not isinstance(targets, Tensor)
            or outputs.shape != (len(targets), self.data.num_classes, *self.positions(targets))
        ):
            self.is_usual = False
        else:
            indices = self.indices(len(targets), outputs.device)
            self.keep(indices, outputs.detach(), targets)
            self.samples += len(targets)

    def positions(self, targets: Tensor) -> tuple[int, ...]:
        """Return the shape of a sample's classes: () unless each token or pixel has one."""
        return ()

    def indices(self, count: int, device: torch.device) -> Tensor:
        """Return the places in the split of the next samples of this process."""
        of_batch = range(launch.rank(), self.batch_size, parallel.ranks())
        places = torch.arange(self.samples, self.samples + count, device=device)
        batches = places // len(of_batch)
        within = places % len(of_batch) * of_batch.step + of_batch.start
        return batches * self.batch_size + within

    def compute(self) -> float:
        """Make the record, and return nan; all processes have to call this."""
        usual_ranks = parallel.add_up(int(self.is_usual))
        if usual_ranks == parallel.ranks():
            samples = parallel.add_up(self.samples)
            self.evaluation = Evaluation(self.split, self.data.kind, samples)
            if self.data.table is not None:
                self.evaluation.target = self.data.table["target"]
            self.complete(self.evaluation)
        return math.nan

    def keep(self, indices: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Keep what the record shows of a batch, with the places of its samples in the split."""
        raise NotImplementedError

    def complete(self, evaluation: Evaluation) -> None:
        """Add what was kept to the record."""
        raise NotImplementedError


class Highest:
    """The rows with the highest numbers in a column, of equal ones the first; nan is the highest.

    The places of their samples in the split are integers: float32 would round those above 2**24.
    """

    def __init__(self, width: int, column: int) -> None:
        self.width = width
        self.column = column
        self.places: Tensor | None = None
        self.rows: Tensor | None = None

    def update(self, places: Tensor, rows: Tensor) -> None:
        """Choose from the rows of a batch and those that were kept."""
        if self.places is None or self.rows is None:
            self.places = places.new_full((MOST_SAMPLES,), -1)  # no index
            self.rows = rows.new_full((MOST_SAMPLES, self.width), -1.0)  # less than any number
        rows = torch.cat([self.rows, rows])
        highest = self.highest(rows)
        self.places = torch.cat([self.places, places])[highest]
        self.rows = rows[highest]

    def highest(self, rows: Tensor) -> Tensor:
        order = rows[:, self.column].argsort(descending=True, stable=True)
        return order[:MOST_SAMPLES]

    def over_ranks(self) -> Tensor:
        """Return the rows of all processes on the CPU, each behind the place of its sample.

        All of them have to call this.
        """
        kept = torch.full((MOST_SAMPLES, 1 + self.width), -1.0, dtype=torch.float64)
        if self.places is not None and self.rows is not None:
            kept[:, 0] = self.places
            kept[:, 1:] = self.rows
        kept = torch.cat(parallel.from_all(kept))
        kept = kept[kept[:, 0].argsort()]
        kept = kept[self.highest(kept[:, 1:])]
        return kept[kept[:, 0] >= 0]


class Classes(Examination):
    """The confusion matrix, and the samples with the highest loss and the highest entropy.

    The loss is minus the logarithm of the true class's probability, whatever the model was trained
    with.
    """

    def reset(self) -> None:
        super().reset()
        self.worst = Highest(width=6, column=3)
        self.uncertain = Highest(width=6, column=4)
        self.random = Highest(width=6, column=5)
        self.bins: Tensor | None = None
        self.confusion: Confusion | None = None
        if 2 <= self.data.num_classes <= MOST_CLASSES:
            self.confusion = Confusion(self.data.num_classes)

    def keep(self, indices: Tensor, outputs: Tensor, targets: Tensor) -> None:
        logs = wide(outputs).log_softmax(-1)
        shares = logs.exp()
        true = class_of(targets, outputs)
        predicted = outputs.argmax(-1)
        probability = one_per_row(shares, predicted)
        losses = -one_per_row(logs, true)
        entropy = torch.special.entr(shares).sum(-1)
        order = shuffled(indices)
        rows = torch.stack([true, predicted, probability, losses, entropy, order], 1)
        self.worst.update(indices, rows)
        self.uncertain.update(indices, rows)
        self.random.update(indices, rows)
        self.count(probability, true == predicted, shares, true)
        if self.confusion is not None:
            self.confusion.update(outputs, targets)

    def count(self, probability: Tensor, is_right: Tensor, shares: Tensor, true: Tensor) -> None:
        """Count the samples by the probability of their predicted class, and those that are right;
        of two classes also by the probability of the second, and those that are of it.
        """
        if self.bins is None:
            self.bins = probability.new_zeros(2 if shares.shape[1] == 2 else 1, 2, BINS)
        pairs = [(probability, is_right), (shares[:, -1], true == 1)]
        for bins, (values, are_so) in zip(self.bins, pairs, strict=False):
            places = (values * BINS).long().clamp(0, BINS - 1)
            bins[0].index_add_(0, places, torch.ones_like(values))
            bins[1].index_add_(0, places, are_so.to(values.dtype))

    def complete(self, evaluation: Evaluation) -> None:
        evaluation.classes = names_of_classes(self.data)
        labels = self.data.parts()[self.split].targets
        if self.order is not None:
            labels = labels[self.order]
        evaluation.chance = labels.bincount().max().item() / len(labels)
        if self.confusion is not None:
            evaluation.confusion = self.confusion.compute().tolist()
        bins = parallel.add_up(self.bins)
        if bins is not None:
            evaluation.confidence, *others = bins.long().tolist()
            evaluation.second = others[0] if others else None
        evaluation.worst = classified(self.worst.over_ranks())
        evaluation.uncertain = classified(self.uncertain.over_ranks())
        evaluation.random = classified(self.random.over_ranks())


class Positions(Examination):
    """The confusion matrix of tokens or pixels, the samples with the highest mean loss, and some at
    random.

    Of a sequence the first tokens and their losses are kept, of a mask as many pixels as a picture
    shows.
    """

    def reset(self) -> None:
        super().reset()
        self.worst: Highest | None = None  # created in the first batch, which shows its width
        self.random: Highest | None = None
        self.shape: tuple[int, ...] = ()  # shape of the part of a sample's targets that is kept
        self.confusion: Confusion | None = None
        if 2 <= self.data.num_classes <= MOST_CLASSES:
            self.confusion = Confusion(self.data.num_classes, IGNORED)

    def positions(self, targets: Tensor) -> tuple[int, ...]:
        return tuple(targets.shape[1:])

    def keep(self, indices: Tensor, outputs: Tensor, targets: Tensor) -> None:
        losses = functional.cross_entropy(
            outputs.float(), targets, ignore_index=IGNORED, reduction="none"
        )
        counts = (targets != IGNORED).flatten(1).sum(1).clamp_min(1)
        mean = losses.flatten(1).sum(1) / counts
        if targets.ndim == 2:
            true = targets[:, :MOST_TOKENS]
            shown = losses[:, :MOST_TOKENS]
        else:
            every = math.ceil(max(targets.shape[1:]) / SIDE)
            true = targets[:, ::every, ::every]
            shown = outputs.argmax(1)[:, ::every, ::every]
        self.shape = tuple(true.shape[1:])
        order = shuffled(indices)
        columns = [mean.unsqueeze(1), order.unsqueeze(1), true.flatten(1), shown.flatten(1)]
        rows = torch.cat([column.float() for column in columns], 1)
        if self.worst is None or self.random is None:
            self.worst = Highest(rows.shape[1], column=0)
            self.random = Highest(rows.shape[1], column=1)
        self.worst.update(indices, rows)
        self.random.update(indices, rows)
        if self.confusion is not None:
            self.confusion.update(outputs, targets)

    def complete(self, evaluation: Evaluation) -> None:
        evaluation.unit = "tokens" if len(self.shape) == 1 else "pixels"
        evaluation.classes = names_of_classes(self.data)
        if self.confusion is not None:
            counts = self.confusion.compute()
            evaluation.confusion = counts.tolist()
            evaluation.chance = (counts.sum(1).max() / counts.sum()).item()
        assert self.worst is not None and self.random is not None  # an evaluation has samples
        evaluation.worst = self.samples_of(self.worst.over_ranks(), evaluation.classes)
        evaluation.random = self.samples_of(self.random.over_ranks(), evaluation.classes)

    def samples_of(self, rows: Tensor, classes: list[str]) -> list[Sample]:
        """Return the samples of rows: place, mean loss, order, true classes, and losses of tokens
        or predicted classes of pixels.
        """
        samples = []
        for row in rows:
            true, shown = row[3:].view(2, *self.shape)
            sample = Sample(int(row[0]), loss=row[1].item())
            if len(self.shape) == 1:
                is_known = true != IGNORED
                sample.tokens = [classes[int(label)] for label in true[is_known]]
                sample.losses = [round(loss, 3) for loss in shown[is_known].tolist()]
            else:
                sample.masks = [mask_png(true.long()), mask_png(shown.long())]
            samples.append(sample)
        return samples


def names_of_classes(data: Data) -> list[str]:
    """Return the names of the classes: characters for bytes, numbers for classes without names."""
    if data.tokens == "bytes":
        return [chr(byte) for byte in range(data.num_classes)]
    return list(map(str, data.classes or range(data.num_classes)))


def mask_png(mask: Tensor) -> str:
    """Return the PNG of a mask (H, W), as base64: a colour for each class, white for what is
    ignored.
    """
    picture = torch.full((3, *mask.shape), 255, dtype=torch.uint8)
    for label in mask.unique().tolist():
        if label != IGNORED:
            colour = torch.tensor(class_colour(label), dtype=torch.uint8)
            picture[:, mask == label] = colour.unsqueeze(1)
    return png(picture)


def shuffled(indices: Tensor) -> Tensor:
    """Return a number for each place, those of neighbours far from each other."""
    return indices * 7919 % 10007


def one_per_row(values: Tensor, classes: Tensor) -> Tensor:
    """Return the value of each row's class."""
    return values.gather(1, classes.unsqueeze(1)).squeeze(1)


def classified(rows: Tensor) -> list[Sample]:
    """Return the samples of rows of `Classes`."""
    samples = []
    for index, true, predicted, *measures, _ in rows.tolist():
        samples.append(Sample(int(index), int(true), int(predicted), *measures))
    return samples


class Numbers(Examination):
    """Evenly spread (true, predicted) of a regression, and the samples with the highest mean
    squared error.

    The record has the first `MOST_TARGETS` of several targets, in the user's units.
    """

    def __init__(self, split: str, loader: Any, data: Data) -> None:
        self.targets = min(data.num_classes, MOST_TARGETS)
        self.every = math.ceil(loader.samples / MOST_POINTS)  # each sample is a point
        super().__init__(split, loader, data)

    def reset(self) -> None:
        super().reset()
        self.worst = Highest(width=1 + 2 * self.targets, column=0)
        self.points: Tensor | None = None  # the last row stands for samples that are not points

    def keep(self, indices: Tensor, outputs: Tensor, targets: Tensor) -> None:
        true = wide(targets)
        predicted = wide(outputs)
        losses = (predicted - true).square().mean(1, keepdim=True)
        pairs = torch.cat([true[:, : self.targets], predicted[:, : self.targets]], 1)
        self.worst.update(indices, torch.cat([losses, pairs], 1))
        if self.points is None:
            self.points = pairs.new_zeros(MOST_POINTS + 1, 2 * self.targets)
        is_point = indices % self.every == 0
        self.points[(indices // self.every).where(is_point, MOST_POINTS)] = pairs

    def complete(self, evaluation: Evaluation) -> None:
        points = parallel.add_up(self.points)
        assert points is not None  # an evaluation has samples
        count = len(range(0, evaluation.samples, self.every))
        evaluation.points = self.in_units(points[:count])
        evaluation.standardised = bool((self.per_target(self.data.target_scale) != 1).any())
        rows = self.worst.over_ranks()
        evaluation.worst = []
        for row, (true, predicted) in zip(rows.tolist(), self.in_units(rows[:, 2:]), strict=True):
            evaluation.worst.append(Sample(int(row[0]), true, predicted, loss=row[1]))

    def in_units(self, pairs: Tensor) -> list[Any]:
        """Return [true numbers, predicted numbers] of each row, in the user's units."""
        pairs = pairs.cpu().double().view(-1, 2, self.targets)
        pairs = pairs * self.per_target(self.data.target_scale)
        return (pairs + self.per_target(self.data.target_mean)).tolist()

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
    kind: type[Examination] = Classes if data.kind == "classification" else Numbers
    if data.target_shape:
        kind = Positions
    examination = kind(split, loader, data)
    trainer.metrics[NAME] = examination
    try:
        results = trainer.evaluate(loader, split)
    finally:
        del trainer.metrics[NAME]
    del results[f"{split}/{NAME}"]
    record = examination.evaluation
    if record is not None and examination.order is not None:
        for sample in record.shown():
            sample.index = int(examination.order[sample.index])
    return results, record


def is_usual(trainer: Trainer, data: Data) -> bool:
    """Whether the trainer evaluates as Trainer does, with the default metrics of this data."""
    kind = type(trainer)
    if data.kind == "other" or kind.evaluate is not Trainer.evaluate:
        return False
    if kind.update_metrics is not Trainer.update_metrics:
        return False
    needed = default_metrics(data.kind)
    return needed.keys() <= trainer.metrics.keys()


def write(path: Path, evaluation: Evaluation, data: Data) -> None:
    """Write evaluation.json: the record, with each of its samples as it can be shown."""
    part = data.parts()[evaluation.split]
    for sample in evaluation.shown():
        show(sample, part, data)
    contents = dataclasses.asdict(evaluation, dict_factory=without_none)
    text = json.dumps(finite(contents), separators=(",", ":"))
    write_text(path, f"{text}\n")


def without_none(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in entries if value is not None}


def place_of(part: Any, index: int) -> dict[str, Any]:
    """Return the file or the line of a sample, as far as its split has them."""
    place: dict[str, Any] = {}
    files: Any = getattr(part, "files", None)
    if hasattr(files, "root"):
        place["file"] = printable(Path(files[index]).relative_to(files.root))
    lines = getattr(part, "lines", None)
    if lines is not None:
        place["line"] = int(lines[index])
    return place


def show(sample: Sample, part: Split, data: Data) -> None:
    """Add the file, the line, the picture and the columns of a sample, as far as its split has
    them.
    """
    index = sample.index
    place = place_of(part, index)
    sample.file = place.get("file")
    sample.line = place.get("line")
    with torch.random.fork_rng(devices=[]):  # the user's own split may draw random numbers
        inputs, _ = part[[index]]
    if not isinstance(inputs, Tensor):
        return
    if inputs.ndim == 4:
        sample.png = png(inputs[0])
    elif inputs.ndim == 2 and sample.tokens is None:
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
    """Return {column: value} for a row of a table, and the numbers of any other vector."""
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
    """Return what a table's file has for a standardized value, which is 0 for a missing one that
    was filled in.
    """
    mean = column["mean"]
    if fills_in and value == 0:
        return f"{mean:.6g} (the mean)"
    return as_written(value, mean, column["std"])


def as_written(value: float, mean: float, std: float) -> float:
    """Return the number with the fewest decimals whose standardized value this is: float32 lost
    those of the file.
    """
    number = value * std + mean
    for digits in range(-15, 31):
        rounded = round(number, digits)
        standardised = (rounded - mean) / std
        if torch.tensor(standardised, dtype=torch.float32).item() == value:
            break
    return rounded + 0.0  # turns -0.0 into 0.0
