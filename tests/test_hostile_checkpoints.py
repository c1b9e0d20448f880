"""Checkpoint files that somebody made on purpose: no code of theirs runs, none costs time or
memory, none is used.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker.trainer import checkpoint

ROOT = Path(__file__).resolve().parent.parent
GOOD = {"step": 1, "callbacks": {}, "model": {"weight": torch.ones(2, 3)}}


class Canary:
    """Unpickled, it makes a file beside the checkpoint: the proof that code of its own has run."""

    def __init__(self, folder):
        self.command = f"touch {folder}/canary"

    def __reduce__(self):
        return os.system, (self.command,)


def signed(path, tree, tensors=(), **changes):
    """A file with a right SHA-256 over whatever is in it: who wants to deceive computes it as
    well.
    """
    tree, tensors = (
        tree if isinstance(tree, str) else json.dumps(tree),
        dict(tensors) or {"x": torch.zeros(1)},
    )
    metadata = {
        "format": checkpoint.FORMAT,
        "state": tree,
        "sha256": checkpoint.digest(tensors, tree),
    }
    save_file(tensors, path, metadata | changes)


def raw(path, header, data=b""):
    """A file of the safetensors layout with any header: bytes, or what becomes JSON."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def state(**changes):
    return {"step": 9, "callbacks": {}, "model": {}, **changes}


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def part(name):
    return {checkpoint.MARK: "tensor", "name": name}


HOSTILE = {
    # no safetensors at all
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Canary(path.parent))),
    "a pickle of torch": lambda path: torch.save({"step": 9, "model": Canary(path.parent)}, path),
    "a pickle inside": lambda path: raw(path, pickle.dumps(Canary(path.parent))),
    "nothing": lambda path: path.write_bytes(b""),
    "seven bytes": lambda path: path.write_bytes(b"\x01" * 7),
    "a shell script": lambda path: path.write_text(f"#!/bin/sh\ntouch {path.parent}/canary\n"),
    "zeros": lambda path: path.write_bytes(bytes(2**20)),
    "text": lambda path: path.write_text("step: 9\n" * 1000),
    # lengths
    "a header of 2**63 bytes": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"),
    "a header of 2**64-1 bytes": lambda path: path.write_bytes(b"\xff" * 64),
    "a header of 2**40 bytes in a file of as many": lambda path: sparse(path, 2**40),
    "a header one byte longer than the file": lambda path: path.write_bytes(
        struct.pack("<Q", 3) + b"{}"
    ),
    "a header of nothing": lambda path: path.write_bytes(struct.pack("<Q", 0)),
    # headers
    "a header that is a list": lambda path: raw(path, [1, 2]),
    "a header that is no JSON": lambda path: raw(path, b"{" * 1000),
    "a header 10**6 deep": lambda path: raw(path, b'{"a":' * 10**6 + b"1" + b"}" * 10**6),
    "a header of lists 10**6 deep": lambda path: raw(path, b"[" * 10**6 + b"]" * 10**6),
    "a header that is no UTF-8": lambda path: raw(path, b'{"\xff\xfe": 1}'),
    "metadata that is a list": lambda path: raw(
        path, {"__metadata__": [], "x": tensor()}, bytes(4)
    ),
    "metadata that is nested": lambda path: raw(
        path, {"__metadata__": {"state": {}}, "x": tensor()}, bytes(4)
    ),
    "10 MB of metadata": lambda path: raw(
        path, {"__metadata__": {str(i): "" for i in range(10**6)}}
    ),
    # tensors
    "a tensor of 2**62 numbers": lambda path: raw(path, {"x": tensor(shape=(2**62,))}, bytes(4)),
    "a tensor whose size overflows": lambda path: raw(
        path, {"x": tensor(shape=(2**33, 2**33))}, bytes(4)
    ),
    "a negative shape": lambda path: raw(path, {"x": tensor(shape=(-1, -4))}, bytes(16)),
    "offsets that go back": lambda path: raw(path, {"x": tensor(offsets=(4, 0))}, bytes(4)),
    "offsets beyond the file": lambda path: raw(
        path, {"x": tensor(shape=(100,), offsets=(0, 400))}, bytes(4)
    ),
    "two tensors in one place": lambda path: raw(path, {"x": tensor(), "y": tensor()}, bytes(4)),
    "10**6 tensors in one place": lambda path: raw(
        path, {str(i): tensor() for i in range(10**5)}, bytes(4)
    ),
    "a hole between tensors": lambda path: raw(
        path, {"x": tensor(), "y": tensor(offsets=(8, 12))}, bytes(12)
    ),
    "a type that there is not": lambda path: raw(path, {"x": tensor(dtype="PICKLE")}, bytes(4)),
    "bytes after the last tensor": lambda path: raw(path, {"x": tensor()}, bytes(400)),
    # of this project's form, and signed
    "no state": lambda path: save_file({"x": torch.zeros(1)}, path, {"format": checkpoint.FORMAT}),
    "another format": lambda path: signed(path, state(), format="stoker-0"),
    "no sum": lambda path: signed(path, state(), sha256=""),
    "the sum of another state": lambda path: signed(
        path, state(), state=json.dumps(state(step=10**6))
    ),
    "a state that is no JSON": lambda path: signed(path, "import os"),
    "a state 10**6 deep": lambda path: signed(path, "[" * 10**6 + "]" * 10**6),
    "a state of dicts 10**5 deep": lambda path: signed(path, '{"a":' * 10**5 + "1" + "}" * 10**5),
    "3 million lists": lambda path: signed(path, "[" + "[]," * 3 * 10**6 + "1]"),
    "a million lists that are escaped": lambda path: escaped(path),
    "a number of 10**6 digits": lambda path: signed(
        path, f'{{"step": {"9" * 10**6}, "callbacks": {{}}}}'
    ),
    "a state that is a list": lambda path: signed(path, [1, 2, 3]),
    "a state that is a number": lambda path: signed(path, 9),
    "no step": lambda path: signed(path, {"callbacks": {}}),
    "a step that is a text": lambda path: signed(path, state(step="../../canary")),
    "a step that is true": lambda path: signed(path, state(step=True)),
    "a step that is no number": lambda path: signed(path, '{"step": NaN, "callbacks": {}}'),
    "callbacks that are a list": lambda path: signed(path, state(callbacks=[])),
    "a tensor that is not in the file": lambda path: signed(path, state(model=part("y"))),
    "a tensor without a name": lambda path: signed(path, state(model={checkpoint.MARK: "tensor"})),
    "a tensor with a list for a name": lambda path: signed(path, state(model=part([]))),
    "a dict with a dict for a key": lambda path: signed(
        path, state(model={checkpoint.MARK: "dict", "items": [[{}, 1]]})
    ),
    "a dict of triples": lambda path: signed(
        path, state(model={checkpoint.MARK: "dict", "items": [[1, 2, 3]]})
    ),
    "a dict without items": lambda path: signed(path, state(model={checkpoint.MARK: "dict"})),
    "a tuple of a number": lambda path: signed(
        path, state(model={checkpoint.MARK: "tuple", "items": 3})
    ),
    # not a regular file
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to elsewhere": lambda path: path.symlink_to("/etc/passwd"),
}

# Its memory is bounded by the size of the file, beside what it has to begin with, and its time. What
# it finds goes out as JSON.
SCRIPT = """
    import json, logging, os, resource, signal, sys
    from stoker.trainer import checkpoint
    from stoker.trainer.errors import TrainingError, UserError

    def kib(name):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(name))

    found = {}
    warnings = []
    logging.getLogger("stoker").addFilter(lambda record: warnings.append(record.getMessage()))
    for folder in sys.argv[1:]:
        hostile = os.path.join(folder, "step_00000009.ckpt")
        header = min(os.lstat(hostile).st_size, 100 * 10**6)  # safetensors reads no longer ones
        limit = kib("VmData") * 1024 + 100 * 2**20 + 30 * header
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        signal.alarm(60)
        warnings.clear()
        try:
            path, state = checkpoint.newest(folder)
            outcome = [os.path.basename(path), state["step"]]
        except BaseException as error:
            outcome = [type(error).__name__, str(error)[:300]]
        try:
            checkpoint.load(hostile)
            direct = "loaded"
        except BaseException as error:
            direct = [type(error).__name__, str(error)[:300]]
        found[folder] = {"newest": outcome, "warnings": list(warnings), "direct": direct}
    print(json.dumps(found))
    """


def escaped(path):
    """The same JSON string with its marks written as \\u005b and the like."""
    signed(path, "[" + "[]," * 10**6 + "1]")
    contents = path.read_bytes()
    length = struct.unpack("<Q", contents[:8])[0]
    header, data = contents[8 : 8 + length], contents[8 + length :]
    start, end = header.index(b'"state":"') + 9, header.index(b',1]"') + 3
    state = (
        header[start:end]
        .replace(b"[", b"\\u005b")
        .replace(b"]", b"\\u005d")
        .replace(b",", b"\\u002c")
    )
    header = header[:start] + state + header[end:]
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def sparse(path, size):
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", size - 8))
        file.truncate(size)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    if not os.path.exists("/proc/self/status"):
        pytest.skip("reads the memory of a process from /proc")
    base = tmp_path_factory.mktemp("hostile")
    folders = {name: base / str(i) for i, name in enumerate(HOSTILE)}
    for name, folder in folders.items():
        checkpoint.save(folder / "step_00000001.ckpt", GOOD)
        HOSTILE[name](folder / "step_00000009.ckpt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, folders.values())]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        pytest.fail(done.stderr[-1000:], pytrace=False)
    found = json.loads(done.stdout)
    return {name: (folder, found[str(folder)]) for name, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_the_good_one_before_it_is_used(outcomes, name):
    folder, found = outcomes[name]
    assert found["newest"] == ["step_00000001.ckpt", 1]
    regular = (folder / "step_00000009.ckpt").is_file() and not (
        folder / "step_00000009.ckpt"
    ).is_symlink()
    assert (
        len(found["warnings"]) == regular
    )  # what is no file of ours is passed over without a word
    assert all(
        "step_00000009.ckpt" in text and "step_00000001.ckpt" in text for text in found["warnings"]
    )
    if found["direct"] != "loaded":  # a state, though no Trainer's
        assert (
            found["direct"][0] == "DamagedCheckpoint" and len(found["direct"][1].splitlines()) == 1
        )
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000001.ckpt",
        "step_00000009.ckpt",
    ]


def test_the_canary_would_sing(tmp_path):
    (tmp_path / "pickle").write_bytes(pickle.dumps(Canary(tmp_path)))
    with open(tmp_path / "pickle", "rb") as file:
        pickle.load(file)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "entry", [{"step": "../../../etc/passwd"}, {"step": -1}, {}, [], "x", {"step": 10**30}]
)
def test_a_best_that_is_no_step_leads_nowhere(tmp_path, entry):
    checkpoint.save(
        checkpoint.path_of(tmp_path, 1), {**GOOD, "callbacks": {"Checkpoint": {"best": entry}}}
    )
    assert checkpoint.best(tmp_path)[0].name == "step_00000001.ckpt"
