"""Keys, types and ${...} of a config: what is refused, and which key the message names."""

from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from stoker.command import messages
from stoker.tasks import parts
from stoker.trainer.errors import UserError

SMALL = ("dataset=synthetic", "dataset.n=640", "device=cpu", "max_steps=8", "model.hidden=[8]")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "++sweep.att_once=1",
            "sweep.att_once: no such key. Did you mean 'sweep.at_once'",
        ),
        ("++checkpoint.folder=x", "checkpoint.folder: no such key"),
        (
            "groups=[{lr:1}]",
            r"groups=\[\{lr:1\}\]: expected a list of rules, each with a name pattern",
        ),
        ("groups=[{match:x}]", r"groups=\[\{match:x\}\]: expected a list of rules"),
        ("groups=[{match:x,lr_decay:2}]", "groups: lr_decay of x=2: expected a number above 0"),
        ("channels_last={a:1}", r"channels_last=\{a:1\}"),
    ],
)
def test_a_key_or_a_type_that_nothing_has_is_refused(processed, typed, message):
    with pytest.raises(UserError, match=message):
        processed(*SMALL, typed)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("optimzer: {lr: 0.1}", "optimzer: no such key. Did you mean 'optimizer'?"),
        ("epoch: 3", "epoch: no such key. Did you mean 'epochs'?"),
        ("checkpoint: {evry: 3}", "checkpoint.evry: no such key. Did you mean 'checkpo"),
        ("sweep: {at_onse: 3}", "sweep.at_onse: no such key. Did you mean 'sweep.at_o"),
    ],
)
def test_a_misspelt_key_in_your_own_file_is_refused(processed, project, text, answer):
    project("experiment/mine", f"# @package _global_\n{text}\n")
    project("model/mine", f"# @package _global_\ndefaults: [mlp@model]\n{text}\n")
    for group in ("experiment", "model"):
        with pytest.raises(UserError) as caught:
            processed(*SMALL, f"{group}=mine")
        assert str(caught.value).startswith(answer)


def test_a_group_of_your_own_sets_the_keys_of_a_run_and_no_others(processed, project):
    project("size/small", "# @package _global_\nepochs: 2\n")
    assert processed("+size=small").epochs == 2
    assert processed("experiment=none").epochs == 10
    project("experiment/short", "# @package _global_\nepochs: 3\n")
    assert processed("experiment=none", "experiment=short").epochs == 3
    assert processed("experiment=short", "experiment=none").epochs == 10
    project("size/keys", "x: 2\n")
    project("experiment/keys", "epochs: 2\n")
    for typed, key in (("+size=keys", "size"), ("experiment=keys", "experiment")):
        words = f"^{key}.*: no such key. Files in this group must begin with '# @pack"
        with pytest.raises(UserError, match=words):
            processed(typed)
    project("experiment/slip", "# @package _global_\noptimizer: sgd\n")
    with pytest.raises(
        UserError, match="^optimizer: .*\n.*'- override /optimizer: NAME' under 'def"
    ):
        processed("experiment=slip")
    project("experiment/override", "defaults:\n  - override /model: cnn\n")
    with pytest.raises(ConfigCompositionException) as caught:
        processed("experiment=override")
    answer = messages.explanation(caught.value).splitlines()
    assert answer[0].startswith("In 'experiment/override': Invalid Defaults List override")
    assert answer[2] == "Files in this group must begin with '# @package _global_'."


def test_a_variable_of_your_own_that_another_key_follows_is_accepted(processed, project):
    project("experiment/mine", "# @package _global_\nlength: 3\nepochs: ${length}\n")
    assert processed("experiment=mine").epochs == 3
    with pytest.raises(UserError, match="^lenght: no such key"):
        project("experiment/slip", "# @package _global_\nlenght: 3\n")
        processed("experiment=slip")


def test_a_typed_option_that_a_file_overrides_is_refused(processed, project):
    project("experiment/mine", "# @package _global_\nloss: {_target_: torch.nn.L1Loss}\n")
    typed = ("experiment=mine", "loss=mse")
    words = (
        "^loss=mse: another config file, such as your experiment's, sets "
        "loss._target_=torch.nn.L1Loss.\n"
        "Remove the key from that file, or also type loss._target_=torch.nn.MSELoss."
    )
    with pytest.raises(UserError, match=words):
        processed(*typed)
    target = "loss._target_=torch.nn.MSELoss"
    assert processed(*typed, target).loss._target_ == "torch.nn.MSELoss"
    assert processed("experiment=mine", "model=cnn").loss._target_ == "torch.nn.L1Loss"


@pytest.mark.parametrize(
    ("contents", "answer"),
    [
        (b"epochs: [1\n", "experiment=mine: these settings cannot be read (while parsing a flow"),
        (b"run_dir: t\xe4st\n", "experiment=mine: these settings cannot be read ('utf-8' codec"),
        (b"- a\n", "In 'experiment/mine': "),
        (b"checkpoint: 5\n", "checkpoint=5: expected a group of keys, as in 'checkpoint={{every:null,"),
        (b"checkpoint: [5]\n", "In 'experiment/mine': "),
        (b"callbacks: {ema: 3}\n", "callbacks.ema=3: expected a group of keys, as in 'callbacks.ema="),
        (b"callbacks: [1, 2]\n", "In 'experiment/mine': "),
        (b"metrics: 3\n", "metrics=3: expected a group of keys, as in 'metrics={{}}'."),
        (b"sweep: 3\n", "sweep=3: expected a group of keys, as in 'sweep={{at_once:"),
        (b"dataset: [a]\n", "In 'experiment/mine': "),
        (b"dataset: {augment: flip}\n", "dataset.augment=flip: expected a list, as in 'dataset.augment=[flip]'."),
        (b"model: {hidden: {a: 1}}\n", "In 'experiment/mine': "),
        (b"groups: 3\n", "groups=3: expected a list of rules, each with a name pattern"),
    ],
)  # fmt: skip
def test_an_experiment_that_cannot_be_used_is_named(forks, project, contents, answer):
    project("experiment/other", "epochs: 2\n")
    path = Path("configs/experiment/mine.yaml").resolve()
    path.write_bytes(b"# @package _global_\n" + contents)
    done = forks.run(Path.cwd(), "experiment=mine")
    assert done.code == 2 and len(done.err.splitlines()) <= 3
    assert done.err.startswith(f"error: {answer.format(path)}"), done.err


def test_what_switches_a_callback_off_is_allowed(processed):
    cfg = processed(*SMALL, "callbacks.jsonl.path=null", "callbacks.early_stopping.patience=null")
    assert cfg.callbacks.jsonl.path is None


def test_the_keys_of_a_callback_that_is_off_are_checked(processed):
    message = "callbacks.time_limit.minute: this callback is off. Also type max_minutes="
    with pytest.raises(UserError, match=message):
        processed(*SMALL, "+callbacks.time_limit.minute=1")


def test_a_misspelled_key_in_a_file_is_refused_even_if_its_callback_is_off(processed, project):
    contents = "# @package _global_\npatience: null\ncallbacks: {early_stopping: {patiense: 3}}\n"
    project("experiment/mine", contents)
    cfg = processed(*SMALL, "experiment=mine")
    with pytest.raises(UserError, match="no such argument. Did you mean 'patience'?"):
        parts.build_callbacks(cfg, [])


def test_a_path_of_digits_is_text(processed):
    assert processed("dataset=mnist", "dataset.root=2024").dataset.root == "2024"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            "${oc.env:STOKER_NOT_SET}",
            "KeyError raised while resolving interpolation: \"Environment variable 'STOKER_NOT_SET' not found\"",
        ),
        ("${model.dropout}", "Recursive interpolation detected"),
        ("${models.dropout}", "Interpolation key 'models.dropout' not found"),
        ("${nothing:1}", "Unsupported interpolation type nothing"),
    ],
)
def test_a_broken_reference_names_its_key(processed, value, reason):
    with pytest.raises(UserError) as caught:
        processed(f"model.dropout={value}")
    assert str(caught.value) == f"model.dropout: {reason}.\nType model.dropout=VALUE."
