"""Tables: the columns of a csv or parquet file become standardized numbers and one-hot categories.

pyarrow reads the file, and its columns become numbers one at a time.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.data.description import Column, Description, is_description, names_of
from stoker.data.record import Data, unknown_class
from stoker.data.splits import TensorSplit, check_fractions, divide
from stoker.trainer.errors import UserError, check_choice, did_you_mean, first_few, log, printable
from stoker.trainer.files import open_plain

try:
    import pyarrow
    from pyarrow import compute, parquet
    from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, open_csv

    from stoker.data.notation import CODE, FEW, Notation, dates, fitting, only
except ModuleNotFoundError as error:
    if error.name != "pyarrow":
        raise
    pyarrow = None

Texts = Any  # a pyarrow array, with null for a missing value
FIRST = 2  # line of the first row; the header is line 1
PIECE = 2**18  # bytes of a csv file read at once
ROWS = 2**12  # rows of a parquet file read at once
LONGEST = 2**20  # bytes in a header
MOST_NUMBERS = 2**28  # values in a table
FEW_KINDS = 20  # distinct values that may be categories or classes, however few rows there are
EMPTY = ("", "?")  # a missing value, in any column
WORDS = ("na", "n/a", "nan", "null", "none")  # also these, except in a text target
MISSING = (*EMPTY, *WORDS)
CORRECT = (
    "Write numbers as 1234.5 (at most 1e38) and dates as 2024-01-31, and leave missing values empty"
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
    """A csv file with a header line, or a parquet file; one column is the target.

    Numbers are standardized and categories one-hot, by the training rows alone. A column is numeric
    if every value is a number and it is not named in `categorical`; if all but a few are, or nearly
    all are numbers in another notation, it is an error. Dates count in days. A category that the
    training rows lack is all zeros. `missing`: "error", "drop" (the row), or "mean" (of the
    training rows; a missing category is all zeros). `decimal` and `marks`: the decimal sign, and
    characters to leave out of numbers. `kind` "auto": text is classes, and so are at most 20
    different whole numbers that are fewer than a tenth of the rows, and codes, such as 007; other
    targets are a regression. Classes keep their spelling: 1, 01 and 1.0 are three. `split_group`,
    `split_time`: a column by which the rows are divided, see `divide`, and which is no input.
    `trained`: the description of a run's data, whose columns, classes and units are used instead of
    this table's.
    """
    check_choice("dataset.kind", kind, ("auto", "classification", "regression"))
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    target = str(target)  # a bare 2024 on the command line is a number
    reading = {
        "target": target,
        "missing": missing,
        "delimiter": delimiter,
        "decimal": decimal,
        "marks": marks,
    }
    table = Table(str(path), reading)
    table.check("dataset.target=", target)
    divided_by: list[str] = []
    for key, name in (("split_group", split_group), ("split_time", split_time)):
        if name is not None:
            divided_by += table.check(f"dataset.{key}=", str(name))
            if target in divided_by:
                raise UserError(
                    f"dataset.{key}={target}: this is the target. Choose a different column."
                )
    columns: list[Column] = []
    if trained is None:
        categorical = table.check("dataset.categorical=", categorical)
        ignore = table.check("dataset.ignore=", ignore)
        names = [name for name in table.names if name not in (target, *ignore, *divided_by)]
    else:
        columns = check_table(trained)["columns"]
        kind = trained["kind"]
        names = table.check_trained(columns)
        categorical = [column["name"] for column in columns if "categories" in column]
    if not names:
        raise UserError(f"{table.shown} has no column besides the target {target}.")
    values = table.read([target, *names, *divided_by], [target, *categorical])
    if missing == "error" and trained is None:
        for name in names:
            check_values(name, values[name])  # which neither a mean nor other rows can replace
    answers = values.pop(target)
    kind, classes, targets = _read_target(target, answers, table, kind, trained)
    rows = table.complete({target: targets.isnan(), **gaps_in(values)}, target)
    targets = targets[rows]
    if classes is not None:
        targets = targets.long()
    # Sorted indices of the remaining rows.
    parts = divide(
        len(rows) if classes is None else targets,
        fractions,
        split_seed,
        classes is not None,
        folds=folds,
        fold=fold,
        groups=None if split_group is None else numbered(values[str(split_group)])[rows],
        times=None if split_time is None else table.times(str(split_time), values)[rows],
    )
    center = 0.0
    scale = 1.0
    if classes is None and kind == "regression":
        center, scale = mean_and_std(targets[parts[0]])
        if trained is not None:
            center = trained["target_mean"]
            scale = trained["target_scale"]
        targets = ((targets - center) / scale).float().unsqueeze(1)
    if trained is not None:
        table.warn_of_unknown(columns, values)
    else:
        train = rows[parts[0]]
        for name in names:
            columns.append(table.describe(name, values[name], train, name in categorical))
    order = torch.cat(parts)
    inputs = _encoded(table, columns, values, rows[order])
    sizes = [len(part) for part in parts]
    pieces = (inputs, targets[order], rows[order] + FIRST)
    splits = []
    for part in zip(*(piece.split(sizes) for piece in pieces), strict=True):
        splits.append(TensorSplit(*part) if len(part[0]) else None)
    cut = "".join(f" by {name}" for name in divided_by)
    if folds:
        cut += f" into {folds} folds (fold {fold} validates)"
    return Data(
        Path(path).stem,
        splits[0],
        splits[1],
        splits[2],
        inputs.shape[1:],
        num_classes=1 if classes is None else len(classes),
        kind=kind,
        classes=classes,
        target_mean=center,
        target_scale=scale,
        table={"columns": columns, **reading},
        cut=cut,
    )


class Table:
    """A csv or parquet file, and how it is read; UserError for what cannot be.

    `reading` has "missing", "delimiter", "decimal" and "marks", as in the configuration. Lines
    count rows as a spreadsheet does: the header is line 1. A table has at least two columns, or one
    of the name `alone`.

    Attributes:
        names: of its columns.
        notation: how it writes numbers.
        shown: its path, as messages show it.
    """

    def __init__(
        self, path: str, reading: dict[str, Any], key: str = "dataset.path", alone: str = ""
    ) -> None:
        self.path = os.path.expanduser(path)
        self.shown = printable(path)
        self.key = key
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
        with self._open([]) as (written, _):
            self.written = {name.strip(): name for name in written}
        self.names = list(self.written)
        for name, count in Counter(map(str.strip, written)).items():
            if count > 1 or name == "":
                raise UserError(
                    f"{self.shown}: the header has the column {name!r} {count} times. "
                    "Give each column a unique name; to_csv(index=False) leaves out the index."
                )
        if len(written) == 1 and self.names != [alone]:
            raise UserError(
                f"{self.shown} has only one column, {self.names[0][:50]!r}.\n"
                "If another character separates its columns, "
                "type \"dataset.delimiter=';'\", or tab."
            )

    @contextlib.contextmanager
    def _open(self, names: Sequence[str]) -> Iterator[tuple[list[str], Iterator[Any]]]:
        """Yield the names in the header, and batches of the columns `names`."""
        try:
            with open_plain(self.path, links=True) as plain:
                start = plain.read(LONGEST)
            if not start:
                raise UserError(f"{self.shown} is empty: it needs a header and a row.")
            with pyarrow.OSFile(self.path) as file:
                if start.startswith(b"PAR1"):
                    stored = parquet.ParquetFile(file)
                    yield stored.schema_arrow.names, stored.iter_batches(ROWS, columns=names)
                    return
                # A row has to fit in a block, and some blocks are read ahead.
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
            raise UserError(f"{self.key}={self.shown}: there is no such file.") from None
        except UserError:
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            advice = ""
            if "UTF8" in str(error) or isinstance(error, UnicodeDecodeError):
                advice = "\nSave it as UTF-8, for example with iconv -f cp1252 -t utf-8."
            raise UserError(
                f"{self.key}={self.shown}: cannot be read as a table "
                f"({printable(error)[:300]}).{advice}"
            ) from None

    def pieces(self, names: Sequence[str]) -> Iterator[dict[str, Texts]]:
        """Yield the texts of the columns for some thousand rows at a time, without blanks around
        them; null for a missing one.
        """
        with self._open([self.written[name] for name in names]) as (_, batches):
            for batch in batches:
                piece = {}
                for name, column in zip(names, batch.columns, strict=True):
                    texts = compute.utf8_trim_whitespace(self._texts(name, column))
                    piece[name] = without(texts, EMPTY if name == self.target else MISSING)
                yield piece

    def _texts(self, name: str, column: Any) -> Texts:
        """Return a column as a csv file of this notation has it; UserError for lists and bytes."""
        try:
            if pyarrow.types.is_timestamp(column.type) and column.type.tz:
                column = column.cast(pyarrow.timestamp(column.type.unit, "UTC"))
            texts = column.cast(pyarrow.string())
        except pyarrow.ArrowException:
            advice = f"Type dataset.ignore=[{name}]."
            if name == self.target:
                advice = "Choose another target."
            raise UserError(
                f"{self.shown}: the column {name!r} holds {printable(column.type)}, "
                f"which is neither numbers nor text.\n{advice}"
            ) from None
        if pyarrow.types.is_floating(column.type) or pyarrow.types.is_decimal(column.type):
            texts = compute.replace_substring(texts, ".", self.notation.decimal)
        return texts

    def read(self, names: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
        """Return the columns: float64 where all values are numbers and the name is not in `texts`,
        else texts.
        """
        pieces: dict[str, list[Texts]] = {name: [] for name in names}
        rows = 0
        for piece in self.pieces(names):
            rows += len(piece[names[0]])
            if rows * len(names) > MOST_NUMBERS:
                raise UserError(
                    f"{self.shown} has more than {MOST_NUMBERS:,} values, too many to fit in "
                    "memory.\nType dataset.ignore=[COLUMN], or write your own data set."
                )
            for name, values in piece.items():
                pieces[name].append(values)
        if rows == 0:
            raise UserError(f"{self.shown} is empty: it needs a header and a row.")
        columns = {}
        for name in names:
            column = pieces.pop(name)
            if name not in texts:
                column = self._as_numbers(column)
            columns[name] = pyarrow.concat_arrays(column)
        return columns

    def _as_numbers(self, column: list[Texts]) -> list[Any]:
        """Return the pieces of a column as float64 if all values are numbers, else as they are."""
        numbers = []
        for values in column:
            amounts = self.notation.numbers(values)
            if amounts.null_count > values.null_count:
                return column
            numbers.append(amounts)
        return numbers

    def check(self, where: str, names: str | Sequence[str]) -> list[str]:
        """Return the names of columns as a list; UserError for one that the table lacks."""
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self.written:
                raise UserError(
                    f"{where}{name}: {self.shown} has no such column."
                    f"{did_you_mean(name, self.names)}\nIt has {first_few(self.names, 20)}."
                )
        return names

    def check_trained(self, columns: list[Column]) -> list[str]:
        """Return the names of the columns that a run was trained on; UserError if one is absent."""
        names = [column["name"] for column in columns]
        return self.check("The run was trained on the column ", names)

    def complete(
        self, lacking: dict[str, Tensor], target: str | None = None, line: int = FIRST
    ) -> Tensor:
        """Return the places of the rows that are used: all, or those that lack no value."""
        gappy = {name: mask for name, mask in lacking.items() if mask.any()}
        rows = len(next(iter(lacking.values())))
        if not gappy or (self.missing == "mean" and target not in gappy):
            return torch.arange(rows)
        if self.missing == "drop":
            kept = ~torch.stack(list(gappy.values())).any(0)
            if target is not None and not kept.any():
                raise UserError(
                    "dataset.missing=drop would drop all rows, since each has a missing value. "
                    "Type dataset.missing=mean, or dataset.ignore=[COLUMN]."
                )
            if target is not None:
                dropped = rows - int(kept.sum())
                log.warning(
                    "%s: %d of %d rows have missing values and are left out.",
                    self.shown,
                    dropped,
                    rows,
                )
            return kept.nonzero().view(-1)
        name, mask = next(iter(gappy.items()))
        shown = [f"{name!r} in {int(mask.sum())}" for name, mask in gappy.items()]
        fill = "" if target in gappy else "dataset.missing=mean to fill them in, or "
        raise UserError(
            f"{self.shown}, line {line + int(mask.nonzero()[0])}: the column {name!r} has no value."
            f"\nValues are missing: {first_few(shown, 3)} of {rows} rows.\n"
            f"Type {fill}dataset.missing=drop to leave those rows out."
        )

    def amounts(self, values: Any, is_date: bool = False) -> Tensor:
        """Return the numbers, or the days, of values in float64; NaN where there is none."""
        if values.type == pyarrow.float64():
            return tensor_of(values)
        return tensor_of(dates(values) if is_date else self.notation.numbers(values))

    def times(self, name: str, columns: dict[str, Any]) -> Tensor:
        """Return the numbers or days of a column, in which no value may be missing."""
        for is_date in (False, True):
            times = self.amounts(columns[name], is_date)
            if not times.isnan().any():
                return times
        raise UserError(
            f"dataset.split_time={name}: a value is missing, or neither a number nor a date such "
            "as 2024-01-31."
        )

    def describe(
        self,
        name: str,
        values: Any,
        train: Tensor,
        categorical: bool,
    ) -> Column:
        """Return {"name", "mean", "std"} of a numeric column, with "date" if it holds dates, and
        {"name", "categories"} of another, by the rows `train`.
        """
        learned = values.take(pyarrow.array(train.numpy()))
        check_values(name, learned)
        for is_date in () if categorical else (False, True):
            amounts = self.amounts(values, is_date)
            if amounts.isnan().sum() == values.null_count:
                mean, std = mean_and_std(self.amounts(learned.drop_null(), is_date))
                return {"name": name, "mean": mean, "std": std, "date": is_date}
        categories = sorted(learned.unique().drop_null().to_pylist())
        column = {"name": name, "categories": categories}
        if categorical:
            return column
        instead = f", or type dataset.ignore=[{name}] or dataset.categorical=[{name}]"
        are_mistakes, reason = self.look_at_odd(f"Column {name!r}", values, instead)
        is_text = len(categories) > max(FEW_KINDS, len(train) / 2)
        if are_mistakes or is_text:
            raise UserError(
                f"Column {name!r} has {len(categories)} different values, and {reason}.\n"
                f"{CORRECT}{instead}."
            )
        return column

    def look_at_odd(self, where: str, texts: Texts, instead: str) -> tuple[bool, str]:
        """Tell whether the values that are not numbers are mistakes, and describe them; UserError
        if they are numbers in another notation, with the settings that read them.
        """
        odd = self.amounts(texts).isnan() & tensor_of(texts.is_valid())
        count = int(odd.sum())
        present = len(texts) - texts.null_count
        place = int(odd.int().argmax())
        first = f"{str(texts[place])[:50]!r} in line {FIRST + place}"
        few = count <= max(1, FEW * present)
        distinct = texts.unique().drop_null().to_pylist()
        notation = None if few else fitting(distinct, FEW_KINDS)
        # If a comma was typed, points belong to other columns.
        if notation is not None and self.notation.decimal != ",":
            raise UserError(
                f"{where} has numbers in a different notation, such as {first}.\n"
                f"Type {notation.settings()}{instead}."
            )
        swapped = Notation("." if self.notation.decimal == "," else ",")
        if swapped.numbers(texts.filter(pyarrow.array(odd.numpy()))).null_count == 0:
            raise UserError(
                f"{where} has {first}, in a different notation from other numbers in the file.\n"
                f"Write one notation everywhere, such as 1234.5{instead}."
            )
        are_mistakes = count < present / 2 and (few or len(distinct) > FEW_KINDS)
        return (
            are_mistakes,
            f"{count} of {present} values cannot be read as a number, the first {first}",
        )

    def encode(self, column: Column, values: Any, line: int = FIRST) -> Tensor:
        """Return the numbers of a column: float64 (N, 1), NaN where one is missing, or one-hot (N,
        categories).
        """
        categories = column.get("categories")
        if categories is not None:
            places = compute.index_in(values, pyarrow.array(categories)).fill_null(-1)
            return (tensor_of(places).unsqueeze(1) == torch.arange(len(categories))).double()
        amounts = self.amounts(values, column.get("date", False))
        odd = amounts.isnan() & tensor_of(values.is_valid())
        if odd.any():
            place = int(odd.int().argmax())
            raise UserError(
                f"{self.shown}, line {line + place}: {str(values[place])[:50]!r} in the column "
                f"{column['name']!r} is not a number or date, unlike in the run.\n{CORRECT}."
            )
        return amounts.unsqueeze(1)

    def warn_of_unknown(
        self, columns: list[Column], values: dict[str, Any], line: int = FIRST
    ) -> list[Column]:
        """Warn of the first value of each column that is not among the categories of the run, and
        return the columns that have none.
        """
        clean = []
        for column in columns:
            texts = values[column["name"]]
            place = -1
            if "categories" in column:
                known = pyarrow.array([*column["categories"], None])
                place = compute.index(compute.is_in(texts, known), False).as_py()
            if place < 0:
                clean.append(column)
                continue
            log.warning(
                "%s, line %d: %r in the column %r was not in the training data; such values count "
                "as unknown.",
                self.shown,
                line + place,
                str(texts[place])[:50],
                column["name"],
            )
        return clean


def check_values(name: str, values: Any) -> None:
    """Raise UserError for a column without any value to learn from."""
    if values.null_count == len(values):
        raise UserError(
            f"Column {name!r} has no value in the training part. Type dataset.ignore=[{name}]."
        )


def tensor_of(array: Any) -> Tensor:
    """Return an array of pyarrow as a tensor; null becomes NaN."""
    return torch.tensor(array.to_numpy(zero_copy_only=False))


def without(texts: Texts, words: Sequence[str]) -> Texts:
    """Return the texts with null for these words, in any letter case."""
    is_word = compute.is_in(compute.utf8_lower(texts), pyarrow.array(words))
    return only(compute.invert(is_word), texts)


def numbered(values: Any) -> Tensor:
    """Return a number for each different value."""
    return tensor_of(values.dictionary_encode().indices.fill_null(-1))


def gaps_in(columns: dict[str, Any]) -> dict[str, Tensor]:
    """Tell where values are missing."""
    return {name: tensor_of(values.is_null()) for name, values in columns.items()}


def mean_and_std(numbers: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 1 if all numbers are equal (900 times
    0.1: 1e-17).
    """
    std = 1.0
    if numbers.min() < numbers.max():
        std = numbers.std(correction=0).item()
    return numbers.mean().item(), std


def _encoded(
    table: Table,
    columns: list[Column],
    values: dict[str, Any],
    rows: Tensor,
) -> Tensor:
    """Return the numbers that these rows become, (N, width); UserError for more than fit in memory.

    The columns are taken out of `values`, so that a large table is not in memory twice.
    """
    widths = [len(names_of(column)) for column in columns]
    if sum(widths) * len(rows) > MOST_NUMBERS:  # a small file can ask for any amount
        name = columns[widths.index(max(widths))]["name"]
        raise UserError(
            f"Column {name!r} has {max(widths)} categories in {len(rows)} rows, "
            f"which is more than fits in memory.\nType dataset.ignore=[{name}]."
        )
    inputs = torch.empty(len(rows), sum(widths))
    start = 0
    for column, width in zip(columns, widths, strict=True):
        block = table.encode(column, values.pop(column["name"]))[rows]
        if "categories" not in column:
            block = ((block - column["mean"]) / column["std"]).nan_to_num(0.0)
        inputs[:, start : start + width] = block
        start += width
    return inputs


def _read_target(
    name: str, texts: Texts, table: Table, kind: str, trained: Description | None
) -> tuple[str, list[str] | None, Tensor]:
    """Return (kind, class names or None, targets): float64 (N,), numbers or labels, NaN where one
    is missing.

    Words such as none are missing among numbers, and classes among texts, with a warning.
    """
    present = without(texts, WORDS)
    if trained is not None and trained["classes"] is not None:
        classes = trained["classes"]
        is_class = compute.is_in(texts, pyarrow.array(classes))
        texts = only(compute.or_(is_class, present.is_valid()), texts)
        unknown = set(texts.unique().drop_null().to_pylist()).difference(classes)
        if unknown:
            raise unknown_class(min(unknown), classes)
        return kind, classes, labels_of(texts, classes)
    where = f"dataset.target={name}"
    numbers = table.amounts(present)
    is_text = bool(numbers.isnan().sum() > present.null_count)
    if is_text and kind != "classification":
        instead = "" if trained else ", or type dataset.kind=classification"
        if kind == "regression" and dates(present).null_count == present.null_count:
            raise UserError(
                f"{where}: the column holds dates, which can only be inputs.\n"
                f"Write numbers instead, such as days{instead}."
            )
        are_mistakes, reason = table.look_at_odd(f"{where}: the column", present, instead)
        if kind == "regression" or are_mistakes:
            raise UserError(f"{where}: {reason}.\n{CORRECT}{instead}.")
    if not is_text:
        texts = present
    names = sorted(texts.unique().drop_null().to_pylist())
    rows = len(texts) - texts.null_count
    if len(names) < 2 and trained is None:
        raise UserError(
            f"{where}: all {rows} rows have the same value, {''.join(names)!r}. "
            "There is nothing to learn."
        )
    if kind == "auto":
        few = len(names) <= FEW_KINDS and len(names) < rows / 10
        whole = (numbers == numbers.floor()) | numbers.isnan()
        has_codes = compute.any(compute.match_substring_regex(texts.slice(0, ROWS), CODE)).as_py()
        classes = is_text or has_codes or (few and whole.all())
        kind = "classification" if classes else "regression"
    if kind == "regression":
        return kind, None, numbers
    if len(names) > max(2, rows / 2):
        advice = "Choose another column."
        if not is_text:
            advice = "Type dataset.kind=regression, or choose another column."
        raise UserError(
            f"{where}: {rows} rows have {len(names)} different values, too many for classes.\n"
            f"{advice}"
        )
    if not is_text:
        amounts = table.notation.numbers(pyarrow.array(names)).to_pylist()
        names = [name for _, name in sorted(zip(amounts, names, strict=True))]
    elif present.null_count > texts.null_count:
        words = [name for name in names if name.lower() in WORDS]
        log.warning(
            "%s: %r counts as a class like the others. If it stands for a missing value, leave "
            "those values empty in the file.",
            where,
            words[0],
        )
    return kind, names, labels_of(texts, names)


def labels_of(texts: Texts, classes: list[str]) -> Tensor:
    """Return the labels in float64, NaN where a value is missing."""
    return tensor_of(compute.index_in(texts, pyarrow.array(classes)).cast(pyarrow.float64()))


def check_table(trained: Description) -> dict[str, Any]:
    """Return the table of a run's description; UserError if it was trained on something else."""
    if not is_description(trained):
        raise UserError("dataset.trained: only a run sets this key. Remove it.")
    if trained["table"] is None:
        raise UserError(
            f"dataset: the run was trained on {trained['dataset']}, which is not a table."
        )
    table: dict[str, Any] = trained["table"]
    return table


def read_batches(
    path: str,
    about: dict[str, Any],
    size: int,
    key: str = "input",
    **typed: Any,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (lines, float64 (N, numbers)) of the rows of a table, as a trained model takes them.

    A number stays as it is; a category becomes 0 and 1, all zeros if it is unknown, with a warning
    for the first of a column. A missing number is NaN if the model fills it in itself, else the
    mean. `about`: the table of the run's description. `typed`: another `missing`, `delimiter`,
    `decimal` or `marks` than it has, unless None. UserError for what cannot be read.
    """
    if os.path.isdir(path):
        raise UserError(
            f"{key}={printable(path)}: this is a folder, but the run takes a table. "
            f"Type {key}=FILE.csv."
        )
    given = {name: value for name, value in typed.items() if value is not None}
    columns: list[Column] = about["columns"]
    alone = columns[0]["name"] if len(columns) == 1 else ""
    table = Table(path, {**about, **given}, key, alone)
    names = table.check_trained(columns)
    unwarned = columns
    line = FIRST
    for texts in table.pieces(names):
        rows = table.complete(gaps_in(texts), line=line)
        unwarned = table.warn_of_unknown(unwarned, texts, line)
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
        raise UserError(f"{key}={printable(path)}: it has no rows.")
