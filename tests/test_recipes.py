"""The shipped defaults and recipes on real data: MNIST and CIFAR-10 photographs below DATA_ROOT."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DATA = os.environ.get("DATA_ROOT", "")
needs_mnist = pytest.mark.skipif(
    not Path(DATA, "MNIST", "raw").is_dir(), reason="needs MNIST below DATA_ROOT"
)
needs_photographs = pytest.mark.skipif(
    not Path(DATA, "cifar10_jpeg").is_dir(), reason="needs the folder cifar10_jpeg below DATA_ROOT"
)


def train(tmp_path, *settings):
    """result.json of a run."""
    command = [sys.executable, str(ROOT / "train.py"), f"run_dir={tmp_path / 'run'}", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "run" / "result.json").read_text())


@needs_mnist
@pytest.mark.parametrize(
    ("model", "epochs", "accuracy"), [("linear", 3, 0.92), ("mlp", 3, 0.975), ("cnn", 1, 0.985)]
)
def test_at_most_three_epochs_of_mnist_with_the_defaults(tmp_path, model, epochs, accuracy, large):
    if model == "cnn" and not large:
        pytest.skip("--large")
    assert (
        train(tmp_path, "dataset=mnist", f"model={model}", f"epochs={epochs}")["test/acc"]
        >= accuracy
    )


@needs_mnist
def test_a_third_of_an_epoch_of_mnist(tmp_path):
    """0.985 and 0.987 for seeds 0 and 1."""
    assert train(tmp_path, "dataset=mnist", "model=cnn", "max_steps=300")["test/acc"] >= 0.98


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder with a tenth of the photographs: the others would only be decoded and tested."""
    folder = tmp_path_factory.mktemp("photographs")
    for kind in Path(DATA, "cifar10_jpeg").glob("*/*"):
        (folder / kind.parent.name / kind.name).mkdir(parents=True)
        files = sorted(kind.iterdir())
        for path in files[: len(files) // 10]:
            shutil.copy(path, folder / kind.parent.name / kind.name)
    return folder


@needs_photographs
@pytest.mark.parametrize(("model", "steps", "accuracy"), [("cnn", 150, 0.4), ("resnet", 100, 0.3)])
def test_a_folder_of_photographs_trains(photographs, tmp_path, model, steps, accuracy, large):
    """One or two epochs of a tenth of them: four and three times what chance gives."""
    if model == "resnet" and not large:
        pytest.skip("--large")
    narrow = ["model.widths=[16,32,64,128]"] if model == "resnet" else []
    settings = [
        "dataset=image_folder",
        f"dataset.root={photographs}",
        f"model={model}",
        f"max_steps={steps}",
        *narrow,
    ]
    assert train(tmp_path, *settings)["test/acc"] >= accuracy
