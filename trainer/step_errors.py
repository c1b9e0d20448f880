"""Explain the errors in a step: what caused them, and what to change."""

import contextlib
import dataclasses
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import batches, graph, memory, parallel, steps
from stoker.trainer import device as devices
from stoker.trainer.callbacks import nonfinite
from stoker.trainer.errors import (
    NotFinite,
    TrainingError,
    UserError,
    cause,
    explanation_of,
    first_few,
    first_line,
    kind_of,
)
from stoker.trainer.misuse import HOW

if TYPE_CHECKING:
    from stoker.trainer.splitter import Splitter
    from stoker.trainer.trainer import Trainer

PAIR = "A batch must be (inputs, targets), unless you override compute_loss and update_metrics."
# What a bad shape, index, class or key raises. Subclasses of these mean something else.
REFUSALS = (RuntimeError, IndexError, ValueError, KeyError)
REFUSALS_OF_MODELS = (TypeError, AssertionError)  # of torch and torchvision; elsewhere, a bug
# Methods of a Trainer that take a batch.
TAKE_A_BATCH = {"train_step", "compute_loss", "update_metrics", "predict_batch"}
# Functions of this package that unpack a batch, or use what compute_loss or train_step returns.
IN_A_STEP = {
    "train_step",
    "accumulate",
    "scaled",
    "compute_loss",
    "compute_losses",
    "update_metrics",
    "update",
}
# What Python or torch says if a batch or a return value does not have the expected form.
MISUSED = re.compile(
    "values to unpack|cannot unpack|iteration over a 0-d tensor|unsupported operand|can't multiply|"
    "no attribute '(detach|device|is_cpu|masked_fill)'|'str' object has no attribute|"
    "does not require grad|only for scalar outputs"
)
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
TRAINER = f"{Path(__file__).parent}{os.sep}"
PACKAGES = f"{Path(torch.__file__).parents[1]}{os.sep}"  # the folder of installed packages
# Files of models; torch/__init__.py contains torch._assert.
MODELS = (f"{TORCH}nn{os.sep}", f"{TORCH}__init__.py", f"{PACKAGES}torchvision{os.sep}")
# regular expression for an error message of torch -> what to do about it, in one line
ADVICE = {
    "(on|at) the same device|not on the expected device|Expected object of device type": (
        "The model uses a tensor on another device. Register the model's tensors as buffers "
        "(self.register_buffer), and create others with device=inputs.device."
    ),
    "device-side assert": (
        "An assertion inside a GPU kernel failed (device-side assert). Usually, a class in the "
        "targets or an index into an Embedding is out of range. "
        "Type device=cpu: there, the same step fails with a clear message."
    ),
    "index out of range in self": (
        "An index into an Embedding must be at least 0 and below its num_embeddings."
    ),
    # Here, `inputs, targets = batch` unpacked the keys of a dict.
    r"must be Tensor, not str|got \(str, |'str' .* no attribute '(flatten|shape|size|view)'": (
        PAIR
    ),
    "can't be cast to the desired output type (Long|Int|Byte)|Found dtype (Long|Int)": (
        "This loss needs floating-point targets: convert them with .float()."
    ),
    "expected scalar type Long but found|expected target dtype to be Long": (
        "This loss needs class indices as int64: convert the targets with .long()."
    ),
    "Expected more than 1 value per channel": (
        "BatchNorm needs at least two samples, but a batch or micro-batch has only one. "
        "Type drop_last=true, or change batch_size or micro_batch."
    ),
    "view size is not compatible": (
        "The model calls .view() on an image whose memory format may be channels_last. "
        "Use .flatten(1) or .reshape() instead, or type channels_last=false."
    ),
    r"InvalidCxxCompiler|No working C\+\+ compiler|TritonMissing|Cannot find a working triton": (
        "compile=true needs a compiler, but none is installed. "
        "On the CPU, install g++, clang++ or cl (on the PATH); on a GPU, install Triton. Or type "
        "compile=false."
    ),
    "DTensor|FSDP|[Ss]harding (strategy|propagation)": (
        "strategy=fsdp: torch does not support this operation on sharded parameters. "
        "Type strategy=ddp, or, if the optimizer causes the error, choose a different one. "
        "A step must call self.model as a whole, not parts of it."
    ),
    "backward through the graph a second time": (
        "A tensor of an earlier batch is part of this step. Detach it; for a hidden state, declare "
        "it as stoker.trainer.carried.Carried()."
    ),
    "mark a variable ready only once|marked as ready twice": (
        "strategy=ddp: a parameter got two gradients in one backward(). "
        "A step must call self.model (not self.module) once per backward()."
    ),
}


def raise_if_explained(
    trainer: "Trainer", error: BaseException, batch: Any, splitter: "Splitter", name: str = "batch"
) -> None:
    """Raise a clearer error if the cause is a known mistake or a lack of memory; else return.

    If torch raised the error, attach a note that says where the error occurred and describes the
    batch, with advice if the cause is known. `name` is what the note calls the batch.
    """
    is_explained = isinstance(error, UserError) or explanation_of(error) is not None
    if is_explained or not isinstance(error, Exception):
        return
    if isinstance(error, NotFinite):
        raise nonfinite.explained(trainer, error) from None
    if memory.is_out_of_memory(error):
        samples = None if batch is None else trainer.samples(batch)
        raise splitter.explain(samples) from error
    frames = traceback.extract_tb(error.__traceback__)
    explained = misused(trainer, error, batch, frames)
    if explained is None and steps.captures(trainer):
        explained = graph.explain(error, trainer)
    if explained is not None:
        raise explained from error
    known = advice(error)
    if known is not None or refuses_batch(error, frames):
        add_note(error, frames, batch, name, known)


def refuses_batch(error: Exception, frames: Sequence[traceback.FrameSummary]) -> bool:
    """Return whether the error may be caused by the batch, such as by its shapes or classes."""
    in_model = frames[-1].filename.startswith(MODELS)
    is_refusal = type(error) in REFUSALS or (type(error) in REFUSALS_OF_MODELS and in_model)
    takes_batch = any(frame.name in TAKE_A_BATCH for frame in frames)
    return is_refusal and takes_batch and not devices.NOT_OF_A_BATCH.search(str(error))


def add_note(
    error: Exception,
    frames: Sequence[traceback.FrameSummary],
    batch: Any,
    name: str,
    advice: str | None,
) -> None:
    """Attach a note with the place of the error, the shapes in the batch, and the advice."""
    places = [
        f"{type(error).__name__} in {frame.name} ({frame.filename}:{frame.lineno}). "
        for frame in frames
        if not frame.filename.startswith((PACKAGES, TRAINER))
    ]
    shown = first_few(contents(batch), 6).removesuffix(".")
    text = f"{''.join(places[-1:])}The {name}: {shown}."
    if advice is not None:
        text += f"\n{advice}"
    # Python 3.11 and later print notes below the traceback.
    notes = [*getattr(error, "__notes__", ()), text]
    vars(error).update(where_and_what=text, __notes__=notes)


def contents(value: Any, place: str = "batch") -> list[str]:
    """Describe the values in a batch; of a list inside it, only the first item."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        items = [(f"{place}.{name}", getattr(value, name)) for name in names]
    elif isinstance(value, Mapping):
        items = [(f"{place}[{key!r}]", item) for key, item in value.items()]
    elif batches.is_list(value) and place == "batch":
        items = [(f"{place}[{i}]", item) for i, item in enumerate(value)]
    elif batches.is_list(value) and value:
        text = f"{place} {type(value).__name__} of {len(value)}"
        if isinstance(value[0], batches.PLAIN):
            return [f"{text} {type(value[0]).__name__}"]
        return [text, *contents(value[0], f"{place}[0]")]
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        return [f"{place} {tuple(value.shape)} {value.dtype}"]
    else:
        return [f"{place} {type(value).__name__}"]
    return [text for place, item in items for text in contents(item, place)]


@contextlib.contextmanager
def naming_metric(name: str, **given: Any) -> Iterator[None]:
    """Name the metric if it fails, and describe what its `update` was given.

    With several processes, an error can also mean that another process is gone.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        if (
            isinstance(error, (UserError, TrainingError))
            or "device-side assert" in str(error)
            or MISUSED.search(str(error))
            or memory.is_out_of_memory(error)
            or parallel.process_count > 1
        ):
            raise
        shown = [text for place, value in given.items() for text in contents(value, place)]
        got = f"\nIt got {first_few(shown, 6)}." if shown else ""
        raise UserError(f"metrics.{name}: {cause(error)}.{got}") from error


def misused(
    trainer: "Trainer", error: Exception, batch: Any, frames: Sequence[traceback.FrameSummary]
) -> UserError | None:
    """Return an error if a batch, or what a step returned, does not have the form we expect."""
    *_, innermost = [frame for frame in frames if not frame.filename.startswith(TORCH)]
    if "scheduler.step()" in str(innermost.line):
        return UserError(f"scheduler: {first_line(error)}. Check its arguments.")
    is_ours = innermost.filename.startswith(TRAINER)
    names = {frame.name for frame in frames}
    if not is_ours or IN_A_STEP.isdisjoint(names) or not MISUSED.search(str(error)):
        return None
    return UserError(
        f"{type(trainer).__name__}: {first_line(error)} (the batch is {kind_of(batch)}).\n"
        f"{PAIR}\n"
        "compute_loss must return (loss, outputs), and train_step a scalar tensor that depends on "
        f"trainable parameters; {HOW}."
    )


def advice(error: BaseException) -> str | None:
    """Return what to do about this error, or None if it is not known."""
    text = str(error)
    return next((known for pattern, known in ADVICE.items() if re.search(pattern, text)), None)
