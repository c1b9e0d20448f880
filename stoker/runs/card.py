"""What a run leaves to be shared: the weights alone, and a card that says what they are and how to load them."""

import json

import torch

from stoker.command.shell import command
from stoker.command.trust import own_packages
from stoker.trainer import checkpoint, parallel
from stoker.trainer.errors import printable
from stoker.trainer.files import write_text
from stoker.trainer.readable import numbers

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


def weights(trainer):
    """A copy of the weights that are evaluated, by name; all processes have to ask."""
    with trainer.evaluating():  # an average of the weights, where that is what is evaluated
        return checkpoint.copy(dict(trainer.module.state_dict()))


def write(folder, weights, module, data, result, usual=True):
    """model.safetensors, the weights that were tested, alone; and model.md, the card that says what they are.

    `usual`: whether the module's outputs are what the data set suggests.
    """
    about = data.description()
    # One entry alone: several are written in the order of a hash, and equal weights would not be equal files.
    checkpoint.write_tensors(folder / "model.safetensors", weights, {"inputs": json.dumps(about)})
    text = parallel.plain_text(module)
    own = own_packages(result.overrides)
    trusted = [f"trusted={json.dumps(own)}"] if own else []
    card = CARD.format(
        name=text.partition("(")[0],
        parameters=f"{result.parameters:,}",
        facts=facts(about, usual),
        results=results(result),
        step=f"{step_of(result):,}",
        versions=", ".join(
            f"{key} {value}" for key, value in result.versions.items() if key != "platform"
        ),
        command=command(result.overrides),
        load=", ".join([json.dumps(str(folder)), *trusted]),
        module=text,
    )
    write_text(folder / "model.md", card)


def is_usual(outputs, about):
    """Whether a model's outputs are one number a class, or a target, a sample."""
    return isinstance(outputs, torch.Tensor) and tuple(outputs.shape[1:]) == (about["num_classes"],)


def is_image(about):
    """Whether the inputs are images as files have them, grey or of three colours."""
    return (
        about["dtype"] == "uint8" and len(about["in_shape"]) == 3 and about["in_shape"][0] in (1, 3)
    )


def step_of(result):
    """The step of the weights that are shared; None where the result does not say it."""
    return result.steps if result.best is None else result.best.step


def facts(about, usual=True):
    """The lines that say what goes into a model's module and what comes out, after the data's description."""
    kinds = {"classification": "class scores", "regression": "numbers"}
    pixels = about["dtype"] == "uint8"
    inputs = f"{'float32' if pixels else about['dtype']} of shape (N, {', '.join(map(str, about['in_shape']))})"
    if pixels and (about["mean"] or about["std"]):
        inputs += f", (pixel / 255 - mean) / std by channel, mean {about['mean'] or 0}, std {about['std'] or 1}"
    elif pixels:
        inputs += ", pixel / 255"
    outputs = f"(N, {about['num_classes']}) {kinds[about['kind']]}{of_target(about)}"
    if about["kind"] == "regression" and (about["target_mean"], about["target_scale"]) != (0, 1):
        outputs += f", which are (value - {about['target_mean']}) / {about['target_scale']}"
    lines = [
        f"- Inputs: {inputs}",
        f"- Outputs: {outputs if usual else 'what the model itself gives'}",
    ]
    if about["table"]:
        columns = [f"{c['name']} {described(c)}" for c in about["table"]["columns"]]
        gaps = (
            "; then 0 for a number that is missing" if about["table"]["missing"] == "mean" else ""
        )
        lines.append(f"- Columns, in order: {'; '.join(columns)}{gaps}")
    lines += images(about) + (classes(about) if usual else [])
    return "".join(f"{printable(line)}\n" for line in lines)


def of_target(about):
    """' of price' for a table's target; '' where it has no name."""
    return f" of {about['table']['target']}" if about["table"] else ""


def images(about):
    """The line that says how an image file becomes an input; none where the inputs are none."""
    size = "x".join(map(str, about["in_shape"][1:]))
    how = f"- An image file: turned as its EXIF says, then resized to {size} (height x width), bilinear and not cropped"
    return [how] if is_image(about) else []


def classes(about):
    """The line with the names of the classes; none where there are no names."""
    return [f"- Classes, in order: {listed(about['classes'])}"] if about["classes"] else []


def listed(names):
    """'a, b', with what has a comma or semicolon in it in quotes."""
    return ", ".join(repr(name) if {",", ";"} & set(name) else name for name in names)


def described(column):
    """How a table's column becomes numbers."""
    if "categories" in column:
        return f"(0 or 1 for each of {listed(column['categories'])})"
    return f"(value - {column['mean']:.6g}) / {column['std']:.6g}"


def results(result):
    """Return 'val acc 0.9; test loss 0.1  acc 0.9': what a result says of the weights that are shared."""
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
