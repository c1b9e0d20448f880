"""What a run leaves to share: the weights, and a card on what they are and how to load them."""

import json
from pathlib import Path
from typing import Any

import torch

from stoker.command.shell import command
from stoker.command.trust import own_packages
from stoker.runs.result import RunResult
from stoker.trainer import checkpoint, parallel
from stoker.trainer.errors import printable
from stoker.trainer.files import write_text
from stoker.trainer.readable import numbers
from stoker.trainer.trainer import Trainer

# The inputs and outputs of a model: `data.description()` of its training data.
Description = dict[str, Any]
OUTPUTS = {"classification": "class scores", "regression": "numbers"}
CARD = """# {name}

- Weights: `model.safetensors`, {parameters} parameters, those of step {step}
{facts}- Results: {results}
- Trained by: `{command}` ({versions})

With the project and the run directory that it is from, it is ready to use: pixels go in as bytes, or a table's
numbers as they stand in it, with 0 or 1 for each category (`model.columns`).
```python
import stoker

model = stoker.load({load})  # in eval mode, its preprocessing inside; model.classes are the names
```
Without either, make the same modules with the same names, which are below:
```python
from safetensors.torch import load_file

weights = load_file("model.safetensors")  # {{name: tensor}}; runs no code
model.load_state_dict(weights)
model.eval()
```
```
{module}
```
"""


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of the weights that are evaluated, by name; call it on all ranks."""
    with trainer.evaluating():  # with ema, these are the averaged weights
        return checkpoint.copy(dict(trainer.module.state_dict()))


def write(
    folder: Path,
    weights: dict[str, torch.Tensor],
    module: torch.nn.Module,
    data: Any,
    result: RunResult,
    usual: bool = True,
) -> None:
    """Write model.safetensors, the tested weights, and model.md, the card that describes them.

    `usual`: whether the module's outputs are one number per class or target.
    """
    about = data.description()
    # A single entry: several have the order of a hash, and equal weights would give unequal files.
    checkpoint.write_tensors(folder / "model.safetensors", weights, {"inputs": json.dumps(about)})
    overrides = result.overrides or []
    arguments = [json.dumps(str(folder))]
    packages = own_packages(overrides)
    if packages:
        arguments.append(f"trusted={json.dumps(packages)}")
    versions = dict(result.versions or {})
    versions.pop("platform", None)
    text = parallel.plain_text(module)
    card = CARD.format(
        name=text.partition("(")[0],
        parameters=f"{result.parameters:,}",
        facts=facts(about, usual),
        results=results(result),
        step=f"{step_of(result):,}",
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        command=command(overrides),
        load=", ".join(arguments),
        module=text,
    )
    write_text(folder / "model.md", card)


def is_usual(outputs: Any, about: Description) -> bool:
    """Whether a model's outputs are one number per class, or target, for each sample."""
    return isinstance(outputs, torch.Tensor) and outputs.shape[1:] == (about["num_classes"],)


def is_image(about: Description) -> bool:
    """Whether the inputs are images as in files: grey or RGB."""
    shape = about["in_shape"]
    return about["dtype"] == "uint8" and len(shape) == 3 and shape[0] in (1, 3)


def step_of(result: RunResult) -> int | None:
    """Return the step of the shared weights; None if the result lacks it."""
    return result.steps if result.best is None else result.best.step


def facts(about: Description, usual: bool = True) -> str:
    """Return the lines on the inputs and outputs of the module."""
    outputs = outputs_of(about) if usual else "as the model returns them"
    lines = [f"- Inputs: {inputs_of(about)}", f"- Outputs: {outputs}"]
    table = about["table"]
    if table:
        columns = "; ".join(f"{column['name']} {described(column)}" for column in table["columns"])
        if table["missing"] == "mean":
            columns += "; then 0 for a number that is missing"
        lines.append(f"- Columns, in order: {columns}")
    lines += images(about)
    if usual:
        lines += classes(about)
    return "".join(f"{printable(line)}\n" for line in lines)


def inputs_of(about: Description) -> str:
    """Return 'float32 of shape (N, 1, 8, 8), pixel / 255': the inputs of the module."""
    shape = ", ".join(map(str, about["in_shape"]))
    if about["dtype"] != "uint8":
        return f"{about['dtype']} of shape (N, {shape})"
    inputs = f"float32 of shape (N, {shape})"
    if not about["mean"] and not about["std"]:
        return f"{inputs}, pixel / 255"
    norm = f"mean {about['mean'] or 0}, std {about['std'] or 1}"
    return f"{inputs}, (pixel / 255 - mean) / std by channel, {norm}"


def outputs_of(about: Description) -> str:
    """Return '(N, 10) class scores': the outputs of the module."""
    outputs = f"(N, {about['num_classes']}) {OUTPUTS[about['kind']]}{of_target(about)}"
    scale = (about["target_mean"], about["target_scale"])
    if about["kind"] == "regression" and scale != (0, 1):
        outputs += f", which are (value - {about['target_mean']}) / {about['target_scale']}"
    return outputs


def of_target(about: Description) -> str:
    """Return ' of price' for a table's target; '' if it has no name."""
    return f" of {about['table']['target']}" if about["table"] else ""


def images(about: Description) -> list[str]:
    """Return the line that says how an image file becomes an input, if the inputs are images."""
    if not is_image(about):
        return []
    size = "x".join(map(str, about["in_shape"][1:]))
    resized = f"then resized to {size} (height x width), bilinear and not cropped"
    return [f"- An image file: turned as its EXIF says, {resized}"]


def classes(about: Description) -> list[str]:
    """Return the line with the names of the classes, if they have names."""
    return [f"- Classes, in order: {listed(about['classes'])}"] if about["classes"] else []


def listed(names: list[str]) -> str:
    """Return 'a, b'; a name with a comma or semicolon in it stands in quotes."""
    return ", ".join(repr(name) if {",", ";"} & set(name) else name for name in names)


def described(column: dict[str, Any]) -> str:
    """Return how a table's column becomes numbers."""
    if "categories" in column:
        return f"(0 or 1 for each of {listed(column['categories'])})"
    return f"(value - {column['mean']:.6g}) / {column['std']:.6g}"


def results(result: RunResult) -> str:
    """Return 'val acc 0.9; test loss 0.1  acc 0.9': the metrics of the shared weights."""
    metrics = {name: value for name, value in result.numbers.items() if "/" in name}
    best = result.best
    if best is not None and best.step != result.steps:
        # The last evaluation was of other weights.
        metrics = {name: value for name, value in metrics.items() if not name.startswith("val/")}
        metrics[best.name] = best.value
    parts = []
    for split in ("val", "test"):
        text = numbers({k: v for k, v in metrics.items() if k.startswith(f"{split}/")})
        if text:
            parts.append(f"{split} {text}")
    return "; ".join(parts) or "none"
