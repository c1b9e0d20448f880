"""Collect details while the best weights are tested: confused classes, hard samples, errors."""

import base64
import dataclasses
import io
import itertools
import math
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from stoker.data.record import Data, default_metrics
from stoker.data.splits import Split
from stoker.runs.evaluation import Evaluation, Sample, class_colour
from stoker.runs.json_files import write_json
from stoker.trainer import launch, parallel
from stoker.trainer.errors import printable
from stoker.trainer.losses import IGNORED
from stoker.trainer.metrics import Confusion, class_of, wide
from stoker.trainer.trainer import Trainer

NAME = "examined"  # name of the Examination among the trainer's metrics
MOST_CLASSES = 1000  # maximum classes in a confusion matrix, whose size grows quadratically
MOST_SAMPLES = 16  # samples in each list (worst, random)
MOST_POINTS = 2000  # (true, predicted) pairs of a regression
MOST_TARGETS = 8  # target values kept per sample of a regression
MOST_COLUMNS = 12  # table columns shown per sample
SIDE = 64  # pixels on a picture's longer side
BINS = 200  # bins in a histogram of probabilities
MOST_TOKENS = 200  # tokens shown per sequence
MINUTES = 24 * 60  # minutes per day; dates in a table are stored as days

Columns = dict[str, Tensor]  # {name: values}, with one row per sample


class Examination:
    """A metric without a value, which collects samples for evaluation.json.

    The memory use does not depend on the number of samples, and `update` never waits for the
    device. With several processes, `loader` splits each batch among them. A subclass describes
    samples as `columns` of tensors, and can override `chosen`, which turns the selected rows into
    `Sample`s.
    """

    higher_is_better = None

    def __init__(self, split: Any, loader: Any, data: Data) -> None:
        self.split = split
        self.data = data
        self.batch_size: int = loader.batch_size  # across all processes
        self.order: Tensor | None = None  # indices of the samples chosen by limit_val
        if loader.samples < loader.split_size:
            self.order = loader.order(0)
        self.reset()

    def reset(self) -> None:
        self.samples = 0  # samples seen by this process
        self.is_usual = True
        self.lists = {"worst": Highest("loss"), "random": Highest("order")}
        self.confusion: Confusion | None = None
        if self.data.kind == "classification" and 2 <= self.data.num_classes <= MOST_CLASSES:
            self.confusion = Confusion(self.data.num_classes, IGNORED)
        # Stays None if the outputs do not have the usual shape.
        self.evaluation: Evaluation | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        self.is_usual = self.is_usual and self.fit(outputs, targets)
        if not self.is_usual:
            return
        count = len(targets)
        columns = self.columns(outputs.detach(), targets)
        columns["index"] = self.indices(count, outputs.device)
        columns["order"] = scrambled(columns["index"])
        for highest in self.lists.values():
            highest.update(columns)
        if self.confusion is not None:
            self.confusion.update(outputs, targets)
        self.samples += count

    def fit(self, outputs: Any, targets: Any) -> bool:
        """Return whether each sample, token or pixel has one output per class (for regression, one
        per target).
        """
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return False
        positions = targets.shape[1:] if self.data.target_shape else ()
        return outputs.shape == (len(targets), self.data.num_classes, *positions)

    def indices(self, count: int, device: torch.device) -> Tensor:
        """Return the indices of this process's next `count` samples in the split."""
        of_batch = range(launch.rank(), self.batch_size, parallel.process_count)
        places = torch.arange(self.samples, self.samples + count, device=device)
        batches = places // len(of_batch)
        within = places % len(of_batch) * of_batch.step + of_batch.start
        return batches * self.batch_size + within

    def compute(self) -> float:
        """Build `self.evaluation` and return nan. All processes must call this."""
        usual_ranks = parallel.add_up(int(self.is_usual))
        if usual_ranks == parallel.process_count:
            samples = parallel.add_up(self.samples)
            kind: Any = self.data.kind
            self.evaluation = Evaluation(self.split, kind, samples)
            self.complete(self.evaluation)
        return math.nan

    def complete(self, evaluation: Evaluation) -> None:
        """Fill `evaluation` with the collected data."""
        if self.data.table is not None:
            evaluation.target = self.data.table["target"]
        if self.data.kind == "classification":
            evaluation.classes = names_of_classes(self.data)
        if self.confusion is not None:
            counts = self.confusion.compute()
            per_class = counts.sum(1).double()
            evaluation.confusion = counts.tolist()
            evaluation.chance = (per_class.max() / per_class.sum()).item()
        for name, highest in self.lists.items():
            columns = highest.over_ranks()
            if self.order is not None:
                columns["index"] = self.order[columns["index"]]
            setattr(evaluation, name, self.chosen(columns))

    def columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        """Return {name: values} with one row per sample: the "loss", and what `chosen` needs."""
        raise NotImplementedError

    def chosen(self, columns: Columns) -> list[Sample]:
        """Turn the rows of these columns, which are on the CPU, into samples."""
        rows = zip(*[values.tolist() for values in columns.values()], strict=True)
        return [Sample(**dict(zip(columns, row, strict=True))) for row in rows]


class Highest:
    """Keep the samples with the highest values in a column; nan ranks highest."""

    def __init__(self, column: str, most: int = MOST_SAMPLES) -> None:
        self.column = column
        self.most = most
        self.kept: Columns = {}

    def update(self, columns: Columns) -> None:
        """Keep the highest of the samples kept so far and those of a batch."""
        self.kept = self.highest(joined([self.kept, columns]))

    def highest(self, columns: Columns) -> Columns:
        order = columns[self.column].argsort(descending=True, stable=True)
        return rows_of(columns, order[: self.most])

    def over_ranks(self) -> Columns:
        """Return the top samples of all processes, on the CPU. All processes must call this."""
        kept = {name: values.cpu() for name, values in self.kept.items()}
        columns = joined(parallel.from_all(kept))
        columns = self.highest(rows_of(columns, columns["index"].argsort()))
        del columns["order"]
        return columns


def scrambled(indices: Tensor) -> Tensor:
    """Return a hash of each index below 2**32, computed like the finalizer of MurmurHash3.

    The samples with the highest hashes are a random choice that is the same in every run.
    """
    mixed = indices + 1
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ mixed >> 16) * factor & 0xFFFFFFFF
    return mixed ^ mixed >> 16


def joined(parts: list[Columns]) -> Columns:
    """Concatenate the rows of these parts. A part that has no rows yet has no columns either."""
    parts = [part for part in parts if part]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def rows_of(columns: Columns, rows: Tensor) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


class Classes(Examination):
    """Samples of a classification, and how often predictions with a given probability are correct.

    The loss is the negative log-probability of the true class, even if the model was trained with
    a different loss.
    """

    def reset(self) -> None:
        super().reset()
        # Two pairs of histograms. The first pair is over the probability of the predicted class:
        # one of all samples, and one of the correct ones. The second pair is only for binary
        # classification, over the probability of the second class: one of all samples, and one of
        # the samples of this class.
        self.bins: Tensor | None = None

    def columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        logs = wide(outputs).log_softmax(-1)
        probabilities = logs.exp()
        true = class_of(targets, outputs)
        predicted = outputs.argmax(-1)
        probability = probabilities.gather(1, predicted.unsqueeze(1)).squeeze(1)
        if self.bins is None:
            self.bins = probabilities.new_zeros(2, 2, BINS)
        add_counts(self.bins[0], probability, true == predicted)
        add_counts(self.bins[1], probabilities[:, -1], true == 1)
        return {
            "loss": -logs.gather(1, true.unsqueeze(1)).squeeze(1),
            "true": true,
            "predicted": predicted,
            "probability": probability,
        }

    def complete(self, evaluation: Evaluation) -> None:
        super().complete(evaluation)
        bins = parallel.add_up(self.bins)
        if bins is not None:
            evaluation.confidence, second = bins.long().tolist()
            evaluation.second = second if self.data.num_classes == 2 else None


def add_counts(bins: Tensor, values: Tensor, selected: Tensor) -> None:
    """Add samples to a pair of histograms of their `values`: all, and the `selected` ones."""
    indices = (values * BINS).long().clamp(0, BINS - 1)
    counts = torch.stack([torch.ones_like(values), selected.to(values.dtype)])
    bins.index_add_(1, indices, counts)


class Positions(Examination):
    """Samples of a classification of tokens or pixels.

    Sequences are truncated to MOST_TOKENS tokens, and masks are downsampled to at most SIDE pixels
    per side.
    """

    def columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        losses = functional.cross_entropy(
            outputs.float(), targets, ignore_index=IGNORED, reduction="none"
        )
        counts = (targets != IGNORED).flatten(1).sum(1).clamp_min(1)
        mean = losses.flatten(1).sum(1) / counts
        if targets.ndim == 2:
            true = targets[:, :MOST_TOKENS]
            return {"loss": mean, "true": true, "losses": losses[:, :MOST_TOKENS]}
        every = math.ceil(max(targets.shape[1:]) / SIDE)
        predicted = outputs.argmax(1)[:, ::every, ::every]
        return {"loss": mean, "true": targets[:, ::every, ::every], "predicted": predicted}

    def chosen(self, columns: Columns) -> list[Sample]:
        classes = names_of_classes(self.data)
        labels = columns.pop("true")
        predicted = columns.pop("predicted", None)
        losses = columns.pop("losses", None)
        samples = super().chosen(columns)
        for i, sample in enumerate(samples):
            true = labels[i]
            if losses is not None:
                is_known = true != IGNORED
                sample.tokens = [classes[label] for label in true[is_known].tolist()]
                sample.losses = [round(loss, 3) for loss in losses[i][is_known].tolist()]
            if predicted is not None:
                masks = (true, predicted[i])
                sample.masks = [mask_png(mask, len(classes)) for mask in masks]
        return samples

    def complete(self, evaluation: Evaluation) -> None:
        evaluation.unit = "tokens" if len(self.data.target_shape) == 1 else "pixels"
        super().complete(evaluation)


def names_of_classes(data: Data) -> list[str]:
    """Return the class names: characters for bytes, and numbers for unnamed classes."""
    if data.tokens == "bytes":
        return [chr(byte) for byte in range(data.num_classes)]
    return list(map(str, data.classes or range(data.num_classes)))


def mask_png(mask: Tensor, classes: int) -> str:
    """Return a mask (H, W) as a base64 PNG, with a color per class and white for ignored pixels."""
    colours = [*map(class_colour, range(classes)), (255, 255, 255)]
    palette = torch.tensor(colours, dtype=torch.uint8)
    return png(palette[mask.clamp_min(-1)].permute(2, 0, 1))


class Numbers(Examination):
    """Samples of a regression, and (true, predicted) pairs for many random samples.

    The loss is the mean squared error. Samples have at most `MOST_TARGETS` targets, in the units of
    the data.
    """

    def reset(self) -> None:
        super().reset()
        self.lists["points"] = Highest("order", MOST_POINTS)

    def columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        true = wide(targets)
        predicted = wide(outputs)
        return {
            "loss": (predicted - true).square().mean(1),
            "true": true[:, :MOST_TARGETS],
            "predicted": predicted[:, :MOST_TARGETS],
        }

    def chosen(self, columns: Columns) -> list[Sample]:
        scale = self.per_target(self.data.target_scale)
        mean = self.per_target(self.data.target_mean)
        for name in ("true", "predicted"):
            columns[name] = columns[name].double() * scale + mean
        return super().chosen(columns)

    def complete(self, evaluation: Evaluation) -> None:
        super().complete(evaluation)
        evaluation.points = [[sample.true, sample.predicted] for sample in evaluation.points]

    def per_target(self, value: float | list[float] | Tensor) -> Tensor:
        """Return one value per kept target, given a single value or one for each target."""
        values = torch.as_tensor(value, dtype=torch.float64)
        return values.expand(self.data.num_classes)[:MOST_TARGETS]


def evaluate(
    trainer: Trainer, loader: Any, split: str, data: Data
) -> tuple[dict[str, float], Evaluation | None]:
    """Return the results of `trainer.evaluate`, and the `Evaluation` for `write`.

    The second result is None if a subclass of the Trainer might interpret the outputs differently,
    or if the model or the loss has unusual outputs.
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
    return results, examination.evaluation


def is_usual(trainer: Trainer, data: Data) -> bool:
    """Return whether the trainer evaluates like `Trainer`, with the default metrics of the data."""
    kind = type(trainer)
    return (
        data.kind != "other"
        and kind.evaluate is Trainer.evaluate
        and kind.update_metrics is Trainer.update_metrics
        and default_metrics(data.kind).keys() <= trainer.metrics.keys()
    )


def write(path: Path, evaluation: Evaluation, data: Data) -> None:
    """Write evaluation.json, adding the details of each sample that the report shows."""
    split = data.parts()[evaluation.split]
    for sample in [*evaluation.worst, *evaluation.random]:
        show(sample, split, data)
    write_json(path, dataclasses.asdict(evaluation), indent=None)


def place_of(split: Any, index: int) -> dict[str, Any]:
    """Return {"file": ...} or {"line": ...} of a sample, or {} if its split stores neither."""
    place: dict[str, Any] = {}
    files: Any = getattr(split, "files", None)
    if hasattr(files, "root"):
        place["file"] = printable(Path(files[index]).relative_to(files.root))
    lines = getattr(split, "lines", None)
    if lines is not None:
        place["line"] = int(lines[index])
    return place


def show(sample: Sample, split: Split, data: Data) -> None:
    """Add the file, line, picture and table columns that the split has for a sample."""
    index = sample.index
    vars(sample).update(place_of(split, index))
    with torch.random.fork_rng(devices=[]):  # the user's own split might draw random numbers
        inputs, _ = split[[index]]
    if not isinstance(inputs, Tensor):
        return
    if inputs.ndim == 4:
        sample.png = png(inputs[0])
    elif inputs.ndim == 2 and not sample.tokens:
        sample.columns = columns(inputs[0], data)


def png(image: Tensor) -> str:
    """Return an image (C, H, W) as a small base64 PNG, gray or with the first three channels.

    uint8 pixels are used unchanged. Other types are scaled so that their range fills 0 to 255.
    """
    from PIL import Image

    channels = 3 if len(image) >= 3 else 1
    image = image[:channels]
    if image.dtype != torch.uint8:
        image = image - image.min()
        image = (255 * image / image.max().clamp_min(1e-12)).round().to(torch.uint8)
    pixels = image.detach().cpu().permute(1, 2, 0).squeeze(2)
    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def columns(inputs: Tensor, data: Data) -> dict[str, Any]:
    """Return {column: value} for a row of a table, or {"x0": value, ...} for other vectors."""
    values = inputs.tolist()
    if data.table is None:
        first = enumerate(values[:MOST_COLUMNS])
        return {f"x{i}": float(f"{value:.4g}") for i, value in first}
    cells = iter(values)
    row: dict[str, Any] = {}
    for column in data.table["columns"][:MOST_COLUMNS]:
        cell: Any = ""
        if "categories" in column:
            categories = column["categories"]
            block = list(itertools.islice(cells, len(categories)))
            if 1 in block:
                cell = categories[block.index(1)]
        else:
            value = next(cells)
            if value != 0 or data.table.get("missing") != "mean":
                cell = as_written(value, column)
        row[column["name"]] = cell
    return row


def as_written(value: float, column: dict[str, Any]) -> float | str:
    """Undo the standardization of a number, and round it to the precision of float32."""
    std = column["std"]
    error = std * abs(float(numpy.spacing(numpy.float32(value))))
    digits = -math.ceil(math.log10(error))
    number: float = round(value * std + column["mean"], digits) + 0.0  # turns -0.0 into 0.0
    if not column.get("date"):
        return number
    moment = numpy.datetime64(round(number * MINUTES), "m")
    return str(moment).replace("T", " ").removesuffix(" 00:00")
