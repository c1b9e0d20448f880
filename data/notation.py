"""How a table writes its numbers: the decimal sign, and the characters that belong to none."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.trainer.errors import UserError

LARGEST = 1e38  # number in a table: float32 has none above 3.4e38
DIGITS = 15  # of a whole number that a float holds
FEW = 0.05  # of the values of a column, where nearly all others are numbers
# A number with what stands before and after it, as in $1,234.50, 12 kg or 1'234.
IN_UNITS = re.compile(r"(\W*)([-+]?\d(?:[\d.,'\u2019\s]*\d)?)(\D*)")
# By decimal sign: a number whose thousands are grouped.
GROUPED = {
    ".": re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?"),
    ",": re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+(,\d*)?"),
}


@dataclass(frozen=True)
class Notation:
    """Reads numbers with this decimal sign, without the characters in `marks`."""

    decimal: str = "."
    marks: str = ""

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise UserError(f"dataset.decimal={self.decimal}: give . or \"','\".")
        for mark in self.marks:
            if mark.isdigit() or mark in "+-" or mark == self.decimal:
                raise UserError(
                    f"dataset.marks={self.marks}: {mark!r} is a part of numbers. Leave it out."
                )

    def number(self, text: str) -> float | None:
        """Return the number that a text is, None if it is none or too large to be used."""
        for mark in self.marks:
            if mark not in ".,":
                text = text.replace(mark, "")
        group = "," if self.decimal == "." else "."
        if group in text:
            # A point or comma is left out only where it groups thousands, and is no decimal sign
            # where it may group them.
            is_grouped = GROUPED[self.decimal].fullmatch(text.strip()) is not None
            if is_grouped != (group in self.marks):
                return None
            if is_grouped:
                text = text.replace(group, "")
        try:
            number = float(text.replace(self.decimal, "."))
        except ValueError:
            return None
        # Python reads 1_1 as 11.
        return number if abs(number) <= LARGEST and "_" not in text else None

    def parse(self, values: Sequence[str | None]) -> tuple[list[float], list[int]]:
        """Return the values as numbers, NaN where there is none, and the places of those that are
        not numbers.
        """
        numbers = []
        odd = []
        for i, value in enumerate(values):
            number = math.nan
            if value is not None:
                known = self.number(value)
                if known is None:
                    odd.append(i)
                else:
                    number = known
            numbers.append(number)
        return numbers, odd

    def amount(self, text: str) -> float | str:
        """Return what a text is worth, whatever its spelling: a number if floats tell it apart,
        else lower case.
        """
        number = self.number(text)
        if number is None or abs(number) >= 10**DIGITS:
            return text.lower()
        return number

    def settings(self) -> str:
        """Return what to type for this notation."""
        typed = []
        if self.marks:
            marks = self.marks.replace("'", "\\'")
            typed.append(f"\"dataset.marks='{marks}'\"")
        if self.decimal == "," or not self.marks:
            typed.append(f"\"dataset.decimal='{self.decimal}'\"")
        return " ".join(typed)

    def that_reads(self, values: Sequence[str | None], few: int) -> "Notation | None":
        """Return the notation that reads nearly all values as numbers, with the marks of this one;
        None if none does.

        Letters are a unit where more than `few` different values have the same: 1st and 2nd are
        names.
        """
        texts = [value for value in values if value is not None]
        units: Counter[str] = Counter()
        marks = set(self.marks)
        for text in texts:
            match = IN_UNITS.fullmatch(text)
            if match is None:
                continue
            before, number, after = match.groups()
            marks.update(number)
            unit = before.strip("+-") + after.strip()
            if unit:
                units[unit] += 1
        unit = max(units, key=lambda name: units[name], default="")
        if unit:
            has_letters = any(map(str.isalpha, unit))
            if has_letters and len(set(texts)) <= few:
                return None
            if not all(map(_is_unit, unit)):
                return None
            marks.update(unit)
        marks -= set("+-0123456789")
        for decimal in (".", ","):
            others = sorted(marks - {decimal})
            notation = Notation(decimal, "".join(others))
            _, odd = notation.parse(texts)
            if len(odd) <= FEW * len(texts):
                return notation
        return None


def _is_unit(character: str) -> bool:
    is_currency = unicodedata.category(character) == "Sc"
    return is_currency or character.isalpha() or character in " %‰°²³/"


def is_code(text: str | None) -> bool:
    """Tell whether these digits are a name rather than an amount: 007, or more of them than a float
    can hold.
    """
    if text is None or not text.isdecimal():
        return False
    has_leading_zero = text[0] == "0" and len(text) > 1
    return has_leading_zero or len(text) > DIGITS
