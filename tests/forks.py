"""Runs train.py in forks of one process that has imported all of it, and sends them signals: a real run in 0.5 s."""

import contextlib
import ctypes
import gc
import glob
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
MODULES = ("hydra", "torch", "safetensors.torch", "trainer.trainer", "data.loader", "models.mlp")
LIMIT = 120  # seconds for one run: for a hang, no limit to be near to


class Forks:
    """The process that forks, as the tests see it; one run at a time."""

    def __init__(self, *paths):
        path = os.pathsep.join(map(str, (*paths, TRAIN.parent)))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, folder, *arguments, signals=(), **limits):
        """`python train.py ...` in `folder`: its pid, exit code (-9 for a kill), output, seconds, how many signals it
        got, and whether a checkpoint was being written at its end.

        Each of `signals` has a "signal" (its number) and is sent "delay" seconds after the one before it or the start;
        with "watch", after so many files ("count", or 1) of that pattern have been seen in the folder since then; with
        "group", to the process and its workers. `limits`: the most bytes of a "file"; "bound" by permissions as root
        too.
        """
        folder.mkdir(parents=True, exist_ok=True)
        job = {"folder": str(folder), "arguments": arguments, "signals": list(signals), "limits": limits}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        done = SimpleNamespace(**json.loads(self.process.stdout.readline()))
        done.out, done.err = ((folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        return done

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve():
    """Answers one line of JSON after the other."""
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(folder, arguments, signals, limits):
    for name in ("out", "err"):
        Path(folder, name).write_bytes(b"")
    child, start = os.fork(), time.perf_counter()
    if child == 0:
        be_a_run(folder, arguments, **limits)
    with contextlib.suppress(ProcessLookupError):
        os.setpgid(child, child)  # both do it, whoever comes first
    sent, code = 0, None
    for plan in signals:
        code = wait(child, start, until=sign(folder, **plan))
        if code is not None:
            break
        (os.killpg if plan.get("group") else os.kill)(child, plan["signal"])
        sent += 1
    code = wait(child, start) if code is None else code
    writing = bool(glob.glob(f"{folder}/*/checkpoints/.step_*.part"))
    return {"pid": child, "code": code, "sent": sent, "seconds": time.perf_counter() - start, "writing": writing}


def be_a_run(folder, arguments, file=None, bound=False):
    """What `python train.py` is from its first line on; does not return."""
    os.setpgid(0, 0)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY), stream)
    if file is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    if bound and os.getuid() == 0:  # root without its capabilities, to which permissions say nothing otherwise
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None).capset(header, none):
            os._exit(98)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have them ignored
        signal.signal(number, signal.SIG_DFL)
    sys.argv = [str(TRAIN), *arguments]
    runpy.run_path(str(TRAIN), run_name="__main__")
    os._exit(99)


def wait(child, start, until=lambda: False):
    """The exit code of the child, or None where `until` was true before its end."""
    while not until():
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.perf_counter() - start > LIMIT:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.0001)
    return None


def sign(folder, delay, signal, watch=None, count=1, group=False):
    """A function that is true `delay` seconds from now, or from when `count` new files of a pattern were seen."""
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
    serve()
