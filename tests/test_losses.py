"""Each loss class of torch.nn, for the targets it takes: any cut of a batch trains as the whole
batch does in plain torch, or the loss is refused by name.
"""

import functools
import math

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.nn import functional

from stoker import Trainer
from stoker.data.datasets import Data, TensorSplit
from stoker.trainer.errors import UserError

DOUBLE = torch.float64
CLOSE = 1e-12
SIZES = (14, 14, 9)
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=DOUBLE)


def drawn(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def classes(*shape):
    return (3 * drawn(*shape)).long()


def signs(*shape):
    return 2 * drawn(*shape).round() - 1


def bits(*shape):
    return drawn(*shape).round()


def shares(*shape):
    return drawn(*shape).softmax(-1)


def some_ignored(*shape):
    return classes(*shape).masked_fill(drawn(*shape, seed=1) < 0.5, -100)


def lists_of_classes(samples, number):
    """The classes of each sample, ended by -1."""
    targets = torch.arange(number).repeat(samples, 1)
    return targets.masked_fill(targets > classes(samples, 1), -1)


def last_two(outputs):
    return outputs.unbind(-1)


def alone(outputs):
    return (outputs,)


def with_variance(outputs, targets):
    mean, variance = outputs.unbind(-1)
    return mean, targets, variance.exp()


def embeddings(outputs):
    return outputs.unbind(1)


def time_first(outputs):
    return (outputs.log_softmax(-1).transpose(0, 1),)


def to_logs(outputs):
    return (outputs.log_softmax(1),)


def to_shares(outputs):
    return (outputs.sigmoid(),)


def elementwise(loss, targets=drawn, arrange=alone):
    """The cases of a loss that compares numbers one by one."""
    return [(loss, shape, arrange, targets) for shape in ((), (3,), (2, 3))]


def of_classes(kind, arrange):
    """The cases of a loss of class numbers."""
    cases = [(kind(), (3,), arrange, classes), (kind(WEIGHTS), (3,), arrange, classes)]
    cases.append((kind(WEIGHTS), (3, 5), arrange, lambda n, _, t: some_ignored(n, t)))
    cases.append((kind(ignore_index=0), (3, 2, 4), arrange, lambda n, _, *d: classes(n, *d)))
    return cases


def lengths(samples, most):
    return 1 + (most * drawn(samples)).long()


# {class: [(loss, shape of a sample's outputs, how they become arguments, targets)]}, where the
# targets are made of (samples, *shape), one tensor or several. None for what is refused.
CASES = {
    "AdaptiveLogSoftmaxWithLoss": None,
    "LinearCrossEntropyLoss": None,
    "BCELoss": elementwise(nn.BCELoss(), bits, to_shares)
    + [(nn.BCELoss(WEIGHTS), (2, 3), to_shares, bits)],
    "BCEWithLogitsLoss": elementwise(nn.BCEWithLogitsLoss(), bits)
    + [(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), (3,), alone, bits)]
    + [(nn.BCEWithLogitsLoss(WEIGHTS), (2, 3), alone, bits)],
    "CTCLoss": [
        (
            nn.CTCLoss(zero_infinity=True),
            (9, 4),
            time_first,
            lambda n, *_: (1 + classes(n, 4), lengths(n, 9), lengths(n, 4)),
        )
    ],
    "CosineEmbeddingLoss": [
        (nn.CosineEmbeddingLoss(margin=0.1), (2, 5), embeddings, lambda n, *_: signs(n))
    ],
    "CrossEntropyLoss": of_classes(nn.CrossEntropyLoss, alone)
    + [
        (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), (3,), alone, shares),
        (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), (3, 5), alone, shares),
    ],
    "GaussianNLLLoss": [
        (nn.GaussianNLLLoss(full=full), shape, with_variance, lambda *sizes: drawn(*sizes[:-1]))
        for full in (False, True)
        for shape in ((2,), (3, 2), (4, 3, 2))
    ],
    "HingeEmbeddingLoss": elementwise(nn.HingeEmbeddingLoss(), signs),
    "HuberLoss": elementwise(nn.HuberLoss(delta=0.3)),
    "KLDivLoss": elementwise(nn.KLDivLoss(), shares)
    + elementwise(nn.KLDivLoss(reduction="batchmean"), shares)
    + [(nn.KLDivLoss(log_target=True), (3,), alone, drawn)],
    "L1Loss": elementwise(nn.L1Loss()),
    "MSELoss": elementwise(nn.MSELoss()),
    "MarginRankingLoss": [
        (nn.MarginRankingLoss(margin=0.1), shape, last_two, lambda *sizes: signs(*sizes[:-1]))
        for shape in ((2,), (3, 2))
    ],
    "MultiLabelMarginLoss": [(nn.MultiLabelMarginLoss(), (3,), alone, lists_of_classes)],
    "MultiLabelSoftMarginLoss": [
        (nn.MultiLabelSoftMarginLoss(weight), shape, alone, bits)
        for weight in (None, WEIGHTS)
        for shape in ((3,), (2, 3))
    ],
    "MultiMarginLoss": [
        (nn.MultiMarginLoss(weight=weight), (3,), alone, lambda n, _: classes(n))
        for weight in (None, WEIGHTS)
    ],
    "NLLLoss": of_classes(nn.NLLLoss, to_logs),
    "NLLLoss2d": [
        (nn.NLLLoss2d(WEIGHTS), (3, 2, 4), to_logs, lambda n, _, *d: some_ignored(n, *d))
    ],
    "PoissonNLLLoss": elementwise(nn.PoissonNLLLoss(full=True)),
    "SmoothL1Loss": elementwise(nn.SmoothL1Loss(beta=0.3)),
    "SoftMarginLoss": elementwise(nn.SoftMarginLoss(), signs),
    "TripletMarginLoss": [
        (nn.TripletMarginLoss(swap=True), shape, embeddings, lambda *_: ())
        for shape in ((3, 5), (3, 2, 5))
    ],
    "TripletMarginWithDistanceLoss": [
        (nn.TripletMarginWithDistanceLoss(), shape, embeddings, lambda *_: ())
        for shape in ((3, 5), (3, 2, 5))
    ],
}
NAMES = sorted(
    name
    for name, kind in vars(nn).items()
    if isinstance(kind, type) and (name.endswith("Loss") or issubclass(kind, nn.modules.loss._Loss))
)


def model_of(shape):
    torch.manual_seed(0)
    linear = nn.Linear(4, math.prod(shape), dtype=DOUBLE)
    return nn.Sequential(linear, nn.Unflatten(1, shape) if shape else nn.Flatten(0))


def batches_of(shape, make):
    samples = sum(SIZES)
    targets = make(samples, *(shape if make is not classes else ()))
    targets = targets if isinstance(targets, tuple) else (targets,)
    tensors = [torch.randn(samples, 4, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)]
    tensors += targets
    return list(zip(*(tensor.split(SIZES) for tensor in tensors), strict=True))


def value(model, loss, arrange, batch):
    inputs, *targets = batch
    outputs = model(inputs)
    if arrange is with_variance:
        return loss(*with_variance(outputs, *targets)), outputs
    return loss(*arrange(outputs), *targets), outputs


class Arranged(Trainer):
    """Calls the loss with what its case makes of the outputs."""

    arrange = None

    def compute_loss(self, batch):
        return value(self.model, self.loss, self.arrange, batch)


def of_case(loss, shape, arrange, **settings):
    kind = Trainer if arrange is alone else Arranged
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    trainer = kind(model_of(shape), loss, optimizer, device="cpu", **settings)
    if kind is Arranged:
        trainer.arrange = arrange
    return trainer


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_of_torch_is_cut_rightly_or_refused(name):
    assert name in CASES, f"{name} is new in torch: add what its mean divides by to losses.py"
    if CASES[name] is None:
        shape = (4, 3, [2]) if name.startswith("Adaptive") else (4, 3)
        with pytest.raises(UserError, match=f"{name} has parameters. Make it part"):
            Trainer(model_of((3,)), getattr(nn, name)(*shape), device="cpu")
        return
    for loss, shape, arrange, make in CASES[name]:
        assert type(loss) is getattr(nn, name)
        batches = batches_of(shape, make)
        expected = model_of(shape)
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            value(expected, loss, arrange, batch)[0].backward()
            optimizer.step()
        with torch.no_grad():
            whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
            loss_of_all = value(expected, loss, arrange, whole)[0].item()
        for parts in (1, 2, 7):
            trainer = of_case(loss, shape, arrange, grad_accum_steps=parts)
            trainer.fit(batches)
            for weight, same in zip(
                trainer.module.parameters(), expected.parameters(), strict=True
            ):
                torch.testing.assert_close(weight, same, rtol=0, atol=CLOSE)
        evaluated = trainer.evaluate(batches)["val/loss"]
        assert evaluated == pytest.approx(loss_of_all, abs=CLOSE)


class TimeFirst(Trainer):
    def sample_dim(self, name, value):
        return 1


def test_a_sum_over_time_is_refused():
    with pytest.raises(UserError, match="reduction='batchmean' is not supported"):
        TimeFirst(nn.Linear(4, 3), nn.KLDivLoss(reduction="batchmean"), device="cpu")


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.L1Loss(),
        nn.SmoothL1Loss(),
        nn.HuberLoss(),
        nn.BCEWithLogitsLoss(),
        nn.PoissonNLLLoss(),
        nn.KLDivLoss(reduction="batchmean"),
        functools.partial(nn.GaussianNLLLoss(), var=1.0),
    ],
)
@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_outputs_and_targets_of_two_shapes_are_refused(loss, use):
    trainer = of_case(loss, (1,), alone)
    with pytest.raises(UserError, match=r"shape \(8, 1\), and the targets have shape \(8,\)"):
        getattr(trainer, use)([(drawn(8, 4), drawn(8))])
    module = getattr(loss, "func", loss)
    for _ in range(2):
        # Nothing is left for later steps.
        assert trainer.loss is loss and not module._forward_pre_hooks
        trainer.fit([(drawn(8, 4), drawn(8, 1))] * 2)


def test_targets_that_would_be_repeated_for_each_output_are_refused():
    with pytest.raises(UserError, match="The loss would broadcast them"):
        of_case(nn.MSELoss(), (3,), alone).fit([(drawn(8, 4), drawn(8, 1))])


def test_a_cross_entropy_of_one_class_is_refused():
    with pytest.raises(
        UserError, match=r"the outputs \(8, 1\) have a single class, so .* always 0"
    ):
        of_case(nn.CrossEntropyLoss(), (1,), alone).fit(
            [(drawn(8, 4), torch.zeros(8, dtype=torch.int64))]
        )


def test_a_compute_loss_calls_a_function_with_its_options():
    class Smoothed(Trainer):
        def compute_loss(self, batch):
            inputs, targets = batch
            outputs = self.model(inputs)
            return self.loss(outputs, targets, label_smoothing=0.1), outputs

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batch = (drawn(8, 4).float(), classes(8))
    expected = functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    history = Smoothed(model, functional.cross_entropy, optimizer, device="cpu").fit([batch])
    assert history[-1]["train/loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_balanced_weights_are_those_of_scikit_learn():
    targets = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    data = Data("few", TensorSplit(torch.zeros(7, 1), targets), None, None, (1,), 3)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets.numpy())
    assert data.balanced_weights() == pytest.approx(expected.tolist(), rel=1e-12)
    data.num_classes = 4
    with pytest.raises(UserError, match="balanced: the training split of few must have"):
        data.balanced_weights()
