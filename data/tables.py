"""Tables: a csv file becomes standardised numbers and one-hot categories."""

import io
import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from csv import Error as CSVError
from csv import reader as read_csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.data.description import Column, Description, is_description, names_of
from stoker.data.notation import FEW, Notation, is_code
from stoker.data.record import Data, unknown_class
from stoker.data.splits import check_fractions, cut, split_indices
from stoker.trainer.errors import UserError, check_choice, did_you_mean, first_few, log, printable
from stoker.trainer.files import open_plain

MOST_NUMBERS = 2**28  # that a table may become
FEWEST_ROWS = 20  # in which a column that counts them is no accident
FEW_KINDS = 20  # distinct values, which may be categories or classes however few rows there are
EMPTY = {"", "?"}  # a missing value, in any column
MISSING = {*EMPTY, "na", "n/a", "nan", "null", "none"}  # but in a target of text these are classes
CORRECT = "Write numbers as 1234.5, up to 1e38, and nothing where one is missing"

# The values of a column, stripped; None where one is missing.
Values = Sequence[str | None]


def csv(
    path: str,
    target: str,
    kind: str = "auto",
    categorical: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    missing: str = "error",
    delimiter: str = ",",
    decimal: str = ".",
    marks: str = "",
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    trained: Description | None = None,
) -> Data:
    """A table with a header line; one column is the target.

    Numbers are standardised and categories one-hot, by the training rows alone. A column is numeric
    if every value is a number and it is not named in `categorical`; if all but a few are, or nearly
    all are numbers in another notation, it is an error. A category that the training rows lack is
    all zeros. `missing`: "error", "drop" (the row), or "mean" (of the training rows; a missing
    category is all zeros). `decimal` and `marks`: the decimal sign, and characters to leave out of
    numbers. `kind` "auto": text is classes, and so are at most 20 different whole numbers that are
    fewer than a tenth of the rows, and codes, such as 007; other targets are a regression. Classes
    keep their spelling: 1, 01 and 1.0 are three. `trained`: the description of a run's data, whose
    columns, classes and units are used instead of this table's.
    """
    check_choice("dataset.kind", kind, ("auto", "classification", "regression"))
    check_choice("dataset.missing", missing, ("error", "mean", "drop"))
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    notation = Notation(decimal, marks)
    path = str(path)
    target = str(target)  # a bare 2024 on the command line is a number
    cells, lines = _read_table(os.path.expanduser(path), delimiter)
    texts = {name: [cell.strip() for cell in column] for name, column in cells.items()}
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
    columns = {name: _gaps(texts[name]) for name in texts if name in {*names, target}}
    columns[target] = _gaps_of_target(target, texts[target], kind, notation, trained)
    rows = len(lines)
    columns, lines = _without_missing(path, columns, lines, target, missing)
    if len(lines) < rows:
        left_out = rows - len(lines)
        shown = printable(path)
        log.warning("%s: %d of %d rows lack a value and are left out.", shown, left_out, rows)
    answers = [value for value in columns.pop(target) if value is not None]
    if not columns:
        raise UserError(f"{printable(path)} has no column besides the target {target}.")
    kind, classes, targets = _read_target(target, answers, lines, kind, notation, trained)
    stratified = classes is not None
    if classes is not None:
        _warn_of_blanks(target, cells[target])
    # The same rows that `cut` gives to the training part.
    train, *_ = split_indices(
        targets if stratified else len(lines), fractions, split_seed, stratified
    )
    if trained is None:
        described = []
        for name, values in columns.items():
            is_category = name in categorical
            described.append(_describe(name, values, lines, train, is_category, notation))
        _warn_of_useless(path, columns, described, answers)
    else:
        described = trained["table"]["columns"]
        for column in described:
            _warn_of_unknown(path, column, columns[column["name"]], lines)
    _check_size(described, len(lines))
    blocks = []
    for column in described:
        block = _encode(path, column, columns[column["name"]], lines, notation)
        if "categories" not in column:
            block = ((block - column["mean"]) / column["std"]).nan_to_num(0.0).float()
        blocks.append(block)
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
    train_split, val, test = cut(inputs, targets, fractions, split_seed, stratified, numbered)
    return Data(
        Path(path).stem,
        train_split,
        val,
        test,
        inputs.shape[1:],
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
            "decimal": decimal,
            "marks": marks,
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
    """Read {column: cells}, and the line number of each row; UserError for what is not a table."""
    numbered = read_rows(path, delimiter)
    _, header = next(numbered)
    lines = []
    rows = []
    for line, row in numbered:
        lines.append(line)
        rows.append(row)
    if not rows:
        raise _empty(path)
    columns = zip(*rows, strict=True)
    return {name: list(values) for name, values in zip(header, columns, strict=True)}, lines


def read_rows(
    path: str, delimiter: str, key: str = "dataset.path", alone: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, values) of the header and then of each row, one at a time; UserError for
    no table.

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
    """Check that the header has at least two columns, or the one named `alone`, each with its own
    name.
    """
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


def read_batches(
    path: str,
    table: dict[str, Any],
    size: int,
    key: str = "input",
    **typed: Any,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (line numbers, float64 (N, numbers)) of the rows of a table, as a trained model takes
    them.

    A number stays as it is; a category becomes 0 and 1, all zeros if it is unknown, with a warning
    for the first of a column. A missing number is NaN if the model fills it in itself, else the
    mean. `typed`: another `missing`, `delimiter`, `decimal` or `marks` than the table of the run
    has; None is none. UserError for what cannot be read.
    """
    if os.path.isdir(path):
        raise UserError(
            f"{key}={printable(path)}: this is a folder, but the run takes a table. "
            f"Type {key}=FILE.csv."
        )
    reading = {"decimal": ".", "marks": "", **table}
    for name, value in typed.items():
        if value is not None:
            reading[name] = value
    missing = check_choice("dataset.missing", reading["missing"], ("error", "mean", "drop"))
    notation = Notation(reading["decimal"], reading["marks"])
    columns: list[Column] = table["columns"]
    names = [column["name"] for column in columns]
    alone = names[0] if len(names) == 1 else None
    rows = read_rows(path, reading["delimiter"], key, alone)
    _, header = next(rows)
    for name in names:
        check_column(path, name, header)
    unwarned = columns
    is_empty = True
    while batch := list(itertools.islice(rows, size)):
        is_empty = False
        texts = {}
        for name in names:
            place = header.index(name)
            texts[name] = _gaps([values[place].strip() for _, values in batch])
        texts, lines = _without_missing(path, texts, [line for line, _ in batch], None, missing)
        unwarned = [
            column
            for column in unwarned
            if not _warn_of_unknown(path, column, texts[column["name"]], lines)
        ]
        blocks = []
        for column in columns:
            block = _encode(path, column, texts[column["name"]], lines, notation)
            if "mean" in column and table["missing"] != "mean":
                block = block.nan_to_num(column["mean"])
            blocks.append(block.double())
        if lines:
            yield lines, torch.cat(blocks, 1)
    if is_empty:
        raise UserError(f"{key}={printable(path)}: it has no rows.")


def _warn_of_unknown(path: str, column: Column, values: Values, lines: list[int]) -> bool:
    """Warn of the first value of a column that is none of the categories that a run was trained on,
    if there is one.
    """
    if "categories" not in column:
        return False
    known = {None, *column["categories"]}
    for line, value in zip(lines, values, strict=True):
        if value not in known:
            log.warning(
                "%s, line %d: %r in the column %r is none of those trained on; such values count "
                "as none of them.",
                printable(path),
                line,
                str(value)[:50],
                column["name"],
            )
            return True
    return False


def _warn_of_useless(
    path: str, columns: dict[str, Values], described: list[Column], answers: Values
) -> None:
    """Warn of columns that say nothing about the target, or all, and of codes that are read as
    numbers.
    """
    for column in described:
        name = column["name"]
        values = columns[name]
        code = next(filter(is_code, values), None)
        advice = f"Leave it out: dataset.ignore=[{name}]."
        if values == answers:
            reason = "is the target once more, which a new row has not"
        elif len(set(values)) == 1:
            reason = "has one value only, and says nothing"
        elif counts_rows(values):
            reason = "counts the rows, and a number of that kind says nothing of a new row"
        elif code and "categories" not in column:
            reason = f"is read as numbers, and {code!r} looks like a code"
            advice = f"Type dataset.categorical=[{name}] if it is one, or dataset.ignore=[{name}]."
        else:
            continue
        log.warning("%s: the column %r %s. %s", printable(path), name, reason, advice)


def counts_rows(values: Values) -> bool:
    """Tell whether a column has whole numbers without repetition: in the order of the rows, or
    without a gap.
    """
    numbers, _ = Notation().parse(values)
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
    """Return the table of a run's description; UserError if it was trained on something else."""
    if not is_description(trained):
        raise UserError("dataset.trained: this is what a run hands over. Leave it out.")
    if trained["table"] is None:
        raise UserError(f"dataset: the run was trained on {trained['dataset']}, which is no table.")
    table: dict[str, Any] = trained["table"]
    return table


def _gaps(texts: list[str], blanks: Collection[str] = MISSING) -> Values:
    """Return the values of a column, None for each that is one of the `blanks`."""
    return [None if text.lower() in blanks else text for text in texts]


def _gaps_of_target(
    name: str, texts: list[str], kind: str, notation: Notation, trained: Description | None
) -> Values:
    """Return the values of the target; in one of text "none" is a class, with a warning."""
    values = _gaps(texts)
    if kind == "regression":
        return values
    if trained is not None:
        known = trained["classes"] or ()
        pairs = zip(texts, values, strict=True)
        return [text if value is None and text in known else value for text, value in pairs]
    _, odd = notation.parse(values)
    is_text = len(odd) > 0 and (kind == "classification" or not _is_numeric(values, odd))
    with_classes = _gaps(texts, EMPTY)
    if not is_text or with_classes == values:
        return values
    words = Counter(text for text in texts if text.lower() in MISSING - EMPTY)
    word, count = words.most_common(1)[0]
    log.warning(
        "dataset.target=%s: %r in %d rows is a class like the others. "
        "If it stands for a missing value, leave those values empty in the file.",
        name,
        word,
        count,
    )
    return with_classes


def _without_missing(
    path: str, columns: dict[str, Values], lines: list[int], target: str | None, missing: str
) -> tuple[dict[str, Values], list[int]]:
    """Return the columns and the rows' lines, with "drop" without the rows that lack a value."""
    counts = {}
    for name, values in columns.items():
        if None in values:
            counts[name] = values.count(None)
    if not counts:
        return columns, lines
    if missing == "error" or (missing == "mean" and target in counts):
        name = target if target in counts else next(iter(counts))
        line = lines[columns[name].index(None)]
        shown = [f"{gappy!r} in {count}" for gappy, count in counts.items()]
        fill = "" if target in counts else "dataset.missing=mean to fill them in, or "
        advice = f"Type {fill}dataset.missing=drop to leave those rows out."
        if counts[name] == len(lines) and target is not None:  # and no setting could fill it
            advice = f"Type dataset.ignore=[{name}]."
            if name == target:
                advice = "Choose another target."
        raise UserError(
            f"{printable(path)}, line {line}: the column {name!r} has no value.\n"
            f"Values are missing: {first_few(shown, 3)} of {len(lines)} rows.\n{advice}"
        )
    if missing == "mean":
        return columns, lines
    rows = zip(*columns.values(), strict=True)
    kept = [i for i, row in enumerate(rows) if None not in row]
    if not kept and target is not None:
        raise UserError(
            "dataset.missing=drop leaves no row: each has a missing value. "
            "Type dataset.missing=mean, or dataset.ignore=[COLUMN]."
        )
    columns = {name: [values[i] for i in kept] for name, values in columns.items()}
    return columns, [lines[i] for i in kept]


def _is_numeric(values: Values, odd: list[int]) -> bool:
    """Tell whether a column is one of numbers but for the odd values: few, or among too many for
    categories.
    """
    present = len(values) - values.count(None)
    if len(odd) >= present / 2:
        return False
    return _are_few(odd, values) or len(set(values)) > FEW_KINDS


def _are_few(odd: list[int], values: Values) -> bool:
    """Tell whether so few values are not numbers that they are mistakes."""
    return len(odd) <= max(1, FEW * len(values))


def _describe_odd(values: Values, lines: list[int], odd: list[int]) -> str:
    """Say which values are not numbers, as in "1 of 400 values is not a number, '1O' in line 9".

    One may also be infinite, or too large to be used.
    """
    place = odd[0]
    first = str(values[place])[:50]
    count = "is not a number," if len(odd) == 1 else "are not numbers, the first"
    return f"{len(odd)} of {len(values)} values {count} {first!r} in line {lines[place]}"


def _check_notation(
    where: str,
    values: Values,
    lines: list[int],
    odd: list[int],
    notation: Notation,
    instead: str = "",
) -> None:
    """Raise a UserError with the settings to type if nearly all values are numbers in another
    notation.
    """
    fitting = notation.that_reads(values, few=FEW_KINDS)
    if fitting is None or _are_few(odd, values):
        return
    readable = [i for i in odd if fitting.number(str(values[i])) is not None]
    place = readable[0]
    number = fitting.number(str(values[place]))
    raise UserError(
        f"{where} has numbers in another notation, such as {values[place]!r} in line "
        f"{lines[place]}.\n"
        f"Type {fitting.settings()} to read this one as {number:.15g}{instead}."
    )


def _read_target(
    name: str,
    values: list[str],
    lines: list[int],
    kind: str,
    notation: Notation,
    trained: Description | None,
) -> tuple[str, list[str] | None, Tensor]:
    """Return (kind, class names or None, targets): int64 (N,), or float64 (N, 1) of a number."""
    if trained is not None and trained["classes"] is not None:
        classes = trained["classes"]
        return kind, classes, _known_labels(name, values, classes, notation)
    numbers, odd = notation.parse(values)
    distinct = set(values)
    if len(distinct) < 2 and trained is None:
        raise UserError(
            f"dataset.target={name}: all {len(values)} rows have the same value, {values[0]!r}. "
            "There is nothing to learn."
        )
    advice = "" if trained else ", or type dataset.kind=classification"
    if odd and kind != "classification":
        where = f"dataset.target={name}: the column"
        _check_notation(where, values, lines, odd, notation, advice)
    if odd and (kind == "regression" or (kind == "auto" and _is_numeric(values, odd))):
        reason = _describe_odd(values, lines, odd)
        raise UserError(f"dataset.target={name}: {reason}.\n{CORRECT}{advice}.")
    if kind == "auto":
        few = len(distinct) <= FEW_KINDS and len(distinct) < len(values) / 10
        classes = odd or any(map(is_code, values)) or (few and all(map(float.is_integer, numbers)))
        kind = "classification" if classes else "regression"
    if kind == "regression":
        return kind, None, torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    if len(distinct) > max(2, len(values) / 2):
        reason = f"{len(values)} rows have {len(distinct)} different values, too many for classes"
        advice = "Type dataset.kind=regression, or choose another column."
        if odd:
            reason += f", and {_describe_odd(values, lines, odd)}"
            advice = f"{CORRECT}, or choose another."
        raise UserError(f"dataset.target={name}: {reason}.\n{advice}")
    names = sorted(distinct)
    if not odd:
        order = dict(zip(values, numbers, strict=True))
        names.sort(key=order.__getitem__)
    labels = {value: label for label, value in enumerate(names)}
    _warn_of_alike(name, names, notation)
    return kind, names, torch.tensor([labels[value] for value in values])


def _warn_of_blanks(target: str, cells: list[str]) -> None:
    """Warn of classes that are written both with and without blanks around them."""
    if len(set(cells)) == len({cell.strip() for cell in cells}):
        return
    padded = [cell for cell in cells if cell != cell.strip()]
    log.warning(
        "dataset.target=%s: blanks around a class do not count, and %d of %d rows have some: "
        "%r is %r.",
        target,
        len(padded),
        len(cells),
        padded[0],
        padded[0].strip(),
    )


def _warn_of_alike(target: str, classes: list[str], notation: Notation) -> None:
    """Warn of two classes that differ only in how they are written."""
    first: dict[str | float, str] = {}
    for name in classes:
        alike = first.setdefault(notation.amount(name), name)
        if alike != name:
            log.warning(
                "dataset.target=%s: %r and %r are two classes. Spell them alike if they are one.",
                target,
                alike,
                name,
            )
            return


def _known_labels(target: str, values: list[str], classes: list[str], notation: Notation) -> Tensor:
    """Return the labels of a target by the classes of a run; UserError for a value that is none of
    them.

    A number that is written differently, as 1.0 for 1, is taken for the only class of that amount,
    with a warning.
    """
    labels = {name: label for label, name in enumerate(classes)}
    amounts = [notation.amount(name) for name in classes]
    for value in sorted(set(values).difference(classes)):
        amount = notation.amount(value)
        if amounts.count(amount) != 1:
            raise unknown_class(value, classes)
        labels[value] = amounts.index(amount)
        name = classes[labels[value]]
        log.warning("dataset.target=%s: %r is taken for the class %r.", target, value, name)
    return torch.tensor([labels[value] for value in values])


def _describe(
    name: str,
    values: Values,
    lines: list[int],
    train: Tensor,
    categorical: bool,
    notation: Notation,
) -> Column:
    """Return {"name", "mean", "std"} of a numeric column, {"name", "categories"} of another, by the
    rows `train`.
    """
    kinds = {values[i] for i in train.tolist()}
    categories = sorted(value for value in kinds if value is not None)
    if not categories:
        raise UserError(
            f"Column {name!r} has no value in the training part. Type dataset.ignore=[{name}]."
        )
    if categorical:
        return {"name": name, "categories": categories}
    numbers, odd = notation.parse(values)
    if not odd:
        column = torch.tensor(numbers, dtype=torch.float64)[train]
        mean, std = mean_and_std(column[~column.isnan()])
        return {"name": name, "mean": mean, "std": std}
    instead = f", or type dataset.ignore=[{name}] or dataset.categorical=[{name}]"
    _check_notation(f"Column {name!r}", values, lines, odd, notation, instead)
    numeric = _is_numeric(values, odd)
    if numeric or len(categories) > max(FEW_KINDS, len(train) / 2):
        text = "" if numeric else "\nFor text, write your own data set, as in examples/own_data.py."
        reason = _describe_odd(values, lines, odd)
        raise UserError(
            f"Column {name!r} has {len(categories)} different values, and {reason}.\n"
            f"{CORRECT}{instead}.{text}"
        )
    return {"name": name, "categories": categories}


def mean_and_std(numbers: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 1 if all numbers are equal (900 times
    0.1: 1e-17).
    """
    std = 1.0
    if numbers.min() < numbers.max():
        std = numbers.std(correction=0).item()
    return numbers.mean().item(), std


def _check_size(columns: list[Column], rows: int) -> None:
    """Check that the numbers that a table becomes fit in memory: a small file can ask for any
    amount.
    """
    widths = [len(names_of(column)) for column in columns]
    if sum(widths) * rows > MOST_NUMBERS:
        name = columns[widths.index(max(widths))]["name"]
        raise UserError(
            f"Column {name!r} has {max(widths)} categories in {rows} rows, "
            f"which is more than fits in memory.\nType dataset.ignore=[{name}]."
        )


def _encode(
    path: str, column: Column, values: Values, lines: list[int], notation: Notation
) -> Tensor:
    """Return the numbers of a column: float64 (N, 1), NaN where one is missing, or one-hot (N,
    categories).
    """
    if "categories" not in column:
        numbers, odd = notation.parse(values)
        if odd:
            where = f"{printable(path)}: the column {column['name']!r}"
            _check_notation(where, values, lines, odd, notation)
            place = odd[0]
            first = str(values[place])[:50]
            raise UserError(
                f"{printable(path)}, line {lines[place]}: {first!r} in the column "
                f"{column['name']!r} is not a number, and the run was trained on numbers.\n"
                f"{CORRECT}."
            )
        return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    places = {category: place for place, category in enumerate(column["categories"])}
    block = torch.zeros(len(values), len(places))
    for row, value in enumerate(values):
        if value in places:
            block[row, places[value]] = 1
    return block
