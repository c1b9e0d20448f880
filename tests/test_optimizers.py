"""Optimizers in their fused form and without torch's wrappers: the same steps, hooks, names; and
decoupled_sgd.
"""

import functools
import math

import pytest
import torch
from conftest import make_data, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.trainer import optimizers, schedules
from stoker.trainer.combined import Combined
from stoker.trainer.errors import UserError
from stoker.trainer.groups import parameter_groups
from stoker.trainer.optimizers import decoupled_sgd

CPU, META = torch.device("cpu"), torch.device("meta")


def build(factory, groups, device):
    return optimizers.build(factory, groups, device, torch.nn.Identity())


def parameters():
    return [{"params": [torch.nn.Parameter(torch.ones(2, 2))]}]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_the_fused_form_where_nothing_was_chosen(name):
    optimizer = build(functools.partial(getattr(torch.optim, name), lr=0.1), parameters(), CPU)
    assert optimizer.defaults["fused"] is True and optimizer.defaults["lr"] == 0.1
    assert build(getattr(torch.optim, name), parameters(), CPU).defaults["fused"] is True
    on_meta = build(getattr(torch.optim, name), parameters(), META)
    assert not on_meta.defaults["fused"]


@pytest.mark.parametrize("chosen", [{"foreach": False}, {"foreach": True}, {"fused": False}])
def test_not_where_something_was(chosen):
    optimizer = build(functools.partial(torch.optim.AdamW, lr=0.1, **chosen), parameters(), CPU)
    assert (
        not optimizer.defaults["fused"]
        and {name: optimizer.defaults[name] for name in chosen} == chosen
    )


def test_not_where_there_is_none():
    assert "fused" not in build(torch.optim.RMSprop, parameters(), CPU).defaults
    optimizer = build(lambda groups: torch.optim.AdamW(groups, lr=0.2), parameters(), CPU)
    assert not optimizer.defaults["fused"] and optimizer.defaults["lr"] == 0.2


@pytest.mark.parametrize("dampening", [0, 0.5])
def test_a_first_step_that_the_scaler_skips_leaves_no_momentum(dampening):
    """What torch's fused SGD would take for it then is memory that nobody has written: here, mostly
    nan.
    """
    weights = [torch.nn.Parameter(torch.ones(50_000)) for _ in range(2)]
    groups = [{"params": [weight]} for weight in weights]
    settings = {"lr": 0.5, "momentum": 0.9, "dampening": dampening}
    optimizer = build(functools.partial(torch.optim.SGD, **settings), groups[:1], CPU)
    plain = torch.optim.SGD(groups[1:], foreach=False, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for values in (math.inf, 2.0, 3.0):
        del [torch.full((50_000,), math.nan) for _ in range(20)][:]
        weights[0].grad, weights[1].grad = (torch.full((50_000,), values) for _ in range(2))
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update(1.0)
        if values != math.inf:
            plain.step()
    assert torch.equal(*weights)


def test_fused_and_plain_steps_agree():
    results = []
    for chosen in ({}, {"foreach": False}):
        groups = parameters()
        optimizer = build(functools.partial(torch.optim.AdamW, lr=0.1, **chosen), groups, CPU)
        for _ in range(5):
            groups[0]["params"][0].grad = torch.tensor([[1.0, -2.0], [0.5, 0.1]])
            optimizer.step()
        results.append(groups[0]["params"][0].detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "options", [{"lr": -1}, {"lr": 0.1, "weight_decay": -1}, {"lr": 0.1, "betas": (2, 0.9)}]
)
def test_a_value_that_torch_refuses_is_the_users_mistake(options):
    with pytest.raises(UserError, match=r"^optimizer: Invalid .* Choose a different value\."):
        build(functools.partial(torch.optim.AdamW, **options), parameters(), CPU)


KINDS = [
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
]


@pytest.mark.parametrize("kind", KINDS)
def test_lean_steps_equal_those_of_torch(kind):
    results = []
    for lean in (True, False):
        groups = parameters()
        optimizer = build(functools.partial(kind, lr=0.1), groups, CPU)
        step = optimizers.lean_step(optimizer) if lean else optimizer.step
        assert (step == optimizer.step) != lean
        for i in range(4):
            groups[0]["params"][0].grad = torch.tensor([[1.0, -2.0], [0.5, i]])
            step()
            optimizers.zero_grad(optimizer)
            assert groups[0]["params"][0].grad is None
        results.append(groups[0]["params"][0].detach())
        assert not results[-1].isnan().any()
    assert torch.equal(*results)


def test_a_lean_step_needs_no_graph_and_leaves_the_optimizer_as_it_is():
    groups = parameters()
    weight = groups[0]["params"][0]
    optimizer = build(functools.partial(torch.optim.SGD, lr=0.5), groups, CPU)
    weight.square().sum().backward()
    optimizers.lean_step(optimizer)()
    assert weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert weight.is_leaf and torch.is_grad_enabled()
    assert "step" not in vars(optimizer) and "zero_grad" not in vars(optimizer)
    optimizers.zero_grad(optimizer)
    assert weight.grad is None


def test_a_step_that_somebody_has_replaced_is_the_one_that_is_called():
    """torch's schedules count the steps of their optimizer in this way."""
    groups, calls = parameters(), []
    optimizer = build(functools.partial(torch.optim.SGD, lr=0.5), groups, CPU)
    step = optimizers.lean_step(optimizer)
    optimizer.step = lambda: calls.append("replaced")
    step()
    assert calls == ["replaced"]


def test_hooks_of_a_lean_step_are_called_and_a_profiler_sees_its_name():
    groups, seen = parameters(), []
    optimizer = build(functools.partial(torch.optim.SGD, lr=0.5), groups, CPU)
    groups[0]["params"][0].grad = torch.ones(2, 2)
    step = optimizers.lean_step(optimizer)
    step()
    assert not seen
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with torch.profiler.profile() as profile:
        step()
    assert seen == ["before", "after"]
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())


def test_groups_that_a_factory_makes_stay_as_they_are():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]

    def four(groups):
        return torch.optim.SGD(
            [{"params": [w], "lr": lr} for w, lr in zip(weights, (0.1, 0.2, 0.1, 0.2), strict=True)]
        )

    def two(groups):
        return torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1)

    given = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    for factory, count in ((four, 4), (two, 2)):
        assert len(build(factory, given, CPU).param_groups) == count


def test_a_rule_is_checked_by_the_optimizer_that_gets_it():
    def two(groups):
        body = torch.optim.RMSprop([group for group in groups if group["name"] == "0.*"])
        return Combined(
            [body, torch.optim.Adam([group for group in groups if group["name"] != "0.*"])]
        )

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    rules = [{"match": "0.*", "lr": 0.1}, {"match": "1.*", "betas": (0.5, 0.9)}]
    built = build(two, parameter_groups(model, rules), CPU)
    assert [group["lr"] for group in built.param_groups] == [0.1, 0.1, 1e-3, 1e-3]
    rules = [{"match": "0.*", "betas": (0.5, 0.9)}]
    with pytest.raises(UserError, match=r"the rule 0\.\* sets betas, but"):
        build(two, parameter_groups(model, rules), CPU)
    groups = [{"params": list(model.parameters()), "name": "all"}]
    with pytest.raises(UserError, match="optimizer: optimizer got an empty parameter list"):
        build(two, groups, CPU)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_of_closures_and_one_for_sparse_gradients_are_built(kind):
    assert isinstance(build(kind, parameters(), CPU), kind)


class Named(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, **options)


class Fixed(torch.optim.AdamW):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr, weight_decay=0.1)


@pytest.mark.parametrize(
    ("kind", "decay"),
    [(Named, 0.01), (functools.partial(Named, weight_decay=0.1), 0.1), (Fixed, 0.1)],
)
def test_a_weight_decay_that_no_signature_names_does_not_reach_biases(kind, decay):
    weight, bias = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    groups = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = build(functools.partial(kind, lr=0.1), groups, CPU)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {weight: decay, bias: 0.0}


def test_groups_of_equal_settings_become_one():
    def groups():
        return [
            {"params": [torch.nn.Parameter(torch.ones(2, 2))]},
            {"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.0},
        ]

    for kind, expected in (
        (torch.optim.SGD, [2]),
        (torch.optim.Adam, [2]),
        (torch.optim.AdamW, [1, 1]),
    ):
        optimizer = build(functools.partial(kind, lr=0.1), groups(), CPU)
        assert [len(group["params"]) for group in optimizer.param_groups] == expected


def make_model():
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 3),
    ]
    return torch.nn.Sequential(*layers).double()


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("batch_size", [10, 20])
def test_it_is_sgd_on_the_sum_of_the_losses_with_the_papers_numbers(batch_size, decay_all):
    """The paper adds the losses of a batch up, where the Trainer's loss is their mean."""
    lr, momentum, weight_decay, bias_scale = 11.5, 0.85, 0.0153, 8.0
    settings = {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "bias_scale": bias_scale,
    }
    trainer = make_trainer(
        make_model(),
        optimizer=functools.partial(decoupled_sgd, batch_size=batch_size, **settings),
        scheduler=functools.partial(schedules.linear, warmup=2, final=0.1),
        groups=[{"match": "*", "weight_decay": weight_decay}] if decay_all else [],
    )
    loader = DeviceLoader(make_data(dtype=torch.float64), "train", batch_size, shuffle=True)
    trainer.fit(loader)

    model, kilostep = make_model(), 1024 * (1 + 1 / (1 - momentum))
    rate, bias_rate, decay = (
        lr / kilostep,
        bias_scale * lr / kilostep,
        weight_decay * batch_size / kilostep,
    )
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "lr": rate, "weight_decay": decay / rate},
        {
            "params": vectors,
            "lr": bias_rate,
            "weight_decay": decay / bias_rate if decay_all else 0.0,
        },
    ]
    optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=True)
    scheduler = schedules.linear(optimizer, total_steps=3 * len(loader), warmup=2, final=0.1)
    for epoch in range(3):
        loader.seek(epoch)
        for inputs, targets in loader:
            torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    for ours, theirs in zip(trainer.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == pytest.approx(
        rate * batch_size
    )  # the one that is shown


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0),
        ("batch_size", 0),
        ("momentum", 1),
        ("momentum", 0),
        ("weight_decay", -1),
        ("bias_scale", 0),
    ],
)
def test_impossible_settings_name_their_key(key, value):
    settings = {"lr": 1.0, "batch_size": 10, key: value}
    with pytest.raises(UserError, match=f"^optimizer.{key}="):
        make_trainer(optimizer=functools.partial(decoupled_sgd, **settings))


class Shapes(torch.nn.Module):
    """Parameters of every kind; the ones without decay are called `free` here, or `bias` in torch."""

    def __init__(self):
        super().__init__()
        self.free_norm = torch.nn.LayerNorm(4)
        self.free_rms = torch.nn.RMSNorm(4)
        self.free_batch = torch.nn.BatchNorm2d(3)
        self.free_scale = torch.nn.Parameter(torch.ones(()))
        self.free_slope = torch.nn.PReLU(3)
        self.kernel = torch.nn.Conv2d(3, 3, 2)
        self.words = torch.nn.Embedding(5, 4)
        self.places = torch.nn.Parameter(torch.ones(1, 3, 4))
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.rows = torch.nn.LSTM(4, 4)
        self.normalizer = torch.nn.Linear(4, 4)


def test_what_has_weight_decay():
    """By a step without a gradient of the loss: what has decay shrinks, and nothing else moves."""
    model = Shapes()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    factory = functools.partial(torch.optim.SGD, lr=0.5, weight_decay=0.5)
    optimizer = build(factory, parameter_groups(model), CPU)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        is_free = name.startswith("free") or "bias" in name
        expected = before[name] if is_free else before[name] * (1 - 0.5 * 0.5)
        torch.testing.assert_close(weight, expected)
    (everything,) = parameter_groups(model, [{"match": "*", "weight_decay": 0.5}])
    assert len(everything["params"]) == len(before)
