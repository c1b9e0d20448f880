"""Learning-rate schedules: pure functions of the step, and the class that sets the rates."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stoker.trainer.errors import UserError, as_typed, check_number, did_you_mean

Shape = Callable[[float], float]  # maps progress (0 to 1) to a factor


class Schedule:
    """Sets each group's rate to its `initial_lr` times `factor(step)`.

    `factors` has the schedules of rules with their own, by the rule's pattern. This does what
    torch's LambdaLR does in a tenth of the time, and keeps a rate that you set by hand.
    `description` is shown in the plan.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], description: str
    ) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.factors: dict[str, Callable[[int], float]] = {}
        self.description = description
        self.has_begun: bool = False
        self.steps: int = 0
        self.set_rates()
        # A resumed fit has to begin with the same rates.
        self.given: list[float] = [group["initial_lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        self.has_begun = True
        self.steps += 1
        self.set_rates()

    def set_rates(self) -> None:
        """Set the rates of the current step."""
        usual = self.factor(self.steps)
        self.rates: list[float] = []
        self.in_groups: list[Any] = []  # numbers, or tensors that a captured step reads
        for group in self.optimizer.param_groups:
            factor = self.factor_of(group)(self.steps) if self.factors else usual
            rate = group.setdefault("initial_lr", float(group["lr"])) * factor
            self.rates.append(rate)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self.in_groups.append(group["lr"])

    def factor_of(self, group: Mapping[str, Any]) -> Callable[[int], float]:
        """Return the factor of a group, a function of the step."""
        return self.factors.get(group.get("name", "").partition(" ")[0], self.factor)

    def take_over(self) -> None:
        """Multiply a rate that was set by hand, `param_groups[0]["lr"] = 0.1`, from now on.

        Raises:
            UserError: It is not clear whether the schedule should multiply it.
        """
        groups = self.optimizer.param_groups
        is_as_set = len(groups) == len(self.in_groups)
        for i, (group, last) in enumerate(zip(groups, self.in_groups, strict=False)):
            rate = group["lr"]
            if rate is last:
                continue
            is_as_set = False
            if isinstance(last, torch.Tensor):
                group["lr"] = last
            if float(rate) != self.rates[i]:
                self.check_unscaled(i, float(rate))
                group["initial_lr"] = float(rate)
        if not is_as_set:
            self.set_rates()

    def check_unscaled(self, i: int, rate: float) -> None:
        """Raise UserError unless a rate is the same before and after the schedule multiplies it."""
        factor = self.factor_of(self.optimizer.param_groups[i])(self.steps)
        if self.has_begun and factor != 1:
            raise UserError(
                f"param_groups[{i}]['lr'] was set to {rate:g}, but the schedule "
                f"({self.description}) changes the rate at each step.\n"
                f"Call trainer.set_lr({rate:g}): the schedule multiplies this rate, by "
                f"{factor:.3g} at this step."
            )

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group, a number even if the group holds a tensor."""
        self.take_over()
        return self.rates

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "given": self.given}

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
    warmup_steps = round(warmup)
    if warmup > 1 and warmup != warmup_steps:
        raise UserError(
            f"scheduler.warmup={warmup}: a value above 1 is a number of steps. "
            "Give a whole number, or a fraction of all steps below 1."
        )
    if start and not warmup:
        raise UserError(f"scheduler.start={start} needs a warmup. Type scheduler.warmup=0.1.")
    if warmup < 1:
        warmup_steps = min(round(warmup * total_steps), total_steps - 1)
    if warmup_steps >= total_steps:
        raise UserError(
            f"scheduler.warmup={warmup}: the run has only {total_steps} steps and never "
            "reaches the full rate. Type a share of the steps, as in scheduler.warmup=0.1, or "
            "train longer."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return start + (1 - start) * (step + 1) / (warmup_steps + 1)
        return shape(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))

    if warmup_steps:
        name += f" after {warmup_steps:,} step{'' if warmup_steps == 1 else 's'} of warmup"
    return Schedule(optimizer, factor, name)


def build(
    factory: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    previous: Any = None,
) -> Any:
    """Return the scheduler of a factory, called with (optimizer, total_steps=...).

    A factory without that argument, such as torch's StepLR, is called with the optimizer alone.
    The scheduler begins with the optimizer's initial rates, even if another one has changed them,
    or with those that were set by hand since the `previous` one.

    Raises:
        UserError: The factory needs more arguments, or its scheduler needs a number at each step.
    """
    if previous is not None:
        for group, rate in zip(optimizer.param_groups, last_rates(previous), strict=False):
            if not isinstance(group["lr"], torch.Tensor) and group["lr"] != rate:
                set_rate(group, group["lr"])
    reset(optimizer)
    arguments = inspect.signature(factory).parameters
    length = {"total_steps": total_steps} if "total_steps" in arguments else {}
    for name in required(arguments.values())[1:]:
        if name != "total_steps":
            raise UserError(
                f"scheduler.{name}: the scheduler needs this argument. Type +scheduler.{name}=..."
            )
    scheduler = factory(optimizer, **length)
    if required(inspect.signature(scheduler.step).parameters.values()):
        raise UserError(
            f"scheduler: {type(scheduler).__name__} needs a metric at each step, but a schedule "
            "here depends only on the step.\nType scheduler=cosine, linear or step; to "
            "follow a metric, use a callback such as examples.own_callback.Plateau."
        )
    return scheduler


def by_group(usual: Callable[..., Any], rules: Iterable[Mapping[str, Any]]) -> Callable[..., Any]:
    """Return a factory of one schedule in which rules with a `scheduler` have their own.

    That is the name of one of these schedules, {name: its arguments}, or a factory in Python.
    """
    chosen = {rule["match"]: named(rule["scheduler"]) for rule in rules if "scheduler" in rule}
    if not chosen:
        return usual

    def factory(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        schedule = build(usual, optimizer, total_steps)
        for name, one in chosen.items():
            part = build(one, optimizer, total_steps)
            for each in (schedule, part):
                if not isinstance(each, Schedule):
                    raise UserError(
                        "groups: the schedulers of a rule and of the run have to be from "
                        f"stoker.trainer.schedules, not {type(each).__name__}."
                    )
            schedule.factors[name] = part.factor
            schedule.description += f" ({name}: {part.description})"
        schedule.set_rates()
        return schedule

    return factory


def named(given: Any) -> Callable[..., Any]:
    """Return the factory of "linear" or {"linear": {"warmup": 0.1}}, or what was given."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    name = as_typed(given)
    arguments: Any = {}
    if isinstance(given, Mapping) and len(given) == 1:
        name, arguments = next(iter(given.items()))
    shipped = {one.__name__: one for one in (constant, linear, cosine, wsd, step)}
    if name not in shipped or not isinstance(arguments, Mapping):
        raise UserError(
            f"groups: there is no scheduler {as_typed(given)}.{did_you_mean(name, shipped)}\n"
            f"Use one of {', '.join(shipped)}, alone or as in {{linear: {{warmup: 0.1}}}}."
        )
    known = list(inspect.signature(shipped[name]).parameters)[2:]
    for argument in arguments:
        if argument not in known:
            raise UserError(
                f"groups: scheduler {name} has no {argument}.{did_you_mean(argument, known)}\n"
                f"It has {', '.join(known)}."
            )
    return functools.partial(shipped[name], **arguments)


def describe(scheduler: Any) -> str:
    """Return a scheduler in a few words, for the plan."""
    if isinstance(scheduler, Schedule):
        return scheduler.description
    return type(scheduler).__name__


def last_rates(scheduler: Any) -> list[float]:
    """Return the rates that a scheduler has set last."""
    rates: list[float]
    rates = scheduler.rates if isinstance(scheduler, Schedule) else scheduler.get_last_lr()
    return rates


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Make this the rate of a parameter group, and the one that a schedule begins with."""
    is_tensor = isinstance(group["lr"], torch.Tensor)
    group["lr"] = torch.full_like(group["lr"], rate) if is_tensor else rate
    group.pop("initial_lr", None)


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Undo what a scheduler has done to the rates."""
    for group in optimizer.param_groups:
        set_rate(group, group.get("initial_lr", group["lr"]))


def set_lr(
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    rate: float | Sequence[float],
    in_fit: bool,
) -> list[float]:
    """Do the work of `Trainer.set_lr`, and return the rates: in a fit, as the schedule scales them.

    Outside of a fit, the scheduler is that of the last one.
    """
    if optimizer is None:
        raise UserError("set_lr: this Trainer has no optimizer or is closed.")
    groups = optimizer.param_groups
    rates: list[Any] = [rate] * len(groups)
    if isinstance(rate, Sequence) and not isinstance(rate, str):
        rates = list(rate)
    if len(rates) != len(groups):
        raise UserError(f"set_lr: {len(rates)} rates for {len(groups)} parameter groups.")
    for value in rates:
        check_number("set_lr", value, least=0)
    if in_fit and not isinstance(scheduler, Schedule):
        raise UserError(
            f"set_lr: {type(scheduler).__name__} sets its own rates in a fit. Use one of "
            "stoker.trainer.schedules, or call set_lr before the fit."
        )
    for group, value in zip(groups, rates, strict=True):
        if isinstance(scheduler, Schedule):
            group["initial_lr"] = float(value)
        else:
            set_rate(group, float(value))
    if isinstance(scheduler, Schedule):
        scheduler.set_rates()
        if in_fit:
            return scheduler.rates
        scheduler.given = [float(value) for value in rates]
    return [float(value) for value in rates]


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
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return schedule("cosine", shape, optimizer, total_steps, warmup)


def wsd(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup: float = 0.0,
    decay: float = 0.2,
    final: float = 0.0,
) -> Schedule:
    """Warm up, stay, and go down over the last `decay` of the steps after the warmup.

    Hu et al. 2024, arXiv 2404.06395, section 4, with the decay 1 - sqrt of Hägele et al. 2024,
    arXiv 2405.18392, section 3. A longer training begins at a checkpoint from before the decay.
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
