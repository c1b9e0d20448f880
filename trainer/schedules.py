"""Learning-rate schedules: pure functions of the step, and the one class that sets the rates by them."""

import inspect
import math

import torch
from stoker.trainer.errors import UserError, check_number


class Schedule:
    """Sets each group's rate to its `initial_lr` times `factor(step)`: what LambdaLR does, in a tenth of its time.

    `description` is for the plan that is shown.
    """

    def __init__(self, optimizer, factor, description):
        self.optimizer, self.factor, self.description = optimizer, factor, description
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self.steps = 0
        self.set_rates()

    def step(self):
        self.steps += 1
        self.set_rates()

    def set_rates(self):
        factor = self.factor(self.steps)
        self.rates = [group["initial_lr"] * factor for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a captured step reads this very tensor
            else:
                group["lr"] = rate

    def get_last_lr(self):
        """The rate of each group, a number also where the group holds a tensor."""
        return self.rates

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        """The rates are made anew, from those of the optimizer's state, which is loaded before."""
        self.steps = state["steps"]
        self.set_rates()


def schedule(name, shape, optimizer, total_steps, warmup=0.0, start=0.0):
    """A Schedule that multiplies each group's rate by `shape(progress)`.

    The progress is 0 after the warmup and 1 after the last step. `warmup` is a share of all steps below 1 and a number
    of steps from 1 on; the rate rises linearly over it, from `start` times the rate.
    """
    check_number("scheduler.warmup", warmup, least=0)
    if check_number("scheduler.start", start, least=0) and not warmup:
        raise UserError(
            f"scheduler.start={start} is where a warmup begins, and there is none. Type scheduler.warmup=0.1."
        )
    warmup_steps = round(warmup * total_steps) if warmup < 1 else round(warmup)

    def factor(step):
        if step < warmup_steps:
            return start + (1 - start) * (step + 1) / (warmup_steps + 1)
        return shape(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    after = (
        f" after {warmup_steps} step{'s' * (warmup_steps != 1)} of warmup" if warmup_steps else ""
    )
    return Schedule(optimizer, factor, name + after)


def build(factory, optimizer, total_steps):
    """The scheduler of a factory, called with (optimizer, total_steps=...).

    With the optimizer alone where it has no such argument, as torch's StepLR. UserError where it wants more, or does
    not step by itself. It begins with the optimizer's own rates, also where another one has been stepped before.
    """
    for group in optimizer.param_groups:
        rate = group.get("initial_lr", group["lr"])
        group["lr"] = (
            torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
        )
    arguments = inspect.signature(factory).parameters
    own = {"total_steps": total_steps} if "total_steps" in arguments else {}
    given = {next(iter(arguments), None), *own}
    for name, argument in arguments.items():
        if (
            name not in given
            and argument.default is argument.empty
            and argument.kind is argument.POSITIONAL_OR_KEYWORD
        ):
            raise UserError(
                f"scheduler.{name}: the scheduler needs this argument. Type +scheduler.{name}=..."
            )
    scheduler = factory(optimizer, **own)
    if not all(
        hasattr(scheduler, name)
        for name in ("step", "get_last_lr", "state_dict", "load_state_dict")
    ):
        raise UserError(
            f"scheduler: {type(scheduler).__name__} is no LR scheduler. Type scheduler=cosine."
        )
    needed = [
        p for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty
    ]
    if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in needed):
        kind = f"{type(scheduler).__name__} wants a number at each step, and a schedule here follows the step alone"
        own = "one that follows a number is a callback, such as examples.own_callback.Plateau"
        raise UserError(
            f"scheduler: {kind}.\nType scheduler=cosine, linear, step or onecycle; {own}."
        )
    return scheduler


def constant(optimizer, total_steps, warmup=0.0):
    """The rate as it is."""
    return schedule("constant", lambda progress: 1.0, optimizer, total_steps, warmup)


def linear(optimizer, total_steps, warmup=0.0, start=0.0, final=0.0):
    """Down in a straight line to `final` times the rate; with a warmup, a triangle."""
    check_number("scheduler.final", final, least=0)
    return schedule(
        "linear", lambda progress: 1 - (1 - final) * progress, optimizer, total_steps, warmup, start
    )


def cosine(optimizer, total_steps, warmup=0.0, final=0.0):
    """Down along half a cosine to `final` times the rate.

    Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, without restarts.
    """
    check_number("scheduler.final", final, least=0)
    return schedule(
        "cosine",
        lambda progress: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2,
        optimizer,
        total_steps,
        warmup,
    )


def step(optimizer, total_steps, warmup=0.0, milestones=(0.5, 0.75), gamma=0.1):
    """Times `gamma` at each milestone, a share of the steps after the warmup.

    He et al. 2016, arXiv 1512.03385, section 4.2.
    """
    for milestone in milestones:
        check_number("scheduler.milestones", milestone, least=0, most=1)
    check_number("scheduler.gamma", gamma, above=0)
    return schedule(
        "step",
        lambda progress: gamma ** sum(progress >= milestone for milestone in milestones),
        optimizer,
        total_steps,
        warmup,
    )


def onecycle(optimizer, total_steps, peak=0.3, start=0.04, final=0.0):
    """Up from `start` times the rate over the share `peak` of all steps and down to `final`, along cosines.

    Smith and Topin 2019, arXiv 1708.07120.
    """
    check_number("scheduler.peak", peak, above=0, most=1)
    check_number("scheduler.start", start, least=0)
    check_number("scheduler.final", final, least=0)

    def shape(progress):
        if progress < peak:
            low, done = start, 1 - progress / peak
        else:
            low, done = final, (progress - peak) / max(1e-12, 1 - peak)
        return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2

    return schedule("onecycle", shape, optimizer, total_steps)
