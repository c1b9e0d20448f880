"""Tables: the columns of a csv or parquet file as standardized numbers and one-hot categories.

pyarrow reads the file; columns are converted to numbers one at a time.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.data.description import MOST_NUMBERS, Column, Description, names_of
from stoker.data.record import Data, unknown_class
from stoker.data.splits import check_fractions, divide, tensor_splits
from stoker.trainer.errors import (
    UserError,
    check_choice,
    did_you_mean,
    first_few,
    log,
    printable,
)
from stoker.trainer.files import open_plain

try:
    import pyarrow
    from pyarrow import compute, parquet
    from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, open_csv

    from stoker.data.notation import FEW, FEW_KINDS, Notation, are_numbers, dates, only
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    pyarrow = None

Texts = Any  # a pyarrow array of strings; null is a missing value
FIRST = 2  # line of the first row; the header is line 1
PIECE = 2**18  # bytes of a csv file read at once
ROWS = 2**12  # rows of a parquet file read at once
LONGEST = 2**20  # maximum size of a header in bytes
EMPTY = ("", "?")  # missing values, in any column
WORDS = ("na", "n/a", "nan", "null", "none")  # also missing values, except in a text target
MISSING = (*EMPTY, *WORDS)
CORRECT = (
    "Write numbers as 1234.5 (at most 1e38), dates as 2024-01-31 or 31.01.2024, and leave missing "
    "values empty"
)


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
    split_group: str | None = None,
    split_time: str | None = None,
    folds: int = 0,
    fold: int = 0,
    trained: Description | None = None,
) -> Data:
    """Read a csv file with a header line, or a parquet file; one column is the target.

    Numbers are standardized and categories are one-hot encoded, based on the training rows only. A
    column is numeric if every value is a number and the column is not listed in `categorical`. It
    is an error if only a few values of a column are not numbers or dates, or if nearly all values
    are in another notation. Dates are converted to days. A category that does not occur in the
    training rows is encoded as all zeros.

    `kind`: "auto" treats these targets as classes: text, and up to 20 distinct whole numbers if
    that is less than a tenth of the rows. Any other target means regression.
    Classes keep their spelling: 1, 01 and 1.0 are three classes.
    `missing`: "error", "drop" (the row), or "mean" (of the training rows; a missing category is all
    zeros).
    `decimal`, `marks`: the decimal separator, and characters to ignore in numbers.
    `split_group`, `split_time`: a column that divides the rows (see `divide`) and is not an input.
    `trained`: the description of a run's data, whose columns, classes and units replace those of
    this table.
    """
    check_choice("dataset.kind", kind, ("auto", "classification", "regression"))
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    if isinstance(target, (list, tuple, dict)):
        raise UserError(
            "dataset.target: expected the name of one column. For several targets, write a "
            "function that returns Data; 'Bring your own' in the documentation shows how."
        )
    target = str(target)  # on the command line, a bare 2024 is a number
    reading = {
        "target": target,
        "missing": missing,
        "delimiter": delimiter,
        "decimal": decimal,
        "marks": marks,
    }
    if trained is not None and trained["table"] is None:
        raise UserError("dataset: the model was not trained on a table.")
    table = Table(str(path), reading)
    table.check("dataset.target=", target)
    divided_by: list[str] = []
    for key, name in (("split_group", split_group), ("split_time", split_time)):
        if name is not None:
            divided_by += table.check(f"dataset.{key}=", str(name))
    if trained is None:
        categorical = table.check("dataset.categorical=", categorical)
        ignore = table.check("dataset.ignore=", ignore)
        left_out = {target, *ignore, *divided_by}
        names = [name for name in table.names if name not in left_out]
    else:
        kind = trained["kind"]
        columns: list[Column] = trained["table"]["columns"]
        names = table.check_trained(columns)
        categorical = [column["name"] for column in columns if "categories" in column]
    if not names:
        raise UserError(f"{table.shown} has no column besides the target {target}.")
    used = list(dict.fromkeys([target, *names, *divided_by]))
    values = table.read(used, [target, *categorical])
    kind, classes, answers = _read_target(target, values[target], table, kind, trained)
    rows = _rows_to_use(table, {**values, target: answers})
    targets = tensor_of(answers)[rows]
    groups = None
    times = None
    if split_group is not None:
        # Each distinct value is a group, and so are the missing ones.
        groups = tensor_of(values[str(split_group)].dictionary_encode().indices.fill_null(-1))[rows]
    if split_time is not None:
        times = table.times(str(split_time), values[str(split_time)])[rows]
    # For each split, sorted indices into `rows`.
    parts = divide(
        len(rows) if classes is None else targets,
        fractions,
        split_seed,
        folds=folds,
        fold=fold,
        groups=groups,
        times=times,
    )
    train_rows = rows[parts[0]]
    center = 0.0
    scale = 1.0
    if classes is None:
        if trained is None:
            center, scale = mean_and_std(targets[parts[0]])
        else:
            center = trained["target_mean"]
            scale = trained["target_scale"]
        targets = ((targets - center) / scale).float().unsqueeze(1)
    else:
        targets = targets.long()
    if trained is None:
        columns = [
            table.describe(name, values[name], train_rows, name in categorical) for name in names
        ]
        table.warned.update(names)  # in training, do not warn about unknown categories
    inputs = _encoded(table, columns, values, rows)
    train, val, test = tensor_splits(parts, inputs, targets, rows + FIRST)
    return Data(
        Path(path).stem,
        train,
        val,
        test,
        inputs.shape[1:],
        num_classes=1 if classes is None else len(classes),
        kind=kind,
        classes=classes,
        target_mean=center,
        target_scale=scale,
        table={"columns": columns, **reading},
    )


class Table:
    """A csv or parquet file, and how to read it; raise UserError if it cannot be read.

    `reading` has "target", "missing", "delimiter", "decimal" and "marks", as in the configuration.
    Lines are numbered as in a spreadsheet: the header is line 1.

    Attributes:
        names: The column names.
        notation: How numbers are written in the table.
        shown: The path, as shown in messages.
        warned: The columns for which unknown categories are no longer reported.
    """

    def __init__(self, path: str, reading: dict[str, Any], key: str = "dataset.path") -> None:
        self.path = os.path.expanduser(path)
        self.shown = printable(path)
        self.key = key
        self.warned: set[str] = set()
        if pyarrow is None:
            raise UserError(
                f"{key}={self.shown}: reading tables needs pyarrow.\nInstall it with pip install "
                "'stoker[tables]'."
            )
        self.missing = check_choice(
            "dataset.missing", reading["missing"], ("error", "mean", "drop")
        )
        self.target = reading["target"]
        self.notation = Notation(reading.get("decimal", "."), reading.get("marks", ""))
        self.delimiter = "\t" if reading["delimiter"] == "tab" else reading["delimiter"]
        if not isinstance(self.delimiter, str) or len(self.delimiter) != 1:
            raise UserError(
                f"dataset.delimiter={self.delimiter!r}: must be a single character, such as "
                "',' or ';', or the word tab."
            )
        with self._open([]) as (header, _):
            self.written = {name.strip(): name for name in header}
        self.names = list(self.written)
        if len(self.names) < len(header) or "" in self.names:
            raise UserError(
                f"{self.shown}: the header has an empty name or the same name twice. Give each "
                "column a unique name; in pandas, to_csv(index=False) omits the index."
            )

    @contextlib.contextmanager
    def _open(self, names: Sequence[str]) -> Iterator[tuple[list[str], Iterator[Any]]]:
        """Yield the column names in the header, and an iterator over batches of the columns
        `names`.
        """
        try:
            with open_plain(self.path, links=True) as plain:
                start = plain.read(LONGEST)
            with pyarrow.OSFile(self.path) as file:
                if start.startswith(b"PAR1"):
                    stored = parquet.ParquetFile(file)
                    yield stored.schema_arrow.names, stored.iter_batches(ROWS, columns=names)
                    return
                # A row must fit into a block. Blocks are small because pyarrow reads several of
                # them ahead.
                piece = max(PIECE, 8 * len(start.partition(b"\n")[0]))
                types = dict.fromkeys(names, pyarrow.string())
                rows = open_csv(
                    file,
                    ReadOptions(use_threads=False, block_size=piece),
                    ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                    ConvertOptions(column_types=types, include_columns=names),
                )
                yield rows.schema.names, rows
        except FileNotFoundError:
            raise UserError(f"{self.key}={self.shown}: no such file.") from None
        except UserError:
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{self.key}={self.shown}: cannot be read as a table "
                f"({printable(error)[:300]}).\n"
                "Expected a csv file in UTF-8 with a header line, or a parquet file. If the "
                "separator is not a comma, type 'dataset.delimiter=;' or dataset.delimiter=tab.\n"
                "To convert another encoding, type iconv -f latin1 -t utf-8 OLD.csv > NEW.csv."
            ) from None

    def pieces(self, names: Sequence[str]) -> Iterator[dict[str, Texts]]:
        """Yield the columns as text, a few thousand rows at a time. Surrounding blanks are removed,
        and missing values are null.
        """
        with self._open([self.written[name] for name in names]) as (_, batches):
            for batch in batches:
                piece = {}
                for name, column in zip(names, batch.columns, strict=True):
                    texts = compute.utf8_trim_whitespace(self._texts(column))
                    piece[name] = without(texts, EMPTY if name == self.target else MISSING)
                yield piece

    def _texts(self, column: Any) -> Texts:
        """Return a column as text, as it would be written in a csv file with this notation."""
        if pyarrow.types.is_timestamp(column.type) and column.type.tz:
            column = column.cast(pyarrow.timestamp(column.type.unit, "UTC"))
        texts = column.cast(pyarrow.string())
        if pyarrow.types.is_floating(column.type) or pyarrow.types.is_decimal(column.type):
            texts = compute.replace_substring(texts, ".", self.notation.decimal)
        return texts

    def read(self, names: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
        """Return the columns as float64 if all values are numbers and the column is not in `texts`,
        otherwise as text.
        """
        pieces = [{name: pyarrow.array([], pyarrow.string()) for name in names}]
        rows = 0
        for piece in self.pieces(names):
            pieces.append(piece)
            rows += len(piece[names[0]])
            if rows * len(names) > MOST_NUMBERS:
                raise UserError(
                    f"{self.shown} has more than {MOST_NUMBERS:,} values, too many to fit in "
                    "memory.\nType dataset.ignore=[COLUMN], or write your own data set."
                )
        columns = {}
        for name in names:
            values = pyarrow.concat_arrays([piece.pop(name) for piece in pieces])
            if name not in texts:
                numbers = self.notation.numbers(values)
                if numbers.null_count == values.null_count:
                    values = numbers
            columns[name] = values
        return columns

    def check(self, where: str, names: str | Sequence[str]) -> list[str]:
        """Return column names as a list; raise UserError if the table lacks one of them."""
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self.written:
                raise UserError(
                    f"{where}{name}: {self.shown} has no such column."
                    f"{did_you_mean(name, self.names)}\n"
                    f"Its columns are {first_few(self.names, 20)}.\n"
                    "If several columns were read as one, type 'dataset.delimiter=;' or "
                    "dataset.delimiter=tab."
                )
        return names

    def check_trained(self, columns: list[Column]) -> list[str]:
        """Return the columns that a model was trained on; raise UserError if one is missing."""
        names = [column["name"] for column in columns]
        return self.check("The model was trained on the column ", names)

    def complete(self, columns: dict[str, Any], line: int = FIRST) -> Tensor:
        """Return the indices of the rows to use: all, or those without missing values."""
        is_used = torch.ones(len(next(iter(columns.values()))), dtype=torch.bool)
        for name, values in columns.items():
            gaps = tensor_of(values.is_null())
            if self.missing == "drop":
                is_used &= ~gaps
            elif gaps.any() and (self.missing == "error" or name == self.target):
                raise UserError(
                    f"{self.shown}, line {line + int(gaps.int().argmax())}: the column {name!r} "
                    "has no value.\nType dataset.missing=drop to drop such rows, or "
                    "dataset.missing=mean to fill in the inputs."
                )
        return is_used.nonzero().view(-1)

    def amounts(self, values: Any, is_date: bool = False) -> Tensor:
        """Return values as numbers or days, in float64, with NaN for missing values."""
        if values.type == pyarrow.float64():
            return tensor_of(values)
        return tensor_of(dates(values) if is_date else self.notation.numbers(values))

    def times(self, name: str, values: Any) -> Tensor:
        """Return a column as numbers or days; raise UserError if a value is missing."""
        for is_date in (False, True):
            times = self.amounts(values, is_date)
            if not times.isnan().any():
                return times
        raise UserError(
            f"dataset.split_time={name}: expected a column of numbers or of dates such as "
            "2024-01-31, without missing values."
        )

    def describe(self, name: str, values: Any, train: Tensor, categorical: bool) -> Column:
        """Return {"name", "mean", "std", "date"} for a column of numbers or dates, and {"name",
        "categories"} for any other column, based only on the rows `train`.
        """
        learned = values.take(pyarrow.array(train.numpy()))
        if learned.null_count == len(learned):
            raise UserError(
                f"Column {name!r} has no values in the training split. Add it to dataset.ignore."
            )
        for is_date in () if categorical else (False, True):
            amounts = self.amounts(values, is_date)
            if amounts.isnan().sum() == values.null_count:
                if not is_date and is_count(amounts):
                    log.warning(
                        "%s: the column %r looks like a row number. If it is only an id, add it to "
                        "dataset.ignore.",
                        self.shown,
                        name,
                    )
                mean, std = mean_and_std(amounts[train])
                return {"name": name, "mean": mean, "std": std, "date": is_date}
        categories = sorted(learned.unique().drop_null().to_pylist())
        if not categorical:
            is_text = len(categories) <= max(FEW_KINDS, len(train) / 2)
            instead = "add the column to dataset.ignore or dataset.categorical"
            self.check_text(f"Column {name!r}", values, is_text, instead)
        return {"name": name, "categories": categories}

    def check_text(self, where: str, texts: Texts, is_text: bool, instead: str) -> None:
        """Raise UserError if the values look like numbers or dates with typos or in another
        notation, or if `is_text` is False. `instead` says how to accept the values.
        """
        is_odd = self.amounts(texts).isnan() & tensor_of(texts.is_valid())
        is_wrong = is_odd & self.amounts(texts, is_date=True).isnan()
        if is_wrong.any():
            is_odd = is_wrong
        odd = texts.filter(pyarrow.array(is_odd.numpy()))
        present = len(texts) - texts.null_count
        is_few = len(odd) <= max(1, FEW * present) or len(texts.unique()) > FEW_KINDS
        has_typos = is_few and len(odd) < present / 2
        if is_text and not has_typos and not are_numbers(odd.unique()):
            return
        first = f"{str(odd[0])[:50]!r} on line {FIRST + int(is_odd.int().argmax())}"
        raise UserError(
            f"{where}: {len(odd)} of {present} values cannot be read as numbers; the first is "
            f"{first}.\nFor another notation, type dataset.decimal=',' or \"dataset.marks='%$'\" "
            f"(characters to ignore).\n{CORRECT}. Otherwise, {instead}."
        )

    def encode(self, column: Column, values: Any, line: int = FIRST) -> Tensor:
        """Return a column as float64: numbers (N, 1), with NaN for missing values, or one-hot (N,
        categories), all zeros for missing or unknown values.
        """
        name = column["name"]
        categories = column.get("categories")
        if categories is None:
            numbers = self.amounts(values, column.get("date", False))
        else:
            numbers = tensor_of(labels_of(values, categories))
        is_odd = numbers.isnan() & tensor_of(values.is_valid())
        if is_odd.any() and name not in self.warned:
            place = int(is_odd.int().argmax())
            where = (
                f"{self.shown}, line {line + place}: {str(values[place])[:50]!r} in the column "
                f"{name!r}"
            )
            if categories is None:
                raise UserError(
                    f"{where} is not a number or date, but this model needs one.\n{CORRECT}."
                )
            log.warning(
                "%s did not occur in the training data; such values are treated as unknown.", where
            )
            self.warned.add(name)
        if categories is None:
            return numbers.unsqueeze(1)
        return (numbers.unsqueeze(1) == torch.arange(len(categories))).double()


def tensor_of(array: Any) -> Tensor:
    """Return a pyarrow array as a tensor; null becomes NaN."""
    return torch.tensor(array.to_numpy(zero_copy_only=False))


def without(texts: Texts, words: Sequence[str]) -> Texts:
    """Return the texts with these words replaced by null, ignoring case."""
    is_word = compute.is_in(compute.utf8_lower(texts), pyarrow.array(words))
    return only(compute.invert(is_word), texts)


def is_count(numbers: Tensor) -> bool:
    """Return whether the numbers are consecutive, in any order, and too many for a coincidence."""
    places = (numbers - numbers.min()).sort().values
    return len(places) > FEW_KINDS and torch.equal(places, torch.arange(len(places)).double())


def mean_and_std(numbers: Tensor) -> tuple[float, float]:
    """Return the mean and standard deviation of the numbers, ignoring NaN.

    If all numbers are equal, return 1 as the deviation. Because of rounding, the computed deviation
    is not always 0: for 900 values of 0.1, it is 1e-17.
    """
    numbers = numbers[~numbers.isnan()]
    std = 1.0
    if numbers.min() < numbers.max():
        std = numbers.std(correction=0).item()
    return numbers.mean().item(), std


def _rows_to_use(table: Table, columns: dict[str, Any]) -> Tensor:
    """Return the indices of the rows to use, and log how many are skipped."""
    rows = table.complete(columns)
    if len(rows) == 0:
        raise UserError(f"{table.shown}: there are no rows, or every row has a missing value.")
    count = len(columns[table.target])
    skipped = count - len(rows)
    if skipped:
        log.warning(
            "%s: skipped %d of %d rows because they have missing values.",
            table.shown,
            skipped,
            count,
        )
    return rows


def _encoded(
    table: Table,
    columns: list[Column],
    values: dict[str, Any],
    rows: Tensor,
) -> Tensor:
    """Encode these rows as numbers, (N, width); raise UserError if they do not fit in memory.

    Removes the columns from `values`, so that a large table is not held in memory twice.
    """
    width = sum(len(names_of(column)) for column in columns)
    if width * len(rows) > MOST_NUMBERS:  # even a small file could need a huge amount of memory
        raise UserError(
            f"{table.shown}: {len(rows):,} rows x {width:,} numbers (one per category) do not fit "
            "in memory.\nType dataset.ignore=[COLUMN] to ignore a column with many categories."
        )
    blocks = []
    for column in columns:
        block = table.encode(column, values.pop(column["name"]))[rows]
        if "mean" in column:
            block = ((block - column["mean"]) / column["std"]).nan_to_num(0.0)
        blocks.append(block.float())
    return torch.cat(blocks, 1)


def _read_target(
    name: str, texts: Texts, table: Table, kind: str, trained: Description | None
) -> tuple[str, list[str] | None, Any]:
    """Return (kind, class names or None, targets). Targets are numbers or labels, in a pyarrow
    array of float64.

    Words such as "none" are missing values in a numeric target, but classes in a text target.
    """
    present = without(texts, WORDS)
    if trained is not None and trained["classes"] is not None:
        classes = trained["classes"]
        is_class = compute.is_in(texts, pyarrow.array(classes))
        texts = only(compute.or_(is_class, present.is_valid()), texts)
        for name in texts.unique().drop_null().to_pylist():
            if name not in classes:
                raise unknown_class(name, classes)
        return kind, classes, labels_of(texts, classes)
    where = f"dataset.target={name}"
    numbers = table.notation.numbers(present)
    is_text = numbers.null_count > present.null_count
    if not is_text:
        texts = present
    elif kind != "classification":
        table.check_text(where, present, kind == "auto", "type dataset.kind=classification")
    names = sorted(texts.unique().drop_null().to_pylist())
    rows = len(texts) - texts.null_count
    if kind == "auto":
        few = len(names) <= FEW_KINDS and len(names) < rows / 10
        are_whole = compute.all(compute.equal(numbers, compute.floor(numbers))).as_py()
        is_class = is_text or (few and are_whole)
        kind = "classification" if is_class else "regression"
    if kind == "regression":
        return kind, None, numbers
    if len(names) > max(2, rows / 2):
        raise UserError(
            f"{where}: {rows} rows have {len(names)} different values, too many for classes.\n"
            "Choose another column, or type dataset.kind=regression to predict a number."
        )
    if not is_text:
        names.sort(key=lambda name: table.notation.numbers(pyarrow.array([name]))[0].as_py())
    return kind, names, labels_of(texts, names)


def labels_of(texts: Texts, classes: list[str]) -> Any:
    """Return the label of each text, in a pyarrow array of float64."""
    return compute.index_in(texts, pyarrow.array(classes)).cast(pyarrow.float64())


def read_batches(
    path: str,
    about: dict[str, Any],
    size: int,
    key: str = "input",
    **typed: Any,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield batches (lines, inputs) of a table, with float64 inputs as a trained model expects
    them.

    Numbers are not standardized. Categories are one-hot encoded. An unknown category becomes all
    zeros, and the first one in each column causes a warning. A missing number is NaN if the model
    fills in missing values itself, otherwise the mean. `about`: the table in the run's description.
    `typed`: values of `missing`, `delimiter`, `decimal` or `marks` to use instead of those in
    `about`, unless they are None. Raises UserError for a table that cannot be read.
    """
    given = {name: value for name, value in typed.items() if value is not None}
    columns: list[Column] = about["columns"]
    table = Table(path, {**about, **given}, key)
    names = table.check_trained(columns)
    line = FIRST
    for texts in table.pieces(names):
        rows = table.complete(texts, line)
        blocks = []
        for column in columns:
            block = table.encode(column, texts[column["name"]], line)
            if "mean" in column and about["missing"] != "mean":
                block = block.nan_to_num(column["mean"])
            blocks.append(block)
        inputs = torch.cat(blocks, 1)
        for some in rows.split(size):
            if len(some):
                yield (some + line).tolist(), inputs[some]
        line += len(inputs)
    if line == FIRST:
        raise UserError(f"{key}={printable(path)}: the file has no rows.")
