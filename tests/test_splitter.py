"""Too little memory: half as many samples at once and the same mathematics, or an error that says
what to lower.
"""

import copy
import functools
import logging
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import assert_same, make_data, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.diagnostics.lr_find import lr_find
from stoker.trainer import checkpoint, graph
from stoker.trainer.callbacks import EMA, Callback, Checkpoint
from stoker.trainer.errors import TrainingError, UserError, explanation_of
from stoker.trainer.metrics import Accuracy

ROOT = Path(__file__).parents[1]


class FullBackward(torch.autograd.Function):
    """The identity, whose backward pass is out of memory for more than `most` samples."""

    @staticmethod
    def forward(ctx, inputs, most):
        ctx.most = most
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return gradient, None


class Small(torch.nn.Module):
    """A model on a device that holds `most` samples in training, and `most_evaluated` in
    evaluation.

    It is too late when that shows: the statistics have been updated and random numbers drawn, and
    in the backward pass the head has its gradient.
    """

    def __init__(
        self,
        most=99,
        most_evaluated=99,
        in_backward=False,
        norm=True,
        random=True,
        dtype=torch.float32,
    ):
        super().__init__()
        self.kind = {"norm": norm, "random": random, "dtype": dtype}
        torch.manual_seed(0)
        self.most, self.most_evaluated, self.in_backward = most, most_evaluated, in_backward
        norm = torch.nn.BatchNorm1d(16) if norm else torch.nn.Tanh()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(6, 16), norm, torch.nn.Dropout(0.5 if random else 0)
        )
        self.head = torch.nn.Linear(16, 3)
        self.sizes, self.failed = [], None
        self.to(dtype)

    def forward(self, inputs):
        assert (
            self.failed is None or self.failed() is None
        )  # what was too large is let go of before the next attempt
        hidden = self.body(inputs)
        self.sizes.append(len(inputs))
        self.failed = weakref.ref(hidden) if len(inputs) > self.most else None
        if len(inputs) > (
            self.most if self.training and not self.in_backward else self.most_evaluated
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return self.head(FullBackward.apply(hidden, self.most) if self.in_backward else hidden)


class Rows(Callback):
    def __init__(self):
        self.rows = []

    def on_log(self, trainer, row):
        self.rows.append({name: value for name, value in row.items() if name != "train/seconds"})


def loaders(dtype=torch.float32):
    """8 batches an epoch, the last one of half the size."""
    data = make_data(dtype=dtype)
    return DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 25)


def fitted(model, micro_batch, more=(), resume=None, **settings):
    rows = Rows()
    settings = {"max_grad_norm": 0.5, "log_every": 3, "metrics": {"acc": Accuracy()}, **settings}
    trainer = make_trainer(
        model, micro_batch=micro_batch, callbacks=[EMA(0.9), rows, *more], **settings
    )
    trainer.fit(*loaders(next(model.parameters()).dtype), resume=resume)
    return copy.deepcopy(trainer.state_dict()), rows.rows


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("most", "found"), [(1, 1), (3, 2), (4, 4)])
def test_what_does_not_fit_is_what_would_have_fitted_from_the_start(
    caplog, in_backward, most, found
):
    norm = most > 1  # of one sample there are no statistics
    auto = fitted(Small(most, in_backward=in_backward, norm=norm), "auto")
    assert_same(auto, fitted(Small(norm=norm), found))
    assert auto[0]["micro_batch"] == {"size": found}
    says = [record.getMessage() for record in caplog.records]
    assert len(says) == {4: 1, 2: 2, 1: 3}[found] and says[0].startswith(
        "Out of memory with 8 samples at once"
    )


def test_it_is_the_same_mathematics():
    double = functools.partial(Small, norm=False, random=False, dtype=torch.float64)
    (whole, whole_rows), (auto, auto_rows) = fitted(double(), None), fitted(double(most=3), "auto")
    for name in ("train/loss", "train/grad_norm", "val/loss", "val/acc"):
        for row, other in zip(whole_rows, auto_rows, strict=True):
            assert other.get(name, 0) == pytest.approx(row.get(name, 0), rel=1e-12)
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(auto["model"][name], tensor, rtol=0, atol=1e-12)


def test_with_fp16_too():
    assert_same(fitted(Small(3), "auto", precision="fp16"), fitted(Small(), 2, precision="fp16"))


def test_where_all_fits_nothing_changes():
    auto, whole = fitted(Small(), "auto"), fitted(Small(), None)
    assert_same(auto, whole)
    assert auto[0]["micro_batch"] == {"size": None}


def test_the_size_is_in_the_checkpoint_and_a_continued_run_is_the_same(tmp_path, caplog):
    saver = Checkpoint(tmp_path, every=5, keep=9)
    whole = fitted(Small(3), "auto", [saver])
    caplog.clear()
    model = Small(3)
    continued = fitted(
        model, "auto", [Checkpoint(tmp_path, every=5, keep=9)], checkpoint.path_of(tmp_path, 10)
    )
    assert_same(continued[0], whole[0])
    assert_same(continued[1], [row for row in whole[1] if row["step"] > 10])
    assert not caplog.records and max(model.sizes[:3]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 6, 13])
def test_an_evaluation_and_a_prediction_give_the_same_in_parts(caplog, most):
    _, loader = loaders(torch.float64)
    whole = make_trainer(Small(dtype=torch.float64), metrics={"acc": Accuracy()})
    model = Small(most_evaluated=most, dtype=torch.float64)
    trainer = make_trainer(model, metrics={"acc": Accuracy()}, micro_batch="auto")
    expected = whole.evaluate(loader)
    with caplog.at_level(logging.WARNING):
        results = trainer.evaluate(loader)
    assert (
        results == pytest.approx(expected, rel=1e-12) and results["val/acc"] == expected["val/acc"]
    )
    assert "Continuing with" in caplog.records[-1].getMessage()
    caplog.clear()
    assert trainer.evaluate(loader) == results  # the size is known now
    torch.testing.assert_close(trainer.predict(loader), whole.predict(loader), rtol=0, atol=1e-12)
    assert not caplog.records


@pytest.mark.slow
def test_an_evaluation_in_parts_changes_no_weight():
    assert_same(fitted(Small(most_evaluated=5), "auto")[0], fitted(Small(), None)[0])


def test_the_learning_rate_finder_works_in_parts(caplog):
    trainer = make_trainer(Small(3), micro_batch="auto")
    lr_find(trainer, loaders()[0], steps=20)
    assert caplog.records


# What cannot be helped


class FullOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def refusal(work, *args):
    with pytest.raises(TrainingError) as caught:
        work(*args)
    text = str(caught.value)
    assert len(text.splitlines()) == 2
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "settings", "says", "advice"),
    [
        (3, {}, "with a batch of 8.", "micro_batch=auto, or a lower batch_size"),
        (3, {"micro_batch": 4}, "with a batch of 8 (micro_batch=4)", "a lower batch_size"),
        (3, {"grad_accum_steps": 2}, "with a batch of 8 (grad_accum_steps=2)", "micro_batch=auto"),
        (0, {"micro_batch": "auto"}, "with a batch of 8 (micro_batch=1)", "a smaller model"),
        (99, {"micro_batch": "auto", "optimizer": FullOptimizer}, "batch of 8", "an optimizer with less state"),
    ],
)  # fmt: skip
def test_a_training_that_does_not_fit_says_what_to_lower(most, settings, says, advice):
    text = refusal(make_trainer(Small(most, norm=False), **settings).fit, *loaders())
    assert says in text.splitlines()[0] and advice in text.splitlines()[1]


def test_an_evaluation_that_does_not_fit_says_so():
    model = Small(most_evaluated=3)
    for work in ("evaluate", "predict"):
        text = refusal(getattr(make_trainer(model), work), loaders()[1])
        assert "with a batch of 25." in text and "or a lower eval_batch_size" in text
    assert "with a batch of 25." in refusal(
        make_trainer(model).fit, *loaders()
    )  # in the midst of a fit
    assert "(micro_batch=1)" in refusal(
        make_trainer(Small(most_evaluated=0), micro_batch="auto").evaluate, loaders()[1]
    )


def test_other_errors_are_not_taken_for_it():
    class Wrong(Small):
        def forward(self, inputs):
            self.sizes.append(len(inputs))
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model = Wrong()
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        make_trainer(model, micro_batch="auto").fit(*loaders())
    assert type(caught.value) is RuntimeError and model.sizes == [8]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"micro_batch": 4, "grad_accum_steps": 2},
            "micro_batch=4 and grad_accum_steps=2 both split the batch",
        ),
        (
            {"micro_batch": "auto", "grad_accum_steps": 2},
            "micro_batch=auto and grad_accum_steps=2 both",
        ),
        ({"micro_batch": 0}, "micro_batch=0: expected"),
        ({"micro_batch": 2.5}, "micro_batch=2.5: expected"),
        ({"micro_batch": True}, "micro_batch=true: expected"),
        ({"micro_batch": "large"}, "micro_batch=large: expected auto"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, says):
    with pytest.raises(UserError, match=re.escape(says)):
        make_trainer(**settings)


def test_a_graph_is_of_one_size(monkeypatch):
    monkeypatch.setattr(graph.devices, "GRAPHS", ("cpu",))
    with pytest.raises(UserError, match="compile=graph needs .* a fixed micro_batch"):
        graph.check(make_trainer(micro_batch="auto"))


def test_one_sample_has_no_statistics():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        make_trainer(Small(1), micro_batch="auto").fit(*loaders())
    text = explanation_of(caught.value)
    assert "BatchNorm needs at least two samples" in text and "drop_last=true" in text


# For real


class Greedy(torch.nn.Linear):
    """Asks for 2**60 bytes, or for 2**58 a sample above one."""

    def __init__(self, hopeless=True):
        super().__init__(6, 3)
        self.hopeless = hopeless

    def forward(self, inputs):
        torch.empty(2**60 if self.hopeless else 2**58 * (len(inputs) - 1), dtype=torch.uint8)
        return super().forward(inputs)


@pytest.mark.slow
def test_memory_that_the_machine_has_not():
    train_loader, val_loader = loaders()
    for micro_batch in (None, "auto"):
        text = refusal(make_trainer(Greedy(), micro_batch=micro_batch).fit, train_loader)
        assert text.startswith("Out of memory on cpu with a batch of 8")
        assert "batch of 25" in refusal(
            make_trainer(Greedy(), micro_batch=micro_batch).predict, val_loader
        )
    states = []
    for hopeless, micro_batch in ((False, "auto"), (None, 1)):
        torch.manual_seed(0)
        model = Greedy(hopeless) if hopeless is False else torch.nn.Linear(6, 3)
        trainer = make_trainer(model, micro_batch=micro_batch)
        trainer.fit(train_loader, val_loader)
        states.append(trainer.state_dict())
    assert_same(*states)


def test_the_command_line_ends_with_3_or_goes_on(tmp_path):
    (tmp_path / "greedy.py").write_text(
        "import torch\n\n\n"
        "class Greedy(torch.nn.Sequential):\n"
        "    def __init__(self, in_shape, num_classes):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n\n"
        "    def forward(self, inputs):\n"
        "        torch.empty(2**60 * (len(inputs) > 16), dtype=torch.uint8)\n"
        "        return super().forward(inputs)\n"
    )
    command = [
        sys.executable,
        ROOT / "train.py",
        "model._target_=greedy.Greedy",
        "max_steps=3",
        "run_dir=run",
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    failed, done = (
        subprocess.run([*command, *more], cwd=tmp_path, env=env, capture_output=True, text=True)
        for more in ([], ["micro_batch=auto", "run_dir=other"])
    )
    assert failed.returncode == 3 and "Traceback" not in failed.stderr, failed.stderr
    assert "error: Out of memory on cpu with a batch of 64" in failed.stderr
    assert done.returncode == 0 and "Continuing with 16" in done.stderr, done.stderr
