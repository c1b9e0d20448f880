"""CUDA graphs: capture a step for each kind of batch, then replay it."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import batches, overrides, seeding
from stoker.trainer import device as devices
from stoker.trainer.errors import UserError, first_line

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

WARMUP = 3  # steps without a graph, while kernels are chosen and optimizer state is created
MOST = 4  # maximum number of graphs; limited because each one holds the memory of a step
# Keys of a parameter group whose values may change without a new graph.
CHANGES = ("params", "lr", "initial_lr")
# Attributes of a Trainer that change at each step, but would be constant in a graph.
CLOCKS = ("step", "rates")
Work = Callable[[Any], Any]  # maps a batch to tensors
Kind = tuple[Hashable, Hashable]


class Captured:
    """Call `work(batch)`, or replay a graph of it if this kind of step has been captured.

    A kind of step is captured when it occurs for the second time. A graph repeats its kernels on
    the same memory, so each kind of step needs its own graph. A kind is defined by the shapes and
    plain values in the batch, by which parameters are trained, and by the optimizer's settings. The
    learning rate may change: it is a tensor (rounded to float32). At most MOST kinds are captured;
    all others run without a graph. Each step seeds the device's generator, so a replay draws the
    same random numbers as a normal step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.state = optimizer.state  # the graphs use its tensors
        self.device = device
        self.steps: int = 0  # number of steps that ran without a graph
        self.kinds: set[Kind] = set()  # kinds of steps so far
        self.graphs: dict[Kind, tuple[Sequence[torch.Tensor], Callable[[], Any]]] = {}

    def __call__(self, work: Work, batch: Any) -> Any:
        """Return `work(batch)`. The next replay overwrites the returned tensors."""
        form, tensors = form_of(batch)
        kind = (form, self.settings())
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

    def settings(self) -> Hashable:
        """Return which parameters are trained, and the optimizer's settings.

        Tensors are compared by identity, because a graph reads their memory.
        """
        settings: list[Hashable] = []
        for group in self.optimizer.param_groups:
            settings += [parameter.requires_grad for parameter in group["params"]]
            for name, value in group.items():
                if name not in CHANGES:
                    settings.append(str(value) if value.__hash__ is None else value)
        return tuple(settings)

    def eager(self, work: Work, batch: Any) -> Any:
        """Return `work(batch)` without a graph; raise an error if it could not be captured."""
        may_be_captured = self.steps > 1 and len(self.graphs) < MOST
        if not may_be_captured:  # the first step may do work that later steps do not repeat
            return devices.beside(work, batch, self.device)
        before = seeding.host_random_states(self.device)
        result = devices.beside(work, batch, self.device)
        if seeding.host_random_states(self.device) != before:
            raise UserError(
                "compile=graph: the step draws random numbers on the CPU (with random, numpy or "
                "torch), and a graph would repeat the same numbers.\nDraw them on the device "
                "(torch.rand(..., device=...)), or type compile=false."
            )
        return result


def form_of(batch: Any) -> tuple[Hashable, Sequence[torch.Tensor]]:
    """Return (the properties that all batches of a graph share, the tensors of this batch).

    Raises:
        UserError: The batch contains an object that can be neither copied nor compared.
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
    """Hide attributes that change at each step, so that a step that reads them raises an error."""
    clocks = {name: vars(trainer).pop(name) for name in CLOCKS}
    try:
        yield
    finally:
        vars(trainer).update(clocks)


def explain(error: BaseException, trainer: Any) -> UserError | None:
    """Return a UserError if the step cannot be captured, or None for any other error."""
    reads_clock = isinstance(error, AttributeError) and error.obj is trainer
    if not reads_clock and "captur" not in str(error):
        return None
    return UserError(
        f"compile=graph: the step cannot be captured ({first_line(error)}).\n"
        "It must not wait for the device (.item(), .cpu(), `if tensor:`) or read self.step or "
        "self.lr. Use torch.where or a buffer of the model, or type compile=false."
    )


def check(trainer: "Trainer") -> None:
    """Raise UserError if `compile=graph` is not possible."""
    is_possible = (
        trainer.device.type in devices.GRAPHS
        and trainer.strategy == "single"
        and trainer.dtype is not torch.float16  # a graph cannot contain the scaler
        and not trainer.splitter.adapts
        and overrides.is_usual(type(trainer), "train_step")
    )
    if not is_possible:
        raise UserError(
            "compile=graph needs an NVIDIA or AMD GPU (device=cuda), strategy=single, "
            "precision=bf16 or fp32, a fixed micro_batch, and the Trainer's own train_step.\n"
            "Type compile=true or compile=false, or change the setting that does not fit."
        )
