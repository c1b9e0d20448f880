"""Load a trained model from its run directory, preprocessing included, and apply it to files."""

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.command import build, trust
from stoker.data import images
from stoker.data.description import Description, is_description, names_of
from stoker.data.loader import scaling
from stoker.data.text import decode as text_of
from stoker.runs import card, resume, saved_config
from stoker.runs.json_files import finite
from stoker.runs.result import finished
from stoker.runs.weights import Tensors, evaluated
from stoker.trainer import batches, checkpoint, memory, prediction
from stoker.trainer import device as devices
from stoker.trainer.errors import TrainingError, UserError, first_line, log, printable
from stoker.trainer.files import replacing
from stoker.trainer.misuse import HOW

AT_ONCE = 256 * memory.MIB  # maximum bytes of inputs in one batch

State = dict[str, Any]  # a checkpoint's state
Row = dict[str, Any]


class Trained(torch.nn.Module):
    """A trained model with its preprocessing: maps raw inputs to class scores or target values.

    Pass images as uint8 pixels of shape (N, C, H, W). Pass the rows of a table as numbers of shape
    (N, columns), in the order of `columns` and in their original units, with 0 or 1 for each
    category; they are processed in float64. Other inputs reach the module unchanged. This model
    returns scores of shape (N, classes), or target values of shape (N, targets) in the units of the
    data. If the format of the data is unknown, inputs and outputs are passed through unchanged.

    Attributes:
        module: the trained module itself, without the preprocessing.
        classes: the class names, in the order of the scores; None if there are no names.
        columns: the names of a table's input columns; None for other inputs.
        about: the description of the data set, from `Data.description()`.
    """

    scale: Tensor
    offset: Tensor
    mean: Tensor
    std: Tensor
    target_mean: Tensor
    target_scale: Tensor

    def __init__(self, module: torch.nn.Module, about: Description) -> None:
        super().__init__()
        self.module = module
        self.about = about
        self.classes: list[str] | None = about["classes"]
        self.columns: list[str] | None = None
        if about["table"] is not None:
            columns = about["table"]["columns"]
            self.columns = [name for column in columns for name in names_of(column)]
        self.pixels = about["dtype"] == "uint8"
        numbers = constants(about)
        self.rescales = "target_mean" in numbers
        for name, value in numbers.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, inputs: Any, *more: Any, **named: Any) -> Any:
        if self.about["kind"] == "other":
            return self.module(inputs, *more, **named)
        self.check(inputs)
        if self.pixels:
            inputs = inputs.float() * self.scale + self.offset
        elif self.columns is not None:
            inputs = (inputs.to(self.mean.dtype) - self.mean) / self.std
            if self.about["table"]["missing"] == "mean":
                inputs = torch.where(inputs.isnan(), 0.0, inputs)
            inputs = inputs.float()
        outputs = self.module(inputs)
        return self.in_units(outputs)

    def in_units(self, outputs: Any) -> Any:
        """Convert the outputs of a regression to the units of the data; leave others unchanged."""
        if self.rescales and card.is_usual(outputs, self.about):
            outputs = outputs.to(self.target_mean.dtype) * self.target_scale + self.target_mean
        return outputs

    def check(self, inputs: Tensor) -> None:
        """Raise UserError for inputs whose type or shape differs from the data set's."""
        shape = self.about["in_shape"]
        given: Any = type(inputs).__name__
        if isinstance(inputs, Tensor):
            if self.about.get("tokens") and inputs.ndim == 2:
                shape = [min(shape[0], inputs.shape[1])]  # a shorter text is allowed
            given = f"{inputs.dtype} of shape {list(inputs.shape)}"
            has_type = not self.pixels or inputs.dtype == torch.uint8
            if has_type and list(inputs.shape[1:]) == shape:
                return
        kind = "uint8 pixels" if self.pixels else "a tensor"
        raise UserError(
            f"{self.about['dataset']}: the model takes {kind} of shape "
            f"(N, {', '.join(map(str, shape))}), not {given}."
        )


def constants(about: Description) -> dict[str, Tensor]:
    """Return the preprocessing constants by name, computed in the same way as in a loader."""
    numbers = {}
    if about["dtype"] == "uint8":
        numbers["scale"], numbers["offset"] = scaling(about["mean"], about["std"], "cpu")
    elif about["table"] is not None:
        columns = about["table"]["columns"]
        for key, of_category in (("mean", 0.0), ("std", 1.0)):
            values = [column.get(key, of_category) for column in columns for _ in names_of(column)]
            numbers[key] = torch.tensor(values, dtype=torch.float64)
    units = (about["target_mean"], about["target_scale"])
    if about["kind"] == "regression" and units != (0.0, 1.0):
        for name in ("target_mean", "target_scale"):
            numbers[name] = torch.tensor(about[name], dtype=torch.float64)
    return numbers


def load(folder: str | Path, device: str = "cpu", trusted: str | Sequence[str] = ()) -> Trained:
    """Load the model of a run directory with its best weights, in eval mode on `device`.

    The result includes the preprocessing; its `module` is the trained module itself. The data set
    is not needed. The folder is untrusted: only constructors from trusted packages, including the
    ones in `trusted`, are called. Raises UserError if this is not a run directory, and
    TrainingError if none of its checkpoints can be read.
    """
    with trust.trusting([trusted] if isinstance(trusted, str) else trusted):
        chosen = devices.choose(device)
        with saved_config.naming_run(folder), torch.random.fork_rng(devices=[]):
            config = saved_config.load_config("run", folder)
            saved_config.check_buildable(folder, config)
            config = saved_config.resolved(config, ["model"])
            path, state = best(folder)
            weights, _ = evaluated(path, state)
            about = description(folder, state)
            module = tested(config, weights, about)
    model = Trained(module, about).eval().requires_grad_(False)
    if devices.wide_type(chosen.type) is torch.float32:  # the device has no float64
        model = model.float()
    return model.to(chosen)


def best(folder: str | Path) -> tuple[Path, State]:
    """Return the path and the state of a run's best checkpoint. Raise an error if there is none.

    If the run has not finished, return its best checkpoint so far, with a warning.
    """
    try:
        chosen = checkpoint.best(Path(folder) / "checkpoints")
    except TrainingError as error:  # the error's advice is meant for training
        raise TrainingError(
            f"{first_line(error)}\nIf {Path(folder) / 'model.safetensors'} exists, it contains the "
            "tested weights; model.md next to it explains how to load them."
        ) from None
    if chosen is None:
        raise UserError(
            f"run={folder}: this run has no checkpoint. To continue, repeat the command that "
            f"started it, with run_dir={folder}."
        )
    path, state = chosen
    if finished(folder) is None:
        log.warning(
            "run=%s has not finished. Using %s, its best checkpoint so far.", folder, path.name
        )
    return path, state


def tested(config: dict[str, Any], weights: Tensors, about: Description) -> torch.nn.Module:
    """Build the module that the config describes, and load these weights into it."""
    sizes = {}
    if about.get("kind") != "other":
        sizes = {"in_shape": tuple(about["in_shape"]), "num_classes": about["num_classes"]}
    build.without_downloads("model", config["model"])
    build.check_shapes(config["model"], weights, **sizes)
    module: torch.nn.Module = build.build("model", config["model"], **sizes)
    checkpoint.restore("model", module, weights)
    return module


def description(folder: str | Path, state: State) -> Description:
    """Return a checkpoint's description of the inputs and outputs.

    Raises UserError if the description is malformed.
    """
    about: Description | None = resume.about(state).get("inputs")
    if about is None or not is_description(about):
        raise UserError(
            f"run={folder}: the description of the inputs in its checkpoint is malformed."
        )
    return about


def predict(
    model: Trained,
    path: str | Path,
    *,
    batch_size: int = 512,
    skip: bool = False,
    **reading: Any,
) -> Iterator[Row]:
    """Yield the predictions for an image, the images below a folder, or the rows of a csv file.

    Each row has "file" or "line", plus the entries that `answers` yields. Only one batch is in
    memory at a time. `reading` can override the settings `missing`, `delimiter`, `decimal` and
    `marks` of the table. Raises UserError for input that cannot be read; with `skip`, such images
    are skipped with a warning.
    """
    about = model.about
    path = os.path.expanduser(str(path))
    numbers = math.prod(about["in_shape"] or ())
    size = max(1, min(batch_size, AT_ONCE // (8 * numbers)))
    batches: Iterable[tuple[Sequence[Any], Tensor]]
    if model.columns is not None:
        from stoker.data import tables  # imports pyarrow

        key = "line"
        place = f"{printable(path)}, line "
        batches = tables.read_batches(path, about["table"], size, **reading)
    elif card.is_image(about):
        key = "file"
        place = ""
        batches = image_batches(path, about, size, skip)
    else:
        raise UserError(
            f"input={printable(path)}: the model was trained on {about['dataset']}, "
            "which is neither an image data set nor a table.\nTo predict on the run's own data, "
            "type split=NAME. To continue a prompt, type task=generate prompt=TEXT."
        )
    device = next(model.parameters(), torch.empty(0)).device
    for labels, inputs in batches:
        with torch.inference_mode():
            outputs = model(inputs.to(device))
        outputs = prediction.on_cpu(outputs, len(labels))
        check_finite(outputs, about, place, labels)
        for label, answer in zip(labels, answers(outputs, about), strict=True):
            yield {key: label, **answer}


def check_finite(outputs: Any, about: Description, place: str, labels: Sequence[Any]) -> None:
    """Raise TrainingError for the first sample with non-finite scores or values."""
    if not card.is_usual(outputs, about):
        return
    are_finite = outputs.isfinite().all(1)
    if not are_finite.all():
        first = labels[int(are_finite.int().argmin())]
        raise TrainingError(f"{place}{printable(first)}: the model returns non-finite values.")


def answers(outputs: Any, about: Description) -> Iterator[Row]:
    """Yield the prediction for each sample in the outputs of a batch.

    A classification yields "class", "probability" and "probabilities" ({class: probability}), or
    "classes" if there is a class per pixel. A language model yields "text", the likeliest next
    tokens. A regression yields "value", in the units of the data. Other outputs are unchanged: a
    dict keeps its keys, and anything else goes under "output".
    """
    is_usual = card.is_usual(outputs, about)
    if is_usual and about["kind"] == "regression":
        for values in outputs.tolist():
            yield {"value": values[0] if len(values) == 1 else values}
    elif is_usual:
        names = about["classes"] or [str(i) for i in range(about["num_classes"])]
        for values in outputs.softmax(1).tolist():
            rounded = [float(f"{value:.9g}") for value in values]  # the digits of a float32
            probabilities = dict(zip(names, rounded, strict=True))
            name = max(probabilities, key=probabilities.__getitem__)
            yield {
                "class": name,
                "probability": probabilities[name],
                "probabilities": probabilities,
            }
    elif about.get("tokens") and isinstance(outputs, Tensor):
        for ids in outputs.argmax(1).tolist():
            yield {"text": text_of(ids, about)}
    else:
        is_classes = about["kind"] == "classification" and isinstance(outputs, Tensor)
        if is_classes and outputs.ndim > 2 and outputs.shape[1] == about["num_classes"]:
            outputs = {"classes": outputs.argmax(1)}
        for sample in samples_of(outputs):
            yield finite(sample if isinstance(sample, dict) else {"output": sample})


def samples_of(outputs: Any) -> Iterator[Any]:
    """Yield the outputs for each sample of a batch, in the same structure."""
    lengths = [len(leaf) for leaf in prediction.leaves_of(outputs).values()]
    if len(set(lengths)) != 1:
        raise UserError(
            f"predict: the outputs do not have one entry per sample: their lengths are {lengths}.\n"
            "Override predict_batch to return tensors of shape (N, ...) and lists of length N; "
            f"{HOW}."
        )
    for i in range(lengths[0]):

        def of_sample(_: str, leaf: Any, i: int = i) -> Any:
            return leaf[i]

        yield batches.walk(of_sample, outputs, "outputs", prediction.list_dim)


def image_batches(
    path: str, about: Description, size: int, skip: bool
) -> Iterator[tuple[Sequence[str], Tensor]]:
    """Yield (paths, resized uint8 pixels (N, C, H, W)) for one image, or all images in a folder."""
    channels, *shape = about["in_shape"]
    resize = about.get("resize") or True
    files = [path]
    if os.path.isdir(path):
        skipped: Counter[str] = Counter()
        files = sorted(file for file, _, _ in images.images_below(path, skipped))
        images.warn_of_skipped(path, skipped)
    broken: list[str] = []

    def decode(file: str) -> tuple[str, Tensor] | None:
        try:
            return file, images.decode_image(file, shape, channels, resize)
        except images.BrokenImage:
            if not skip:
                raise
            broken.append(printable(file))
            return None

    with ThreadPoolExecutor(images.decoding_threads(shape)) as pool:
        for start in range(0, len(files), size):
            readable = list(filter(None, pool.map(decode, files[start : start + size])))
            if readable:
                names, pixels = zip(*readable, strict=True)
                yield names, torch.stack(pixels)

    if len(broken) == len(files):
        raise UserError(
            f"input={printable(path)}: no readable image was found. Type input=FOLDER or "
            f"input=IMAGE. Supported formats: {', '.join(images.IMAGE_ENDINGS)}."
        )
    if broken:
        log.warning("Skipped %d images that cannot be read, such as %s.", len(broken), broken[0])


def write(rows: Iterable[Row], output: str | Path | None = None) -> int:
    """Write what `predict` yields to a .csv or .jsonl file, and return the number of rows.

    The file is written atomically. Without `output`, print each row as a line of JSON.
    """
    count = 0
    if output is None:
        for row in rows:
            print(json.dumps(row))
            count += 1
        return count
    path = Path(output)
    with (
        replacing(path) as partial,
        open(partial, "w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        for count, row in enumerate(rows, 1):
            if path.suffix == ".jsonl":
                file.write(json.dumps(row) + "\n")
                continue
            cells = flat(row)
            if count == 1:
                writer.writerow(cells)
            writer.writerow(cells.values())
    return count


def flat(row: Row) -> Row:
    """Return {column: cell} for a row, with P(class) per class and other nested values as JSON."""
    cells: Row = {}
    for key, value in row.items():
        if key == "probabilities":
            cells |= {f"P({name})": number for name, number in value.items()}
        elif isinstance(value, (dict, list)):
            cells[key] = json.dumps(value)
        else:
            cells[key] = value
    return cells


def check_output(output: str | Path, endings: Sequence[str] = ()) -> None:
    """Raise UserError unless `output` can be created as a file, with one of the `endings` if given.

    Call this before computing anything. An existing file is never overwritten.
    """
    path = Path(output)
    shown = f"output={printable(output)}"
    if os.path.lexists(path):
        raise UserError(f"{shown}: this file already exists. Choose a different output.")
    if not path.parent.is_dir():
        raise UserError(f"{shown}: the folder for this file does not exist. Create it first.")
    if endings and path.suffix not in endings:
        raise UserError(
            f"{shown}: the name does not end in {' or '.join(endings)}. "
            f"Type output=NAME{endings[0]}."
        )
