"""Every private name of a library that the package uses, in one place, with the reason."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("stoker", "trainer", "models", "data", "configs")

# {(file, name): why nothing public will do}; seen with torch 2.15, Hydra 1.4 and Python 3.11.
PRIVATE = {
    ("data/workers.py", "_timeout"): "the time limit of one iterator of a DataLoader",
    ("data/workers.py", "_workers"): "the processes of an iterator, to end them in order",
    ("stoker/command/arguments.py", "hydra._internal.utils"): "the values of Hydra's options",
    ("stoker/diagnostics/layers.py", "_FlopCounterMode"): "counting without torch._dynamo (2 s)",
    ("stoker/sweeps/launchers.py", "hydra._internal.core_plugins.basic_launcher"): "one job",
    ("stoker/sweeps/optuna_search.py", "hydra_plugins.hydra_optuna_sweeper._impl"): "its ranges",
    ("stoker/sweeps/sweep.py", "hydra._internal.core_plugins.basic_sweeper"): "the jobs of a grid",
    ("stoker/command/ranks.py", "_run_exitfuncs"): "exit handlers before os._exit",
    ("trainer/device.py", "_C"): "which kernels a device has",
    ("trainer/device.py", "_dispatch_has_kernel_for_dispatch_key"): "which kernels it has",
    ("trainer/device.py", "_dispatch_key_for_device"): "the name of its kernels",
    ("trainer/loading.py", "_next_data"): "a batch of a DataLoader, without a profiler's name",
    ("trainer/optimizers.py", "_global_optimizer_post_hooks"): "whether all optimizers have hooks",
    ("trainer/optimizers.py", "_global_optimizer_pre_hooks"): "whether all optimizers have hooks",
    ("trainer/optimizers.py", "_optimizer_step_post_hooks"): "whether a step has hooks",
    ("trainer/optimizers.py", "_optimizer_step_pre_hooks"): "whether a step has hooks",
    ("trainer/optimizers.py", "_step_supports_amp_scaling"): "whether it unscales by itself",
    ("trainer/parallel.py", "_compiled_call_impl"): "whether a module is compiled",
    ("trainer/seeding.py", "_inst"): "the generator of Python, to seed it without checks",
    ("trainer/spans.py", "_profiler_enabled"): "whether a profiler wants to see batches and steps",
    ("trainer/steps.py", "_get_scale_async"): "the scale of fp16, without waiting for the device",
}
PUBLIC = {
    "_exit",
    "_fields",
    "_target_",
    "_partial_",
    "_args_",
}  # documented, whatever they look like


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_names(tree):
    """Yield the private attributes of anything but `self`, and the private modules imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module:
            if any(map(is_private, node.module.split("."))):
                yield node.module
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = node.func.id in ("getattr", "setattr", "hasattr") and len(node.args) > 1
            if named and isinstance(node.args[1], ast.Constant) and is_private(node.args[1].value):
                yield node.args[1].value


def test_the_list_of_private_names_is_complete():
    used = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert used == set(PRIVATE)
