"""A table: a csv file -> standardised numbers and one-hot categories, by the training part alone."""

import io
import math
import os
from collections import Counter
from csv import Error as CSVError
from csv import reader as read_csv
from pathlib import Path

import torch
from stoker.data.description import is_description
from stoker.data.record import Data, unknown_class
from stoker.data.splits import TensorSplit, check_fractions, split_indices
from stoker.trainer.errors import UserError, check_choice, did_you_mean, log, printable
from stoker.trainer.files import open_plain

MOST_NUMBERS = 2**28  # that a table may become
FEWEST_ROWS = 20  # in which a column that counts them is no accident
FEW_KINDS = 20  # of values, which may be categories or classes however few rows there are
LARGEST = 1e38  # number of a table: float32 has none above 3.4e38
MISSING = {"", "?", "na", "n/a", "nan", "null", "none"}


def csv(
    path,
    target,
    kind="auto",
    categorical=(),
    ignore=(),
    missing="error",
    delimiter=",",
    val_fraction=0.1,
    test_fraction=0.2,
    split_seed=0,
    trained=None,
):
    """A table with a header line; one column is the target.

    Numbers are standardised, categories one-hot, both by the training part alone. A column in which every value is a
    number is numeric, unless named in `categorical`; where all but a few are, it is an error. A category that the
    training part lacks is all zeros.
    `missing`: error, drop (the rows), or mean (the training part's; a missing category is all zeros). `kind` auto:
    text, or at most 20 different whole numbers that are fewer than a tenth of the rows, are classes; other targets are
    a regression. `trained`: what a run's data set said of itself (Data.description), whose columns, classes and units
    are taken in place of this table's own.
    """
    check_choice("dataset.kind", kind, ("auto", "classification", "regression"))
    check_choice("dataset.missing", missing, ("error", "mean", "drop"))
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    path, target = str(path), str(target)  # a bare 2024 on the command line is a number
    columns, lines = _read_table(
        os.path.expanduser(path), "\t" if delimiter == "tab" else delimiter
    )
    used = (("target", [target]), ("categorical", categorical), ("ignore", ignore))
    for key, names in (
        used[:1] if trained is not None else used
    ):  # the other two are the run's own table's
        for name in [names] if isinstance(names, str) else names:
            if name not in columns:
                raise UserError(
                    f"dataset.{key}={name}: {printable(path)} has no such column.{did_you_mean(name, columns)}\n"
                    f"It has {', '.join(map(printable, list(columns)[:20]))}{', ...' * (len(columns) > 20)}."
                )
    ignore = {ignore} if isinstance(ignore, str) else set(ignore)
    if trained is not None:
        there = [column["name"] for column in check_table(trained)["columns"]]
        for name in there:
            check_column(path, name, columns)
        ignore, kind = set(columns) - set(there), trained["kind"]
    columns = {
        name: values for name, values in columns.items() if name not in ignore or name == target
    }
    columns, lines = _without_missing(columns, lines, target, missing)
    answers = columns.pop(target)
    if not columns:
        raise UserError(f"{printable(path)} has no column besides the target {target}.")

    kind, classes, targets = _read_target(target, answers, lines, kind, trained)
    parts = split_indices(
        targets if classes else len(targets), fractions, split_seed, stratified=classes is not None
    )
    categorical = {categorical} if isinstance(categorical, str) else set(categorical)
    if trained is None:
        described = [
            _describe(name, values, lines, parts[0], name in categorical)
            for name, values in columns.items()
        ]
        for name, values in columns.items():
            if what := of_no_use(values, answers):
                log.warning(
                    "%s: the column %r %s. Leave it out: dataset.ignore=[%s].",
                    printable(path),
                    name,
                    what,
                    name,
                )
    else:
        described = trained["table"]["columns"]
        for column in described:
            if kinds := column.get("categories"):
                warn_of_unknown(
                    path, column["name"], {None, *kinds}, columns[column["name"]], lines
                )
    blocks = []
    for column in described:
        room = MOST_NUMBERS - sum(map(torch.numel, blocks))
        blocks.append(_features(column, columns[column["name"]], lines, room))
    inputs = torch.cat(blocks, 1)
    center, scale = 0.0, 1.0
    if not classes:
        center, scale = mean_and_std(targets[parts[0]])
        if trained is not None:
            center, scale = trained["target_mean"], trained["target_scale"]
        targets = ((targets - center) / scale).float()
    tensors = (inputs, targets, torch.tensor(lines))
    train, val, test = (
        TensorSplit(*(tensor[part] for tensor in tensors)) if len(part) else None for part in parts
    )
    name, shape, outputs = Path(path).stem, inputs.shape[1:], len(classes) if classes else 1
    table = {"target": target, "columns": described, "missing": missing, "delimiter": delimiter}
    units = {"target_mean": center, "target_scale": scale}
    return Data(name, train, val, test, shape, outputs, kind, classes, table=table, **units)


def _read_table(path, delimiter):
    """({column: list of stripped strings}, the number of each row's line); UserError for what is not a table."""
    numbered, lines, rows = read_rows(path, delimiter), [], []
    header = next(numbered)
    for line, row in numbered:
        lines.append(line)
        rows.append(row)
    if not rows:
        raise empty(path)
    columns = zip(header, zip(*rows, strict=True), strict=True)
    return {name: [value.strip() for value in values] for name, values in columns}, lines


def read_rows(path, delimiter, key="dataset.path", alone=None):
    """Yields the header, then (number of the line, values) of each row, one at a time; UserError for no table.

    Two columns are the least that one has, but that of the name `alone` may be so.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise UserError(
            f"dataset.delimiter={delimiter!r}: give one character, such as ',' or ';', or tab."
        )
    shown = printable(path)
    try:
        with open_plain(path, links=True) as raw, io.BufferedReader(raw) as buffered:
            lines = io.TextIOWrapper(buffered, newline="", encoding="utf-8-sig")
            lines = read_csv(lines, delimiter=delimiter, skipinitialspace=True)
            header = [name.strip() for name in next(lines, [])]
            if not header:
                raise empty(path)
            if len(header) == 1 and header[0] != alone:
                raise UserError(
                    f"{shown} has one column only, {header[0][:50]!r}.\n"
                    "If its columns are separated by another character, type \"dataset.delimiter=';'\", or tab."
                )
            for name, count in Counter(header).items():
                if count > 1 or not name:
                    what = f"has the column {name!r} {count} times."
                    if not name:
                        place = f"has a column without a name, number {header.index(name) + 1}"
                        what = f"{place}. Give it one; to_csv(index=False) writes none."
                    raise UserError(f"{shown}: the header {what}")
            yield header
            line = (
                lines.line_num + 1
            )  # where a row begins: a value in quotes may have several lines
            for row in lines:
                there = len(row) > 1 or "".join(row).strip()  # a blank line is no row
                if len(row) != len(header) and there:
                    what = f"{len(row)} values for the {len(header)} columns of the header"
                    raise UserError(f"{shown}, line {line}: {what}.")
                if there:
                    yield line, row
                line = lines.line_num + 1
    except FileNotFoundError:
        raise UserError(f"{key}={shown}: there is no such file.") from None
    except UserError:
        raise
    except UnicodeDecodeError as error:
        what = f"it is not in UTF-8, and has the byte 0x{error.object[error.start]:02x}"
        raise UserError(
            f"{key}={shown}: this is no table that can be read ({what}).\nSave it as UTF-8."
        ) from None
    except (OSError, ValueError, CSVError) as error:
        raise UserError(
            f"{key}={shown}: this is no table that can be read ({printable(error)})."
        ) from None


def empty(path):
    return UserError(f"{printable(path)} is empty: it needs a header line and at least one row.")


def row_encoder(table, header, path, missing):
    """A function: (number of the line, values) -> the row as a trained model takes it, a list of floats.

    That is each number as it is, and each category as 0 and 1; an unknown one is all zeros, with a warning for the
    first of a column. A number that is missing is nan where the model itself fills it in, else the mean. With
    missing="drop" a row that lacks a value is None; UserError for what cannot be.
    """
    check_choice("dataset.missing", missing, ("error", "mean", "drop"))
    readers, shown, warned = [], printable(path), set()
    for column in table["columns"]:
        check_column(path, column["name"], header)
        kinds = column.get("categories")
        places = None if kinds is None else {kind: i for i, kind in enumerate(kinds)}
        filled = math.nan if table["missing"] == "mean" else column.get("mean")
        readers.append((column["name"], header.index(column["name"]), places, filled))

    def encode(line, values):
        row = []
        for name, index, places, filled in readers:
            value = values[index].strip()
            gone = value.lower() in MISSING
            if gone and missing == "drop":
                return None
            if gone and missing == "error":
                raise UserError(
                    f"{shown}, line {line}: the column {name!r} has no value.\n"
                    "Type dataset.missing=mean to fill it in, or dataset.missing=drop to leave such rows out."
                )
            if places is None:
                number = filled if gone else _number(value)
                if number is None:
                    raise UserError(
                        f"{shown}, line {line}: {value[:50]!r} in the column {name!r} is no number."
                    )
                row.append(number)
            else:
                block = [0.0] * len(places)
                if value in places:
                    block[places[value]] = 1.0
                elif not gone and name not in warned:
                    warn(path, line, name, value)
                    warned.add(name)
                row += block
        return row

    return encode


def warn_of_unknown(path, name, known, values, lines):
    """The warning for the first of the values of the column `name` that is not one of the `known`."""
    line, value = next(
        (pair for pair in zip(lines, values, strict=True) if pair[1] not in known), (None, None)
    )
    if line is not None:
        warn(path, line, name, value)


def warn(path, line, name, value):
    """The warning for a category that a run was not trained on."""
    what = "is none of those trained on; such values count as none of them"
    log.warning(
        "%s, line %d: %r in the column %r %s.", printable(path), line, value[:50], name, what
    )


def of_no_use(values, answers):
    """Why a column says nothing, or all, of the answers; None for any other."""
    if values == answers:
        return "is the target once more, which a new row has not"
    if len(set(values)) == 1:
        return "has one value only, and says nothing"
    return (
        "counts the rows, and a number of that kind says nothing of a new row"
        if counts_rows(values)
        else None
    )


def counts_rows(values):
    """Whether a column of numbers is whole ones that never come twice: in the order of the rows, or with no gap."""
    numbers = _numbers(values)
    if (
        numbers is None
        or len(numbers) < FEWEST_ROWS
        or len(set(numbers)) < len(numbers)
        or not all(map(float.is_integer, numbers))
    ):
        return False  # nan is none either
    return numbers == sorted(numbers) or max(numbers) - min(numbers) == len(numbers) - 1


def _number(value):
    """The number that a text is, of a size that can be used, or None."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) <= LARGEST and "_" not in value else None  # Python reads 1_1 as 11


def check_column(path, name, there):
    """UserError where a table lacks a column of those that a run was trained on."""
    if name not in there:
        raise UserError(
            f"{printable(path)}: it has no column {name!r}, on which the run was trained.{did_you_mean(name, there)}\n"
            "Rename one, or add it; with dataset.missing=mean it may be without values."
        )


def check_table(trained):
    """The table of a run's description; UserError where it was trained on something else."""
    if not is_description(trained):
        raise UserError("dataset.trained: this is what a run hands over. Leave it out.")
    if trained["table"] is None:
        raise UserError(f"dataset: the run was trained on {trained['dataset']}, which is no table.")
    return trained["table"]


def _without_missing(columns, lines, target, missing):
    """The columns with None for each missing value, or without the rows that have one; and the rows' lines."""
    columns = {
        name: [None if value.lower() in MISSING else value for value in values]
        for name, values in columns.items()
    }
    counts = {name: values.count(None) for name, values in columns.items() if None in values}
    rows = len(columns[target])
    if counts and missing == "error":
        found = ", ".join(f"{name!r} in {count}" for name, count in list(counts.items())[:3])
        found += f" and {len(counts) - 3} more" * (len(counts) > 3)
        fill = "" if target in counts else "dataset.missing=mean to fill them in, or "
        raise UserError(
            f"Values are missing in these columns: {found} of {rows} rows.\n"
            f"Type {fill}dataset.missing=drop to leave those rows out."
        )
    if target in counts and missing == "mean":
        raise UserError(
            f"The target {target!r} is missing in {counts[target]} of {rows} rows, and cannot be filled in.\n"
            "Type dataset.missing=drop."
        )
    if counts and missing == "drop":
        keep = [i for i, row in enumerate(zip(*columns.values(), strict=True)) if None not in row]
        if not keep:
            raise UserError(
                "dataset.missing=drop leaves no row: each has a missing value. "
                "Type dataset.missing=mean, or dataset.ignore=[COLUMN]."
            )
        columns, lines = (
            {name: [values[i] for i in keep] for name, values in columns.items()},
            [lines[i] for i in keep],
        )
    return columns, lines


def _numbers(values):
    """The values as floats, NaN where one is missing; None if one is no number, or none is there."""
    numbers = [math.nan if value is None else _number(value) for value in values]
    return None if None in numbers or set(values) == {None} else numbers


def _odd(values):
    """The places of the values that are no numbers."""
    return [i for i, value in enumerate(values) if value is not None and _number(value) is None]


def _is_numeric(values, odd):
    """Whether a column is one of numbers but for the odd ones: few of them, or among too many for categories."""
    few = len(odd) <= max(1, len(values) / 20) or len(set(values)) > FEW_KINDS
    return few and len(odd) < len(values) / 2


def _told(values, lines, odd):
    """'1 of 400 values is no number, '1O' in line 9': one may also be infinite, or of a size that cannot be used."""
    first, count = odd[0], "is no number," if len(odd) == 1 else "are no numbers, the first"
    return (
        f"{len(odd)} of {len(values)} values {count} {values[first][:50]!r} in line {lines[first]}"
    )


CORRECT = "Write numbers as 1234.5, up to 1e38, and nothing where one is missing"


def _read_target(name, values, lines, kind, trained=None):
    """(kind, class names or None, targets): int64 (N,), or float64 (N, 1) for a regression.

    The class names are those of a run where it was `trained`.
    """
    if (known := trained and trained["classes"]) is not None:
        labels = {name: label for label, name in enumerate(known)}
        unlike = {value: _number(value) for value in set(values).difference(labels)}
        names = [
            value if unlike.get(value) is None else _class_name(unlike[value]) for value in values
        ]
        if other := next((name for name in names if name not in labels), None):
            raise unknown_class(other, known)
        return kind, known, torch.tensor([labels[name] for name in names])
    numbers = _numbers(values)
    distinct = sorted(set(values if numbers is None else numbers))
    if len(distinct) < 2 and trained is None:
        raise UserError(
            f"dataset.target={name}: all {len(values)} rows have the same value, {values[0]!r}. "
            "There is nothing to learn."
        )
    odd = _odd(values) if numbers is None else []
    if odd and (kind == "regression" or (kind == "auto" and _is_numeric(values, odd))):
        other = "" if trained else ", or type dataset.kind=classification"
        raise UserError(f"dataset.target={name}: {_told(values, lines, odd)}.\n{CORRECT}{other}.")
    if kind == "auto":
        few = (
            numbers is not None
            and len(distinct) <= FEW_KINDS
            and len(distinct) < len(values) / 10
            and all(value.is_integer() for value in distinct)
        )
        kind = "classification" if numbers is None or few else "regression"
    if kind == "classification" and len(distinct) > max(2, len(values) / 2):
        what = f"{len(values)} rows have {len(distinct)} different values, too many for classes"
        if not odd:
            raise UserError(
                f"dataset.target={name}: {what}.\nType dataset.kind=regression, or choose another column."
            )
        raise UserError(
            f"dataset.target={name}: {what}, and {_told(values, lines, odd)}.\n{CORRECT}, or choose another."
        )
    if kind == "regression":
        return kind, None, torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    labels = {value: label for label, value in enumerate(distinct)}
    targets = torch.tensor([labels[value] for value in (values if numbers is None else numbers)])
    return kind, list(map(_class_name, distinct)), targets


def _class_name(value):
    """The name of a class: a text as it is, a number with all its digits, 2.0 and 2 alike."""
    return (
        value if isinstance(value, str) else str(int(value)) if value.is_integer() else repr(value)
    )


def _describe(name, values, lines, train, categorical):
    """{"name", "mean", "std"} of a numeric column, {"name", "categories"} of another; by the rows `train` alone."""
    kinds = sorted({values[i] for i in train.tolist()} - {None})
    if not kinds:
        raise UserError(
            f"Column {name!r} has no value in the training part. Type dataset.ignore=[{name}]."
        )
    if categorical:
        return {"name": name, "categories": kinds}
    if (numbers := _numbers(values)) is not None:
        column = torch.tensor(numbers, dtype=torch.float64)
        mean, std = mean_and_std(column[train][~column[train].isnan()])
        return {"name": name, "mean": mean, "std": std}
    odd = _odd(values)
    numeric = _is_numeric(values, odd)
    if numeric or len(kinds) > max(FEW_KINDS, len(train) / 2):
        text = "" if numeric else "\nText wants a data set of your own, as in examples/own_data.py."
        raise UserError(
            f"Column {name!r} has {len(kinds)} different values, and {_told(values, lines, odd)}.\n"
            f"{CORRECT}, or type dataset.ignore=[{name}] or dataset.categorical=[{name}].{text}"
        )
    return {"name": name, "categories": kinds}


def mean_and_std(numbers):
    """The mean and the standard deviation of a tensor, the latter 1 where all are equal: 900 times 0.1 have 1e-17."""
    return numbers.mean().item(), numbers.std(
        correction=0
    ).item() if numbers.min() < numbers.max() else 1.0


def _features(described, values, lines, room):
    """float32 (N, 1) of a numeric column, (N, categories) of another one.

    UserError where that would be more than `room` numbers, which a small file can ask for.
    """
    name, kinds = described["name"], described.get("categories")
    if kinds is None:
        numbers = _numbers(values) if set(values) != {None} else [math.nan] * len(values)
        if numbers is None:
            told = _told(values, lines, _odd(values))
            raise UserError(
                f"Column {name!r}, in which the run was trained on numbers: {told}.\n{CORRECT}."
            )
        column = (torch.tensor(numbers, dtype=torch.float64) - described["mean"]) / described["std"]
        return column.nan_to_num(0.0).float().unsqueeze(1)
    if len(values) * len(kinds) > room:
        raise UserError(
            f"Column {name!r} has {len(kinds)} categories in {len(values)} rows, which is more than fits in memory.\n"
            f"Type dataset.ignore=[{name}]."
        )
    places = {value: place for place, value in enumerate(kinds)}
    column = torch.zeros(len(values), len(kinds))
    for row, value in enumerate(values):
        if value in places:
            column[row, places[value]] = 1
    return column
