"""The schedules against their formulas, against torch's own, and continued from a saved state."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import OneCycleLR

from stoker.trainer import schedules
from stoker.trainer.errors import UserError

ALL = {
    "constant": schedules.constant,
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "step": schedules.step,
}
LR = 0.5


def optimizer(lr=LR):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(make, total_steps, lr=1.0, **options):
    """The rate of each step 0 ... total_steps; the last is what would come after the training."""
    sgd = optimizer(lr)
    scheduler = make(sgd, total_steps=total_steps, **options)
    found = [sgd.param_groups[0]["lr"]]
    for _ in range(total_steps):
        sgd.step()
        scheduler.step()
        found.append(sgd.param_groups[0]["lr"])
    return found


def close(first, second):
    assert first == pytest.approx(second, abs=1e-12)


# closed forms


def test_constant():
    assert rates(schedules.constant, 7, lr=LR) == [LR] * 8


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("total", [1, 2, 10, 33])
def test_linear_and_cosine(total, final):
    close(
        rates(schedules.linear, total, final=final),
        [1 - (1 - final) * t / total for t in range(total + 1)],
    )
    close(
        rates(schedules.cosine, total, final=final),
        [final + (1 - final) * 0.5 * (1 + math.cos(math.pi * t / total)) for t in range(total + 1)],
    )


def test_linear_with_a_start_is_a_triangle():
    found = rates(schedules.linear, 40, warmup=10, start=0.2, final=0.07)
    assert (
        found[0] == pytest.approx(0.2 + 0.8 / 11) and found[10] == max(found) == 1.0
    )  # the first step goes up already
    close(found[:11], [0.2 + 0.8 * (t + 1) / 11 for t in range(11)])
    close(found[10:], [1 - 0.93 * t / 30 for t in range(31)])


def test_cosine_is_torchs_own():
    sgd = optimizer()
    theirs, expected = (
        torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=20, eta_min=0.1 * LR),
        [LR],
    )
    for _ in range(20):
        sgd.step()
        theirs.step()
        expected.append(sgd.param_groups[0]["lr"])
    close(rates(schedules.cosine, 20, lr=LR, final=0.1), expected)


@pytest.mark.parametrize("total", [4, 8, 100, 101])
def test_step(total):
    close(
        rates(schedules.step, total),
        [0.1 ** ((2 * t >= total) + (4 * t >= 3 * total)) for t in range(total + 1)],
    )
    found = rates(schedules.step, total, milestones=[0.3, 0.6, 0.9], gamma=0.5)
    close(
        found, [0.5 ** sum(10 * t >= k * total for k in (3, 6, 9)) for t in range(total + 1)]
    )  # 0.3 * 10 is not 3 in floats, 3 / 10 is 0.3


# warmup


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("warmup", "steps"),
    [(0.1, 5), (0.25, 12), (10, 10), (1, 1), (0, 0), (0.0, 0), (7.0, 7), (0.001, 0)],
)
def test_warmup_as_share_and_as_steps(name, warmup, steps):
    """(t + 1) / (steps + 1): the first step does something; the whole rate comes with the first
    step after it.
    """
    total = 50
    found = rates(ALL[name], total, warmup=warmup)
    close(found[:steps], [(t + 1) / (steps + 1) for t in range(steps)])
    close(found[steps:], rates(ALL[name], total - steps))
    assert found[steps] == 1.0


def test_the_description_says_how_long_the_warmup_is():
    assert (
        schedules.cosine(optimizer(), total_steps=200, warmup=0.05).description
        == "cosine after 10 steps of warmup"
    )
    assert schedules.cosine(optimizer(), total_steps=200).description == "cosine"
    long = schedules.cosine(optimizer(), total_steps=50_640, warmup=0.05)
    assert long.description == "cosine after 2,532 steps of warmup"


# all of them


@pytest.mark.parametrize("name", ALL)
def test_one_step(name):
    found = rates(ALL[name], 1)
    assert (
        len(found) == 2
        and all(math.isfinite(rate) and rate >= 0 for rate in found)
        and found[0] > 0
    )


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["linear", "cosine"]),
    st.integers(1, 300),
    st.floats(0, 1),
    st.floats(0, 0.99),
)
def test_between_zero_and_the_rate_and_final_at_the_end(name, total, final, warmup):
    found = rates(ALL[name], total, lr=LR, final=final, warmup=warmup)
    assert all(-1e-15 <= rate <= LR * (1 + 1e-12) for rate in found) and min(found) >= 0
    if round(warmup * total) < total:  # otherwise all of it is warmup
        assert found[-1] == pytest.approx(final * LR, abs=1e-12)
    assert max(found) == pytest.approx(LR)


@pytest.mark.parametrize("name", ALL)
def test_each_group_keeps_its_own_rate(name):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.25)]
    sgd = torch.optim.SGD(groups, lr=1.0)
    scheduler = ALL[name](sgd, total_steps=9)
    for _ in range(9):
        assert sgd.param_groups[0]["lr"] == 4 * sgd.param_groups[1]["lr"]
        sgd.step()
        scheduler.step()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stop", [0, 1, 6, 19, 20])
def test_a_saved_state_goes_on_where_it_was(name, stop):
    options = {"warmup": 4}
    expected = rates(ALL[name], 20, **options)
    first = optimizer(1.0)
    scheduler = ALL[name](first, total_steps=20, **options)
    for _ in range(stop):
        first.step()
        scheduler.step()
    states = first.state_dict(), scheduler.state_dict()

    second = optimizer(1.0)
    again = ALL[name](second, total_steps=20, **options)
    second.load_state_dict(states[0])
    again.load_state_dict(states[1])
    found = [second.param_groups[0]["lr"]]
    for _ in range(20 - stop):
        second.step()
        again.step()
        found.append(second.param_groups[0]["lr"])
    assert found == expected[stop:]


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("cosine", {"warmup": -1}, "scheduler.warmup=-1"),
        (
            "cosine",
            {"warmup": 1.5},
            "scheduler.warmup=1.5: expected a whole number of steps less than 10",
        ),
        ("cosine", {"warmup": "1"}, "scheduler.warmup='1': expected a number"),
        ("linear", {"final": -0.1}, "scheduler.final=-0.1"),
        ("linear", {"start": -0.1, "warmup": 2}, "scheduler.start=-0.1"),
        ("linear", {"start": 0.2}, "scheduler.warmup=0.1"),
        ("cosine", {"final": -0.1}, "scheduler.final=-0.1"),
        ("step", {"milestones": [0.5, 2]}, "scheduler.milestones=2"),
        ("step", {"gamma": 0}, "scheduler.gamma=0"),
    ],
)
def test_an_impossible_value_names_its_key(name, options, key):
    with pytest.raises(UserError, match=key):
        ALL[name](optimizer(), total_steps=10, **options)


# those of torch


def test_a_whole_number_is_a_rate():
    assert rates(schedules.linear, 4, lr=1) == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            torch.optim.lr_scheduler.StepLR,
            r"scheduler: .* required positional argument: 'step_size'.* type \+scheduler.NAME=VALUE.",
        ),
        (
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            r"needs a metric at each step.*\n.*examples.own_callback.Plateau",
        ),
    ],
)
def test_what_is_no_schedule_of_the_step_is_refused(kind, words):
    with pytest.raises(UserError, match=words):
        schedules.build(kind, optimizer(), 10)


def test_the_schedules_of_torch_are_built():
    kind = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    assert schedules.build(kind, optimizer(), 10).get_last_lr() == [LR]
    assert (
        schedules.build(functools.partial(OneCycleLR, max_lr=1.0), optimizer(), 10).total_steps
        == 10
    )
