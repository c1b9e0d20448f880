"""Save, load and find checkpoints.

A checkpoint is one safetensors file. Its metadata holds everything except the tensors as JSON, and
a SHA-256 of the tensors and the JSON.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stoker.trainer import device as devices
from stoker.trainer import launch, parallel, stopping, transfer
from stoker.trainer.callback import State
from stoker.trainer.checkpoint_names import files as files
from stoker.trainer.checkpoint_names import path_of as path_of
from stoker.trainer.errors import TrainingError, UserError, first_line, kind_of, log, printable
from stoker.trainer.files import open_plain, remove_partial, replacing
from stoker.trainer.state import WAYS, has_usual_state

Tensors = dict[str, Tensor]

FORMAT = "stoker-1"
# This key marks JSON objects that represent tensors, tuples, or dicts with keys other than strings.
MARK = "$"


class DamagedCheckpoint(TrainingError):
    """The contents of a checkpoint file have changed since it was written."""


def save(path: str | Path, state: State) -> None:
    """Write `state`, which `copy` or `load` returned, to `path` atomically.

    A state is any nested structure of dicts, lists, tuples, tensors and plain values.

    Raises:
        UserError: The state contains anything else.
        TrainingError: The file cannot be written, or the state is too large to be read back.
    """
    path = Path(path)
    tensors: Tensors = {}
    tree = json.dumps(pack(state, tensors, "state"))
    if len(tree) > 64 * 2**20:  # safetensors does not read headers of more than 100 MB
        raise TrainingError(f"{path}: the state has more than 64 MiB outside its tensors.")
    write_tensors(path, tensors, {"format": FORMAT, "state": tree, "sha256": digest(tensors, tree)})


def write_tensors(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically; raise TrainingError if this fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            save_file(tensors, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{path} cannot be written: {error}.\n"
            "Fix the cause (for example, free some disk space), then type the same command with "
            "run_dir=DIR to resume from the last checkpoint."
        ) from error


@stopping.later()
def load(path: str | Path) -> Any:
    """Return the state that `save` wrote, with its tensors on the CPU.

    This never runs code from the file, and its memory use is proportional to the size of the file.

    Raises:
        UserError: The file does not exist.
        DamagedCheckpoint: The file is not a checkpoint, or its contents have changed.
        TrainingError: The file cannot be read.
    """
    metadata, tensors = read_tensors(path)
    tree = metadata.get("state", "")
    signed = {"format": FORMAT, "state": tree, "sha256": digest(tensors, tree)}
    if metadata != signed:
        raise DamagedCheckpoint(
            f"{path} is damaged, or not a {FORMAT} checkpoint: its contents do not match its "
            "SHA-256."
        )
    # Without clones, the file would stay mapped, and Windows could not remove it. Clone only after
    # checking the digest, because cloning repairs a bool that is neither 0 nor 1.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    try:  # the digest proves that nothing has changed, but not who wrote the file
        return unpack(tree, tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{path} does not contain a valid state ({type(error).__name__}: {str(error)[:100]})."
        ) from None


def read_tensors(path: str | Path) -> tuple[dict[str, str], Tensors]:
    """Return (metadata, tensors) of a safetensors file."""
    try:
        open_plain(path).close()  # raises an error for a pipe, on which safe_open would hang
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            return file.metadata() or {}, tensors
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint at {path}.") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        # EINVAL and ELOOP mean that this is not a regular file. Other system errors say nothing
        # about the contents of the file.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL, errno.ELOOP):
            reason = str(error.strerror).lower()
            raise TrainingError(f"{path} cannot be read: {reason}.") from error
        reason = first_line(error)
        if isinstance(error, SafetensorError) and zipfile.is_zipfile(path):
            reason = (
                "it was written by torch.save. In Python, call "
                "model.load_state_dict(torch.load(FILE))"
            )
        raise DamagedCheckpoint(f"{path} is not a readable checkpoint: {reason}.") from None


def copy(state: Any, everywhere: bool = False) -> Any:
    """Copy the state to contiguous CPU tensors, so that training can continue while it is saved.

    Sharded tensors are gathered, so all processes must call this. Only rank 0 receives the copy
    unless `everywhere` is True. Copies from a GPU are asynchronous, but complete on return.
    """
    tensors: Tensors = {}
    tree = json.dumps(pack(state, tensors, "state"))
    copies: dict[str, Any] = dict.fromkeys(tensors)
    for name, tensor in tensors.items():
        whole = parallel.unsharded(tensor)
        if everywhere or launch.is_first():
            copies[name] = transfer.to_host(whole)
    for device in {tensor.device for tensor in tensors.values()}:
        devices.synchronize(device)
    return unpack(tree, copies)


@torch.no_grad()
def first_nonfinite(module: torch.nn.Module) -> str | None:
    """Return the name of the first parameter with a non-finite value, or None.

    This waits for the device once.
    """
    # torch.isfinite does not support float8
    weights = {name: p for name, p in module.named_parameters() if p.itemsize > 1}
    if not weights:
        return None
    counts = [(~part.isfinite()).sum() for part in parallel.local(weights.values())]
    totals = parallel.add_up(torch.stack(counts)).tolist()
    return next(itertools.compress(weights, totals), None)


def pack(value: Any, tensors: Tensors, name: str) -> Any:
    """Return the value as JSON data; move its tensors to `tensors`, named after their positions.

    Tuples, and dicts with keys that are not strings, are marked because JSON would change them.
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {MARK: "tensor", "name": name}
    if isinstance(value, dict):
        if MARK in value or not all(isinstance(key, str) for key in value):
            return {MARK: "dict", "items": pack([*map(list, value.items())], tensors, name)}
        return {key: pack(item, tensors, f"{name}/{escaped(key)}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [pack(item, tensors, f"{name}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {MARK: "tuple", "items": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(
        f"{name}: a checkpoint can hold tensors and plain values, but not {kind_of(value)}.\n"
        "Return int(...), float(...), .tolist() or a tensor from that object's state_dict."
    )


def escaped(key: str) -> str:
    """Escape "/" in a key as in JSON pointers (RFC 6901), so that all names are unique."""
    return key.replace("~", "~0").replace("/", "~1")


def unpack(tree: str, tensors: Tensors) -> Any:
    """Undo `pack`, given its result as JSON text."""

    def restored(value: Any) -> Any:  # the values inside it are already restored
        kind = value.get(MARK)
        if kind == "tensor":
            return tensors[value["name"]]
        if kind == "tuple":
            return tuple(value["items"])
        return dict(value["items"]) if kind == "dict" else value

    return json.loads(tree, object_hook=restored)


@contextlib.contextmanager
def state_fits(name: str) -> Iterator[None]:
    """Context manager that raises UserError if a state does not fit the object that loads it.

    The state may have any form, so loading it may raise any exception.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = traceback.format_exception_only(error)
        reason = printable(" ".join(lines[0].split()))[:300]
        raise UserError(f"The checkpoint does not match this {name}: {reason}") from None


def restore(name: str, part: Any, state: Any) -> None:
    """Call `part.load_state_dict(state)` with the state adapted to this device and memory format.

    Tensors in a file are contiguous. A fused optimizer reads the memory of a channels_last weight
    and of its moments in parallel, so it would apply moments in another layout to the wrong
    weights.

    Raises:
        UserError: The state does not fit `part`, which may be half loaded.
    """
    with state_fits(name):
        if isinstance(part, torch.nn.Module):
            current = part.state_dict()
            state = {key: parallel.like(value, current.get(key)) for key, value in state.items()}
        if isinstance(part, torch.optim.Optimizer) and has_usual_state(part):
            groups = [dict(group) for group in state["param_groups"]]
            for current, group in zip(part.param_groups, groups, strict=False):
                group.update({way: current[way] for way in WAYS if way in current})
            state = {**state, "param_groups": groups}
        part.load_state_dict(state)
        if isinstance(part, torch.optim.Optimizer):
            for parameter, moments in part.state.items():
                for key, tensor in moments.items():
                    moments[key] = fitted(part, key, tensor, parameter)


def check_options(name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise UserError if parameter groups differ in a way that torch does not detect."""
    groups = optimizer.state_dict()["param_groups"]
    for i, (current, group) in enumerate(zip(groups, state["param_groups"], strict=False)):
        for key, value in current.items():
            saved = group.get(key)
            is_option = isinstance(value, (bool, str)) or isinstance(saved, (bool, str))
            must_match = is_option or key == "param_names"
            differs = key not in group or (must_match and saved != value)
            if differs and key not in WAYS:
                raise UserError(
                    f"The checkpoint does not match this Trainer: {name}.param_groups.{i}.{key} "
                    f"is {saved!r:.60}, not {value!r:.60}."
                )


def fitted(optimizer: torch.optim.Optimizer, key: str, moment: Any, parameter: Any) -> Any:
    """Return an optimizer's tensor in the memory layout of its parameter if their shapes match.

    Raises:
        UserError: A fused optimizer would read beyond the memory of the tensor.
    """
    if not isinstance(moment, Tensor) or not moment.ndim:  # a step count, for example
        return moment
    if moment.shape == parameter.shape:
        target = torch.empty_like(parameter, dtype=moment.dtype)
        return target.copy_(parallel.like(moment, target))
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UserError(
            f"The checkpoint does not match this {type(optimizer).__name__}: {key} has shape "
            f"{tuple(moment.shape)}, not {tuple(parameter.shape)}."
        )
    return moment


def digest(tensors: Tensors, tree: str) -> str:
    """Return the SHA-256 of the JSON and of each tensor's name, type, shape and bytes."""
    total = hashlib.sha256(tree.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def go_back(folder: str | Path, step: int) -> None:
    """Remove the checkpoints after `step`, and the temporary files of an interrupted save.

    A run that resumes from `step` writes these checkpoints again, and must not mistake the
    old ones for its own.
    """
    for number, path in files(folder).items():
        if number > step:
            path.unlink(missing_ok=True)
    remove_partial(folder)


def newest(folder: str | Path) -> tuple[Path, State] | None:
    """Return (path, state) of the newest undamaged checkpoint in the folder.

    Return None if the folder has no checkpoints. Warn about each newer checkpoint that is damaged.

    Raises:
        TrainingError: All checkpoints are damaged.
    """
    paths = files(folder)
    damaged = []
    for path in paths.values():
        try:
            state = load_whole(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        for problem in damaged:
            log.warning("%s Using the newest valid checkpoint instead: %s.", problem, path)
        return path, state
    if paths:
        raise TrainingError(
            f"All {len(paths)} checkpoints in {folder} are damaged.\n"
            "To start over in another folder, type run_dir=DIR."
        )
    return None


def loaded(
    source: Any, choose: Callable[[str | Path], tuple[Path, State] | None] = newest
) -> State:
    """Return the state in a file, the one that `choose` picks from a folder, or `source` itself."""
    if isinstance(source, dict):
        return source
    if not isinstance(source, (str, Path)):
        raise UserError(f"{source!r} is not a checkpoint. Pass a checkpoint file or folder.")
    if not Path(source).is_dir():
        state: State = load(source)
        return state
    chosen = choose(source)
    if chosen is None:
        raise UserError(f"{source}: this folder contains no checkpoint.")
    return chosen[1]


def together(name: str, find: Callable[[], tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """Call `find` on rank 0 and return its result on all processes: (path, state, ...) or None.

    The other processes read the file at `path`. `name` identifies the exchange in the store.
    """
    result = find() if launch.is_first() else None
    facts = launch.agreed(name, lambda: result and [str(result[0]), *result[2:]])
    if result is None and facts:
        path, *more = facts
        return (path, load_whole(path), *more)
    return result


def load_whole(path: str | Path) -> State:
    """Return the whole state of a Trainer from a file.

    Raises:
        DamagedCheckpoint: The file contains anything else.
    """
    state: State = load(path)
    is_whole = isinstance(state, dict) and isinstance(state.get("callbacks"), dict)
    if not is_whole or type(state.get("step")) is not int:
        raise DamagedCheckpoint(f"{path} does not contain the state of a Trainer.")
    return state


def best(folder: str | Path) -> tuple[Path, State] | None:
    """Return (path, state) of the checkpoint with the best monitored value.

    Return None if the folder has no checkpoints. If no value was monitored, or the best checkpoint
    is damaged (which logs a warning), return the newest one.
    """
    result = newest(folder)
    if result is None:
        return None
    path, state = result
    try:
        chosen = path_of(folder, state["callbacks"]["Checkpoint"]["best"]["step"])
    except (KeyError, TypeError, ValueError):
        return result  # nothing was monitored
    if chosen == path:
        return result
    del result, state  # holding two states would take more memory than training did
    try:
        return chosen, load_whole(chosen)
    except (DamagedCheckpoint, UserError) as error:
        log.warning("%s Using the newest checkpoint, %s, instead of the best one.", error, path)
    return newest(folder)
