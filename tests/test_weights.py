"""The same numbers for any cut of the batches, also where a loss is no mean over samples: plain
torch says which.
"""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from stoker import Trainer
from stoker.trainer import losses, misuse
from stoker.trainer.callbacks import Callback, NaNGuard, Progress
from stoker.trainer.errors import UserError
from stoker.trainer.metrics import Accuracy, Confusion, TopK

DOUBLE = torch.float64
CLOSE = 1e-12
LENGTHS = (5, 3, 8, 2)  # of the texts of a batch
SAMPLES = (14, 14, 14, 9)
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=DOUBLE)


class Tagger(nn.Module):
    """Outputs (N, 3, T) for inputs (N, T, 4)."""

    def __init__(self, outputs=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).to(DOUBLE)

    def forward(self, inputs):
        return self.layers(inputs).transpose(1, 2)


def tokens(ignored=-100):
    """Batches of texts of several lengths, in which some tokens are ignored, and all of a batch."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for samples, length in zip(SAMPLES, LENGTHS, strict=True):
        inputs = torch.randn(samples, length, 4, generator=generator, dtype=DOUBLE)
        targets = torch.randint(3, (samples, length), generator=generator)
        is_ignored = torch.rand(samples, length, generator=generator) < 0.5
        is_ignored[: samples // 2] = True  # so that whole micro-batches are
        batches.append((inputs, targets.masked_fill(is_ignored, ignored)))
    batches[1][1].fill_(ignored)
    return batches


def labels(outputs=3):
    """Batches of the same, with several yes or no labels a token."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            inputs,
            torch.rand(len(inputs), outputs, inputs.shape[1], generator=generator).round().double(),
        )
        for inputs, _ in tokens()
    ]


def probabilities():
    return [(inputs, targets.softmax(1)) for inputs, targets in labels()]


def rare():
    return tokens(ignored=0)


def mostly_0():
    """Batches in which whole micro-batches, and all samples of the first of 3 ranks, are class
    0.
    """
    batches = rare()
    del batches[1]  # all of it: no mean in plain torch either
    for _, targets in batches:
        targets[::3] = 0
    return batches


# {name: (loss, batches)}
CASES = {
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHTS), tokens),
    "a class of weight 0": (
        nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 3.0], dtype=DOUBLE)),
        mostly_0,
    ),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=0), rare),
    "the default ignore_index": (nn.CrossEntropyLoss(), tokens),
    "label smoothing": (
        nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=0, label_smoothing=0.1),
        rare,
    ),
    "a function": (functional.cross_entropy, tokens),
    "a partial": (functools.partial(functional.cross_entropy, weight=CLASS_WEIGHTS), tokens),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=torch.full((1,), 3.0, dtype=DOUBLE)), labels),
    "elements": (nn.MSELoss(), labels),
    "a variance": (functools.partial(functional.gaussian_nll_loss, var=2.0), labels),
    "a partial of a module": (functools.partial(nn.GaussianNLLLoss(), var=2.0), labels),
    "probabilities": (nn.CrossEntropyLoss(CLASS_WEIGHTS), probabilities),
}


class Rows(Callback):
    def __init__(self):
        self.rows = []

    def on_log(self, trainer, row):
        self.rows.append(row)


def plain(loss, batches, epochs=2):
    """The weights and the mean losses by a plain loop over whole batches."""
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    total = 0.0
    for _ in range(epochs):
        total = weight = 0.0
        for inputs, targets in batches:
            value = loss(model(inputs), targets)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            divisor = by_hand(loss, targets)
            if divisor:
                total += value.item() * divisor
                weight += divisor
    return model.state_dict(), total / weight


def by_hand(loss, targets):
    """What torch's documentation says that the mean divides by."""
    if targets.is_floating_point():
        probabilities = isinstance(loss, nn.CrossEntropyLoss)
        return targets.numel() / (targets.shape[1] if probabilities else 1)
    options = loss.keywords if isinstance(loss, functools.partial) else vars(loss)
    weights = options.get("weight", getattr(loss, "weight", None))
    ignored = options.get("ignore_index", -100)
    counted = [int(target) for target in targets.flatten() if target != ignored]
    return sum(1.0 if weights is None else weights[target].item() for target in counted)


def fitted(loss, batches, kind=Trainer, model=Tagger, more=(), **settings):
    rows = Rows()
    trainer = kind(
        model(),
        loss,
        functools.partial(torch.optim.SGD, lr=0.5),
        epochs=2,
        device="cpu",
        callbacks=[rows, *more],
        **settings,
    )
    trainer.fit(batches)
    return trainer, rows.rows


def assert_close(state, expected):
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=CLOSE)


CUTS = [{}, {"grad_accum_steps": 2}, {"grad_accum_steps": 4}, {"grad_accum_steps": 7}]


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_micro_batches_trains_as_plain_torch_does(case):
    loss, make = CASES[case]
    expected, mean = plain(loss, make())
    for cut in CUTS:
        trainer, rows = fitted(loss, make(), **cut)
        assert_close(trainer.module.state_dict(), expected)
        assert rows[-1]["train/loss"] == pytest.approx(mean, abs=CLOSE), cut
        assert rows[-1]["train/samples"] == sum(len(targets) for _, targets in make())


class Masked(Trainer):
    """The mean over the targets that are numbers."""

    def compute_loss(self, batch):
        outputs = self.model(batch[0])
        is_counted = ~batch[1].isnan()
        squares = ((outputs - batch[1].nan_to_num()) ** 2).masked_fill(~is_counted, 0)
        return squares.sum() / is_counted.sum(), outputs

    def loss_weight(self, batch):
        return (~batch[1].isnan()).sum()


def with_a_batch_of_nan():
    batches = labels()
    batches[1][1].fill_(torch.nan)
    return batches


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("kind", "loss", "make"),
    [(Trainer, CASES["a class of weight 0"][0], rare), (Masked, nn.MSELoss(), with_a_batch_of_nan)],
)
def test_a_batch_of_weight_0_adds_nothing_in_any_cut(kind, loss, make, cut):
    """Plain torch has a nan for it, so there it is left out: plain SGD does nothing without it."""
    batches = make()
    expected, mean = plain(loss, [batches[0], *batches[2:]])
    trainer, rows = fitted(loss, batches, kind, **cut)
    assert_close(trainer.module.state_dict(), expected)
    assert rows[-1]["train/loss"] == pytest.approx(mean, abs=CLOSE)


@pytest.mark.parametrize("cut", CUTS)
def test_targets_of_bytes_weigh_what_torch_divides_by(cut):
    """A uint8 has no -100, which as one is class 156, and bytes as an index are a mask."""
    loss = nn.CrossEntropyLoss(torch.linspace(0.1, 2, 160, dtype=DOUBLE))
    inputs = torch.randn(14, 4, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    targets = torch.tensor([0, 1, 156, 156, 159, 7, 156] * 2, dtype=torch.uint8)
    torch.manual_seed(0)
    model = nn.Linear(4, 160, dtype=DOUBLE)
    whole = loss(model(inputs), targets)
    settings = {"optimizer": functools.partial(torch.optim.SGD, lr=0.5), "device": "cpu", **cut}
    trainer = Trainer(copy.deepcopy(model), loss, **settings)
    parts = list(zip(inputs.split(3), targets.split(3), strict=True))
    assert trainer.evaluate(parts)["val/loss"] == pytest.approx(whole.item(), abs=CLOSE)
    trainer.fit([(inputs, targets)])
    whole.backward()
    with torch.no_grad():
        expected = {name: p - 0.5 * p.grad for name, p in model.named_parameters()}
    assert_close(trainer.module.state_dict(), expected)


def test_steps_whose_targets_are_all_ignored_have_no_loss_and_stop_nothing():
    loss, make = CASES["ignore_index"]
    _, mean = plain(loss, make(), epochs=1)
    rows = Rows()
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    settings = {"log_every": 1, "device": "cpu"}
    trainer = Trainer(Tagger(), loss, optimizer, callbacks=[NaNGuard(), rows], **settings)
    trainer.fit(make())
    assert ["train/loss" in row for row in rows.rows] == [True, False, True, True]
    weights = [by_hand(loss, targets) for _, targets in make()]
    assert [row["train/weight"] for row in rows.rows] == weights
    total = sum(row["train/loss"] * row["train/weight"] for row in rows.rows if row["train/weight"])
    assert total / sum(weights) == pytest.approx(mean, abs=CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_in_batches_has_the_loss_of_all_at_once(case):
    loss, make = CASES[case]
    batches = make()
    module = Tagger()
    with torch.no_grad():
        values = [
            (loss(module(inputs), targets).item(), by_hand(loss, targets))
            for inputs, targets in batches
        ]
    counted = [(value, weight) for value, weight in values if weight]
    expected = sum(value * weight for value, weight in counted) / sum(w for _, w in counted)
    results = Trainer(Tagger(), loss, device="cpu").evaluate(batches)
    assert results["val/loss"] == pytest.approx(expected, abs=CLOSE)


def test_accuracy_and_top_k_leave_out_what_the_loss_ignores():
    from sklearn.metrics import accuracy_score, confusion_matrix, top_k_accuracy_score

    metrics = {"acc": Accuracy(), "top2": TopK(2), "table": Confusion(3), "all": Accuracy(-1)}
    for ignored in (-100, 0):
        batches = tokens(ignored)
        loss = nn.CrossEntropyLoss(ignore_index=ignored)
        results = Trainer(Tagger(), loss, metrics=metrics, device="cpu").evaluate(batches)
        module = Tagger()
        with torch.no_grad():
            scores = [module(inputs).movedim(1, 2).flatten(0, 1) for inputs, _ in batches]
        scores = torch.cat(scores)
        true = torch.cat([targets.flatten() for _, targets in batches])
        kept = true != ignored
        labels = true[kept].numpy()
        best = scores.argmax(1)
        found = best[kept].numpy()
        assert results["val/acc"] == pytest.approx(accuracy_score(labels, found), abs=CLOSE)
        top2 = top_k_accuracy_score(labels, scores[kept].numpy(), k=2, labels=[0, 1, 2])
        assert results["val/top2"] == pytest.approx(top2, abs=CLOSE)
        table = confusion_matrix(labels, found, labels=[0, 1, 2])
        assert results["val/table"] == table.tolist()
        # its own ignore_index, which no target has
        assert results["val/all"] == (best == true).double().mean().item()


# your own loss


def mean_of_known(outputs, targets):
    """The mean squared error over targets that are not nan."""
    known = ~targets.isnan()
    return ((outputs - targets.nan_to_num()) ** 2 * known).sum() / known.sum()


class Known(Trainer):
    def loss_weight(self, batch):
        _, targets = batch
        return (~targets.isnan()).sum()


class KnownInPlainNumbers(Known):
    def loss_weight(self, batch):
        return super().loss_weight(batch).item()


def holes():
    generator = torch.Generator().manual_seed(3)
    batches = []
    for inputs, targets in labels():
        is_hole = torch.rand(targets.shape, generator=generator) < 0.6
        is_hole[: len(is_hole) // 2] = True  # so that whole micro-batches are
        is_hole[::3] = True  # and all samples of the first of 3 ranks
        batches.append((inputs, targets.masked_fill(is_hole, torch.nan)))
    return batches


@pytest.mark.parametrize("kind", [Known, KnownInPlainNumbers])
def test_your_own_loss_has_the_weight_that_your_trainer_says(kind):
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in holes() * 2:
        optimizer.zero_grad()
        mean_of_known(model(inputs), targets).backward()
        optimizer.step()
    for cut in CUTS:
        trainer, _ = fitted(mean_of_known, holes(), kind, **cut)
        assert_close(trainer.module.state_dict(), model.state_dict())
    with torch.no_grad():
        errors = [((model(x) - y) ** 2)[~y.isnan()] for x, y in holes()]
    results = trainer.evaluate(holes())
    assert results["val/loss"] == pytest.approx(torch.cat(errors).mean().item(), abs=CLOSE)


class OwnForward(nn.CrossEntropyLoss):
    def forward(self, outputs, targets):
        return super().forward(outputs, targets)


class SameForward(nn.CrossEntropyLoss):
    pass


def test_which_losses_divide_by_what():
    targets = torch.tensor([[0, 1, -100], [2, -100, -100]])
    assert losses.divisor(SameForward())(targets) == 3
    assert losses.divisor(nn.KLDivLoss())(torch.zeros(2, 3)) == 6
    mean_over_samples = (
        OwnForward(),  # your own loss
        lambda outputs, targets: 0,
        nn.KLDivLoss(reduction="batchmean"),
        nn.MultiMarginLoss(),
    )
    for loss in mean_over_samples:
        assert losses.divisor(loss) is None
    summed = (nn.MSELoss(reduction="sum"), functools.partial(functional.mse_loss, reduction="sum"))
    for loss in summed:
        with pytest.raises(UserError, match="reduction='sum' is not supported"):
            Trainer(Tagger(), loss, device="cpu")


# time-first batches


class LSTM(nn.Module):
    """Classes (B, 3) of texts (T, B)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lstm = nn.Embedding(20, 4), nn.LSTM(4, 6)
        self.head = nn.Linear(6, 3)
        self.to(DOUBLE)

    def forward(self, text):
        return self.head(self.lstm(self.table(text))[0][-1])


class TimeFirst(Trainer):
    def sample_dim(self, name, value):
        return 1 if name == "batch[0]" else super().sample_dim(name, value)


def mean_cross_entropy(outputs, targets):
    """A loss that the Trainer does not know."""
    return functional.cross_entropy(outputs, targets)


def texts():
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randint(20, (length, samples), generator=generator),
            torch.randint(3, (samples,), generator=generator),
        )
        for length, samples in ((9, 8), (4, 8), (12, 5))
    ]


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), mean_cross_entropy])
def test_time_first_texts_are_counted_and_cut_by_samples(loss):
    model = LSTM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        each = [functional.cross_entropy(model(x), y, reduction="none") for x, y in texts()]
    for inputs, targets in texts():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    settings = {"optimizer": functools.partial(torch.optim.SGD, lr=0.5), "device": "cpu"}
    for cut in ({}, {"grad_accum_steps": 2}, {"micro_batch": 1}):
        rows = Rows()
        trainer = TimeFirst(LSTM(), loss, callbacks=[rows], **settings, **cut)
        results = trainer.evaluate(texts())
        assert results["val/loss"] == pytest.approx(torch.cat(each).mean().item(), abs=CLOSE)
        trainer.fit(texts())
        assert_close(trainer.module.state_dict(), model.state_dict())
        assert rows.rows[-1]["train/samples"] == 21


def test_time_first_texts_are_predicted():
    model = LSTM()
    expected = torch.cat([model(inputs) for inputs, _ in texts()])
    trainer = TimeFirst(LSTM(), device="cpu")
    torch.testing.assert_close(trainer.predict(texts()), expected)


def test_a_packed_sequence_alone_is_the_inputs():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    assert misuse.inputs_of(packed) is packed
    assert misuse.inputs_of((packed, torch.zeros(2))) is packed


def test_without_it_they_are_evaluated_by_the_targets_and_not_cut():
    with torch.no_grad():
        model = LSTM()
        each = [functional.cross_entropy(model(x), y, reduction="none") for x, y in texts()]
    settings = {"optimizer": torch.optim.SGD, "device": "cpu"}
    trainer = Trainer(LSTM(), nn.CrossEntropyLoss(), grad_accum_steps=2, **settings)
    results = trainer.evaluate(texts())
    assert results["val/loss"] == pytest.approx(torch.cat(each).mean().item(), abs=CLOSE)
    with pytest.raises(UserError, match=r"9 in batch\[0\], 8 in batch\[1\]"):
        trainer.fit(texts())


# several processes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_three_processes_train_and_evaluate_as_one_does(forks, tmp_path, strategy):
    from weighed import OTHERS

    script = Path(__file__).with_name("weighed.py")
    ranks = forks.ranks(tmp_path, 3, strategy, str(tmp_path), script=script)
    assert ranks.codes == [0] * 3, (ranks.codes, ranks.late, ranks.errs)
    several = torch.load(tmp_path / "done", weights_only=False)
    for name, (loss, make, *settings) in {**CASES, **OTHERS}.items():
        trainer, rows = fitted(loss, make(), **(settings[0] if settings else {}))
        assert_close(several[name]["state"], trainer.module.state_dict())
        assert several[name]["results"] == pytest.approx(trainer.evaluate(make()), abs=CLOSE), name
        for key in ("train/loss", "train/samples"):
            expected = [row[key] for row in rows]
            assert [row[key] for row in several[name]["rows"]] == pytest.approx(expected, abs=CLOSE)
    errors = [torch.load(tmp_path / f"error{rank}") for rank in range(3)]
    for error in errors:
        assert "in step 3 on rank 1, the loss is nan (learning rate " in error
        assert "), and batch[0] has non-finite values in 1 of 5 rows" in error


def test_a_line_has_the_mean_loss_of_its_epoch_and_no_weight(capsys):
    loss, make = CASES["class weights"]
    _, mean = plain(loss, make(), epochs=1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    settings = {"log_every": 1, "device": "cpu"}
    Trainer(Tagger(), loss, optimizer, callbacks=[Progress()], **settings).fit(make())
    printed = capsys.readouterr().out
    assert f"loss {mean:.4f}" in printed and "weight" not in printed.splitlines()[-1]
