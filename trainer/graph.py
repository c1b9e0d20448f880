"""CUDA graphs: capture a step once per kind of batch, then replay it."""

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import batch as batches
from stoker.trainer import device as devices
from stoker.trainer import overrides, seeding
from stoker.trainer.errors import UserError, first_line, log

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

WARMUP = 3  # steps without a graph, while kernels are chosen and the optimizer creates its state
MOST = 4  # graphs kept; each holds the memory of a step
PATIENCE = 20  # steps after which a fit without a graph warns
# Keys of a parameter group that do not change what is captured.
CHANGES = ("params", "lr", "initial_lr")
# Attributes of a Trainer that change at each step; a graph would keep the captured values.
CLOCKS = ("step", "rates")
Work = Callable[[Any], Any]  # maps a batch to tensors
Kind = tuple[Hashable, Hashable, Hashable]


class Captured:
    """Call `work(batch)`; from the second step of the same kind, replay it as a graph.

    A graph repeats its kernels on the same memory, so each kind of step needs its own. A kind is
    the batch's shapes and plain values, the trained parameters, and the optimizer's settings except
    the learning rate, which is a tensor (and so is rounded to float32). Beyond MOST kinds, steps
    run without a graph. Each step seeds the device's generator, so a replay draws the same random
    numbers as the step itself would.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.state = optimizer.state  # the graphs use its tensors
        self.device = device
        self.steps: int = 0  # without a graph
        self.kinds: set[Kind] = set()  # kinds that ran once; a repeated one is captured
        self.graphs: dict[Kind, tuple[Sequence[torch.Tensor], Callable[[], Any]]] = {}

    def __call__(self, work: Work, batch: Any) -> Any:
        """Return `work(batch)`; the next replay overwrites the returned tensors."""
        form, tensors = form_of(batch)
        kind = (form, *self.settings())
        captured = self.graphs.get(kind)
        if captured is None:
            self.steps += 1
            is_known = kind in self.kinds
            self.kinds.add(kind)
            if not is_known or self.steps <= WARMUP or len(self.graphs) == MOST:
                return self.eager(work, batch)
            inputs = batches.walk(lambda _, tensor: tensor.clone(), batch)
            captured = form_of(inputs)[1], devices.record(work, inputs, self.device)
            self.graphs[kind] = captured
        inputs, replay = captured
        for recorded, given in zip(inputs, tensors, strict=True):
            recorded.copy_(given)
        return replay()

    def settings(self) -> tuple[Hashable, Hashable]:
        """Return which parameters are trained, and the optimizer's settings.

        A tensor is compared by identity: a graph reads its memory.
        """
        trained = []
        settings = []
        for group in self.optimizer.param_groups:
            trained += [parameter.requires_grad for parameter in group["params"]]
            for name, value in group.items():
                if name not in CHANGES:
                    settings.append(str(value) if value.__hash__ is None else value)
        return tuple(trained), tuple(settings)

    def eager(self, work: Work, batch: Any) -> Any:
        """Return `work(batch)` without a graph; raise if a graph could not repeat it."""
        if self.steps == PATIENCE and not self.graphs:
            log.warning(
                "compile=graph: the first %d steps ran without a graph, because the shapes of the "
                "batches, the trained parameters or the optimizer's settings keep changing.",
                self.steps,
            )
        may_be_captured = self.steps > 1 and len(self.graphs) < MOST
        if not may_be_captured:  # the first step may do one-time work
            return devices.beside(work, batch, self.device)
        before = seeding.host_random_states(self.device)
        with devices.never_waiting(self.device):
            result = devices.beside(work, batch, self.device)
        if seeding.host_random_states(self.device) != before:
            raise UserError(
                "compile=graph: the step draws random numbers from Python's, numpy's or torch's "
                "CPU generator, and a graph would repeat them.\nDraw them on the device "
                "(torch.rand(..., device=...)), or type compile=false."
            )
        return result


def form_of(batch: Any) -> tuple[Hashable, Sequence[torch.Tensor]]:
    """Return what a graph requires of a batch, and the batch's tensors.

    Raises:
        UserError: The batch holds an object that can be neither copied nor compared.
    """
    if isinstance(batch, (list, tuple)) and all(isinstance(x, torch.Tensor) for x in batch):
        return tuple([(x.shape, x.dtype, x.stride()) for x in batch]), batch
    tensors: list[torch.Tensor] = []

    def stand_in(name: str, leaf: Any) -> Hashable:
        if not isinstance(leaf, torch.Tensor):
            raise UserError(
                f"compile=graph: {name} is a {type(leaf).__name__}, not a tensor. "
                "Type compile=false."
            )
        tensors.append(leaf)
        return (leaf.shape, leaf.dtype, leaf.stride())

    return repr(batches.walk(stand_in, batch)), tensors  # includes plain values and names


@contextlib.contextmanager
def without_clock(trainer: Any) -> Iterator[None]:
    """Hide attributes that change at each step, because captured code would keep old values."""
    clocks = {name: vars(trainer).pop(name) for name in CLOCKS}
    try:
        yield
    finally:
        vars(trainer).update(clocks)


def explain(error: BaseException, trainer: Any) -> UserError | None:
    """Return a UserError for a step that cannot be captured, None for any other error."""
    reads_clock = isinstance(error, AttributeError) and error.obj is trainer
    if not reads_clock and not re.search("called a synchronizing|captur", str(error)):
        return None
    return UserError(
        f"compile=graph: the step cannot be captured ({first_line(error)}).\n"
        "It may not wait for the device, as .item(), .cpu() and `if tensor:` do, or read "
        "self.step and self.lr. Use torch.where or a buffer of the model, or type compile=false."
    )


def check(trainer: "Trainer") -> None:
    """Raise UserError if `compile=graph` is not possible."""
    reason = None
    if trainer.device.type not in devices.GRAPHS:
        kind = trainer.device.type
        reason = f"{kind} does not support graphs. Type compile=true or compile=false."
    elif trainer.dtype is torch.float16:
        reason = "a graph cannot contain the fp16 scaler. Type precision=bf16 or precision=fp32."
    elif trainer.strategy != "single":
        reason = "a graph supports only one GPU. Type strategy=single."
    elif trainer.micro_batch.adapts:
        reason = "a graph needs a fixed size. Type micro_batch=N, or compile=true or compile=false."
    elif not overrides.is_usual(type(trainer), "train_step"):
        name = type(trainer).__name__
        reason = f"{name} overrides train_step. Type compile=true or compile=false."
    if reason is not None:
        raise UserError(f"compile=graph: {reason}")
