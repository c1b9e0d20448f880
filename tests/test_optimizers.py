"""Optimizers in their fused form, and stepped without torch's wrappers: the same steps, hooks and names."""

import functools

import pytest
import torch

from trainer import optimizers
from trainer.errors import UserError

CPU, META = torch.device("cpu"), torch.device("meta")


def parameters():
    return [{"params": [torch.nn.Parameter(torch.ones(2, 2))]}]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_the_fused_form_where_nothing_was_chosen(name):
    optimizer = optimizers.build(functools.partial(getattr(torch.optim, name), lr=0.1), parameters(), CPU)
    assert optimizer.defaults["fused"] is True and optimizer.defaults["lr"] == 0.1
    assert optimizers.build(getattr(torch.optim, name), parameters(), CPU).defaults["fused"] is True
    on_meta = optimizers.build(getattr(torch.optim, name), parameters(), META)
    assert not on_meta.defaults["fused"]


@pytest.mark.parametrize("chosen", [{"foreach": False}, {"foreach": True}, {"fused": False}])
def test_not_where_something_was(chosen):
    optimizer = optimizers.build(functools.partial(torch.optim.AdamW, lr=0.1, **chosen), parameters(), CPU)
    assert not optimizer.defaults["fused"] and {name: optimizer.defaults[name] for name in chosen} == chosen


def test_not_where_there_is_none():
    assert "fused" not in optimizers.build(torch.optim.RMSprop, parameters(), CPU).defaults
    optimizer = optimizers.build(lambda groups: torch.optim.AdamW(groups, lr=0.2), parameters(), CPU)
    assert not optimizer.defaults["fused"] and optimizer.defaults["lr"] == 0.2


def test_fused_and_plain_steps_agree():
    results = []
    for chosen in ({}, {"foreach": False}):
        groups = parameters()
        optimizer = optimizers.build(functools.partial(torch.optim.AdamW, lr=0.1, **chosen), groups, CPU)
        for _ in range(5):
            groups[0]["params"][0].grad = torch.tensor([[1.0, -2.0], [0.5, 0.1]])
            optimizer.step()
        results.append(groups[0]["params"][0].detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("options", [{"lr": -1}, {"lr": 0.1, "weight_decay": -1}, {"lr": 0.1, "betas": (2, 0.9)}])
def test_a_value_that_torch_refuses_is_the_users_mistake(options):
    with pytest.raises(UserError, match="^optimizer: Invalid"):
        optimizers.build(functools.partial(torch.optim.AdamW, **options), parameters(), CPU)


KINDS = [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.SGD]


@pytest.mark.parametrize("kind", KINDS)
def test_lean_steps_equal_those_of_torch(kind):
    results = []
    for lean in (True, False):
        groups = parameters()
        optimizer = optimizers.build(functools.partial(kind, lr=0.1), groups, CPU, compiled=not lean)
        assert ("step" in vars(optimizer)) == lean
        for i in range(4):
            groups[0]["params"][0].grad = torch.tensor([[1.0, -2.0], [0.5, i]])
            optimizer.step()
            optimizer.zero_grad()
            assert groups[0]["params"][0].grad is None
        results.append(groups[0]["params"][0].detach())
        assert not results[-1].isnan().any()
    assert torch.equal(*results)


def test_a_lean_step_needs_no_graph_takes_a_closure_and_can_zero_gradients():
    groups = parameters()
    weight = groups[0]["params"][0]
    optimizer = optimizers.build(functools.partial(torch.optim.SGD, lr=0.5), groups, CPU)

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0 and weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert weight.is_leaf and torch.is_grad_enabled()
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_hooks_of_a_lean_step_are_called_and_a_profiler_sees_its_name():
    groups, seen = parameters(), []
    optimizer = optimizers.build(functools.partial(torch.optim.SGD, lr=0.5), groups, CPU)
    groups[0]["params"][0].grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert seen == ["before", "after"]
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())


def test_groups_of_equal_settings_become_one():
    def groups():
        return [
            {"params": [torch.nn.Parameter(torch.ones(2, 2))]},
            {"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.0},
        ]

    for kind, expected in ((torch.optim.SGD, [2]), (torch.optim.Adam, [2]), (torch.optim.AdamW, [1, 1])):
        optimizer = optimizers.build(functools.partial(kind, lr=0.1), groups(), CPU)
        assert [len(group["params"]) for group in optimizer.param_groups] == expected
