"""Every metric in ragged batches equals one batch, and torchmetrics where it has the same one."""

import functools
import importlib
import importlib.util
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from stoker.command import build, sample_check, trust
from stoker.data.datasets import Data, TensorSplit
from stoker.data.record import default_metrics
from stoker.trainer.errors import UserError
from stoker.trainer.metrics import (
    MAE,
    MSE,
    R2,
    Accuracy,
    Confusion,
    Mean,
    MeanIoU,
    Perplexity,
    TopK,
)

N, CLASSES, TARGETS = 100, 6, 3
CLASSIFIERS = {
    "accuracy": Accuracy,
    "top1": functools.partial(TopK, 1),
    "top3": functools.partial(TopK, 3),
    "confusion": functools.partial(Confusion, CLASSES),
    "miou": functools.partial(MeanIoU, CLASSES),
    "perplexity": Perplexity,
}
REGRESSORS = {
    "mse": MSE,
    "mae": MAE,
    "r2": R2,
    "scaled mse": functools.partial(MSE, 2.5),
    "scaled mae": functools.partial(MAE, 2.5),
}
needs_torchmetrics = pytest.mark.skipif(
    importlib.util.find_spec("torchmetrics") is None,
    reason="torchmetrics is not installed: pip install -e '.[metrics]'",
)


def scores(n=N, seed=0):
    """(outputs (N, C), classes (N,)), some of them right."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (n,), generator=generator)
    return torch.randn(n, CLASSES, generator=generator) + one_hot(targets, CLASSES), targets


def numbers(n=N, seed=0):
    """(outputs (N, T), targets (N, T)), related, far from 0."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(n, TARGETS, generator=generator) * torch.tensor(
        [1.0, 3.0, 0.1]
    ) + torch.tensor([5.0, -2.0, 100.0])
    return targets + 0.3 * torch.randn(n, TARGETS, generator=generator), targets


def data_for(name):
    return numbers() if name in REGRESSORS else scores()


def evaluated(metric, outputs, targets, sizes):
    for part in zip(outputs.split(sizes), targets.split(sizes), strict=True):
        metric.update(*part)
    return metric.compute()


def same(first, second):
    # of a perplexity, the losses are float32
    torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS])
def test_batches_of_seven_give_what_one_batch_gives(name):
    make = {**CLASSIFIERS, **REGRESSORS}[name]
    outputs, targets = data_for(name)
    same(evaluated(make(), outputs, targets, 7), evaluated(make(), outputs, targets, N))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*CLASSIFIERS, *REGRESSORS]),
    st.lists(st.integers(1, N - 1), max_size=12, unique=True),
)
def test_any_partition_gives_the_same(name, cuts):
    make = {**CLASSIFIERS, **REGRESSORS}[name]
    outputs, targets = data_for(name)
    bounds = [0, *sorted(cuts), N]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    same(evaluated(make(), outputs, targets, sizes), evaluated(make(), outputs, targets, N))


@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS])
def test_reset_forgets_and_nothing_is_nan(name):
    metric = {**CLASSIFIERS, **REGRESSORS}[name]()
    assert metric.compute().isnan()
    outputs, targets = data_for(name)
    first = evaluated(metric, outputs[:30], targets[:30], 7)
    same(metric.compute(), first)  # asking changes nothing
    metric.reset()
    assert metric.compute().isnan()
    same(
        evaluated(metric, outputs[30:] * 2, targets[30:], 7),
        evaluated({**CLASSIFIERS, **REGRESSORS}[name](), outputs[30:] * 2, targets[30:], 7),
    )


@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS])
def test_the_sums_are_wide_and_on_the_device(name):
    metric = {**CLASSIFIERS, **REGRESSORS}[name]()
    outputs, targets = data_for(name)
    metric.update(outputs.to(torch.bfloat16), targets)
    assert metric.compute().dtype == (torch.int64 if name == "confusion" else torch.float64)
    on_meta = {**CLASSIFIERS, **REGRESSORS}[name]()
    on_meta.update(
        outputs.to("meta"), targets.to("meta")
    )  # nothing in an update may ask for a value: the meta device has none
    on_meta.update(outputs.to("meta"), targets.to("meta"))
    assert on_meta.compute().device.type == "meta"


def test_float32_sums_would_be_wrong():
    """2**24 + 1 is no float32: a float32 sum of so many samples stands still."""
    metric = Accuracy()
    metric.add(torch.tensor([2**24, 2**24]))
    metric.update(torch.tensor([[0.0, 1.0]] * 3), torch.tensor([0, 0, 1]))
    assert metric.sums.tolist() == [2**24 + 1, 2**24 + 3]
    assert metric.compute().item() == (2**24 + 1) / (2**24 + 3)


# what each one is


def test_accuracy_and_top_k_by_hand():
    outputs = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0]])
    targets = torch.tensor([0, 2, 0, 2])
    for metric, expected in [
        (Accuracy(), 0.5),
        (TopK(1), 0.5),
        (TopK(2), 0.75),
        (TopK(3), 1.0),
        (TopK(50), 1.0),
    ]:
        metric.update(outputs, targets)
        assert metric.compute().item() == expected


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_soft_targets_count_as_their_largest(name):
    outputs, targets = scores()
    soft = (
        0.7 * one_hot(targets, CLASSES).float()
        + 0.3 * one_hot((targets + 1) % CLASSES, CLASSES).float()
    )
    same(
        evaluated(CLASSIFIERS[name](), outputs, soft, 7),
        evaluated(CLASSIFIERS[name](), outputs, targets, 7),
    )


def test_confusion_against_a_slow_loop():
    outputs, targets = scores()
    counts = [[0] * CLASSES for _ in range(CLASSES)]
    for row, target in zip(outputs.tolist(), targets.tolist(), strict=True):
        counts[target][row.index(max(row))] += 1
    found = evaluated(Confusion(CLASSES), outputs, targets, 7)
    assert found.tolist() == counts and found.sum() == N
    accuracy = evaluated(Accuracy(), outputs, targets, N)
    same(found.diagonal().sum() / found.sum(), accuracy.float())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_small_integers_are_classes_like_any_other(dtype):
    """A uint8 has no -100, which as one is class 156, and 16 * 16 is 0."""
    from sklearn.metrics import accuracy_score, confusion_matrix

    outputs = torch.randn(500, 200, generator=torch.Generator().manual_seed(0))
    targets = outputs.argmax(1)
    targets[::3] = torch.arange(len(targets[::3])) + 30
    best = outputs.argmax(1)
    table = Confusion(200)
    table.update(outputs, targets.to(dtype))
    assert table.compute().tolist() == confusion_matrix(targets, best, labels=range(200)).tolist()
    for metric in (Accuracy(), TopK(1)):
        metric.ignored_by_loss = -100
        metric.update(outputs, targets.to(dtype))
        assert metric.compute().item() == pytest.approx(accuracy_score(targets, best), rel=1e-12)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_pixels_are_samples(name):
    """The classes are the second dimension, as in torch's cross_entropy."""
    outputs, targets = scores()
    pixels = len(targets) // 6 * 6
    images = outputs[:pixels].view(-1, 2, 3, CLASSES).permute(0, 3, 1, 2)
    found = evaluated(CLASSIFIERS[name](), images, targets[:pixels].view(-1, 2, 3), 4)
    same(found, evaluated(CLASSIFIERS[name](), outputs[:pixels], targets[:pixels], 7))


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (
            torch.zeros(4, 1),
            torch.zeros(4, dtype=torch.int64),
        ),  # one logit: its largest is always the first
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4), torch.zeros(4)),
        (
            torch.zeros(4, CLASSES),
            torch.eye(4, CLASSES).roll(1, 1) + torch.eye(4, CLASSES),
        ),  # several labels a sample
        (torch.zeros(4, 3, CLASSES), torch.zeros(4, 3, dtype=torch.int64)),
    ],
)
def test_what_is_not_one_class_of_several_is_refused(name, outputs, targets):
    with pytest.raises(UserError, match=r"one class per sample.*\n.*MultilabelAccuracy"):
        CLASSIFIERS[name]().update(outputs, targets)


def test_regression_by_hand():
    outputs, targets = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[1.0], [3.0], [4.0]])
    for metric, expected in [
        (MSE(), 5 / 3),
        (MAE(), 1.0),
        (R2(), 1 - 5 / (14 / 3)),
        (MSE(10.0), 500 / 3),
        (MAE(10.0), 10.0),
    ]:
        metric.update(outputs, targets)
        assert metric.compute().item() == pytest.approx(expected, rel=1e-14)


def test_scale_gives_the_targets_own_units():
    outputs, targets = numbers()
    same(
        evaluated(MSE(3.0), outputs, targets, 7),
        evaluated(MSE(), 3.0 * outputs.double(), 3.0 * targets.double(), 7),
    )
    same(
        evaluated(MAE(3.0), outputs, targets, 7),
        evaluated(MAE(), 3.0 * outputs.double(), 3.0 * targets.double(), 7),
    )


def test_r2_of_targets_far_from_zero():
    """Sums of squares about 0 would lose 1e-10 of 1e10: nothing would be left of the variance."""
    outputs, targets = (part.double() for part in numbers())
    expected = evaluated(R2(), outputs, targets, N)
    torch.testing.assert_close(
        evaluated(R2(), outputs + 1e5, targets + 1e5, 7), expected, rtol=1e-6, atol=1e-6
    )


def test_r2_ignores_a_batch_without_samples():
    outputs, targets = (part.double() for part in numbers())
    metric = R2()
    for rows in (slice(0, 7), slice(7, 7), slice(7, None)):
        metric.update(outputs[rows], targets[rows])
    same(metric.compute(), evaluated(R2(), outputs, targets, 7))


def test_r2_of_the_mean_is_zero_and_of_the_targets_one():
    _, targets = (part.double() for part in numbers())
    same(evaluated(R2(), targets, targets, 7), torch.tensor(1.0, dtype=torch.float64))
    same(
        evaluated(R2(), targets.mean(0).expand_as(targets), targets, 7),
        torch.tensor(0.0, dtype=torch.float64),
    )


@pytest.mark.parametrize("sizes", [4, 3, 1])
def test_r2_of_constant_targets_is_that_of_scikit_learn(sizes):
    from sklearn.metrics import r2_score

    outputs, targets = (part[:12].double() for part in numbers())
    targets[:, 1] = 3.0  # and no prediction is exact
    targets[:, 2] = outputs[:, 2] = -7.0
    for columns in ([0, 1, 2], [0, 1], [1], [2]):
        ours = evaluated(R2(), outputs[:, columns], targets[:, columns], sizes).item()
        assert ours == pytest.approx(r2_score(targets[:, columns], outputs[:, columns]), rel=1e-12)


def test_r2_of_a_constant_whose_mean_is_rounded():
    """scikit-learn gives -5e31 here: the mean of three times 0.1 is not 0.1."""
    targets = torch.full((3, 1), 0.1, dtype=torch.float64)
    assert evaluated(R2(), targets + 0.1, targets, 3).item() == 0
    assert evaluated(R2(), targets, targets, 3).item() == 1


def test_r2_of_one_sample_is_not_defined():
    assert evaluated(R2(), torch.ones(1, 2), torch.ones(1, 2), 1).isnan()


@pytest.mark.parametrize("form", [list, torch.tensor])
def test_each_target_has_a_scale_of_its_own(form):
    outputs, targets = torch.randn(50, 3), torch.randn(50, 3)
    scale = [1.0, 100.0, 0.25]
    errors = (outputs.double() - targets.double()).abs() * torch.tensor(scale).double()
    for metric, expected in (
        (MAE(form(scale)), errors.mean()),
        (MSE(form(scale)), errors.square().mean()),
    ):
        torch.testing.assert_close(evaluated(metric, outputs, targets, 7), expected)


@pytest.mark.parametrize("make", [MSE, MAE, R2])
def test_shapes_that_would_broadcast_are_refused(make):
    with pytest.raises(UserError, match=r"\(4, 1\) and the targets \(4,\)"):
        make().update(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize(
    "make", [lambda: TopK(0), lambda: TopK(1.5), lambda: Confusion(1), lambda: Confusion("a")]
)
def test_impossible_settings(make):
    with pytest.raises(UserError, match="metrics"):
        make()


def test_a_table_of_other_classes_than_the_models_is_refused():
    with pytest.raises(
        UserError, match="num_classes=30000, but the model's outputs have 3 classes"
    ):
        Confusion(30000).update(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    trainer = make_trainer(metrics={"miou": MeanIoU(4)})  # of 3 classes
    with pytest.raises(UserError, match="num_classes=4, but the model's outputs have 3"):
        trainer.evaluate([(torch.ones(2, 6), torch.tensor([0, 1]))])


def test_default_metrics():
    assert {name: type(metric) for name, metric in default_metrics("classification").items()} == {
        "acc": Accuracy
    }
    found = default_metrics("regression", 2.0)
    assert {name: type(metric) for name, metric in found.items()} == {
        "r2": R2,
        "mae": MAE,
        "mse": MSE,
    }
    assert found["mae"].scale == found["mse"].scale == 2.0
    assert (
        [found[name].higher_is_better for name in found] == [True, False, False]
        and Accuracy().higher_is_better
        and Confusion(2).higher_is_better is None
    )


# Mean


def test_mean_weighs_by_samples_and_in_float64():
    values, weights = (
        torch.rand(20),
        torch.randint(1, 9, (20,), generator=torch.Generator().manual_seed(0)).tolist(),
    )
    metric = Mean()
    assert metric.compute().isnan()
    for value, weight in zip(values, weights, strict=True):
        metric.update(value.requires_grad_(), weight)
    expected = sum(
        value * weight for value, weight in zip(values.tolist(), weights, strict=True)
    ) / sum(weights)
    assert metric.compute().dtype == torch.float64 and not metric.compute().requires_grad
    assert metric.compute().item() == pytest.approx(expected, rel=1e-14)
    other = Mean()
    other.load_state_dict(metric.state_dict())
    assert other.compute().equal(metric.compute()) and other.samples == sum(weights)
    metric.reset()
    assert metric.compute().isnan() and not other.compute().isnan()


def test_mean_of_bfloat16_losses_is_not_summed_in_bfloat16():
    metric = Mean()
    for _ in range(1000):
        metric.update(torch.tensor(1.0078125, dtype=torch.bfloat16), 3)  # the number after 1
    assert metric.compute().item() == 1.0078125


# torchmetrics


def test_where_it_is_not_installed_one_is_told_how(monkeypatch):
    def find(name, *args):
        found = (
            finder.find_spec(name, *args)
            for finder in before
            if not name.startswith("torchmetrics")
        )
        return next(filter(None, found), None)

    before = sys.meta_path
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find)])
    for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError) as error:
        trust.locate("metrics.f1", "torchmetrics.classification.MulticlassF1Score")
    said = "metrics.f1._target_=torchmetrics.classification.MulticlassF1Score: No module named 'torchmetrics'."
    assert str(error.value).startswith(f"{said}\nInstall torchmetrics, or start Python ")


class TokensLast:
    """torchmetrics' Perplexity, which wants the classes behind the tokens."""

    def __init__(self, **options):
        from torchmetrics.text import Perplexity

        self.metric = Perplexity(**options)
        self.compute = self.metric.compute

    def update(self, outputs, targets):
        if outputs.ndim == 2:
            outputs, targets = outputs.unsqueeze(2), targets.unsqueeze(1)
        self.metric.update(outputs.movedim(1, -1).flatten(1, -2), targets.flatten(1))


@needs_torchmetrics
@pytest.mark.parametrize("shape", [(7,), (4, 5)], ids=["tokens", "pixels"])
def test_what_the_loss_ignores_counts_for_no_metric_as_in_torchmetrics(shape):
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    outputs = torch.randn(9, CLASSES, *shape, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(CLASSES - 1, (9, *shape), generator=torch.Generator().manual_seed(2))
    outputs[:, CLASSES - 1] -= 100  # a class that is nowhere
    targets[torch.rand(9, *shape, generator=torch.Generator().manual_seed(3)) < 0.3] = -100
    theirs = {
        "acc": MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100),
        "miou": MulticlassJaccardIndex(CLASSES, ignore_index=-100),
        "perplexity": TokensLast(ignore_index=-100),
    }
    metrics = default_metrics("classification", target_dims=1)
    metrics |= default_metrics("classification", target_dims=2, num_classes=CLASSES)
    assert list(metrics) == ["perplexity", "acc", "miou"]
    for name, metric in metrics.items():
        metric.ignored_by_loss = -100
        found = evaluated(metric, outputs, targets, [4, 3, 2])
        expected = evaluated(theirs[name], outputs, targets, 9)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, check_dtype=False)
    predicted = outputs.argmax(1)[targets >= 0].numpy()
    true = targets[targets >= 0].numpy()
    shares = []
    for label in range(CLASSES - 1):
        both = (predicted == label) & (true == label)
        shares.append(both.sum() / ((predicted == label) | (true == label)).sum())
    assert metrics["miou"].compute().item() == pytest.approx(sum(shares) / len(shares), rel=1e-12)


@needs_torchmetrics
@pytest.mark.parametrize("name", [*CLASSIFIERS, *REGRESSORS])
def test_equals_torchmetrics(name):
    import torchmetrics
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassConfusionMatrix,
        MulticlassJaccardIndex,
    )

    theirs = {
        "accuracy": lambda: MulticlassAccuracy(CLASSES, average="micro"),
        "top1": lambda: MulticlassAccuracy(CLASSES, average="micro", top_k=1),
        "top3": lambda: MulticlassAccuracy(CLASSES, average="micro", top_k=3),
        "confusion": lambda: MulticlassConfusionMatrix(CLASSES),
        "miou": lambda: MulticlassJaccardIndex(CLASSES),
        "perplexity": lambda: TokensLast(),
        "mse": torchmetrics.MeanSquaredError,
        "mae": torchmetrics.MeanAbsoluteError,
        "r2": torchmetrics.R2Score,
        "scaled mse": torchmetrics.MeanSquaredError,
        "scaled mae": torchmetrics.MeanAbsoluteError,
    }[name]()
    outputs, targets = data_for(name)
    scale = 2.5 if name.startswith("scaled") else 1
    if name in REGRESSORS:
        theirs = theirs.set_dtype(torch.float64)
        outputs, targets = outputs.double(), targets.double()
    expected = evaluated(theirs, outputs * scale, targets * scale, 7)
    found = evaluated({**CLASSIFIERS, **REGRESSORS}[name](), outputs, targets, 7)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, check_dtype=False)
    if name == "confusion":
        assert torch.equal(found, expected)


@needs_torchmetrics
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("classification.BinaryF1Score", {}),
        ("classification.MultilabelF1Score", {"num_labels": 4}),
        ("classification.MulticlassF1Score", {}),
        ("regression.ExplainedVariance", {}),
    ],
)
def test_torchmetrics_are_built_with_the_arguments_that_they_have(name, options):
    """The number of classes is offered to every metric, and those that hand **kwargs on refuse
    it.
    """
    kind = getattr(
        importlib.import_module(f"torchmetrics.{name.split('.')[0]}"), name.split(".")[1]
    )
    with trust.trusting([]):
        built = build.build(
            "metrics.m", {"_target_": f"torchmetrics.{name}", **options}, num_classes=4
        )
    expected = kind(**options | ({"num_classes": 4} if "Multiclass" in name else {}))
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(20, 4, generator=generator)
    labels = (
        outputs.roll(1, 0).argmax(1) if "Multiclass" in name else (outputs.roll(1, 0) > 0).float()
    )
    built.update(outputs, labels)
    assert torch.equal(built.compute(), expected(outputs, labels))


@pytest.mark.parametrize(
    ("loss", "usual"),
    [(torch.nn.HuberLoss(), True), (torch.nn.BCEWithLogitsLoss(), False), (min, True)],
)
def test_logits_are_not_measured_as_numbers(loss, usual):
    labels = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    part = TensorSplit(torch.randn(3, 5), labels)
    data = Data("labels", part, None, None, (5,), 2, kind="regression")
    assert sample_check.has_usual_outputs(torch.nn.Linear(5, 2), loss, data) == usual
