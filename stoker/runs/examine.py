"""What is looked at while the best weights are tested: the classes confused, the hardest samples, the errors."""

import base64
import io
import json
import math
from pathlib import Path

import torch

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
MOST_TARGETS = 8  # numbers a sample of a regression that are kept
MOST_COLUMNS = 12  # of a table's row
SIDE = 64  # pixels of a picture's longer side


class Examination:
    """A metric beside the others, without a value of its own: what it saw is in `found` afterwards.

    It waits for no device, and holds as much for any size of a split: the `MOST_SAMPLES` rows of the highest scores.
    A sample's number in the split comes from the order of the batches, all but the last of which have `batch_size`
    samples; of each a process has every `ranks`-th one. (float32, which is all that mps has, tells 2**24 apart.)
    """

    higher_is_better = None

    def __init__(self, samples, batch_size, num_classes):
        self.samples, self.batch_size, self.num_classes = samples, batch_size, num_classes
        self.share = max(1, len(range(launch.rank(), batch_size, parallel.ranks())))
        self.reset()

    def reset(self):
        self.seen, self.usual, self.tops, self.found = 0, True, {}, None

    def update(self, outputs, targets):
        tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        self.usual = (
            self.usual and tensors and tuple(outputs.shape) == (len(targets), self.num_classes)
        )
        if self.usual:
            own = torch.arange(self.seen, self.seen + len(outputs), device=outputs.device)
            ranks = parallel.ranks()
            numbers = own // self.share * self.batch_size + own % self.share * ranks + launch.rank()
            self.look(outputs.detach(), targets, own if ranks == 1 else numbers)
            self.seen += len(outputs)

    def compute(self):
        """nan: all that there is to know is in `found`, None where the outputs are not what is usual; all ask."""
        self.found = (
            self.summary() if parallel.add_up(int(self.usual)) == parallel.ranks() else None
        )
        return math.nan

    def keep(self, name, scores, rows):
        """Keeps the rows of the highest scores; of equal ones those that came first."""
        rows = torch.cat([scores.unsqueeze(1), rows], 1)
        rows = torch.cat([self.tops[name], rows]) if name in self.tops else rows
        self.tops[name] = rows.index_select(
            0, rows[:, 0].argsort(descending=True, stable=True)[:MOST_SAMPLES]
        )

    def top(self, name):
        """The rows that all processes have kept, best first, without their scores; nan is the highest score."""
        rows = gather(self.tops.get(name), MOST_SAMPLES, self.width)
        order = sorted(
            range(len(rows)),
            key=lambda i: (-rows[i][0] if rows[i][0] == rows[i][0] else -math.inf, i),
        )
        return [rows[i][1:] for i in order[:MOST_SAMPLES]]


class Classes(Examination):
    """Of a classification: the confusion matrix, and the samples of the highest loss and of the highest entropy.

    The loss is minus the logarithm of the true class's probability, whatever was trained with; entropy in nats.
    """

    width = 7

    def reset(self):
        super().reset()
        self.confusion = (
            Confusion(self.num_classes) if 2 <= self.num_classes <= MOST_CLASSES else None
        )

    def look(self, outputs, targets, numbers):
        logs = wide(outputs).log_softmax(-1)
        true, predicted, shares = class_of(targets, outputs), outputs.argmax(-1), logs.exp()
        losses = -logs.gather(1, true.unsqueeze(1)).squeeze(1)
        probability = shares.gather(1, predicted.unsqueeze(1)).squeeze(1)
        entropy = torch.special.entr(shares).sum(-1)
        columns = [numbers, true, predicted, probability, losses, entropy]
        rows = torch.stack([column.to(losses.dtype) for column in columns], 1)
        self.keep("worst", losses, rows)
        self.keep("uncertain", entropy, rows)
        if self.confusion is not None:
            self.confusion.update(outputs, targets)

    def summary(self):
        names = ("index", "true", "predicted", "probability", "loss", "entropy")
        found = {
            "confusion": self.confusion.compute().tolist() if self.confusion is not None else None
        }
        for name in ("worst", "uncertain"):
            found[name] = [dict(zip(names, row, strict=True)) for row in self.top(name)]
            for sample in found[name]:
                sample |= {key: int(sample[key]) for key in ("index", "true", "predicted")}
        return found


class Numbers(Examination):
    """Of a regression: every so-manieth (true, predicted), and the samples of the highest mean squared error.

    Of several targets the first `MOST_TARGETS`. All as the data set gives its targets: `in_units` has the user's.
    """

    def __init__(self, samples, batch_size, num_classes):
        self.targets = min(num_classes, MOST_TARGETS)
        self.width = 3 + 2 * self.targets
        super().__init__(samples, batch_size, num_classes)

    def reset(self):
        super().reset()
        self.points, self.every = [], max(1, math.ceil(self.samples / MOST_POINTS))

    def look(self, outputs, targets, numbers):
        true, predicted = wide(targets), wide(outputs)
        losses = (predicted - true).square().mean(1)
        both = torch.cat([true[:, : self.targets], predicted[:, : self.targets]], 1)
        self.keep(
            "worst",
            losses,
            torch.cat([torch.stack([numbers.to(losses.dtype), losses], 1), both], 1),
        )
        self.points.append(both[-self.seen % self.every :: self.every])

    def summary(self):
        points = torch.cat(self.points) if self.points else None
        points = gather(points, MOST_POINTS + 1, 2 * self.targets)
        worst = [(int(row[0]), row[1], *self.halves(row[2:])) for row in self.top("worst")]
        names = ("index", "loss", "true", "predicted")
        return {
            "points": [self.halves(row) for row in points],
            "worst": [dict(zip(names, row, strict=True)) for row in worst],
        }

    def halves(self, row):
        return [row[: self.targets], row[self.targets :]]


def in_units(found, data):
    """What `Numbers` has found, with the true and the predicted numbers in the user's units."""

    def values(numbers):
        mean, scale = (
            torch.as_tensor(value, dtype=torch.float64)
            for value in (data.target_mean, data.target_scale)
        )
        mean, scale = (part[: len(numbers)] if part.ndim else part for part in (mean, scale))
        return (torch.tensor(numbers, dtype=torch.float64) * scale + mean).tolist()

    worst = [
        sample | {key: values(sample[key]) for key in ("true", "predicted")}
        for sample in found["worst"]
    ]
    return {"points": [[values(part) for part in both] for both in found["points"]], "worst": worst}


def gather(rows, most, width):
    """The rows of all processes, of which each has at most so many, or None: a list of lists of numbers."""
    if parallel.ranks() == 1:
        return [] if rows is None else rows.tolist()
    slots = torch.zeros(launch.world_size(), most, 1 + width, dtype=torch.float64)
    if rows is not None:
        slots[launch.rank(), : len(rows)] = torch.cat(
            [torch.ones(len(rows), 1), rows.cpu()], 1
        ).double()
    slots = parallel.add_up(slots).view(-1, 1 + width)
    return slots[slots[:, 0] == 1, 1:].tolist()


def evaluate(trainer, loader, split, data):
    """(what `trainer.evaluate` gives, what there is to see beside it: `write` wants that, or None).

    None where a Trainer of one's own may mean something else by outputs, or the model or the loss has others.
    """
    own = type(trainer)
    usual = default_metrics(data.kind).keys() <= trainer.metrics.keys()
    if (
        not usual
        or own.update_metrics is not Trainer.update_metrics
        or own.evaluate is not Trainer.evaluate
    ):
        return trainer.evaluate(loader, split), None
    kind = Classes if data.kind == "classification" else Numbers
    trainer.metrics[NAME] = seen = kind(loader.samples, loader.batch_size, data.num_classes)
    try:
        results = trainer.evaluate(loader, split)
    finally:
        del trainer.metrics[NAME]
    del results[f"{split}/{NAME}"]
    if seen.found is None:
        return results, None
    about = {"split": split, "kind": data.kind, "samples": loader.samples}
    if data.table is not None:
        about["target"] = data.table["target"]
    if data.kind == "classification":
        counts = torch.bincount(getattr(data, split).targets, minlength=data.num_classes)
        about |= {"classes": list(map(str, data.classes or range(data.num_classes)))}
        about |= {"chance": counts.max().item() / loader.samples}
        return results, about | seen.found
    about["standardised"] = bool((torch.as_tensor(data.target_scale) != 1).any())
    return results, about | in_units(seen.found, data)


def write(path, found, data):
    """Writes evaluation.json: what `evaluate` saw, and each sample of it as it can be shown."""
    part, shown = getattr(data, found["split"]), {}
    lists = {name: found[name] for name in ("worst", "uncertain") if name in found}
    for sample in (sample for samples in lists.values() for sample in samples):
        if (index := sample["index"]) not in shown:
            shown[index] = show(part, data, index)
    lists = {
        name: [sample | shown[sample["index"]] for sample in samples]
        for name, samples in lists.items()
    }
    write_text(path, json.dumps(finite(found | lists), separators=(",", ":")) + "\n")


def show(part, data, index):
    """{"file" or "line", "png" or "columns"} of a sample, as far as there are such."""
    files = getattr(part, "files", None)
    found = (
        {"file": printable(Path(files[index]).relative_to(files.root))}
        if hasattr(files, "root")
        else {}
    )
    if getattr(part, "lines", None) is not None:
        found["line"] = int(part.lines[index])
    with torch.random.fork_rng(devices=[]):  # a split of the user's own may draw
        inputs, _ = part[[index]]
    if not isinstance(inputs, torch.Tensor):
        return found
    inputs = inputs[0]
    if len(inputs.shape) == 3:
        return found | {"png": png(inputs)}
    return found | {"columns": columns(inputs, data)} if len(inputs.shape) == 1 else found


def png(image):
    """The picture (C, H, W) as base64: uint8 as it is, floats from the least to the most; grey, or its first three
    channels."""
    from PIL import Image

    image = image.detach().cpu()
    if image.dtype != torch.uint8:
        low, high = image.min(), image.max()
        image = ((image - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    image = image[:3] if len(image) >= 3 else image[:1]
    rows = image.permute(1, 2, 0).contiguous()
    mode, size = ("RGB" if len(image) == 3 else "L"), (rows.shape[1], rows.shape[0])
    picture = Image.frombytes(mode, size, bytes(rows.reshape(-1).numpy()))
    picture.thumbnail((SIDE, SIDE))
    picture.save(stream := io.BytesIO(), "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def columns(inputs, data):
    """{column: what is in it} of a table's row; of other vectors their numbers."""
    values = inputs.tolist()
    if data.table is None:
        return {f"x{i}": float(f"{value:.4g}") for i, value in enumerate(values[:MOST_COLUMNS])}
    found, place = {}, 0
    for column in data.table["columns"]:
        if "categories" in column:
            block = values[place : place + len(column["categories"])]
            found[column["name"]] = column["categories"][block.index(1)] if 1 in block else ""
            place += len(block)
        else:
            filled = (
                values[place] == 0 and data.table.get("missing") == "mean"
            )  # as a missing one is
            mean = f"{column['mean']:.6g} (the mean)"
            found[column["name"]] = (
                mean if filled else as_written(values[place], column["mean"], column["std"])
            )
            place += 1
    return dict(list(found.items())[:MOST_COLUMNS])


def as_written(value, mean, std):
    """The number of the fewest decimals whose standardised value this is: float32 has lost what stood in the file."""
    numbers = [
        round(value * std + mean, digits) + 0.0 for digits in range(-15, 31)
    ]  # + 0.0: of -0.0 it makes 0.0
    same = ((torch.tensor(numbers, dtype=torch.float64) - mean) / std).float() == value
    return numbers[same.int().argmax()] if same.any() else numbers[-1]
