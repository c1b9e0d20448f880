"""What the settings may be, so far as that is known without torch: one table for command line and constructors."""

import re
from pathlib import Path

from trainer.errors import UserError, as_typed, check_choice, check_number, did_you_mean

CHOICES = {
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "compile": (False, True, "graph"),
    "channels_last": ("auto", True, False),
    "monitor_mode": ("auto", "min", "max"),
    "tune": ("allocator", "linear", "threads"),
    "dataset.resident": ("auto", True, False),
}
WHOLE = {"whole": True, "least": 1}
NUMBERS = {
    "epochs": WHOLE,
    "max_steps": WHOLE | {"optional": True},
    "max_minutes": {"above": 0},
    "batch_size": WHOLE,
    "eval_batch_size": WHOLE,
    "grad_accum_steps": WHOLE,
    "max_grad_norm": {"above": 0, "optional": True},
    "ema": {"above": 0, "most": 1},
    "patience": WHOLE,
    "seed": {"whole": True, "least": 0},
    "log_every": WHOLE,
    "eval_every": WHOLE | {"optional": True},
    "checkpoint.every": WHOLE | {"optional": True},
    "checkpoint.epochs": WHOLE | {"optional": True},
    "checkpoint.minutes": {"above": 0, "optional": True},
    "checkpoint.keep": {"whole": True, "least": 2},
}
KEYS = [*NUMBERS, *CHOICES]
# Kinds of devices that torch has names for; which of them are there, only torch knows.
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "xla")
STRATEGIES = ("single", "dp")


def check(key, value, **more):
    """`value`, if it is one that the table has for `key`; UserError otherwise. `more` are check_number's."""
    if key in NUMBERS:
        return check_number(key, value, **NUMBERS[key] | more)
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
        hint = did_you_mean(kind, DEVICES)
        raise UserError(
            f"device={as_typed(device)}: there is no such device.{hint}\nType device=auto, or as in cuda:1."
        )


def check_strategy(strategy):
    """(its name, the GPUs listed or None) of `single`, `dp` or `dp:0+1`; UserError for anything else."""
    name, _, listed = as_typed(strategy).partition(":")
    if name not in STRATEGIES or (listed and name == "single"):
        raise UserError(
            f"strategy={as_typed(strategy)}: there is no such strategy.{did_you_mean(name, STRATEGIES)}\n"
            "Type strategy=single, dp or dp:0+1."
        )
    if listed and not re.fullmatch(r"[0-9]{1,4}(\+[0-9]{1,4})*", listed):
        raise UserError(f"strategy={strategy}: the GPUs are numbers joined by +, as in strategy=dp:0+1.")
    return name, [int(index) for index in listed.split("+")] if listed else None


def check_resume(resume):
    """UserError where `resume` is neither auto nor never nor a file."""
    if resume not in ("auto", "never") and not (isinstance(resume, str) and Path(resume).is_file()):
        hint = did_you_mean(as_typed(resume), ("auto", "never"))
        raise UserError(
            f"resume={as_typed(resume)}: there is no such file.{hint} Type auto, never, or a checkpoint file."
        )


def check_all(config):
    """UserError for the first of a config's settings that cannot be; null leaves one at what it is."""
    values = {**config, **{key: config[key.split(".")[0]].get(key.split(".")[1]) for key in KEYS if "." in key}}
    for key in KEYS:
        if values.get(key) is not None:
            check(key, values[key])
    for key in ("run", "run_dir", "resume", "monitor"):
        if not isinstance(values.get(key), (str, int, float, type(None))) or isinstance(values.get(key), bool):
            raise UserError(f"{key}={as_typed(values[key])}: give a text.")
    check_device(values.get("device"))
    check_strategy(values.get("strategy"))
    check_resume(values.get("resume"))
