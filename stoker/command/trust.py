"""Check a `_target_`: may a config build it for this part of a run, or does the user trust it?"""

import contextlib
import fnmatch
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException

from stoker import project
from stoker.command import arguments
from stoker.trainer.errors import UserError, cause, did_you_mean, with_article

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
# The base classes of each part of a run. Unless you trust it, a target of any other class is not
# called, because it could allocate unbounded memory before it is rejected.
CALLBACK = "stoker.trainer.callbacks.Callback"
PART_CLASSES: dict[str, tuple[str, ...]] = {
    "dataset": ("stoker.data.record.Data",),
    "dataset.augment": ("torchvision.transforms.v2.Transform",),
    "model": ("torch.nn.Module",),
    "loss": ("torch.nn.Module",),
    "optimizer": ("torch.optim.Optimizer",),
    "scheduler": ("torch.optim.lr_scheduler.LRScheduler",),
    "metrics": (
        "torchmetrics.Metric",
        "stoker.trainer.metrics.Sums",
        "stoker.trainer.metrics.Mean",
    ),
    "callbacks": (CALLBACK,),
    "checkpoint": (CALLBACK,),
    "trainer": ("stoker.Trainer",),
    "sweep": ("optuna.pruners.BasePruner",),
}
# A class must also be defined in one of these modules. Checking names is not enough:
# torch.nn.modules.module.torch.load begins with torch.nn, and stoker.runs.json_files.write_json
# writes files. Other parts of torchmetrics download models, and need trusted=[torchmetrics].
MODULES = (
    "torch.nn.",
    "torch.optim.",
    "torchvision.models.",
    "torchvision.transforms.v2.",
    "torchmetrics.aggregation.",
    "torchmetrics.classification.",
    "torchmetrics.regression.",
    "optuna.pruners.",
    "stoker.models.",
    "stoker.trainer.callbacks.",
    "stoker.trainer.metrics.",
    "stoker.trainer.trainer.",
    "stoker.runs.loggers.",
    "stoker.diagnostics.timing.",
    "stoker.diagnostics.doctor.",
)
# The functions that build a part; for the model, also the builders of torchvision.
FUNCTIONS = {
    "dataset": (
        "stoker.data.datasets.digits",
        "stoker.data.datasets.mnist",
        "stoker.data.datasets.fashion_mnist",
        "stoker.data.datasets.cifar10",
        "stoker.data.datasets.cifar100",
        "stoker.data.datasets.synthetic",
        "stoker.data.images.image_folder",
        "stoker.data.tables.csv",
        "stoker.data.text.text",
    ),
    "optimizer": ("stoker.trainer.optimizers.decoupled_sgd", "stoker.trainer.combined.muon"),
    "scheduler": (
        "stoker.trainer.schedules.constant",
        "stoker.trainer.schedules.linear",
        "stoker.trainer.schedules.cosine",
        "stoker.trainer.schedules.wsd",
        "stoker.trainer.schedules.step",
    ),
}
UNKNOWN_NAME = (ImportError, ValueError, RecursionError)


def of_project() -> tuple[str, ...]:
    """Return the packages that the project file trusts; () in a script."""
    return project.current().trusted if HydraConfig.initialized() else ()


def trusted_in(typed: Sequence[str]) -> list[str]:
    """Return the packages that `trusted=[...]` lists among the typed settings."""
    lists = [override for override in typed if override.startswith("trusted=")]
    return re.findall(r"[\w.]+", " ".join(lists).replace("trusted=", ""))


def patterns(packages: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return Hydra's patterns for `packages`, for `trusted=[...]`, and for typed targets."""
    result = [f"{package}.*" for package in (*packages, *trusted_in(typed))]
    for override in typed:
        key, _, value = override.partition("=")
        if key.endswith("_target_"):
            for name in re.findall(r"[\w.]+", value):
                result += [name, f"{name.partition('.')[0]}.*"]
    return result


@contextlib.contextmanager
def trusting(packages: Sequence[str]) -> Iterator[None]:
    """Trust these packages from Python, as trusted=[...] does on the command line."""
    typed = f"trusted=[{','.join(packages)}]"
    token = arguments.typed_in_python.set((*arguments.typed_in_python.get(), typed))
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
    # In the listed packages, only some targets are trusted, which is checked below.
    listed = tuple(f"{package}." for package in TRUSTED)
    if not is_trusted_by_user(target) and not target.startswith(listed):
        raise UserError(
            f"{place}: not trusted.\nIf it is your own code, type {trusting_setting(target)}."
        )
    try:
        located = hydra.utils.get_object(target)
    except InstantiationException:
        raise UserError(f"{place}: this target is never allowed.") from None
    except UNKNOWN_NAME as error:
        failure = error.__cause__ or error
        parent, _, name = target.rpartition(".")
        if parent in sys.modules:
            names = dir(sys.modules[parent])
            hint = did_you_mean(name, names, shown=lambda near: f"{parent}.{near}")
            reason = f"{parent} has no {name!r}.{hint}"
        elif isinstance(failure, ModuleNotFoundError) and target.startswith(f"{failure.name}."):
            reason = f"{failure}."  # No module named 'mine'
            if "." not in str(failure.name):
                reason += (
                    f"\nInstall {failure.name}, or start Python in the folder that contains it."
                )
        else:
            reason = f"the import fails.\n{cause(failure)}"
        raise UserError(f"{place}: {reason}") from error
    part = part_of(key)
    if not is_trusted_by_user(target) and not builds(part, located):
        raise UserError(
            f"{place}: this is not known to return {with_article(PART_CLASSES[part][0])}.\n"
            f"If it does and you trust it, type {trusting_setting(target)}."
        )
    return located


def trusting_setting(target: str) -> str:
    """Return the setting that trusts the package of a target too, for a shell and for Python."""
    packages = [*trusted_in(arguments.typed()), target.partition(".")[0]]
    quoted = ",".join([f'"{package}"' for package in packages])
    return f"trusted=[{quoted}]"


def part_of(key: str) -> str:
    """Return the part of a run that a key belongs to, such as "metrics" for "metrics.top3"."""
    if f"{key}.".startswith("dataset.augment."):
        return "dataset.augment"
    return key.partition(".")[0]


def builds(part: str, located: Any) -> bool:
    """Return whether the tables above allow a class or function for this part of a run."""
    module = f"{getattr(located, '__module__', None)}."
    if isinstance(located, type):
        return module.startswith(MODULES) and issubclass(located, classes_of(part))
    if not inspect.isfunction(located):
        return False
    if part == "model" and module.startswith("torchvision.models."):
        # A builder such as resnet18, which does not take a path.
        return list(inspect.signature(located).parameters)[:2] == ["weights", "progress"]
    return module + located.__qualname__ in FUNCTIONS.get(part, ())


def classes_of(part: str) -> tuple[type, ...]:
    """Return the allowed classes of a part, except those whose library has not been imported."""
    return tuple(
        hydra.utils.get_object(name)
        for name in PART_CLASSES[part]
        if name.partition(".")[0] in sys.modules
    )
