"""What the settings may be, so far as that is known without torch: one table for command line and constructors."""

import re
from pathlib import Path

from stoker.trainer import launch
from stoker.trainer.errors import UserError, as_typed, check_choice, check_number, did_you_mean

CHOICES = {
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "compile": (False, True, "graph"),
    "profile": (False, True),
    "debug": (False, True),
    "channels_last": ("auto", True, False),
    "monitor_mode": ("auto", "min", "max"),
    "tune": ("allocator", "threads"),
    "dataset.resident": ("auto", True, False),
    "report": ("auto", True, False),
    "sweep.on_error": ("continue", "stop"),
    "split": ("train", "val", "test", "all"),
    "format": ("onnx", "torch_export", "safetensors"),
}
OF_TASKS = {  # what only these tasks have a use for
    "run": ("evaluate", "predict", "export"),
    "split": ("evaluate",),
    "input": ("predict",),
    "output": ("predict", "export"),
    "format": ("export",),
    "profile": ("train",),
    "overfit": ("train",),
}
WHOLE = {"whole": True, "least": 1}
NUMBERS = {
    "epochs": WHOLE,
    "max_steps": WHOLE | {"optional": True},
    "max_minutes": {"above": 0},
    "overfit": WHOLE | {"optional": True},
    "batch_size": WHOLE,
    "eval_batch_size": WHOLE,
    "grad_accum_steps": WHOLE,
    "max_grad_norm": {"above": 0, "optional": True},
    "ema": {"above": 0, "most": 1},
    "patience": WHOLE,
    "seed": {"whole": True, "least": 0},
    "rank_timeout": {"above": 0, "most": 86400},
    "log_every": WHOLE,
    "eval_every": WHOLE | {"optional": True},
    "checkpoint.every": WHOLE | {"optional": True},
    "checkpoint.epochs": WHOLE | {"optional": True},
    "checkpoint.minutes": {"above": 0, "optional": True},
    "checkpoint.keep": {"whole": True, "least": 2},
    "sweep.per_gpu": WHOLE,
    "sweep.trials": WHOLE,
}
AUTO = {"sweep.at_once": WHOLE}  # or auto
KEYS = [*NUMBERS, *AUTO, *CHOICES]
AUGMENTATIONS = ("flip", "shift", "crop", "cutout", "mixup", "cutmix")
# What debug=true runs with, in place of what these keys say.
DEBUG = {
    "device": "cpu",
    "strategy": "single",
    "devices": "auto",
    "compile": False,
    "dataset.workers": 0,
}
# Kinds of devices that torch has names for; which of them are there, only torch knows.
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "xla")
GPUS = ("auto", "cuda", "xpu")  # those of which a machine may have several
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
STRATEGIES = ("auto", "single", "dp", "ddp", "fsdp")


def check(key, value, **more):
    """`value`, if it is one that the table has for `key`; UserError otherwise. `more` are check_number's."""
    if key in NUMBERS:
        return check_number(key, value, **NUMBERS[key] | more)
    if key in AUTO:
        if isinstance(value, str) and value != "auto":
            raise UserError(
                f"{key}={value}: give a whole number at least 1, or auto.{did_you_mean(value, ('auto',))}"
            )
        return value if value == "auto" else check_number(key, value, **AUTO[key])
    if key == "tune":
        if not isinstance(value, (list, tuple)):
            names = ", ".join(CHOICES[key])
            raise UserError(f"tune={as_typed(value)}: give a list of {names}, or [] for nothing.")
        return [check_choice(key, part, CHOICES[key]) for part in value]
    return check_choice(key, value, CHOICES[key])


def check_device(device):
    """UserError for what is no name of a device on any machine."""
    kind = as_typed(device).partition(":")[0]
    if kind not in DEVICES or not re.fullmatch(r"(\w+:\d+)|[a-z]+", as_typed(device)):
        hint = " Did you mean 'cuda'?" if kind.lower() == "gpu" else did_you_mean(kind, DEVICES)
        raise UserError(
            f"device={as_typed(device)}: there is no such device.{hint}\nType device=auto, or as in cuda:1."
        )


def check_strategy(strategy):
    """(its name, the GPUs listed or None) of `auto`, `dp:0+1` and so on; UserError for anything else."""
    name, _, listed = as_typed(strategy).partition(":")
    if name not in STRATEGIES or (listed and name != "dp"):
        raise UserError(
            f"strategy={as_typed(strategy)}: there is no such strategy.{did_you_mean(name, STRATEGIES)}\n"
            "Type strategy=auto, single, dp, dp:0+1, ddp or fsdp."
        )
    if listed and not re.fullmatch(r"[0-9]{1,4}(\+[0-9]{1,4})*", listed):
        raise UserError(
            f"strategy={strategy}: the GPUs are numbers joined by +, as in strategy=dp:0+1."
        )
    return name, [int(index) for index in listed.split("+")] if listed else None


def check_devices(devices):
    """`devices`, if it is auto or a whole number from 1 on; UserError otherwise."""
    if isinstance(devices, str) and devices != "auto":
        hint = did_you_mean(devices, ("auto",))
        raise UserError(f"devices={devices}: give auto, or a whole number at least 1.{hint}")
    return devices if devices == "auto" else check_number("devices", devices, **WHOLE)


def check_together(config):
    """UserError for settings that several processes, or sharded weights, cannot have beside their strategy."""
    (name, _), devices = check_strategy(config.get("strategy")), config.get("devices", "auto")
    started = devices if name in launch.SEVERAL and devices != "auto" else 1  # by this process
    if name == "fsdp" and config.get("compile"):
        raise UserError(
            f"strategy=fsdp: sharded parameters are not compiled, and there is compile={as_typed(config['compile'])}.\n"
            "Type compile=false or strategy=ddp."
        )
    if config.get("micro_batch") == "auto" and max(started, launch.world_size()) > 1:
        raise UserError(
            "micro_batch=auto: several processes have to cut a batch alike. Type micro_batch=N."
        )
    if (config.get("batch_size") or started) < started:
        what = f"{started} processes cannot share such a batch. Type batch_size={started} or more, or lower devices"
        raise UserError(f"batch_size={config['batch_size']}: {what}.")


def check_micro_batch(size, parts=1):
    """`size`, if it is auto, a whole number or None, and only one of it and `grad_accum_steps` cuts the batch."""
    if size is not None and parts > 1:
        raise UserError(
            f"micro_batch={as_typed(size)} and grad_accum_steps={parts} both cut the batch. Type one of them."
        )
    if isinstance(size, str) and size != "auto":
        hint = did_you_mean(size, ("auto",))
        raise UserError(f"micro_batch={size}: give auto, a whole number at least 1, or null.{hint}")
    return (
        size
        if size == "auto"
        else check_number("micro_batch", size, whole=True, least=1, optional=True)
    )


def check_augmentation(name):
    """`name`, if there is such an augmentation; UserError otherwise."""
    if not isinstance(name, str) or name not in AUGMENTATIONS:
        hint = did_you_mean(name, AUGMENTATIONS)
        raise UserError(
            f"dataset.augment={as_typed(name)}: there is no such augmentation.{hint}\n"
            f"Type a list of {', '.join(AUGMENTATIONS)}."
        )
    return name


def check_task(config):
    """UserError for a key that only other tasks have a use for."""
    for key, tasks in OF_TASKS.items():
        if config.get(key) not in (None, False) and config["task"] not in tasks:
            hint = " To name the folder of a new run, type run_dir=DIR." if key == "run" else ""
            raise UserError(
                f"{key}={as_typed(config[key])} is for task={' or '.join(tasks)}.{hint}"
            )
    if config.get("profile") and config.get("overfit") is not None:
        raise UserError(
            f"profile=true is for a run, and overfit={config['overfit']} is none. Leave out one of them."
        )


def check_debug(config, typed):
    """UserError where one of the `typed` keys says otherwise than debug=true."""
    for key, value in DEBUG.items():
        group, _, name = key.partition(".")
        given = config[group][name] if name else config[group]
        if key in typed and given not in (value, "auto"):
            raise UserError(
                f"debug=true is {key}={as_typed(value)}, and there is {key}={as_typed(given)}. Leave out one of them."
            )
    if launch.world_size() > 1:
        raise UserError("debug=true is for one process. Type python train.py, without torchrun.")


def check_parts(config):
    """UserError for values in our own groups, and in those of torch's optimizers, that their constructors refuse."""
    optimizer, model, dataset = (config[group] for group in ("optimizer", "model", "dataset"))
    own = str(optimizer.get("_target_")).startswith(
        "stoker.trainer.optimizers."
    )  # divides by the rate
    if own or str(optimizer.get("_target_")).startswith("torch.optim."):
        if "lr" in optimizer:
            check_number("optimizer.lr", optimizer["lr"], **({"above": 0} if own else {"least": 0}))
        if "weight_decay" in optimizer:
            check_number("optimizer.weight_decay", optimizer["weight_decay"], least=0)
    if str(model.get("_target_")).startswith("stoker.models.") and "dropout" in model:
        check_number("model.dropout", model["dropout"], least=0, most=0.95)
    if dataset.get("workers", "auto") != "auto":
        check_number("dataset.workers", dataset["workers"], whole=True, least=0)
    for item in dataset.get("augment") or ():
        if (
            not isinstance(item, dict) or "_target_" not in item
        ):  # with a _target_: a function of the user's own
            for name in item if isinstance(item, dict) else [item]:
                check_augmentation(name)


def check_resume(resume):
    """UserError where `resume` is neither auto nor never nor a file."""
    if resume not in ("auto", "never") and isinstance(resume, str) and Path(resume).is_dir():
        found = [*Path(resume).glob("step_*.ckpt"), *Path(resume).glob("checkpoints/step_*.ckpt")]
        found.sort(key=lambda path: (len(path.name), path.name))
        what = (
            f"Type resume={found[-1]}."
            if found
            else "Type resume=FILE; there is no checkpoint in it."
        )
        raise UserError(f"resume={resume}: this is a folder. {what}")
    if resume not in ("auto", "never") and not (isinstance(resume, str) and Path(resume).is_file()):
        hint = did_you_mean(as_typed(resume), ("auto", "never"))
        raise UserError(
            f"resume={as_typed(resume)}: there is no such file.{hint} Type auto, never, or a checkpoint file."
        )


TEXTS = ("run", "run_dir", "resume", "monitor", "input", "output")


def check_all(config):
    """UserError for the first of a config's settings that cannot be; null leaves one at what it is."""
    values = {
        **config,
        **{key: config[key.split(".")[0]].get(key.split(".")[1]) for key in KEYS if "." in key},
    }
    for key in KEYS:
        if values.get(key) is not None:
            check(key, values[key])
    for key in TEXTS:
        if not isinstance(values.get(key), (str, int, float, type(None))) or isinstance(
            values.get(key), bool
        ):
            what = "auto, never, or a checkpoint file" if key == "resume" else "a text"
            raise UserError(f"{key}={as_typed(values[key])}: give {what}.")
        if values.get(key) == "":
            raise UserError(f"{key}=: give a text after the =, or leave {key} out.")
    check_device(values.get("device"))
    check_strategy(values.get("strategy"))
    check_devices(values.get("devices", "auto"))
    check_resume(values.get("resume"))
    check_micro_batch(values.get("micro_batch"), values.get("grad_accum_steps") or 1)
    check_together(values)
    check_parts(config)
