"""Tables: a csv file becomes standardised numbers and one-hot categories, by its training rows alone."""

import io
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from csv import Error as CSVError
from csv import reader as read_csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.data.description import Column, Description, is_description
from stoker.data.record import Data, unknown_class
from stoker.data.splits import check_fractions, cut, split_indices
from stoker.trainer.errors import UserError, check_choice, did_you_mean, first_few, log, printable
from stoker.trainer.files import open_plain

MOST_NUMBERS = 2**28  # that a table may become
FEWEST_ROWS = 20  # in which a column that counts them is no accident
FEW_KINDS = 20  # distinct values, which may be categories or classes however few rows there are
LARGEST = 1e38  # number in a table: float32 has none above 3.4e38
MISSING = {"", "?", "na", "n/a", "nan", "null", "none"}
CORRECT = "Write numbers as 1234.5, up to 1e38, and nothing where one is missing"

# The values of a column, stripped; None where one is missing.
Values = list[str | None]


def csv(
    path: str,
    target: str,
    kind: str = "auto",
    categorical: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    missing: str = "error",
    delimiter: str = ",",
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    trained: Description | None = None,
) -> Data:
    """A table with a header line; one column is the target.

    Numbers are standardised and categories one-hot, by the training rows alone. A column is numeric if every value is
    a number and it is not named in `categorical`; if all but a few are, it is an error. A category that the training
    rows lack is all zeros. `missing`: "error", "drop" (the row), or "mean" (of the training rows; a missing category
    is all zeros). `kind` "auto": text is classes, and so are at most 20 different whole numbers that are fewer than a
    tenth of the rows; other targets are a regression. `trained`: the description of a run's data, whose columns,
    classes and units are used instead of this table's.
    """
    check_choice("dataset.kind", kind, ("auto", "classification", "regression"))
    check_choice("dataset.missing", missing, ("error", "mean", "drop"))
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    path = str(path)
    target = str(target)  # a bare 2024 on the command line is a number
    texts, lines = _read_table(os.path.expanduser(path), delimiter)
    _check_columns(path, "target", [target], texts)
    if trained is None:
        categorical = _as_list(categorical)
        ignore = _as_list(ignore)
        _check_columns(path, "categorical", categorical, texts)
        _check_columns(path, "ignore", ignore, texts)
        names = [name for name in texts if name not in ignore]
    else:
        kind = trained["kind"]
        names = [column["name"] for column in check_table(trained)["columns"]]
        for name in names:
            check_column(path, name, texts)
    used = [name for name in texts if name in names or name == target]
    columns, lines = _without_missing({name: texts[name] for name in used}, lines, target, missing)
    answers = columns.pop(target)
    if not columns:
        raise UserError(f"{printable(path)} has no column besides the target {target}.")
    kind, classes, targets = _read_target(target, answers, lines, kind, trained)
    stratified = classes is not None
    # The same rows that `cut` gives to the training part.
    train = split_indices(targets if stratified else len(lines), fractions, split_seed, stratified)[
        0
    ]
    if trained is None:
        described = []
        for name, values in columns.items():
            described.append(_describe(name, values, lines, train, name in categorical))
        _warn_of_useless(path, columns, answers)
    else:
        described = trained["table"]["columns"]
        for column in described:
            _warn_of_unknown(path, column, columns[column["name"]], lines)
    blocks: list[Tensor] = []
    room = MOST_NUMBERS
    for column in described:
        blocks.append(_features(column, columns[column["name"]], lines, room))
        room -= blocks[-1].numel()
    inputs = torch.cat(blocks, 1)
    center = 0.0
    scale = 1.0
    if kind == "regression":
        center, scale = mean_and_std(targets[train])
        if trained is not None:
            center = trained["target_mean"]
            scale = trained["target_scale"]
        targets = ((targets - center) / scale).float()
    numbered = torch.tensor(lines)
    parts = cut(inputs, targets, fractions, split_seed, stratified, numbered)
    return Data(
        Path(path).stem,
        train=parts[0],
        val=parts[1],
        test=parts[2],
        in_shape=inputs.shape[1:],
        num_classes=1 if classes is None else len(classes),
        kind=kind,
        classes=classes,
        target_mean=center,
        target_scale=scale,
        table={
            "target": target,
            "columns": described,
            "missing": missing,
            "delimiter": delimiter,
        },
    )


def _as_list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _check_columns(path: str, key: str, names: Sequence[str], columns: dict[str, Any]) -> None:
    """Check that a table has the columns that a setting names."""
    for name in names:
        if name not in columns:
            raise UserError(
                f"dataset.{key}={name}: {printable(path)} has no such column."
                f"{did_you_mean(name, columns)}\n"
                f"It has {first_few(list(columns), 20)}."
            )


def _read_table(path: str, delimiter: str) -> tuple[dict[str, list[str]], list[int]]:
    """Read {column: stripped values}, and the line number of each row; UserError for what is not a table."""
    numbered = read_rows(path, delimiter)
    _, header = next(numbered)
    lines = []
    rows = []
    for line, row in numbered:
        lines.append(line)
        rows.append([value.strip() for value in row])
    if not rows:
        raise _empty(path)
    columns = zip(*rows, strict=True)
    return {name: list(values) for name, values in zip(header, columns, strict=True)}, lines


def read_rows(
    path: str, delimiter: str, key: str = "dataset.path", alone: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, values) of the header and then of each row, one at a time; UserError for no table.

    A table has at least two columns, or one of the name `alone`. The `delimiter` may be "tab".
    """
    if delimiter == "tab":
        delimiter = "\t"
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise UserError(
            f"dataset.delimiter={delimiter!r}: give one character, such as ',' or ';', or tab."
        )
    shown = printable(path)
    try:
        with open_plain(path, links=True) as raw, io.BufferedReader(raw) as buffered:
            text = io.TextIOWrapper(buffered, newline="", encoding="utf-8-sig")
            rows = read_csv(text, delimiter=delimiter, skipinitialspace=True)
            header = [name.strip() for name in next(rows, [])]
            _check_header(path, header, alone)
            yield 1, header
            # Where a row begins: a value in quotes may have several lines.
            line = rows.line_num + 1
            for row in rows:
                is_blank = len(row) <= 1 and not "".join(row).strip()
                if not is_blank:
                    if len(row) != len(header):
                        raise UserError(
                            f"{shown}, line {line}: {len(row)} values "
                            f"for the {len(header)} columns of the header."
                        )
                    yield line, row
                line = rows.line_num + 1
    except FileNotFoundError:
        raise UserError(f"{key}={shown}: there is no such file.") from None
    except UserError:
        raise
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"{key}={shown}: this is no table that can be read "
            f"(it is not in UTF-8, and has the byte 0x{byte:02x}).\nSave it as UTF-8."
        ) from None
    except (OSError, ValueError, CSVError) as error:
        raise UserError(
            f"{key}={shown}: this is no table that can be read ({printable(error)})."
        ) from None


def _check_header(path: str, header: list[str], alone: str | None) -> None:
    """Check that the header has at least two columns, or the one named `alone`, each with its own name."""
    shown = printable(path)
    if not header:
        raise _empty(path)
    if len(header) == 1 and header[0] != alone:
        raise UserError(
            f"{shown} has one column only, {header[0][:50]!r}.\n"
            "If its columns are separated by another character, "
            "type \"dataset.delimiter=';'\", or tab."
        )
    if "" in header:
        raise UserError(
            f"{shown}: the header has a column without a name, number {header.index('') + 1}. "
            "Give it one; to_csv(index=False) writes none."
        )
    name, count = Counter(header).most_common(1)[0]
    if count > 1:
        raise UserError(f"{shown}: the header has the column {name!r} {count} times.")


def _empty(path: str) -> UserError:
    return UserError(f"{printable(path)} is empty: it needs a header line and at least one row.")


class RowEncoder:
    """Encodes the rows of a table as a trained model takes them, for a stream of any length.

    A number stays as it is; a category becomes 0 and 1, all zeros if it is unknown, with a warning for the first of a
    column. A missing number is NaN if the model fills it in itself, else the mean. UserError for what cannot be read.
    """

    def __init__(
        self, table: dict[str, Any], header: Sequence[str], path: str, missing: str
    ) -> None:
        check_choice("dataset.missing", missing, ("error", "mean", "drop"))
        self.path = path
        self.missing = missing
        self.fills_in = table["missing"] == "mean"
        self.columns: list[Column] = table["columns"]
        for column in self.columns:
            check_column(path, column["name"], header)
        self.places = [header.index(column["name"]) for column in self.columns]
        self.warned: set[str] = set()

    def encode(self, line: int, values: Sequence[str]) -> list[float] | None:
        """Return the numbers of a row; None if a value is missing and such rows are dropped."""
        row: list[float] = []
        for column, place in zip(self.columns, self.places, strict=True):
            value = values[place].strip()
            is_missing = value.lower() in MISSING
            if is_missing and self.missing == "drop":
                return None
            if is_missing and self.missing == "error":
                raise UserError(
                    f"{printable(self.path)}, line {line}: the column {column['name']!r} has "
                    "no value.\n"
                    "Type dataset.missing=mean to fill it in, or dataset.missing=drop to "
                    "leave such rows out."
                )
            if "categories" in column:
                row += self._encode_category(line, column, value, is_missing)
            elif is_missing:
                row.append(math.nan if self.fills_in else column["mean"])
            else:
                row.append(self._encode_number(line, column, value))
        return row

    def _encode_number(self, line: int, column: Column, value: str) -> float:
        number = _number(value)
        if number is None:
            raise UserError(
                f"{printable(self.path)}, line {line}: "
                f"{value[:50]!r} in the column {column['name']!r} is not a number."
            )
        return number

    def _encode_category(
        self,
        line: int,
        column: Column,
        value: str,
        is_missing: bool,
    ) -> list[float]:
        name = column["name"]
        if value not in column["categories"] and not is_missing and name not in self.warned:
            _warn_of_category(self.path, line, name, value)
            self.warned.add(name)
        return [1.0 if value == category else 0.0 for category in column["categories"]]


def _warn_of_unknown(path: str, column: Column, values: Values, lines: list[int]) -> None:
    """Warn of the first value of a column that is none of the categories that a run was trained on."""
    categories = column.get("categories")
    if categories is None:
        return
    known = {None, *categories}
    for line, value in zip(lines, values, strict=True):
        if value not in known:
            _warn_of_category(path, line, column["name"], str(value))
            return


def _warn_of_category(path: str, line: int, name: str, value: str) -> None:
    log.warning(
        "%s, line %d: %r in the column %r is none of those trained on; such values count as "
        "none of them.",
        printable(path),
        line,
        value[:50],
        name,
    )


def _warn_of_useless(path: str, columns: dict[str, Values], answers: Values) -> None:
    """Warn of columns that say nothing about the target, or all."""
    for name, values in columns.items():
        if values == answers:
            reason = "is the target once more, which a new row has not"
        elif len(set(values)) == 1:
            reason = "has one value only, and says nothing"
        elif counts_rows(values):
            reason = "counts the rows, and a number of that kind says nothing of a new row"
        else:
            continue
        log.warning(
            "%s: the column %r %s. Leave it out: dataset.ignore=[%s].",
            printable(path),
            name,
            reason,
            name,
        )


def counts_rows(values: Values) -> bool:
    """Tell whether a column has whole numbers without repetition: in the order of the rows, or without a gap."""
    numbers, _ = _parse(values)
    # NaN, for what is missing or not a number, is not an integer.
    if len(numbers) < FEWEST_ROWS or not all(map(float.is_integer, numbers)):
        return False
    if len(set(numbers)) < len(numbers):
        return False
    return numbers == sorted(numbers) or max(numbers) - min(numbers) == len(numbers) - 1


def check_column(path: str, name: str, columns: Collection[str]) -> None:
    """Check that a table has a column on which a run was trained."""
    if name not in columns:
        raise UserError(
            f"{printable(path)}: it has no column {name!r}, on which the run was trained."
            f"{did_you_mean(name, columns)}\n"
            "Rename one, or add it; with dataset.missing=mean it may be without values."
        )


def check_table(trained: Description) -> dict[str, Any]:
    """Return the table of a run's description; UserError if the run was trained on something else."""
    if not is_description(trained):
        raise UserError("dataset.trained: this is what a run hands over. Leave it out.")
    if trained["table"] is None:
        raise UserError(f"dataset: the run was trained on {trained['dataset']}, which is no table.")
    table: dict[str, Any] = trained["table"]
    return table


def _without_missing(
    texts: dict[str, list[str]], lines: list[int], target: str, missing: str
) -> tuple[dict[str, Values], list[int]]:
    """Return the columns with None for each missing value, or without the rows that have one; and the rows' lines."""
    columns: dict[str, Values] = {}
    for name, values in texts.items():
        columns[name] = [None if value.lower() in MISSING else value for value in values]
    counts = {name: values.count(None) for name, values in columns.items() if None in values}
    if not counts:
        return columns, lines
    if missing == "error":
        raise _missing_values(counts, len(lines), target)
    if missing == "mean":
        if target in counts:
            raise UserError(
                f"The target {target!r} is missing in {counts[target]} of {len(lines)} rows, "
                "and cannot be filled in.\nType dataset.missing=drop."
            )
        return columns, lines
    rows = list(zip(*columns.values(), strict=True))
    kept = [i for i, row in enumerate(rows) if None not in row]
    if not kept:
        raise UserError(
            "dataset.missing=drop leaves no row: each has a missing value. "
            "Type dataset.missing=mean, or dataset.ignore=[COLUMN]."
        )
    columns = {name: [values[i] for i in kept] for name, values in columns.items()}
    return columns, [lines[i] for i in kept]


def _missing_values(counts: dict[str, int], rows: int, target: str) -> UserError:
    shown = ", ".join(f"{name!r} in {count}" for name, count in list(counts.items())[:3])
    if len(counts) > 3:
        shown += f" and {len(counts) - 3} more"
    fill = "" if target in counts else "dataset.missing=mean to fill them in, or "
    return UserError(
        f"Values are missing in these columns: {shown} of {rows} rows.\n"
        f"Type {fill}dataset.missing=drop to leave those rows out."
    )


def _number(value: str) -> float | None:
    """Return the number that a text is, None if it is none or too large to be used."""
    try:
        number = float(value)
    except ValueError:
        return None
    # Python reads 1_1 as 11.
    return number if abs(number) <= LARGEST and "_" not in value else None


def _parse(values: Values) -> tuple[list[float], list[int]]:
    """Return the values as numbers, NaN where there is none, and the places of those that are not numbers."""
    numbers = []
    odd = []
    for i, value in enumerate(values):
        number = None if value is None else _number(value)
        if number is None and value is not None:
            odd.append(i)
        numbers.append(math.nan if number is None else number)
    return numbers, odd


def _is_numeric(values: Values, odd: list[int]) -> bool:
    """Tell whether a column is one of numbers but for the odd values: few, or among too many for categories."""
    few = len(odd) <= max(1, len(values) / 20) or len(set(values)) > FEW_KINDS
    return few and len(odd) < len(values) / 2


def _describe_odd(values: Values, lines: list[int], odd: list[int]) -> str:
    """Say which values are not numbers, as in "1 of 400 values is not a number, '1O' in line 9".

    One may also be infinite, or too large to be used.
    """
    count = "is not a number," if len(odd) == 1 else "are not numbers, the first"
    first = str(values[odd[0]])[:50]
    return f"{len(odd)} of {len(values)} values {count} {first!r} in line {lines[odd[0]]}"


def _read_target(
    name: str,
    values: Values,
    lines: list[int],
    kind: str,
    trained: Description | None,
) -> tuple[str, list[str] | None, Tensor]:
    """Return (kind, class names or None, targets): int64 (N,), or float64 (N, 1) for a regression."""
    if trained is not None and trained["classes"] is not None:
        return kind, trained["classes"], _known_labels(values, trained["classes"])
    numbers, odd = _parse(values)
    keys: list[Any] = values if odd else numbers
    distinct = sorted(set(keys))
    if len(distinct) < 2 and trained is None:
        raise UserError(
            f"dataset.target={name}: all {len(values)} rows have the same value, {values[0]!r}. "
            "There is nothing to learn."
        )
    if odd and (kind == "regression" or (kind == "auto" and _is_numeric(values, odd))):
        advice = "" if trained else ", or type dataset.kind=classification"
        reason = _describe_odd(values, lines, odd)
        raise UserError(f"dataset.target={name}: {reason}.\n{CORRECT}{advice}.")
    if kind == "auto":
        few = len(distinct) <= FEW_KINDS and len(distinct) < len(values) / 10
        whole = bool(odd) or (few and all(value.is_integer() for value in distinct))
        kind = "classification" if whole else "regression"
    if kind == "regression":
        return kind, None, torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    if len(distinct) > max(2, len(values) / 2):
        reason = f"{len(values)} rows have {len(distinct)} different values, too many for classes"
        advice = "Type dataset.kind=regression, or choose another column."
        if odd:
            reason += f", and {_describe_odd(values, lines, odd)}"
            advice = f"{CORRECT}, or choose another."
        raise UserError(f"dataset.target={name}: {reason}.\n{advice}")
    labels = {value: label for label, value in enumerate(distinct)}
    targets = torch.tensor([labels[value] for value in keys])
    return kind, list(map(_class_name, distinct)), targets


def _known_labels(values: Values, classes: list[str]) -> Tensor:
    """Return the labels of a target by the classes of a run; UserError for a value that is none of them."""
    labels = {name: label for label, name in enumerate(classes)}
    for value in set(values):
        text = str(value)
        if text not in labels:
            number = _number(text)
            name = text if number is None else _class_name(number)
            if name not in labels:
                raise unknown_class(name, classes)
            labels[text] = labels[name]
    return torch.tensor([labels[str(value)] for value in values])


def _class_name(value: str | float) -> str:
    """Return the name of a class: a text as it is, a number with all its digits; 2.0 and 2 are the same."""
    if isinstance(value, str):
        return value
    return str(int(value)) if value.is_integer() else repr(value)


def _describe(
    name: str,
    values: Values,
    lines: list[int],
    train: Tensor,
    categorical: bool,
) -> Column:
    """Return {"name", "mean", "std"} of a numeric column, {"name", "categories"} of another, by the rows `train`."""
    kinds = {values[i] for i in train.tolist()}
    categories = sorted(value for value in kinds if value is not None)
    if not categories:
        raise UserError(
            f"Column {name!r} has no value in the training part. Type dataset.ignore=[{name}]."
        )
    if categorical:
        return {"name": name, "categories": categories}
    numbers, odd = _parse(values)
    if not odd:
        column = torch.tensor(numbers, dtype=torch.float64)[train]
        mean, std = mean_and_std(column[~column.isnan()])
        return {"name": name, "mean": mean, "std": std}
    numeric = _is_numeric(values, odd)
    if numeric or len(categories) > max(FEW_KINDS, len(train) / 2):
        text = "" if numeric else "\nText wants a data set of your own, as in examples/own_data.py."
        reason = _describe_odd(values, lines, odd)
        raise UserError(
            f"Column {name!r} has {len(categories)} different values, and {reason}.\n"
            f"{CORRECT}, or type dataset.ignore=[{name}] or dataset.categorical=[{name}].{text}"
        )
    return {"name": name, "categories": categories}


def mean_and_std(numbers: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 1 if all numbers are equal (900 times 0.1: 1e-17)."""
    std = 1.0
    if numbers.min() < numbers.max():
        std = numbers.std(correction=0).item()
    return numbers.mean().item(), std


def _features(described: Column, values: Values, lines: list[int], room: int) -> Tensor:
    """Return float32 (N, 1) of a numeric column, (N, categories) of another one.

    UserError if these are more than `room` numbers, which a small file can ask for.
    """
    name = described["name"]
    if "categories" not in described:
        numbers, odd = _parse(values)
        if odd:
            raise UserError(
                f"Column {name!r}, in which the run was trained on numbers: "
                f"{_describe_odd(values, lines, odd)}.\n{CORRECT}."
            )
        column = torch.tensor(numbers, dtype=torch.float64)
        standardised: Tensor = (column - described["mean"]) / described["std"]
        return standardised.nan_to_num(0.0).float().unsqueeze(1)
    categories = described["categories"]
    if len(values) * len(categories) > room:
        raise UserError(
            f"Column {name!r} has {len(categories)} categories in {len(values)} rows, "
            f"which is more than fits in memory.\nType dataset.ignore=[{name}]."
        )
    places = {category: place for place, category in enumerate(categories)}
    block = torch.zeros(len(values), len(categories))
    for row, value in enumerate(values):
        if value in places:
            block[row, places[value]] = 1
    return block
