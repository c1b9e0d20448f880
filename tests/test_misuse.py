"""What a script may get wrong: each is a UserError of one to three lines that says what to give, or
a warning.
"""

import errno
import functools
import re

import numpy
import pytest
import torch
from conftest import Careless, assert_same, make_data, make_model, make_trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stoker import Trainer
from stoker.command.exit_codes import code_of
from stoker.command.messages import message
from stoker.models.mlp import MLP
from stoker.runs.loggers import JSONL
from stoker.runs.rows import read_rows
from stoker.trainer import checkpoint, misuse, schedules
from stoker.trainer.callbacks import Callback, Checkpoint
from stoker.trainer.errors import TrainingError, UserError, explanation_of, first_line
from stoker.trainer.metrics import Accuracy, Mean

STILL = Callback()
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def loader(shuffle=False, **options):
    split = make_data().train
    return DataLoader(
        TensorDataset(split.inputs, split.targets), batch_size=8, shuffle=shuffle, **options
    )


def of_dicts(third=False):
    more = {"number": torch.arange(8)} if third else {}
    return [{"x": inputs, "y": targets, **more} for inputs, targets in loader()]


class OfDicts(Trainer):
    def compute_loss(self, batch):
        outputs = self.model(batch["x"])
        return self.loss(outputs, batch["y"]), outputs


class Pair(torch.nn.Sequential):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs, outputs


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(make_data().train.inputs, make_data().train.targets, strict=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": None}, "model: must be a torch.nn.Module, not a NoneType"),
        ({"model": torch.nn.Linear}, "model: must be a torch.nn.Module, not a type"),
        (
            {"optimizer": torch.optim.SGD(make_model().parameters(), lr=1)},
            "this SGD has parameters that do not belong to the Trainer's model",
        ),
        ({"loss": torch.nn.CrossEntropyLoss}, "CrossEntropyLoss: pass an instance"),
        ({"metrics": {"acc": Accuracy}}, "Accuracy: pass an instance"),
        ({"callbacks": [Callback]}, "Callback: pass an instance"),
        ({"callbacks": [STILL, STILL]}, "callbacks: the list contains the same callback twice."),
    ],
)
def test_a_part_that_is_none_is_refused(settings, words):
    defaults = {"model": make_model(), "optimizer": SGD, "device": "cpu"}
    with pytest.raises(UserError, match=re.escape(words)):
        Trainer(**(defaults | settings))


@pytest.mark.parametrize(
    ("kind", "train", "words"),
    [
        (
            Trainer,
            of_dicts(third=True),
            "Trainer: too many values to unpack (expected 2) (the batch is a dict).",
        ),
        (
            Trainer,
            [(torch.ones(8, 6), torch.ones(8, 6), torch.arange(8) % 3)] * 2,
            "Trainer: too many values to unpack (expected 2) (the batch is a tuple).",
        ),
        (OfDicts, of_dicts(), None),
        (OfDicts, of_dicts(third=True), None),
        (Trainer, DataLoader(Endless(), 8), "Type max_steps=N or steps_per_epoch=N"),
        (
            Trainer,
            TensorDataset(torch.ones(8, 6), torch.arange(8) % 3),
            "this TensorDataset is not a loader",
        ),
    ],
)
def test_a_batch_or_a_step_of_another_form_is_explained(kind, train, words):
    trainer = make_trainer(kind=kind, epochs=1)
    if words is None:
        trainer.fit(train, train)
        return
    with pytest.raises(UserError, match=re.escape(words)):
        trainer.fit(train)


class OnlyLoss(Trainer):
    def compute_loss(self, batch):
        return super().compute_loss(batch)[0]


class OfThree(Trainer):
    def compute_loss(self, batch):
        return (*super().compute_loss(batch), batch)


class PerSample(Trainer):
    def compute_loss(self, batch):
        outputs = self.model(batch[0])
        return outputs.square().mean(1), outputs


class OnlyNumber(Trainer):
    def compute_loss(self, batch):
        return 0.5


@pytest.mark.parametrize("kind", [OnlyLoss, OfThree, PerSample, OnlyNumber])
@pytest.mark.parametrize("micro_batch", [None, "auto"])
def test_a_compute_loss_that_returns_something_else_is_explained(kind, micro_batch):
    words = rf"{kind.__name__}: .+\.\nA batch .+\ncompute_loss must return \(loss, outputs\)"
    with pytest.raises(UserError, match=words):
        make_trainer(kind=kind, micro_batch=micro_batch).fit(loader())
    if kind is not PerSample:
        with pytest.raises(UserError, match=words):
            make_trainer(kind=kind, metrics={}).evaluate(loader())


def losses_of(outputs):
    return {"classes": outputs.square().mean(), "boxes": outputs.abs().mean()}


@pytest.mark.parametrize(
    ("change", "evaluates"),
    [
        (lambda outputs: (losses_of(outputs), outputs), False),
        (losses_of, False),
        (lambda outputs: (0.5, outputs), False),
        (lambda outputs: (None, outputs), True),  # an evaluation needs no loss
    ],
)
@pytest.mark.parametrize("options", [{}, {"micro_batch": "auto"}, {"grad_accum_steps": 2}])
def test_a_loss_that_is_not_a_tensor_is_explained(change, evaluates, options):
    class Odd(Trainer):
        def compute_loss(self, batch):
            return change(self.model(batch[0]))

    pair = "A batch must be (inputs, targets), unless you override compute_loss and update_metrics."
    returned = (
        "compute_loss must return (loss, outputs), and train_step a scalar tensor that depends on "
        f"trainable parameters; {misuse.HOW}."
    )
    expected = [pair, returned]
    with pytest.raises(UserError, match=r"Odd: .+\.\n") as error:
        make_trainer(kind=Odd, **options).fit(loader())
    assert str(error.value).split("\n")[1:] == expected
    trainer = make_trainer(kind=Odd, metrics={})
    if evaluates:
        assert trainer.evaluate(loader()) == {}
        return
    with pytest.raises(UserError, match=r"Odd: .+\.\n") as error:
        trainer.evaluate(loader())
    assert str(error.value).split("\n")[1:] == expected


@pytest.mark.parametrize("change", [lambda loss: None, float, lambda loss: (loss, {})])
def test_a_train_step_that_returns_something_else_is_explained(change):
    class Odd(Trainer):
        def train_step(self, batch):
            return change(super().train_step(batch))

    words = r"^Odd: .+\.\n.+\n.+ train_step a scalar tensor"
    with pytest.raises(UserError, match=words):
        make_trainer(kind=Odd, epochs=1).fit(loader())


def test_errors_of_other_code_stay_as_they_are():
    class Broken(torch.nn.Sequential):
        def forward(self, inputs):
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as error:
        make_trainer(Broken(*make_model())).fit(loader())
    assert not isinstance(error.value, UserError)


class BadIndex(OfDicts):
    def compute_loss(self, batch):
        return self.loss(self.model(batch["x"]), batch["y"] + 9), None


@pytest.mark.parametrize(
    ("batches", "kind", "error"),
    [
        ([{"x": torch.ones(4, 5), "y": torch.ones(4).long()}], OfDicts, RuntimeError),
        (of_dicts(), BadIndex, IndexError),
        ([(torch.ones(4, 5), torch.ones(4).long())], Trainer, RuntimeError),
    ],
)
@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_what_torch_refuses_keeps_its_class_and_says_where(batches, kind, error, use):
    with pytest.raises(error) as caught:
        getattr(make_trainer(kind=kind), use)(batches)
    text = explanation_of(caught.value)
    assert type(caught.value) is error and caught.value.__notes__ == [text]
    if kind is not Trainer:
        place = rf"{error.__name__} in compute_loss \({re.escape(__file__)}:\d+\)\."
        batch = "batch" if use == "fit" else "val batch"
        assert re.match(rf"{place} The {batch}: batch\['x'\] ", text)
    assert code_of(caught.value) == 2 and len(message(caught.value).split("\n")) == 2
    assert message(caught.value).startswith(f"error: {first_line(caught.value)}\n{text}")


class BadIndexOfBoxes(Trainer):
    def compute_loss(self, batch):
        images, targets = batch
        return images[0].sum() + torch.zeros(3)[targets[1]["labels"]].sum(), None


def test_an_error_in_a_batch_of_lists_shows_the_first_of_each_list():
    images = [torch.ones(3, 4, 5 + i) for i in range(2)]
    targets = [{"boxes": torch.ones(2, 4), "labels": torch.tensor([2, 3])} for _ in images]
    with pytest.raises(IndexError) as caught:
        make_trainer(kind=BadIndexOfBoxes).fit([(images, targets)])
    shown = explanation_of(caught.value).partition("The batch: ")[2]
    assert shown == (
        "batch[0] list of 2, batch[0][0] (3, 4, 5) torch.float32, batch[1] list of 2, "
        "batch[1][0]['boxes'] (2, 4) torch.float32, batch[1][0]['labels'] (2,) torch.int64."
    )
    named = [{f"x{i}": torch.ones(2) for i in range(7)}]
    with pytest.raises(ValueError, match="too many values") as caught:
        make_trainer(kind=BadIndexOfBoxes).fit(named)
    assert explanation_of(caught.value).endswith("batch['x5'] (2,) torch.float32, ...")
    texts = {"user": ["ann", "bob"], "label": torch.ones(2), "item": torch.ones(2)}
    with pytest.raises(ValueError, match="too many values") as caught:
        make_trainer(kind=BadIndexOfBoxes).fit([texts])
    assert "batch['user'] list of 2 str, batch['label'] (2,)" in explanation_of(caught.value)


@pytest.mark.parametrize(
    ("loss", "targets", "advice"),
    [
        (torch.nn.CrossEntropyLoss(), torch.ones(4), "convert the targets with .long()"),
        (torch.nn.BCEWithLogitsLoss(), torch.ones(4, 3).long(), "convert them with .float()"),
        (torch.nn.BCEWithLogitsLoss(), torch.ones(4, 3).byte(), "convert them with .float()"),
    ],
)
def test_targets_of_another_type_are_explained(loss, targets, advice):
    with pytest.raises(RuntimeError) as caught:
        make_trainer(loss=loss).fit([(torch.randn(4, 6), targets)])
    assert advice in explanation_of(caught.value)


def test_an_array_in_a_batch_is_shown():
    with pytest.raises(TypeError) as caught:
        make_trainer().fit([(numpy.ones((4, 6), "float32"), numpy.ones(4, int))])
    assert "batch[0] (4, 6) float32, batch[1] (4,) int64" in explanation_of(caught.value)


def test_what_a_library_asserts_about_a_batch_is_short():
    class Detector(Trainer):
        def compute_loss(self, batch):
            return self.model(*batch), None

    models = pytest.importorskip("torchvision").models
    model = models.detection.fasterrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=2, min_size=32, max_size=32
    )
    flat = {"boxes": torch.tensor([[1.0, 1.0, 1.0, 5.0]]), "labels": torch.ones(1).long()}
    with pytest.raises(AssertionError, match="positive height and width") as caught:
        make_trainer(model, kind=Detector).fit([([torch.rand(3, 32, 32)], [flat])])
    assert "batch[1][0]['boxes'] (1, 4) torch.float32" in explanation_of(caught.value)
    assert code_of(caught.value) == 2


@pytest.mark.parametrize("bug", [NameError, ZeroDivisionError, "callback"])
def test_bugs_stay_tracebacks(bug):
    class Buggy(OfDicts):
        def compute_loss(self, batch):
            raise bug("mine")

    class InCallback(Callback):
        def on_step_end(self, trainer):
            raise RuntimeError("mine")

    with pytest.raises(Exception, match="mine") as caught:
        if bug == "callback":
            make_trainer(kind=OfDicts, callbacks=[InCallback()]).fit(of_dicts())
        make_trainer(kind=Buggy).fit(of_dicts())
    assert explanation_of(caught.value) is None and code_of(caught.value) == 1


class WrongKey(OfDicts):
    def compute_loss(self, batch):
        return self.model(batch["img"]).mean(), None


def test_a_wrong_key_of_a_batch_is_explained():
    with pytest.raises(KeyError) as caught:
        make_trainer(kind=WrongKey).fit(of_dicts())
    place = rf"KeyError in compute_loss \({re.escape(__file__)}:\d+\)\."
    shown = r"The batch: batch\['x'\] \(8, 6\) torch.float32, batch\['y'\] \(8,\) torch.int64\."
    assert re.fullmatch(f"{place} {shown}", explanation_of(caught.value))
    assert code_of(caught.value) == 2 and message(caught.value).startswith(
        "error: no key 'img'\nKeyError in compute_loss"
    )


def test_a_message_has_three_lines_of_at_most_500_characters():
    text = message(UserError(f"a={'x' * 1000}: no.\n\n\x1bType b.\n{'y' * 493}\nc"))
    assert text.split("\n") == [f"error: a={'x' * 491}...", "\\x1bType b.", "y" * 493]


@pytest.mark.parametrize("model", [None, torch.nn.Conv1d(6, 3, 1), MLP((6,), 3)])
def test_a_batch_that_the_model_cannot_take_says_what_to_override(model):
    with pytest.raises((TypeError, AttributeError)) as caught:
        make_trainer(model).fit(of_dicts())
    place, advice = explanation_of(caught.value).split("\n")
    assert "The batch: batch['x'] (8, 6) torch.float32, batch['y'] (8,) " in place
    assert advice.startswith("A batch must be (inputs, targets), unless you override compute_loss")


def test_a_batch_that_the_model_cannot_take_in_predict_is_shown():
    with pytest.raises(TypeError) as caught:
        make_trainer(torch.nn.Conv1d(6, 3, 1), kind=OfDicts).predict(of_dicts())
    assert explanation_of(caught.value).startswith("The batch: batch['x'] (8, 6) torch.float32, ")


def test_an_evaluation_is_explained_too():
    with pytest.raises(UserError, match="unless you override compute_loss and update_metrics"):
        make_trainer(kind=OfDicts, metrics={"acc": Accuracy()}).evaluate(of_dicts())
    with pytest.raises(UserError, match="The model returns a tuple, .*\nOverride compute_loss"):
        make_trainer(model=Pair(*make_model())).evaluate(loader())
    with pytest.raises(UserError, match="evaluate needs a loss"):
        make_trainer(loss=None).evaluate(loader())

    class Both(Accuracy):
        def value(self, sums):
            return {"a": 1.0}

    with pytest.raises(UserError, match="val/both is a dict, not a number"):
        make_trainer(metrics={"both": Both()}).evaluate(loader())


def test_several_loaders_are_no_loader():
    with pytest.raises(UserError, match="fit: this dict is not a loader. Pass one loader"):
        make_trainer().fit({"a": loader(), "b": loader()})
    for loaders in ([[loader()] * 2], [loader(), [loader()] * 2]):
        with pytest.raises(UserError, match="fit: this list is not a loader. Pass one loader"):
            make_trainer().fit(*loaders)


@pytest.mark.parametrize(
    "named, message",
    [
        ({}, "val_loader is an empty dict"),
        ({"train": loader()}, "'train' is not a valid name"),
        ({"a/b": loader()}, "'a/b' is not a valid name"),
        ({"a": {"b": loader()}}, "this dict is not a loader"),
    ],
)
def test_names_of_validation_loaders_are_checked(named, message):
    with pytest.raises(UserError, match=f"fit: .*{message}"):
        make_trainer().fit(loader(), named)


@pytest.mark.parametrize("several", [[torch.optim.SGD], {"g": torch.optim.SGD}])
def test_several_optimizers_are_one_combined(several):
    with pytest.raises(UserError, match=r"pass one optimizer, .*combined\.Combined"):
        Trainer(make_model(), torch.nn.CrossEntropyLoss(), several)


def test_a_name_is_no_loader():
    with pytest.raises(UserError, match="fit: this str is not a loader"):
        make_trainer().fit("data/")


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (
            torch.ones(8, 6),
            "this Tensor is not a loader. Pass one loader",
        ),
        (TensorDataset(torch.ones(8, 6)), "this TensorDataset is not a loader"),
        ([[torch.ones(n, 6) for n in (3, 4, 5)]], "not a list of length 3"),
        (
            [[torch.ones(3, 6), torch.ones(4, 6)]],
            "outputs is a Tensor of length 3, not one value for each of the 4 samples",
        ),
    ],
)
def test_predict_refuses_what_it_would_take_for_something_else(batches, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make_trainer().predict(batches)


def test_predict_gives_what_predict_batch_gives_and_warns_of_another_order(caplog):
    class Own(OfDicts):
        def predict_batch(self, batch):
            return self.model(batch["x"])[0]

    model = Pair(*make_model())
    expected = make_trainer(model).module(make_data().train.inputs)[0]
    torch.testing.assert_close(make_trainer(model, kind=Own).predict(of_dicts()), expected)
    torch.testing.assert_close(make_trainer(model).predict(loader())[0], expected)
    make_trainer().predict(loader())
    assert not caplog.records
    make_trainer().predict(loader(shuffle=True))
    assert "the outputs are in random order" in caplog.text


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda x: {"loss": x.mean(), "y": x}, "outputs['loss'] is a Tensor, not one value for"),
        (lambda x: (x, [x, x]), "outputs[1] is a list of length 2, not one value for each of the "),
        (lambda x: None, "outputs is a NoneType, not one value for each of the "),
        (
            lambda x: {"y": x} if x.sum() > 0 else (x,),
            "the model returned outputs['y'] for one batch and outputs[0] for another",
        ),
        (
            lambda x: {"y": x if x.sum() > 0 else None},
            "outputs is a dict, not one value for each of the ",
        ),
    ],
)
def test_predict_refuses_outputs_that_are_not_one_per_sample(outputs, words):
    model = make_model()
    model.forward = outputs
    batches = [torch.ones(20, 6), -torch.ones(20, 6)]
    with pytest.raises(UserError, match=re.escape(words)):
        make_trainer(model).predict(batches)


def test_a_closed_trainer_says_so():
    trainer = make_trainer()
    trainer.close()
    for use in (trainer.fit, trainer.evaluate, trainer.predict):
        with pytest.raises(UserError, match=f"{use.__name__}: this Trainer is closed"):
            use(loader())


def test_weights_that_no_optimizer_has_are_named(caplog):
    last = lambda groups: torch.optim.SGD(model[3].parameters(), lr=0.1)  # noqa: E731
    model = make_model()
    model[0].requires_grad_(False)
    trainer = make_trainer(model, optimizer=last, epochs=1)
    trainer.fit(loader())
    assert not caplog.records
    model[0].requires_grad_(True)
    trainer.fit(loader())
    assert [record.getMessage()[:53] for record in caplog.records] == [
        "These parameters have no optimizer: 0.weight, 0.bias. Pass all"[:53]
    ]

    class Grow(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 4:
                trainer.module.append(torch.nn.Linear(3, 3))

    caplog.clear()
    make_trainer(callbacks=[Grow()], log_every=2).fit(loader())
    assert [record.getMessage()[:53] for record in caplog.records] == [
        "These parameters have no optimizer: 4.weight, 4.bias. Pass all"[:53]
    ]

    class Two(Trainer):
        def stateful(self):
            return {
                **super().stateful(),
                "other": torch.optim.SGD(self.module[0].parameters(), lr=0.1),
            }

    caplog.clear()
    model = make_model()
    make_trainer(model, kind=Two, optimizer=last, epochs=1).fit(loader())
    assert not caplog.records


class Careful(Trainer):
    def clip(self):
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)

    def train_step(self, batch):
        def backward(part):
            with self.autocast:
                loss, _ = self.compute_loss(part)
            loss.backward()
            return loss.detach()

        losses = [backward(part) for part, _ in self.split_with_fractions(batch)]
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return sum(losses) / len(losses)


class Calling(Trainer):
    def train_step(self, batch):
        return super().train_step(batch)


@pytest.mark.parametrize(
    ("kind", "ignored"),
    [
        (Careless, ["max_grad_norm", "split_with_fractions", "autocast"]),
        (Careful, []),
        (Calling, []),
        (type("WithoutSource", (Careless,), {}), []),
    ],
)
def test_a_step_of_your_own_that_ignores_a_setting_is_named(caplog, kind, ignored):
    settings = {
        "max_grad_norm=1.0": "max_grad_norm",
        "grad_accum_steps=2": "split_with_fractions",
        "precision=bf16": "autocast",
    }
    options = {"max_grad_norm": 1.0, "grad_accum_steps": 2, "precision": "bf16"}
    make_trainer(kind=kind, epochs=1, scheduler=schedules.constant, **options).fit(loader())
    assert [record.getMessage() for record in caplog.records] == [
        f"{kind.__name__}.train_step seems to ignore {setting}: the class does not use self.{name}.\n"
        f"Use self.{name} in your train_step; 'Bring your own' in the documentation shows how."
        for setting, name in settings.items()
        if name in ignored
    ]
    caplog.clear()
    make_trainer(kind=kind, epochs=1, scheduler=schedules.constant).fit(loader())
    assert not caplog.records


class Reading(Careless):
    def train_step(self, batch):
        self.seen = self.scheduler.get_last_lr()
        return super().train_step(batch)


class Twice(Trainer):
    def train_step(self, batch):
        loss = super().train_step(batch)
        self.scheduler.step()
        return loss


@pytest.mark.parametrize(
    "scheduler",
    [schedules.cosine, functools.partial(torch.optim.lr_scheduler.StepLR, step_size=9)],
)
@pytest.mark.parametrize(
    ("kind", "warns"),
    [(Reading, True), (Twice, True), (Careful, False), (Calling, False), (Trainer, False)],
)
def test_a_step_of_your_own_that_does_not_advance_the_schedule_once_is_named(
    caplog, kind, warns, scheduler
):
    trainer = make_trainer(kind=kind, epochs=2, log_every=4, scheduler=scheduler)
    trainer.fit(loader())
    text = (
        f"{kind.__name__}.train_step does not call self.scheduler.step() once per step, so the "
        "learning rate does not follow the scheduler.\n"
        "Call it once in your train_step; 'Bring your own' in the documentation shows how."
    )
    assert [record.getMessage() for record in caplog.records] == ([text] if warns else [])


def test_a_tensor_is_logged_as_its_number(tmp_path):
    class Own(Callback):
        def on_epoch_end(self, trainer):
            trainer.log({"train/own": torch.tensor(0.5)})

    make_trainer(callbacks=[Own(), JSONL(tmp_path / "rows.jsonl")], epochs=1).fit(loader())
    assert [
        row["train/own"] for row in read_rows(tmp_path / "rows.jsonl") if "train/own" in row
    ] == [0.5]


def test_two_losses_of_ones_own_are_metrics():
    class Two(Trainer):
        def compute_loss(self, batch):
            outputs = self.model(batch[0])
            parts = {"a": self.loss(outputs, batch[1]), "b": outputs.square().mean()}
            return parts["a"] + parts["b"], parts

        def update_metrics(self, parts, batch):
            for name, metric in self.metrics.items():
                metric.update(parts[name], len(batch[0]))

    found = make_trainer(kind=Two, metrics={"a": Mean(), "b": Mean()}).evaluate(loader())
    assert found["val/a"] + found["val/b"] == pytest.approx(found["val/loss"], rel=1e-6)


def test_a_metric_that_fails_is_named():
    from torchmetrics.classification import BinaryAUROC

    for metric, error in ((Mean(), "RuntimeError: "), (BinaryAUROC(), "[A-Za-z]*Error: ")):
        with pytest.raises(UserError, match=rf"^metrics\.m: {error}") as raised:
            make_trainer(metrics={"acc": Accuracy(), "m": metric}).evaluate(loader())
    assert "\nIt got " not in str(raised.value) or "outputs (" in str(raised.value)
    with pytest.raises(UserError, match=r"\nIt got outputs \(\d+, 3\) torch.float32, targets "):
        make_trainer(metrics={"m": Mean()}).evaluate(loader())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        TrainingError("the loss is not finite"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
)
def test_a_metric_is_not_blamed_for_an_error_with_another_cause(error):
    class Fails(Accuracy):
        def update(self, outputs, targets, weight=None):
            raise error

    with pytest.raises(type(error)) as raised:
        make_trainer(metrics={"m": Fails()}).evaluate(loader())
    assert raised.value is error


def test_advice_about_models_is_not_given_for_a_metric():
    class Views(Accuracy):
        def update(self, outputs, targets, weight=None):
            outputs.t().view(-1)

    with pytest.raises(UserError, match=r"^metrics\.m: RuntimeError: view size is not compatible"):
        make_trainer(metrics={"m": Views()}).evaluate(loader())


# Checkpoints


def test_a_folder_is_gone_on_from_at_its_newest_and_loaded_at_its_best(tmp_path):
    best = {"Checkpoint": {"best": {"step": 8, "value": 0.5}, "metrics": {}}}
    trainer = make_trainer(epochs=3, callbacks=[Checkpoint(tmp_path, keep=9)])
    trainer.fit(loader())
    newest = checkpoint.load(tmp_path / "step_00000024.ckpt")
    newest["callbacks"]["Checkpoint"] |= best["Checkpoint"]
    checkpoint.save(tmp_path / "step_00000024.ckpt", newest)
    assert checkpoint.loaded(newest) is newest
    assert_same(checkpoint.loaded(tmp_path), newest)
    other = make_trainer(epochs=4)
    other.fit(loader(), resume=tmp_path)
    assert other.step == 32
    trainer.load(str(tmp_path))
    assert trainer.step == 8
    assert_same(
        dict(trainer.module.state_dict()), checkpoint.load(tmp_path / "step_00000008.ckpt")["model"]
    )
    with pytest.raises(UserError, match=r"resume from them with fit\(..., resume="):
        make_trainer(callbacks=[Checkpoint(tmp_path)]).fit(loader())


@pytest.mark.parametrize("source", [True, ["a"]])
def test_what_is_no_checkpoint_says_what_one_is(tmp_path, source):
    with pytest.raises(UserError, match="Pass a checkpoint file or folder"):
        make_trainer().load(source)
    with pytest.raises(UserError, match="this folder contains no checkpoint"):
        make_trainer().fit(loader(), resume=tmp_path)


def test_a_file_of_torchs_own_is_named(tmp_path):
    torch.save(make_model().state_dict(), tmp_path / "a.pt")
    with pytest.raises(
        checkpoint.DamagedCheckpoint,
        match="not a readable checkpoint: it was written by torch.save. .* model.load_state_dict",
    ):
        make_trainer().load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("on_train_batch_end", "on_step_end"),
        ("on_before_optimizer_step", "train_step"),
        ("on_step_ends", "Did you mean 'on_step_end'"),
        ("on_full_moon", "on_fit_start, on_step_end, on_epoch_end"),
    ],
)
def test_a_hook_that_nobody_would_call_is_refused(name, instead):
    kind = type("Keras", (Callback,), {name: lambda self, trainer: None})
    with pytest.raises(UserError, match=f"Keras.{name} is never called") as error:
        make_trainer(callbacks=[kind()])
    assert instead in str(error.value) and len(str(error.value).splitlines()) == 2
    fine = type("Fine", (Callback,), {"on_step_end": lambda self, trainer: None, "once": print})
    make_trainer(callbacks=[fine()])


@pytest.mark.parametrize("name", ["training_step", "configure_optimizers", "on_train_epoch_end"])
def test_a_method_that_nobody_would_call_is_refused(name):
    kind = type("Lightning", (Trainer,), {name: lambda self, *_: None})
    with pytest.raises(UserError, match=f"Lightning.{name} is never called") as error:
        make_trainer(kind=kind)
    assert len(str(error.value).splitlines()) <= 3


@pytest.mark.parametrize("wrapper", [torch.nn.DataParallel, torch.compile])
def test_a_model_in_a_wrapper_is_refused(wrapper):
    with pytest.raises(UserError, match=r"model: pass the module itself\. Trainer\(.* wraps it\."):
        make_trainer(wrapper(make_model()))


def test_tensors_are_no_list_of_batches():
    with pytest.raises(UserError, match="fit: this tuple is not a loader"):
        make_trainer().fit((torch.ones(2, 6), torch.ones(2, 6)))


def test_an_error_of_the_model_in_predict_is_its_own():
    class Broken(torch.nn.Sequential):
        def forward(self, inputs):
            return super().forward(inputs).colour

    with pytest.raises(AttributeError, match="colour"):
        make_trainer(Broken(*make_model())).predict([torch.ones(8, 6)])


class Fixed(Trainer):
    """Takes only batches of 4 samples."""

    def compute_loss(self, batch):
        inputs, targets = batch
        return self.loss(self.model(inputs)[:4], targets), None


def test_an_error_in_an_evaluation_shows_its_own_batch():
    train, val = [(torch.ones(n, 6), torch.zeros(n).long()) for n in (4, 9)]
    with pytest.raises(ValueError, match="Expected input batch_size") as caught:
        make_trainer(kind=Fixed, epochs=1).fit([train], [val])
    text = explanation_of(caught.value)
    assert text.endswith("The val batch: batch[0] (9, 6) torch.float32, batch[1] (9,) torch.int64.")
    assert caught.value.__notes__ == [text]


def test_a_batch_of_a_type_that_torch_refuses_is_shown():
    class OfLists(Trainer):
        def compute_loss(self, batch):
            return torch.nn.functional.embedding([1, 2], self.module[0].weight).mean(), None

    with pytest.raises(TypeError, match="must be Tensor, not list") as caught:
        make_trainer(kind=OfLists).fit(loader())
    assert "The batch: batch[0] (" in explanation_of(caught.value)
    assert code_of(caught.value) == 2


def test_a_constructor_that_does_not_call_the_one_of_trainer_is_named():
    class NoSuper(Trainer):
        def __init__(self, model, **settings):
            self.own = settings
            self.module = model

    with pytest.raises(UserError, match=r"NoSuper.__init__ must call super\(\).__init__"):
        NoSuper(make_model()).fit(loader())


def test_an_index_that_an_embedding_does_not_have_is_explained():
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 4), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )
    inputs = torch.arange(24).reshape(8, 3)
    with pytest.raises(IndexError) as caught:
        make_trainer(model).fit([(inputs, torch.zeros(8).long())])
    place, advice = explanation_of(caught.value).split("\n")
    assert place.endswith("The batch: batch[0] (8, 3) torch.int64, batch[1] (8,) torch.int64.")
    assert advice == "An index into an Embedding must be at least 0 and below its num_embeddings."
    assert code_of(caught.value) == 2 and len(message(caught.value).split("\n")) == 3


class IteratesOverAScalar(Trainer):
    def compute_loss(self, batch):
        first, second = batch[1][0]
        return first, second


class TakesAGradient(Trainer):
    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        torch.autograd.grad(loss.detach(), list(self.module.parameters()))
        return loss, outputs


class SplitsWrong(Trainer):
    def split_with_fractions(self, batch):
        return None


class WeighsWrong(Trainer):
    def loss_weight(self, batch):
        return "a"


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (IteratesOverAScalar, TypeError, "iteration over a 0-d tensor"),
        (TakesAGradient, RuntimeError, "does not require grad"),
        (SplitsWrong, TypeError, "NoneType"),
        (WeighsWrong, (TypeError, ValueError), None),
    ],
)
def test_errors_like_those_that_are_explained_stay_as_they_are(kind, error, text):
    for use in ("fit", "evaluate"):
        if use == "evaluate" and kind is SplitsWrong:
            continue
        with pytest.raises(error, match=text) as caught:
            getattr(make_trainer(kind=kind, metrics={}), use)(loader())
        assert not isinstance(caught.value, UserError)


def test_a_loss_without_a_gradient_is_explained():
    class Detached(Trainer):
        def compute_loss(self, batch):
            loss, outputs = super().compute_loss(batch)
            return loss.detach(), outputs

    words = r"does not require grad .*\n.*\n.* that depends on\strainable parameters"
    with pytest.raises(UserError, match=words):
        make_trainer(kind=Detached).fit(loader())
