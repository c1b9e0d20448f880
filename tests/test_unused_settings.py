"""Settings that cannot take effect are refused, by a run and by its plan."""

import shlex
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from stoker.command import arguments, build, trust
from stoker.command.defaults import files_of
from stoker.tasks import parts, unused_settings
from stoker.tasks.overfit import overfit
from stoker.tasks.unused_settings import check_unused, without_effect
from stoker.trainer import schedules
from stoker.trainer.errors import UserError

SMALL = ("dataset=synthetic", "dataset.n=100", "device=cpu", "batch_size=20", "epochs=5")
# 80 samples to train on: 5 epochs of 4 steps


def check(cfg):
    with parts.building(cfg) as built:
        check_unused(cfg, built)


def rates(total_steps, **settings):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = schedules.constant(optimizer, total_steps, **settings)
    return [schedule.factor(step) for step in range(total_steps)]


def test_a_warmup_is_shorter_than_the_training():
    for warmup in (20, 500):
        with pytest.raises(
            UserError, match=f"warmup={warmup}: expected a whole number of steps less than 20"
        ):
            rates(20, warmup=warmup)
    assert rates(20, warmup=19) == [step / 20 for step in range(1, 20)] + [1.0]
    assert rates(20, warmup=0.99) == rates(20, warmup=19)  # a share leaves one step
    assert rates(1, warmup=0.9) == [1.0]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("patience=5", "patience=5: this run has only 5 evaluations"),
        (
            "optimizer.lr=0.5 groups=[{match:layers.*,lr:0.1}]",
            "optimizer.lr=0.5: every parameter gets its learning rate from a rule in groups",
        ),
        ("patience=1 eval_every=20", "patience=1: this run has only 1 evaluation, so this"),
        ("max_steps=3 epochs=null eval_every=4", "eval_every=4: this run has only 3 steps"),
        ("checkpoint.every=21", "checkpoint.every=21: this run has only 20 steps"),
        ("callbacks.lookahead.every=30", "callbacks.lookahead.every=30: this run has only 20"),
        ("freeze=[layers.0.*] callbacks.freeze.thaw_at=20", "thaw_at=20: this run has only 20 st"),
        (
            "eval_every=3 dataset.val_fraction=0",
            "eval_every=3: there is no validation split .* or type dataset.val_fraction=0.1.",
        ),
        ("callbacks.lookahead.decay=0.3", "decay: .* off. Also type callbacks.lookahead.every="),
        (
            "callbacks.early_stopping.min_delta=0.1",
            "min_delta: .* off. Also type patience=",
        ),
    ],
)
def test_what_would_change_nothing_is_refused(processed, typed, message):
    with pytest.raises(UserError, match=message):
        check(processed(*SMALL, "dataset.num_classes=10", *shlex.split(typed)))


def test_a_data_function_without_val_fraction_is_told_to_add_a_split(monkeypatch):
    monkeypatch.setattr(arguments, "typed_keys", lambda: {"eval_every"})
    monkeypatch.setattr(unused_settings, "beyond_the_end", lambda *_: ())
    cfg = OmegaConf.create({"eval_every": 3, "dataset": {}})

    with pytest.raises(UserError, match="Remove eval_every, or add a val split to the data."):
        check_unused(cfg, SimpleNamespace(loaders=([1], None, None)))


@pytest.mark.parametrize(
    ("key", "value", "by", "other"),
    [
        ("limit_train", 0.5, "steps_per_epoch", 7),
        ("dataset.val_fraction", 0.3, "dataset.folds", 5),
    ],
)
def test_of_two_settings_for_one_thing_one_is_refused(monkeypatch, key, value, by, other):
    monkeypatch.setattr(unused_settings, "beyond_the_end", lambda *_: ())
    built = SimpleNamespace(loaders=([1], [1], None), data=SimpleNamespace(kind="table"))
    cfg = OmegaConf.create({"dataset": {}, "groups": []})
    OmegaConf.update(cfg, key, value)
    assert dict(without_effect(cfg, built)) == {}
    OmegaConf.update(cfg, by, other)
    [(refused, reason)] = without_effect(cfg, built)
    assert refused == key and reason.startswith(f"{by}={other} overrides this setting")
    monkeypatch.setattr(arguments, "typed_keys", lambda: {key, by})
    with pytest.raises(UserError, match=f"{key}={value}: {by}={other} overrides this"):
        check_unused(cfg, built)


def test_what_changes_something_is_allowed(processed):
    typed = ("patience=4", "checkpoint.every=20", "log_every=1000")
    typed += ("freeze=[layers.0.*]", "callbacks.freeze.thaw_at=19")
    off = ("callbacks.lookahead.every=null", "callbacks.lookahead.decay=0.3")
    check(processed(*SMALL, *typed, *off, "eval_every=4"))
    check(processed(*SMALL, "eval_every=21"))  # evaluates only at the end, not after each epoch
    check(processed(*SMALL, "patience=null", "callbacks.early_stopping.min_delta=0.1"))


def test_what_a_file_gives_is_not_refused(processed, project):
    project("experiment/mine", "# @package _global_\npatience: 100\nmax_steps: 100\n")
    check(processed(*SMALL[:-1], "experiment=mine", "max_steps=3"))
    with pytest.raises(
        UserError, match="epochs=5 both set the length of the run. Type max_steps=null"
    ):
        processed(*SMALL, "experiment=mine")


OWN = """
import torch
from stoker import Trainer


class Ignores(Trainer):
    def __init__(self, *args, noise=0.0, **kwargs):
        super().__init__(*args, **kwargs)

    def compute_loss(self, batch):
        outputs = self.model(batch[0])
        return outputs.square().mean(), outputs

    def train_step(self, batch):
        return super().train_step(batch)


def data(n=40, workers=0):
    return {"train": [(torch.ones(2), i % 2) for i in range(n)]}
"""


def test_an_argument_that_no_parent_takes_is_named(tmp_path, monkeypatch):
    (tmp_path / "misspelt.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "misspelt.Ignores", "log_evry": 1}
    message = r"trainer \(misspelt.Ignores\): .* 'log_evry'"
    with trust.trusting(["misspelt"]), pytest.raises(UserError, match=message):
        build.build("trainer", node, model=torch.nn.Linear(2, 2))


def test_a_setting_of_the_loader_is_no_argument_of_the_data_set(processed, tmp_path, monkeypatch):
    (tmp_path / "reading.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    typed = ["dataset._target_=reading.data", "trainer._target_=reading.Ignores"]
    typed += ["model._target_=torch.nn.Linear", "+model.in_features=2", "+model.out_features=2"]
    with trust.trusting(["reading"]):
        check(processed(*typed, "device=cpu"))
        with pytest.raises(UserError) as error:
            check(processed(*typed, "device=cpu", "dataset.workers=1"))
    assert str(error.value) == (
        "dataset.workers=1: this key configures the loader and is not passed to reading.data, "
        "which has an argument of the same name. Rename the argument."
    )


def test_nor_is_one_in_a_config_file_of_its_own(processed, project, tmp_path, monkeypatch):
    (tmp_path / "in_a_file.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    typed = ["dataset=mine", "trainer._target_=in_a_file.Ignores", "device=cpu"]
    typed += ["model._target_=torch.nn.Linear", "+model.in_features=2", "+model.out_features=2"]
    with trust.trusting(["in_a_file"]):
        project("dataset/mine", "_target_: in_a_file.data\nn: 20\n")
        check(processed(*typed))
        project("dataset/mine", "_target_: in_a_file.data\nn: 20\nworkers: 1\n")
        files_of.cache_clear()
        with pytest.raises(UserError, match=r"^dataset\.workers=1: this key configures the loader"):
            check(processed(*typed))


def test_a_step_of_your_own_is_not_judged_by_its_loss(processed, tmp_path, monkeypatch):
    (tmp_path / "stepping.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with trust.trusting(["stepping"]):
        cfg = processed(*SMALL, "overfit=1", "trainer._target_=stepping.Ignores")
        with pytest.raises(UserError, match="overfit=1: Ignores overrides train_step"):
            overfit(cfg)


def test_a_transform_of_torchvision_needs_no_trust_and_nothing_else_is_let_in():
    pytest.importorskip("torchvision")

    def nested(group, key, target):
        build.check_nested(group, {key: [{"_target_": target}]})

    flip = "torchvision.transforms.v2.RandomHorizontalFlip"
    nested("dataset", "augment", flip)
    for group, key, target in [
        ("dataset", "augment", "torchvision.transforms.v2.functional.horizontal_flip"),
        ("dataset", "augment", "torchvision.io.read_file"),
        ("dataset", "root", flip),
        ("optimizer", "params", flip),
    ]:
        with pytest.raises(UserError, match="_target_"):
            nested(group, key, target)


def test_a_typed_loss_that_your_own_compute_loss_ignores_is_warned_of(
    processed, tmp_path, monkeypatch, caplog
):
    code = OWN + "class Uses(Ignores):\n    def compute_loss(self, batch):\n"
    code += "        outputs = self.model(batch[0])\n        return self.loss(outputs, batch[1]), outputs\n"
    (tmp_path / "losing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    given = ["dataset._target_=losing.data", "device=cpu"]
    given += ["model._target_=torch.nn.Linear", "+model.in_features=2", "+model.out_features=2"]
    ignores = "trainer._target_=losing.Ignores"
    with trust.trusting(["losing"]):
        check(processed(*given, ignores))  # the default loss is not typed
        check(processed(*given, "trainer._target_=losing.Uses", "loss.label_smoothing=0.1"))
        check(processed(*given, "loss.label_smoothing=0.1"))
        assert not caplog.records
        check(processed(*given, ignores, "loss=mse"))
        check(processed(*given, ignores, "loss.weight=[1,2]", "+loss.ignore_index=7"))
    assert [record.getMessage() for record in caplog.records] == [
        f"Ignores.compute_loss seems to ignore {typed}: the class does not use self.loss.\n"
        "Use self.loss in your compute_loss, or remove the setting."
        for typed in ("loss=mse", "loss.weight=[1,2]")
    ]
