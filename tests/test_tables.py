"""Tables: what a column becomes, by the training split alone, and each mistake has its answer."""

import csv
import datetime
import io
import re
import statistics

import pytest
import torch

pytest.importorskip("pyarrow")

import pandas
import pyarrow
from pyarrow import parquet
from sklearn import model_selection

from stoker.command import sample_check
from stoker.data import tables
from stoker.data.description import columns_line
from stoker.data.notation import Notation, dates
from stoker.data.splits import divide, split_indices
from stoker.trainer.errors import UserError


def parts_of(data):
    return [part for part in (data.train, data.val, data.test) if part is not None]


@pytest.fixture
def table(tmp_path):
    def write(text, **options):
        path = tmp_path / "table.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return tables.csv(str(path), **options)

    write.path = tmp_path / "table.csv"
    return write


def rows(n=100):
    """age is numeric, city a category, kind a class in text, price a number."""
    return [
        f"{20 + i % 40},{'abc'[i % 3]},{'yes' if i % 4 else 'no'},{i * 1.5 + 0.25}"
        for i in range(n)
    ]


HEADER = "age,city,kind,price\n"


def test_a_class_that_the_training_rows_of_a_table_lack(table):
    lines = [f"{i},{'ab'[i % 2]}" for i in range(40)] + ["1,c"] * 2
    with pytest.raises(
        UserError,
        match="the (val|test) split has the class 'c', which does not occur in the training split",
    ):
        table(
            "x,y\n" + "\n".join(lines), target="y", val_fraction=0.45, test_fraction=0.5
        ).check_classes()


def test_csv_classes(table):
    data = table(HEADER + "\n".join(rows()), target="kind")
    assert (data.kind, data.classes, data.num_classes, data.in_shape) == (
        "classification",
        ["no", "yes"],
        2,
        (5,),
    )
    assert (
        sum(len(part) for part in parts_of(data)) == 100
        and data.target_scale == 1.0
        and data.mean is None
    )
    train = data.train.inputs.double()
    torch.testing.assert_close(train[:, [0, 4]].mean(0), torch.zeros(2).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        train[:, [0, 4]].std(0, correction=0), torch.ones(2).double(), atol=1e-6, rtol=0
    )
    for part in parts_of(data):
        assert part.inputs.dtype == torch.float32 and torch.equal(
            part.inputs[:, 1:4].sum(1), torch.ones(len(part))
        )


def test_csv_regression_is_told_in_the_users_units(table):
    data = table(HEADER + "\n".join(rows()), target="price", val_fraction=0.1, test_fraction=0.2)
    assert (
        data.kind == "regression"
        and data.num_classes == 1
        and [len(part) for part in parts_of(data)] == [70, 10, 20]
    )
    prices = (
        torch.cat([part.targets for part in parts_of(data)]).double() * data.target_scale
        + data.target_mean
    )
    torch.testing.assert_close(
        prices.view(-1).sort().values, torch.arange(100).double() * 1.5 + 0.25, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(
        data.train.targets.double().std(correction=0).item(), 1.0, atol=1e-6, rtol=0
    )
    assert data.train.targets.shape == (70, 1) and data.train.targets.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "kind", "classes"),
    [
        (lambda i: i % 3, "classification", ["0", "1", "2"]),
        (lambda i: i % 10, "regression", None),  # ten of a hundred rows are not fewer than a tenth
        (lambda i: i % 3 / 2, "regression", None),
        (lambda i: "xy"[i % 2], "classification", ["x", "y"]),
        (lambda i: f"{i % 2 + 9}.0", "classification", ["9.0", "10.0"]),
    ],
)
def test_csv_kind_auto(table, values, kind, classes):
    data = table("a,y\n" + "\n".join(f"{i},{values(i)}" for i in range(100)), target="y")
    assert (data.kind, data.classes) == (kind, classes)
    if kind == "regression":
        assert (
            table(
                "a,y\n" + "\n".join(f"{i},{values(i)}" for i in range(100)),
                target="y",
                kind="classification",
            ).kind
            == "classification"
        )


@pytest.mark.parametrize(
    "names",
    [
        ["5", "1000001", "1000002"],
        ["0.1", "1000000.5", "1000000.25"],
        ["1.0", "1.5", "low"],
        ["0", "-0.5", "1e+20"],
    ],
)
def test_the_classes_of_a_column_are_told_apart_and_known_again(table, names):
    """Also where they are numbers that have many digits, or begin like numbers; in a table that has
    not all of them.
    """
    text = "a,b,y\n" + "\n".join(f"{i},{i % 7},{names[i % 3]}" for i in range(90))
    data = table(text, target="y", kind="classification")
    assert len(set(data.classes)) == 3
    about = data.description()
    again = table(text, target="y", kind="classification", trained=about)
    assert torch.equal(again.test.targets, data.test.targets) and again.classes == data.classes
    two = table(text.replace(names[2], names[1]), target="y", trained=about)
    assert two.classes == data.classes and len(set(two.train.targets.tolist())) == 2


def labels_in_file(data):
    """{line: class name} of all parts."""
    pairs = {}
    for part in parts_of(data):
        names = [data.classes[label] for label in part.targets.tolist()]
        pairs.update(zip(part.lines.tolist(), names, strict=True))
    return pairs


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["1234567890123456789", "1234567890123456790", "1234567890123459999"], None),
        (["01", "1", "001"], ["001", "01", "1"]),
        (["10.0", "9.0", "9.50"], ["9.0", "9.50", "10.0"]),
        (["-1", "1", "+1"], ["-1", "+1", "1"]),
        (["none", "NA", "mild"], ["NA", "mild", "none"]),
        (["None", "none", "low"], ["None", "low", "none"]),
        (["true", "True", "false"], ["True", "false", "true"]),
        (["1e3", "1000", "2"], ["2", "1000", "1e3"]),
        (["0x1", "1", "2"], ["0x1", "1", "2"]),
    ],
)
def test_labels_are_those_of_the_file_letter_by_letter(table, names, order):
    """Compared with the csv module and a dict; read back by a run they are the same."""
    text = "x,y\n" + "".join(f"{i / 7},{names[i * i % 3 if i % 2 else i % 3]}\n" for i in range(90))
    kind = "auto" if all(name.isdecimal() or name.isalpha() for name in names) else "classification"
    data = table(text, target="y", kind=kind)
    rows = csv.DictReader(io.StringIO(text))
    expected = {line: row["y"] for line, row in enumerate(rows, 2)}
    assert labels_in_file(data) == expected
    assert data.classes == (order or sorted(names)) and data.kind == "classification"
    again = table(text, target="y", trained=data.description())
    assert labels_in_file(again) == expected


def test_a_label_that_a_run_does_not_know_is_refused(table):
    """01 is not one of "1" and "001", and a long id is itself alone."""

    def text(names):
        return "x,y\n" + "".join(f"{i / 7},{names[i % 2]}\n" for i in range(40))

    codes = table(text(["1", "001"]), target="y").description()
    ids = table(text(["1234567890123456789", "3"]), target="y").description()
    for about, name in ((codes, "01"), (ids, "1234567890123456790"), (ids, "none")):
        with pytest.raises(UserError, match=f"the run has no class '{name}'|no value"):
            table(text([name, about["classes"][0]]), target="y", trained=about)


def test_words_for_nothing_are_classes_of_a_text_and_gaps_among_numbers(table, caplog):
    lines = [f"{i},{['none', 'mild', 'NA', 'severe'][i % 4]}" for i in range(80)]
    data = table("x,y\n" + "\n".join(lines), target="y", missing="drop")
    assert data.classes == ["NA", "mild", "none", "severe"] and len(labels_in_file(data)) == 80
    mostly = [f"{i},{'crack' if i % 8 == 0 else 'none'}" for i in range(80)]
    data = table("x,y\n" + "\n".join(mostly), target="y")
    assert data.classes == ["crack", "none"] and len(labels_in_file(data)) == 80
    with_gap = "x,y\n" + "\n".join([*lines, "1,", "1,?"])
    with pytest.raises(
        UserError, match=r"line 82: the column 'y' has no value.\nType dataset.missing=drop"
    ):
        table(with_gap, target="y")
    numbers = [f"{i},{['none', '1', '0', '1'][i % 4]}" for i in range(80)]
    for kind in ("auto", "classification"):
        with pytest.raises(UserError, match="line 2: the column 'y' has no value"):
            table("x,y\n" + "\n".join(numbers), target="y", kind=kind)
    caplog.clear()
    data = table("x,y\n" + "\n".join(numbers), target="y", missing="drop")
    assert data.classes == ["0", "1"] and len(labels_in_file(data)) == 60
    assert (
        caplog.records[0]
        .getMessage()
        .endswith("skipped 20 of 80 rows because they have missing values.")
    )


def test_blanks_around_classes_do_not_count(table):
    cells = ["a", " a", "b", "b\xa0", "a "]
    data = table("x,y\n" + "\n".join(f'{i},"{cells[i % 5]}"' for i in range(80)), target="y")
    assert data.classes == ["a", "b"] and len(labels_in_file(data)) == 80


def test_a_column_without_any_value_is_to_be_ignored(table):
    text = "x,z,y\n" + "\n".join(f"{i * 0.7},,{'ab'[i % 2]}" for i in range(60))
    with pytest.raises(UserError, match=r"line 2: the column 'z' has no value"):
        table(text, target="y")
    for categorical in ([], ["z"]):
        with pytest.raises(UserError, match=r"'z' has no value.*Add it to dataset.ignore"):
            table(text, target="y", missing="mean", categorical=categorical)
    assert len(labels_in_file(table(text, target="y", ignore="z"))) == 60


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        ("${:d}", {"marks": "$"}),
        ("{:.1f}%", {"marks": "%"}),
        ("{:.1f} %", {"marks": " %"}),
        ("\u20ac{:,.2f}", {"marks": ",\u20ac"}),
        ("-${:,d}", {"marks": "$,"}),
        ("{:,d}", {"marks": ","}),
        ("{:d} kg", {"marks": " gk"}),
        ("3,{:d}", {"decimal": ","}),
        ("0,{:05d}", {"decimal": ","}),
        ("{:d}.000,5", {"decimal": ",", "marks": "."}),
        ("{:d} 000", {"marks": " "}),
        ("{:d}'000", {"marks": "'"}),
        ("{:d}\u2019000", {"marks": "\u2019"}),
    ],
)
def test_numbers_in_another_notation_stop_with_the_settings_that_read_them(table, write, settings):
    """What is typed as advised gives the numbers that Python formatted, in a column and in a
    target.
    """
    step = 1 if "000" in write else 97  # also thousands
    numbers = [i * 37 % 130 * step + 100 for i in range(150)]
    written = [write.format(number) for number in numbers]
    lines = [f"{i % 7}|{text}|{text}|{'ab'[i % 2]}" for i, text in enumerate(written)]
    text = "x|y|z|c\n" + "\n".join(lines)
    options = {"delimiter": "|", "val_fraction": 0, "test_fraction": 0}
    marks = settings.get("marks", "")
    advice = r"on line \d\.\n.* dataset.decimal=',' .*\"dataset.marks='%\$'\" .*\n.*\. Otherwise, "
    with pytest.raises(UserError, match=f"target=y: .* the first is .*{advice}type dataset.kind="):
        table(text, target="y", ignore=["z", "x"], **options)
    with pytest.raises(UserError, match=rf"^Column 'y': .*{advice}add .*dataset.categorical\.$"):
        table(text, target="c", **options)
    data = table(text, target="y", ignore="x", kind="regression", **options, **settings)
    plain = [number.replace(",", "_") for number in written]
    for mark in marks:
        plain = [number.replace("_" if mark == "," else mark, "") for number in plain]
    expected = torch.tensor([float(number.replace("_", ".")) for number in plain]).double()
    found = data.train.targets.double()[:, 0] * data.target_scale + data.target_mean
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    [column, _] = data.table["columns"]
    found = data.train.inputs[:, 0].double() * column["std"] + column["mean"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    again = table(text, target="y", trained=data.description(), **options, **settings)
    assert torch.equal(again.train.inputs, data.train.inputs)
    [(_, batch)] = tables.read_batches(str(table.path), data.description()["table"], 1000)
    torch.testing.assert_close(batch[:, 0], expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    "write",
    [
        "12:{:02d}",
        "{:d}/2",
        "A{:d}",
        "user {:d}",
        "{:d}-20",
        "~{:d}",
        "10.0.0.{:d}",
    ],
)
def test_text_with_digits_is_not_taken_for_numbers(table, write):
    lines = [f"{write.format(i % 28 + 1)},{i % 2}" for i in range(150)]
    data = table("day,y\n" + "\n".join(lines), target="y")
    assert len(data.table["columns"][0]["categories"]) == 28


def test_a_notation_reads_what_python_formats_and_refuses_what_has_two_meanings():
    def read(notation, text):
        return notation.numbers(pyarrow.array([text]))[0].as_py()

    generator = torch.Generator().manual_seed(0)
    swapped = str.maketrans(".,", ",.")
    for number in (10 ** (8 * torch.rand(200, generator=generator) - 2)).tolist():
        english = f"{number:,.2f}"
        expected = float(f"{number:.2f}")
        assert read(Notation(".", ","), f"{number:.2f}") == expected
        marked = {"marks": ","} if "," in english else {}
        assert read(Notation(".", **marked), english) == expected
        marked = {"marks": "."} if "," in english else {}
        assert read(Notation(",", **marked), english.translate(swapped)) == expected
    for notation, text in (
        (Notation(), "1,234"),
        (Notation(), "3,4"),
        (Notation(".", ","), "3,4"),
        (Notation(".", ","), "0,345"),
        (Notation(","), "1.234"),
        (Notation(","), "1.234,5"),
        (Notation(",", "."), "0.5"),
        (Notation(",", "."), "1.23,5"),
    ):
        assert read(notation, text) is None, (notation, text)


def test_few_texts_with_units_are_categories(table):
    lines = [f"{['1st', '2nd', '3rd'][i % 3]},{['3D', '2D'][i % 2]},{i % 2}" for i in range(60)]
    data = table("place,form,y\n" + "\n".join(lines), target="y")
    assert [len(column["categories"]) for column in data.table["columns"]] == [3, 2]


def test_the_line_on_the_columns_says_what_they_were_taken_for(table):
    lines = [f"{i * 7 % 40:05d},{i % 24:d},{i % 2}" for i in range(60)]
    data = table("zip,hour,y\n" + "\n".join(lines), target="y")
    assert columns_line(data.description()) == "numbers: zip, hour"
    data = table("zip,hour,y\n" + "\n".join(lines), target="hour", categorical=["y"])
    assert columns_line(data.description()) == "numbers: zip; categories: y (2)"


def test_dates_count_in_days_as_pandas_counts_them(table):
    """The days since 1970, with the time as a fraction; read back by a run they are the same."""
    days = pandas.date_range("1969-12-20", periods=90, freq="37h")
    written = {
        "day": days.strftime("%Y-%m-%d"),
        "time": days.strftime("%Y-%m-%d %H:%M"),
        "iso": days.strftime("%Y-%m-%dT%H:%M:%S.250Z"),
        "german": days.strftime("%d.%m.%Y"),
    }
    frame = pandas.DataFrame({**written, "y": ["a", "b", "c"] * 30})
    data = table(frame.to_csv(index=False), target="y")
    since = days - pandas.Timestamp("1970-01-01")
    exact = torch.tensor(since / pandas.Timedelta(days=1)).double()
    expected = torch.stack([exact.floor(), exact, exact + 0.25 / 86_400, exact.floor()], 1)
    about = data.description()["table"]
    [(lines, batch)] = tables.read_batches(str(table.path), about, 1000)
    torch.testing.assert_close(batch, expected, rtol=0, atol=1e-9)
    rows = data.train.lines - lines[0]
    mean = torch.tensor([column["mean"] for column in about["columns"]])
    std = torch.tensor([column["std"] for column in about["columns"]])
    torch.testing.assert_close(data.train.inputs * std + mean, expected[rows].float())
    wrong = frame.to_csv(index=False).replace("1970-01-01,", "01/01/1970,", 1)
    with pytest.raises(UserError, match="'01/01/1970' in the column 'day' is not a number or date"):
        table(wrong, target="y", trained=data.description())


@pytest.mark.parametrize("notation", ["%m/%d/%Y", "%Y/%m/%d", "%d.%m.%Y x"])
def test_dates_in_another_notation_are_no_categories(table, notation):
    days = pandas.date_range("2024-01-01", periods=30).strftime(notation)
    lines = [f"{days[i % 30]},{'ab'[i % 2]}" for i in range(300)]
    with pytest.raises(UserError, match=r"300 of 300 .*\n.*\n.*dates as 2024-01-31 or 31.01.2024"):
        table("day,y\n" + "\n".join(lines), target="y")
    lines = [f"2024-02-{i % 28 + 1:02d},{'ab'[i % 2]}" for i in range(299)]
    with pytest.raises(UserError, match=r"1 of 300 .*; the first is '2024-02-30' on line 301\."):
        table("day,y\n" + "\n".join([*lines, "2024-02-30,a"]), target="y")


def test_a_column_of_row_numbers_is_a_warning(table, caplog):
    lines = [f"K{i % 4}x,{(i * 7) % 100 + 5},{'yn'[i % 2]}" for i in range(100)]
    table("town,nr,y\n" + "\n".join(lines), target="y")
    [warning] = caplog.messages
    assert warning == (
        f"{table.path}: the column 'nr' looks like a row number. If it is only an id, add it to "
        "dataset.ignore."
    )


def test_any_day_that_there_is_counts_and_no_other(tmp_path):
    """As Python counts days; parquet holds the nanoseconds of pandas."""
    texts = [
        "9999-12-31",
        "1600-02-29",
        "2024-02-29 00:00:00.000000000Z",
        "2024-02-30",
        "2023-02-29",
    ]
    days = dates(pyarrow.array(texts)).to_pylist()
    since = datetime.date(1970, 1, 1)
    real = [(datetime.date.fromisoformat(text[:10]) - since).days for text in texts[:3]]
    assert days == [*real, None, None]
    when = pandas.date_range("2001-07-13 06:00", periods=60, freq="24h", unit="ns")
    frame = pandas.DataFrame({"when": when, "x": range(0, 120, 2), "y": ["a", "b"] * 30})
    frame.to_parquet(tmp_path / "t.parquet")
    data = tables.csv(str(tmp_path / "t.parquet"), "y", split_time="x")
    [about, *_] = data.table["columns"]
    assert about["date"] and about["mean"] == 11516.25 + (len(data.train) - 1) / 2


def test_categories_of_a_run_are_compared_as_texts(table):
    """Also where all values that another table has of them are numbers."""
    trained = [f"{code},{i / 7},{'ab'[i % 2]}" for i, code in enumerate(["01", "1", "x"] * 30)]
    about = table("code,x,y\n" + "\n".join(trained), target="y").description()
    lines = [f"{code},{i / 7},{'ab'[i % 2]}" for i, code in enumerate(["1", "01"] * 10)]
    data = table("code,x,y\n" + "\n".join(lines), target="y", trained=about)
    codes = [lines[line - 2].partition(",")[0] for line in data.train.lines]
    assert about["table"]["columns"][0]["categories"] == ["01", "1", "x"]
    assert [["01", "1"][row.argmax()] for row in data.train.inputs[:, :3]] == codes


def test_parquet_is_read_as_csv_is(tmp_path):
    """Typed columns, dictionaries, dates and gaps; the numbers are those of pandas."""
    frame = pandas.DataFrame(
        {
            "small": pandas.array([i % 50 for i in range(200)], dtype="int16"),
            "real": [i / 7 if i % 10 else None for i in range(200)],
            "day": pandas.date_range("2024-01-01", periods=200),
            "town": pandas.Categorical(["Rom", "Bonn"] * 100),
            "y": [2**60 + i % 3 for i in range(200)],
        }
    )
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=64)
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = {"target": "y", "missing": "mean"}
    data = tables.csv(str(tmp_path / "t.parquet"), **options)
    same = tables.csv(str(tmp_path / "t.csv"), **options)
    assert data.classes == same.classes == [str(2**60 + i) for i in range(3)]
    assert data.table == same.table
    assert torch.equal(data.train.inputs, same.train.inputs)
    assert torch.equal(data.test.targets, same.test.targets)
    rows = frame.iloc[(data.train.lines - 2).tolist()]
    [small, real, *_] = data.table["columns"]
    assert small["mean"] == pytest.approx(rows["small"].mean(), rel=1e-12)
    assert real["std"] == pytest.approx(rows["real"].std(ddof=0), rel=1e-12)


@pytest.mark.parametrize("real", [pyarrow.float32(), pyarrow.float64(), pyarrow.decimal128(9, 2)])
def test_numbers_of_a_parquet_file_need_no_notation(tmp_path, real):
    """Beside a column of texts such as 3,25%, whose settings are for texts alone."""
    numbers = pyarrow.array([i / 4 for i in range(100)]).cast(real)
    plain = {"x": numbers, "price": numbers.take(pyarrow.array(range(99, -1, -1)))}
    commas = {**plain, "x": [f"{i / 4:.2f}%".replace(".", ",") for i in range(100)]}
    for name, columns in (("plain", plain), ("commas", commas)):
        parquet.write_table(pyarrow.table(columns), tmp_path / name)
    expected = tables.csv(str(tmp_path / "plain"), "price")
    data = tables.csv(str(tmp_path / "commas"), "price", decimal=",", marks="%")
    assert data.table["columns"] == expected.table["columns"]
    assert (data.target_mean, data.target_scale) == (expected.target_mean, expected.target_scale)
    assert torch.equal(data.train.inputs, expected.train.inputs)
    assert torch.equal(data.train.targets, expected.train.targets)
    [(_, predicted)] = tables.read_batches(str(tmp_path / "commas"), data.table, 100)
    assert predicted.view(-1).tolist() == [i / 4 for i in range(100)]


@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, b"\xff"],
)
def test_a_column_of_lists_or_bytes_is_refused(tmp_path, value):
    path = tmp_path / "t.parquet"
    columns = {"a": [value] * 40, "x": [i / 4 for i in range(40)], "y": range(40)}
    parquet.write_table(pyarrow.table({name: list(v) for name, v in columns.items()}), path)
    with pytest.raises(UserError, match="cannot be read as a table"):
        tables.csv(str(path), "y")
    assert tables.csv(str(path), "y", ignore=["a"]).in_shape == (1,)


def test_a_table_without_pyarrow_says_what_to_type(table, monkeypatch):
    monkeypatch.setattr(tables, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'stoker\[tables\]'"):
        table("x,y\n1,2\n", target="y")


def test_csv_learns_from_the_training_part_alone(table):
    """Rows of the other parts change no training row, and a category that they alone have is all
    zeros.
    """
    text = rows()
    plain = table(HEADER + "\n".join(text), target="price", split_seed=5)
    _, val, test = split_indices(100, [0.1, 0.2], 5)
    for i in [*val.tolist(), *test.tolist()]:
        text[i] = "9999,elsewhere,yes,0"
    changed = table(HEADER + "\n".join(text), target="price", split_seed=5)
    assert torch.equal(plain.train.inputs, changed.train.inputs) and torch.equal(
        plain.train.targets, changed.train.targets
    )
    assert changed.test.inputs[:, 1:4].abs().sum() == 0 and changed.test.inputs[:, 0].min() > 100


def test_csv_forms(table):
    expected = table(HEADER + "\n".join(rows()), target="kind")
    assert table(
        b"\xef\xbb\xbf" + (HEADER + "\n".join(rows())).encode(), target="kind", ignore="age"
    ).in_shape == (4,)
    for text, options in [
        (b"\xef\xbb\xbf" + (HEADER + "\r\n".join(rows())).encode(), {}),
        ((HEADER + "\n\n".join(rows())).replace(",", ";"), {"delimiter": ";"}),
        ((HEADER + "\n".join(rows())).replace(",", "\t"), {"delimiter": "tab"}),
        (
            HEADER.replace(",", " , ")
            + "\n".join(rows())
            .replace(",", ', "')
            .replace("\n", '"\n')
            .replace(', "', '","')
            .replace("\n", '\n"')
            .join('""'),
            {},
        ),
    ]:
        data = table(text, target="kind", **options)
        assert torch.equal(data.train.inputs, expected.train.inputs) and torch.equal(
            data.test.targets, expected.test.targets
        )
    assert table(HEADER + "\n".join(rows()), target="kind", ignore=["price", "city"]).in_shape == (
        1,
    )
    assert (
        table(
            HEADER + "\n".join(rows()), target="kind", categorical=["age"], ignore="price"
        ).in_shape[0]
        > 35
    )


def test_lines_count_rows_as_a_spreadsheet_does(tmp_path):
    """The header is line 1; a line break in quotes and a blank line do not count."""
    path = tmp_path / "t.csv"
    path.write_text('a,b\n"x\ny",1\n\n2,3\n,\n"u\n\nv",4,5\n', encoding="utf-8")
    reading = {"target": "b", "missing": "error", "delimiter": ","}
    with pytest.raises(UserError, match="Row #5: Expected 2 columns, got 3"):
        tables.Table(str(path), reading)
    path.write_text(path.read_text(encoding="utf-8").replace(",4,5", ",4"), encoding="utf-8")
    values = tables.Table(str(path), reading).read(["a", "b"], ["a"])
    assert values["a"].to_pylist() == ["x\ny", "2", None, "u\n\nv"]
    assert values["b"].to_pylist() == [1.0, 3.0, None, 4.0]


def test_csv_missing_values(table):
    lines = rows()
    for i, empty in enumerate(["", "NA", "?", "nan", "None", "null"]):
        lines[i] = f"{empty},{'abc'[i % 3]},yes,1.5"
    lines[10] = "30,,yes,4"
    text = HEADER + "\n".join(lines)
    with pytest.raises(
        UserError,
        match=r"line 2: the column 'age' .*\nType dataset.missing=drop .* dataset.missing=mean",
    ):
        table(text, target="kind")
    parts = parts_of(table(text, target="kind", missing="drop"))
    assert sum(len(part) for part in parts) == 93
    there = [line for line in range(8, 102) if line != 12]
    assert (
        sorted(line for part in parts for line in part.lines.tolist()) == there
    )  # of the file: the header is line 1
    filled = table(text, target="kind", missing="mean", val_fraction=0, test_fraction=0)
    assert (
        len(filled.train) == 100
        and filled.train.inputs[:6, 0].tolist() == [0] * 6
        and filled.train.inputs[10, 1:4].tolist() == [0] * 3
    )
    lines[20] = "30,a,,4"
    with pytest.raises(
        UserError, match=r"line 22: the column 'kind' .*\nType dataset.missing=drop"
    ):
        table(HEADER + "\n".join(lines), target="kind")
    with pytest.raises(
        UserError, match=r"line 22: the column 'kind' .*\nType dataset.missing=drop"
    ):
        table(HEADER + "\n".join(lines), target="kind", missing="mean")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            HEADER + "\n".join(rows()),
            {"target": "prise"},
            "dataset.target=prise.*Did you mean 'price'",
        ),
        (HEADER + "\n".join(rows()), {"categorical": ["town"]}, "dataset.categorical=town"),
        (HEADER + "\n".join(rows()), {"kind": "cluster"}, "dataset.kind"),
        (HEADER + "\n".join(rows()), {"missing": "guess"}, "dataset.missing"),
        (HEADER + "\n".join(rows()), {"delimiter": ";;"}, "dataset.delimiter"),
        (
            HEADER + "\n".join(rows()),
            {"delimiter": ";"},
            "Its columns are age,city,kind,price.\n.*dataset.delimiter",
        ),
        (
            HEADER + "\n".join(rows()),
            {"target": "city", "kind": "regression"},
            "100 of 100 values cannot be read as numbers; the first is 'a' on line 2.\n.*\n.*dataset.kind=classification",
        ),
        (HEADER, {}, "there are no rows"),
        ("", {}, r"cannot be read as a table \(Empty CSV file\)"),
        (HEADER + "1,a,yes,2\n1,a,yes\n", {}, "Row #3: Expected 4 columns, got 3"),
        ("age,age,kind\n1,2,3\n", {}, "the same name twice. Give each"),
        ("age,,kind\n1,2,3\n", {}, r"an empty name .*to_csv\(index=False\)"),
        (
            HEADER + "\n".join(f"{i},x{i},{i % 2},3" for i in range(100)),
            {},
            "'city': 100 of 100 values cannot be read as numbers.*\n.*\n.*add the column to dataset.ignore or",
        ),
        (
            b"age,kind\n\xff\xfe,1\n",
            {},
            r"cannot be read as a table \(.*UTF8.*\).\nExpected a csv file in UTF-8",
        ),
        (
            "kind,id\n" + "\n".join(f"{i % 2},{i}" for i in range(50)),
            {"ignore": ["id"]},
            "no column besides",
        ),
        (
            "a,b,kind\n" + "\n".join(f",{i},{i % 2}" for i in range(50)),
            {"missing": "mean"},
            "'a' has no value",
        ),
        (
            "a,b,kind\n" + "\n".join(f",{i},{i % 2}" for i in range(50)),
            {"missing": "drop"},
            "there are no rows",
        ),
    ],
)
def test_csv_mistakes(table, text, options, words):
    with pytest.raises(UserError, match=f"(?s){words}") as caught:
        table(text, **{"target": "kind", **options})
    assert str(caught.value).count("\n") <= 2


def test_a_run_is_told_of_categories_that_it_has_not_seen(table, caplog):
    """The first of each column, with its line; in what it was trained on there is none, and what is
    missing is none.
    """
    text = HEADER + "\n".join(rows())
    about = table(text, target="price").description()
    again = table(
        text.replace("22,c", "22,").replace("25,c", "25,d").replace("28,c", "28,e"),
        target="price",
        missing="mean",
        trained=about,
    )
    assert [record.getMessage().partition(".csv, ")[2] for record in caplog.records] == [
        (
            "line 7: 'd' in the column 'city' did not occur in the training data; such values "
            "are treated as unknown."
        )
    ]
    assert sum(
        (part.inputs[:, 1:4].sum(1) == 0).sum().item() for part in parts_of(again)
    ) == text.count("22,c") + text.count("25,c") + text.count("28,c")


def test_a_column_that_is_added_without_values_is_filled_in(table):
    """As the refusal of a table that lacks it advises."""
    text = HEADER + "\n".join(rows())
    about = table(text, target="price").description()
    without = "\n".join(line.partition(",")[2] for line in text.split("\n"))
    with pytest.raises(UserError, match=r"trained on the column age: .* has no such column"):
        table(without, target="price", trained=about)
    unlabelled = "\n".join(line.rpartition(",")[0] for line in text.split("\n"))
    with pytest.raises(UserError, match=r"dataset.target=price: .* has no such column"):
        table(unlabelled, target="price", trained=about)
    added = "age,city" + without.removeprefix("city").replace("\n", "\n,")
    found = table(added, target="price", missing="mean", trained=about)
    assert all((part.inputs[:, 0] == 0).all() for part in parts_of(found))


@pytest.mark.parametrize("wrong", ["1O", "n.a.", "1_1", "inf", "-", "1e300"])
def test_a_few_values_that_are_no_numbers_make_no_categories(table, wrong):
    """Neither in the target nor in a column, however many others are there twice."""
    lines = [f"{i % 30},{i % 40 + 0.5}" for i in range(400)]
    for column, places, words in (
        (
            "price",
            [7],
            r"dataset.target=price: 1 of 400 values cannot be read as numbers; the first is {} on line 9\.\n.*\n.*=classification\.$",
        ),
        (
            "price",
            [7, 3],
            "dataset.target=price: 2 of 400 values cannot be read as numbers; the first is {} on line 5",
        ),
        (
            "rooms",
            [7],
            r"Column 'rooms': 1 of 400 values cannot be read as numbers; the first is {} on line 9.\n.*\n.*add the column to dataset.ignore or dataset.categorical\.$",
        ),
    ):
        text = list(lines)
        for i in places:
            rooms, price = lines[i].split(",")
            text[i] = f'"{wrong}",{price}' if column == "rooms" else f'{rooms},"{wrong}"'
        text = "rooms,price\n" + "\n".join(text)
        with pytest.raises(UserError, match=words.format(re.escape(repr(wrong)))) as caught:
            table(text, target="price", val_fraction=0, test_fraction=0)
        assert str(caught.value).count("\n") == 2 and "Write numbers as 1234.5" in str(caught.value)
        changes = {"price": {"kind": "classification"}, "rooms": {"categorical": ["rooms"]}}[column]
        assert table(
            text, target="price", val_fraction=0, test_fraction=0, **changes
        ).table  # as it was typed
        about = table("rooms,price\n" + "\n".join(lines), target="price").description()
        with pytest.raises(
            UserError,
            match=f"{re.escape(repr(wrong))} (on line|in the column '{column}' is not a number)",
        ):
            table(text, target="price", trained=about)


def test_a_column_of_few_kinds_may_have_numbers_among_them(table):
    text = "children,y\n" + "\n".join(
        f"{'3+' if i % 10 == 0 else i % 3},{i % 2}" for i in range(200)
    )
    assert [column["categories"] for column in table(text, target="y").table["columns"]] == [
        ["0", "1", "2", "3+"]
    ]
    assert table(text, target="children").classes == ["0", "1", "2", "3+"]


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        (
            lambda i: f"${i}.00",
            "auto",
            r"40 of 40 values cannot be read as numbers; the first is '\$0.00' on line 2.\nFor ",
        ),
        (
            lambda i: f"c{i % 35}",
            "classification",
            "40 rows have 35 different values, too many for classes.\nChoose another column, or type dataset.kind=",
        ),
        (
            lambda i: f"2024-01-{1 + i % 30:02}",
            "auto",
            "40 rows have 30 different values, too many for classes.\nChoose another column, or type dataset.kind=",
        ),
        (
            lambda i: f"2024-01-{1 + i % 30:02}",
            "regression",
            "40 of 40 values cannot be read as numbers; the first is '2024-01-01' on line 2",
        ),
        (
            lambda i: i / 2,
            "classification",
            "40 .* too many for classes.\nChoose .* type dataset.kind=regression",
        ),
    ],
)
def test_a_target_of_too_many_classes_says_why(table, values, kind, words):
    with pytest.raises(UserError, match=f"^dataset.target=y: {words}"):
        table("x,y\n" + "\n".join(f"{i % 7},{values(i)}" for i in range(40)), target="y", kind=kind)


@pytest.mark.parametrize(
    ("values", "decimal", "line"),
    [(["3,4", "17.61", "2"], ".", 2), (["3.4", "17.5", "2.1"], ",", 2), (["2.5", "3,4"], ".", 3)],
)
def test_two_decimal_signs_in_a_file_are_refused(table, values, decimal, line):
    lines = [f"{values[i % len(values)]};{i % 7};{'ab'[i % 2]}" for i in range(60)]
    with pytest.raises(UserError, match=f"'x': .* cannot be read as numbers; .* on line {line}"):
        table("x;z;y\n" + "\n".join(lines), target="y", delimiter=";", decimal=decimal)


def test_moments_of_any_time_zone_count_in_utc(tmp_path):
    moments = [datetime.datetime(2024, 1, 1 + i, 1) for i in range(20)]
    zoned = pyarrow.array(moments, pyarrow.timestamp("us", "UTC"))
    columns = {"y": ["a", "b"] * 10, "t": zoned.cast(pyarrow.timestamp("us", "Europe/Paris"))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    path = str(tmp_path / "t.parquet")
    [column] = tables.csv(path, "y", val_fraction=0, test_fraction=0).table["columns"]
    seconds = [moment.replace(tzinfo=datetime.timezone.utc).timestamp() for moment in moments]
    assert column["mean"] == pytest.approx(statistics.mean(seconds) / 86_400)


def test_the_loss_of_another_kind_names_both_ways_for_a_table(table):
    text = "x,y\n" + "\n".join(f"{i % 7},{i % 3}" for i in range(90))
    for kind, loss, words in (
        (
            "auto",
            torch.nn.MSELoss(),
            (
                "MSELoss is a loss for regression, but .* is a data set for classification.\n"
                "Type loss=cross_entropy, or dataset.kind=regression for a table."
            ),
        ),
        (
            "regression",
            torch.nn.CrossEntropyLoss(),
            (
                "CrossEntropyLoss is a loss for classification, but .* is a data set for regression.\n"
                r"Type loss=mse \(or l1, huber\), or dataset.kind=classification for a table."
            ),
        ),
    ):
        with pytest.raises(UserError, match=words):
            sample_check.check_fit(None, loss, table(text, target="y", kind=kind))


def test_what_is_constant_is_divided_by_one(table):
    """The deviation of so many times 0.1 is 1e-17, and not 0."""
    lines = [f"0.1,{i % 7},{i % 11}" for i in range(900)]
    data = table("constant,rooms,price\n" + "\n".join(lines), target="price", kind="regression")
    assert data.table["columns"][0]["std"] == 1.0
    assert all(part.inputs[:, 0].abs().max() < 1e-6 for part in parts_of(data))


def test_csv_without_a_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        tables.csv(str(tmp_path / "none.csv"), "y")


# ---- the rule by which the rows are divided ----


@pytest.mark.parametrize("stratified", [True, False])
def test_folds_are_those_of_scikit_learn_but_for_the_shuffle(stratified):
    """Each sample validates once; the sizes, per class too, are KFold's and StratifiedKFold's."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 3, (101,), generator=generator) ** 2
    kind = model_selection.StratifiedKFold if stratified else model_selection.KFold
    expected = [targets[val] for _, val in kind(4).split(targets, targets)]
    given = targets if stratified else len(targets)
    parts = [divide(given, [0.1, 0], 7, folds=4, fold=i) for i in range(4)]
    assert torch.equal(torch.cat([val for _, val, _ in parts]).sort().values, torch.arange(101))
    sizes = [len(val) for _, val, _ in parts]
    assert sorted(sizes) == sorted(map(len, expected)) and max(sizes) - min(sizes) <= 1
    if stratified:
        for label in targets.unique():
            counts = [int((targets[val] == label).sum()) for _, val, _ in parts]
            assert sorted(counts) == sorted(int((part == label).sum()) for part in expected)
    for train, val, test in parts:
        assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(101))
        assert len(test) == 0
    with_test = [divide(given, [0.1, 0.2], 7, folds=4, fold=i) for i in range(4)]
    *_, tested = split_indices(given, [0.1, 0.2], 7)
    assert all(len(test) == len(tested) for _, _, test in with_test)
    assert torch.equal(with_test[0][2], with_test[3][2])
    assert len(torch.cat([*with_test[1][:2], with_test[2][2]]).unique()) == 101


def test_the_rows_of_a_group_stay_in_one_part(table):
    """Also in folds: each group validates in one fold, as by scikit-learn's GroupKFold."""
    frame = pandas.DataFrame({"x": range(120), "who": [f"c{i * i % 23}" for i in range(120)]})
    frame["y"] = frame["x"] % 2
    text = frame.to_csv(index=False)
    seen = []
    for folds in ({}, *({"folds": 3, "fold": fold} for fold in range(3))):
        data = table(text, target="y", split_group="who", **folds)
        groups = [set(frame["who"].iloc[(part.lines - 2).tolist()]) for part in parts_of(data)]
        assert len(set.union(*groups)) == sum(map(len, groups)) == frame["who"].nunique()
        assert sum(len(part) for part in parts_of(data)) == 120
        assert [column["name"] for column in data.table["columns"]] == ["x"]
        seen.append(groups)
    random, *folded = seen
    assert set.union(*(val for _, val, _ in folded)) == folded[0][0] | folded[0][1]
    assert sum(len(val) for _, val, _ in folded) == len(folded[0][0] | folded[0][1])
    assert folded[0][2] == folded[1][2] == random[2]


@pytest.mark.parametrize("write", ["%Y-%m-%d", "%Y%m%d"])
def test_the_last_rows_by_time_are_the_test_part(table, write):
    """Compared with pandas' sort; rows of one day stay together."""
    numbers = [i * 37 % 100 for i in range(200)]
    days = pandas.Timestamp("2020-03-01") + pandas.to_timedelta(numbers, "D")
    frame = pandas.DataFrame({"x": range(200), "day": days, "y": [i % 2 for i in range(200)]})
    text = frame.assign(day=days.strftime(write)).to_csv(index=False)
    data = table(text, target="y", split_time="day", val_fraction=0.25, test_fraction=0.1)
    lines = (frame.sort_values("day", kind="stable").index + 2).tolist()
    for part, expected in zip(
        parts_of(data), (lines[:130], lines[130:180], lines[180:]), strict=True
    ):
        assert set(part.lines.tolist()) == set(expected)
    one_day = frame.assign(day="2020-01-01").to_csv(index=False)
    with pytest.raises(
        UserError, match="200 samples or groups cannot be split with these fractions"
    ):
        table(one_day, target="y", split_time="day")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split_group": "citi"}, "dataset.split_group=citi: .* Did you mean 'city'"),
        ({"split_group": "citi", "split_time": "age"}, "dataset.split_group=citi: .* 'city'"),
        ({"split_time": "city"}, "dataset.split_time=city: .*dates such as 2024-01-31"),
        ({"split_time": "age", "folds": 3}, "split_time: cannot be combined with dataset.folds"),
        ({"folds": 1}, "dataset.folds=1: .* Type a number from 2"),
        (
            {"folds": 3, "fold": 3},
            "dataset.fold=3: expected a whole number of at least 0 and at most 2",
        ),
        ({"fold": 1}, "dataset.fold=1: expected a whole number of at least 0 and at most 0"),
        ({"folds": 200}, "dataset.folds=200: there are 80 samples"),
    ],
)
def test_a_rule_that_cannot_divide_the_rows_is_refused(table, options, words):
    with pytest.raises(UserError, match=f"(?s){words}"):
        table(HEADER + "\n".join(rows()), target="kind", **options)


@pytest.mark.parametrize("rows", ["", ",1\n,2\n"])
def test_a_table_without_a_usable_row_is_refused(tmp_path, rows):
    (tmp_path / "a.csv").write_text(f"x,y\n{rows}")
    with pytest.raises(UserError, match=r"a\.csv: there are no rows"):
        tables.csv(str(tmp_path / "a.csv"), "y", missing="drop")
