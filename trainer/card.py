"""What a run leaves to be shared: the weights alone, and a card that says what they are and how to load them."""

from pathlib import Path

from trainer import checkpoint, parallel
from trainer.files import replacing
from trainer.readable import numbers
from trainer.rundir import command

CARD = """# {name}

- Weights: `model.safetensors`, {parameters} parameters, those of step {step}
- Inputs: {inputs}
- Outputs: {outputs}
{classes}- Results: {results}
- Trained by: `{command}` ({versions})

To load it without the project that trained it, make the same modules with the same names, which are below:
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


def write(folder, weights, module, data, result):
    """model.safetensors, the weights that were tested, alone; and model.md, the card that says what they are."""
    checkpoint.write_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    text = parallel.plain_text(module)
    kinds = {"classification": "class scores", "regression": "numbers"}
    inputs = f"float32 of shape (N, {', '.join(map(str, data.in_shape))})"
    if data.mean is not None:
        inputs += f", (pixel / 255 - mean) / std by channel, mean {data.mean}, std {data.std}"
    outputs = f"(N, {data.num_classes}) {kinds[data.kind]}"
    if data.kind == "regression" and (data.target_mean, data.target_scale) != (0, 1):
        outputs += f", which are (value - {data.target_mean}) / {data.target_scale}"
    shown = {split: numbers({k: v for k, v in result.items() if k.startswith(split)}) for split in ("val/", "test/")}
    results = "; ".join(f"{split[:-1]} {text}" for split, text in shown.items() if text)
    best = result["best"]["step"] if result["best"] else result["steps"]
    card = CARD.format(
        name=text.partition("(")[0],
        parameters=f"{result['parameters']:,}",
        inputs=inputs,
        outputs=outputs,
        classes=f"- Classes, in order: {', '.join(map(str, data.classes))}\n" if data.classes else "",
        results=results or "none",
        step=f"{best:,}",
        versions=", ".join(f"{key} {value}" for key, value in result["versions"].items() if key != "platform"),
        command=command(result["overrides"]),
        module=text,
    )
    with replacing(folder / "model.md") as partial:
        Path(partial).write_text(card, encoding="utf-8")
