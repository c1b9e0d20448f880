"""Learning-rate schedules: pure functions of the step, and the class that sets the rates."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stoker.trainer.errors import UserError, check_number

Shape = Callable[[float], float]  # from progress (0 to 1) to a factor


class Schedule:
    """Sets each group's rate to its `initial_lr` times `factor(step)`.

    What torch's LambdaLR does, in a tenth of its time. `description` is shown in the plan.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], description: str
    ) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.description = description
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self.steps: int = 0
        self.set_rates()

    def step(self) -> None:
        self.steps += 1
        self.set_rates()

    def set_rates(self) -> None:
        """Set the rates of the current step."""
        factor = self.factor(self.steps)
        self.rates: list[float] = []
        for group in self.optimizer.param_groups:
            rate = group["initial_lr"] * factor
            self.rates.append(rate)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a captured step reads this tensor
            else:
                group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group, a number even if the group holds a tensor."""
        return self.rates

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. The initial rates come from the optimizer, loaded before."""
        self.steps = state["steps"]
        self.set_rates()


def schedule(
    name: str,
    shape: Shape,
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup: float = 0.0,
    start: float = 0.0,
) -> Schedule:
    """Return a Schedule that multiplies each group's rate by `shape(progress)`.

    The progress is 0 after the warmup and 1 after the last step. A `warmup` below 1 is a share of
    all steps, from 1 on a number of steps; the rate rises linearly over it, from `start` times
    the rate.
    """
    check_number("scheduler.warmup", warmup, least=0)
    check_number("scheduler.start", start, least=0)
    if start and not warmup:
        raise UserError(
            f"scheduler.start={start} is where a warmup begins, and there is none. "
            "Type scheduler.warmup=0.1."
        )
    warmup_steps = round(warmup * total_steps) if warmup < 1 else round(warmup)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return start + (1 - start) * (step + 1) / (warmup_steps + 1)
        return shape(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    if warmup_steps:
        name += f" after {warmup_steps} step{'' if warmup_steps == 1 else 's'} of warmup"
    return Schedule(optimizer, factor, name)


def build(factory: Callable[..., Any], optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    """Return the scheduler of a factory, called with (optimizer, total_steps=...).

    A factory without that argument, such as torch's StepLR, is called with the optimizer alone.
    The scheduler begins with the optimizer's initial rates, even if another one has changed them.

    Raises:
        UserError: The factory needs more arguments, or its scheduler needs a number at each step.
    """
    for group in optimizer.param_groups:
        rate = group.get("initial_lr", group["lr"])
        is_tensor = isinstance(group["lr"], torch.Tensor)
        group["lr"] = torch.full_like(group["lr"], rate) if is_tensor else rate
    arguments = inspect.signature(factory).parameters
    length = {"total_steps": total_steps} if "total_steps" in arguments else {}
    for name in required(arguments.values())[1:]:
        if name != "total_steps":
            raise UserError(
                f"scheduler.{name}: the scheduler needs this argument. Type +scheduler.{name}=..."
            )
    scheduler = factory(optimizer, **length)
    kind = type(scheduler).__name__
    methods = ("step", "get_last_lr", "state_dict", "load_state_dict")
    if not all(hasattr(scheduler, name) for name in methods):
        raise UserError(f"scheduler: {kind} is not an LR scheduler. Type scheduler=cosine.")
    if required(inspect.signature(scheduler.step).parameters.values()):
        raise UserError(
            f"scheduler: {kind} wants a number at each step, and a schedule here follows the step "
            "alone.\nType scheduler=cosine, linear, step or onecycle; one that follows a number is "
            "a callback, such as examples.own_callback.Plateau."
        )
    return scheduler


def required(arguments: Iterable[inspect.Parameter]) -> list[str]:
    """Return the names of positional arguments without a default."""
    return [
        argument.name
        for argument in arguments
        if argument.kind is argument.POSITIONAL_OR_KEYWORD and argument.default is argument.empty
    ]


def constant(optimizer: torch.optim.Optimizer, total_steps: int, warmup: float = 0.0) -> Schedule:
    """Keep the rate as it is."""
    return schedule("constant", lambda progress: 1.0, optimizer, total_steps, warmup)


def linear(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup: float = 0.0,
    start: float = 0.0,
    final: float = 0.0,
) -> Schedule:
    """Go down in a straight line to `final` times the rate; with a warmup, a triangle."""
    check_number("scheduler.final", final, least=0)

    def shape(progress: float) -> float:
        return 1 - (1 - final) * progress

    return schedule("linear", shape, optimizer, total_steps, warmup, start)


def cosine(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup: float = 0.0, final: float = 0.0
) -> Schedule:
    """Go down along half a cosine to `final` times the rate.

    Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, without restarts.
    """
    check_number("scheduler.final", final, least=0)

    def shape(progress: float) -> float:
        return half_cosine(final, progress)

    return schedule("cosine", shape, optimizer, total_steps, warmup)


def half_cosine(final: float, progress: float) -> float:
    """Return the factor on the way from 1 to `final`."""
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def step(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup: float = 0.0,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
) -> Schedule:
    """Multiply by `gamma` at each milestone, a share of the steps after the warmup.

    He et al. 2016, arXiv 1512.03385, section 4.2.
    """
    for milestone in milestones:
        check_number("scheduler.milestones", milestone, least=0, most=1)
    check_number("scheduler.gamma", gamma, above=0)

    def shape(progress: float) -> float:
        passed = sum(progress >= milestone for milestone in milestones)
        return float(gamma**passed)

    return schedule("step", shape, optimizer, total_steps, warmup)


def onecycle(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    peak: float = 0.3,
    start: float = 0.04,
    final: float = 0.0,
) -> Schedule:
    """Go up from `start` times the rate over the share `peak` of all steps, then down to `final`.

    Along cosines: Smith and Topin 2019, arXiv 1708.07120.
    """
    check_number("scheduler.peak", peak, above=0, most=1)
    check_number("scheduler.start", start, least=0)
    check_number("scheduler.final", final, least=0)

    def shape(progress: float) -> float:
        if progress < peak:
            return half_cosine(start, 1 - progress / peak)
        return half_cosine(final, (progress - peak) / max(1e-12, 1 - peak))

    return schedule("onecycle", shape, optimizer, total_steps)
