"""Export a trained model to ONNX or torch.export, and check its outputs."""

import contextlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.command import invocation
from stoker.command.build import build_dataset
from stoker.data.description import Description
from stoker.runs import directory
from stoker.runs.inference import Trained, check_output
from stoker.runs.result import RunResult
from stoker.trainer import checkpoint
from stoker.trainer.errors import TrainingError, UserError, first_line, kind_of, log, printable
from stoker.trainer.files import replacing

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2"}
SAMPLES = 64  # samples for comparing outputs, in batches of 1, 3 and all of them
TOLERANCE = 1e-4  # relative to the largest output; reordering fp32 sums changes outputs by 1e-6
PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # needed for format=onnx
Run = Callable[[Tensor], Any]


def check(form: str | None, output: str | None = None) -> None:
    """Raise UserError if the format or its packages are missing, or if `output` is invalid."""
    if form is None:
        raise UserError(f"task=export needs format=NAME. Choose one of: {', '.join(FILES)}.")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if form == "onnx" and missing:
        raise UserError(
            f"format=onnx needs {', '.join(missing)}.\nType {invocation.pip_install('onnx')}."
        )
    if output is not None:
        check_output(output)


def samples(about: Description, dataset: dict[str, Any]) -> tuple[Tensor, str]:
    """Return inputs for comparing outputs, and a description of these inputs.

    The inputs come from the run's test data, or from the first rows of its table. If the data set
    that the config node `dataset` describes cannot be read, the inputs are generated.
    """
    try:
        if about["table"] is not None:
            from stoker.data import tables  # imports pyarrow

            path = os.path.expanduser(str(dataset.get("path")))
            rows = tables.read_batches(path, about["table"], SAMPLES, "dataset.path")
            _, inputs = next(rows)
            source = f"rows of {printable(os.path.basename(path))}"
        else:
            data = build_dataset(dataset)
            data.prepare_as(about)
            name = "training" if data.test is None else "test"
            split = data.train if data.test is None else data.test
            count = min(SAMPLES, len(split))
            inputs, _ = split[list(range(count))]
            source = f"{name} samples of {data.name}"
    except (UserError, OSError) as error:
        log.warning(
            "Cannot read the run's data, so the outputs are compared on generated inputs. (%s)",
            first_line(error),
        )
        inputs = generated(about)
        source = "generated samples"
    return inputs, f"{len(inputs)} {source}"


def generated(about: Description) -> Tensor:
    """Generate inputs for a `Trained` model: zeros and ones, which are valid in any data set."""
    dtype = torch.float64 if about["table"] else getattr(torch, about["dtype"])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (SAMPLES, *about["in_shape"]), generator=generator).to(dtype)


def export(
    model: Trained,
    folder: str | Path,
    form: str,
    inputs: Tensor,
    whose: str,
    output: str | Path | None = None,
) -> tuple[Path, Tensor]:
    """Export a `Trained` model to `output`, or to a file in the run directory `folder`.

    The outputs for batches of 1, 3 and all `inputs` are compared with those of the eager model.

    Returns:
        The path of the file, and the outputs for all `inputs`.

    Raises:
        TrainingError: the outputs differ by more than rounding errors, or the weights are not those
            that the run tested. Nothing is written.
        UserError: the model cannot be exported. Nothing is written.
    """
    check_tested(model, Path(folder))
    path = Path(output or Path(folder) / FILES[form])
    with replacing(path) as partial:
        try:
            with quiet():
                with torch.inference_mode():
                    outputs = model(inputs)
                if not isinstance(outputs, Tensor):
                    raise TypeError(
                        f"it returns {kind_of(outputs)}, but an exported model must return a tensor"
                    )
                run = WRITERS[form](model, inputs, partial)
                compare(model, run, inputs, outputs, whose)
        except (MemoryError, OSError, TrainingError):
            raise
        except Exception as error:  # the exporters raise all kinds of errors for unsupported models
            raise UserError(
                f"format={form}: this model cannot be exported "
                f"({type(error).__name__}: {first_line(error)}).\n"
                "Load it in Python with stoker.load."
            ) from error
    return path, outputs


def check_tested(model: Trained, folder: Path) -> None:
    """If the run has finished, raise TrainingError unless the model has the tested weights."""
    path = folder / directory.WEIGHTS
    result = RunResult.read(folder)
    if not result.is_finished or not path.is_file():
        return
    _, tested = checkpoint.read_tensors(path)
    for name, weight in model.module.state_dict().items():
        if name not in tested or not torch.equal(weight, tested[name]):
            raise TrainingError(
                f"run={folder}: {name} in the best checkpoint differs from the tested weights "
                f"({directory.WEIGHTS}). Nothing was written.\n"
                f"The tested weights are in {path}; model.md next to it explains how to load them."
            )


def to_onnx(model: Trained, inputs: Tensor, path: str) -> Run:
    import onnxruntime

    program: Any = torch.onnx.export(
        traced(model, inputs),
        input_names=["inputs"],
        output_names=["outputs"],
        dynamo=True,
        verbose=False,
    )
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: torch.as_tensor(session.run(None, {"inputs": batch.numpy()})[0])


def to_torch(model: Trained, inputs: Tensor, path: str) -> Run:
    with open(path, "wb") as file:
        torch.export.save(traced(model, inputs), file)
    with open(path, "rb") as file:
        return torch.export.load(file).module()


WRITERS = {"onnx": to_onnx, "torch_export": to_torch}


def traced(model: Trained, inputs: Tensor) -> torch.export.ExportedProgram:
    """Return the torch.export program of the model, for batches of any size."""
    example = inputs[[0, -1]]  # a batch size of 1 would become a constant
    return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def compare(model: Trained, run: Run, inputs: Tensor, outputs: Tensor, whose: str) -> None:
    """Raise TrainingError if `run` does not reproduce the model's `outputs` for `inputs`.

    Predicted target values are measured from their training mean, and the largest output is taken
    to be at least one standard deviation. For other outputs, it is taken to be at least 1.
    """
    least = model.target_scale.max().item() if model.rescales else 1.0
    center = model.target_mean if model.rescales else 0.0
    scale = (outputs - center).abs().max().clamp(min=least)
    for size in (1, 3, len(inputs)):
        with torch.inference_mode():
            given = run(inputs[:size]) / scale
            wanted = model(inputs[:size]) / scale
        try:
            torch.testing.assert_close(given, wanted, rtol=0, atol=TOLERANCE, check_dtype=False)
        except AssertionError as error:
            raise TrainingError(
                f"On {whose}, the outputs of the exported model differ from PyTorch's. "
                f"Nothing was written. The differences, relative to the largest output:\n{error}"
            ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what the exporters print and log. If an export fails, they raise an error anyway."""
    logging.disable(logging.ERROR)
    printed = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def describe(tensor: Tensor) -> str:
    """Return the data type and the shape of a batch, like 'uint8 of shape (N, 1, 8, 8)'."""
    shape = ", ".join(["N", *map(str, tensor.shape[1:])])
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape ({shape})"
