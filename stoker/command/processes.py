"""Start the processes of a run on this machine, and read the source code that they run."""

import functools
import importlib.resources
import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.command import invocation, signals
from stoker.trainer import launch
from stoker.trainer.errors import TrainingError, UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# The environment variable that tells the processes of a sweep job which job they run.
JOB = "STOKER_JOB"
PACKAGES = ("stoker", "stoker.trainer", "stoker.models", "stoker.data")


class JobFailed(TrainingError):
    """The processes of a sweep job failed with this exit code. They have printed the reason."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def count(strategy: str, devices: int | str, device: str) -> int:
    """Return how many processes to start; 1 means that this process trains on its own.

    Raises:
        UserError: `devices` or `strategy` cannot take effect.
    """
    if launch.world_size() > 1:
        if devices != "auto" and not invocation.is_started():
            raise UserError(
                f"devices={devices}: torchrun has started {launch.world_size()} processes.\n"
                "Remove this setting; --nproc-per-node sets the number of processes."
            )
        return 1
    if strategy not in launch.SEVERAL:
        if devices not in ("auto", 1):
            raise UserError(
                f"devices={devices}: strategy={strategy} uses only one process. "
                f"Type strategy=ddp devices={devices}."
            )
        return 1
    if isinstance(devices, int):
        return devices
    return count_gpus(device) or 1


def count_gpus(device: str) -> int:
    """Return the number of GPUs that several processes with this `device` can use."""
    if device == "cpu" or ":" in device:
        return 0
    import torch

    return torch.accelerator.device_count()


@functools.cache
def job() -> dict[str, Any]:
    """Return the sweep job for which this process was started; {} if there is none.

    The variable is removed, because the programs that a job starts are not jobs.
    """
    return dict(json.loads(os.environ.pop(JOB, "{}")))


def start(processes: int, arguments: Sequence[str], of: Any = None) -> int:
    """Run this program with these arguments in several processes, and return the exit code.

    If a rank fails, return the code of the first rank that failed, or 3 if that rank was killed.
    After a signal, return 128 plus the number of the signal. In the new processes, `job()` returns
    `of`, which must be a plain value.
    """
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, launch.cores() // processes)))
    # After a rank fails, the agent waits this many seconds before it kills the other ranks.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "25")
    if of is not None:
        os.environ[JOB] = json.dumps(of)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="stoker",
        role=invocation.ROLE,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    logging.disable(logging.CRITICAL)  # the torchrun agent's log repeats the ranks' output
    try:
        elastic_launch(config, sys.executable)("-u", *invocation.script(), *arguments)
        return 0
    except ChildFailedError as error:
        return code_of(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(before)
        signals.install()  # the agent replaced the signal handlers


def code_of(error: "ChildFailedError") -> int:
    """Return the exit code for the agent's error. If a rank was killed, print which one.

    Print nothing if a rank has already printed a message.
    """
    first, failure = error.get_first_failure()
    codes = [failed.exitcode for failed in error.failures.values()]
    if failure.exitcode < 0 and 3 not in codes:
        killed = f"rank {first} (process {failure.pid}) was killed by {failure.signal_name()}"
        print(f"error: {killed}.", file=sys.stderr)
    return int(failure.exitcode) if failure.exitcode > 0 else 3


def source_code(packages: Collection[str] = ()) -> bytes:
    """Return the source code of this program and of the loaded modules of `packages`."""
    paths = set()
    for package in PACKAGES:
        paths |= set(Path(str(importlib.resources.files(package))).rglob("*.py"))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] in packages and file and file.endswith(".py"):
            paths.add(Path(file))
    # Sorted by content, because each machine may have the files in a different folder.
    return b"".join(sorted(path.read_bytes() for path in paths if path.is_file()))
