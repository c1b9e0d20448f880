"""What a run leaves to be shared: the weights alone, and a card that says what they are and how to load them."""

import json

import torch

from trainer import checkpoint, parallel
from trainer.build import own_packages
from trainer.errors import printable
from trainer.files import write_text
from trainer.readable import numbers
from trainer.rundir import command

CARD = """# {name}

- Weights: `model.safetensors`, {parameters} parameters, those of step {step}
{facts}- Results: {results}
- Trained by: `{command}` ({versions})

With the project and the run directory that it is from, it is ready to use: pixels, or the columns of a table, go in.
```python
import trainer

model = trainer.load({load})  # in eval mode, its preprocessing inside; model.classes are the names
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
    best = result["best"]["step"] if result["best"] else result["steps"]
    own = own_packages(result["overrides"])
    trusted = [f"trusted={json.dumps(own)}"] if own else []
    card = CARD.format(
        name=text.partition("(")[0],
        parameters=f"{result['parameters']:,}",
        facts=facts(about, usual),
        results=results(result),
        step=f"{best:,}",
        versions=", ".join(f"{key} {value}" for key, value in result["versions"].items() if key != "platform"),
        command=command(result["overrides"]),
        load=", ".join([json.dumps(str(folder)), *trusted]),
        module=text,
    )
    write_text(folder / "model.md", card)


def is_usual(outputs, about):
    """Whether a model's outputs are one number a class, or a target, a sample."""
    return isinstance(outputs, torch.Tensor) and tuple(outputs.shape[1:]) == (about["num_classes"],)


def facts(about, usual=True):
    """The lines that say what goes into a model's module and what comes out, after the data's description."""
    kinds = {"classification": "class scores", "regression": "numbers"}
    pixels = about["dtype"] == "uint8"
    inputs = f"{'float32' if pixels else about['dtype']} of shape (N, {', '.join(map(str, about['in_shape']))})"
    if pixels and (about["mean"] or about["std"]):
        inputs += f", (pixel / 255 - mean) / std by channel, mean {about['mean'] or 0}, std {about['std'] or 1}"
    elif pixels:
        inputs += ", pixel / 255"
    outputs = f"(N, {about['num_classes']}) {kinds[about['kind']]}"
    if about["kind"] == "regression" and (about["target_mean"], about["target_scale"]) != (0, 1):
        outputs += f", which are (value - {about['target_mean']}) / {about['target_scale']}"
    lines = [f"- Inputs: {inputs}", f"- Outputs: {outputs if usual else 'what the model itself gives'}"]
    if about["table"]:
        columns = [f"{c['name']} {described(c)}" for c in about["table"]["columns"]]
        gaps = "; then 0 for a number that is missing" if about["table"]["missing"] == "mean" else ""
        lines.append(f"- Columns, in order: {'; '.join(columns)}{gaps}")
    lines += classes(about) if usual else []
    return "".join(f"{printable(line)}\n" for line in lines)


def classes(about):
    """The line with the names of the classes, those with a comma in quotes; none where there are no names."""
    names = [repr(name) if "," in name else name for name in about["classes"] or ()]
    return [f"- Classes, in order: {', '.join(names)}"] if names else []


def described(column):
    """How a table's column becomes numbers."""
    if "categories" in column:
        return f"(0 or 1 for each of {', '.join(column['categories'])})"
    return f"(value - {column['mean']:.6g}) / {column['std']:.6g}"


def results(result):
    """'val acc 0.9; test loss 0.1  acc 0.9' of what a result.json says of the weights that are shared."""
    found, best = {name: value for name, value in result.items() if "/" in name}, result.get("best")
    if isinstance(best, dict) and best.get("step") != result.get("steps"):  # the last evaluation was of other weights
        found = {name: value for name, value in found.items() if not name.startswith("val/")}
        found = {str(best.get("name")): best.get("value")} | found
    shown = {split: numbers({k: v for k, v in found.items() if k.startswith(split)}) for split in ("val/", "test/")}
    return "; ".join(f"{split[:-1]} {text}" for split, text in shown.items() if text) or "none"
