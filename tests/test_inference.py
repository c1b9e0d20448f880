"""A trained model after its run: what is loaded, evaluated elsewhere and applied to files is what
was tested.
"""

import csv
import functools
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("pyarrow")  # of stoker[tables]

import stoker as package
from stoker import Trainer
from stoker.data import datasets, tables
from stoker.data.datasets import Data, TensorSplit
from stoker.data.description import is_description
from stoker.data.loader import DeviceLoader
from stoker.data.splits import split_indices
from stoker.runs import card, exporting, inference
from stoker.runs.result import RunResult
from stoker.trainer.errors import TrainingError, UserError

ROOT = Path(__file__).resolve().parent.parent
TOWNS = ("Köln", "Rom", "Ulm")
JOBS = {
    "digits": ["epochs=2", "ema=0.9", "model.hidden=[16]"],
    "frozen": [
        "epochs=3",
        "ema=0.9",
        "model=whitened_cnn",
        "model.widths=[4,8]",
        "+callbacks.whiten._target_=stoker.models.whitened_cnn.Whiten",
        "+callbacks.whiten.bias_epochs=1",
        "optimizer.lr=1e-2",
    ],
    "folder": [
        "dataset=image_folder",
        "dataset.root=images",
        "dataset.cache=false",
        "batch_size=8",
        "model=cnn",
    ]
    + ["epochs=3", "model.channels=[8]", "dataset.split_seed=1"],
    "prices": [
        "dataset=csv",
        "dataset.path=houses.csv",
        "dataset.target=price",
        "dataset.ignore=[id,grade]",
        "loss=mse",
    ]
    + ["epochs=5", "batch_size=32", "model.hidden=[16]", "eval_batch_size=64"],
    "grades": [
        "dataset=csv",
        "dataset.path=houses.csv",
        "dataset.target=grade",
        "dataset.ignore=[id,price]",
        "epochs=3",
    ]
    + ["model=linear", "batch_size=32", "dataset.missing=mean", "dataset.resident=false"],
}


def write_table(path, rows, columns=("id", "age", "town", "size", "price", "grade"), delimiter=","):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows([row[name] for name in columns] for row in rows)


def houses(n, seed=0):
    chosen = random.Random(seed)
    for i in range(n):
        row = {"id": i, "age": f"{chosen.gauss(40, 12):.3f}", "town": chosen.choice(TOWNS)}
        row["size"] = f"{chosen.gauss(1e6, 5):.3f}"
        row["price"] = (
            f"{250000 + 3000 * (float(row['age']) - 40) + 5000 * TOWNS.index(row['town']):.2f}"
        )
        yield row | {"grade": "high" if float(row["price"]) > 255000 else "low"}


def write_images(folder, names, count=20, size=8, seed=0, bright=0):
    """PNG files of noise about a level that is the class's own."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            noise = torch.randint(0, 60, (size, size, 3), generator=generator) + 60 * (
                "bird",
                "cat",
                "dog",
            ).index(name)
            pixels = (noise + bright).clamp(0, 255).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{i:02}.png")


@pytest.fixture(scope="module")
def runs(forks, tmp_path_factory):
    """A folder with a finished run of each of JOBS, and the data that they have had."""
    folder = tmp_path_factory.mktemp("runs")
    write_images(folder / "images", ("bird", "cat", "dog"))
    write_table(folder / "houses.csv", houses(300))
    for name, job in JOBS.items():
        done = forks.run(folder, *job, f"run_dir={name}", "device=cpu")
        assert done.code == 0, done.err
    return folder


def result(runs, name):
    return json.loads((runs / name / "result.json").read_text(encoding="utf-8"))


def asked(forks, folder, *arguments):
    """What a command has printed."""
    done = forks.run(folder, *arguments, "device=cpu")
    assert done.code == 0, done.err
    return done.out


def evaluated(forks, folder, *arguments):
    """{"loss": ..., "acc": ...} as task=evaluate prints them."""
    words = asked(forks, folder, "task=evaluate", *arguments).splitlines()[-1].split()
    return {name: float(value) for name, value in zip(words[1::2], words[2::2], strict=True)}


def refused(forks, folder, *arguments, code=2):
    """The message of a command that is refused, and that has changed nothing there."""
    before = sorted(folder.rglob("*"))
    done = forks.run(folder, *arguments)
    names = ("out", "err")
    assert done.code == code and "Traceback" not in done.err and len(done.err.splitlines()) <= 3, (
        done.err
    )
    assert [path for path in sorted(folder.rglob("*")) if path.name not in names] == [
        path for path in before if path.name not in names
    ]
    return done.err


def in_place(runs, name):
    """The data set of a run, as its own training had it."""
    if name in ("digits", "frozen"):
        return datasets.digits()
    if name == "folder":
        from stoker.data.images import image_folder

        return image_folder(str(runs / "images"), cache=False, split_seed=1)
    target, other = ("price", "grade") if name == "prices" else ("grade", "price")
    return tables.csv(
        str(runs / "houses.csv"),
        target,
        ignore=["id", other],
        missing="mean" if name == "grades" else "error",
    )


def raw_test_inputs(runs, name):
    """The inputs of the test split as a `Trained` model takes them."""
    data = in_place(runs, name)
    if data.table is None:
        return data.test[list(range(len(data.test)))][0]
    parts = split_indices(
        torch.tensor([row["grade"] != "high" for row in houses(300)]).long()
        if name == "grades"
        else 300,
        [0.1, 0.2],
        0,
    )
    rows = list(houses(300))
    return torch.tensor(
        [
            [float(row["age"]), *(float(row["town"] == town) for town in TOWNS), float(row["size"])]
            for row in (rows[i] for i in parts[2].tolist())
        ],
        dtype=torch.float64,
    )


# load


@pytest.mark.parametrize("name", JOBS)
def test_what_is_loaded_is_what_was_tested(runs, name):
    """The same outputs, bit for bit, as the Trainer's on the data set's own test split, and the
    result of the run.
    """
    model, data = package.load(runs / name), in_place(runs, name)
    outputs = model(raw_test_inputs(runs, name))
    assert not model.training and not outputs.requires_grad
    weights = load_file(
        runs / name / "model.safetensors"
    )  # those that were tested, the average of the EMA
    assert all(torch.equal(weights[key], value) for key, value in model.module.state_dict().items())
    with Trainer(model.module, device="cpu", channels_last=False) as trainer:
        expected = trainer.predict(DeviceLoader(data, "test", 512))
    if name == "prices":
        expected = expected.double() * data.target_scale + data.target_mean
        prices = data.test.targets.double() * data.target_scale + data.target_mean
        assert (outputs - prices).square().mean().item() == pytest.approx(
            result(runs, name)["test/mse"], rel=1e-6
        )
    else:
        share = (outputs.argmax(1) == data.test.targets).double().mean().item()
        assert share == result(runs, name)["test/acc"] and model.classes == data.classes
    assert torch.equal(outputs, expected)


def test_an_export_holds_what_was_tested_after_a_callback_has_frozen_it(runs, tmp_path):
    model = package.load(runs / "frozen")
    inputs = raw_test_inputs(runs, "frozen")
    output = tmp_path / "model.pt2"
    exporting.export(model, runs / "frozen", "torch_export", inputs[:64], "digits", output)
    exported = dict(torch.export.load(output).module().state_dict())
    tested = load_file(runs / "frozen" / "model.safetensors")
    assert all(torch.equal(exported[f"module.{name}"], tested[name]) for name in tested)


@pytest.mark.slow
def test_two_lines_of_python_need_no_data_and_no_hydra(runs, tmp_path):
    """From another folder, and with the data set gone; `import stoker` itself costs no torch."""
    shutil.copytree(runs / "folder", tmp_path / "run")
    code = """
import sys, stoker
assert "torch" not in sys.modules
model = stoker.load("run")
import torch
assert model(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).shape == (2, 3) and model.classes == ["bird", "cat", "dog"]
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_loading_leaves_the_process_as_it_was(runs):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    package.load(runs / "digits")
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert torch.are_deterministic_algorithms_enabled()


def test_inputs_of_another_type_or_shape_are_refused_with_what_is_wanted(runs):
    digits, prices = package.load(runs / "digits"), package.load(runs / "prices")
    pixels = datasets.digits().test.inputs[:1]
    takes = {
        digits: "uint8 pixels of shape (N, 1, 8, 8), not ",
        prices: "a tensor of shape (N, 5), not ",
    }
    for model, inputs, given in (
        (digits, pixels.float(), "torch.float32 of shape [1, 1, 8, 8]."),
        (digits, pixels[0], "torch.uint8 of shape [1, 8, 8]."),
        (digits, pixels.numpy(), "ndarray."),
        (prices, torch.zeros(1, 4), "torch.float32 of shape [1, 4]."),
        (prices, {"town": "Ulm"}, "dict."),
    ):
        with pytest.raises(UserError) as caught:
            model(inputs)
        assert takes[model] in str(caught.value) and given in str(caught.value)
    assert torch.equal(digits(torch.as_tensor(pixels.numpy())), digits(pixels))


def test_only_what_is_trusted_is_built(runs, tmp_path, monkeypatch):
    (tmp_path / "nets_of_mine.py").write_text(
        "from stoker.models.mlp import MLP\n\nclass Net(MLP):\n    pass\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(runs / "digits", tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    (tmp_path / "run" / "config.yaml").write_text(
        config.replace("stoker.models.mlp.MLP", "nets_of_mine.Net"), encoding="utf-8"
    )
    with pytest.raises(
        UserError,
        match=r'(?s)run=.*nets_of_mine\.Net: not trusted.*trusted=\["nets_of_mine"\]\.',
    ):
        package.load(tmp_path / "run")
    assert "nets_of_mine" not in sys.modules
    pixels = datasets.digits().test.inputs
    found = package.load(tmp_path / "run", trusted=["nets_of_mine"])
    assert torch.equal(found(pixels), package.load(runs / "digits")(pixels))
    with pytest.raises(UserError, match="Net: not trusted"):  # it was for that call
        package.load(tmp_path / "run")
    typed = RunResult.read(runs / "digits")
    typed.overrides = ["model._target_=nets_of_mine.Net"]
    weights = dict(found.module.state_dict())
    card.write(tmp_path / "run", weights, found.module, datasets.digits(), typed)
    text = (tmp_path / "run" / "model.md").read_text(encoding="utf-8")
    [call] = re.findall(
        r"model = (stoker\.load\(.*?\))  #", text
    )  # as the card says that it is loaded
    assert torch.equal(eval(call, {"stoker": package})(pixels), found(pixels))


def test_a_run_that_has_not_finished_is_said_to_be_on_its_way(runs, tmp_path, caplog):
    shutil.copytree(runs / "digits", tmp_path / "run")
    package.load(tmp_path / "run")
    assert not caplog.text
    (tmp_path / "run" / "result.json").unlink()
    package.load(tmp_path / "run")
    step = result(runs, "digits")["best"]["step"]
    assert f"run has not finished. Using step_{step:08d}.ckpt" in caplog.text, caplog.text
    assert caplog.text.count("\n") == 1


def test_folders_that_are_no_runs(runs, tmp_path):
    for folder in (tmp_path / "no", tmp_path):
        with pytest.raises(UserError, match="not a run directory"):
            package.load(folder)
    shutil.copytree(runs / "digits", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TrainingError, match="are damaged"):
        package.load(tmp_path / "run")


def wrong(*keys, value):
    def change(about):
        place = about
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


WRONG = {
    "images": [
        wrong("in_shape", value=[10**6, 10**6, 3]),
        wrong("in_shape", value=[1.0, 8, 8]),
        wrong("in_shape", value=[]),
        wrong("num_classes", value=True),
        wrong("classes", value=["a"]),
        wrong("classes", value=[1] * 10),
        wrong("mean", value=[float("nan")]),
        wrong("mean", value=[1.0, 2.0]),
        wrong("mean", value=[10**400]),
        wrong("dtype", value="load"),
        wrong("dtype", value="__dict__"),
        wrong("dtype", value=3),
        wrong("kind", value=["classification"]),
        wrong("dataset", value=None),
        wrong("table", value=[]),
        dict.clear,
    ],
    "table": [
        wrong("table", "columns", value=[{"name": "a"}]),
        wrong("table", "columns", 0, value={"name": "a", "mean": "0", "std": 1.0}),
        wrong("table", "columns", 1, "categories", value="abc"),
        wrong("table", "columns", 1, "categories", value=[1, 2, 3]),
        wrong("table", "columns", 0, "name", value={}),
        wrong("table", "delimiter", value=None),
        wrong("classes", value=["a"]),
    ],
}


def test_nonsense_in_a_description_is_noticed(runs):
    for kind, name in (("images", "digits"), ("table", "prices")):
        about = in_place(runs, name).description()
        assert is_description(about) and is_description(json.loads(json.dumps(about)))
        for change in WRONG[kind]:
            other = json.loads(json.dumps(about))
            change(other)
            assert not is_description(other), other


# predict


def predicted(forks, runs, *arguments, output="out.jsonl"):
    asked(forks, runs, "task=predict", *arguments, f"output={output}")
    text = (runs / output).read_text(encoding="utf-8")
    (runs / output).unlink()
    return (
        [json.loads(line) for line in text.splitlines()]
        if output.endswith("jsonl")
        else list(csv.DictReader(io.StringIO(text)))
    )


@pytest.mark.slow
def test_a_folder_of_images_gets_the_classes_that_the_model_gives_them(forks, runs):
    """In the order of their names, by an image, by a folder, and in both forms of file."""
    from stoker.data.images import decode_image

    rows = predicted(forks, runs, "run=folder", "input=images", "eval_batch_size=7")
    files = sorted((runs / "images").rglob("*.png"))
    assert [row["file"] for row in rows] == [str(path.relative_to(runs)) for path in files]
    model = package.load(runs / "folder")
    shares = model(
        torch.stack([decode_image(path, (8, 8), 3, resize=True) for path in files])
    ).softmax(1)
    found = torch.tensor([list(row["probabilities"].values()) for row in rows])
    torch.testing.assert_close(found, shares, rtol=1e-6, atol=1e-7)
    assert [row["class"] for row in rows] == [model.classes[i] for i in shares.argmax(1)]
    assert all(row["probability"] == max(row["probabilities"].values()) for row in rows)
    assert list(rows[0]["probabilities"]) == model.classes
    [one] = predicted(forks, runs, "run=folder", f"input={files[3].relative_to(runs)}")
    assert one["file"] == rows[3]["file"] and one["class"] == rows[3]["class"]
    cells = predicted(
        forks, runs, "run=folder", "input=images", "eval_batch_size=7", output="out.csv"
    )
    assert [row["class"] for row in cells] == [row["class"] for row in rows]
    assert [float(row["P(dog)"]) for row in cells] == [row["probabilities"]["dog"] for row in rows]
    printed = asked(forks, runs, "task=predict", "run=folder", "input=images", "eval_batch_size=7")
    assert [json.loads(line) for line in printed.splitlines()] == rows


def test_images_of_another_size_are_resized(forks, runs, tmp_path):
    from PIL import Image

    write_images(tmp_path / "large", ["cat"], count=2, size=37)
    rows = predicted(forks, runs, "run=folder", f"input={tmp_path / 'large'}")
    with Image.open(tmp_path / "large" / "cat" / "01.png") as image:
        pixels = torch.as_tensor(
            list(image.resize((8, 8), Image.Resampling.BILINEAR).tobytes()), dtype=torch.uint8
        )
    shares = package.load(runs / "folder")(pixels.view(1, 8, 8, 3).permute(0, 3, 1, 2)).softmax(1)[
        0
    ]
    torch.testing.assert_close(
        torch.tensor(list(rows[1]["probabilities"].values())), shares, rtol=1e-6, atol=1e-7
    )


def test_the_rows_of_a_table_get_the_trainers_own_predictions(forks, runs):
    """Whatever else is in the file, with and without the target; the numbers are of the data's own
    units.
    """
    data = in_place(runs, "prices")
    model = package.load(runs / "prices")
    rows = list(houses(300))
    write_table(runs / "all.csv", rows[::-1], ("size", "town", "age"), delimiter=";")
    first = predicted(forks, runs, "run=prices", "input=houses.csv")
    err = refused(forks, runs, "task=predict", "run=prices", "input=all.csv")
    [typed] = re.findall(r"'(dataset\.delimiter=.*)'", err)  # within the shell's own quotes
    second = predicted(forks, runs, "run=prices", "input=all.csv", typed)
    assert [row["line"] for row in first] == list(range(2, 302))
    assert [row["value"] for row in second[::-1]] == pytest.approx(
        [row["value"] for row in first], rel=1e-7
    )
    parts = split_indices(300, [0.1, 0.2], 0)
    with Trainer(model.module, device="cpu", channels_last=False) as trainer:
        expected = (
            trainer.predict(DeviceLoader(data, "test", 64)).double() * data.target_scale
            + data.target_mean
        )
    found = torch.tensor([first[i]["value"] for i in parts[2].tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, expected[:, 0], rtol=1e-7, atol=0)
    cells = predicted(forks, runs, "run=prices", "input=houses.csv", output="out.csv")
    assert [float(row["value"]) for row in cells] == [row["value"] for row in first]
    rows = predicted(forks, runs, "run=grades", "input=houses.csv", output="out.csv")
    assert list(rows[0]) == ["line", "class", "probability", "P(high)", "P(low)"]


ROWS = [{"age": "40", "town": "Rom", "size": "1e6"}, {"age": "", "town": "Rom", "size": "1e6"}]


@pytest.mark.slow
def test_what_a_row_lacks_is_handled_as_in_the_training(forks, runs):
    write_table(runs / "gaps.csv", ROWS, ("age", "town", "size"))
    err = refused(forks, runs, "task=predict", "run=prices", "input=gaps.csv", "output=o.csv")
    assert (
        "gaps.csv, line 3: the column 'age' has no value." in err and "dataset.missing=drop" in err
    )
    [row] = predicted(forks, runs, "run=prices", "input=gaps.csv", "dataset.missing=drop")
    assert row["line"] == 2
    filled = predicted(
        forks, runs, "run=grades", "input=gaps.csv"
    )  # as that run has filled them in: by the mean
    model = package.load(runs / "grades")
    mean = model.mean[0].item()
    write_table(
        runs / "gaps.csv", [ROWS[0], ROWS[1] | {"age": repr(mean)}], ("age", "town", "size")
    )
    assert predicted(forks, runs, "run=grades", "input=gaps.csv") == filled


def test_what_a_row_lacks_can_be_filled_in_where_the_training_lacked_nothing(forks, runs):
    """By the mean of the training's rows, as the advice of the refusal says."""
    write_table(runs / "gaps.csv", ROWS, ("age", "town", "size"))
    filled = predicted(forks, runs, "run=prices", "input=gaps.csv", "dataset.missing=mean")
    mean = package.load(runs / "prices").mean[0].item()
    write_table(
        runs / "gaps.csv", [ROWS[0], ROWS[1] | {"age": repr(mean)}], ("age", "town", "size")
    )
    assert predicted(forks, runs, "run=prices", "input=gaps.csv") == filled


def test_a_table_of_one_feature_needs_no_second_column(tmp_path):
    """For a run of that table; any other table of one column has another delimiter."""
    (tmp_path / "two.csv").write_text(
        "x,y\n" + "".join(f"{i},{2 * i + 0.5}\n" for i in range(30)), encoding="utf-8"
    )
    (tmp_path / "one.csv").write_text("x\n3\n\n4\n", encoding="utf-8")
    (tmp_path / "other.csv").write_text("x;y\n3;4\n", encoding="utf-8")
    model = inference.Trained(
        torch.nn.Linear(1, 1), tables.csv(str(tmp_path / "two.csv"), "y").description()
    )
    both = list(inference.predict(model, tmp_path / "two.csv"))[3:5]
    assert list(inference.predict(model, tmp_path / "one.csv")) == [
        both[0] | {"line": 2},
        both[1] | {"line": 3},
    ]
    with pytest.raises(UserError, match="x: .*other.csv has no such column"):
        list(inference.predict(model, tmp_path / "other.csv"))


def test_the_row_whose_outputs_are_not_finite_is_named(runs, tmp_path):
    model = package.load(runs / "prices")
    model.module = torch.nn.Sequential(torch.nn.Linear(5, 1), Odd())
    write_table(tmp_path / "t.csv", houses(5), ("age", "town", "size"))
    with pytest.raises(TrainingError, match=r"t\.csv, line 5: the model returns non-finite values"):
        list(inference.predict(model, tmp_path / "t.csv"))


def test_outputs_that_are_no_scores_are_given_as_they_are(runs):
    """Also where the targets have units, which other outputs have not."""
    model = package.load(runs / "prices")
    model.module = Both()
    inputs = torch.zeros(2, 5, dtype=torch.float64)
    assert torch.equal(model(inputs)["all"], ((inputs - model.mean) / model.std).float())
    row = next(inference.predict(model, runs / "houses.csv"))
    assert row.keys() == {"line", "all", "first"} and row["first"] == row["all"][:1]


class Both(torch.nn.Module):
    def forward(self, inputs):
        return {"all": inputs, "first": inputs[:, :1]}


class Odd(torch.nn.Module):
    """No finite number for the fourth row."""

    def forward(self, inputs):
        return inputs / (torch.arange(len(inputs)) != 3).float().unsqueeze(1)


def test_an_unknown_category_is_none_of_them(tmp_path, runs, caplog):
    """Whatever the size of the batches, the first of a column is named."""
    about = in_place(runs, "prices").description()
    path = tmp_path / "x.csv"
    path.write_text("town,age,size\nRom,40,7\nOslo,41,7\nBonn,42,7\nOslo,43,7\n", encoding="utf-8")
    for size in (1, 3, 10):
        caplog.clear()
        batches = list(tables.read_batches(str(path), about["table"], size))
        assert [line for lines, _ in batches for line in lines] == [2, 3, 4, 5]
        inputs = torch.cat([inputs for _, inputs in batches])
        towns = {"Rom": [0.0, 1.0, 0.0], "Oslo": [0.0] * 3, "Bonn": [0.0] * 3}
        expected = [
            [age, *towns[town], 7.0]
            for town, age in (("Rom", 40), ("Oslo", 41), ("Bonn", 42), ("Oslo", 43))
        ]
        assert inputs.tolist() == expected and inputs.dtype == torch.float64
        [record] = caplog.records
        assert record.getMessage() == (
            f"{path}, line 3: 'Oslo' in the column 'town' did not occur in the training data; "
            "such values are treated as unknown."
        )


WRONG_TABLES = {
    "age,town\n1,Rom\n": "has no such column",
    "age,town,size\n1,Rom,1\n2,Rom,x\n": "line 3: 'x' in the column 'size' is not a number",
    "age,town,size\n1,Rom,inf\n": "line 2: 'inf' in the column 'size' is not a number",
    "age,town,size\n1,Rom\n": "Row #2: Expected 3 columns, got 2",
    "age,town,size\n": "the file has no rows",
    "": "Empty CSV file",
    "age,age,town,size\n1,1,Rom,1\n": "the same name twice",
    "age;town;size\n1;Rom;1\n": "no such column",
    "a" * 200_000 + ",town,size\n": "has no such column",
}


def test_tables_that_cannot_be_read_are_named_with_their_line(runs, tmp_path):
    model = package.load(runs / "prices")
    for i, (text, message) in enumerate(WRONG_TABLES.items()):
        (tmp_path / f"wrong{i}.csv").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=f"wrong{i}.csv.*{re.escape(message)}"):
            list(inference.predict(model, tmp_path / f"wrong{i}.csv"))


def test_a_broken_image_is_named_or_left_out(forks, runs, tmp_path):
    shutil.copytree(runs / "images" / "cat", tmp_path / "cats" / "cat")
    (tmp_path / "cats" / "cat" / "05.png").write_bytes(b"no image")
    (tmp_path / "cats" / "notes.txt").write_text("no image either")
    (tmp_path / "cats" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    arguments = (
        "task=predict",
        f"run={runs / 'folder'}",
        "input=cats",
        "output=o.jsonl",
        "device=cpu",
    )
    err = refused(forks, tmp_path, *arguments)
    assert "05.png: this image cannot be read" in err and "dataset.on_bad_sample=skip" in err
    done = forks.run(tmp_path, *arguments, "dataset.on_bad_sample=skip")
    assert done.code == 0 and "images that cannot be read, such as cats" in done.err
    [line] = [line for line in done.err.splitlines() if "files or folders were skipped" in line]
    assert "1 of type '.png'" in line and "1 of type '.txt'" in line
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert (
        len(rows) == 19
        and "19 rows" in done.out
        and not any("05.png" in row["file"] for row in rows)
    )
    for path in (tmp_path / "cats" / "cat").iterdir():
        path.write_bytes(b"no image")
    err = refused(
        forks, tmp_path, *arguments[:-2], "output=p.csv", "device=cpu", "dataset.on_bad_sample=skip"
    )
    assert "input=cats: no readable image was found" in err


def test_what_cannot_be_looked_at_or_written_to_is_refused(forks, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs)
    (tmp_path / "empty").mkdir()
    folder, prices = (package.load(runs / name) for name in ("folder", "prices"))
    for model, path, message in (
        (folder, "nowhere", "nowhere: this image cannot be read"),
        (folder, tmp_path / "empty", "no readable image was found"),
        (
            folder,
            "houses.csv",
            "it is damaged, or its format is not one of JPEG, PNG, PPM, BMP, TIFF, WEBP, GIF)",
        ),
        (prices, "images", "input=images: cannot be read as a table"),
        (prices, "nowhere.csv", "input=nowhere.csv: no such file"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            list(inference.predict(model, path))
    for output, message in (
        ("houses.csv", "this file already exists"),
        ("no/o.csv", "the folder for this file does not exist"),
        ("images", "this file already exists"),
        ("o.txt", "does not end in .csv or .jsonl"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            inference.check_output(output, (".csv", ".jsonl"))
    assert "Type input=" in refused(forks, runs, "task=predict", "run=prices")


def test_no_file_that_is_there_is_replaced(forks, runs):
    """The input, another table, a run's own files; but a run is exported again into its own
    place.
    """
    best = next(iter((runs / "prices" / "checkpoints").iterdir()))
    outputs = {
        "predict": ["houses.csv", "prices/metrics.jsonl"],
        "export": [best.relative_to(runs), "houses.csv"],
    }
    before = {
        path: path.read_bytes()
        for path in runs.rglob("*")
        if path.is_file() and path.name not in ("out", "err")
    }
    for task, names in outputs.items():
        own = ["input=houses.csv"] if task == "predict" else ["format=torch_export"]
        for name in names:
            err = refused(forks, runs, f"task={task}", "run=prices", *own, f"output={name}")
            assert "this file already exists" in err and "Choose a different output" in err
    assert all(path.read_bytes() == contents for path, contents in before.items())
    for _ in range(2):
        shown = asked(forks, runs, "task=export", "run=prices", "format=torch_export")
        assert "export   prices/model.pt2\ntakes    inputs: float64 of shape (N, " in shown
        assert "\nreturns  outputs: predicted values, float64 of shape (N, 1)\n" in shown


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder where nobody can write")
def test_an_output_that_cannot_be_written_is_named_as_it_was_typed(runs):
    with pytest.raises(OSError) as caught:
        inference.write(iter([]), "/proc/x.csv")
    assert caught.value.filename == "/proc/x.csv"


@pytest.mark.slow
def test_a_key_is_for_its_task(forks, runs):
    for arguments, message in {
        (
            "task=predict",
            "run=prices",
            "input=x",
            "epochs=3",
        ): "epochs: task=predict uses the run's settings",
        ("task=predict", "run=prices", "input=x", "split=val"): "needs either input= or split=",
        ("task=evaluate", "run=prices", "input=x"): "input=x applies only to task=predict.",
        ("format=onnx",): "format=onnx applies only to task=export.",
        (
            "task=predict",
            "run=folder",
            "input=x",
            "dataset.missing=mean",
        ): "dataset.missing: this key does not apply to this kind of input.",
        (
            "task=predict",
            "run=prices",
            "input=x",
            "dataset.missing=mean",
            "dataset.on_bad_sample=skip",
        ): "dataset.on_bad_sample: this key does not apply to this kind of input.",
        (
            "task=export",
            "run=prices",
            "format=onnx",
            "device=cuda",
        ): "device=cuda: models are exported on the CPU",
        ("task=evaluate", "run=prices", "split=trian"): "Did you mean 'train'?",
    }.items():
        assert message in refused(forks, runs, *arguments), arguments


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupted_prediction_leaves_nothing(forks, runs, tmp_path):
    write_table(tmp_path / "long.csv", houses(200_000))
    arguments = (
        "task=predict",
        f"run={runs / 'prices'}",
        "input=long.csv",
        "output=o.csv",
        "device=cpu",
    )
    when = {"signal": signal.SIGINT, "delay": 0.3, "watch": ".o.csv.*.part"}
    done = forks.run(tmp_path, *arguments, signals=[when])
    assert done.code == 130 and "Traceback" not in done.err and "interrupted" in done.err, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "long.csv", "out"]


PEAK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import stoker
from stoker.runs import inference
model = stoker.load(sys.argv[2])
for _ in inference.predict(model, sys.argv[3], batch_size=64): pass
for path in sys.argv[3:]:
    for _ in inference.predict(model, path, batch_size=64): pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="resource is of POSIX")
def test_ten_times_the_rows_need_no_more_memory(runs, tmp_path):
    """In KiB, after 2,000 rows and after 20,000: as much, but for noise."""
    for count in (2_000, 20_000):
        write_table(tmp_path / f"{count}.csv", houses(count))
    files = [str(tmp_path / "2000.csv"), str(tmp_path / "20000.csv")]
    command = [sys.executable, "-c", PEAK, str(ROOT), str(runs / "prices"), *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = map(int, done.stdout.split())
    assert second - first < 1024, (first, second)  # 18,000 rows as lists of floats are 5,000 KiB


def test_no_more_than_a_batch_is_read_ahead(tmp_path):
    """The rows of a table and the images of a folder: counted where they are made."""
    seen = []

    class Noting(torch.nn.Module):
        def forward(self, inputs):
            seen.append(len(inputs))
            return inputs[:, :1]

    write_table(tmp_path / "t.csv", houses(100))
    about = tables.csv(str(tmp_path / "t.csv"), "price", ignore=["grade", "town"]).description()
    rows = inference.predict(inference.Trained(Noting(), about), tmp_path / "t.csv", batch_size=8)
    for _ in range(9):
        next(rows)
    assert seen == [8, 8]


# evaluate elsewhere


@pytest.mark.slow
def test_the_parts_of_its_own_data(forks, runs):
    for name in JOBS:
        found = evaluated(forks, runs, f"run={name}", *(["split=test"] if name == "digits" else []))
        assert found == {key: result(runs, name)[f"test/{key}"] for key in found}
    found = evaluated(forks, runs, "run=digits", "split=train")
    data, model = in_place(runs, "digits"), package.load(runs / "digits")
    assert (
        found["acc"]
        == (model(data.train.inputs).argmax(1) == data.train.targets).double().mean().item()
    )
    assert (
        result(runs, "digits")["best"]["value"]
        == evaluated(forks, runs, "run=digits", "split=val")["acc"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 12])
def test_other_images_have_the_runs_mean_its_size_and_its_classes_by_name(
    forks, runs, tmp_path, size
):
    """Two of the three classes, which are others' numbers there, brighter: as the model itself sees
    them.
    """
    from stoker.data.images import decode_image

    write_images(tmp_path / "two", ("cat", "dog"), size=size, seed=1, bright=20)
    every = ("split=all",)
    found = evaluated(forks, runs, "run=folder", f"dataset.root={tmp_path / 'two'}", *every)
    model = package.load(runs / "folder")
    files = sorted((tmp_path / "two").rglob("*.png"))
    outputs = model(torch.stack([decode_image(path, (8, 8), 3, resize=True) for path in files]))
    targets = torch.tensor([model.classes.index(path.parent.name) for path in files])
    assert found["acc"] == (outputs.argmax(1) == targets).double().mean().item() < 1
    assert found["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6
    )
    (tmp_path / "two" / "cat").rename(tmp_path / "two" / "gnat")
    err = refused(forks, runs, "task=evaluate", "run=folder", f"dataset.root={tmp_path / 'two'}")
    assert (
        "the run has no class 'gnat'" in err
        and "bird, cat, dog" in err
        and "each class is a folder" in err
    )


@pytest.mark.slow
def test_a_renamed_copy_of_the_images_that_is_in_order_again_gives_the_same_numbers(
    forks, runs, tmp_path
):
    """A copy with the same names is the same data, to the last digit; so is one as another data
    set.
    """
    shutil.copytree(runs / "images", tmp_path / "copy")
    expected = evaluated(forks, runs, "run=folder")
    assert evaluated(forks, runs, "run=folder", f"dataset.root={tmp_path / 'copy'}") == expected
    typed = ("dataset=image_folder", f"dataset.root={tmp_path / 'copy'}", "dataset.split_seed=1")
    assert evaluated(forks, runs, "run=folder", *typed, "dataset.cache=false") == expected


def test_another_table_is_read_by_the_columns_and_units_of_the_run(forks, runs, tmp_path):
    rows = [
        row | {"town": "Oslo" if i % 9 == 0 else row["town"]}
        for i, row in enumerate(houses(80, seed=5))
    ]
    write_table(tmp_path / "other.csv", rows, ("price", "town", "size", "age"))
    every = ("split=all",)
    found = evaluated(
        forks,
        runs,
        "run=prices",
        f"dataset.path={tmp_path / 'other.csv'}",
        "dataset.ignore=[]",
        *every,
    )
    values = [
        row["value"]
        for row in predicted(forks, runs, "run=prices", f"input={tmp_path / 'other.csv'}")
    ]
    errors = torch.tensor(values, dtype=torch.float64) - torch.tensor(
        [float(row["price"]) for row in rows]
    )
    assert found["mse"] == pytest.approx(errors.square().mean().item(), rel=1e-5)
    assert found["mae"] == pytest.approx(errors.abs().mean().item(), rel=1e-5)
    write_table(
        tmp_path / "other.csv",
        [row | {"grade": row["grade"].replace("low", "lower")} for row in houses(80)],
    )
    err = refused(
        forks, runs, "task=evaluate", "run=grades", f"dataset.path={tmp_path / 'other.csv'}"
    )
    assert "the run has no class 'lower'" in err and "Did you mean 'low'?" in err


def test_any_number_of_rows_of_any_classes_can_be_evaluated(forks, runs, tmp_path):
    """Fewer than a batch of the training, all of one class, without a column that the training has
    ignored.
    """
    rows = [row for row in houses(100, seed=7) if row["grade"] == "high"][:9]
    write_table(tmp_path / "few.csv", rows, ("age", "town", "size", "grade", "price"))
    every = (f"dataset.path={tmp_path / 'few.csv'}", "split=all")
    found = evaluated(forks, runs, "run=grades", *every)
    given = predicted(forks, runs, "run=grades", f"input={tmp_path / 'few.csv'}")
    assert found["acc"] == sum(row["class"] == "high" for row in given) / 9
    write_table(tmp_path / "few.csv", [rows[0]] * 9, ("age", "town", "size", "grade", "price"))
    found = evaluated(forks, runs, "run=prices", *every)
    value = predicted(forks, runs, "run=prices", f"input={tmp_path / 'few.csv'}")[0]["value"]
    assert found["mae"] == pytest.approx(abs(value - float(rows[0]["price"])), rel=1e-4)


def test_a_folder_of_one_class_can_be_evaluated(forks, runs, tmp_path):
    write_images(tmp_path / "one", ("dog",), seed=3)
    every = ("split=all",)
    done = forks.run(
        runs,
        "task=evaluate",
        "run=folder",
        f"dataset.root={tmp_path / 'one'}",
        *every,
        "device=cpu",
    )
    assert done.err == ""
    found = {"acc": float(done.out.split()[-1])}
    rows = predicted(forks, runs, "run=folder", f"input={tmp_path / 'one'}")
    assert found["acc"] == sum(row["class"] == "dog" for row in rows) / len(rows)


def test_data_that_has_changed_is_told_from_the_runs(forks, runs, tmp_path):
    """One row more, and other rows are its test split, of which the run was trained on most."""
    path = f"dataset.path={tmp_path / 'more.csv'}"
    for count, says in ((300, ""), (301, "more: the model was trained on different data")):
        write_table(tmp_path / "more.csv", houses(count))
        done = forks.run(runs, "task=evaluate", "run=prices", path, "device=cpu")
        assert done.code == 0 and says in done.err and bool(says) == bool(done.err), done.err


def test_only_the_part_that_is_evaluated_is_counted(forks, runs):
    for split, count in (("train", 1259), ("val", 179), ("test", 359)):
        out = asked(forks, runs, "task=evaluate", "run=digits", f"split={split}")
        assert out.startswith(
            f"data     digits: {count:,} {split} samples of 1x8x8 numbers, 10 classes; "
        )
    out = asked(forks, runs, "task=evaluate", "run=digits", "split=all")
    assert out.startswith("data     digits: 1,797 train samples of 1x8x8") and out.splitlines()[
        -1
    ].startswith("all      loss ")


def test_what_an_evaluation_streams_is_as_typed_or_else_as_it_had_to_be(forks, runs):
    for arguments, why in {
        (
            "run=digits",
            "dataset.resident=false",
            "dataset.workers=1",
        ): "streamed with 1 worker, as requested",
        ("run=grades",): "streamed with 0 workers, as requested",
        ("run=grades", "dataset.resident=auto"): "resident on cpu, ",
    }.items():
        out = asked(forks, runs, "task=evaluate", *arguments).splitlines()
        assert why in out[0], arguments
        assert (
            float(out[-1].split()[-1])
            == result(runs, arguments[0].removeprefix("run="))["test/acc"]
        )


def test_other_data_that_does_not_fit_is_refused(forks, runs):
    for arguments, message in {
        (
            "run=digits",
            "dataset=synthetic",
        ): "inputs of shape [20], but the model was trained on inputs of shape [1, 8, 8]",
        (
            "run=prices",
            "dataset=digits",
        ): "digits is data of kind classification, but the model was trained on data of kind regression",
        (
            "run=digits",
            "dataset=csv",
            "dataset.path=houses.csv",
            "dataset.target=grade",
        ): "the model was not trained on a table",
        ("run=digits", "epochs=3"): "epochs: task=evaluate uses the run's settings. Remove this",
        (
            "run=digits",
            "patience=3",
            "epochs=3",
        ): "epochs, patience: task=evaluate uses the run's settings. Remove these settings.",
        (
            "run=digits",
            "dataset.augment=[flip]",
        ): "dataset.augment: task=evaluate uses the run's settings",
        ("run=digits", "model=cnn"): "model: task=evaluate uses the run's settings",
    }.items():
        assert message in refused(forks, runs, "task=evaluate", *arguments), arguments


def test_classes_are_matched_by_their_names():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(60, 4, generator=generator), torch.arange(60) % 3
    make = functools.partial(Data, in_shape=(4,), kind="classification")
    of_run = make(
        "run", TensorSplit(inputs, targets), None, None, num_classes=3, classes=["a", "b", "c"]
    ).description()
    other = make(
        "other",
        TensorSplit(inputs, targets),
        TensorSplit(inputs[:6], targets[:6]),
        None,
        num_classes=3,
    )
    other.classes = ["c", "a", "b"]
    other.prepare_as(of_run)
    assert other.classes == ["a", "b", "c"] and other.train.targets[:3].tolist() == [2, 0, 1]
    assert other.val.targets[:3].tolist() == [2, 0, 1] and other.description() == of_run | {
        "dataset": "other"
    }
    with pytest.raises(
        UserError,
        match="split=all: not a valid choice",
    ):
        other.part_to_evaluate("all")


def test_targets_are_brought_to_the_units_of_the_run():
    values = torch.arange(8, dtype=torch.float64).unsqueeze(1)

    def regression(mean, scale):
        part = TensorSplit(torch.ones(8, 2), ((values - mean) / scale).float())
        return Data(
            "x", part, None, None, (2,), 1, "regression", target_mean=mean, target_scale=scale
        )

    of_run, other = regression(3.0, 2.0), regression(1.0, 0.5)
    other.prepare_as(of_run.description())
    assert torch.equal(other.train.targets, of_run.train.targets) and other.target_scale == 2.0
    other, of_run = (
        regression(1.0, 0.5),
        regression(torch.tensor([3.0]), torch.tensor([2.0])),
    )  # one a target
    other.prepare_as(of_run.description())
    assert torch.equal(other.train.targets, of_run.train.targets) and other.target_scale == [2.0]


def test_the_readme_and_the_card_say_how(runs):
    text = (runs / "digits" / "model.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import stoker.*?)```", text, re.DOTALL)
    assert 'stoker.load("digits")' in code
    assert "then resized to 8x8 (height x width) with bilinear interpolation" in text
    assert "\nA file that `task=export` writes takes the same inputs as this model" in text
    scope = {}
    here = os.getcwd()
    os.chdir(runs)
    try:
        exec(code, scope)
    finally:
        os.chdir(here)
    assert scope["model"].classes == [str(i) for i in range(10)]


def test_the_card_has_what_a_hub_reads_and_the_results_of_each_class(runs):
    text = (runs / "digits" / "model.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    front = yaml.safe_load(front)
    assert "license" not in front and front["library_name"] == "stoker"
    seen = json.loads((runs / "digits" / "evaluation.json").read_text(encoding="utf-8"))
    counts = torch.tensor(seen["confusion"])
    for i, count in enumerate(counts.sum(1).tolist()):
        precision, recall = counts[i, i] / counts[:, i].sum(), counts[i, i] / count
        assert f"| {i} | {precision:.3f} | {recall:.3f} | {count} |\n" in body
    assert re.search(r"^- Date: \d{4}-\d\d-\d\d$", body, re.MULTILINE) and "## Limits" in body


def test_the_card_has_the_numbers_of_the_weights_that_it_is_of(forks, tmp_path):
    job = [
        "run_dir=run",
        *JOBS["digits"],
        "monitor=val/acc",
        "monitor_mode=min",
    ]  # which is not that of the end
    assert forks.run(tmp_path, *job).code == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = [json.loads(line) for line in lines if '"val/acc"' in line]
    assert first["val/acc"] < last["val/acc"]
    text = (tmp_path / "run" / "model.md").read_text(encoding="utf-8")
    assert f"from step {first['step']}\n" in text
    assert f"- Results: val acc {first['val/acc']:.4f}; test loss " in text


# A part of a run's own data

OWN = '''
import gc
import weakref

import torch
from torch.utils.data import Dataset

from stoker import Trainer


class Pictures(Dataset):
    """Dicts with a vector, a class and a name."""

    def __init__(self, count, seed):
        self.inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        return {"x": self.inputs[i], "y": int(self.inputs[i, 0] > 0), "name": f"picture {i}"}


def pictures():
    return {"train": Pictures(40, 0), "val": Pictures(8, 1), "test": Pictures(53, 2)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)

    def forward(self, inputs):
        return self.layer(inputs)


def detected(model, batch):
    outputs = model(batch["x"])
    boxes = [row.expand(1 + i % 3, 2) for i, row in enumerate(outputs)]
    return {"scores": outputs, "boxes": boxes, "name": batch["name"], "log": (outputs - 9).log()}


class Detecting(Trainer):
    living = weakref.WeakSet()

    def compute_loss(self, batch):
        outputs = self.model(batch["x"])
        return self.loss(outputs, batch["y"]), outputs

    def update_metrics(self, outputs, batch):
        pass

    def predict_batch(self, batch):
        assert len(self.living) <= 2, "more than two batches of outputs are kept in memory"
        outputs = detected(self.model, batch)
        self.living.add(outputs["log"])
        return outputs
'''
OWN_TYPED = [
    "dataset._target_=own_pictures.pictures",
    "model._target_=own_pictures.Net",
    "trainer._target_=own_pictures.Detecting",
]


def test_the_rows_of_a_part_of_your_own_data_are_what_the_model_gives(forks, tmp_path):
    """Streamed: each batch of outputs is gone before the next but one is computed."""
    (tmp_path / "own_pictures.py").write_text(OWN)
    done = forks.run(tmp_path, *OWN_TYPED, "max_steps=3", "report=false", "run_dir=run")
    assert done.code == 0, done.err
    task = ["task=predict", "run=run", "trusted=[own_pictures]", "eval_batch_size=5"]
    done = forks.run(tmp_path, *task, "split=test", "output=out.jsonl")
    assert done.code == 0 and "53 rows" in done.out, done.err

    own = {}
    exec(compile(OWN, "own_pictures", "exec"), own)
    net = own["Net"]()
    package.init_from(net, tmp_path / "run")
    test = own["pictures"]()["test"]
    expected = []
    for start in range(0, 53, 5):
        samples = [test[i] for i in range(start, min(start + 5, 53))]
        with torch.no_grad():
            outputs = own["detected"](net, torch.utils.data.default_collate(samples))
        for i, sample in enumerate(samples):
            row = {"sample": start + i, "name": sample["name"], "log": [None, None]}
            for name in ("scores", "boxes"):
                row[name] = outputs[name][i].tolist()
            expected.append(row)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows == expected
    inference.write(rows, tmp_path / "out.csv")
    cells = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [json.loads(row["boxes"]) for row in cells] == [row["boxes"] for row in expected]


@pytest.mark.slow
def test_the_rows_of_a_part_are_those_of_its_files(forks, runs):
    """A table's rows have the lines and the units of its file, and pictures the names of theirs."""
    of_file = {row["line"]: row for row in predicted(forks, runs, "run=prices", "input=houses.csv")}
    rows = predicted(forks, runs, "run=prices", "split=val")
    assert [row.pop("sample") for row in rows] == list(range(len(rows)))
    for row in rows:
        assert row["value"] == pytest.approx(of_file[row["line"]]["value"], rel=1e-6)
    for row in predicted(forks, runs, "run=folder", "split=val"):
        [same] = predicted(forks, runs, "run=folder", f"input=images/{row['file']}")
        assert row["class"] == same["class"]
        break


def test_a_class_per_pixel_is_a_map_of_the_likeliest_ones():
    about = {"kind": "classification", "num_classes": 3, "classes": None}
    outputs = torch.randn(2, 3, 4, 5)
    rows = list(inference.answers(outputs, about))
    assert rows == [{"classes": outputs[i].argmax(0).tolist()} for i in range(2)]
    text = about | {"tokens": "characters", "classes": ["a", "b", "c"]}
    [first, _] = inference.answers(outputs[:, :, 0], text)
    assert first == {"text": "".join("abc"[i] for i in outputs[0, :, 0].argmax(0))}


ENDLESS = """
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Waves(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(3), 0


def waves():
    few = TensorDataset(torch.randn(20, 3), torch.zeros(20).long())
    return {"train": Waves(), "val": few}


def net():
    return torch.nn.Linear(3, 2)
"""


@pytest.mark.slow
def test_a_split_that_may_never_end_is_not_evaluated(forks, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    parts = ["dataset._target_=endless.waves", "model._target_=endless.net"]
    done = forks.run(tmp_path, *parts, "max_steps=3", "report=false", "run_dir=run")
    assert done.code == 0, done.err
    for task in ("evaluate", "predict"):
        done = forks.run(tmp_path, task, "run=run", "trusted=[endless]", "split=train")
        assert done.code == 2 and done.err.endswith(
            "error: split=train: the train split has no length, so reading it may never end.\n"
            "Type split=val or split=test.\n"
        )
    done = forks.run(tmp_path, "evaluate", "run=run", "trusted=[endless]", "split=val")
    assert done.code == 0 and "\nval      loss " in done.out, done.err
