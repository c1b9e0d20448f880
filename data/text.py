"""Text: windows of characters, bytes or token ids. Targets are the same tokens shifted by one.

The vocabulary is part of the description, so a checkpoint is all you need to generate text.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.data.description import Description
from stoker.data.record import Data
from stoker.data.splits import check_fractions
from stoker.trainer.errors import UserError, check_choice, check_number, first_few, printable
from stoker.trainer.files import check_regular, open_plain

Tokens = np.ndarray[Any, np.dtype[Any]]

FORMS = ("auto", "characters", "bytes", "npy", "uint16", "uint32")
BY_ENDING = {".npy": "npy", ".bin": "uint16"}
PARTS = ("train", "val", "test")
MOST_IDS = 2**24  # maximum number of classes; larger numbers are unlikely to be token ids
UNICODE = 0x110000  # number of possible code points


class TextSplit:
    """A split of a text as windows of `length` tokens, one every `stride` tokens.

    The target of each token is the token that follows it. Tokens are not copied, so they can be a
    memory map. On the device, all windows are views of one tensor.
    """

    dtype = torch.int64
    targets_are_uniform = True

    def __init__(self, tokens: Tokens, length: int, stride: int) -> None:
        self.tokens = tokens
        self.length = length
        self.stride = stride
        self.target_shape = (length,)
        self.nbytes: int = 16 * len(tokens)  # two int64 copies on the device

    def __len__(self) -> int:
        return (len(self.tokens) - self.length - 1) // self.stride + 1

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        starts = np.asarray(indices, np.int64) * self.stride
        places = starts[:, None] + np.arange(self.length + 1)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all inputs and targets, as views of the same tokens."""
        tokens = torch.from_numpy(self.tokens.astype(np.int64))
        windows = tokens.unfold(0, self.length + 1, self.stride)
        return windows[:, :-1], windows[:, 1:]


def text(
    path: str,
    tokens: str = "auto",
    length: int = 128,
    stride: int | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    trained: Description | None = None,
) -> Data:
    """Cut a text file into windows. The validation and test splits are at its end, in that order.

    Args:
        path: The file. Characters are read into memory; bytes and ids are memory-mapped.
        tokens: "characters" of UTF-8, "bytes", or the ids in a .npy file ("npy") or a raw file
            ("uint16", "uint32"); "auto" decides by the file extension.
        length: Number of tokens in a window.
        stride: Number of tokens from the start of one training window to the next. None means
            `length`, so an epoch reads each token once. Evaluations always use `length`.
        val_fraction: Fraction of the text to use for validation.
        test_fraction: Fraction of the text to use for testing.
        trained: The description of the data that a run was trained on, whose vocabulary is used.
    """
    check_choice("dataset.tokens", tokens, FORMS)
    check_number("dataset.length", length, whole=True, least=1)
    check_number("dataset.stride", stride, whole=True, least=1, optional=True)
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    path = os.path.expanduser(str(path))  # on the command line, a bare 2024 is a number
    form = tokens
    if form == "auto":
        form = BY_ENDING.get(os.path.splitext(path)[1].lower(), "characters")
    classes = None
    try:
        if form == "characters":
            ids, classes = read_characters(path, trained["classes"] if trained else None)
            count = len(classes)
        else:
            ids = open_ids(path, form)
            count = 256 if form == "bytes" else count_ids(path, ids, form)
    except OSError as error:
        raise unreadable(path, f"{error.strerror or error}. Type dataset.path=FILE.") from None
    if not len(ids):
        raise unreadable(path, "the file is empty.")
    kind = form if form in ("characters", "bytes") else "ids"
    if trained is not None and kind != trained["tokens"]:
        raise unreadable(path, f"its tokens are {kind}, but the model's are {trained['tokens']}.")
    train, val, test = _parts(path, ids, fractions, length, stride or length)
    name = os.path.splitext(os.path.basename(path))[0]
    return Data(name, train, val, test, (length,), count, classes=classes, tokens=kind)


def _parts(
    path: str, ids: Tokens, fractions: Sequence[float], length: int, stride: int
) -> list[TextSplit | None]:
    """Cut the text into the training, validation and test splits, with None for a fraction of 0.

    Raises UserError if a split is shorter than a window.
    """
    sizes = [round(fraction * len(ids)) for fraction in fractions]
    pieces = np.split(ids, np.cumsum([len(ids) - sum(sizes), *sizes])[:-1])
    parts: list[TextSplit | None] = []
    for name, fraction, piece in zip(PARTS, (1, *fractions), pieces, strict=True):
        if fraction > 0 and len(piece) <= length:
            raise UserError(
                f"dataset.length={length}: the {name} split of {printable(path)} has "
                f"{len(piece):,} tokens, but a window with its targets takes {length + 1:,}.\n"
                "Type a shorter dataset.length, or a different dataset.val_fraction or "
                "dataset.test_fraction."
            )
        part = TextSplit(piece, length, length if parts else stride)
        parts.append(part if fraction > 0 else None)
    return parts


def unreadable(path: str, reason: object) -> UserError:
    """Make the UserError for a file that cannot be read in its declared format."""
    return UserError(f"dataset.path={printable(path)}: {reason}")


def read_characters(path: str, known: Sequence[str] | None) -> tuple[Tokens, list[str]]:
    """Return the characters of a UTF-8 file as ids, and the distinct characters in Unicode order.

    `known`: the characters that a run was trained on; any other character is an error.
    """
    try:
        with open_plain(path, links=True) as file:
            letters = file.readall().decode()
    except UnicodeDecodeError as error:
        raise unreadable(
            path, f"byte {error.start:,} is not UTF-8.\nType dataset.tokens=bytes."
        ) from None
    codes = np.frombuffer(letters.encode("utf-32-le"), np.uint32)
    if known is None:
        known = sorted(set(letters))
    places = np.full(UNICODE, len(known), np.int32)
    places[list(map(ord, known))] = np.arange(len(known))
    ids = places[codes].astype(np.uint8 if len(known) < 256 else np.int32)
    unknown = ids == len(known)
    if unknown.any():
        raise unreadable(path, f"{not_known(letters[int(unknown.argmax())])}.")
    return ids, list(known)


def not_known(letter: str) -> str:
    return f"the training text of the run does not contain {printable(repr(letter))}"


def open_ids(path: str, form: str) -> Tokens:
    """Memory-map a file of bytes or ids."""
    try:
        check_regular(os.stat(path), path)
        if form == "npy":
            ids: Any = np.lib.format.open_memmap(path, mode="r")
        else:
            ids = np.memmap(path, np.dtype("uint8" if form == "bytes" else form), "r")
    except (ValueError, EOFError):
        raise unreadable(
            path, f"not a valid {form} file.\nType a different dataset.tokens: {', '.join(FORMS)}."
        ) from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise unreadable(path, "token ids must be a one-dimensional array of integers.")
    return ids


def count_ids(path: str, ids: Tokens, form: str) -> int:
    """Return one more than the highest id; raise UserError if these are not token ids."""
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < 0 or highest >= MOST_IDS:
        raise unreadable(
            path,
            f"its numbers range from {lowest:,} to {highest:,}, but token ids range from 0 to "
            f"{MOST_IDS - 1:,}.\nCheck dataset.tokens={form}.",
        )
    return highest + 1


def encode(prompt: str, about: Description) -> list[int]:
    """Return the token ids of a text, using the description of a run's data."""
    if about["tokens"] == "bytes":
        return list(prompt.encode())
    if about["tokens"] == "characters":
        for letter in prompt:
            if letter not in about["classes"]:
                raise UserError(
                    f"prompt: {not_known(letter)}.\nIt contains {first_few(about['classes'], 200)}."
                )
        return list(map(about["classes"].index, prompt))
    numbers = prompt.split()
    for number in numbers:
        if not number.isdecimal() or len(number) > 9 or int(number) >= about["num_classes"]:
            raise UserError(
                f"prompt: type token ids below {about['num_classes']}, such as 5 0 7, not "
                f"{printable(number)}."
            )
    return list(map(int, numbers))


def decode(ids: Sequence[int], about: Description) -> str:
    """Return the text of token ids; bytes that are not UTF-8 become the replacement character."""
    if about["tokens"] == "bytes":
        return bytes(ids).decode(errors="replace")
    if about["tokens"] == "characters":
        return "".join(about["classes"][number] for number in ids)
    return " ".join(map(str, ids))
