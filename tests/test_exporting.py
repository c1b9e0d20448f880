"""Exported models: what another program computes from them is what the model itself does, or
nothing is left.
"""

import importlib.util

import pytest
import torch

from examples.gan import GAN
from examples.rnn import RowReader
from stoker.data.datasets import Data, TensorSplit
from stoker.models.cnn import CNN
from stoker.models.linear import Linear
from stoker.models.mlp import MLP
from stoker.models.resnet import ResNet
from stoker.models.whitened_cnn import WhitenedCNN
from stoker.runs import exporting
from stoker.runs.inference import Trained
from stoker.runs.page import render
from stoker.trainer import checkpoint
from stoker.trainer.errors import TrainingError, UserError

MODELS = {
    "linear": Linear,
    "mlp": lambda *shapes: MLP(*shapes, hidden=(8,), norm="batch", dropout=0.5),
    "cnn": lambda *shapes: CNN(*shapes, channels=(4, 8)),
    "resnet": lambda *shapes: ResNet(*shapes, widths=(4, 8), blocks=(1, 1)),
    "whitened_cnn": lambda *shapes: WhitenedCNN(*shapes, widths=(4, 8)),
}
NEEDED = [
    name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None
]
FORMATS = [
    pytest.param(
        "onnx", marks=pytest.mark.skipif(bool(NEEDED), reason=f"needs {NEEDED}: the extra onnx")
    ),
    "torch_export",
]


@pytest.fixture
def run(tmp_path):
    """A run directory, as far as an export looks into it."""
    (tmp_path / "result.json").write_text(
        '{"test/acc": 0.5, "steps": 9, "best": {"name": "val/acc", "step": 7, "value": 0.25},'
        ' "overrides": [], "seconds": 1.0}',
        encoding="utf-8",
    )
    return tmp_path


def trained(make, channels=3, side=9):
    """A model whose norms have statistics as a training leaves them, and not 0 and 1."""
    torch.manual_seed(0)
    inputs = torch.randint(0, 256, (12, channels, side, side), dtype=torch.uint8)
    part = TensorSplit(inputs, torch.arange(12) % 4)
    norms = {"mean": [0.4, 0.5, 0.6][:channels], "std": [0.2, 0.25, 0.3][:channels]}
    data = Data("noise", part, None, part, (channels, side, side), 4, classes=list("abcd"), **norms)
    model = make(data.in_shape, 4)
    for name, value in model.state_dict().items():
        if "running" in name:
            value.copy_(torch.rand_like(value) * 0.5 + 0.5 * ("var" in name))
    return Trained(model, data.description()).eval().requires_grad_(False)


def outputs_of(path, form, inputs, model):
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.as_tensor(session.run(None, {"inputs": inputs.numpy()})[0])
    return torch.export.load(path).module()(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_computes_what_the_model_does(run, name, form):
    model = trained(MODELS[name])
    inputs, whose = exporting.generated(model.about), "noise"
    path, _ = exporting.export(model, run, form, inputs, whose)
    assert path == run / exporting.FILES[form]
    others = torch.randint(0, 256, (64, 3, 9, 9), dtype=torch.uint8)
    for size in (1, 3, 64):
        expected = model(others[:size])
        found = outputs_of(path, form, others[:size], model)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(expected.unique()) > 64  # no constant


@pytest.mark.parametrize("form", FORMATS)
def test_the_model_of_a_table_takes_its_columns_as_they_are(run, form):
    kinds = ("a", '"b, c"', "d")
    rows = "".join(
        f"{1e6 + i % 7},{kinds[i % 3]},{'' if i % 9 == 0 else i},{5e5 + 3 * i}\n" for i in range(60)
    )
    (run / "t.csv").write_text(f"large,kind,gaps,y\n{rows}", encoding="utf-8")
    tables = pytest.importorskip("stoker.data.tables")
    about = tables.csv(str(run / "t.csv"), "y", missing="mean").description()
    model = Trained(MLP((5,), 1, hidden=(8,)), about).eval().requires_grad_(False)
    inputs, whose = exporting.samples(about, {"path": str(run / "t.csv")})
    assert inputs.dtype == torch.float64 and inputs.isnan().any() and whose == "60 rows of t.csv"
    path, outputs = exporting.export(model, run, form, inputs, whose)
    assert exporting.describe(inputs) == "float64 of shape (N, 5)"
    assert exporting.describe(outputs) == "float64 of shape (N, 1)"
    found = outputs_of(path, form, inputs, model)
    assert found.dtype == torch.float64 and found.isfinite().all()
    torch.testing.assert_close(found, model(inputs), rtol=1e-7, atol=0)
    other, whose = exporting.samples(about, {"path": str(run / "not_here.csv")})
    assert other.shape == (64, 5) and whose == "64 generated samples"
    assert other.dtype == torch.float64


def test_the_card_of_the_weights_says_what_its_modules_take():
    """The arithmetic on its line, done by hand, gives what the module is given."""
    inputs = torch.randint(0, 256, (3, 2, 4, 4), dtype=torch.uint8)
    part = TensorSplit(inputs, torch.arange(3))
    about = Data("noise", part, None, None, (2, 4, 4), 3, classes=["a,b", " ", "c"]).description()
    assert "- Classes, in order: 'a,b', ' ', c\n" in render(
        "weights.md.jinja", about=about, usual=True, is_image=False, places=()
    )
    for dtype, norms, says in (
        (torch.uint8, {}, "float32 of shape (N, 2, 4, 4), pixel / 255"),
        (torch.uint8, {"mean": [0.25, 0.5]}, "with mean [0.25, 0.5] and std 1"),
        (torch.uint8, {"std": [0.5, 2]}, "with mean 0 and std [0.5, 2.0]"),
        (torch.int64, {}, "int64 of shape (N, 2, 4, 4)"),
    ):
        part = TensorSplit(inputs.to(dtype), torch.arange(3))
        about = Data("noise", part, None, None, (2, 4, 4), 3, **norms).description()
        assert f"{says}\n- Outputs" in render(
            "weights.md.jinja", about=about, usual=True, is_image=False, places=()
        )
        mean, std = (
            torch.tensor(norms.get(key, default)).view(-1, 1, 1)
            for key, default in (("mean", 0.0), ("std", 1.0))
        )
        expected = (inputs / 255 - mean) / std if dtype == torch.uint8 else inputs.to(dtype)
        torch.testing.assert_close(Trained(torch.nn.Identity(), about)(inputs.to(dtype)), expected)


class Picture(torch.nn.Module):
    """Gives something of another form than scores, such as what an autoencoder rebuilds."""

    def __init__(self, in_shape, num_classes):
        super().__init__()
        self.head = torch.nn.Linear(9, 5)

    def forward(self, inputs):
        return self.head(inputs)


class Pair(Picture):
    def forward(self, inputs):
        return self.head(inputs), {"mean": inputs.mean(1)}


def test_outputs_of_any_shape_are_exported_but_only_a_tensor(run):
    model = trained(Picture)
    inputs = exporting.generated(model.about)
    _, outputs = exporting.export(model, run, "torch_export", inputs, "noise")
    assert exporting.describe(outputs) == "float32 of shape (N, 3, 9, 5)"
    assert exporting.describe(outputs[:, 0, 0, 0]) == "float32 of shape (N)"
    with pytest.raises(
        UserError, match="it returns a tuple, but an exported model must return a tensor"
    ):
        exporting.export(trained(Pair), run, "torch_export", inputs, "noise")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_the_recurrent_example_takes_any_number_of_samples_when_exported(run, form):
    model = trained(RowReader)
    inputs = exporting.generated(model.about)
    path, _ = exporting.export(model, run, form, inputs, "noise")
    found = outputs_of(path, form, inputs, model)
    torch.testing.assert_close(found, model(inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_a_model_that_draws_is_refused(run, form):
    model = trained(lambda in_shape, _: GAN(in_shape))
    with pytest.raises(TrainingError, match=r"outputs .* differ .*Nothing was written"):
        exporting.export(model, run, form, exporting.generated(model.about), "noise")
    assert list(run.iterdir()) == [run / "result.json"]


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.EmbeddingBag(4, 2)

    def forward(self, inputs):
        return self.table(inputs)


def test_generated_tokens_are_places_in_any_table(run):
    part = TensorSplit(torch.arange(12).view(6, 2) % 4, torch.arange(6) % 2)
    about = Data("tokens", part, None, None, (2,), 2).description()
    inputs = exporting.generated(about)
    assert inputs.dtype == torch.int64 and sorted(inputs.unique().tolist()) == [0, 1]
    model = Trained(Tokens(), about).eval().requires_grad_(False)
    exporting.export(model, run, "torch_export", inputs, "noise")
    inputs[0] = 4  # in no place: the model itself says so, and no traceback does
    with pytest.raises(UserError, match="cannot be exported"):
        exporting.export(model, run, "torch_export", inputs, "noise")


class Other(Linear):
    """Another model while it is exported."""

    def forward(self, inputs):
        return super().forward(inputs) + float(torch.compiler.is_exporting())


class Fixed(Linear):
    """Made for the number of samples that it is exported with."""

    def forward(self, inputs):
        return super().forward(inputs) + torch.zeros(len(inputs), 1)


class Unsteady(Linear):
    """Its way depends on the data, which no export can follow."""

    def forward(self, inputs):
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


def test_a_model_that_is_another_one_when_exported_is_noticed_and_nothing_is_left(run):
    model = trained(Other)
    with pytest.raises(
        TrainingError,
        match=r"(?s)On noise, the outputs .* differ from PyTorch's. Nothing was written.*difference: ",
    ):
        exporting.export(model, run, "torch_export", exporting.generated(model.about), "noise")
    assert list(run.iterdir()) == [run / "result.json"]


def test_a_model_that_cannot_be_exported_is_the_users_error(run, capfd):
    for make in (Unsteady, Fixed):
        model = trained(make)
        with pytest.raises(UserError, match=r"(?s)cannot be exported.*stoker\.load"):
            exporting.export(model, run, "torch_export", exporting.generated(model.about), "noise")
    assert capfd.readouterr() == ("", "")
    assert list(run.iterdir()) == [run / "result.json"]


def test_a_link_in_somebodys_run_is_not_followed(run, tmp_path_factory):
    away = tmp_path_factory.mktemp("away") / "file"
    away.write_text("of before")
    (run / "model.pt2").symlink_to(away)
    model = trained(Linear)
    path, _ = exporting.export(
        model, run, "torch_export", exporting.generated(model.about), "noise"
    )
    assert away.read_text() == "of before"
    assert not path.is_symlink() and torch.export.load(path)


def test_formats_and_what_they_need(monkeypatch):
    with pytest.raises(UserError, match="Choose one of: onnx, torch_export."):
        exporting.check(None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"(?s)needs onnx, onnxscript, onnxruntime.*pip install -e '\.\[onnx\]'",
    ):
        exporting.check("onnx")
    exporting.check("torch_export")


def test_outputs_are_compared_on_each_size_of_batch():
    model = trained(Linear)
    inputs = exporting.generated(model.about)
    outputs = model(inputs)
    largest = outputs.abs().max().item()
    assert largest > 1

    def compare(size, change):
        exporting.compare(
            model,
            lambda batch: change(model(batch)) if len(batch) == size else model(batch),
            inputs,
            outputs,
            "noise",
        )

    for size in (1, 3, 64):
        compare(size, lambda values: values.double() + 0.9e-4 * largest)
        for change in (
            lambda values: values + 1.1e-4 * largest,
            lambda values: values.index_fill(1, torch.tensor([2]), float("nan")),
            lambda values: values[:, :3],
            lambda values: values[:, None],
        ):
            with pytest.raises(TrainingError, match="Nothing was written"):
                compare(size, change)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_match_nothing(value):
    model = trained(Linear)
    model.module.head.bias.data[1] = value
    inputs = exporting.generated(model.about)
    with pytest.raises(TrainingError, match="Nothing was written"):
        exporting.compare(model, model, inputs, model(inputs), "noise")


def test_an_export_of_weights_that_the_run_has_not_tested_is_refused(run):
    """Its outputs agree with those of the model that it is made from, which is no proof."""
    model = trained(MODELS["mlp"])
    tested = checkpoint.copy(model.module.state_dict())
    checkpoint.write_tensors(run / "model.safetensors", tested, {})
    inputs = exporting.generated(model.about)
    path, _ = exporting.export(model, run, "torch_export", inputs, "noise")
    path.unlink()
    name, weight = next(iter(model.module.named_parameters()))
    weight.data.view(-1)[3] += 1e-6
    with pytest.raises(
        TrainingError, match=f"{name} in the best checkpoint differs from the tested"
    ):
        exporting.export(model, run, "torch_export", inputs, "noise")
    assert not path.exists()
