"""What a `_target_` of another class takes over from the files, and what `task=plan` says of it."""

import itertools

import pytest
import torch

from stoker.command import build
from stoker.tasks import parts
from stoker.trainer import schedules
from stoker.trainer.callbacks import EarlyStopping

SMALL = ("dataset=synthetic", "dataset.n=640", "device=cpu", "max_steps=8", "model.hidden=[8]")


def trained(cfg):
    """The weights before and after a fit, and the batches that it had."""
    with parts.building(cfg) as built:
        trainer, loader = built.trainer, built.loaders[0]
        batches = [tuple(part.clone() for part in batch) for batch in loader]
        before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
        trainer.fit(loader)
        after = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
    return before, after, batches


def by_plain_torch(before, batches, optimizer):
    """The weights after as many steps of plain torch."""
    weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    step = optimizer(weights.values())
    first, second = (name.removesuffix(".weight") for name in weights if name.endswith("weight"))
    for inputs, targets in itertools.islice(batches, 8):
        hidden = torch.relu(
            torch.nn.functional.linear(inputs, weights[f"{first}.weight"], weights[f"{first}.bias"])
        )
        logits = torch.nn.functional.linear(
            hidden, weights[f"{second}.weight"], weights[f"{second}.bias"]
        )
        step.zero_grad()
        torch.nn.functional.cross_entropy(logits, targets).backward()
        step.step()
    return weights


@pytest.mark.parametrize("name", ["RMSprop", "Adadelta", "Adamax"])
def test_another_optimizer_has_the_defaults_of_torch(processed, name):
    target = f"torch.optim.{name}"
    typed = (f"optimizer._target_={target}", "scheduler=constant", "callbacks.jsonl.path=null")
    cfg = processed(*SMALL, *typed)
    assert dict(cfg.optimizer) == {"_target_": target, "_partial_": True}
    before, after, batches = trained(cfg)
    expected = by_plain_torch(before, batches, getattr(torch.optim, name))
    for key, weight in expected.items():
        assert torch.equal(after[key], weight.detach())


def test_typed_arguments_stay(processed):
    typed = ("optimizer._target_=torch.optim.RMSprop", "optimizer.lr=1e-2")
    cfg = processed(*SMALL, *typed, "optimizer.eps=1e-3", "+optimizer.momentum=0.5")
    assert dict(cfg.optimizer) == {
        "_target_": "torch.optim.RMSprop",
        "_partial_": True,
        "lr": 1e-2,
        "eps": 1e-3,
        "momentum": 0.5,
    }


def test_the_same_target_keeps_its_file(processed):
    cfg = processed(*SMALL, "optimizer._target_=torch.optim.AdamW")
    assert cfg.optimizer == processed(*SMALL).optimizer and cfg.optimizer.weight_decay == 0.01


def test_it_holds_for_every_group(processed):
    cfg = processed(
        "scheduler._target_=stoker.trainer.schedules.linear",
        "loss._target_=torch.nn.MultiMarginLoss",
        "model._target_=stoker.models.cnn.CNN",
        "dataset._target_=stoker.data.datasets.synthetic",
        "callbacks.early_stopping._target_=test_new_targets.Patient",
        "sweep=optuna",
        "sweep.pruner._target_=optuna.pruners.MedianPruner",
        "trainer._target_=test_new_targets.stoker_trainer",
    )
    assert set(cfg.scheduler) == {"_target_", "_partial_"}  # warmup is of cosine.yaml
    assert set(cfg.loss) == {"_target_"}
    assert set(cfg.model) == {"_target_"}  # and not the dropout of the MLP
    assert set(cfg.dataset) == {"_target_", "augment", "resident", "workers", "timeout"}
    assert set(cfg.sweep.pruner) == {"_target_"}
    # What follows a setting stays where there is such an argument: min_delta does not.
    assert set(cfg.callbacks.early_stopping) == {"_target_", "patience"}
    assert set(cfg.trainer) == {"_target_", "epochs", "max_steps"}


class Patient(EarlyStopping):
    def __init__(self, patience=None, min_delta=5.0):
        super().__init__(patience, min_delta)


def stoker_trainer(epochs, max_steps):
    """As many of the Trainer's settings as a Trainer of one's own may have."""


def test_a_node_typed_whole_is_typed(processed):
    node = "{_target_:test_new_targets.Patient,patience:4}"
    cfg = processed(f"callbacks.early_stopping={node}", "trusted=[test_new_targets]")
    assert dict(cfg.callbacks.early_stopping) == {
        "_target_": "test_new_targets.Patient",
        "patience": 4,
    }


def test_a_config_of_ones_own_keeps_what_it_gives(processed, project):
    """The file that names the target, and the experiment that names none."""
    project("optimizer/rms", "defaults: [adamw]\n_target_: torch.optim.RMSprop\neps: 1e-8\n")
    project("experiment/rms", "# @package _global_\noptimizer: {lr: 3e-3}\n")
    cfg = processed("optimizer=rms", "experiment=rms")
    assert dict(cfg.optimizer) == {
        "_target_": "torch.optim.RMSprop",
        "_partial_": True,
        "lr": 3e-3,
        "eps": 1e-8,
    }
    project("experiment/sgd", "# @package _global_\noptimizer: {_target_: torch.optim.SGD}\n")
    cfg = processed("experiment=sgd")
    assert dict(cfg.optimizer) == {"_target_": "torch.optim.SGD", "_partial_": True}


def test_a_trainer_of_a_file_follows_the_settings(processed, project):
    project("trainer/mine", "_target_: stoker.trainer.trainer.Trainer\nlog_every: 7\n")
    typed = (
        *SMALL,
        "max_grad_norm=2",
        "seed=3",
        "log_every=5",
        "groups=[{match: '*.bias', lr: 0.5}]",
    )
    with parts.building(processed(*typed, "trainer=mine", "trusted=[stoker]")) as built:
        trainer = built.trainer
        assert (trainer.max_steps, trainer.max_grad_norm, trainer.seed) == (8, 2, 3)
        assert trainer.log_every == 7 and trainer.device.type == "cpu"
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.5, 3e-3}
    project("trainer/short", "_target_: test_new_targets.stoker_trainer\nepochs: 7\n")
    cfg = processed(*typed, "trainer=short", "trusted=[test_new_targets]")
    settings = parts.settings_of_trainer(cfg)
    assert build.arguments_to_pass("trainer", cfg.trainer, settings) == {"max_steps": 8}


def test_the_opening_lines_name_a_constant_schedule():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    assert schedules.constant(optimizer, 3).description == "constant"
