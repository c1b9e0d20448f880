"""Start the processes of a run on this machine, and list the source files that they run."""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.command import invocation, signals
from stoker.trainer import launch
from stoker.trainer.errors import TrainingError, UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# The environment variable that tells processes of a sweep's job which job they run.
JOB = "STOKER_JOB"
PACKAGES = ("stoker", "stoker.trainer", "stoker.models", "stoker.data")


class JobFailed(TrainingError):
    """The processes of a sweep's job failed with this `code`. They have printed why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def count(strategy: str, devices: int | str, device: str) -> int:
    """Return how many processes to start for `devices`; 1 means none.

    Raises:
        UserError: `devices` or `strategy` cannot take effect.
    """
    name = strategy.partition(":")[0]
    if launch.world_size() > 1:
        check_among_several(strategy, name, devices)
        return 1
    if name not in launch.SEVERAL:
        if devices not in ("auto", 1):
            ways = " or ".join(f"strategy={way} devices={devices}" for way in launch.SEVERAL)
            raise UserError(
                f"devices={devices}: strategy={strategy} uses only one process. Type {ways}."
            )
        return 1
    if isinstance(devices, int):
        return devices
    if device == "cpu" or ":" in device:
        return 1
    import torch

    return max(1, torch.accelerator.device_count())


def check_among_several(strategy: str, name: str, devices: int | str) -> None:
    """Raise UserError for settings that cannot take effect under torchrun."""
    started = f"torchrun has started {launch.world_size()} processes"
    if name not in ("auto", *launch.SEVERAL):
        raise UserError(
            f"strategy={strategy}: {started}, and each would train by itself.\nType strategy=auto."
        )
    if devices != "auto" and os.environ.get("ROLE_NAME") != invocation.ROLE:
        raise UserError(
            f"devices={devices}: {started}. Remove devices; --nproc-per-node sets the number of "
            "processes."
        )


def job() -> Any:
    """Return the `of` that `start` passed to this process; None if it is not a job of a sweep."""
    if launch.world_size() > 1 and JOB in os.environ:
        return json.loads(os.environ[JOB])
    return None


def start(processes: int, arguments: Sequence[str], of: Any = None) -> int:
    """Run this program with these arguments in several processes, and return the exit code.

    The code is that of the rank that failed first, 3 if it was killed, or 128 plus the number of a
    signal. `job()` returns the plain value `of` in the processes.
    """
    import logging
    import uuid

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    environment = {
        "OMP_NUM_THREADS": str(max(1, launch.cores() // processes)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
    }
    if of is not None:
        environment[JOB] = json.dumps(of)
    added = [name for name in environment if name == JOB or name not in os.environ]
    os.environ.update({name: environment[name] for name in added})
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        role=invocation.ROLE,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    started = Path(sys.argv[0])
    is_script = started.name in (invocation.SCRIPT, "stoker") and started.is_file()
    program = [sys.argv[0]] if is_script else ["-m", "stoker"]
    logging.disable(logging.CRITICAL)  # torchrun's agent repeats the ranks' output
    try:
        elastic_launch(config, sys.executable)("-u", *program, *arguments)
        return 0
    except ChildFailedError as error:
        return code_of(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
        for name in added:
            del os.environ[name]
        signals.listen()  # the agent replaced the signal handlers


def code_of(error: "ChildFailedError") -> int:
    """Return the exit code for the agent's error, and name the rank unless another one did."""
    first, failure = error.get_first_failure()
    codes = [failed.exitcode for failed in error.failures.values()]
    if failure.exitcode < 0 and 3 not in codes:
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {first} (process {failure.pid}) was ended by {name}.", file=sys.stderr)
    return int(failure.exitcode) if failure.exitcode > 0 else 3


def source_files(packages: Collection[str] = ()) -> dict[str, bytes]:
    """Return {file: its bytes} of this program and of the imported modules of `packages`."""
    paths: dict[str, Path] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in Path(folder).rglob("*.py"):
                name = f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"
                paths[name] = path
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] in packages and file and file.endswith(".py"):
            paths[name] = Path(file)
    return {name: path.read_bytes() for name, path in sorted(paths.items()) if path.is_file()}
