"""Checkpoints: one file each, tensors as safetensors, all else as JSON, a SHA-256 over both; save, load, find them."""

import errno
import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from stoker.trainer import launch, parallel, stopping
from stoker.trainer.errors import TrainingError, UserError, log
from stoker.trainer.files import open_plain, remove_partial, replacing
from stoker.trainer.state import WAYS, has_usual_state

FORMAT = "stoker-1"
# The key of the JSON objects that stand for what JSON has not: tensors, tuples, dicts with other keys than strings.
MARK = "$"
# What a file may ask for before a tensor is read. Bytes alone say little: one of JSON can become a hundred of objects.
MAX_HEADER, MAX_VALUES = 64 * 2**20, 2**20


class DamagedCheckpoint(TrainingError):
    """A checkpoint file whose contents are not what was written."""


def save(path, state):
    """Writes `state` so that `path` holds all of it or is not there; TrainingError where the disk does not take it.

    A state is any nesting of dicts, lists, tuples, tensors and plain values.
    """
    path = Path(path)
    tensors = {}
    tree = json.dumps(pack(state, tensors, "state"))
    if (
        len(tree) + 200 * len(tensors) > MAX_HEADER
        or values_in(tree.encode()) + 10 * len(tensors) > MAX_VALUES
    ):
        raise TrainingError(
            f"{path}: the state has too many tensors and other values; {MAX_VALUES:,} can be read again."
        )
    tensors = own_storage(tensors)
    write_tensors(path, tensors, {"format": FORMAT, "state": tree, "sha256": digest(tensors, tree)})


def write_tensors(path, tensors, metadata):
    """A safetensors file, whole or not at all; TrainingError where the disk does not take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            save_file(tensors, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{path} cannot be written: {error}.\nMake room or mend it; the same command goes on from the one before."
        ) from error


@stopping.later()
def load(path):
    """The state that `save` wrote, its tensors on the CPU; DamagedCheckpoint where one bit is not as it was.

    Runs no code from the file, and takes no more memory than its size and a bounded header.
    """
    try:
        with open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, MAX_HEADER))
        if len(header) < length or values_in(header) > MAX_VALUES:
            if length.to_bytes(8, "little").startswith(
                (b"PK\x03\x04", b"\x80")
            ):  # a zip file, or a pickle
                how = "its state dict is for model.load_state_dict(torch.load(FILE))"
                raise DamagedCheckpoint(
                    f"{path} is torch's own or a pickle, and no checkpoint of a Trainer; {how}."
                )
            raise DamagedCheckpoint(
                f"{path} is no readable checkpoint: its header has {length:,} bytes."
            )
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint {path}.") from None
    except (
        SafetensorError,
        OSError,
        UnicodeDecodeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        # No regular file, or a link. All else that the system says is no word on what is in the file.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL, errno.ELOOP):
            raise TrainingError(f"{path} cannot be read: {error.strerror.lower()}.") from error
        raise DamagedCheckpoint(
            f"{path} is no readable checkpoint: {str(error).splitlines()[0]}"
        ) from None
    if metadata.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} is not a {FORMAT} checkpoint.")
    tree = metadata.get("state", "")
    if digest(tensors, tree) != metadata.get("sha256"):
        raise DamagedCheckpoint(f"{path} is damaged: its SHA-256 does not agree with its contents.")
    # Clones, or the file would stay mapped and could not be removed on Windows. Not before the digest: the clone of a
    # bool that is neither 0 nor 1 is in order again.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    try:  # the digest says that nothing has changed since, and not who wrote it
        if (
            values_in(tree.encode()) > MAX_VALUES
        ):  # in the header they may have been written as \\u002c
            raise ValueError(f"more than {MAX_VALUES:,} values")
        return unpack(json.loads(tree), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{path} holds no state: {type(error).__name__} {str(error)[:100]}"
        ) from None


def values_in(header):
    """How many values there are at most in a JSON text, or in those that are strings in it."""
    return sum(header.count(mark) for mark in (b",", b"[", b"{"))


def copy(state):
    """The same state with its tensors copied, on the CPU and contiguous: the training may go on under it.

    Tensors that are cut up over the processes are put together, for which all of them have to call this; the copy is
    the first one's.
    """
    if isinstance(state, torch.Tensor):
        state = parallel.whole(state)
        if not launch.is_first():
            return None
        return state.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: copy(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        copies = [copy(value) for value in state]
        return copies if isinstance(state, list) else tuple(copies)
    return state


def first_nonfinite(module):
    """The name of the first parameter that is not finite in all its places, or None; asks the device once."""
    named = [
        (name, weight) for name, weight in module.named_parameters() if weight.is_floating_point()
    ]
    if not named:
        return None
    with torch.no_grad():
        weights = parallel.local([weight for _, weight in named])
        norms = [norm.float() for norm in torch._foreach_norm(weights)]
        total = parallel.add_up(torch.stack(norms).sum())
        if total.isfinite():  # it is not for weights that are not, nor for huge ones
            return None
        finite = parallel.add_up(
            torch.stack([(~weight.isfinite()).sum() for weight in weights])
        ).tolist()
    return next((name for (name, _), others in zip(named, finite, strict=True) if others), None)


def pack(value, tensors, name):
    """The JSON form of a value; its tensors go into `tensors` under the names of their places."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {MARK: "tensor", "name": name}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and MARK not in value:
            return {
                key: pack(item, tensors, f"{name}/{escaped(key)}") for key, item in value.items()
            }
        if not all(isinstance(key, (str, int, float, bool, type(None))) for key in value):
            raise TypeError(f"{name}: the keys of a checkpoint's dicts are strings and numbers.")
        items = enumerate(value.items())
        return {
            MARK: "dict",
            "items": [[key, pack(item, tensors, f"{name}/#{i}")] for i, (key, item) in items],
        }
    if isinstance(value, (list, tuple)):
        items = [pack(item, tensors, f"{name}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {MARK: "tuple", "items": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{name}: a checkpoint holds tensors and plain values, not {type(value).__name__}."
    )


def escaped(key):
    """The key without the "/" that separates names, as JSON pointers have it (RFC 6901): no two places share a name."""
    return key.replace("~", "~0").replace("/", "~1")


def unpack(value, tensors):
    """What `pack` was given."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(MARK)
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in value["items"])
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in value["items"]}
    return {key: unpack(item, tensors) for key, item in value.items()}


def restore(part, state):
    """`part.load_state_dict(state)`; an optimizer keeps its way of working, and its tensors are like its parameters.

    A file holds all tensors contiguous, and a fused optimizer walks through the memory of a channels_last weight and of
    its means as they lie: means of another layout would be those of other weights.
    """
    if isinstance(part, torch.nn.Module):
        own = part.state_dict()
        state = {name: parallel.like(value, own.get(name)) for name, value in state.items()}
    if isinstance(part, torch.optim.Optimizer) and has_usual_state(part):
        pairs = zip(part.param_groups, state["param_groups"], strict=True)
        groups = [
            {**group, **{way: own[way] for way in WAYS if way in own}} for own, group in pairs
        ]
        state = {**state, "param_groups": groups}
    part.load_state_dict(state)
    if isinstance(part, torch.optim.Optimizer):
        for parameter, moments in part.state.items():
            for name, tensor in moments.items():
                if (
                    isinstance(tensor, torch.Tensor)
                    and tensor.shape == parameter.shape
                    and tensor.ndim
                ):
                    own = torch.empty_like(parameter, dtype=tensor.dtype)
                    moments[name] = own.copy_(parallel.like(tensor, own))


def own_storage(tensors):
    """The tensors on the CPU, contiguous, none sharing memory with another: safetensors refuses tied weights."""
    seen, own = set(), {}
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return own


def digest(tensors, tree):
    """The SHA-256 over the JSON and over each tensor's name, type, shape and bytes."""
    total = hashlib.sha256(tree.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def files(folder):
    """{step: path} of the checkpoints `step_<number>.ckpt` in a folder, the newest first.

    By number, since names sort 10 before 9.
    """
    found = {}
    for path in Path(folder).glob("step_*.ckpt"):
        number = re.fullmatch(r"step_(\d+)\.ckpt", path.name)
        if number and path.is_file() and not path.is_symlink():
            found[int(number[1])] = path
    return dict(sorted(found.items(), reverse=True))


def go_back(folder, step):
    """Leaves no checkpoint of a step after `step`, nor what a killed save left behind.

    A run that goes on from there writes them anew, and the newest has to be its own.
    """
    for path in [path for number, path in files(folder).items() if number > step]:
        path.unlink(missing_ok=True)
    remove_partial(folder)


def path_of(folder, step):
    """The file that holds the state after `step`."""
    return Path(folder) / f"step_{step:08d}.ckpt"


def newest(folder):
    """(path, state) of the newest good checkpoint in the folder, None where it has none.

    A damaged one is named and passed over.
    """
    found, damaged = files(folder), []
    for number, path in found.items():
        try:
            state = load_whole(path, number)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        for error in damaged:
            log.warning("%s %s is used instead.", error, path)
        return path, state
    if found:
        raise TrainingError(
            f"None of the {len(found)} checkpoints in {folder} is good.\n"
            "Start anew in another folder: type run_dir=DIR."
        )
    return None


def to_resume(source):
    """The state to go on from: of a file, of the newest good one in a folder, or `source` itself where it is one."""
    return source if isinstance(source, dict) else loaded(source, newest)


def to_load(source):
    """The state of a file, or of the best one in a folder."""
    return loaded(source, best)


def loaded(source, choose):
    if not isinstance(source, (str, Path)):
        raise UserError(f"{source!r} is no checkpoint: give its file, or the folder that it is in.")
    if not Path(source).is_dir():
        return load(source)
    if (found := choose(source)) is None:
        raise UserError(f"{source}: there is no checkpoint in this folder.")
    return found[1]


def together(name, find):
    """What `find` finds on the first process, (path, state, ...) or None, on all: each of them reads the file."""
    found = find() if launch.is_first() else None
    path, *more = launch.agreed(name, lambda: found and [str(found[0]), *found[2:]]) or [None]
    if found is None and path is not None:
        found = (path, load_whole(path), *more)
    return found


def sha256_of(path):
    """What the file says its SHA-256 is: a name for its contents once they are verified; None where it has none."""
    try:
        with open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER)))
        return header["__metadata__"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def load_whole(path, step=None):
    """A Trainer's whole state, the one after `step` where that is known; DamagedCheckpoint for another one."""
    state = load(path)
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("callbacks"), dict)
        or type(state.get("step")) is not int
    ):
        raise DamagedCheckpoint(f"{path} is not the state of a training.")
    if step not in (None, state["step"]):
        raise DamagedCheckpoint(f"{path} is the state after step {state['step']}.")
    return state


def best(folder):
    """(path, state) of the checkpoint with the best monitored value, or of the newest one where nothing was monitored.

    None where there is no checkpoint. A damaged best one is named, and the newest is used.
    """
    found = newest(folder)
    if found is None:
        return None
    path, state = found
    try:
        entry = state["callbacks"].get("Checkpoint", {}).get("best")
        chosen = path_of(folder, entry["step"]) if entry else path
        if chosen == path:
            return found
        found = state = None  # two of them would be more memory than the training had
        return chosen, load_whole(chosen, entry["step"])
    except (AttributeError, TypeError, KeyError, ValueError):
        log.warning("%s does not say which checkpoint is the best; it is used itself.", path)
    except (DamagedCheckpoint, UserError) as error:
        log.warning("%s %s, the newest, is used instead of the best one.", error, path)
    return found or newest(folder)
