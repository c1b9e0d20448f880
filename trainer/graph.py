"""CUDA graphs: what a step does on the device, captured once per kind of batch, then replayed."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from stoker.trainer import batch as batches
from stoker.trainer import device as devices
from stoker.trainer.errors import UserError

WARMUP = 3  # steps without a graph, while kernels are chosen and the optimizer makes its state
MOST = 4  # graphs, each of which holds the memory of a step
CHANGES = ("params", "lr", "initial_lr")  # of a parameter group: not a part of the kind of a step

Work = Callable[[Any], Any]  # from a batch to tensors


class Captured:
    """Calls `work(batch)`, by a graph from the second time on that such a step comes.

    A graph repeats its kernels on the memory that they had. So there is one for each kind of step:
    the batch's shapes and plain values, which parameters are trained, and the optimizer's settings
    except for the rate, which is a tensor (and so is rounded to float32). More kinds than MOST run
    without a graph. Random numbers come from the device's generator as it stands, which each step
    seeds, so a replay draws what the step would have drawn.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self.steps: int = 0
        self.kinds: set[Hashable] = set()
        self.graphs: dict[Hashable, tuple[Any, Callable[[], Any]]] = {}

    def __call__(self, work: Work, batch: Any) -> Any:
        """Return `work(batch)`; the next replay overwrites its tensors."""
        kind = self.kind_of(batch)
        if kind not in self.graphs:
            self.steps += 1
            is_known = kind in self.kinds
            self.kinds.add(kind)
            if not is_known or self.steps <= WARMUP or len(self.graphs) == MOST:
                return devices.beside(work, batch, self.device)
            inputs = batches.walk(lambda _, tensor: tensor.clone(), batch)
            self.graphs[kind] = (inputs, devices.record(work, inputs, self.device))
        inputs, replay = self.graphs[kind]
        pairs = zip(batches.entries(inputs), batches.entries(batch), strict=True)
        for (_, recorded), (_, given) in pairs:
            recorded.copy_(given)
        return replay()

    def kind_of(self, batch: Any) -> Hashable:
        """Return everything that a graph takes for granted.

        Raises:
            UserError: The batch holds an object that can be neither copied nor compared.
        """
        structure = repr(batches.walk(without_tensor, batch))  # numbers, names
        tensors = []
        for name, tensor in batches.entries(batch):
            tensors.append((name, tensor.shape, tensor.dtype, tensor.stride()))
        trained = []
        settings = []
        for group in self.optimizer.param_groups:
            trained += [parameter.requires_grad for parameter in group["params"]]
            settings += [str(group[key]) for key in group if key not in CHANGES]
        return tuple(tensors), structure, tuple(trained), tuple(settings)


def without_tensor(name: str, leaf: Any) -> None:
    """Stand in for a tensor of a batch; raise UserError for another object."""
    if not isinstance(leaf, torch.Tensor):
        raise UserError(
            f"compile=graph: {name} is a {type(leaf).__name__}, not a tensor. Type compile=false."
        )


def check(
    device: torch.device,
    dtype: torch.dtype | None,
    strategy: str,
    adapts: bool = False,
    custom: str | None = None,
) -> None:
    """Raise UserError if `compile=graph` is not possible.

    Args:
        device: Where the steps run.
        dtype: Type of autocast.
        strategy: How many devices there are.
        adapts: Whether the micro-batches adapt to the memory.
        custom: Name of the Trainer's class, if it has its own train_step.
    """
    reason = None
    if device.type not in devices.GRAPHS:
        reason = f"{device.type} has no graphs. Type compile=true or compile=false."
    elif dtype is torch.float16:
        reason = (
            "a graph has no room for the scaler of fp16. Type precision=bf16 or precision=fp32."
        )
    elif strategy != "single":
        reason = "a graph is for one GPU. Type strategy=single."
    elif adapts:
        reason = "a graph has one size. Type micro_batch=N, or compile=true or compile=false."
    elif custom is not None:
        reason = f"{custom} has its own train_step. Type compile=true or compile=false."
    if reason is not None:
        raise UserError(f"compile=graph: {reason}")
