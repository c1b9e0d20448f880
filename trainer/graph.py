"""Whole steps as graphs: what a step does on the device, captured once for each kind of batch and then replayed."""

import torch
from stoker.trainer import batch as batches
from stoker.trainer import device as devices
from stoker.trainer.errors import UserError

WARMUP = 3  # steps that run as they are, while kernels are chosen and the optimizer makes its state
MOST = 4  # graphs, each of which holds the memory of a step


def eagerly(work, batch):
    """Without a graph."""
    return work(batch)


class Captured:
    """`execute(work, batch)` gives what `work(batch)` gives, by a graph from the second time on that such a step comes.

    A graph repeats its kernels on the memory that they had, so there is one for each kind of step: the batch's shapes
    and plain values, the parameters that are trained, and the optimizer's settings but for the rate, which is a tensor
    (so it is rounded to float32). More kinds than MOST run as they are. What is random is drawn from the device's
    generator as it stands, seeded anew by each step, so a replay draws what the step would have drawn. The tensor that
    comes back is overwritten by the next replay.
    """

    def __init__(self, optimizer, device):
        self.optimizer, self.device = optimizer, device
        self.steps, self.seen, self.graphs = 0, set(), {}

    def __call__(self, work, batch):
        kind = self.kind_of(batch)
        if kind not in self.graphs:
            self.steps += 1
            known = kind in self.seen
            self.seen.add(kind)
            if not known or self.steps <= WARMUP or len(self.graphs) == MOST:
                return devices.beside(work, batch, self.device)
            inputs = batches.walk(lambda _, tensor: tensor.clone(), batch)
            self.graphs[kind] = inputs, devices.record(work, inputs, self.device)
        inputs, replay = self.graphs[kind]
        for (_, own), (_, given) in zip(
            batches.entries(inputs), batches.entries(batch), strict=True
        ):
            own.copy_(given)
        return replay()

    def kind_of(self, batch):
        """All that a graph takes for granted: hashable. UserError for what can be neither copied nor compared."""

        def check_tensor(name, leaf):
            if not isinstance(leaf, torch.Tensor):
                raise UserError(
                    f"compile=graph: {name} is a {type(leaf).__name__}, no tensor. Type compile=false."
                )

        rest = repr(
            batches.walk(check_tensor, batch)
        )  # with None in place of each tensor: numbers, names
        tensors = tuple(
            (name, tensor.shape, tensor.dtype, tensor.stride())
            for name, tensor in batches.entries(batch)
        )
        trained = tuple(
            p.requires_grad for group in self.optimizer.param_groups for p in group["params"]
        )
        own = ("params", "lr", "initial_lr")
        settings = tuple(
            str(v)
            for group in self.optimizer.param_groups
            for k, v in group.items()
            if k not in own
        )
        return tensors, rest, trained, settings


def check(trainer_class, usual_class, device, dtype, strategy, micro_batch=None):
    """UserError where `compile=graph` cannot be had."""
    reason = None
    if device.type not in devices.GRAPHS:
        reason = f"there are no graphs on {device.type}. Type compile=true or compile=false."
    elif dtype is torch.float16:
        reason = "fp16 has to ask after each step whether it was one. Type precision=bf16 or precision=fp32."
    elif strategy != "single":
        reason = "a graph is of one GPU. Type strategy=single."
    elif micro_batch == "auto":
        reason = "a graph is of one size. Type micro_batch=N, or compile=true or compile=false."
    elif trainer_class.train_step is not usual_class.train_step:
        reason = f"{trainer_class.__name__} has a train_step of its own. Type compile=true or compile=false."
    if reason:
        raise UserError(f"compile=graph: {reason}")
