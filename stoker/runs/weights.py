"""Start from the weights of a checkpoint, a run directory or a safetensors file."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stoker.runs.result import finished
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import EMA
from stoker.trainer.errors import TrainingError, UserError, first_few, first_line, printable

SHOWN = 3  # maximum names shown in each line
SOURCES = "a checkpoint, a run directory or a safetensors file"

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Loaded:
    """Which tensors of a model `init_from` loaded. `str()` returns one to four lines.

    Attributes:
        origin: The file that the tensors come from.
        loaded: Names of the tensors that were loaded.
        reshaped: "name (10, 64) for (5, 64)" for each tensor whose shape in the file, given first,
            differs from its shape in the model.
        missing: Names of tensors that the file lacks; these keep their values.
        unused: Names of tensors in the file that the model lacks.
    """

    origin: str
    loaded: list[str] = dataclasses.field(default_factory=list)
    reshaped: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    unused: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.reshaped) + len(self.missing)
        lines = [f"loaded {len(self.loaded)} of {total} tensors from {self.origin}"]
        for names, why in (
            (self.reshaped, "different shape"),
            (self.missing, "not in the file"),
            (self.unused, "not in the model"),
        ):
            if names:
                lines.append(f"not loaded ({why}): {first_few(names, SHOWN)}")
        return "\n".join(lines)


def init_from(model: torch.nn.Module, source: str | Path) -> Loaded:
    """Load the weights of a checkpoint, a run directory or a safetensors file into a model.

    A tensor is loaded if the model has one with the same name and shape. The model's other tensors
    keep their values. A finished run provides its tested weights, and any other run its best
    checkpoint. A checkpoint provides the weights that the run evaluates (the averaged weights if
    the run uses an EMA). No optimizer state is loaded, and no code is run.

    Raises:
        UserError: The file does not exist or cannot be read, or none of its tensors fits the model.
    """
    try:
        weights, origin = read(Path(source).expanduser())
    except TrainingError as error:
        raise UserError(
            f"init_from={printable(source)}: {first_line(error)}\nExpected {SOURCES}. To write a "
            "safetensors file, call safetensors.torch.save_file(model.state_dict(), FILE)."
        ) from None
    current = model.state_dict()
    report = Loaded(origin, unused=[name for name in weights if name not in current])
    fitting: Tensors = {}
    for name, tensor in current.items():
        value = weights.get(name)
        if value is None:
            report.missing.append(name)
        elif torch.nn.parameter.is_lazy(tensor) or (
            value.shape == tensor.shape and value.is_floating_point() == tensor.is_floating_point()
        ):
            report.loaded.append(name)
            fitting[name] = value
        else:
            shapes = f"{tuple(value.shape)} for {tuple(tensor.shape)}"
            report.reshaped.append(f"{name} {shapes}")
    if not any(tensor.is_floating_point() for tensor in fitting.values()):
        raise UserError(
            f"init_from={printable(source)}: none of its {len(weights)} tensors fits the model.\n"
            f"The file has {first_few(list(weights), SHOWN)}; "
            f"the model has {first_few(list(current), SHOWN)}."
        )
    model.load_state_dict(fitting, strict=False)
    return report


def read(path: Path) -> tuple[Tensors, str]:
    """Return the weights by name, and the file that they come from.

    Raises:
        UserError: There is no checkpoint or file.
        TrainingError: The file cannot be read.
    """
    if path.is_dir():
        tested = path / "model.safetensors"
        if tested.is_file() and finished(path) is not None:
            return read(tested)
        for folder in (path / "checkpoints", path):
            chosen = checkpoint.best(folder)
            if chosen is not None:
                return evaluated(*chosen)
    if not path.is_file():
        raise UserError(f"init_from={printable(path)}: no checkpoint found. Expected {SOURCES}.")
    metadata, tensors = checkpoint.read_tensors(path)
    if metadata.get("format") != checkpoint.FORMAT:
        return tensors, printable(path)
    return evaluated(path, checkpoint.load(path))


def evaluated(path: Path, state: Any) -> tuple[Tensors, str]:
    """Return the weights that the run of a checkpoint evaluates, and where they come from.

    Of the callbacks that evaluate with different weights, only `EMA` is supported here.
    """
    weights = entry(state, "model")
    average = entry(entry(entry(state, "callbacks"), EMA.__name__), EMA.key)
    averaged = {name: average.get(name, tensor) for name, tensor in weights.items()}
    origin = printable(path)
    if not averaged or not all(map(torch.is_tensor, averaged.values())):
        raise UserError(f"{origin}: this checkpoint has no model weights.")
    return averaged, f"{origin} (averaged by EMA)" if average else origin


def entry(mapping: Any, key: str) -> Mapping[str, Any]:
    """Return the mapping under a key of an untrusted mapping, or {} if there is none."""
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    return value if isinstance(value, Mapping) else {}
