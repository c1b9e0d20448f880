"""The report: what is on the page is what the run did, and somebody's run directory is only text on
it.
"""

import base64
import contextlib
import hashlib
import html
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_data, make_model, make_trainer
from forks import PROGRAM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from stoker import Trainer
from stoker.command import dotted
from stoker.data import datasets, tables
from stoker.data.loader import make_loaders, normalizer
from stoker.data.record import Data, default_metrics
from stoker.data.splits import TensorSplit
from stoker.models.mlp import MLP
from stoker.runs import card, confusion, examine, live, lock, plots, report
from stoker.runs.evaluation import Sample, class_colour
from stoker.runs.json_files import write_json
from stoker.runs.loggers import JSONL
from stoker.runs.page import TEMPLATES, plain
from stoker.runs.report import curves, evaluation, inputs, summary, words
from stoker.runs.result import Best, RunResult
from stoker.runs.status import Status
from stoker.sweeps.page import of_sweep
from stoker.sweeps.table import Sweep
from stoker.tasks import report as drawing
from stoker.tasks.redraw import redraw
from stoker.tasks.running import Run
from stoker.trainer import number_format
from stoker.trainer.callbacks import Checkpoint
from stoker.trainer.errors import UserError
from stoker.trainer.metrics import Accuracy, Confusion

ROOT = Path(__file__).resolve().parents[1]
MOST_PAGE = 1_000_000  # bytes, however much there is to show
pytestmark = pytest.mark.usefixtures("as_train_py")


def run_with(rows=(), evaluation=None, folder=Path(), **fields):
    """Return a run with these rows and this evaluation."""
    made = report.inputs.Run(folder, **fields)
    made.rows = list(rows)
    made.evaluation = report.inputs.evaluation_of(evaluation) if evaluation else None
    return made


class Page(HTMLParser):
    """The elements of a page, [(tag, attributes, the text in it)], each of which has to be
    closed.
    """

    EMPTY = ("meta", "img", "br", "wbr")

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])
        if tag not in self.EMPTY:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, tag, kind=None):
        """The texts of the elements of a kind (one of its classes)."""
        return [
            text.strip()
            for name, attributes, text in self.elements
            if name == tag and (kind is None or kind in (attributes.get("class") or "").split())
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run on the digits as a user has it, what it printed, and its page."""
    folder = tmp_path_factory.mktemp("report")
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "epochs=2",
        "optimizer.lr=2e-3",
        "run_dir=run",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "run", done


@pytest.fixture(scope="module")
def tested(run):
    """(data, inputs, labels, logits) of the test split, computed by hand from the weights that the
    run has left.
    """
    data = datasets.digits()
    model = MLP(data.in_shape, data.num_classes)
    model.load_state_dict(load_file(run[0] / "model.safetensors"))
    inputs, labels = data.test.tensors()
    with torch.no_grad():
        return data, inputs, labels, model.eval()(normalizer(data.mean, data.std, "cpu")(inputs))


def read(folder, name="evaluation.json"):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def plots_of(shown):
    """Return the data of the plots on a page."""
    found = [attributes.get("data-plot") for _, attributes, _ in shown.elements]
    return [json.loads(text) for text in found if text is not None]


def page_of(folder):
    return Page(report.html(folder))


def test_the_run_ends_with_its_report_and_is_rebuilt_byte_for_byte(run, monkeypatch, capsys):
    folder, done = run
    assert done.stdout.splitlines()[-1] == f"report   {Path('run', 'report.html')}"
    written = (folder / "report.html").read_bytes()
    assert 10_000 < len(written) < MOST_PAGE
    monkeypatch.chdir(folder.parent)
    (folder / "report.html").unlink()
    redraw(["run"])
    assert capsys.readouterr().out == done.stdout.splitlines()[-1] + "\n"
    assert (folder / "report.html").read_bytes() == written


def test_what_was_seen_is_what_the_weights_do(run, tested):
    _, inputs, labels, logits = tested
    seen, predicted, shares = read(run[0]), logits.argmax(1), logits.double().softmax(1)
    counts = [[int(((labels == i) & (predicted == j)).sum()) for j in range(10)] for i in range(10)]
    assert (
        seen["confusion"] == counts and seen["samples"] == len(labels) and seen["split"] == "test"
    )
    assert seen["chance"] == max(map(sum, counts)) / len(labels)
    losses = -shares.log().gather(1, labels.unsqueeze(1)).squeeze(1)
    order = losses.argsort(descending=True)[: examine.MOST_SAMPLES].tolist()
    assert [sample["index"] for sample in seen["worst"]] == order
    for sample, i in zip(seen["worst"], order, strict=True):
        assert (sample["true"], sample["predicted"]) == (labels[i], predicted[i])
        assert sample["loss"] == pytest.approx(losses[i].item(), rel=1e-5)
        assert sample["probability"] == pytest.approx(shares[i, predicted[i]].item(), rel=1e-5)
        with Image.open(io.BytesIO(base64.b64decode(sample["png"]))) as picture:
            assert list(picture.tobytes()) == inputs[i].flatten().tolist()
    result = read(run[0], "result.json")
    assert result["test/acc"] == sum(counts[i][i] for i in range(10)) / len(labels)


def test_the_page_shows_these_numbers(run, tested):
    _, _, labels, logits = tested
    shown, predicted = page_of(run[0]), logits.argmax(1)
    cells = [int(text or 0) for text in shown.all("td", "cell")]
    assert cells == [
        int(((labels == i) & (predicted == j)).sum()) for i in range(10) for j in range(10)
    ]
    assert shown.all("th", "name") == [str(i) for i in range(10)]
    [matrix] = shown.all("table", "matrix")
    for i in range(10):
        right = ((labels == i) & (predicted == i)).sum().item()
        precision, recall = (
            right / (predicted == i).sum().item(),
            right / (labels == i).sum().item(),
        )
        assert f"{precision:.3f}{recall:.3f}{(labels == i).sum()}" in re.sub(r"\s", "", matrix)
    rows = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    values = [row["val/acc"] for row in rows if "val/acc" in row]
    share = (predicted == labels).double().mean().item()
    chance = labels.bincount().max().item() / len(labels)
    [verdict] = shown.all("p", "verdict")
    assert verdict == (
        f"The model gets {words.percent(share)} of {len(labels)} test samples right (always predicting the "
        f"most frequent class: {words.percent(chance)}); val/acc rose from {values[0]:.4f} after epoch 1 to {values[1]:.4f} "
        "after epoch 2 (step 40)."
    )
    assert shown.all("p", "soft")[0] == (
        "MLP on digits, cpu, fp32, 1,259 training + 179 validation + 359 test samples"
    )
    assert shown.all("tr", "typed") == ["epochs2", "run_dirrun", "optimizer.lr0.002"]
    [details] = shown.all("details")  # each setting once: trainer.epochs is ${epochs}
    assert "epochs" in details and "trainer.epochs" not in details and "optimizer.lr" in details
    images = [attributes["src"] for tag, attributes, _ in shown.elements if tag == "img"]
    seen = read(run[0])
    assert images == [f"data:image/png;base64,{s['png']}" for s in seen["worst"] + seen["random"]]
    worst = seen["worst"][0]
    assert shown.all("span", "whole")[0] == f"{worst['probability']:.1%}"
    assert len(plots_of(shown)) == 4
    commands = shown.all("pre")
    assert f"{PROGRAM} epochs=2 optimizer.lr=2e-3 run_dir=run" in commands
    evaluate, predict = commands[-2:]
    assert evaluate == f"{PROGRAM} evaluate run={run[0]}"
    assert predict == f"{PROGRAM} predict run={run[0]} split=test"


SCRIPTS = ("script.js", "chart.js", "report.js")


def test_the_page_stands_alone(run):
    text = report.html(run[0])
    shown = Page(text)
    assert not {"link", "iframe", "object", "form"} & {tag for tag, *_ in shown.elements}
    [script] = [content for tag, _, content in shown.elements if tag == "script"]
    ours = [(TEMPLATES / name).read_text("utf-8") for name in SCRIPTS]
    assert script.split() == " ".join(ours).split()  # and nobody else's
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html.unescape(text)
    assert not any(
        name.startswith("on") for _, attributes, _ in shown.elements for name in attributes
    )
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html.unescape(text)
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)", text) and not re.search(
        r"url\((?!#)", text
    )
    assert "id=" not in text and len(text.encode()) < 300_000


def test_an_evaluation_that_looks_gives_the_same_numbers():
    data = make_data(val=25)
    data.test = data.val
    (_, _, loader), _ = make_loaders(data, batch_size=7, eval_batch_size=4)
    trainer = make_trainer(metrics={"acc": Accuracy()})
    results, seen = examine.evaluate(trainer, loader, "test", data)
    assert results == trainer.evaluate(loader, "test") and list(trainer.metrics) == ["acc"]
    (_, _, whole), _ = make_loaders(data, batch_size=25)
    assert examine.evaluate(trainer, whole, "test", data)[1].confusion == seen.confusion
    trainer.close()


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_an_evaluation_keeps_the_same_memory_for_any_number_of_samples(kind):
    generator = torch.Generator().manual_seed(0)
    kept = set()
    for samples in (3000, 30_000):
        # Whole numbers, so that many samples are as bad as others, and some are nan.
        outputs = torch.randint(3, (samples, 3), generator=generator).double()
        outputs[torch.randint(samples, (5,), generator=generator)] = torch.nan
        targets = torch.randint(3, (samples,), generator=generator)
        losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        if kind == "regression":
            targets = torch.randint(3, (samples, 3), generator=generator).double()
            losses = (outputs - targets).square().mean(1)
        part = TensorSplit(torch.zeros(samples, 1), targets)
        data = Data("d", part, part, None, (1,), 3, kind)
        (_, loader, _), _ = make_loaders(data, batch_size=700)
        of_kind = examine.Classes if kind == "classification" else examine.Numbers
        examination = of_kind("val", loader, data)
        for rows in torch.arange(samples).split(700):
            examination.update(outputs[rows], targets[rows])
        tensors = [value for value in flat(vars(examination)) if isinstance(value, torch.Tensor)]
        kept.add(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        examination.compute()
        worst = losses.argsort(descending=True, stable=True)[: examine.MOST_SAMPLES]
        assert [sample.index for sample in examination.evaluation.worst] == worst.tolist()
        if kind == "regression":
            points = torch.stack([targets, outputs], 1)[some(samples)]
            shown = torch.tensor(examination.evaluation.points, dtype=torch.float64)
            assert torch.equal(shown.nan_to_num(9), points.nan_to_num(9))
    assert len(kept) == 1


def some(samples):
    """Return the places of the points among so many samples."""
    order = torch.tensor([murmur(i + 1) for i in range(samples)])
    return order.argsort(descending=True, stable=True)[: examine.MOST_POINTS]


def murmur(number):
    """Return the hash that orders the samples, with Python's integers."""
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        number = (number ^ number >> 16) * factor % 2**32
    return number ^ number >> 16


def test_random_samples_are_not_evenly_spaced():
    order = examine.scrambled(torch.arange(10_000))
    chosen = order.argsort(descending=True)[:2000].sort().values
    assert len(order.unique()) == 10_000
    # In a random choice of a fifth, each gap is geometric: 1 with probability 0.2, and so on.
    shares = chosen.diff().bincount() / 1999
    expected = 0.2 * 0.8 ** torch.arange(6)
    assert shares[1:7].tolist() == pytest.approx(expected.tolist(), abs=0.03)


class PerPosition(torch.nn.Module):
    """A class for each number of the input: logits of an embedding."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 5)

    def forward(self, inputs):
        return self.table(inputs).movedim(-1, 1)


@pytest.mark.parametrize("shape", [(230,), (70, 40)], ids=["tokens", "pixels"])
def test_tokens_and_pixels_are_counted_and_shown(run, tmp_path, shape):
    """The matrix is scikit-learn's, the worst are those of torch's loss, and a page shows them."""
    from sklearn.metrics import confusion_matrix, jaccard_score

    torch.manual_seed(0)
    inputs = torch.randint(6, (30, *shape))
    targets = torch.randint(5, (30, *shape))
    targets[torch.rand(targets.shape) < 0.1] = -100
    part = TensorSplit(inputs, targets)
    classes = ["<a>", "\n", "c", "d", "e"]
    data = Data("d", part, part, None, shape, 5, classes=classes)
    (_, loader, _), _ = make_loaders(data, batch_size=7)
    model = PerPosition()
    metrics = default_metrics("classification", target_dims=len(shape), num_classes=5)
    with Trainer(model, torch.nn.CrossEntropyLoss(), metrics=metrics, device="cpu") as trainer:
        results, record = examine.evaluate(trainer, loader, "val", data)
    with torch.no_grad():
        outputs = model(inputs)
    predicted = outputs.argmax(1)
    known = targets >= 0
    expected = confusion_matrix(targets[known], predicted[known], labels=range(5))
    assert record.confusion == expected.tolist()
    losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none").flatten(1).sum(1)
    losses = losses / known.flatten(1).sum(1)
    worst = losses.argsort(descending=True)[:16].tolist()
    assert [sample.index for sample in record.worst] == worst
    assert [sample.loss for sample in record.worst] == pytest.approx(losses[worst].tolist())
    assert len({sample.index for sample in record.random}) == 16
    if len(shape) == 2:
        iou = jaccard_score(targets[known], predicted[known], average=None)
        assert results["val/miou"] == pytest.approx(iou.mean())
        for mask, label in zip(record.worst[0].masks, (targets, predicted), strict=True):
            picture = Image.open(io.BytesIO(base64.b64decode(mask)))
            for row, column in ((0, 0), (3, 5), (34, 19)):
                true = label[worst[0], 2 * row, 2 * column].item()
                colour = (255, 255, 255) if true < 0 else class_colour(true)
                assert picture.getpixel((column, row)) == colour
    else:
        first = targets[worst[0]][: examine.MOST_TOKENS]
        assert record.worst[0].tokens == [classes[i] for i in first[first >= 0].tolist()]
    shutil.copytree(run[0], tmp_path / "run")
    examine.write(tmp_path / "run" / "evaluation.json", record, data)
    page = report.html(tmp_path / "run")
    unit = "tokens" if len(shape) == 1 else "pixels"
    assert f"of the {unit} of 30 validation samples right" in page and "Random samples" in page
    assert page.count('<table class="bars">') == 1
    card.write(
        tmp_path,
        {},
        model,
        data,
        RunResult(numbers=results, parameters=1, steps=1, versions={}),
        evaluation=record,
    )
    text = (tmp_path / "model.md").read_text(encoding="utf-8")
    assert f"| recall | val {unit} |" in text
    places = ", ".join(map(str, shape))
    assert f"Outputs: (N, 5, {places}) class scores for each {unit[:-1]}\n" in text
    assert page.count('<p class="tokens') == (10 if unit == "tokens" else 0)
    assert page.count("A stronger color means that") == (2 if unit == "tokens" else 0)
    assert page.count("data:image/png") == (48 if unit == "pixels" else 0)
    assert "<a>" not in page


def test_the_curves_of_two_classes_are_scikit_learns(tmp_path):
    from sklearn.metrics import precision_recall_curve, roc_auc_score, roc_curve

    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(2, (400,), generator=generator)
    # Probabilities in the middle of bins, so that nothing is lost by counting.
    places = torch.randint(examine.BINS, (400,), generator=generator) // 4 + 37 * targets
    second = (places + 0.5) / examine.BINS
    part = TensorSplit(torch.zeros(400, 1), targets)
    data = Data("d", part, part, None, (1,), 2, classes=["no", "yes"])
    (_, loader, _), _ = make_loaders(data, batch_size=70)
    examination = examine.Classes("val", loader, data)
    for rows in torch.arange(400).split(70):
        shares = torch.stack([1 - second[rows], second[rows]], 1)
        examination.update(shares.log(), targets[rows])
    examination.compute()
    seen = examination.evaluation
    roc, precision = evaluation.thresholds(seen.second)
    false, recall, _ = roc_curve(targets, second, drop_intermediate=False)
    assert np.allclose(roc, np.stack([false, recall], 1))
    precisions, recalls, _ = precision_recall_curve(targets, second)
    assert np.allclose(precision[::-1], np.stack([recalls, precisions], 1)[:-1])
    area = roc_auc_score(targets, second)
    drawn = evaluation.probabilities(seen)
    assert [plot["title"] for plot in drawn] == ["calibration", "ROC", "precision and recall"]
    assert drawn[1]["note"] == f"for class yes, AUC {area:.3f}; gray: guessing"
    best = torch.maximum(second, 1 - second)
    is_right = (second > 0.5) == targets
    expected = []
    for low in range(10):
        rows = (best * 10).long() == low
        if rows.sum() >= evaluation.FEWEST:
            expected.append((best[rows].mean().item(), is_right[rows].float().mean().item()))
    points = evaluation.calibration(seen.confidence)
    assert np.allclose(points, expected, atol=1e-6)
    [line] = drawn[0]["lines"]
    assert line["name"] == "correct" and np.allclose(line["points"], points, atol=1e-6)
    assert drawn[0]["unit"] and drawn[0]["ideal"] and "ideal" not in drawn[2]


def test_drawing_while_it_trains_changes_nothing(run, tmp_path, monkeypatch):
    """Neither the weights nor the random numbers that come after the training."""
    monkeypatch.setattr(live, "FIRST", 0)
    monkeypatch.setattr(live, "EVERY", 0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    (tmp_path / "config.yaml").write_bytes((run[0] / "config.yaml").read_bytes())
    saver = Checkpoint(tmp_path / "checkpoints", monitor="val/loss")
    first, drawn, _ = Run(tmp_path, saver, started=0.0).files("")
    assert first is saver  # it sees a row before the report is drawn with the best value
    ends = []
    for callbacks in ([], [JSONL(tmp_path / "metrics.jsonl"), saver, drawn]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        (train, val, _), _ = make_loaders(make_data(val=9), batch_size=10)
        trainer = make_trainer(callbacks=callbacks, epochs=3, log_every=1)
        trainer.fit(train, val)
        numbers = [random.random(), np.random.rand(), torch.rand(1).item()]
        ends.append((trainer.module.state_dict(), numbers))
        trainer.close()
    (before, numbers), (after, same) = ends
    assert numbers == same and all(torch.equal(before[name], after[name]) for name in before)
    assert drawn.is_on
    [state] = Page((tmp_path / "report.html").read_text(encoding="utf-8")).all("span", "state")
    assert re.match(r"running, step \d+$", state)
    best = inputs.read_run(tmp_path).best
    assert best == Best("val/loss", "min", **saver.best)


@pytest.mark.parametrize(("first", "cost"), [(0.05, 0.05), (2.0, 2.0), (20.0, 0.05)])
def test_drawing_keeps_to_its_budget(tmp_path, monkeypatch, first, cost):
    """After 5 s, then at most every 30 s and for at most 1% of the time, but for the first one."""
    clock = [0.0]
    draws = []

    def write(folder, state):
        clock[0] += cost if draws else first
        draws.append(clock[0])

    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(live.time, "perf_counter", lambda: clock[0])
    trainer = make_trainer()
    drawn = live.LiveReport(tmp_path, Checkpoint(tmp_path / "checkpoints"))
    drawn.on_fit_start(trainer)
    while clock[0] < 5000:
        clock[0] += 4
        drawn.on_log(trainer, {})
    gaps = [after - before for before, after in pairwise(draws)]
    assert min(gaps) >= 30 and len(draws) >= (140 if cost < 1 else 20)
    assert 5 <= draws[0] - first < 10 and cost * (len(draws) - 1) <= 0.01 * clock[0]
    assert gaps[0] < 40
    trainer.close()


def test_places_are_exact_where_a_device_has_float32_alone(monkeypatch):
    monkeypatch.setattr(examine, "wide", torch.Tensor.float)
    targets = torch.arange(20) % 3
    outputs = torch.arange(60.0).view(20, 3).remainder(7)
    part = TensorSplit(torch.zeros(20, 1), targets)
    data = Data("d", part, part, None, (1,), 3)
    (_, loader, _), _ = make_loaders(data, batch_size=20)
    places = []
    for before in (0, 2**24):
        examination = examine.Classes("val", loader, data)
        examination.samples = before
        examination.update(outputs, targets)
        kept = examination.lists["worst"].over_ranks()["index"]
        places.append((kept - before).tolist())
    assert places[0] == places[1] and len(set(places[0])) == examine.MOST_SAMPLES


def flat(values):
    """Yield the attributes of an object's attributes as well."""
    for value in values.values():
        yield value
        if isinstance(value, (examine.Highest, Confusion)):
            yield from flat(vars(value))
        elif isinstance(value, dict):
            yield from flat(value)


def test_outputs_of_another_kind_are_not_looked_at():
    data = make_data()
    (_, loader, _), _ = make_loaders(data, batch_size=10)
    trainer = make_trainer(make_model(classes=5))  # of 3 classes
    assert examine.evaluate(trainer, loader, "val", data)[1] is None
    trainer.close()


class TwoHeads(Trainer):
    """Its outputs are in a tuple, or in a dict."""

    form = tuple

    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        return loss, self.form([("a", outputs), ("b", outputs)])


class Brief(Trainer):
    """Its evaluation gives the loss alone, whatever metrics there are."""

    def evaluate(self, loader, split="val"):
        return {f"{split}/loss": super().evaluate(loader, split)[f"{split}/loss"]}


@pytest.mark.parametrize("own", [TwoHeads, type("Dict", (TwoHeads,), {"form": dict}), Brief])
def test_a_trainer_of_ones_own_is_evaluated_as_it_says(own):
    data = make_data()
    (_, loader, _), _ = make_loaders(data, batch_size=10)
    trainer = make_trainer(kind=own)
    usual = make_trainer()
    results = {"val/loss": usual.evaluate(loader)["val/loss"]}
    assert examine.evaluate(trainer, loader, "val", data) == (results, None)
    trainer.close()
    usual.close()


def test_samples_that_are_no_tensors_are_named_alone():
    class Words(list):
        def __getitem__(self, index):
            return {"words": [list.__getitem__(self, i) for i in index]}, torch.zeros(len(index))

    sample = Sample(1, 0, 0)
    examine.show(sample, Words("abc"), None)
    assert sample == Sample(1, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [1, 3])
def test_a_regression_is_seen_in_its_own_units(tmp_path, targets):
    data = datasets.synthetic("regression", n=5000, num_classes=targets, val_fraction=0.7)
    data.target_mean, data.target_scale = 5.0, 2.0
    model = torch.nn.Linear(20, targets)
    trainer = make_trainer(
        model, loss=torch.nn.MSELoss(), metrics=default_metrics("regression", 2.0)
    )
    (_, loader, _), _ = make_loaders(data, batch_size=64, eval_batch_size=99)
    results, seen = examine.evaluate(trainer, loader, "val", data)
    examine.write(tmp_path / "evaluation.json", seen, data)
    inputs, targets = data.val.tensors()
    with torch.no_grad():
        true, predicted = (values.double() * 2 + 5 for values in (targets, model(inputs)))
    seen = read(tmp_path)
    places = some(len(targets))
    assert len(targets) > len(seen["points"]) == len(places)
    expected = torch.stack([true[places], predicted[places]], 1)
    assert torch.allclose(torch.tensor(seen["points"], dtype=torch.float64), expected, atol=1e-5)
    order = (true - predicted).square().mean(1).argsort(descending=True)[: examine.MOST_SAMPLES]
    assert [sample["index"] for sample in seen["worst"]] == order.tolist()
    assert seen["worst"][0]["true"] == pytest.approx(true[order[0]].tolist(), rel=1e-6)
    # The page of it, with the numbers that the run would have.
    (tmp_path / "config.yaml").write_text("seed: 0\n", encoding="utf-8")
    (tmp_path / "result.json").write_text(
        json.dumps(results | {"val/mae": 1.5, "val/r2": 0.5}), encoding="utf-8"
    )
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "epoch": 1, "train/loss": 2}\n{"step": 2, "epoch": 2, "train/loss": 1}\n'
    )
    shown = page_of(tmp_path)
    [verdict] = shown.all("p", "verdict")
    assert verdict == (
        "The model explains 50.0% of the variance of 3,500 validation samples (always predicting "
        f"their mean: 0%){', and is off by 1.5000 on average' if len(true[0]) == 1 else ''}."
    )
    names = [f" (target {i + 1})" for i in range(3)] if len(true[0]) > 1 else [""]
    figures = evaluation.regression(report.inputs.evaluation_of(seen))
    expected = [f"{what}{of}" for of in names for what in ("predicted against true", "errors")]
    assert [figure["title"] for figure in figures] == expected
    assert len({json.dumps(figure) for figure in figures}) == len(expected)
    assert [plot["title"] for plot in plots_of(shown)] == ["loss", *expected]
    for i, (scatter, histogram) in enumerate(zip(figures[::2], figures[1::2], strict=True)):
        points = torch.tensor(seen["points"])[:, :, i]
        shown = torch.tensor(scatter["dots"])
        assert len(shown) <= evaluation.MOST_DOTS and torch.equal(
            shown, points[:: -(-len(points) // 800)]
        )
        edges, counts = histogram["bars"]
        errors = points[:, 1] - points[:, 0]
        within = [((low <= errors) & (errors < high)).sum() for low, high in pairwise(edges)]
        assert sum(counts) == len(points) and np.allclose(counts, within, atol=2)
    trainer.close()


@pytest.mark.slow
def test_two_processes_see_what_one_sees(forks, run, tmp_path):
    """The run has ended: started again, it is only tested again, here by two processes with batches
    that do not fit.
    """
    shutil.copytree(run[0], tmp_path / "run")
    before = read(tmp_path / "run")
    typed = ["epochs=2", "optimizer.lr=2e-3", "run_dir=run", "eval_batch_size=51", "report=false"]
    done = forks.ranks(tmp_path, 2, *typed, "strategy=ddp", "device=cpu")
    assert done.codes == [0, 0], done.errs
    now = read(tmp_path / "run")
    assert now["confusion"] == before["confusion"]
    for name in ("worst", "random"):
        assert [
            {k: v for k, v in sample.items() if not isinstance(v, float)} for sample in now[name]
        ] == [
            {k: v for k, v in sample.items() if not isinstance(v, float)} for sample in before[name]
        ]


def test_images_have_their_files_and_without_a_test_part_the_validation_is_shown(forks, tmp_path):
    for number, name in enumerate(("<b>cats", "dogs") * 12):
        folder = tmp_path / "pictures" / name
        folder.mkdir(parents=True, exist_ok=True)
        pixels = bytes(
            random.Random(number).randrange(100, 156) + (number % 2) * 60
            for _ in range(12 * 10 * 3)
        )
        Image.frombytes("RGB", (12, 10), pixels).save(folder / f"{number}.png")
    typed = [
        "dataset=image_folder",
        "dataset.root=pictures",
        "dataset.cache=false",
        "dataset.test_fraction=0",
    ]
    typed += ["dataset.size=10", "epochs=1", "batch_size=4", "model=linear", "run_dir=run"]
    done = forks.run(tmp_path, *typed)
    assert done.code == 0, done.err
    seen, shown = read(tmp_path / "run"), page_of(tmp_path / "run")
    assert seen["split"] == "val" and "test/loss" not in read(tmp_path / "run", "result.json")
    files = {sample["file"] for sample in seen["worst"]}
    assert files and all((tmp_path / "pictures" / file).is_file() for file in files)
    assert sorted(files) == sorted(
        {text for text in shown.all("span", "soft") if text.endswith(".png")}
    )
    assert "b" not in [tag for tag, _, text in shown.elements if text == "cats"]
    assert any(
        text.startswith("There is no test split. The validation samples were also used")
        for text in shown.all("p", "soft")
    )
    shutil.rmtree(tmp_path / "run")
    assert forks.run(tmp_path, *typed, "report=false").code == 0
    assert not {"evaluation.json", "report.html"} & set(os.listdir(tmp_path / "run"))


def test_a_run_without_a_result_has_its_commands_and_says_how_far_it_is(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    for name in ("result.json", "evaluation.json"):
        (tmp_path / "run" / name).unlink()
    shown = page_of(tmp_path / "run")
    again = [
        f"{PROGRAM} epochs=2 optimizer.lr=2e-3 run_dir=run",
        f"{PROGRAM} epochs=2 optimizer.lr=2e-3 run_dir=",
    ]
    assert [
        command.removesuffix(str(tmp_path / "run")) for command in shown.all("pre")[:2]
    ] == again
    assert shown.all("pre")[-1] == f"{PROGRAM} predict run={tmp_path / 'run'} split=test"
    samples = read(run[0], "result.json")["samples"]
    assert list(samples) == ["train", "val", "test"]
    assert read(tmp_path / "run", "status.json")["samples"] == samples
    assert shown.all("p", "soft")[0].endswith(f" + {samples['test']:,} test samples")
    [verdict] = shown.all("p", "verdict")
    assert verdict.startswith("val/acc rose from ")
    assert shown.all("span", "state") == ["stopped at step 40"]
    assert shown.all("tr", "typed") == ["epochs2", "run_dirrun", "optimizer.lr0.002"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert [
        command.removesuffix(str(tmp_path / "run"))
        for command in page_of(tmp_path / "run").all("pre")
    ] == again
    (tmp_path / "run" / "checkpoints").mkdir()
    (
        tmp_path / "run" / "checkpoints" / "step_00000045.ckpt"
    ).touch()  # as of one that was interrupted there
    typed = read(tmp_path / "run", "status.json")["overrides"]
    contents = {"total_steps": 60, "started": 1, "overrides": typed}
    write_json(tmp_path / "run" / "status.json", contents)
    shown = page_of(tmp_path / "run")
    assert shown.all("span", "state") == ["stopped at step 45 of 60 (75%)"]
    with lock.held(tmp_path / "run"):
        (tmp_path / "run" / "status.json").write_text(
            json.dumps({"total_steps": 60, "step": 15, "resumed": time.time() - 600.5})
        )
        text = report.html(tmp_path / "run")
    assert re.fullmatch(r"as of \d\d:\d\d:\d\d", Page(text).all("span", "soft")[0])
    [state] = Page(text).all("span", "state")
    assert state == "running, step 45 of 60 (75%), about 5 min 0 s to go"
    assert '<main data-reload="30"' in text and "<main>" in report.html(run[0])
    assert all(
        " run=" in command for command in page_of(tmp_path / "run").all("pre")
    )  # nobody knows what was typed


@pytest.mark.slow
def test_a_run_that_is_stopped_says_how_to_see_it_so_far(forks, tmp_path):
    slow = ["kind=slow", "step=1", "rank=0", "_target_=faults.Fault"]
    typed = [
        "dataset=synthetic",
        "log_every=1",
        "run_dir=a b",
        *(f"+callbacks.fault.{setting}" for setting in slow),
    ]
    interrupt = {"signal": signal.SIGINT, "watch": "a b/metrics.jsonl", "delay": 0}
    done = forks.run(tmp_path, *typed, signals=[interrupt])
    *_, said, again = done.err.splitlines()
    assert done.code == 130 and again.startswith(f"{PROGRAM} dataset=synthetic ")
    assert "report   a b/report.html (live)" in done.out.splitlines()
    assert "stopped at step" not in done.out  # the advice says so already
    step = re.fullmatch(r"interrupted at step (\d+)\. To resume:", said)[1]
    assert done.out.splitlines()[-1] == "report   a b/report.html"
    shown = page_of(tmp_path / "a b")
    [state] = shown.all("span", "state")
    assert state.startswith(f"stopped at step {int(step):,} of ")
    assert (tmp_path / "a b/report.html").exists()
    evaluate, *others = shown.all("pre")[
        2:
    ]  # a callback of one's own is built, so they trust it, and say so
    assert (
        all(command.endswith(" 'trusted=[faults]'") for command in [evaluate, *others])
        and len(others) == 1
    )
    assert any(text.startswith("These commands run code from faults, ") for text in shown.all("p"))
    done = forks.run(tmp_path, *shlex.split(evaluate)[2:])
    assert done.code == 0 and done.out.splitlines()[-1].startswith("test     loss "), done.err
    shutil.rmtree(tmp_path / "a b")
    done = forks.run(tmp_path, *typed, "report=false", signals=[interrupt])
    assert done.code == 130 and done.err.splitlines()[-1].startswith(
        f"{PROGRAM} dataset=synthetic "
    )


def test_what_the_doctor_has_warned_of_is_shown(forks, run, tmp_path):
    typed = [
        "dataset=synthetic",
        "callbacks=doctor",
        "optimizer.lr=3",
        "model.norm=none",
        "epochs=1",
        "run_dir=run",
    ]
    done = forks.run(tmp_path, *typed)
    warned = re.findall(r"^doctor: (.*)\n(.*)$", done.err, re.MULTILINE)
    assert done.code == 0 and warned and done.err.count("doctor: ") == len(warned)
    assert read(tmp_path / "run", "result.json")["doctor"] == ["\n".join(lines) for lines in warned]
    shown, found = (
        page_of(tmp_path / "run"),
        [line[0].upper() + line[1:] for lines in warned for line in lines],
    )
    assert (
        "What the doctor found" in shown.all("h2")
        and [p for p in shown.all("p") if p in found] == found
    )
    assert forks.run(tmp_path, *typed).code == 0  # which has come to its end, and does no step more
    assert read(tmp_path / "run", "result.json")["doctor"] == ["\n".join(lines) for lines in warned]
    assert read(run[0], "result.json")["doctor"] is None and "What the doctor found" not in page_of(
        run[0]
    ).all("h2")
    failed = forks.run(tmp_path, *typed[:-2], "optimizer.lr=1e30", "epochs=9", "run_dir=failed")
    warned = re.findall(r"^doctor: (.*)\n(.*)$", failed.err, re.MULTILINE)
    result = read(tmp_path / "failed", "result.json")
    assert failed.code == 3 and warned and result["will_repeat"]
    assert result["doctor"] == ["\n".join(lines) for lines in warned]
    page = page_of(tmp_path / "failed")
    assert "What the doctor found" in page.all("h2") and "Versions" in page.all("h2")
    [again] = [command for command in page.all("pre") if " optimizer.lr=0.003 " in command]
    assert "run_dir" not in again
    samples = read(tmp_path / "failed", "status.json")["samples"]
    counts = f"{samples['train']:,} training + {samples['val']:,} validation"
    counts += f" + {samples['test']:,} test samples"
    assert page.all("p", "soft")[0].endswith(f", cpu, fp32, {counts}")
    shown = [*page.all("p"), *page.all("pre"), *page.all("td")]
    assert not [text for text in shown if re.search(r"\de\+\d", text)]  # 1e30, as it was typed
    result = read(tmp_path / "run", "result.json")
    result["doctor"] = ["a" * 10**4 + "\n" + "b" * 10**4] * 50
    write_json(tmp_path / "run" / "result.json", result)
    lines = [p for p in page_of(tmp_path / "run").all("p") if {"a…", "b…"} & {p[-2:].lower()}]
    assert list(map(len, lines)) == [500] * 40


# What is said.


def without(mapping, key):
    return {name: value for name, value in mapping.items() if name != key}


def test_the_verdict_is_a_function_of_the_numbers(tmp_path):
    def rows(*values, name="val/acc"):
        return [{"epoch": i, "step": i, name: value} for i, value in enumerate(values, 1)]

    def best(rows, step, mode="max", name="val/acc"):
        return {"name": name, "mode": mode, "step": step, "value": rows[step - 1][name]}

    even = {
        "kind": "classification",
        "split": "test",
        "confusion": [[5, 5], [5, 5]],
        "classes": ["a", "b"],
        "chance": 0.5,
        "samples": 20,
    }
    chance = "no better than always predicting the most frequent class (50.0%)"
    usual = "(always predicting the most frequent class: 50.0%)"
    luck, good = even | {"confusion": [[6, 4], [4, 6]]}, even | {"confusion": [[9, 1], [1, 9]]}
    half = "50.0% of 20 test samples right"
    numbers, then = (
        {"kind": "regression", "split": "test", "samples": 9},
        "after epoch 1 to 1.5000 after epoch 2 (step 2).",
    )
    mean = "on 9 test samples than always predicting their mean (r2 -0.5000), and is off by 3.0000 on average."
    worse = "The model is no better on 9 validation samples than always predicting their mean (r2 -0.2500)"
    price = "The model explains 50.0% of the variance of price in 9 test samples"
    price = f"{price} (always predicting their mean: 0%)"
    up, down = rows(0.5, 0.75, 0.7), rows(2.0, 1.5, name="val/loss")
    for result, these, seen, at, said in [
        ({}, [], {}, None, "Not evaluated yet."),
        ({}, [{"epoch": 0, "step": 3}], {}, None, "Not evaluated yet."),
        ({"steps": 3}, [{"epoch": 0, "step": 3}], {}, None, "Not evaluated."),
        ({}, up[:1], {}, best(up, 1), "val/acc was 0.5000 after step 1."),
        (
            {},
            [*up, {"epoch": 3, "step": 8}],
            {},
            best(up, 2),
            "val/acc rose from 0.5000 after epoch 1 to 0.7500 after epoch 2 (step 2).",
        ),
        (
            {},
            down[:1],
            even,
            best(down, 1, "min", "val/loss"),
            f"The model gets {half}, {chance}; val/loss was 2.0000 after step 1.",
        ),
        ({}, [], even, None, f"The model gets {half}, {chance}."),
        ({}, [], luck, None, f"The model gets 60.0% of 20 test samples right, {chance}."),
        ({}, [], good, None, f"The model gets 90.0% of 20 test samples right {usual}."),
        (
            {"test/loss": 2.0, "test/acc": 0.5},
            [],
            without(even, "confusion"),
            None,
            f"The model gets {half}, {chance}.",
        ),
        ({"error": "it broke.\nType x."}, up, even, None, "The run failed: it broke. Type x."),
        (
            {"error": "Lower it.\nTo replay: stoker a=1"},
            up,
            even,
            None,
            "The run failed: Lower it. To replay: stoker a=1",
        ),
        (
            {"a": 1},
            up,
            {},
            best(up, 2),
            "val/acc rose from 0.5000 after epoch 1 to 0.7500 after epoch 2 (step 2).",
        ),
        (
            {"a": 1},
            up,
            {},
            best(up, 1),
            "val/acc was 0.5000 after epoch 1 (step 1), and did not improve later.",
        ),
        ({"a": 1}, up[:1], {}, best(up, 1), "val/acc was 0.5000 after step 1."),
        ({"a": 1}, down, {}, best(down, 2, "min", "val/loss"), f"val/loss fell from 2.0000 {then}"),
        ({"a": 1}, [], even, None, f"The model gets 50.0% of 20 test samples right, {chance}."),
        ({"test/loss": 0.25}, [], {}, None, "test/loss is 0.2500."),
        ({"test/loss": 0.25, "test/f1": 0.5}, [], {}, None, "test/f1 is 0.5000."),
        (
            {"val/r2": -0.5, "val/mae": 3.0, "steps": 2},
            [],
            numbers | {"split": "val"},
            {"name": "val/r2", "mode": "max", "step": 1, "value": -0.25},
            f"{worse}; val/r2 is -0.2500 at its best.",
        ),
        ({"test/r2": -0.5, "test/mae": 3.0}, [], numbers, None, f"The model is no better {mean}"),
        (
            {"test/r2": 0.5, "test/mae": 3.0},
            [],
            numbers | {"target": "price"},
            None,
            f"{price}, and is off by 3.0000 on average.",
        ),
        (
            {"test/r2": 0.5, "test/mae": 3.0},
            [],
            numbers | {"target": "price", "points": [[[1, 2], [3, 4]]]},
            None,
            f"{price}.",
        ),
    ]:
        run = run_with(these, seen, tmp_path)
        if result:
            run.has_ended = True
            write_json(tmp_path / "result.json", result | {"best": at})
            run.result = RunResult.read(tmp_path)
        elif at:
            run.status.best = Best(**at)
        assert summary.quality_verdict(run) == said


def test_data_of_ones_own_has_its_own_name():
    def about(**dataset):
        config = {"model": {"_target_": "stoker.models.mlp.MLP"}, "dataset": dataset}
        return summary.about(run_with(config=dotted.flat(config), result=RunResult(device="cpu")))

    assert about(_target_="stoker.data.datasets.digits") == "MLP on digits, cpu"
    assert about(_target_="stoker.data.tables.csv", path="a/houses.csv") == "MLP on houses.csv, cpu"
    assert (
        about(_target_="stoker.data.images.image_folder", root=f"{'a' * 300}/photos/")
        == "MLP on photos, cpu"
    )
    assert (
        about(_target_="stoker.data.images.image_folder", root=[3])
        == "MLP on image_folder, cpu"
        == about(_target_="stoker.data.images.image_folder", root=".")
    )
    assert about(_target_="stoker.data.tables.csv") == "MLP on csv, cpu"


def test_shares_in_words():
    values = {
        0.5: "50.0%",
        0.9795: "98.0%",
        0.972: "97.2%",
        0.9994: "99.94%",
        1.0: "100%",
        0.0: "0%",
        0.00012: "0.012%",
        0.142857: "14.3%",
    }
    assert {share: words.percent(share) for share in values} == values
    numbers = {0.0: "0.0000", 3.2154e-5: "3.215e-05", -0.00051234: "-0.0005123", 0.001: "0.0010"}
    assert {value: number_format.number(value) for value in numbers} == numbers
    assert (
        number_format.number(1e99) == "1e99"
        and number_format.number(-123456789012345.0) == "-123,456,789,012,345"
    )


def test_the_monitored_metric_leads():
    numbers = {"test/loss": 0.5, "test/acc": 0.9, "test/miou": 0.7}
    result = RunResult(numbers=numbers)
    result.best = Best("val/miou", "max", 4, 0.8)
    assert list(result.tests()) == ["test/miou", "test/acc", "test/loss"]
    assert list(RunResult(numbers=numbers).tests()) == ["test/acc", "test/miou", "test/loss"]


def test_the_target_of_a_table_is_named():
    seen = {"kind": "regression", "split": "test", "samples": 9, "target": "price"}
    config = {
        "model": {"_target_": "models.MLP"},
        "dataset": {"_target_": "stoker.data.tables.csv", "path": "a.csv"},
    }
    run = run_with((), seen, config=dotted.flat(config))
    assert summary.about(run) == "MLP on a.csv, target price"


@pytest.mark.parametrize("bins", [[[], []], [[0] * 10, [0] * 10], [[5] * 20, [5] * 20]])
def test_any_bins_are_drawn(bins):
    seen = {"kind": "classification", "split": "test", "samples": 9, "classes": ["a", "b"]}
    seen |= {"confidence": bins, "second": bins}
    drawn = evaluation.probabilities(report.inputs.evaluation_of(seen))
    assert len(drawn) == (3 if any(bins[1]) else 0)


def test_a_thin_curve_keeps_its_ends_and_its_extremes():
    generator = random.Random(0)
    points = [(i, generator.random()) for i in range(12345)]
    points[4321], points[7777] = (4321, 9.0), (7777, -9.0)
    thin = plots.thin(points, 400)
    assert len(thin) <= 400 and thin == sorted(thin) and set(thin) <= set(points)
    assert {points[0], points[-1], (4321, 9.0), (7777, -9.0)} <= set(thin)
    assert plots.thin(points[:400], 400) == points[:400]


def test_a_figure_has_its_curves_with_six_digits():
    drawn = plots.figure("a\x1b", "step", {"val": [(1, 1 / 3)], "own": [(2, 2)]}, end=2)
    val = {"name": "val", "colour": "val", "points": [(1, 0.333333)]}
    own = {"name": "own", "colour": "c1", "points": [(2, 2.0)]}
    assert drawn == {"title": "a\\x1b", "x": "step", "lines": [val, own], "end": 2}


def test_the_best_step_and_the_warmup_are_marked(run):
    loss, acc, rate, _ = plots_of(page_of(run[0]))
    best = read(run[0], "result.json")["best"]
    assert acc["best"] == [best["step"], best["value"]] and loss["best"][0] == best["step"]
    assert rate["best"] is None and [plot["warmup"] for plot in (loss, acc, rate)] == [2, 2, 2]
    assert (loss["end"], loss["epochs"]) == (40, 0.05) and [loss["log"], acc["log"]] == [
        True,
        False,
    ]
    assert [line["name"] for line in loss["lines"]] == ["train", "val"]


def test_without_scripts_the_last_values_of_the_curves_are_shown(run):
    last = {}
    for row in inputs.read_rows(run[0] / "metrics.jsonl"):
        last |= row
    first, *_ = page_of(run[0]).all("noscript")
    losses = [number_format.number(last[name]) for name in ("train/loss", "val/loss")]
    assert re.sub(r"\s", "", first) == f"curvelastvaluetrain{losses[0]}val{losses[1]}"


def test_the_warmup_is_that_of_our_schedules():
    config = {"scheduler._target_": "stoker.trainer.schedules.cosine", "scheduler.warmup": 0.1}
    result = RunResult(total_steps=1000)
    assert curves.warmup_of(run_with(config=config, result=result)) == 100
    for odd in ({"scheduler.warmup": -1}, {"scheduler.warmup": "x"}, {"scheduler._target_": "own"}):
        assert curves.warmup_of(run_with(config=config | odd, result=result)) == 0


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 23])
def test_the_generated_texts_of_a_report_spread_over_the_training(tmp_path, count):
    texts = [json.dumps({"step": i, "epoch": i, "text": f"text {i}"}) for i in range(count)]
    (tmp_path / "samples.jsonl").write_text(
        "".join(f"{text}\n" for text in texts), encoding="utf-8"
    )
    steps = [row["step"] for row, _ in inputs.read_texts(tmp_path / "samples.jsonl")]
    if count <= 5:
        assert steps == list(range(count))
    else:
        gaps = {after - before for before, after in pairwise(steps)}
        assert len(steps) == 5 and (steps[0], steps[-1]) == (0, count - 1)
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("epochs", "first", "last"),
    [
        ((0.25, 1), "step 10", "step 40"),
        ((1, 4), "epoch 1", "epoch 4"),
        ((0.5, 2), "step 10", "epoch 2"),
    ],
    ids=["stream", "epochs", "parts"],
)
def test_a_verdict_names_epochs_at_their_ends_and_steps_within_them(tmp_path, epochs, first, last):
    """So do the texts that its model generated. A stream is a single epoch."""
    best = Best("val/loss", "min", 40, 1.0)
    steps = zip((10, 40), epochs, strict=True)
    rows = [{"step": step, "epoch": epoch, "val/loss": 41 - step} for step, epoch in steps]
    texts = [json.dumps({**row, "text": "a"}) for row in rows]
    (tmp_path / "samples.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    run = run_with(rows, folder=tmp_path, result=RunResult(best=best), has_ended=True)
    verdict = report.summary.quality_verdict(run)
    at = last if last.startswith("step") else f"{last} (step 40)"
    assert verdict == f"val/loss fell from 31.0000 after {first} to 1.0000 after {at}."
    assert [report.summary.moment(run, row) for row, _ in run.texts] == [first, last]


def test_a_step_near_zero_leaves_the_time_unknown():
    status = Status(resumed=0.0, total_steps=40)
    rows = [{"step": 1e-320, "epoch": 1.0}]
    run = run_with(rows, state="running", status=status)
    assert report.summary.progress(run, 1e9) == "running, step 0 of 40 (0%)"


def test_numbers_of_your_own_and_of_further_groups_are_drawn():
    names = ("train/lr", "train/loss", "my/norm", "val/acc", "val/loss", "train/acc")
    more = ("train/lr/head", "hard/loss", "train/seconds", "device/memory_mib", "train/grad_norm")
    rows = [{"step": i, "epoch": i, **dict.fromkeys((*names, *more), i)} for i in (1, 2)]
    rows.append({"step": 3, "epoch": 3, "val/once": 1})
    drawn = curves.frames(run_with(rows))
    expected = {
        "loss": {"train": "train", "val": "val", "hard": "c2"},
        "acc": {"val": "val", "train": "train"},
        "learning rate": {"train": "train"},
        "norm": {"my": "c0"},
        "lr/head": {"train": "train"},
        "device memory held, MiB": {"device": "c0"},
        "gradient norm": {"train": "train"},
    }
    colours = {}
    for plot in drawn:
        colours[plot["title"]] = {line["name"]: line["colour"] for line in plot["lines"]}
    assert list(colours.items()) == list(expected.items())
    assert [plot["title"] for plot in drawn if plot["log"]] == ["loss", "gradient norm"]


def test_the_best_of_another_split_is_marked_on_its_curves():
    rows = [{"step": i, "epoch": i, "val/loss": 1, "hard/loss": i / 10} for i in (1, 2, 3)]
    best = Best("hard/loss", "min", 2, 0.2)
    run = run_with(rows, result=RunResult(best=best), has_ended=True)
    assert curves.frames(run)[0]["best"] == (2, 0.2)


def test_plots_and_curves_are_limited():
    names = [f"{split}/{metric}" for split in range(50) for metric in range(50)]
    rows = [{"step": i, "epoch": i, **dict.fromkeys(names, i)} for i in (1, 2)]
    drawn = curves.frames(run_with(rows))
    assert len(drawn) == curves.MOST_PLOTS
    assert {len(plot["lines"]) for plot in drawn} == {curves.MOST_CURVES}


def test_time_and_memory_are_shown_as_shares(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    result = read(run[0], "result.json") | {
        "seconds": 12.5,
        "time": {"data": 6.3, "forward": 1.7, "optimizer": 2.0, "other": 0, "<b>": 5},
        "speed": "the GPU waited 63% of the time for data",
        "git": {"revision": "0123abc", "dirty": True},
    }
    (tmp_path / "run" / "result.json").write_text(json.dumps(result), encoding="utf-8")
    shown = page_of(tmp_path / "run")
    boxes = [text for text in shown.all("span", "box") if text != "warmup"]
    assert boxes[:3] == [
        "data 6.3 s, 63.0%",
        "forward 1.7 s, 17.0%",
        "optimizer 2.0 s, 20.0%",
    ]
    text = " ".join(shown.all("p"))
    assert (
        "Training took 10.0 s, including evaluations and checkpoints, out of 12.5 s since the run was "
        "last started. The rest was startup, the first step and the final evaluation."
    ) in text
    assert (
        "The GPU waited 63% of the time for data." in text
        and "0123abc, with uncommitted changes" in text
    )
    time = {stage: 1.0 for stage in report.STAGES if stage != "step"}  # drawn like forward
    result |= {"time": time}
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    text = " ".join(page_of(tmp_path / "run").all("p"))
    assert "including evaluations, checkpoints and updates of this page (report), out of" in text
    bar = report.html(tmp_path / "run").partition('<div class="bar">')[2].partition("</div>")[0]
    assert len(set(re.findall(r"--c\d", bar))) == len(time)


@pytest.mark.parametrize("size", [30, 50])
def test_many_classes_are_tables(run, tmp_path, monkeypatch, size):
    """Up to 40 classes there is a matrix too, whose names are turned if they are long."""
    monkeypatch.setattr(curves, "frames", lambda run: [])
    shutil.copytree(run[0], tmp_path / "run")
    seen = read(tmp_path / "run")
    seen["classes"] = names = [f"lesser_black_backed_gull_{i}" for i in range(size)]
    counts = [[10 if i == j else 0 for j in range(size)] for i in range(size)]
    counts[3][7], counts[9][1] = 8, 5
    seen["confusion"] = counts
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(seen), encoding="utf-8")
    classes = confusion.classes_of(report.inputs.evaluation_of(seen))
    assert confusion.most_confused(classes) == [
        [names[3], names[7], "8 of 18"],
        [names[9], names[1], "5 of 15"],
    ]
    [row] = [row for row in classes if row.name == names[9]]
    assert (row.shades[1], row.shades[9], row.shades[2]) == (58, 82, 0)  # roots of 5 and 10 of 15
    shown = page_of(tmp_path / "run")
    heads = [
        (attributes["title"], text)
        for tag, attributes, text in shown.elements
        if tag == "th" and "title" in attributes
    ]
    assert "Most confused" in shown.all("h3")
    samples = "From the 359 test samples."
    assert shown.all("p").count(samples) == 1
    if size == 50:
        assert len(heads) == 20  # the bars of the lowest ones
        assert any(text.endswith(", lowest first: 20 of 50 classes.") for text in shown.all("p"))
        assert len(shown.all("details")) == 2 and not shown.all("td", "cell")
        [listed, _] = shown.all("details")
        assert listed.index(names[3]) < listed.index(names[9]) < listed.index(names[0])
        names[0] = "."
        counts[0][0], counts[0][2] = 0, 10
        (tmp_path / "run" / "evaluation.json").write_text(json.dumps(seen), encoding="utf-8")
        shown = page_of(tmp_path / "run")
        assert "The recall of 1 other class is 0: “.”" in shown.all("p")
    else:
        assert heads[20:] == 2 * [(name, f"lesser_bl…{name[-14:]}") for name in names]
        assert len(shown.all("table", "upright")) == 1
        assert shown.all("td", "right") == ["10"] * size


# Anybody's.

NASTY = "<script>alert(1)</script>\"'&\x1b[31m{{7*7}}"


def test_what_anybody_wrote_is_text(run, tmp_path):
    folder = tmp_path / "<i>run"
    shutil.copytree(run[0], folder)
    result, seen = read(folder, "result.json"), read(folder)
    result |= {
        "overrides": [f"model={NASTY}", "epochs=2"],
        "speed": NASTY,
        "stopped": NASTY,
        "total_steps": 10**6,
    }
    result |= {
        "device": NASTY,
        "versions": {NASTY: NASTY},
        "git": {"revision": NASTY},
        f"test/{NASTY}": 1.0,
    }
    result |= {"doctor": [f"{NASTY}\n{NASTY}"]}
    seen["classes"] = [NASTY] * 10
    seen["worst"][0]["file"], seen["worst"][1] = (
        NASTY,
        seen["worst"][1] | {"png": None, "columns": {NASTY: NASTY}},
    )
    seen["worst"][2]["png"] = f'"><script>{seen["worst"][2]["png"]}'
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "evaluation.json").write_text(json.dumps(seen), encoding="utf-8")
    with open(folder / "config.yaml", "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(NASTY)}: {json.dumps(NASTY)}\n")
    rows = [{"step": i, "epoch": i, f"{NASTY}/loss": i, f"val/{NASTY}": i} for i in (41, 42)]
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    text = report.html(folder)
    shown = Page(text)
    curves = [line["name"] for plot in plots_of(shown) for line in plot["lines"]]
    assert any(name.startswith("<script>alert(1)<") for name in curves)
    assert (
        text.count("<script") == 1 and "\x1b" not in text and "49" not in shown.all("p", "soft")[0]
    )
    assert "i" not in {tag for tag, attributes, _ in shown.elements if not attributes}
    assert "{{7*7}}" in text and len(images_of(shown)) == 2 * len(seen["worst"]) - 1


def images_of(shown):
    return [1 for tag, *_ in shown.elements if tag == "img"]


FILES = ("config.yaml", "metrics.jsonl", "result.json", "evaluation.json")


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"\xff", b"[]", b"[" * 10**5])
@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_is_none_leaves_its_part_out(run, tmp_path, name, content):
    shutil.copytree(run[0], tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    whole, shown = page_of(run[0]).all("h2"), page_of(tmp_path / "run").all("h2")
    gone = {"metrics.jsonl": {"Training"}, "result.json": {"Time", "Memory"}}
    gone |= {
        "evaluation.json": {
            "Classes",
            "Probabilities",
            "Random samples",
            "Worst: highest loss",
        }
    }
    assert set(whole) - set(shown) == gone[name] and set(shown) <= set(whole)


@pytest.mark.skipif(os.name != "posix", reason="pipes and links")
@pytest.mark.parametrize("name", FILES)
def test_links_and_pipes_are_not_read(run, tmp_path, name, capsys):
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        shutil.copytree(run[0], tmp_path / "run")
        (tmp_path / "run" / name).unlink()
        make(tmp_path / "run" / name)
        is_refused = name == "config.yaml"
        with pytest.raises(UserError) if is_refused else contextlib.nullcontext():
            redraw([str(tmp_path / "run")])
        shutil.rmtree(tmp_path / "run")
    assert "Traceback" not in capsys.readouterr().err


ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(NASTY)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def spoilt(value, draw):
    """The value with one place in it, anywhere, replaced by anything."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[key] = spoilt(value[key], draw)
        return copy
    return draw(ANYTHING)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_entry_of_another_kind_breaks_the_page(run, tmp_path_factory, data):
    """Without the drawing of curves, which is slow: their points are numbers by then."""
    folder = tmp_path_factory.mktemp("spoilt")
    for name in FILES:
        shutil.copy(run[0] / name, folder / name)
    for name in ("result.json", "evaluation.json"):
        contents = read(folder, name)
        if name == "result.json":
            contents |= {
                "time": {"data": 1.0, "step": 2.0},
                "git": {"revision": "a", "dirty": False},
            }
            contents |= {"doctor": ["a\nb", "c"]}
        for _ in range(data.draw(st.integers(1, 4))):
            contents = spoilt(contents, data.draw)
        (folder / name).write_text(json.dumps(contents), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "frames", lambda run: [])
        text = report.html(folder)
    assert text.count("<script") == 1 and Page(text).all("h1")


def test_only_small_pictures_are_shown():
    seen = report.inputs.evaluation_of(
        {"kind": "classification", "split": "test", "samples": 9, "classes": ["a"]}
    )
    for size, count in ((evaluation.MOST_PNG, 2), (evaluation.MOST_PNG + 1, 1), (0, 1)):
        sample = Sample(1, 0, 0, png="a" * size, masks=["b"])
        assert len(evaluation.shown(sample, seen)["pictures"]) == count


def test_the_page_stays_below_a_megabyte(run, tmp_path):
    """Pictures of noise, classes with long names, many settings and long curves: what is too much
    is left out.
    """
    shutil.copytree(run[0], tmp_path / "run")
    seen, generator = read(tmp_path / "run"), random.Random(0)
    Image.frombytes("RGB", (90, 90), generator.randbytes(90 * 90 * 3)).save(
        stream := io.BytesIO(), "PNG"
    )
    noise = base64.b64encode(stream.getvalue()).decode()
    seen["worst"] = seen["random"] = [sample | {"png": noise} for sample in seen["worst"]]
    seen["classes"] = ["&" * 300] * 40
    seen["confusion"] = [[generator.randrange(10**9) for _ in range(40)] for _ in range(40)]
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(seen), encoding="utf-8")
    lines = (
        f'{{"step": {i}, "epoch": {i / 100}, "train/loss": {generator.random()}}}\n'
        for i in range(50_000)
    )
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    with open(tmp_path / "run" / "config.yaml", "a", encoding="utf-8") as file:
        file.writelines(f"key{i}: '{'<' * 150}'\n" for i in range(500))
    text = report.html(tmp_path / "run")
    assert len(text.encode()) < MOST_PAGE and 0 < len(images_of(Page(text))) < 32


def test_a_page_takes_no_more_than_it_can_show(run, tmp_path):
    """Of somebody's overrides, and of names."""
    shutil.copytree(run[0], tmp_path / "run")
    result = read(tmp_path / "run", "result.json")
    for typed in (["model=mlp"] * 50_000, ["seed=" + "1" * 10**6]):
        (tmp_path / "run" / "result.json").write_text(
            json.dumps(result | {"overrides": typed}), encoding="utf-8"
        )
        text = report.html(tmp_path / "run")
        assert len(text.encode()) < MOST_PAGE and all(
            "run=" in command for command in Page(text).all("pre")
        )
    long = result["best"] | {"name": "val/" + "a" * 2 * 10**6}
    contents = json.dumps(result | {"best": long, "device": "b" * 2 * 10**6})
    (tmp_path / "run" / "result.json").write_text(contents, encoding="utf-8")
    assert len(report.html(tmp_path / "run").encode()) < MOST_PAGE


def test_mistakes_are_answered(forks, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "result.json").write_text('{"error": "no data"}')
    for arguments, said in [
        ([], f"Type {PROGRAM} redraw DIR."),
        (["a", "b"], f"Type {PROGRAM} redraw DIR."),
        (["--opn", "x"], "--opn: no such option."),
        (["mien"], "mien: no such file or directory."),
        (["index.html"], "index.html: not a directory."),
        (["empty"], "redraw empty: no run has begun in this folder."),
        (["failed"], "redraw failed: no run has begun in this folder."),
        (["."], "index.html is not an index of runs. Move or rename it first."),
    ]:
        done = forks.run(tmp_path, "redraw", *arguments)
        assert done.code == 2 and said in done.err
        assert done.err.startswith("error: ") and done.err.count("\n") <= 3
    assert os.listdir(tmp_path / "empty") == []
    assert os.listdir(tmp_path / "failed") == ["result.json"]


def test_a_report_that_cannot_be_drawn_costs_nothing(monkeypatch, caplog, tmp_path):
    def fails(folder, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write", fails)
    drawing.draw_report(tmp_path / "a b")
    assert (
        "No space left on device" in caplog.text and f"redraw '{tmp_path / 'a b'}'" in caplog.text
    )


def test_whatever_is_given_to_a_template_is_escaped(tmp_path):
    assert plain("a\x1b<") == "a\\x1b<"
    for name, value in {"<c>": "a\x1b<", "2": "b"}.items():
        record = {"overrides": [f"<h>={value}"]}
        write_json(tmp_path / "<x>" / name / "job.json", record)
    shown = of_sweep(Sweep(tmp_path / "<x>"), "", None, "", is_over=True)
    assert all(f"&lt;{name}&gt;" in shown for name in "xhc")
    assert ">a\\x1b&lt;</td>" in shown and "\x1b" not in shown


def test_the_rows_of_a_table_have_its_columns_as_they_were_written(tmp_path):
    generator = random.Random(0)
    lines = ["area,zip,hour,people,built,kind,price"]
    areas = ["" if i % 5 == 0 else f"{generator.uniform(30, 200):.1f}" for i in range(80)]
    for i, area in enumerate(areas):
        numbers = [generator.randrange(10**4, 10**5), i % 24, generator.randrange(10**5, 10**7)]
        numbers.append(f"2019-06-{i % 30 + 1:02}" + " 12:35" * (i % 3 == 0))
        lines.append(",".join(map(str, [area, *numbers, generator.choice("abc"), i * 10 + 5])))
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_text("\n".join(lines), encoding="utf-8")
    data = tables.csv(str(tmp_path / "a.csv"), "price", missing="mean")
    trainer = make_trainer(
        torch.nn.Linear(8, 1), loss=torch.nn.MSELoss(), metrics=default_metrics("regression")
    )
    (_, _, loader), _ = make_loaders(data, batch_size=8)
    _, seen = examine.evaluate(trainer, loader, "test", data)
    examine.write(tmp_path / "evaluation.json", seen, data)
    trainer.close()
    assert "" in [sample["columns"]["area"] for sample in read(tmp_path)["worst"]]
    assert read(tmp_path)["target"] == "price"
    seen = report.inputs.read_evaluation(tmp_path / "evaluation.json")
    for sample in seen.worst:
        area, *others, price = lines[sample.line - 1].split(",")
        shown = evaluation.shown(sample, seen)
        line, true, predicted, error, *columns = shown["cells"].values()
        assert line == f"line {sample.line}"
        assert true == number_format.number(float(price))
        difference = float(predicted.replace(",", "")) - float(price)
        assert float(error.replace(",", "")) == pytest.approx(difference, rel=1e-3)
        assert columns == [area.removesuffix(".0"), *others]


@pytest.mark.parametrize("wrong", [{"true": 10}, {"tokens": ["a"]}, {"predicted": {}}])
def test_an_evaluation_that_cannot_be_drawn_is_left_out(run, tmp_path, caplog, wrong):
    """Whoever wrote it: the file is not trusted."""
    shutil.copytree(run[0], tmp_path / "run")
    seen = read(run[0])
    seen["worst"][3] |= wrong
    write_json(tmp_path / "run" / "evaluation.json", seen)
    shown = page_of(tmp_path / "run")
    assert set(page_of(run[0]).all("h2")) - set(shown.all("h2")) >= {"Classes", "Random samples"}
    assert "evaluation.json cannot be shown" in caplog.text
