"""A trained model in a form that others read: ONNX, torch.export, safetensors; compared with the eager model."""

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import json
import logging
import math
import os
import time
import warnings
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from stoker.command.build import build
from stoker.command.settings import FORMATS
from stoker.runs import card, saved_config
from stoker.runs.card import is_usual
from stoker.runs.directory import make
from stoker.runs.inference import check_output, row_batches
from stoker.runs.provenance import versions
from stoker.runs.result import RunResult
from stoker.trainer import checkpoint
from stoker.trainer.batch import entries
from stoker.trainer.errors import TrainingError, UserError, check_choice, log, printable
from stoker.trainer.files import replacing, write_text

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "safetensors": "model.safetensors"}
SAMPLES = 64  # that the outputs are compared on, in batches of 1, 3 and all
TOLERANCE = 1e-4  # of the largest output: fp32 sums in another order differ by 1e-6 of it
SHOWN = (
    "model",
    "dataset",
    "loss",
    "optimizer",
    "scheduler",
    "epochs",
    "max_steps",
    "batch_size",
    "ema",
    "seed",
)
PLACES = ("root", "path", "cache", "resident", "workers", "timeout")
CARD = """# {name}

- File: `{file}`, {parameters} parameters, {form}
{facts}- Exported: {exported}
- Trained on: {dataset}
- Results: {results}
- Checked: outputs differ by at most {difference:.2g} from PyTorch's on {checked}

```python
{snippet}
```
{modules}The configuration of its training:
```yaml
{config}
```
"""
ONNX = """import numpy as np
import onnxruntime
{imports}
session = onnxruntime.InferenceSession("{file}")
{inputs}
outputs = session.run(None, {{"inputs": inputs}})[0]
{show}"""
TORCH = """import torch
import numpy as np
{imports}
model = torch.export.load("{file}").module()
{inputs}
outputs = model(torch.as_tensor(inputs)).numpy()
{show}"""
WEIGHTS = """import json
from safetensors import safe_open
from safetensors.torch import load_file

weights = load_file("{file}")  # {{name: tensor}}; runs no code
with safe_open("{file}", framework="pt") as file:
    about = json.loads(file.metadata()["inputs"])  # the preprocessing: mean, std, columns, classes
print(about["kind"], len(weights), "tensors")"""
MODULES = """Make the same modules with the same names, then `model.load_state_dict(weights)` and `model.eval()`:
```
{}
```
"""
FORMS = {
    "onnx": "ONNX, preprocessing inside, for any number of samples at once",
    "torch_export": "a program of torch.export, preprocessing inside, for any number of samples at once",
    "safetensors": "the weights by name, the numbers of the preprocessing in the file's metadata",
}


def check(form, output=None):
    """UserError where a format is still to be chosen, needs what is not installed, or cannot be written to `output`."""
    if form is None:
        raise UserError(f"task=export needs a format. Type format= one of: {', '.join(FILES)}.")
    check_choice("format", form, FORMATS)
    missing = [
        name
        for name in ("onnx", "onnxscript", "onnxruntime")
        if importlib.util.find_spec(name) is None
    ]
    if form == "onnx" and missing:
        raise UserError(
            f"format=onnx needs {' and '.join(missing)}.\nType pip install -e '.[onnx]'."
        )
    if output is not None:
        check_output(output)
        check_output(f"{output}.md")


def samples(about, dataset):
    """(inputs, whose they are): some of the run's test data, or generated ones where that is not here.

    `dataset` is the node of the run's data set. Of a table the first rows are taken, as they stand in it. What is
    generated are pixels of all values, or numbers about the mean of each column.
    """
    try:
        if about["table"] is not None:
            path = os.path.expanduser(str(dataset.get("path")))
            _, inputs = next(
                row_batches(
                    path, about["table"], SAMPLES, None, dataset.get("delimiter"), "dataset.path"
                )
            )
            return inputs, f"{len(inputs)} rows of {printable(os.path.basename(path))}"
        data = build("dataset", dataset)
        data.prepare_as(about)
        name, part = ("test", data.test) if data.test is not None else ("training", data.train)
        inputs = part[list(range(min(SAMPLES, len(part))))][0]
        return inputs, f"{len(inputs)} {name} samples of {data.name}"
    except (UserError, OSError) as error:
        log.warning(
            "The run's data cannot be had, so generated inputs are compared: %s",
            " ".join(str(error).split("\n")),
        )
    return generated(about), f"{SAMPLES} generated samples"


def generated(about):
    """Inputs as a `Trained` model takes them, without any data."""
    shape, generator = (SAMPLES, *about["in_shape"]), torch.Generator().manual_seed(0)
    if about["dtype"] == "uint8":
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    noise, dtype = (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        getattr(torch, about["dtype"]),
    )
    if about["table"] is None:  # whole numbers may be places in a table, such as an embedding's
        return noise.to(dtype) if dtype.is_floating_point else (noise > 0).to(dtype)
    columns = []
    for column in about["table"]["columns"]:
        kinds, number = column.get("categories"), noise[:, len(columns)]
        if kinds is None:
            columns.append(number * column["std"] + column["mean"])
        else:
            chosen = torch.randint(0, len(kinds), (SAMPLES,), generator=generator)
            columns += torch.nn.functional.one_hot(chosen, len(kinds)).double().T
    return torch.stack(list(columns), 1)


def export(model, folder, form, inputs, whose, output=None):
    """(path, largest difference, its scale): writes a `Trained` model, and path.md, which says how to use it.

    Its outputs for batches of 1, 3 and all of the `inputs` are compared with the eager model's. TrainingError where
    they differ by more than rounding, UserError where the model cannot be exported; then nothing is written.
    """
    path = place(folder, form, output)
    with replacing(path) as partial:
        try:
            with warnings.catch_warnings(), quiet():
                warnings.simplefilter("ignore")
                with torch.inference_mode():
                    outputs = model(inputs[:1])
                if form != "safetensors" and not isinstance(outputs, torch.Tensor):
                    raise TypeError(
                        f"it gives a {type(outputs).__name__}, and an exported one gives a tensor"
                    )
                run = WRITERS[form](model, inputs, partial)
                difference, largest = compare(model, run, inputs)
        except (MemoryError, OSError, TrainingError):
            raise
        except (
            Exception
        ) as error:  # the exporters raise what they like for what they do not understand
            reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
            advice = (
                "Type format=safetensors for the weights alone." if form != "safetensors" else ""
            )
            if "Constraints violated (batch)" in reason:
                constant = "Its forward makes a constant of the number of samples"
                advice = f"{constant}: write x.shape[0] in place of len(x).\n{advice}"
            raise UserError(
                f"format={form}: this model cannot be exported ({reason}).\n{advice}"
            ) from error
        if not difference <= TOLERANCE * largest and draws(model, inputs):
            what = "its forward draws random numbers, and what is exported would draw others"
            raise UserError(
                f"format={form}: {what}.\nType format=safetensors for the weights alone."
            )
        if not difference <= TOLERANCE * largest:  # nor for nan
            what = f"its outputs differ by {difference:.2g} from PyTorch's on {whose}, which are up to {largest:.3g}"
            raise TrainingError(f"format={form}: {what}. Nothing was written.")
    write_card(path, model, folder, form, inputs, whose, difference, outputs)
    return path, difference, largest


def place(folder, form, output):
    """Where the file goes: `output`, or in the run directory, export/, where a new one replaces an older one."""
    if output is not None:
        return Path(output)
    path = Path(folder) / "export" / FILES[form]
    if path.parent.is_symlink():
        raise UserError(
            f"run={folder}: export in it is a link, and may lead anywhere. Type output=FILE."
        )
    make(path.parent, "output")
    return path


def to_onnx(model, inputs, path):
    import onnxruntime

    program = torch.onnx.export(
        traced(model, inputs),
        input_names=["inputs"],
        output_names=["outputs"],
        dynamo=True,
        verbose=False,
    )
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: torch.as_tensor(session.run(None, {"inputs": batch.numpy()})[0])


def to_torch(model, inputs, path):
    with open(path, "wb") as file:
        torch.export.save(traced(model, inputs), file)
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def to_safetensors(model, inputs, path):
    weights = checkpoint.own_storage(dict(model.module.state_dict()))
    save_file(weights, path, {"format": "pt", "inputs": json.dumps(model.about)})
    own = copy.deepcopy(model)
    own.module.load_state_dict(load_file(path))
    return own


WRITERS = {"onnx": to_onnx, "torch_export": to_torch, "safetensors": to_safetensors}


def traced(model, inputs):
    """The torch.export program of the model, for batches of any size."""
    example = inputs[[0, -1]]  # a size of 1 would be taken for a constant
    return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def compare(model, run, inputs):
    """(the largest difference between the outputs of both, the largest output), on batches of 1, 3 and all.

    The outputs are taken from their mean in the training, and 1, or a deviation there, counts as large.
    """
    differences, largest = (
        [],
        [model.target_scale.max().item() if model.rescales else 1.0],
    )
    center = model.target_mean if model.rescales else 0.0
    with torch.inference_mode():
        for size in (1, 3, len(inputs)):
            both = [
                [tensor for _, tensor in entries(drawn(of, inputs[:size]))] for of in (model, run)
            ]
            for expected, given in zip(*both, strict=True):
                if given.shape != expected.shape:
                    what = f"{tuple(given.shape)} in place of {tuple(expected.shape)}"
                    raise TrainingError(f"The exported model gives {what}.")
                differences.append((given - expected).abs().max().item())
                largest.append((expected - center).abs().max().item())
    return max(differences, key=lambda value: (math.isnan(value), value)), max(largest)


def drawn(of, inputs, seed=0):
    """What `of` gives, its random numbers those of this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return of(inputs)


def draws(model, inputs):
    """Whether the outputs of a model are others with other random numbers."""
    with torch.inference_mode():
        both = [
            [tensor for _, tensor in entries(drawn(model, inputs[:3], seed))] for seed in (0, 1)
        ]
    return any(not torch.equal(first, second) for first, second in zip(*both, strict=True))


@contextlib.contextmanager
def quiet():
    """Keeps what the exporters print to themselves: only what went wrong matters, which they raise."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def write_card(path, model, folder, form, inputs, whose, difference, outputs):
    about, result = model.about, RunResult.read(folder) or RunResult()
    imports, reads = reading(about, inputs)
    lines = str(model.module).splitlines()
    show = "print(outputs[0])"
    if about["classes"] and is_usual(outputs, about):
        show = f"classes = {about['classes']}\nprint(classes[outputs[0].argmax()])"
    snippet = {"onnx": ONNX, "torch_export": TORCH, "safetensors": WEIGHTS}[form]
    text = CARD.format(
        name=printable(type(model.module).__name__),
        file=path.name,
        parameters=f"{sum(p.numel() for p in model.module.parameters()):,}",
        form=FORMS[form],
        exported=printable(exported(form, result)),
        facts=card.facts(about, is_usual(outputs, about))
        if form == "safetensors"
        else facts(about, outputs),
        dataset=printable(about["dataset"]),
        results=printable(card.results(result)),
        difference=difference,
        checked=whose,
        modules=MODULES.format("\n".join(map(printable, lines))) if form == "safetensors" else "",
        snippet=snippet.format(file=path.name, imports=imports, inputs=reads, show=show),
        config=yaml.safe_dump(
            shown(saved_config.load_config("run", folder)), sort_keys=False
        ).strip(),
    )
    write_text(path.with_name(f"{path.name}.md"), text)


def shown(config):
    """What a card shows of a run's config: the parts, and none of the places of the machine that it was trained on."""
    parts = {key: config[key] for key in SHOWN if config.get(key) is not None}
    if isinstance(parts.get("dataset"), dict):
        parts["dataset"] = {
            key: value for key, value in parts["dataset"].items() if key not in PLACES
        }
    return parts


def facts(about, outputs):
    """The lines that say what goes into an exported model, whose preprocessing is inside, and what comes out."""
    shape, given = (", ".join(map(str, sizes)) for sizes in (about["in_shape"], outputs.shape[1:]))
    if about["table"] is not None:
        takes = f"`inputs`, float64 of shape (N, {shape}): {columns(about['table'])}"
    elif about["dtype"] == "uint8":
        takes = f"`inputs`, uint8 of shape (N, {shape}), the pixels from 0 to 255; they are normalised inside"
    else:
        takes = f"`inputs`, {about['dtype']} of shape (N, {shape})"
    gives = f"`outputs` of shape (N, {given})"
    if not is_usual(outputs, about):
        gives += ", as the model itself gives them"
    elif about["kind"] == "regression":
        gives += f", numbers{card.of_target(about)} in the data's own units"
    else:
        gives += f", a score a class{card.of_target(about)}, the largest being the one predicted (softmax: shares)"
    classes = card.classes(about) if is_usual(outputs, about) else []
    lines = [f"- Takes: {takes}", f"- Gives: {gives}", *card.images(about), *classes]
    return "".join(f"{printable(line)}\n" for line in lines)


def columns(table):
    """What a row of numbers consists of, from left to right, and what is there for a value that is missing."""
    names = []
    for column in table["columns"]:
        kinds = column.get("categories")
        names.append(
            column["name"]
            if kinds is None
            else f"{column['name']} (0 or 1 for each of {card.listed(kinds)})"
        )
    gaps = [
        "no number may be missing"
        if table["missing"] != "mean"
        else "a number that is missing is nan"
    ]
    if any("categories" in column for column in table["columns"]):
        gaps.append("a category that is missing, or another one, is 0 for each")
    return f"{'; '.join(names)}. Numbers are as in the table; {', and '.join(gaps)}"


def exported(form, result):
    """'2026-08-01, the weights of step 140, with python 3.12.3, torch 2.10.0' of an export that is made now."""
    numbers = {
        name: number for name, number in versions().items() if name not in ("platform", "hydra")
    }
    numbers |= {
        name: importlib.metadata.version(name) for name in ("onnx", "onnxscript") if form == "onnx"
    }
    step = card.step_of(result)
    of_step = [f"the weights of step {step}"] if step is not None else []
    by = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return ", ".join([time.strftime("%Y-%m-%d"), *of_step, f"with {by}"])


def reading(about, inputs):
    """(imports, lines) of Python that make `inputs` for a card's example: an image, or a row."""
    shape = about["in_shape"]
    if card.is_image(about):
        mode, to_batch = (
            ("L", "[None, None]") if shape[0] == 1 else ("RGB", ".transpose(2, 0, 1)[None]")
        )
        resized = f'.convert("{mode}").resize(({shape[2]}, {shape[1]}), Image.Resampling.BILINEAR)'
        return (
            "from PIL import Image, ImageOps\n",
            f'image = ImageOps.exif_transpose(Image.open("image.png")){resized}\ninputs = np.array(image){to_batch}',
        )
    if about["table"] is not None and shape[0] <= 20:
        row = ", ".join(
            "np.nan" if math.isnan(value) else repr(value) for value in inputs[0].tolist()
        )
        return "", f"inputs = np.array([[{row}]], dtype=np.float64)"
    kind = "float64" if about["table"] is not None else about["dtype"]
    return "", f"inputs = np.zeros((1, {', '.join(map(str, shape))}), dtype=np.{kind})"
