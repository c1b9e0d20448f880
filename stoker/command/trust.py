"""The first check of a `_target_`: is it on the list of allowed names, or does the user trust it?

The second check is in build.py (PART_CLASSES, PART_PACKAGES): is it the right part of a run?
"""

import contextlib
import fnmatch
import inspect
import json
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException

from stoker import project
from stoker.command import arguments
from stoker.trainer.errors import UserError, did_you_mean, first_line

# A target that you type on the command line is always trusted. Your own target in a config file
# needs trusted=[mypackage] on the command line or in the project file.
TRUSTED = (
    "stoker",
    "torch.nn",
    "torch.optim",
    "torchvision.models",
    "torchvision.transforms.v2",
    "torchmetrics",
    "optuna.pruners",
)
# A target must also be defined in one of these modules (or a submodule), and be one of the listed
# functions or a subclass of a listed class. Checking names is not enough:
# torch.nn.modules.module.torch.load begins with torch.nn, and stoker.runs.json_files.write_json
# writes files. Other parts of torchmetrics download models, and need trusted=[torchmetrics].
CALLBACK = "stoker.trainer.callbacks.Callback"
DATASETS = ("digits", "mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100", "synthetic")
KINDS: dict[str, tuple[str, ...]] = {
    "torch.nn": ("torch.nn.Module",),
    "torch.optim": ("torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    "torchvision.models": (
        "torch.nn.Module",
    ),  # also functions that build a module; see is_builder
    "torchvision.transforms.v2": ("torchvision.transforms.v2.Transform",),
    "torchmetrics.aggregation": ("torchmetrics.Metric",),
    "torchmetrics.classification": ("torchmetrics.Metric",),
    "torchmetrics.regression": ("torchmetrics.Metric",),
    "optuna.pruners": ("optuna.pruners.BasePruner",),
    "stoker.trainer.trainer": ("stoker.Trainer",),
    "stoker.runs.loggers": (CALLBACK,),
    "stoker.diagnostics.timing": (CALLBACK,),
    "stoker.diagnostics.doctor": (CALLBACK,),
    "stoker.trainer.metrics": ("stoker.trainer.metrics.Sums",),
    "stoker.trainer.schedules": ("constant", "linear", "cosine", "wsd", "step"),
    "stoker.trainer.optimizers": ("decoupled_sgd",),
    "stoker.trainer.combined": ("muon",),
    "stoker.trainer": (CALLBACK,),
    "stoker.models": ("torch.nn.Module", CALLBACK),
    "stoker.data.datasets": DATASETS,
    "stoker.data.images": ("image_folder",),
    "stoker.data.tables": ("csv",),
    "stoker.data.text": ("text",),
}
UNKNOWN_NAME = (ImportError, ValueError, RecursionError)


def of_project() -> tuple[str, ...]:
    """Return the packages that the project file trusts; () in a script."""
    return project.current().trusted if HydraConfig.initialized() else ()


def patterns(packages: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return Hydra's patterns for `packages`, for `trusted=[...]`, and for typed targets."""
    result = [f"{package}.*" for package in packages]
    for override in typed:
        key, _, value = override.partition("=")
        names = re.findall(r"[\w.]+", value)
        if key == "trusted":
            result += [f"{name}.*" for name in names]
        elif key.endswith("_target_"):
            for name in names:
                result += [name, f"{name.partition('.')[0]}.*"]
    return result


@contextlib.contextmanager
def trusting(packages: Sequence[str]) -> Iterator[None]:
    """Trust these packages from Python, as trusted=[...] does on the command line."""
    typed = (f"trusted=[{','.join(packages)}]",) if packages else ()
    token = arguments.typed_in_python.set((*arguments.typed_in_python.get(), *typed))
    try:
        packages = (*TRUSTED, *of_project())
        with hydra.utils.execution_whitelist(patterns(packages, arguments.typed())):
            yield
    finally:
        arguments.typed_in_python.reset(token)


def is_trusted_by_user(target: str) -> bool:
    """Return whether the user typed this target or trusts the target's package."""
    allowed = patterns(of_project(), arguments.typed())
    return any(fnmatch.fnmatchcase(target, pattern) for pattern in allowed)


def own_packages(typed: Sequence[str]) -> list[str]:
    """Return the packages that are trusted only because the user typed them."""
    packages = {pattern.partition(".")[0] for pattern in patterns([], typed)}
    known = (*TRUSTED, *of_project())
    return sorted(packages - {package.partition(".")[0] for package in known})


def locate(key: str, target: str) -> Any:
    """Return the object that `_target_` names.

    Raises:
        UserError: the object does not exist, or is not trusted. Untrusted packages are not
            imported.
    """
    place = f"{key}._target_={target}"
    if "." not in target:
        raise UserError(
            f"{place}: expected the dotted name of a class or function, as in mine.Name."
        )
    check_trusted({key: target})
    try:
        located = hydra.utils.get_object(target)
    except InstantiationException:
        raise UserError(f"{place}: this target is never allowed.") from None
    except UNKNOWN_NAME as error:
        failure = error.__cause__ or error
        reason = first_line(failure).partition(";")[0].rstrip(".")
        line = failing_line(failure)
        if line is not None:
            kind = type(failure).__name__
            raise UserError(f"{place}: the import fails at {line}\n{kind}: {reason}") from error
        parent, _, name = target.rpartition(".")
        if parent in sys.modules:
            reason = f"{parent} has no {name!r}"
        raise UserError(f"{place}: {reason}.{advice_for(target)}") from error
    if not is_trusted_by_user(target) and not is_of_kind(located):
        raise UserError(
            f"{place}: this target is not trusted.\n"
            f"If you trust it, type {advice_to_trust([target])}."
        )
    return located


def check_trusted(targets: Mapping[str, str]) -> None:
    """Raise a UserError that names all targets whose packages are not trusted.

    `targets` is {key: target}. In the packages that are listed here, only some targets are trusted
    (see `locate`).
    """
    listed = tuple(f"{package}." for package in TRUSTED)
    wrong = {
        key: target
        for key, target in targets.items()
        if not is_trusted_by_user(target) and not target.startswith(listed)
    }
    if not wrong:
        return
    places = ", ".join(f"{key}._target_={target}" for key, target in wrong.items())
    advice = advice_to_trust(wrong.values())
    raise UserError(f"{places}: not trusted.\nIf it is your own code, type {advice}.")


def advice_to_trust(targets: Iterable[str]) -> str:
    """Return the setting that trusts these targets, for the shell or, in a script, for Python."""
    packages = sorted({target.partition(".")[0] for target in targets})
    if HydraConfig.initialized():
        return f"trusted=[{','.join(packages)}]"
    return f"trusted={json.dumps(packages)}"


def failing_line(error: BaseException) -> str | None:
    """Return "file:line" of the module whose import raised this error; None for other errors."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.name == "<module>":
            return f"{frame.filename}:{frame.lineno}"
    return None


def is_of_kind(located: Any) -> bool:
    """Return whether KINDS lists the object, or its base class, for its module."""
    module = getattr(located, "__module__", None) or ""
    if module.startswith("torchvision.models.") and is_builder(located):
        return True
    listed = (kinds for place, kinds in KINDS.items() if f"{module}.".startswith(f"{place}."))
    for kind in next(listed, ()):
        if "." not in kind:
            if getattr(sys.modules[module], kind, None) is located:
                return True
        elif isinstance(located, type) and issubclass(located, hydra.utils.get_object(kind)):
            return True
    return False


def is_builder(located: Any) -> bool:
    """Return whether this is a torchvision model builder, such as resnet18.

    Builders do not take paths.
    """
    if not inspect.isfunction(located):
        return False
    return list(inspect.signature(located).parameters)[:2] == ["weights", "progress"]


def advice_for(target: str) -> str:
    """Return advice for a target that does not exist, such as " Did you mean X?"."""
    parent, _, name = target.rpartition(".")
    top = target.partition(".")[0]
    if top not in sys.modules:
        return f"\nInstall {top}, or start Python in the folder that contains it."
    return did_you_mean(name, dir(sys.modules.get(parent)), shown=lambda near: f"{parent}.{near}")
