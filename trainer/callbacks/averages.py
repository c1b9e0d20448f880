"""Callbacks that average the weights over steps."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from stoker.trainer import checkpoint, launch, parallel, settings
from stoker.trainer.callback import Callback, State
from stoker.trainer.errors import UserError, check_number
from stoker.trainer.state import frozen

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

Tensors = dict[str, torch.Tensor]


class ShadowWeights(Callback):
    """A callback that keeps a second set of weights and BatchNorm statistics (the shadow).

    Subclasses define `on_step_end`, which brings the shadow up to date with the trainer's step. It
    is called before the evaluation at this step too, and does nothing the second time.
    """

    key: str  # the key of the shadow in a checkpoint

    def __init__(self) -> None:
        self.shadow: Tensors | None = None
        self.step = 0  # the step of the last update
        # Outside of a fit: the module that the shadow belongs to, and the checksum of its weights.
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.sum: str | None = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.module = None
        current = floating_state(trainer.module)
        if self.shadow is None or not trainer.step:
            self.shadow = current
            self.step = trainer.step
        # A checkpoint's tensors are on the CPU: copy them to the devices and layouts of the model.
        shadow = {name: torch.empty_like(tensor) for name, tensor in current.items()}
        copy_into(shadow, self.shadow)
        self.shadow = shadow

    def on_fit_end(self, trainer: "Trainer") -> None:
        # After an error, the device may no longer work. A closed Trainer has no module.
        if not trainer.failed and trainer.module is not None:
            self.remember(trainer.module)

    def loaded(self, trainer: "Trainer") -> None:
        if trainer.train_loader is None:  # not in a fit
            self.remember(trainer.module)

    def remember(self, module: torch.nn.Module) -> None:
        """Remember the weights that the shadow belongs to."""
        self.module = weakref.ref(module)
        self.sum = checksum(module)

    def on_eval_start(self, trainer: "Trainer") -> None:
        if self.is_outdated():
            self.shadow = None
            self.step = 0
            launch.warn(
                f"{type(self).__name__}: the weights have changed since the fit, or since the "
                f"checkpoint was loaded, so the {self.key} weights were discarded."
            )
        if self.shadow is not None:  # there is no shadow before training
            self.on_step_end(trainer)

    def is_outdated(self) -> bool:
        """Return whether the weights have changed since the end of the fit that made the shadow."""
        module = self.module() if self.module else None
        if self.shadow is None or module is None:
            return False
        return parallel.add_up(int(checksum(module) != self.sum)) > 0

    @torch.no_grad()
    def average(self, trainer: "Trainer", decay: float) -> Tensors:
        """Set shadow = decay * shadow + (1 - decay) * trained, and return the trained weights.

        The shadow of a frozen weight is a copy of the weight. It is copied again at every step,
        because other code may change the weight.
        """
        assert self.shadow is not None
        trained = floating_state(trainer.module)
        for name in trained.keys() & frozen(trainer.module):
            copy_into({name: self.shadow[name]}, {name: trained.pop(name)})
        if trained:
            shadow = parallel.local(self.shadow[name] for name in trained)
            average = get_ema_multi_avg_fn(decay)
            average(shadow, parallel.local(trained.values()), None)
        self.step = trainer.step
        return trained

    def state_dict(self) -> State:
        if self.is_outdated():
            return {self.key: None, "step": 0}
        return {self.key: self.shadow, "step": self.step}

    def load_state_dict(self, state: State) -> None:
        self.shadow = state[self.key]
        self.step = state["step"]


class Lookahead(ShadowWeights):
    """Every `every` steps, move slow weights toward the trained ones and continue from there.

    slow = d * slow + (1 - d) * trained. The update includes BatchNorm's statistics, and is also
    done at the last step. d = `decay` * (step / total_steps) ** `power` (Jordan 2024, arXiv
    2404.00498, section 3.4). With power 0, d is constant (Zhang 2019, arXiv 1907.08610, algorithm
    1, where 1 - d is called alpha).
    """

    key = "slow"

    def __init__(self, every: int = 5, decay: float = 0.5, power: float = 0) -> None:
        super().__init__()
        self.every: int = check_number("callbacks.lookahead.every", every, whole=True, least=1)
        self.decay: float = check_number("callbacks.lookahead.decay", decay, least=0, most=1)
        self.power: float = check_number("callbacks.lookahead.power", power, least=0)

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Raise UserError if an EMA comes first, because it would average outdated weights."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        if any(isinstance(callback, EMA) for callback in before):
            raise UserError(
                "callbacks: Lookahead changes the weights that EMA averages. Put Lookahead first."
            )
        super().on_fit_start(trainer)

    @torch.no_grad()
    def on_step_end(self, trainer: "Trainer") -> None:
        if self.step != trainer.step and trainer.is_due(self.every):
            decay = self.decay * (trainer.step / trainer.total_steps) ** self.power
            trained = self.average(trainer, decay)
            assert self.shadow is not None
            copy_into(trained, self.shadow)


class EMA(ShadowWeights):
    """Evaluate and predict with an exponential moving average of weights and BatchNorm statistics.

    The decay at each step is min(decay, (1 + step) / (10 + step)), so that the average is useful as
    early as the first epoch (as in tf.train.ExponentialMovingAverage).
    """

    key = "average"

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = settings.check("ema", decay)
        self.raw: Tensors | None = None  # the trained weights while an evaluation uses the average

    def on_step_end(self, trainer: "Trainer") -> None:
        if self.step != trainer.step:
            step = trainer.step
            self.average(trainer, min(self.decay, (1 + step) / (10 + step)))

    def on_eval_start(self, trainer: "Trainer") -> None:
        super().on_eval_start(trainer)
        if self.shadow is not None:
            current = floating_state(trainer.module)
            self.raw = {name: tensor.clone() for name, tensor in current.items()}
            copy_into(current, self.shadow)

    def on_eval_end(self, trainer: "Trainer") -> None:
        if self.raw is not None:
            copy_into(floating_state(trainer.module), self.raw)
            self.raw = None

    def state_dict(self) -> State:
        """Raise UserError unless the model currently holds the trained weights."""
        if self.raw is not None:
            raise UserError(
                "EMA: during an evaluation, the model holds the averaged weights, not the trained "
                "ones. Save or load the state before or after the evaluation."
            )
        return super().state_dict()


def checksum(module: torch.nn.Module) -> str:
    """Return a checksum of the weights and the floating-point statistics in this process."""
    state = {**floating_state(module), **dict(module.named_parameters())}
    tensors = [tensor.detach().cpu().contiguous() for tensor in parallel.local(state.values())]
    return checkpoint.digest(dict(zip(state, tensors, strict=True)), "")


def floating_state(module: torch.nn.Module) -> Tensors:
    """Return {name: tensor} of the module's floating-point weights and statistics, not copied."""
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    }


@torch.no_grad()
def copy_into(tensors: Tensors, values: Tensors) -> None:
    """Copy the values into the tensors with the same names, in place.

    Assigning to `.data` instead has no effect on sharded modules.
    """
    for name, tensor in tensors.items():
        value = parallel.like(values[name], tensor) if name in values else None
        if value is None or value.shape != tensor.shape:  # copy_ would broadcast it
            raise UserError(
                f"The checkpoint does not match this model: the average of {name} is missing or "
                "has a different shape."
            )
        tensor.copy_(value)
