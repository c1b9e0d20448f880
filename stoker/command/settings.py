"""The table of settings: the limits and tasks of each key, and whether a resumed run may change it.

This is the only place that lists the keys. Their defaults and help texts are the values and
comments in configs/. The limits of constructor arguments come from `trainer/settings.py` and
`data/settings.py`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from stoker.data.settings import LIMITS as DATA_LIMITS
from stoker.trainer import launch
from stoker.trainer.errors import UserError, as_typed
from stoker.trainer.settings import (
    COUNT,
    COUNT_OR_NONE,
    LIMITS,
    Checked,
    Choice,
    Limit,
    Number,
    check_micro_batch,
)

TASKS = ("train", "plan", "evaluate", "predict", "generate", "export", "lr_find", "reproduce")
TRAINING = ("train", "plan", "lr_find")  # tasks that start from a config instead of a run
WITH_RUN = ("evaluate", "predict", "generate", "export", "reproduce")
TESTING = (*TRAINING, "evaluate")  # tasks that load data
READERS = (*TESTING, "predict")
MOVERS = (*TESTING, "export", "reproduce")  # tasks whose data may have moved since the run
# The keys of a data set that say how to read files.
READING_KEYS = ("missing", "delimiter", "decimal", "marks", "on_bad_sample")
# The keys of a data set that configure the loader.
LOADER_KEYS = ("augment", "resident", "workers", "timeout")
OBSERVERS = ("tensorboard", "wandb", "mlflow", "doctor", "timing")  # callbacks that only observe
TUNINGS = ("allocator", "threads")  # what `tune_process` may change for training on the CPU
FORMATS = ("onnx", "torch_export")  # what task=export writes


@dataclasses.dataclass(frozen=True)
class Text:
    """A string, kept exactly as typed: run_dir=1e3 names a folder."""

    def check(self, key: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise UserError(f"{key}={as_typed(value)}: expected a string.")
        if value == "":
            raise UserError(f"{key}=: type a string after the =, or remove {key}.")
        return value


@dataclasses.dataclass(frozen=True)
class Setting:
    """The rules for one key, or for all keys of one group.

    Attributes:
        limit: The allowed values. None if there is no limit, or if the limit belongs to the
            constructor argument that the key sets (see `limit_of`).
        tasks: The tasks that use the key.
        resume: Whether the value may change when a run resumes. "same": no. "longer": only in a
            new run that starts from a checkpoint of this one (`resume=FILE`). "any": yes, because
            the value does not affect the result.
        local: Whether the ranks of a run may have different values.
        once: Whether the key only matters at the start of a run. If so, the command that resumes
            the run omits it.
    """

    limit: Limit | None = None
    tasks: tuple[str, ...] = TRAINING
    resume: Literal["same", "longer", "any"] = "same"
    local: bool = False
    once: bool = False


def check_tune(parts: Any) -> Any:
    """Return `parts` if it is a list of TUNINGS, possibly empty; otherwise raise UserError."""
    is_list = isinstance(parts, (list, tuple))
    if not is_list or not all(part in TUNINGS for part in parts):
        raise UserError(
            f"tune={as_typed(parts)}: expected a list with any of {', '.join(TUNINGS)}, or [] for "
            "none."
        )
    return parts


def check_resume(resume: Any) -> Any:
    """Return `resume` if it is auto, never or a file; otherwise raise UserError."""
    if resume in ("auto", "never") or Path(as_typed(resume)).is_file():
        return resume
    raise UserError(f"resume={as_typed(resume)}: expected auto, never, or a checkpoint file.")


TEXT = Text()

COUNT_OR_AUTO = Number(whole=True, least=1, auto=True)
SAME = Setting()  # the value must stay the same when a run resumes
FREE = Setting(resume="any")  # the value does not affect the result

SETTINGS: Mapping[str, Setting] = {
    # what the command does
    "task": Setting(Choice(TASKS), TASKS, "any"),
    "run": Setting(TEXT, WITH_RUN, "any"),
    "split": Setting(TEXT, ("evaluate", "predict"), "any"),
    "input": Setting(TEXT, ("predict",), "any"),
    "output": Setting(TEXT, ("predict", "export"), "any"),
    "format": Setting(Choice(FORMATS), ("export",), "any"),
    "prompt": Setting(TEXT, ("generate",), "any"),
    "tokens": Setting(COUNT_OR_NONE, ("generate",), "any"),
    "temperature": Setting(Number(least=0, optional=True), ("generate",), "any"),
    "top_k": Setting(COUNT_OR_NONE, ("generate",), "any"),
    "model_summary": FREE,
    "profile": Setting(tasks=("train",), resume="any"),
    "overfit": Setting(COUNT_OR_NONE, ("train",), "any"),
    "debug": Setting(tasks=TASKS, resume="any"),
    # training
    "epochs": Setting(resume="longer"),
    "max_steps": Setting(resume="longer"),
    "steps_per_epoch": SAME,
    "max_minutes": FREE,
    "batch_size": SAME,
    "eval_batch_size": Setting(tasks=READERS, resume="any"),
    "drop_last": SAME,
    "limit_train": SAME,
    "limit_val": SAME,
    "grad_accum_steps": SAME,
    "micro_batch": SAME,
    "activation_checkpointing": FREE,
    "max_grad_norm": SAME,
    "groups": SAME,
    "freeze": SAME,
    "ema": SAME,
    "patience": Setting(resume="longer"),
    "monitor": Setting(TEXT),
    "monitor_mode": SAME,
    "seed": Setting(tasks=(*TRAINING, "generate")),
    # the machine
    "device": Setting(tasks=TASKS, resume="any", local=True),
    "strategy": FREE,
    "devices": Setting(COUNT_OR_AUTO, resume="any"),
    "rank_timeout": Setting(Number(above=0, most=86400), resume="any"),
    "precision": SAME,
    "compile": SAME,
    "channels_last": SAME,
    "tune": Setting(Checked(check_tune)),
    "deterministic": SAME,
    # logging, evaluation and checkpoints
    "log_every": FREE,
    "eval_every": FREE,
    "checkpoint.every": FREE,
    "checkpoint.epochs": FREE,
    "checkpoint.minutes": FREE,
    "checkpoint.keep": FREE,
    "report": Setting(tasks=(*TRAINING, "reproduce"), resume="any"),
    "run_dir": Setting(TEXT, (*TRAINING, "reproduce"), "any"),
    "init_from": Setting(TEXT),
    "resume": Setting(Checked(check_resume), resume="any", once=True),
    "overwrite": Setting(resume="any", once=True),
    "trusted": Setting(tasks=TASKS, resume="any"),
    # sweeps
    "sweep": Setting(resume="any", once=True),
    "sweep.at_once": Setting(COUNT_OR_AUTO, resume="any", once=True),
    "sweep.trials": Setting(COUNT, resume="any", once=True),
    "sweep.on_error": Setting(Choice(("continue", "stop")), resume="any", once=True),
    # groups; the other keys in a group are arguments of its _target_
    "dataset": Setting(tasks=TESTING),
    "dataset.root": Setting(TEXT, tasks=MOVERS, resume="any", local=True),
    "dataset.path": Setting(TEXT, tasks=MOVERS, resume="any", local=True),
    "dataset.cache": Setting(tasks=TESTING, resume="any", local=True),
    "dataset.download": Setting(tasks=TESTING, resume="any"),
    **{f"dataset.{key}": Setting(tasks=READERS) for key in READING_KEYS},
    "dataset.augment": SAME,
    "dataset.resident": Setting(tasks=TESTING, resume="any"),
    "dataset.workers": Setting(tasks=TESTING, resume="any", local=True),
    "dataset.timeout": Setting(tasks=TESTING, resume="any"),
    "model": SAME,
    "loss": SAME,
    "optimizer": SAME,
    "scheduler": SAME,
    "trainer": SAME,
    "metrics": SAME,
    "callbacks": SAME,
    "callbacks.freeze.thaw_at": SAME,
    "callbacks.lookahead.every": SAME,
    **{f"callbacks.{name}": FREE for name in OBSERVERS},
}
GROUP_OF_MANY = "callbacks"  # the group that takes several options, as a list
# Other names that people type for a key.
ALIASES = {
    "max_epochs": "epochs",
    "early_stopping": "patience",
    "learning_rate": "optimizer.lr",
    "n_trials": "sweep.trials",
}


def limit_of(key: str) -> Limit | None:
    """Return the limit of a key, from its record or from the constructor argument it sets."""
    return record(key).limit or LIMITS.get(key) or DATA_LIMITS.get(key)


def record(key: str) -> Setting:
    """Return the record of `key`, or of the nearest group that contains it."""
    key = key.replace("/", ".")  # nested groups are typed with a slash, as in sweep/pruner
    while key:
        if key in SETTINGS:
            return SETTINGS[key]
        key = key.rpartition(".")[0]
    return Setting()


def may_differ(key: str, *, longer: bool = False) -> bool:
    """Return whether a resumed run may change `key`.

    Set `longer` if the run was started with `resume=FILE`.
    """
    resume = record(key).resume
    return resume == "any" or (longer and resume == "longer")


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in nested mappings; None if it is missing."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def check(key: str, value: Any) -> Any:
    """Return `value` if it is within the limits of `key`; otherwise raise UserError."""
    limit = limit_of(key)
    return value if limit is None else limit.check(key, value)


def check_all(config: Mapping[str, Any]) -> None:
    """Raise UserError for the first setting that is outside its limits or conflicts with others."""
    for key in SETTINGS:
        value = value_of(config, key)
        # null turns an optional feature off. For other keys, the constructor rejects null.
        if value is not None or isinstance(limit_of(key), Checked):
            check(key, value)
    check_micro_batch(config.get("micro_batch"), config.get("grad_accum_steps") or 1)
    check_together(config)


def check_together(values: Mapping[str, Any]) -> None:
    """Raise UserError for settings that conflict, or that do not work with several processes."""
    strategy = values.get("strategy")
    devices = values.get("devices", "auto")
    started = 1  # processes that this process starts
    if strategy in launch.SEVERAL and devices != "auto":
        started = devices
    if strategy == "fsdp" and values.get("compile"):
        raise UserError(
            "strategy=fsdp: a sharded model cannot be compiled, but "
            f"compile={as_typed(values['compile'])} is set.\nType compile=false or strategy=ddp."
        )
    if values.get("activation_checkpointing") and values.get("compile"):
        raise UserError(
            "activation_checkpointing=true: torch.compile already decides what to recompute. "
            "Remove activation_checkpointing, or type compile=false."
        )
    if values.get("micro_batch") == "auto" and max(started, launch.world_size()) > 1:
        raise UserError(
            "micro_batch=auto works only with a single process, because all processes must split a "
            "batch in the same way. Type micro_batch=N."
        )
    batch_size = values.get("batch_size")
    if batch_size and batch_size < started:
        raise UserError(
            f"batch_size={batch_size}: this is too small for {started} processes. "
            f"Type batch_size={started} or more, or reduce devices."
        )


def check_task(config: Mapping[str, Any]) -> None:
    """Raise UserError for a key that only other tasks use."""
    for key, setting in SETTINGS.items():
        value = value_of(config, key)
        everywhere = set(TRAINING) <= set(setting.tasks)
        if everywhere or config["task"] in setting.tasks or value in (None, False):
            continue
        tasks = " or ".join(setting.tasks)
        raise UserError(f"{key}={as_typed(value)} applies only to task={tasks}.")
    if config.get("profile") and config.get("overfit") is not None:
        raise UserError(
            "profile=true needs a training run and cannot be combined with "
            f"overfit={config['overfit']}."
        )
