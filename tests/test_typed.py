"""Plain values of a JSON file as annotated dataclasses."""

import dataclasses
from typing import Any, Literal

import pytest

from stoker.data.typed import typed


@dataclasses.dataclass
class Point:
    x: float
    y: int | None
    kind: Literal["a", "b"] = "a"


@dataclasses.dataclass
class Line:
    points: list[Point]
    size: tuple[int, ...] = (1,)
    notes: dict[str, str | bool] = dataclasses.field(default_factory=dict)


def test_values_become_records():
    value = {"points": [{"x": 1}, {"x": 0.5, "y": 2, "kind": "b"}], "size": [2, 3], "more": 1}
    points = [Point(1, None), Point(0.5, 2, "b")]
    assert typed(value, Line) == Line(points, (2, 3))
    assert typed({"points": [], "notes": {"a": True}}, Line) == Line([], notes={"a": True})


@pytest.mark.parametrize(
    ("value", "hint", "text"),
    [
        ({"x": "1"}, Point, "file.x: expected <class 'float'>, not '1'."),
        ({"x": float("nan")}, Point, "file.x: expected <class 'float'>, not 'nan'."),
        ({"x": 1, "y": True}, Point, "file.y: expected int | None, not 'True'."),
        ({"x": 1, "kind": "c"}, Point, "file.kind: expected typing.Literal['a', 'b'], not 'c'."),
        ({}, Point, "file.x: expected <class 'float'>, not 'None'."),
        (
            {"points": [{"x": 1}, {}]},
            Line,
            "file.points[1].x: expected <class 'float'>, not 'None'.",
        ),
        ({"points": [], "notes": {"a": 1}}, Line, "file.notes.a: expected str | bool, not '1'."),
        ({1: 2}, dict[str, Any], "file: expected dict[str, typing.Any], not '{1: 2}'."),
        (1, Literal[True], "file: expected typing.Literal[True], not '1'."),
        (10**120, int, f"file: expected <class 'int'>, not '1{'0' * 99}'."),
    ],
)
def test_the_error_names_the_key(value, hint, text):
    with pytest.raises(TypeError) as error:
        typed(value, hint)
    assert str(error.value) == text
