"""The run directory: its name, what it continues, and the files that are written whole or not at all."""

import atexit
import contextlib
import dataclasses
import datetime
import errno
import itertools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from stoker.command import cli, settings
from stoker.runs.saved_config import load_config
from stoker.trainer import files, launch
from stoker.trainer.errors import RunInUse, TrainingError, UserError, as_typed, log
from stoker.trainer.readable import number, numbers, seconds
from stoker.trainer.stopping import StopReason

MOST_JSON = (
    2**24
)  # bytes of a result.json: ours have 2 KB, and a confusion matrix of 1,000 classes 8 MB
MOST_SETTINGS = 1000  # of a run, and of letters in each
LOCK = ".lock"
TYPED = (
    "# typed: "  # with which a config.yaml begins: what the rest of the line is a list of, in JSON
)
# Into which result.json splits the time: what a graph does is one "step" in place of the three before it.
STAGES = (
    "data", "transfer", "forward", "backward", "optimizer", "step", "evaluation", "checkpoint", "logging", "other",
)  # fmt: skip
ENDING = (
    "result.json",
    "evaluation.json",
    "report.html",
)  # what is no longer so when a run goes on
# The files that are made anew: what a killed run left half of, and what an older run left in the way of a new one.
WRITTEN = ("metrics.jsonl", *ENDING, "model.safetensors", "model.md")


def claim(model, dataset):
    """Makes runs/<date>-<model>-<dataset>, with a number where that is taken, also by a run of the same second."""
    name = f"runs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{model}-{dataset}"
    for i in itertools.count(1):
        path = Path(f"{name}-{i}" if i > 1 else name)
        if make(path):
            return str(path)


def make(folder, key="run_dir"):
    """Makes the folder, and gives whether it was not there; UserError where nothing can be written into it.

    What is still empty of it at the end is removed: a mistake that is found before the training leaves nothing behind.
    """
    try:
        parts = [part for part in (folder, *folder.parents) if not part.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        parts = []
    except (OSError, ValueError) as error:
        above = [part for part in folder.parents if os.path.isfile(part)]
        why = f"{above[0]} is a file" if above else getattr(error, "strerror", None) or error
        reason = f"it cannot be made ({why})"
        raise UserError(f"{key}={folder}: {reason}. Type another {key}.") from None
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{key}={folder}: this is a file or cannot be written. Type another {key}.")
    atexit.register(remove_empty, parts)
    return bool(parts)


@contextlib.contextmanager
def held(folder):
    """Makes the folder, and keeps every other process out of it meanwhile; RunInUse where one is at work in it.

    The system lets go of the lock when the process ends, however it ends: a file that is left behind locks nothing.
    """
    make(folder)
    for name in ("checkpoints", "tensorboard", "wandb", "profile"):
        if (folder / name).is_symlink():
            raise UserError(
                f"run_dir={folder}: {name} in it is a link, and may lead anywhere. Type another run_dir."
            )
    path = folder / LOCK
    while True:
        try:
            file = files.open_plain(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno == errno.EMLINK:  # from a copy by links: what they lead to is another's
                path.unlink()
                continue
            raise UserError(f"run_dir={folder}: {error}. Type another run_dir.") from None
        try:
            lock_soon(file)
        except BlockingIOError:
            owner = file.read(200).decode(errors="replace").strip() if os.name == "posix" else ""
            file.close()
            what = "Wait until it has ended, or type another run_dir"
            raise RunInUse(
                f"run_dir={folder} is in use by another process ({ascii(owner)[1:-1]}). {what}."
            ) from None
        except OSError as error:  # a file system without locks
            log.warning(
                "run_dir=%s cannot be locked (%s): start no second run in it.",
                folder,
                error.strerror,
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                break
        file.close()  # the process that held it has just ended, and removed it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n".encode())
    locks.add(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        locks.discard(file)
        file.close()


def is_held(folder):
    """Whether a process is at work in the folder, this one among them."""
    try:
        with files.open_plain(Path(folder) / LOCK) as file:
            lock(file)  # which the end of this block lets go of
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock_soon(file):
    """`lock`, also where another process is just looking by `is_held`."""
    for _ in range(3):
        with contextlib.suppress(BlockingIOError):
            return lock(file)
        time.sleep(0.05)
    return lock(file)


def lock(file):
    """An exclusive lock on the file; BlockingIOError where another process has it."""
    if fcntl is not None:
        return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    import msvcrt

    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(*error.args) from None


begun = None  # the run directory in which this process trains, once it does
locks = set()  # the files of the run directories that this process holds
if hasattr(
    os, "register_at_fork"
):  # a worker that outlives a killed run must not keep its directory locked
    os.register_at_fork(after_in_child=lambda: [file.close() for file in locks])


# What result.json says of how a run went, and not of what it came to.
MEASURED = (
    "seconds",
    "time",
    "speed",
    "doctor",
    "git",
    "flops_per_sample",
    "flops_per_second",
    "peak_flops",
    "mfu",
)


def measured_before(folder, result):
    """What was MEASURED, where the run was complete already, and this one has only looked at it; else {}."""
    before = read_result(folder / "result.json") or {}
    if not before.get("steps") == result["steps"] == result["total_steps"]:
        return {}
    known = isinstance(before.get("seconds"), (int, float))
    return {key: before[key] for key in MEASURED if key in before} if known else {}


def read_result(path):
    """What result.json holds; None for what is none of a run's: the file may be anybody's."""
    try:
        result = json.loads(files.read(path, MOST_JSON))
    except (OSError, ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def finished(folder):
    """The result of a run that has come to its end, else None."""
    result = read_result(Path(folder) / "result.json")
    return result if is_finished(result) else None


def is_finished(result):
    """Whether it is what a run leaves that has come to its end."""
    return is_whole(result) and "error" not in result


def has_failed(folder):
    """Whether a run says that it has failed."""
    return "error" in (read_result(Path(folder) / "result.json") or {})


def fail(folder, error, code):
    """Leaves why a run has failed, and the exit code; gives whether it did.

    A result stays one, and a reason given before.
    """
    before = read_result(Path(folder) / "result.json") or {}
    if is_finished(before) or "error" in before:
        return False
    try:
        write_json(
            Path(folder) / "result.json",
            {"overrides": cli.typed(), "error": cli.reason(error), "code": code},
        )
    except OSError:  # a full disk may be why
        return False
    return True


def is_whole(result):
    """Whether what a result.json holds has what the table of a sweep needs."""
    if not is_list(result):
        return False
    if "error" in result:
        return isinstance(result["error"], str) and not result.get("best")
    best = result.get("best")
    ok = best is None or (
        isinstance(best, dict)
        and isinstance(best.get("name"), str)
        and is_number(best.get("value"))
    )
    return ok and is_number(result.get("seconds"))


def is_list(said):
    """Whether it has what was typed for a job."""
    typed = said.get("overrides") if isinstance(said, dict) else None
    ok = isinstance(typed, list) and len(typed) <= MOST_SETTINGS
    return ok and all(
        isinstance(override, str) and len(override) <= MOST_SETTINGS for override in typed
    )


def remove_empty(folders):
    """Removes those of the folders, the inner ones first, into which nothing was written."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def to_resume(folder, resume, overwrite, cfg):
    """(the file, the state in it, its origin) to go on from, or None: as `resume` says, never with other settings.

    The origin is the SHA-256 of the file with which a run began that `resume=FILE` has started: the same command goes
    on with that run, and does not begin anew.
    """
    from stoker.trainer import checkpoint

    if overwrite and resume != "never":
        raise UserError(
            "overwrite=true: this is for a run that starts anew. Type resume=never as well."
        )
    if resume == "never":
        there = sorted({path.name for path in folder.iterdir()} - {LOCK, "job.json"})
        if there and not overwrite:
            what = "Type another run_dir, or overwrite=true to replace it"
            raise UserError(
                f"run_dir={folder}: resume=never starts anew, and {there[0]} is in there. {what}."
            )
        return None
    given, found = None, checkpoint.newest(folder / "checkpoints")
    path, state = found or (None, None)
    origin = about(state).get("origin") if state else None
    if resume != "auto":
        settings.check_resume(resume)
        given = Path(resume).resolve()
        if state is not None and origin == checkpoint.sha256_of(given):
            given = None
        elif state is not None and given.parent != (folder / "checkpoints").resolve():
            what = "Type resume=auto to go on with it, or another run_dir"
            raise UserError(
                f"run_dir={folder} has checkpoints of a run that has not begun with {resume}.\n{what}."
            )
    if given is not None:
        try:
            path, state, origin = given, checkpoint.load_whole(given), checkpoint.sha256_of(given)
        except checkpoint.DamagedCheckpoint as error:
            raise UserError(f"resume={resume}: {error}") from None
    what = f"resume={resume}" if given else f"run_dir={folder}"
    if state is not None and (before := about(state).get("config")) is not None:
        check_same(what, before, cfg, longer=given is not None)
    elif state is None:
        check_beginning(folder, cfg)
    if (folder / "config.yaml").exists():  # it is a run's
        files.remove_partial(folder, WRITTEN)
    return None if state is None else (path, state, origin)


def check_beginning(folder, cfg):
    """Looks at a run directory without checkpoints: of a run that was stopped before its first one, or of none."""
    done = read_result(folder / "result.json") or {}
    if (folder / "config.yaml").exists():
        check_same(f"run_dir={folder}", load_config("run_dir", folder), cfg)
        if "steps" in done:
            what = "Put them back, or type resume=never overwrite=true to begin anew"
            raise TrainingError(
                f"run_dir={folder}: the run has ended, and its checkpoints are gone.\n{what}."
            )
        print(f"begins at step 0: the run in {folder} has no checkpoint")
        return
    others = [
        name
        for name in WRITTEN
        if (folder / name).exists() and not (name == "result.json" and "error" in done)
    ]
    if others:
        what = f"a run would replace {others[0]} in it, which is no run's"
        raise UserError(
            f"run_dir={folder}: {what}. Type another run_dir, or resume=never overwrite=true."
        )


def check_classes(state, data):
    """UserError where a checkpoint's run had other classes than this data: its numbers would mean others."""
    before = about(state).get("classes")
    if before is not None and data.classes is not None and before != list(data.classes):
        other = next((name for name in data.classes if name not in before), None)
        what = (
            f"{len(data.classes)}"
            if other is None
            else f"{len(data.classes)}, {str(other)!r} among them"
        )
        raise UserError(
            f"dataset: the run had {len(before)} classes, and here are {what}. Type dataset.root=DIR."
        )


def about(state):
    """What a checkpoint says of its run, {} where it says nothing, or what nobody can use."""
    said = state.get("about")
    config = said.get("config") if isinstance(said, dict) else None
    return said if isinstance(config, dict) else {}


def check_data(state, fingerprint):
    """UserError where a checkpoint comes from a run on other data."""
    before = about(state).get("data")
    if before not in (None, fingerprint):
        raise UserError(
            f"dataset: the run had other data (fingerprint {before}, and here it is {fingerprint}).\n"
            "Type the dataset.root that it had to continue it; for a new run, another run_dir and no resume."
        )


def check_same(what, before, now, longer=False):
    """UserError where two configs differ in more than a resumed run, or with `longer` a longer one, may."""
    before, now = cli.flat(before), cli.flat(now)
    other = [
        key
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not settings.may_differ(key, longer=longer)
    ]
    # Of a part that is another one altogether, only that it is.
    parts = tuple(key.removesuffix("_target_") for key in other if key.endswith("._target_"))
    shown = [key for key in other if not key.startswith(parts) or key.endswith("._target_")]
    if other:
        differences = ", ".join(
            f"{key}={as_typed(now.get(key))} (was {as_typed(before.get(key))})" for key in shown[:5]
        )
        what_to_type = (
            "Type the settings it had to continue it; for a new run, another run_dir and no resume."
        )
        if all(settings.may_differ(key, longer=True) for key in other):
            what_to_type = "To train it longer, type another run_dir, and resume=FILE with a checkpoint of this one;"
            what_to_type += " to begin anew in its place, resume=never overwrite=true."
        raise UserError(f"{what} holds a run with other settings: {differences}.\n{what_to_type}")


def command(overrides, *more, start=("python", "train.py")):
    """`python train.py ...` with these settings, as a shell takes them; of each key the last one.

    Without what has begun the run, as the command goes on with it, and without what is of a sweep.
    """
    typed = {override.partition("=")[0]: override for override in [*overrides, *more]}
    typed = {key: override for key, override in typed.items() if not settings.record(key).once}
    return shlex.join([*start, *typed.values()])


def setting(key, value):
    """'key=value' as Hydra takes it: a value with unusual characters in quotes."""
    plain = re.fullmatch(r"[A-Za-z0-9_/.:+-][A-Za-z0-9_/.:+ -]*(?<! )", str(value))
    return f"{key}={value}" if plain else "{}='{}'".format(key, str(value).replace("'", "\\'"))


def revision(folder):
    """A function that gives the {"revision", "dirty"} of the folder as it is now, None where git knows of none.

    git works meanwhile. Dirty is what differs from the revision; files that git does not know do not count.
    """
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return lambda: None

    def read():
        try:
            said = process.communicate(timeout=10)[0].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            return None
        return (
            {"revision": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
            if said
            else None
        )

    return read


def result_of(trainer, saver):
    """What result.json says of a finished fit, beside its metrics."""
    from stoker.trainer import summary

    best = saver.best and {
        "name": saver.name,
        "mode": "max" if saver.sign > 0 else "min",
        **saver.best,
    }
    length = {
        "steps": trainer.step,
        "total_steps": trainer.total_steps,
        "stopped": trainer.stop_reason and dataclasses.asdict(trainer.stop_reason),
    }
    machine = {
        "device": str(trainer.device),
        "precision": summary.precision(trainer),
        "versions": versions(),
    }
    parameters = sum(p.numel() for p in trainer.module.parameters())
    size = {"parameters": parameters, "memory_mib": summary.memory_of_a_step(trainer)}
    return {"best": best, **length, **machine, **size}


def last_rows(folder):
    """The last value of each number in metrics.jsonl, and the speed over all of it."""
    from stoker.runs.loggers import read_rows

    rows = read_rows(folder / "metrics.jsonl")
    rows = [{name: value for name, value in row.items() if is_numbers(name, value)} for row in rows]
    samples, seconds = (
        sum(row.get(name) or 0 for row in rows) for name in ("train/samples", "train/seconds")
    )
    last = {name: value for row in rows for name, value in row.items()}
    return {
        **last,
        "samples_per_second": round(samples / seconds)
        if seconds and math.isfinite(samples)
        else None,
    }


def final_numbers(result):
    """{name: number} of what a run came to: the best, and the test."""
    best = {f"best/{result['best']['name']}": result["best"]["value"]} if result["best"] else {}
    test = {name: value for name, value in result.items() if name.startswith("test/")}
    return {name: value for name, value in (best | test).items() if isinstance(value, float)}


def is_out_of_time(result):
    """Whether max_minutes has ended the run before its end."""
    return stopped(result).kind == "time_limit"


def stopped(result):
    """Why the run of a result.json stopped before its end; a StopReason of no kind where it did not."""
    found = result.get("stopped")
    found = found if isinstance(found, dict) else {}
    return StopReason(str(found.get("kind") or ""), str(found.get("text") or ""))


def is_number(value):
    """Whether a file's entry is a number that one can reckon with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100


def is_numbers(name, value):
    """Whether this is something that a row holds: a number that is one, null in place of one that is not, or a list."""
    own = "/" in name or name in ("step", "epoch")
    plain = value is None or (
        isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 2**63
    )
    return own and (plain or (isinstance(value, list) and not name.startswith("train/")))


def closing_lines(folder, result, packages):
    """The lines that end a run: the best, the test, the time, and what to type next."""
    if best := result["best"]:
        yield f"best     {best['name']} {number(best['value'])} at step {best['step']:,}"
    if shown := numbers(
        {name: value for name, value in result.items() if name.startswith("test/")}
    ):
        yield f"test     {shown}"
    speed = result["samples_per_second"]
    yield f"time     {seconds(result['seconds'])}{f', with {speed:,} samples/s in training' if speed else ''}"
    if result.get("speed"):
        yield f"speed    {result['speed']}"
    yield f"run      {folder}"
    trusted = [f"trusted=[{','.join(packages)}]"] if packages else []
    yield f"         {command(['task=evaluate', setting('run', folder), *trusted])}"
    if result["steps"] < result["total_steps"]:
        yield f"         {command(result['overrides'], setting('run_dir', folder), start=launch.command())}"


def write_json(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(finite(contents), indent=2) + "\n")


def finite(value):
    """The value with null for the numbers that JSON has not: nan and the infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions():
    """What a result depends on, beside its config."""
    import hydra
    import torch

    system = {"python": platform.python_version(), "platform": platform.platform()}
    return {**system, "torch": str(torch.__version__), "hydra": hydra.__version__}
