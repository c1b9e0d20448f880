"""A trained model ready to use: loaded from its run directory, with its preprocessing, and applied to files."""

import copy
import csv
import itertools
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig

from stoker.command import build, trust
from stoker.data import images, tables
from stoker.data.description import is_description, names_of
from stoker.runs import card, resume, saved_config
from stoker.trainer import checkpoint, parallel
from stoker.trainer import device as devices
from stoker.trainer.errors import TrainingError, UserError, log, printable
from stoker.trainer.files import replacing
from stoker.trainer.trainer import Trainer

AT_ONCE = 256 * devices.MIB  # bytes of inputs that are worked on together, at most


class Trained(torch.nn.Module):
    """A trained model and its preprocessing: what its data set gives -> class scores, or numbers in the data's units.

    `inputs` are uint8 pixels (N, C, H, W) where the data set has images; of a table the numbers of `columns` as they
    stand in it, (N, columns), and 0 or 1 for each category, to be computed with in float64; anything else as it is.
    `classes` are the names of the scores, None for a regression, and `about` is what the data set said of itself
    (Data.description).
    """

    def __init__(self, module, about):
        super().__init__()
        self.module, self.about = module, about
        self.classes, self.columns = about["classes"], columns_of(about["table"])
        self.pixels = about["dtype"] == "uint8"
        for name, value in constants(about).items():
            if value is None:  # not as a buffer, which torch.export would miscount
                setattr(self, name, None)
            else:
                self.register_buffer(name, value, persistent=False)

    def forward(self, inputs):
        self.check(inputs)
        if self.pixels:
            inputs = inputs.float() * self.scale + self.offset
        elif self.columns is not None:
            inputs = (inputs.to(self.mean.dtype) - self.mean) / self.std
            if self.about["table"]["missing"] == "mean":
                inputs = torch.where(inputs.isnan(), 0.0, inputs)
            inputs = inputs.float()
        outputs = self.module(inputs)
        if self.target_mean is not None and card.is_usual(outputs, self.about):
            outputs = outputs.to(self.target_mean.dtype) * self.target_scale + self.target_mean
        return outputs

    def check(self, inputs):
        """UserError for inputs of another type or shape than the data set's."""
        shape, tensor = self.about["in_shape"], isinstance(inputs, torch.Tensor)
        if (
            tensor
            and list(inputs.shape[1:]) == shape
            and (inputs.dtype == torch.uint8 or not self.pixels)
        ):
            return
        takes = (
            f"a torch.Tensor{' of uint8' if self.pixels else ''}, (N, {', '.join(map(str, shape))})"
        )
        takes += ": the numbers of model.columns, in this order" if self.columns is not None else ""
        given = (
            f"{inputs.dtype} of shape {tuple(inputs.shape)}"
            if tensor
            else f"a {type(inputs).__name__}"
        )
        advice = (
            ""
            if tensor
            else "\nGive torch.as_tensor(inputs), where these are an array or lists of numbers."
        )
        advice = (
            "\nGive inputs[None] for a single sample."
            if tensor and list(inputs.shape) == shape
            else advice
        )
        raise UserError(
            f"{self.about['dataset']}: the model takes {takes}. This is {given}.{advice}"
        )


def constants(about):
    """{name: tensor or None} of the numbers of the preprocessing; they are computed as a loader does it."""
    found = {
        "scale": None,
        "offset": None,
        "mean": None,
        "std": None,
        "target_mean": None,
        "target_scale": None,
    }
    if about["dtype"] == "uint8":
        mean, std = torch.tensor(about["mean"] or 0.0), torch.tensor(about["std"] or 1.0)
        shape = (-1, *[1] * (len(about["in_shape"]) - 1)) if mean.ndim or std.ndim else ()
        found["scale"], found["offset"] = (
            (1 / (255 * std)).reshape(shape),
            (-mean / std).reshape(shape),
        )
    elif about["table"] is not None:
        ones = [
            (c["mean"], c["std"]) if "mean" in c else (0.0, 1.0)
            for c in about["table"]["columns"]
            for _ in names_of(c)
        ]
        found["mean"], found["std"] = torch.tensor(ones, dtype=torch.float64).T.contiguous()
    if about["kind"] == "regression" and (about["target_mean"], about["target_scale"]) != (
        0.0,
        1.0,
    ):
        for name in ("target_mean", "target_scale"):
            found[name] = torch.tensor(about[name], dtype=torch.float64)
    return found


def columns_of(table):
    return (
        None
        if table is None
        else [name for column in table["columns"] for name in names_of(column)]
    )


def load(folder, device="cpu", trusted=()):
    """The `Trained` model of a run directory: its best weights, those that were tested, in eval mode on `device`.

    Its data set is not needed. The folder may be anybody's: only trusted constructors are built, beside those of the
    packages in `trusted`. UserError for what is no run directory, TrainingError where no checkpoint of it is good.
    """
    with trust.trusting([trusted] if isinstance(trusted, str) else trusted):
        device = devices.choose(device)
        saved_config.check_folder(folder)
        config = saved_config.load_config("run", folder)
        try:
            config = saved_config.resolved("run", folder, config, ("model", "callbacks"))
            _, state = best(folder)
            about = description(folder, state)
            if about is None:
                what = "its checkpoints do not say what the inputs are; an older version wrote them"
                raise UserError(f"{what}.\nType the command that trained it with another run_dir.")
            with torch.random.fork_rng(devices=[]):
                module = tested(config, state, about)
        except UserError as error:
            raise saved_config.of_run(folder, in_python(error)) from None
    model = Trained(module, about).eval().requires_grad_(False)
    return (model.float() if device.type == "mps" else model).to(device)  # mps has no float64


def in_python(error):
    """The error with its advice on what to trust as Python takes it, where there is no command line."""
    if HydraConfig.initialized():
        return error
    return UserError(re.sub(r"trusted=\[(\w+)\]", r'trusted=["\1"]', str(error)))


def best(folder):
    """(path, state) of a run's best checkpoint; an error where it has none."""
    try:
        found = checkpoint.best(Path(folder) / "checkpoints")
    except TrainingError as error:  # its advice is for a training
        alone = Path(folder) / "model.safetensors"
        what = f"The tested weights are in {alone}, and model.md beside it says how to load them."
        raise TrainingError(
            f"{str(error).splitlines()[0]}\n{what if alone.is_file() else ''}"
        ) from None
    if found is None:
        raise UserError(
            f"run={folder}: no checkpoint is in it. Type the command that made it and run_dir={folder}."
        )
    return found


def tested(config, state, about):
    """The module with the weights that are evaluated, such as an average of them, which its callbacks know."""
    if not isinstance(state.get("model"), dict) or not all(
        isinstance(x, torch.Tensor) for x in state["model"].values()
    ):
        raise UserError("its checkpoint has no model's weights.")
    sizes = {"in_shape": tuple(about["in_shape"]), "num_classes": about["num_classes"]}
    build.without_downloads("model", config["model"])
    build.check_size("model", config["model"], state["model"], **sizes)
    module = build.build("model", config["model"], **sizes)
    nodes = saved_config.evaluating_callbacks(config["callbacks"])
    for name, node in nodes.items():
        build.check_nested(f"callbacks.{name}", node)
    callbacks = [build.build(f"callbacks.{name}", node) for name, node in nodes.items()]
    token = parallel.alone.set(
        True
    )  # it only asks the callbacks, whichever of several processes it is
    try:
        with Trainer(
            module, callbacks=callbacks, device="cpu", strategy="single", channels_last=False
        ) as trainer:
            trainer.load_state_dict(state)
            with trainer.evaluating():  # a copy: other weights may be there for the time of it
                weights = copy.deepcopy(dict(module.state_dict()))
    finally:
        parallel.alone.reset(token)
    module.load_state_dict(weights)
    return module


def description(folder, state):
    """What a checkpoint says of the inputs and outputs of its model, None in one of before; UserError for nonsense."""
    about = resume.about(state).get("inputs")
    if about is None:
        return None
    if not is_description(about):
        raise UserError(
            f"run={folder}: what its checkpoint says of the inputs is nothing that a run has written."
        )
    return about


def predict(model, path, *, batch_size=512, missing=None, delimiter=None, skip=False):
    """Yields what a `Trained` model says of an image, of the images below a folder, or of the rows of a csv file.

    That is {"file" or "line", "class", "probability", "probabilities": {class: its own}}, or of a regression a
    "value", in the data's own units. One batch after another is read, whatever their number. `missing` and `delimiter`
    are those of the run's table unless they are given. UserError for what cannot be read; with `skip` such images are
    left out, with a warning.
    """
    about, path = model.about, os.path.expanduser(str(path))
    size = max(1, min(batch_size, AT_ONCE // (8 * math.prod(about["in_shape"]))))
    if model.columns is not None:
        key, batches = "line", row_batches(path, about["table"], size, missing, delimiter)
    elif card.is_image(about):
        key, batches = "file", image_batches(path, about["in_shape"], size, skip)
    else:
        what = f"the run was trained on {about['dataset']}, which is neither images nor a table"
        raise UserError(
            f"input={printable(path)}: {what}.\nIn Python, stoker.load(DIR) takes its tensors."
        )
    device, names = next(model.parameters(), torch.empty(0)).device, model.classes
    for labels, inputs in batches:
        with torch.inference_mode():
            outputs = model(inputs.to(device))
        if not card.is_usual(outputs, about):
            tensor = isinstance(outputs, torch.Tensor)
            what = (
                f"outputs of shape {tuple(outputs.shape[1:])}"
                if tensor
                else f"a {type(outputs).__name__}"
            )
            what += ", and not one number a class or target"
            raise UserError(f"the model gives {what}.\nIn Python, stoker.load(DIR) gives them.")
        outputs = outputs.cpu()
        if not outputs.isfinite().all():
            first = labels[(~outputs.isfinite()).flatten(1).any(1).nonzero()[0].item()]
            where = f"{printable(path)}, line {first}" if key == "line" else printable(first)
            raise TrainingError(f"{where}: the model gives numbers that are not finite.")
        if about["kind"] == "regression":
            for label, values in zip(labels, outputs.tolist(), strict=True):
                yield {key: label, "value": values[0] if len(values) == 1 else values}
            continue
        names = names or [str(i) for i in range(about["num_classes"])]
        for label, shares in zip(labels, outputs.softmax(1).tolist(), strict=True):
            shares = [float(f"{share:.9g}") for share in shares]  # as many digits as a float32 has
            most = max(range(len(shares)), key=shares.__getitem__)
            found = {"class": names[most], "probability": shares[most]}
            yield {key: label, **found, "probabilities": dict(zip(names, shares, strict=True))}


def row_batches(path, table, size, missing=None, delimiter=None, key="input"):
    """Yields (the numbers of their lines, float64 (N, columns)) of the rows of a csv file."""
    if os.path.isdir(path):
        raise UserError(
            f"{key}={printable(path)}: this is a folder, and the run takes a table. Type {key}=FILE.csv."
        )
    delimiter = table["delimiter"] if delimiter is None else delimiter
    names = [column["name"] for column in table["columns"]]
    alone = names[0] if len(names) == 1 else None
    rows = tables.read_rows(path, delimiter, key, alone)
    _, header = next(rows)
    missing = table["missing"] if missing is None else missing
    encode = tables.RowEncoder(table, header, path, missing).encode
    encoded = ((line, row) for line, values in rows if (row := encode(line, values)) is not None)
    empty = True
    while batch := list(itertools.islice(encoded, size)):
        lines, inputs = zip(*batch, strict=True)
        yield lines, torch.tensor(inputs, dtype=torch.float64)
        empty = False
    if empty:
        raise UserError(f"{key}={printable(path)}: there is no row in it.")


def image_batches(path, in_shape, size, skip):
    """Yields (their paths, uint8 (N, C, H, W)) of the images below a folder, or of one; resized to what is taken."""
    if not os.path.exists(path):
        raise UserError(f"input={printable(path)}: there is no such file or folder.")
    channels, *shape = in_shape
    alone = not os.path.isdir(path)
    files = iter([path]) if alone else images_below(path)
    large = math.prod(shape) >= 256 * 256
    broken, given, endings = [], 0, ", ".join(images.IMAGE_ENDINGS)

    def decode(file):
        try:
            return images.decode_image(file, shape, channels, resize=True)
        except images.BrokenImage as error:
            if alone:
                what = f"The run takes an image, or a folder of images ({endings})"
                raise UserError(f"input={str(error).splitlines()[0]}\n{what}.") from None
            if not skip:
                raise
            broken.append(file)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16) if large else 1) as pool:
        while batch := list(itertools.islice(files, size)):
            pixels = list(pool.map(decode, batch))
            there = [file for file, image in zip(batch, pixels, strict=True) if image is not None]
            given += len(there)
            if there:
                yield there, torch.stack([image for image in pixels if image is not None])
    shown = ", ".join(map(printable, broken[:3])) + ", ..." * (len(broken) > 3)
    if not given:
        what = (
            f"none of its images can be read ({shown})"
            if broken
            else f"there is no image below it ({endings})"
        )
        raise UserError(f"input={printable(path)}: {what}. Type input=FOLDER or input=IMAGE.")
    if broken:
        what = "images cannot be read and are" if len(broken) > 1 else "image cannot be read and is"
        log.warning("%d %s left out: %s", len(broken), what, shown)


def images_below(folder):
    """Yields the paths of the images below a folder, in the order of their names; no links to folders are followed."""

    def refuse(error):
        raise UserError(
            f"{printable(error.filename)}: this folder cannot be read ({error.strerror})."
        )

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.lower().endswith(images.IMAGE_ENDINGS) and not name.startswith("."):
                yield os.path.join(root, name)


def write(rows, output=None):
    """Writes what `predict` gives to a .csv or .jsonl file, whole or not at all, and gives the number of rows.

    Without `output`, each is printed as a line of JSON.
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
        for row in rows:
            if path.suffix == ".jsonl":
                file.write(json.dumps(row) + "\n")
            else:
                cells = flat(row)
                if not count:
                    writer.writerow(cells)
                writer.writerow(cells.values())
            count += 1
    return count


def flat(row):
    """{column: value} of what `predict` gives: a column for each class, P(class), or for each of several targets."""
    cells = {
        key: value
        for key, value in row.items()
        if key != "probabilities" and not isinstance(value, list)
    }
    cells |= {f"P({name})": share for name, share in row.get("probabilities", {}).items()}
    if isinstance(row.get("value"), list):
        cells |= {f"value {i}": value for i, value in enumerate(row["value"])}
    return cells


def check_output(output, endings=()):
    """UserError where no new file can be written to `output`, a name with one of the endings if there are any.

    Looked at before anything is computed. Whose a file is that is there already, nobody knows: none is replaced.
    """
    path, shown = Path(output), f"output={printable(output)}"
    if str(output) == "-":
        raise UserError(
            "output=-: give the name of a file. What task=predict finds is printed where there is none."
        )
    if path.is_dir() or not path.parent.is_dir():
        what = (
            "this is a folder" if path.is_dir() else f"there is no folder {printable(path.parent)}"
        )
        raise UserError(f"{shown}: {what}. Type output=FILE for a new file.")
    if endings and path.suffix not in endings:
        raise UserError(
            f"{shown}: its name does not end in {' or '.join(endings)}. Type output=NAME{endings[0]}."
        )
    if os.path.lexists(path):
        raise UserError(
            f"{shown}: there is such a file, and none is replaced. Type another output, or remove it."
        )
