"""Learning rate schedules: pure functions of the step, and the class that applies them."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.trainer.errors import UserError, as_typed, check_choice, check_number
from stoker.trainer.groups import rule_of
from stoker.trainer.number_format import counted

Shape = Callable[[float], float]  # maps the progress (0 to 1) to a factor


class Schedule:
    """Sets each group's learning rate to its `initial_lr` times `factor(step)`.

    `factors` maps patterns of rules to their own factor functions. This class works like torch's
    LambdaLR, but takes a tenth of the time and keeps a rate that you set by hand. The plan of a run
    shows the `description`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], description: str
    ) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.factors: dict[str, Callable[[int], float]] = {}
        self.description = description
        self.steps: int = 0
        self.set_rates()
        # Saved in checkpoints, because a resumed fit must start with the same rates.
        self.given: list[float] = [group["initial_lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        self.steps += 1
        self.set_rates()

    def set_rates(self) -> None:
        """Set the rates for the current step."""
        usual = self.factor(self.steps)
        self.rates: list[float] = []
        self.in_groups: list[Any] = []  # the rates as stored: numbers, or tensors for CUDA graphs
        for group in self.optimizer.param_groups:
            factor = usual
            if self.factors:
                factor = self.factors.get(rule_of(group), self.factor)(self.steps)
            rate = group.setdefault("initial_lr", float(group["lr"])) * factor
            self.rates.append(rate)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self.in_groups.append(group["lr"])

    def take_over(self) -> None:
        """Make rates set by hand (`param_groups[0]["lr"] = 0.1`) the new base rates."""
        groups = self.optimizer.param_groups
        is_as_set = len(groups) == len(self.in_groups)
        for group, last in zip(groups, self.in_groups, strict=False):
            given = group["lr"]
            if given is last:
                continue
            is_as_set = False
            if isinstance(last, Tensor):
                group["lr"] = last
            group["initial_lr"] = float(given)
        if not is_as_set:
            self.set_rates()

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group, as a number even if the group holds a tensor."""
        self.take_over()
        return self.rates

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Load the optimizer first, because it holds the initial rates."""
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

    The progress is 0 after the warmup and 1 after the last step. A `warmup` below 1 is a fraction
    of all steps; otherwise it is a number of steps. During the warmup, the factor rises linearly
    from `start` to 1.
    """
    check_number("scheduler.warmup", warmup, least=0)
    check_number("scheduler.start", start, least=0)
    if start and not warmup:
        raise UserError(f"scheduler.start={start} requires a warmup, such as scheduler.warmup=0.1.")
    warmup_steps = int(warmup)
    if warmup < 1:
        warmup_steps = min(round(warmup * total_steps), total_steps - 1)
    elif warmup != warmup_steps or warmup >= total_steps:
        raise UserError(
            f"scheduler.warmup={warmup}: expected a whole number of steps less than {total_steps} "
            "(the steps of the run), or a fraction of the run, such as scheduler.warmup=0.1."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return start + (1 - start) * (step + 1) / (warmup_steps + 1)
        return shape(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    if warmup_steps:
        name += f" after {counted(warmup_steps, 'step')} of warmup"
    return Schedule(optimizer, factor, name)


def build(
    factory: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    previous: Any = None,
) -> Any:
    """Call a scheduler factory with (optimizer, total_steps=...), and return the scheduler.

    A factory without a `total_steps` argument, such as torch's StepLR, is called with only the
    optimizer. The scheduler starts with the optimizer's initial rates, even if the `previous`
    scheduler has changed them, or with rates that were set by hand since then.

    Raises:
        UserError: The factory needs more arguments, or its scheduler needs a metric at each step.
    """
    if previous is not None:
        for group, rate in zip(optimizer.param_groups, previous.get_last_lr(), strict=False):
            if not isinstance(group["lr"], Tensor) and group["lr"] != rate:
                set_rate(group, group["lr"])
    reset(optimizer)
    try:
        takes_length = "total_steps" in inspect.signature(factory).parameters
        length = {"total_steps": total_steps} if takes_length else {}
        scheduler = factory(optimizer, **length)
    except UserError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"scheduler: {error}. Check its arguments. To set one, type +scheduler.NAME=VALUE.\n"
            "In a script, pass a function of (optimizer) or (optimizer, total_steps)."
        ) from error
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        raise UserError(
            f"scheduler: {type(scheduler).__name__} needs a metric at each step, but schedules "
            "depend only on the step.\nType scheduler=cosine, linear or step. To "
            "follow a metric, use a callback such as examples.own_callback.Plateau."
        ) from None
    return scheduler


def by_group(usual: Callable[..., Any], rules: Iterable[Mapping[str, Any]]) -> Callable[..., Any]:
    """Return a factory for a schedule in which rules can have their own `scheduler`.

    A rule's `scheduler` is the name of a schedule, {name: arguments}, or in Python a factory.
    """
    chosen = {rule["match"]: named(rule["scheduler"]) for rule in rules if "scheduler" in rule}
    if not chosen:
        return usual

    def factory(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        schedule = build(usual, optimizer, total_steps)
        for name, one in chosen.items():
            part = build(one, optimizer, total_steps)
            if not (isinstance(schedule, Schedule) and isinstance(part, Schedule)):
                raise UserError(
                    "groups: a rule can have its own scheduler only if both this scheduler and the "
                    "run's scheduler come from stoker.trainer.schedules."
                )
            schedule.factors[name] = part.factor
            schedule.description += f" ({name}: {part.description})"
        schedule.set_rates()
        return schedule

    return factory


def named(given: Any) -> Callable[..., Any]:
    """Return the factory for "linear" or {"linear": {"warmup": 0.1}}; return a factory as is."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    name = as_typed(given)
    arguments: Mapping[str, Any] = {}
    if isinstance(given, Mapping) and len(given) == 1:
        name, arguments = next(iter(given.items()))
    shipped = {one.__name__: one for one in (constant, linear, cosine, wsd, step)}
    check_choice("groups: scheduler", name, shipped)
    known = list(inspect.signature(shipped[name]).parameters)[2:]
    for argument in arguments:
        check_choice(f"groups: scheduler.{name}", argument, known)
    return functools.partial(shipped[name], **arguments)


def check_state(scheduler: Any, state: dict[str, Any]) -> None:
    """Raise UserError if the state is from a scheduler with different settings or base rates.

    The base rates are `given` in our Schedule, and `base_lrs` in torch's schedulers.
    """
    current = scheduler.state_dict()
    fixed = {*inspect.signature(type(scheduler)).parameters, "given", "base_lrs"} - {"last_epoch"}
    for name in {**current, **state}:
        is_known = name in current and name in state
        is_changed = name in fixed and repr(state.get(name)) != repr(current.get(name))
        if not is_known or is_changed:
            raise UserError(
                f"The checkpoint does not match this Trainer: scheduler.{name!s:.60} is "
                f"{state.get(name)!r:.60}, not {current.get(name)!r:.60}.\n"
                "Use the learning rate, scheduler and epochs of the run that wrote the checkpoint. "
                "To change the rate from here on, set trainer.optimizer.param_groups[i]['lr'] in "
                "on_fit_start."
            )


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a parameter group, also as the initial rate of the next schedule."""
    is_tensor = isinstance(group["lr"], Tensor)
    group["lr"] = torch.full_like(group["lr"], rate) if is_tensor else rate
    group.pop("initial_lr", None)


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Restore the initial rates, which a scheduler may have changed."""
    for group in optimizer.param_groups:
        set_rate(group, group.get("initial_lr", group["lr"]))


def constant(optimizer: torch.optim.Optimizer, total_steps: int, warmup: float = 0.0) -> Schedule:
    """Keep the rate constant."""
    return schedule("constant", lambda progress: 1.0, optimizer, total_steps, warmup)


def linear(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup: float = 0.0,
    start: float = 0.0,
    final: float = 0.0,
) -> Schedule:
    """Decay linearly to `final` times the rate. With a warmup, the curve is a triangle."""
    check_number("scheduler.final", final, least=0)

    def shape(progress: float) -> float:
        return 1 - (1 - final) * progress

    return schedule("linear", shape, optimizer, total_steps, warmup, start)


def cosine(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup: float = 0.0, final: float = 0.0
) -> Schedule:
    """Decay along half a period of a cosine to `final` times the rate.

    Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5, without restarts.
    """
    check_number("scheduler.final", final, least=0)

    def shape(progress: float) -> float:
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return schedule("cosine", shape, optimizer, total_steps, warmup)


def wsd(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup: float = 0.0,
    decay: float = 0.2,
    final: float = 0.0,
) -> Schedule:
    """Warm up, stay constant, then decay for a fraction `decay` of the steps after the warmup.

    Hu et al. 2024, arXiv 2404.06395, section 4, with the 1-sqrt decay of Hägele et al. 2024, arXiv
    2405.18392, section 3. A longer run can start from a checkpoint saved before the decay.
    """
    check_number("scheduler.decay", decay, above=0, most=1)
    check_number("scheduler.final", final, least=0)

    def shape(progress: float) -> float:
        return 1 - (1 - final) * math.sqrt(max(0.0, (progress - 1 + decay) / decay))

    return schedule("wsd", shape, optimizer, total_steps, warmup)


def step(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup: float = 0.0,
    milestones: Sequence[float] = (0.5, 0.75),
    gamma: float = 0.1,
) -> Schedule:
    """Multiply the rate by `gamma` at each milestone.

    Milestones are fractions of the steps after the warmup.

    He et al. 2016, arXiv 1512.03385, section 4.2.
    """
    for milestone in milestones:
        check_number("scheduler.milestones", milestone, least=0, most=1)
    check_number("scheduler.gamma", gamma, above=0)

    def shape(progress: float) -> float:
        passed = sum(progress >= milestone for milestone in milestones)
        return float(gamma**passed)

    return schedule("step", shape, optimizer, total_steps, warmup)
