"""The doctor: a callback that looks into sampled steps for dead units, vanishing gradients, updates of a wrong size."""

import collections
import math
import statistics
from dataclasses import dataclass, field

import torch

from stoker.trainer import settings
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, check_number, log

WINDOW = 3  # samples that have to agree before anything is said
FEWEST = 20  # samples of a run, if it has so many steps
DEAD = 0.5  # share of a layer's units
# {activation: (low, high, share)}: outputs beyond low and high have a slope of 6 % of the steepest, or none; so many of
# them are too many. Of a ReLU's half are zero as a rule.
EDGES = {
    torch.nn.Tanh: (-0.97, 0.97, 0.75),
    torch.nn.Sigmoid: (0.015, 0.985, 0.75),
    torch.nn.ReLU: (1e-30, math.inf, 0.99),
}
VANISHED = 1e-6  # of the largest gradient, each in proportion to its weight
EXPLODED = 100.0  # times the weight
# Sizes of an update in proportion to the weight. About 1e-3 is usual (A. Karpathy, "makemore 3"); Adam's first steps
# are larger.
SMALL, LARGE = 1e-6, 0.5

ADVICE = {
    "dead": "Type a lower optimizer.lr; or put a norm in front of the activation, or a GELU in place of a ReLU.",
    "saturated": "Put a norm in front of the activation, or a GELU in its place; or begin with smaller weights.",
    "vanishing": "Put norms or shortcuts between the layers, or a ReLU or GELU in place of a sigmoid or tanh.",
    "exploding": "Type max_grad_norm=1; or standardise the inputs and the targets.",
    "large updates": "Type a lower optimizer.lr, or a longer scheduler.warmup.",
    "small updates": "Type a higher optimizer.lr.",
}


@dataclass
class Sample:
    """What was seen of one step, by layer; sizes are in proportion to the norm of the weight."""

    gradients: dict = field(default_factory=dict)
    updates: dict = field(default_factory=dict)
    at_full_rate: dict = field(
        default_factory=dict
    )  # the updates, had the schedule been at its height
    silent: dict = field(
        default_factory=dict
    )  # (units,) whether all of the unit's gradient is exactly zero
    saturated: dict = field(
        default_factory=dict
    )  # the share of an activation's outputs, 0 where it is not too large


class Doctor(Callback):
    """Warns, by the layer's name, where a training cannot work; says at its end what there was.

    It looks at the first steps and then at every `every`-th one, but at FEWEST at least: at the gradient of each weight
    with two or more dimensions, at what the step made of the weight, and at the outputs of ReLU, sigmoid and tanh
    modules. Where all of a unit's gradient is zero, no sample gets through to it: that is what a dead ReLU looks like
    from behind, also one that is no module; and where a whole layer is dead, in front of it and behind it too. Nothing
    is done in other steps, and no step comes out otherwise. A sampled step takes one more copy of the weights.
    """

    first_rank_only = True

    def __init__(self, every=50):
        self.every = check_number("callbacks.doctor.every", every, whole=True, least=1)
        self.hooks, self.said, self.warnings, self.count = [], {}, [], 0

    def on_fit_start(self, trainer):
        """UserError where a step cannot be looked into."""
        from stoker.trainer import graph

        if trainer.execute is not graph.eagerly:
            raise UserError(
                "callbacks=doctor: a graph's steps cannot be looked into. Type compile=false."
            )
        if settings.check_strategy(trainer.strategy)[0] in ("dp", "fsdp"):
            raise UserError(
                f"callbacks=doctor: strategy={trainer.strategy} has no whole layers to look at.\n"
                "Type strategy=ddp or strategy=single."
            )
        self.begun_at, self.count = trainer.step, 0
        self.pause = max(1, min(self.every, (trainer.total_steps - trainer.step) // FEWEST))
        self.samples, self.said = (
            collections.deque(maxlen=WINDOW),
            {},
        )  # {kind: the layers it was said of}
        self.warnings = []
        self.most_moved, self.had_gradient = {}, False
        self.look(trainer)

    def on_step_end(self, trainer):
        if self.hooks:
            self.note(trainer)
        following = trainer.step + 1
        if following % self.pause == 0 or following <= self.begun_at + WINDOW:
            self.look(trainer)

    def on_fit_end(self, trainer):
        self.forget()
        if not self.count:
            return
        if len(self.samples) < WINDOW:
            self.judge(trainer)
        print(self.summary(trainer))

    def look(self, trainer):
        """Has the next step leave its gradients, and what it began with."""
        parameters = {
            name: p
            for name, p in trainer.module.named_parameters()
            if p.requires_grad and p.ndim > 1
        }
        self.before = {name: p.detach().clone() for name, p in parameters.items()}
        self.rows, self.values = {}, {}
        for name, parameter in parameters.items():
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self.gradient_of(name)))
        if trainer.module._compiled_call_impl is None:  # a compiled module calls no hooks
            for name, module in trainer.module.named_modules():
                if type(module) in EDGES:
                    self.hooks.append(module.register_forward_hook(self.outputs_of(name)))

    def gradient_of(self, name):
        def note(parameter):  # after each micro-batch, the last time with the whole gradient
            gradient = parameter.grad
            if not gradient.is_sparse:
                self.rows[name] = torch.linalg.vector_norm(
                    gradient.flatten(1), dim=1, dtype=torch.float32
                )

        return note

    def outputs_of(self, name):
        def note(module, _, outputs):
            if module.training:
                low, high, most = EDGES[type(module)]
                share = ((outputs < low) | (outputs > high)).float().mean()
                self.values[name] = torch.where(share > most, share, 0.0)

        return note

    def forget(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.before, self.rows, self.values = [], {}, {}, {}

    @torch.no_grad()
    def note(self, trainer):
        """Makes a sample of the step that was just done."""
        units, now = unit_layers(trainer.module), dict(trainer.module.named_parameters())
        names, scale = list(self.before), trainer.scaler.get_scale()
        numbers = []
        for name, old in self.before.items():
            rows = self.rows.get(name, old.new_zeros(1))
            norms = (old, now[name] - old, rows / scale)
            numbers.append(
                torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in norms])
            )
        shares = list(self.values.values())
        numbers += [torch.stack(shares)] if shares else []
        numbers = torch.cat(numbers).tolist() if numbers else []  # the one transfer
        heights = [
            group["initial_lr"] for group in trainer.optimizer.param_groups if "initial_lr" in group
        ]
        factor = heights[0] / trainer.lr if heights and trainer.lr else 1.0
        sample = Sample(
            saturated=dict(zip(map(layer, self.values), numbers[3 * len(names) :], strict=True))
        )
        for i, name in enumerate(names):
            weight, update, gradient = numbers[3 * i : 3 * i + 3]
            if weight == 0:  # a layer that begins with zeros: nothing to compare with
                continue
            sample.gradients[layer(name)] = gradient / weight
            sample.updates[layer(name)] = update / weight
            sample.at_full_rate[layer(name)] = factor * update / weight
            if name in units:
                sample.silent[layer(name)] = (
                    self.rows.get(name, now[name].new_zeros(len(now[name]))) == 0
                )
        self.forget()
        overflow = trainer.scaler.is_enabled() and not all(
            map(math.isfinite, sample.gradients.values())
        )
        largest = max(sample.gradients.values(), default=0.0)
        if overflow or (
            largest == 0 and self.had_gradient
        ):  # fp16 skips such a step; or the loss has come to zero
            return
        self.had_gradient |= largest > 0
        for name, size in sample.at_full_rate.items():
            self.most_moved[name] = max(size, self.most_moved.get(name, 0.0))
        self.samples.append(sample)
        self.count += 1
        if len(self.samples) == WINDOW:
            self.judge(trainer)

    def judge(self, trainer):
        """Says what the last samples agree on, once for each layer and kind."""
        for kind, found in findings(self.samples, self.most_moved).items():
            said = self.said.setdefault(kind, [])
            if new := {name: text for name, text in found.items() if name not in said}:
                said += new
                self.warnings.append(
                    f"{kind}, at step {trainer.step}: {listed(new)}.\n{ADVICE[kind]}"
                )
                log.warning("doctor: %s", self.warnings[-1])

    def summary(self, trainer):
        """The line that ends it."""
        last = self.samples[-1]
        steps = f"{self.count} of {trainer.step - self.begun_at:,} steps"
        seen = f"{len(last.updates)} weight{'s' * (len(last.updates) != 1)} in {steps}"
        if self.said:
            found = "; ".join(f"{kind} in {len(layers)}" for kind, layers in self.said.items())
            return f"doctor   {seen}: {found}"
        sizes = sorted(
            statistics.median(s.updates[name] for s in self.samples) for name in last.updates
        )
        updates = f"; updates are {sizes[0]:.1g} to {sizes[-1]:.1g} of the weights" if sizes else ""
        return f"doctor   {seen}: nothing to warn of{updates}"


def result_of(trainer):
    """What result.json says of the last fit: all that its doctor has warned of; {} where that is nothing."""
    own = next((callback for callback in trainer.callbacks if isinstance(callback, Doctor)), None)
    return {"doctor": own.warnings} if own and own.warnings else {}


def findings(samples, most_moved):
    """{kind: {layer: what is wrong}} where all of the samples agree."""
    samples, found = list(samples), collections.defaultdict(dict)
    names = set.intersection(*(set(sample.gradients) for sample in samples)) if samples else ()
    largest = [max(sample.gradients.values(), default=0.0) or 1.0 for sample in samples]
    # The most that a layer's gradient was of the largest one in a step.
    share = {
        name: max(s.gradients[name] / top for s, top in zip(samples, largest, strict=True))
        for name in names
    }
    # And where that is less than a number can be, it is 0: in some units of a layer, or in all.
    vanishes = any(0 < size < VANISHED for size in share.values())
    for name in sorted(names, key=list(samples[-1].gradients).index) if samples else ():
        sizes = [sample.gradients[name] for sample in samples]
        masks = [sample.silent[name] for sample in samples if name in sample.silent]
        silent = int(torch.stack(masks).all(0).sum()) if len(masks) == len(samples) else 0
        update = statistics.median(sample.updates[name] for sample in samples)
        if not all(map(math.isfinite, sizes)):
            found["exploding"][name] = "not finite"
        elif masks and silent > DEAD * len(masks[0]) and not (vanishes and share[name] < VANISHED):
            found["dead"][name] = f"no gradient in {silent} of {len(masks[0])} units"
        elif share[name] < VANISHED:
            found["vanishing"][name] = f"a gradient of {share[name]:.0e} of the largest"
        elif min(sizes) > EXPLODED:
            found["exploding"][name] = f"a gradient of {min(sizes):,.0f} times the weights"
        if update > LARGE:
            found["large updates"][name] = f"{update:.2g} of the weights in a step"
        elif most_moved[name] < SMALL and name not in {**found["dead"], **found["vanishing"]}:
            found["small updates"][name] = f"{most_moved[name]:.0e} of the weights in a step"
    for name in samples[-1].saturated if samples else ():
        shares = [sample.saturated.get(name, 0.0) for sample in samples]
        if min(shares) > 0:
            found["saturated"][name] = f"{min(shares):.0%} of its outputs"
    return {kind: layers for kind, layers in found.items() if layers}


def unit_layers(module):
    """The names of the weights of which each row is one unit's."""
    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    return {
        f"{name}.weight".lstrip(".")
        for name, child in module.named_modules()
        if isinstance(child, kinds)
    }


def layer(name):
    """The name of a weight's layer, as it is in `print(model)`."""
    return name.removesuffix(".weight")


def listed(layers, most=3):
    """'layers.1 (16 of 16 units), layers.4 (...) and 40 more'."""
    shown = [f"{name} ({text})" for name, text in list(layers.items())[:most]]
    more = f" and {len(layers) - most} more" if len(layers) > most else ""
    return ", ".join(shown) + more
