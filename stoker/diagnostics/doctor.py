"""The doctor: warns about dead units, vanishing or exploding gradients, and large updates."""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, check_number, first_few, log
from stoker.trainer.number_format import counted
from stoker.trainer.trainer import Trainer

WINDOW = 3  # consecutive samples that must share a problem before it is reported
FEWEST = 20  # minimum number of samples per run, if it has enough steps
DEAD = 0.5  # more than this fraction of a layer's units has no gradient
VANISHED = 1e-6  # gradient below this fraction of the largest, both relative to the weight
EXPLODED = 100.0  # gradient larger than this many times the weight
# Update larger than this fraction of the weight. About 1e-3 is typical (A. Karpathy, "makemore 3"),
# except in Adam's first steps.
LARGE = 0.5
WITH_UNITS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
MOST_NAMED = 3  # layers in one warning

ADVICE = {
    "dead units": "Set a lower optimizer.lr, add a norm layer before the activation, "
    "or use GELU instead of ReLU.",
    "vanishing gradients": "Add norm layers or skip connections, "
    "or use ReLU or GELU instead of sigmoid or tanh.",
    "exploding gradients": "Type max_grad_norm=1, or standardize the inputs and targets.",
    "large updates": "Set a lower optimizer.lr, or a longer scheduler.warmup.",
}


@dataclass
class Sample:
    """The measurements of one step, by layer. Sizes are relative to the norm of the weight.

    `silent`, of shape (units,), marks the units whose gradient is exactly zero. It is empty for a
    layer without units.
    """

    gradients: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    silent: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def largest(self) -> float:
        """The size of the largest gradient."""
        return max(self.gradients.values(), default=0.0)


class Doctor(Callback):
    """Warn about layers that keep a model from learning, and print a summary at the end.

    The doctor samples the first steps and then every `every`-th step, or more often in a short run,
    to get FEWEST samples. In these steps, it inspects the gradient and the update of each weight
    with two or more dimensions. A unit is dead if its whole gradient is zero, for example because
    no sample activates its ReLU. If a whole layer is dead, its neighbors are dead too. The doctor
    does not change the results, and adds no hooks to the other steps. A sampled step needs memory
    for a copy of the weights.
    """

    first_rank_only = True

    def __init__(self, every: int = 50) -> None:
        self.every = check_number("callbacks.doctor.every", every, whole=True, least=1)
        self.hooks: list[RemovableHandle] = []
        self.warnings: list[str] = []
        self.count = 0  # number of sampled steps

    def on_fit_start(self, trainer: Trainer) -> None:
        """Raise a UserError if the steps cannot be inspected."""
        from stoker.trainer.steps import captures

        if captures(trainer):
            raise UserError(
                "callbacks=doctor: steps in a CUDA graph cannot be inspected. Type compile=false."
            )
        if trainer.strategy in ("dp", "fsdp"):
            raise UserError(
                f"callbacks=doctor: layers cannot be inspected with strategy={trainer.strategy}.\n"
                "Type strategy=ddp or strategy=single."
            )
        self.begun_at = trainer.step
        self.pause = max(1, min(self.every, (trainer.total_steps - trainer.step) // FEWEST))
        self.samples: deque[Sample] = deque(maxlen=WINDOW)
        self.said: dict[str, list[str]] = {}  # {kind: layers already warned about}
        self.warnings = []
        self.count = 0
        self.look(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        if self.hooks:
            sample = self.measure(trainer)
            self.forget()
            self.add(sample, trainer)
        following = trainer.step + 1
        if following % self.pause == 0 or following <= self.begun_at + WINDOW:
            self.look(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.forget()
        if not self.count:
            return
        if len(self.samples) < WINDOW:
            self.judge(trainer)
        print(self.summary(trainer))

    def look(self, trainer: Trainer) -> None:
        """Prepare to sample the next step: copy the weights, and add hooks for the gradients."""
        self.before: dict[str, torch.Tensor] = {}
        self.rows: dict[str, torch.Tensor] = {}  # gradient norm of each unit
        for name, parameter in trainer.module.named_parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                self.before[name] = parameter.detach().clone()
                self.rows[name] = parameter.new_zeros(len(parameter))
                hook = partial(self.note_gradient, name)
                self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Store the norms of a gradient; called after each micro-batch with the gradient so far."""
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            rows = gradient.flatten(1)
            self.rows[name] = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)

    def forget(self) -> None:
        """Remove the hooks, and free what they stored."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.before = {}
        self.rows = {}

    @torch.no_grad()
    def measure(self, trainer: Trainer) -> Sample:
        """Return the sample of the last step."""
        now = dict(trainer.module.named_parameters())
        modules = dict(trainer.module.named_modules())
        scale = trainer.scaler.get_scale()
        norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
        sizes = []
        for name, old in self.before.items():
            gradient = norm(self.rows[name]) / scale
            sizes.append(torch.stack([norm(old), norm(now[name] - old), gradient]))
        numbers = torch.stack(sizes).tolist() if sizes else []  # the only transfer from the device
        sample = Sample()
        for name, (weight, update, gradient) in zip(self.before, numbers, strict=True):
            if weight == 0:  # a layer initialized with zeros has no scale
                continue
            layer = name.removesuffix(".weight")  # as in `print(model)`
            sample.gradients[layer] = gradient / weight
            sample.updates[layer] = update / weight
            has_units = isinstance(modules.get(layer), WITH_UNITS)
            sample.silent[layer] = (self.rows[name] if has_units else torch.empty(0)) == 0
        return sample

    def add(self, sample: Sample, trainer: Trainer) -> None:
        """Judge this sample together with the previous ones, unless its step was skipped."""
        sizes = sample.gradients.values()
        if trainer.scaler.is_enabled() and not all(map(math.isfinite, sizes)):
            return  # fp16 skips such a step
        if sample.largest == 0 and any(earlier.largest > 0 for earlier in self.samples):
            return  # the step was skipped, or the loss is zero
        self.samples.append(sample)
        self.count += 1
        if len(self.samples) == WINDOW:
            self.judge(trainer)

    def judge(self, trainer: Trainer) -> None:
        """Warn about problems that the last samples share, once per layer and kind of problem."""
        for kind, problems in findings(self.samples).items():
            known = self.said.setdefault(kind, [])
            new = [name for name in problems if name not in known]
            if new:
                known += new
                layers = [f"{name} ({problems[name]})" for name in new]
                shown = first_few(layers, MOST_NAMED)
                warning = f"{kind} at step {trainer.step:,}: {shown}.\n{ADVICE[kind]}"
                self.warnings.append(warning)
                log.warning("doctor: %s", warning)

    def summary(self, trainer: Trainer) -> str:
        """Return the line to print at the end of the run."""
        kinds = [f"{kind} in {counted(len(layers), 'layer')}" for kind, layers in self.said.items()]
        steps = f"checked {self.count} of {trainer.step - self.begun_at:,} steps"
        return f"doctor   {steps}: {'; '.join(kinds) or 'no warnings'}"


def result_of(trainer: Trainer) -> dict[str, Any]:
    """Return the field of result.json for the last fit: its warnings, if any."""
    for callback in trainer.callbacks:
        if isinstance(callback, Doctor) and callback.warnings:
            return {"doctor": callback.warnings}
    return {}


def findings(samples: Sequence[Sample]) -> dict[str, dict[str, str]]:
    """Return {kind: {layer: problem}} for the problems that all samples share."""
    wrong: dict[str, dict[str, str]] = defaultdict(dict)
    names = [name for name in samples[-1].gradients if all(name in s.gradients for s in samples)]
    # The highest ratio of each layer's gradient to the largest gradient of the same step.
    shares = {
        name: max(sample.gradients[name] / (sample.largest or 1.0) for sample in samples)
        for name in names
    }
    # A vanishing gradient also becomes exactly zero in some units, but these are not dead.
    vanishes = any(0 < share < VANISHED for share in shares.values())
    for name in names:
        sizes = [sample.gradients[name] for sample in samples]
        update = statistics.median(sample.updates[name] for sample in samples)
        has_vanished = shares[name] < VANISHED
        silent = torch.stack([sample.silent[name] for sample in samples]).all(0)
        units = len(silent)
        dead = int(silent.sum())
        if not all(map(math.isfinite, sizes)):
            wrong["exploding gradients"][name] = "a gradient of NaN or infinity"
        elif dead > DEAD * units and not (vanishes and has_vanished):
            wrong["dead units"][name] = f"no gradient in {dead} of {units} units"
        elif has_vanished:
            wrong["vanishing gradients"][name] = f"a gradient {shares[name]:.0e} times the largest"
        elif min(sizes) > EXPLODED:
            wrong["exploding gradients"][name] = f"a gradient {min(sizes):,.0f} times the weights"
        if update > LARGE:
            wrong["large updates"][name] = f"a step changes it by {update:.0%} of its size"
    return wrong
