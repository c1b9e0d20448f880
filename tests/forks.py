"""Runs train.py in forks of one process that has imported it all, as one process or as ranks; sends
them signals.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import glob
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from stoker.command import invocation

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
PROGRAM = f"{invocation.python()} {TRAIN}"  # as it is printed
MODULES = (
    "hydra",
    "torch",
    "safetensors.torch",
    "stoker.trainer.trainer",
    "stoker.sweeps.sweep",
    "stoker.sweeps.launchers",
    "stoker.runs.card",
    "stoker.diagnostics.doctor",
    "stoker.runs.examine",
    "stoker.diagnostics.timing",
    "stoker.data.loader",
    "stoker.models.mlp",
)
# DistributedDataParallel and fully_shard import torch._dynamo themselves.
DISTRIBUTED = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
)
LIMIT = 120  # seconds for one run: for a hang, no limit to be near to
GRACE = 30  # seconds that the other ranks have where one has failed


class Forks:
    """The process that forks, as the tests see it; one run at a time.

    `distributed`: it has what ranks need.
    """

    def __init__(self, *paths, distributed=False, modules=()):
        path = os.pathsep.join(map(str, (*paths, TRAIN.parent)))
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": path,
        }
        environment["TORCH_CPP_LOG_LEVEL"] = (
            "ERROR"  # as train.py sets it for ranks, before it imports torch
        )
        environment["PYTHONFAULTHANDLER"] = "1"  # a crash says where
        command = [
            sys.executable,
            __file__,
            *MODULES,
            *(DISTRIBUTED if distributed else ()),
            *modules,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, folder, *arguments, signals=(), script=TRAIN, **limits):
        """`python train.py ...` in `folder`: its pid, exit code (-9 for a kill), output, seconds,
        how many signals it got, and whether a checkpoint was being written at its end.

        Each of `signals` has a "signal" (its number) and is sent "delay" seconds after the one
        before it or the start; with "watch", after so many files ("count", or 1) of that pattern
        have been seen in the folder since then; with "group", to the process and its workers.
        `limits`: the most bytes of a "file"; "bound" by permissions as root too.
        """
        done = self.ask(folder, script, arguments, [{}], ["out", "err"], signals, limits)
        done.pid, done.code, (done.out,), (done.err,) = (
            done.pids[0],
            done.codes[0],
            done.outs,
            done.errs,
        )
        return done

    def ranks(self, folder, world, *arguments, signals=(), script=TRAIN, environment=()):
        """`train.py ...` in `folder` as so many ranks of one machine, as torchrun starts them, but
        without its agent.

        As `run`, with `pids`, `codes`, `outs`, `errs` of all, and `late`: the ranks that had to be
        killed, since they took too long or another one had failed. A signal goes to all, or to the
        one that it has as its "rank". Rank 0 is the host of the store.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        same = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        same |= {
            "GROUP_RANK": 0,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_RUN_ID": port,
            **dict(environment),
        }
        environments = [same | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
        names = [f"{name}.{rank}" for name in ("out", "err") for rank in range(world)]
        return self.ask(folder, script, arguments, environments, names, signals, {})

    def ask(self, folder, script, arguments, environments, names, signals, limits):
        """One job for the process that forks; `names` of the files for what is printed: first all
        out, then all err.
        """
        folder.mkdir(parents=True, exist_ok=True)
        job = {
            "folder": str(folder),
            "script": str(script),
            "arguments": arguments,
            "environments": environments,
        }
        job |= {"names": names, "signals": list(signals), "limits": limits}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        done = SimpleNamespace(**json.loads(self.process.stdout.readline()))
        printed = [(folder / name).read_text(encoding="utf-8") for name in names]
        done.outs, done.errs = printed[: len(environments)], printed[len(environments) :]
        return done

    def close(self):
        self.process.terminate()  # a worker forked since then may hold its standard input open
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Child:
    """One fork, as the process that forks sees it."""

    def __init__(self, start):
        self.code, self.late, self.pid = None, False, os.fork()
        if self.pid == 0:
            start()  # does not return
        with contextlib.suppress(ProcessLookupError):
            os.setpgid(self.pid, self.pid)  # both do it, whoever comes first

    def has_ended(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def send(self, number, group=False):
        if not self.has_ended():
            (os.killpg if group else os.kill)(self.pid, number)


def serve(modules):
    """Answers one line of JSON after the other."""
    sys.modules["triton"] = (
        None  # torch._dynamo can do without, and it complains at the end of what gc has frozen
    )
    for module in modules:
        importlib.import_module(module)
    import hydra

    with hydra.initialize_config_dir(
        str(TRAIN.parent / "configs")
    ):  # finds its plugins, and learns to parse
        hydra.compose(
            "train",
            [
                "model=mlp",
                "model.hidden=[16]",
                "+metrics.top2._target_=stoker.trainer.metrics.TopK",
            ],
        )
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(folder, script, arguments, environments, names, signals, limits):
    for name in names:
        Path(folder, name).write_bytes(b"")
    start, children = time.perf_counter(), []
    for environment, *files in zip(environments, names, names[len(environments) :], strict=False):
        begin = functools.partial(
            be_a_run, folder, script, arguments, environment, files, bool(signals), **limits
        )
        children.append(Child(begin))
    sent = 0
    for plan in signals:
        rank, group = plan.pop("rank", None), plan.pop("group", False)
        if wait(children, start, until=sign(folder, **plan)):
            break
        for child in children if rank is None else [children[rank]]:
            child.send(plan["signal"], group)
        sent += 1
    wait(children, start)
    done = {
        "pids": [child.pid for child in children],
        "codes": [child.code for child in children],
        "sent": sent,
    }
    done |= {"late": [rank for rank, child in enumerate(children) if child.late]}
    writing = bool(glob.glob(f"{folder}/*/checkpoints/.step_*.part"))
    return {**done, "seconds": time.perf_counter() - start, "writing": writing}


def be_a_run(folder, script, arguments, environment, files, watched, file=None, bound=False):
    """What `python train.py` is from its first line on; does not return."""
    os.setpgid(0, 0)
    if (
        sys.platform == "linux"
    ):  # where the tests are killed, no rank waits for the others for minutes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in enumerate(files, 1):
        os.dup2(os.open(name, os.O_WRONLY), stream)
    if file is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    if (
        bound and os.getuid() == 0
    ):  # root without its capabilities, to which permissions say nothing otherwise
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None).capset(header, none):
            os._exit(98)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have them ignored
        signal.signal(number, signal.SIG_DFL)
    os.environ.update({name: str(value) for name, value in environment.items()})
    import torch

    # After a fork, the first call makes torch's thread pool again. Without a lock: when two threads
    # of gloo are the first, torch aborts ("Invalid thread pool!").
    torch.set_num_threads(torch.get_num_threads())
    from stoker.runs import report

    # Half a second of drawing, of which tests/test_report.py has enough.
    report.html = lambda folder, state=None: ""
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if watched:
            raise
        leave(end.code or 0)
    os._exit(99)


def leave(code):
    """Ends a fork as Python does, but frees none of what it has from its parent: that takes 1.2 s
    of a run's 1.8.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(children, start, until=lambda: False):
    """Whether all children had ended before `until` was true. What takes too long is killed."""
    last = start + LIMIT
    while not until():
        ended = [child for child in children if child.has_ended()]
        if len(ended) == len(children):
            return True
        if any(child.code for child in ended):
            last = min(last, time.perf_counter() + GRACE)
        if time.perf_counter() > last:
            for child in children:
                child.late |= not child.has_ended()
                child.send(signal.SIGKILL)
        time.sleep(0.0001 if len(children) == 1 else 0.001)  # the ranks want the cores
    return False


def sign(folder, delay, signal, watch=None, count=1):
    """A function that is true `delay` seconds from now, or from when `count` new files of a pattern
    were seen.
    """
    before = set(glob.glob(watch, root_dir=folder)) if watch else ()
    seen, due = set(), None if watch else time.perf_counter() + delay

    def is_time():
        nonlocal due
        if due is None:
            seen.update(name for name in glob.glob(watch, root_dir=folder) if name not in before)
            due = time.perf_counter() + delay if len(seen) >= count else None
        return due is not None and time.perf_counter() >= due

    return is_time


if __name__ == "__main__":
    serve(sys.argv[1:])
