"""Optimizers: in their fused form, stepped without what torch.optim wraps around a step; and one that torch has not."""

import inspect
import re
import types

import torch
from stoker.trainer import device as devices
from stoker.trainer import parallel
from stoker.trainer.errors import UserError, check_number
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

OF_MATRICES = (
    "Muon",
    "Adafactor",
)  # of torch's optimizers; what the others do, they do to each number by itself


def build(factory, groups, device, module=None, compiled=False):
    """`factory(groups)`, in its fused form where there is one and neither `fused` nor `foreach` was chosen.

    Fused forms are for dense floating-point parameters on some devices. Where the `groups` turn out to have equal
    settings they become one, since each costs a step of its own.
    """
    spare_the_compiler(not compiled)
    settings = inspect.signature(factory).parameters
    open_choice = all(
        name in settings and settings[name].default is None for name in ("fused", "foreach")
    )
    dense = not any(
        getattr(child, "sparse", False) for child in (module.modules() if module else ())
    )
    floating = all(p.is_floating_point() for group in groups for p in group["params"])
    cut_up = any(parallel.is_shard(p) for group in groups for p in group["params"])
    plain = dense and floating and not cut_up  # for sharded ones torch has no fused SGD
    fused = {"fused": True} if open_choice and plain and device.type in devices.FUSED else {}
    try:
        optimizer = factory(groups, **fused)
    except UserError:
        raise
    except (
        ValueError,
        TypeError,
        IndexError,
    ) as error:  # how torch refuses a rate, a decay, a pair of betas
        raise UserError(refusal(str(error), settings)) from error
    merge(optimizer.param_groups, groups)
    if isinstance(optimizer, torch.optim.SGD):
        begin_momentum(optimizer, cut_up)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optimizer: {type(optimizer).__name__} evaluates a step many times. Type optimizer=adamw."
        )
    kind = type(optimizer)
    if cut_up and kind.__module__.startswith("torch.optim") and kind.__name__ in OF_MATRICES:
        what = f"{kind.__name__} looks at whole matrices, and each process has a part of them"
        raise UserError(f"strategy=fsdp: {what}. Type optimizer=adamw, or strategy=ddp.")
    is_torchs = kind.__module__.startswith("torch.optim.")
    if is_torchs and not compiled and not optimizer.defaults.get("differentiable"):
        make_lean(optimizer)
    return optimizer


def refusal(text, keys):
    """What to say where torch refuses a value, "Invalid beta parameter at index 0: 1.5", of one of these keys."""
    found = re.match(r"Invalid (\w+)(.*): ", text)
    if not found:
        return f"optimizer: {text}."
    names = {"learning": "lr", "epsilon": "eps", "beta": "betas"}
    key = names.get(found[1], found[1])
    place = f"optimizer.{key}" if key in keys else "optimizer"
    return f"{place}: {text}. Type another value for {place if key in keys else 'it'}."


def merge(built, given):
    """Makes one of the two groups where the factory has taken them as they were given, with the same settings."""
    if len(built) == len(given) == 2:
        pairs = [
            zip(b["params"], g["params"], strict=True) for b, g in zip(built, given, strict=True)
        ]
        sizes = [len(b["params"]) == len(g["params"]) for b, g in zip(built, given, strict=True)]
        as_given = all(sizes) and all(one is other for pair in pairs for one, other in pair)
        if as_given and all(
            built[0][name] == built[1].get(name) for name in built[0] if name != "params"
        ):
            built[0]["params"] += built.pop()["params"]


def begin_momentum(optimizer, cut_up=False):
    """Gives a fused SGD its momentum, 0 before the first step: the same numbers as torch's, which makes it in the step.

    Where the fp16 scaler skips that step, torch (2.15) takes unwritten memory for the momentum from then on. One of
    shards has it too, or a fused one could not go on from it where a parameter had no gradient yet.
    """
    groups = [group for group in optimizer.param_groups if group["momentum"]]
    groups = [group for group in groups if group["fused"] or (cut_up and not group["dampening"])]
    if any(
        group["dampening"] for group in groups
    ):  # torch's first step has none, and one from 0 would have it
        optimizer._step_supports_amp_scaling = False
        for group in optimizer.param_groups:
            group["fused"] = False
        return
    for parameter in (parameter for group in groups for parameter in group["params"]):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def make_capturable(optimizer, device):
    """The rates as tensors, which a graph reads anew at each replay, and the count of steps on the device."""
    if not optimizer.defaults.get("fused") and not optimizer.defaults.get("capturable"):
        raise UserError(
            f"compile=graph: {type(optimizer).__name__} is not fused. Leave fused out, and type optimizer=adamw or sgd."
        )
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group:
            group["capturable"] = True


def make_lean(optimizer):
    """The same `step` and `zero_grad` without the wrappers of torch.optim, which cost 30 us a step.

    They import torch._dynamo, call hooks and record a name for the profiler; the last two remain where someone listens.
    """
    kind = type(optimizer)
    bare = torch.no_grad()(inspect.unwrap(kind.step))
    full = kind.profile_hook_step(bare)

    def step(self, closure=None):
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        hooks = own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return (full if hooks or torch.autograd._profiler_enabled() else bare)(self, closure)

    def zero_grad(self, set_to_none=True):
        if not set_to_none:
            return kind.zero_grad(self, set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    optimizer.step, optimizer.zero_grad = (
        types.MethodType(step, optimizer),
        types.MethodType(zero_grad, optimizer),
    )


def spare_the_compiler(spare):
    """Lets optimizers work without importing torch._dynamo, which takes a second at the start of every run.

    Their methods import it only to tell the compiler to look away; each is told here that it needs no telling, or, for
    a module that is compiled, that it does.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        known = getattr(
            method, "__dynamo_disable", None
        )  # where torch._compile looks before it imports the compiler
        if spare and known is None:
            method.__dynamo_disable = method
        elif not spare and known is method:
            del method.__dynamo_disable


def decoupled_sgd(
    params,
    lr,
    batch_size,
    momentum=0.85,
    weight_decay=0.0153,
    bias_scale=64.0,
    fused=None,
    foreach=None,
):
    """A torch.optim.SGD with Nesterov momentum, on parameter groups, of a rate and a decay per 1,024 samples.

    `lr` is how far 1,024 samples of the same gradient move a weight, and `weight_decay` the share by which they shrink
    it, whatever the batch size and the momentum are and, for the decay, the rate. Biases and the weights of norms (one
    dimension) have `bias_scale` times the rate and the same decay. Jordan 2024, arXiv 2404.00498, section 3.4.
    """
    check_number("optimizer.lr", lr, above=0)
    check_number("optimizer.batch_size", batch_size, whole=True, least=1)
    check_number("optimizer.momentum", momentum, above=0, most=0.999)
    check_number("optimizer.weight_decay", weight_decay, least=0)
    check_number("optimizer.bias_scale", bias_scale, above=0)
    # The loss is a mean over the batch, and momentum repeats its gradient (so much, as the paper counts it).
    per_step = batch_size / 1024 / (1 + 1 / (1 - momentum))
    groups = []
    for group in params:
        matrices, vectors = (
            [p for p in group["params"] if (p.ndim > 1) is many] for many in (True, False)
        )
        for parameters, scale in ((matrices, 1.0), (vectors, bias_scale)):
            if parameters:
                rate, decay = (
                    lr * scale * per_step,
                    group.get("weight_decay", weight_decay) * per_step,
                )
                # torch's decay is times the rate.
                groups.append({"params": parameters, "lr": rate, "weight_decay": decay / rate})
    return torch.optim.SGD(
        groups, lr=lr * per_step, momentum=momentum, nesterov=True, fused=fused, foreach=foreach
    )
