"""The number and date formats of tables, parsed with pyarrow."""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyarrow import compute

from stoker.trainer.errors import UserError, check_choice

LARGEST = 1e38  # largest number allowed in a table; the largest float32 is 3.4e38
FEW = 0.05  # in a column of numbers, at most this fraction of the values can be typos
FEW_KINDS = 20  # up to this many distinct values can be categories, even in a small table
# A number in any notation, possibly with a currency or percent sign: $1,234.50, 45% or 1'234.
IN_SIGNS = (
    r"^[\p{Sc} ]*[-+]?[\p{Sc} ]*(\d+|\d{1,3}([., '\x{2019}]\d{3})+)([.,]\d+)?"
    r"[\p{Sc} %\x{2030}UNITS]*$"
)
TIME = r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?"
DATE = rf"^\d{{4}}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])([T ]{TIME})?Z?$"
# A date in another notation, such as 1/31/2024, where day and month can be in either order.
OTHER_DATE = r"^(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{4}[./]\d{1,2}[./]\d{1,2})\b"
MICROSECONDS = 86_400e6  # microseconds in a day

Texts = Any  # a pyarrow array of strings; null is a missing value


def only(mask: Any, values: Any) -> Any:
    """Return the pyarrow array `values`, with null where the mask is not true."""
    return compute.if_else(mask, values, pyarrow.scalar(None, values.type))


def usable(numbers: Any) -> Any:
    """Return the numbers, with null for any that are too large for float32."""
    return only(compute.less_equal(compute.abs(numbers), LARGEST), numbers)


@dataclass(frozen=True)
class Notation:
    """Parses numbers with this decimal separator, ignoring the characters in `marks`."""

    decimal: str = "."
    marks: str = ""

    def __post_init__(self) -> None:
        check_choice("dataset.decimal", self.decimal, (".", ","))
        if set(self.marks) & set(f"0123456789+-{self.decimal}"):
            raise UserError(
                f"dataset.marks={self.marks}: must not contain digits, +, -, or the decimal "
                "separator."
            )

    def numbers(self, texts: Texts) -> Any:
        """Parse texts as float64, with null for a text that is not a number or is too large.

        A point or comma is dropped only where it separates thousands: 3,4 is not 34.
        """
        if self == Notation():
            with contextlib.suppress(pyarrow.ArrowInvalid):
                return usable(texts.cast(pyarrow.float64()))
        group = "," if self.decimal == "." else "."
        digits = r"\d+"
        if group in self.marks:
            digits += rf"|[1-9]\d{{0,2}}([{group}]\d{{3}})+"
        number = rf"^[+-]?(({digits})([{self.decimal}]\d*)?|[{self.decimal}]\d+)([eE][+-]?\d+)?$"
        marks = self.marks.replace(group, "")
        if marks:
            texts = compute.replace_substring_regex(texts, f"[{re.escape(marks)}]", "")
            texts = compute.utf8_trim_whitespace(texts)
        is_number = compute.match_substring_regex(texts, number)
        texts = compute.replace_substring(only(is_number, texts), group, "")
        numbers = compute.replace_substring(texts, self.decimal, ".").cast(pyarrow.float64())
        return usable(numbers)


def dates(texts: Texts) -> Any:
    """Parse dates such as 2024-01-31, 31.01.2024 or 2024-01-31 12:00 as days since 1970-01-01
    (float64). Other strings become null.
    """
    texts = compute.replace_substring_regex(texts, r"^(\d\d)\.(\d\d)\.(\d{4})", r"\3-\2-\1")
    texts = only(compute.match_substring_regex(texts, DATE), texts)
    days = compute.utf8_slice_codeunits(texts, 0, 10)
    # strptime would read February 30 as March 1.
    real = compute.strptime(days, "%Y-%m-%d", "s").cast(pyarrow.date32()).cast(pyarrow.string())
    texts = only(compute.equal(days, real), texts)
    texts = compute.replace_substring_regex(texts, r"(\.\d{6})\d*|Z", r"\1")  # drops nanoseconds
    moments = texts.cast(pyarrow.timestamp("us")).cast(pyarrow.int64())
    return compute.divide(moments.cast(pyarrow.float64(), safe=False), MICROSECONDS)


def are_numbers(texts: Texts) -> bool:
    """Return whether nearly all of these distinct texts are numbers or dates in some notation.

    If there are more than FEW_KINDS texts, letters after a number count as a unit, as in 12 kg.
    With fewer texts, such letters are part of a name, as in 1st and 2nd.
    """
    units = r"\pL\x{b0}\x{b2}\x{b3}/" if len(texts) > FEW_KINDS else ""
    pattern = f"{IN_SIGNS.replace('UNITS', units)}|{OTHER_DATE}"
    matches = compute.match_substring_regex(texts, pattern)
    return bool(compute.mean(matches).as_py() >= 1 - FEW)
