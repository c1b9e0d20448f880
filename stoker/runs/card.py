"""The shareable files of a run: the weights, and a card that explains how to load them."""

import datetime
import json
from pathlib import Path
from typing import Any

import torch

from stoker.command.shell import command, command_for
from stoker.command.trust import of_project, own_packages
from stoker.data.description import Description
from stoker.runs import directory
from stoker.runs.confusion import classes_of
from stoker.runs.evaluation import Evaluation
from stoker.runs.page import render
from stoker.runs.readable import numbers
from stoker.runs.result import RunResult
from stoker.trainer import checkpoint, parallel
from stoker.trainer.files import write_text
from stoker.trainer.trainer import Trainer

MOST_CLASSES = 40  # maximum rows in the card's table of classes


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of the evaluated weights, {name: tensor}. Call this on all ranks."""
    with trainer.evaluating():  # with ema, these are the averaged weights
        return checkpoint.copy(dict(trainer.module.state_dict()))


def write(
    folder: Path,
    weights: dict[str, torch.Tensor],
    module: torch.nn.Module,
    data: Any,
    result: RunResult,
    usual: bool = True,
    evaluation: Evaluation | None = None,
) -> None:
    """Write the tested weights to model.safetensors, and a card about these weights to model.md.

    `usual`: whether the module returns one number per class or target.
    """
    about = data.description()
    # Write a single metadata entry: safetensors writes several entries in hash order, so equal
    # weights could give different files.
    checkpoint.write_tensors(folder / directory.WEIGHTS, weights, {"inputs": json.dumps(about)})
    overrides = result.overrides or []
    metrics = result.best_metrics()
    texts = {split: numbers(metrics, split) for split in ("val", "test")}
    tested = [split for split, text in texts.items() if text]
    split = tested[-1] if tested else None
    unit = "samples"
    classes = []
    if evaluation is not None:
        split = evaluation.split
        unit = evaluation.unit
        classes = classes_of(evaluation)
    module_text = parallel.plain_text(module)
    text = render(
        "model.md.jinja",
        name=module_text.partition("(")[0],
        module=module_text,
        about=about,
        is_image=is_image(about),
        step=result.steps if result.best is None else result.best.step,
        results="; ".join(f"{name} {texts[name]}" for name in tested) or "none",
        usual=usual,
        date=datetime.date.today(),
        split=split,
        unit=unit,
        places=data.target_shape,
        classes=classes[:MOST_CLASSES],
        all_classes=len(classes),
        result=result,
        command=result.script or command(overrides),
        load=load_arguments(folder, overrides),
        generate=command_for("generate", folder, own_packages(overrides), "prompt=TEXT"),
        can_generate=data.tokens is not None and hasattr(module, "generate"),
    )
    write_text(folder / "model.md", f"{text}\n")


def is_usual(outputs: Any, about: Description) -> bool:
    """Return whether a model outputs one number per class or target for each sample."""
    return isinstance(outputs, torch.Tensor) and outputs.shape[1:] == (about["num_classes"],)


def load_arguments(folder: str | Path, typed: list[str]) -> str:
    """Return the arguments to stoker.load as source text, with the packages trusted in `typed`."""
    arguments = json.dumps(str(folder))
    packages = sorted({*own_packages(typed), *of_project()})
    if packages:
        arguments += f", trusted={json.dumps(packages)}"
    return arguments


def is_image(about: Description) -> bool:
    """Return whether the inputs are 8-bit gray or RGB images, like those in image files."""
    shape = about["in_shape"]
    return about["dtype"] == "uint8" and len(shape) == 3 and shape[0] in (1, 3)
