"""Parts of a project of your own, built in process: what works, and what is said where it does
not.
"""

import functools
import os
import subprocess
import sys

import pytest
import torch
from hydra import errors as hydra_errors

from stoker.command import arguments, build, messages, sample_check, trust
from stoker.data.datasets import digits
from stoker.trainer import checkpoint, optimizers
from stoker.trainer.callbacks import EarlyStopping
from stoker.trainer.errors import UserError, kind_of, nearest
from stoker.trainer.groups import parameter_groups
from stoker.trainer.metrics import Accuracy
from stoker.trainer.trainer import Trainer

MINE = """
import torch
from torch.nn import functional


class Base(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Net(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, inputs):
        return self.layer(inputs.flatten(1))


class Scores(Net):
    def forward(self, inputs):
        return {"logits": super().forward(inputs)}


def smooth(outputs, targets, smoothing=0.0):
    return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)


def make_loss(weight=None):
    return torch.nn.CrossEntropyLoss()


def five(*args, **kwargs):
    return 5
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with mine.py in it, in which the commands run and whose modules are trusted."""
    (tmp_path / "own_mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with trust.trusting(["own_mine", "own_broken"]):
        yield tmp_path
    for name in ("own_mine", "own_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("x = 1\nimport nothing_here\n", 2, "ModuleNotFoundError: No module named 'nothing_here'"),
        ("from torch import nothing_here\n", 1, "ImportError: cannot import name 'nothing_here'"),
        ("from own_broken import Net\n", 1, "ImportError: cannot import name 'Net'"),
        ("\n\nclass Net(:\n", None, "SyntaxError: invalid syntax (own_broken.py, line 3)"),
        ("print(undefined)\n", 1, "NameError: name 'undefined' is not defined"),
        ("\nprint(own_broken)\n", 2, "NameError: name 'own_broken' is not defined"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(project, text, line, reason):
    path = project / "own_broken.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        trust.locate("model", "own_broken.Net")
    first, second = str(caught.value).split("\n")
    assert first == "model._target_=own_broken.Net: the import fails."
    assert second.startswith(reason)
    assert second.endswith(f" ({path}:{line})" if line else reason)


def test_a_name_that_is_not_there_is_answered_with_a_near_one(project):
    with pytest.raises(UserError) as caught:
        trust.locate("model", "own_mine.Nte")
    assert str(caught.value) == (
        "model._target_=own_mine.Nte: own_mine has no 'Nte'. Did you mean 'own_mine.Net'?"
    )


def test_a_model_that_hands_on_its_arguments_gets_none_that_it_does_not_name(project):
    model = build.build("model", {"_target_": "own_mine.Net"}, in_shape=(8, 8), num_classes=10)
    assert model.layer.weight.shape == (10, 64)


def test_a_loss_may_be_the_function_itself_or_make_one(project):
    torch.manual_seed(0)
    outputs = torch.randn(6, 10, dtype=torch.float64)
    targets = torch.arange(6)
    loss = build.build("loss", {"_target_": "own_mine.smooth", "smoothing": 0.2})
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.2)(outputs, targets)
    assert loss(outputs, targets) == expected
    made = build.build("loss", {"_target_": "own_mine.make_loss"})
    assert isinstance(made, torch.nn.CrossEntropyLoss)
    of_one_number = functools.partial(torch.nn.functional.binary_cross_entropy)
    with pytest.raises(UserError, match=r"^loss=binary_cross_entropy: "):
        sample_check.check_fit(
            build.build("model", {"_target_": "own_mine.Net"}), of_one_number, digits()
        )


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        (
            "dataset",
            'an int, not a stoker.data.datasets.Data, or {"train": ..., "val": ..., "test": ...}.',
        ),
        ("loss", "an int, not a function of (outputs, targets)."),
        ("metrics.five", "an int, not an object with update, compute and reset methods."),
    ],
)
def test_what_is_another_part_is_told_by_what_is_needed(project, key, answer):
    with pytest.raises(UserError) as caught:
        build.build(key, {"_target_": "own_mine.five"})
    assert str(caught.value) == f"{key}._target_=own_mine.five: this returns {answer}"


def test_a_data_set_is_not_blamed_if_another_process_is_gone(project):
    text = "def lost():\n    raise RuntimeError('gloo/transport/tcp/pair.cc: Read error. GLHF!')\n"
    (project / "own_broken.py").write_text(text, encoding="utf-8")
    with pytest.raises(RuntimeError, match="Read error"):
        build.build("dataset", {"_target_": "own_broken.lost"})


def test_a_model_that_returns_a_dict_is_told_to_override_compute_loss(project):
    model = build.build("model", {"_target_": "own_mine.Scores"})
    with pytest.raises(UserError, match="^model=Scores returns a dict, .*\nOverride "):
        sample_check.check_fit(model, torch.nn.CrossEntropyLoss(), digits())


def test_a_model_without_parameters_is_not_blamed_on_the_optimizer():
    module = torch.nn.ReLU()
    with pytest.raises(UserError, match="^model: ReLU has no parameters to train.$"):
        groups = parameter_groups(module)
        optimizers.build(torch.optim.SGD, groups, torch.device("cpu"), module)


def test_an_option_that_is_missing_in_a_file_is_told_with_the_file(project):
    error = hydra_errors.MissingConfigException(
        "In 'model/mine': Could not load 'model/mlpp'.", "model/mlpp"
    )
    assert messages.explanation(error) == (
        "model=mlpp: not a valid choice. Did you mean 'mlp'?\n"
        "Choose one of: cnn, gpt, linear, mlp, resnet, whitened_cnn."
    )


def test_the_beginning_of_a_name_stands_for_it():
    names = ["strategy", "lr", "batch_size", "optimizer"]
    for typed, meant in {"lrate": "lr", "lr_rate": "lr", "batch": "batch_size"}.items():
        assert nearest(typed, names) == meant
    assert nearest("x", names) is None
    assert [kind_of(value) for value in (1, "a", Ellipsis)] == ["an int", "a str", "an ellipsis"]


def test_a_second_signal_ends_with_the_command_that_resumes():
    code = """
import os, signal
from stoker.command import signals
from stoker.trainer import stopping
signal.signal(signal.SIGINT, signals.handle)
signals.can_raise, stopping.on_signal = True, print
signals.resume_command = "stoker run_dir=a"
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGINT)
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr == "ended immediately. To resume:\nstoker run_dir=a\n"


def test_a_warning_names_the_newest_good_checkpoint_not_the_one_that_is_used(tmp_path, caplog):
    for step in (1, 2, 3):
        state = {"step": step, "callbacks": {"Checkpoint": {"best": {"step": 1, "value": 0.5}}}}
        checkpoint.save(checkpoint.path_of(tmp_path, step), state)
    newest = checkpoint.path_of(tmp_path, 3)
    newest.write_bytes(newest.read_bytes()[:-1])
    path, state = checkpoint.best(tmp_path)
    assert (path.name, state["step"]) == ("step_00000001.ckpt", 1)
    [record] = caplog.records
    assert record.getMessage().startswith(f"{newest} is not a readable checkpoint: ")
    good = checkpoint.path_of(tmp_path, 2)
    assert record.getMessage().endswith(f". Using the newest valid checkpoint instead: {good}.")


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "BCEWithLogitsLoss"])
def test_weights_of_classes_are_typed_as_a_list_of_whole_numbers(name):
    key = "weight" if name == "CrossEntropyLoss" else "pos_weight"
    outputs = torch.randn(8, 3)
    targets = torch.rand(8, 3)
    loss = build.build("loss", {"_target_": f"torch.nn.{name}", key: [1, 2, 5]})
    weighted = getattr(torch.nn, name)(**{key: torch.tensor([1.0, 2.0, 5.0])})
    assert loss(outputs, targets).equal(weighted(outputs, targets))
    with pytest.raises(UserError, match=rf"loss\.{key}=x: expected a number of at least 0"):
        build.build("loss", {"_target_": f"torch.nn.{name}", key: [1, 2, "x"]})


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("run_dir=1e3", "run_dir='1e3'"),
        ("++run_dir=1e3", "++run_dir='1e3'"),
        ("monitor=2024,val/acc,5e2", "monitor='2024',val/acc,'5e2'"),
        ("run_dir='1e3'", "run_dir='1e3'"),
        ("run_dir", "run_dir"),
        ("epochs=1e3", "epochs=1e3"),
    ],
)
def test_text_that_looks_like_a_number_stays_text(typed, read):
    assert read in arguments.for_hydra([typed])


def test_an_argument_that_no_file_gives_is_added_by_a_plus(monkeypatch):
    config = {"loss": {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.0}}
    hint = messages.hint_for("loss.ignore_index", config)
    assert hint.startswith(" To pass your own argument, type +loss.ignore_index=...")
    assert messages.hint_for("loss.label_smothing", config).endswith("'loss.label_smoothing'?")
    assert messages.hint_for("metrics.top3", {"top_k": None, "metrics": {"acc": None}}) == (
        " Type +metrics.top3._target_=... to add your own."
    )
    known = {"precision": "auto", "sweep": {"trials": 30}}
    assert messages.hint_for("hydra.sweeper.direction", known) == ""
    assert messages.hint_for("hydra.sweeper.n_trials", known) == " Did you mean 'sweep.trials'?"
    assert messages.explanation(FileNotFoundError("a.parquet")) == (  # as pyarrow raises it
        "a.parquet: no such file or directory."
    )
    of_mine = {"model": {"_target_": "mine.Net", "depth": 2}}  # not model=gpt, which has a width
    hint = messages.hint_for("model.width", of_mine)
    assert hint == " To pass your own argument, type +model.width=..."
    assert messages.hint_for("model.detph", of_mine) == " Did you mean 'model.depth'?"
    monkeypatch.setattr(sys, "argv", ["train.py", "dataset._target_=own_mine.points"])
    hint = messages.hint_for("dataset.noise", config)
    assert hint.startswith(" To pass your own argument, type +dataset.noise=...")


@pytest.mark.parametrize("trusted", [[], ["stoker"]])
def test_a_missing_argument_is_named(trusted):
    target = "stoker.trainer.metrics.MeanIoU"
    with trust.trusting(trusted), pytest.raises(UserError) as caught:
        build.build("metrics.miou", {"_target_": target})
    assert str(caught.value) == (
        f"metrics.miou ({target}): Confusion.__init__() missing 1 required positional argument: "
        "'num_classes'"
    )


@pytest.mark.parametrize("value", ["0.2", "0.2,0.3"])
def test_a_plus_is_allowed_for_a_key_that_the_replaced_model_has_too(value):
    typed = ["+model.dropout=" + value, "+model.width=3", "model._target_=own_mine.Net"]
    first, second, *_ = arguments.for_hydra(typed)
    assert [first, second] == [f"++model.dropout={value}", "++model.width=3"]
    assert arguments.for_hydra(["+size=3"])[0] == "+size=3"


def test_a_package_that_python_does_not_find_says_where_to_start(project):
    with trust.trusting(["own_absent"]), pytest.raises(UserError) as caught:
        trust.locate("model", "own_absent.Net")
    assert "No module named 'own_absent'" in str(caught.value)
    assert "Install own_absent, or start Python in the folder that contains it." in str(
        caught.value
    )


class NoValidationLoss(Trainer):
    """A model, such as torchvision's detectors, that computes losses only in training mode."""

    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        return (loss if self.model.training else None), outputs


@pytest.mark.parametrize(
    ("metrics", "monitor", "answer"),
    [
        ({"acc": Accuracy()}, "auto", None),
        ({"acc": Accuracy()}, "train/loss", None),
    ],
)
def test_an_unknown_loss_of_evaluations_is_left_out(metrics, monitor, answer):
    batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(3)]
    stopping = EarlyStopping(5, monitor=monitor)
    trainer = NoValidationLoss(
        torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), torch.optim.AdamW,
        metrics=metrics, callbacks=[stopping], epochs=2, device="cpu",
    )  # fmt: skip
    if answer is not None:
        with pytest.raises(UserError, match=answer):
            trainer.fit(batches, batches)
        return
    rows = trainer.fit(batches, batches)
    names = {name for row in rows for name in row}
    assert "val/acc" in names and "val/loss" not in names
    assert stopping.best is not None
    assert list(trainer.evaluate(batches, "test")) == ["test/acc"]
