"""Several processes of one run: who this one is, what all know of each other, their faults, and how they are started.

The processes are torchrun's; what they tell each other stands in its store. Without torch until one of them asks.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from stoker.trainer import stopping
from stoker.trainer.errors import TrainingError, UserError

SEVERAL = ("ddp", "fsdp")  # the strategies of several processes
OWN = "train.py"  # the role of the processes that this program has started itself
JOB = "STOKER_JOB"  # the environment variable that tells them of which job of a sweep they are
ANSWER = 5  # seconds that the others have to say why they end
SAME = 2  # seconds in which rank 0 finds the mistake that another rank has found, if it is in both
LATE = 3  # seconds after a signal, and then ANSWER, until a process ends that others have failed in vain to wait for
BLOCKED = (
    25  # seconds after which it ends that has not heard the signal: torchrun kills it after 30
)
# What gloo, NCCL and the store say where another process is gone, or does not answer.
CONTACT = re.compile(
    r"gloo|NCCL|nccl|TCPStore|ProcessGroup|[Cc]onnection (closed|reset|refused)|Broken pipe|pair closure"
)
TIMEOUT = re.compile(r"[Tt]im(ed|e) ?out")
opened = (
    threading.local()
)  # `store`, the connection of a thread: one that waits would keep others waiting
joined = False  # whether this process has told the others of itself
again = None  # the command that goes on with this run, once its directory is known
said = False  # whether the others know that, and why, this process ends
seconds = 300  # that a process waits for the others


def rank():
    """The number of this process among all of them, 0 where there is one."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """How many processes train together, on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank():
    """The number of this process on its machine: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size():
    """How many processes train together on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cores():
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_first():
    """Whether this is the process that prints and writes."""
    return rank() == 0


def command():
    """What stands before the settings in the command that starts this run again."""
    if world_size() == 1 or os.environ.get("ROLE_NAME") == OWN:
        return ["python", "train.py"]
    nodes = world_size() // local_world_size()
    several = ["--nnodes", str(nodes), "..."] if nodes > 1 else []
    return ["torchrun", *several, "--nproc-per-node", str(local_world_size()), "train.py"]


def quieten():
    """Has ranks above 0 print nothing but errors, and all ranks nothing of torch's own about their connections."""
    if world_size() == 1:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not is_first():
        import warnings

        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        warnings.simplefilter("ignore")


# what all ranks know of each other


def store(timeout=300):
    """The TCPStore that all ranks share; what is in it is of this start of the ranks, not of one before a restart.

    It is torchrun's. Where there is none, rank 0 has it. A rank waits `timeout` seconds for what another one tells it.
    """
    from torch.distributed import PrefixStore

    # With gloo, the addresses of an attempt before would be tried: 8 of 10 restarts hung or failed.
    return PrefixStore(
        f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", whole_store(timeout)
    )


def whole_store(timeout=300):
    """The store over all attempts."""
    global joined, seconds
    if not hasattr(opened, "store"):
        opened.store = connect(timeout)
    if not joined:
        joined, seconds = True, timeout
        store().set(f"who/{rank()}", f"process {os.getpid()} on {platform.node()}")
        watch()
    return opened.store


def connect(timeout):
    import datetime

    from torch.distributed import TCPStore

    address, port = (
        os.environ.get("MASTER_ADDR", "localhost"),
        int(os.environ.get("MASTER_PORT", 29500)),
    )
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            address,
            port,
            is_master=not theirs and is_first(),
            wait_for_workers=False,
            multi_tenant=True,
            timeout=datetime.timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LostContact(f"rank 0 at {address}:{port} cannot be reached ({reason}).") from None


def tell(key, value):
    """Puts a plain value into the store, for the other ranks."""
    store().set(key, json.dumps(value))


def told(key, by=0, limit=None):
    """What rank `by` tells under this key; TrainingError where it has ended, or says nothing for too long.

    That is `limit` seconds, None being as long as a process waits for the others at all.
    """
    import datetime

    end = time.monotonic() + (seconds if limit is None else limit)
    while True:
        try:
            store().wait(
                [key], datetime.timedelta(seconds=1)
            )  # in short parts: a signal is heard in between
            return json.loads(store().get(key))
        except RuntimeError as error:
            if not TIMEOUT.search(str(error)):
                raise
        if stopping.received is not None:  # its exception was lost in a library's code
            raise stopping.Interrupted
        if store().check([f"end/{by}"]) and not store().check([key]):
            raise LostContact(f"rank {by} has ended.")
        if time.monotonic() > end:
            raise LostContact(f"rank {by} did not answer: timed out after {seconds:g} s.")


@contextlib.contextmanager
def one_first(name):
    """Has one process of each machine go first, and the others wait for it."""
    if local_rank():
        told(f"{name}/{rank() - local_rank()}", by=rank() - local_rank(), limit=math.inf)
    yield
    if world_size() > 1 and not local_rank():
        tell(f"{name}/{rank()}", True)


class LostContact(TrainingError):
    """Another rank has ended or does not answer. It is what comes of an error, and not the error."""


def agreed(name, make, lasting=False):
    """What `make()` gives on rank 0, on all ranks; plain values, as JSON through the store.

    `lasting`: what it gave in an attempt before torchrun's restart is still what it gives.
    """
    if world_size() == 1:
        return make()
    key = f"agreed/{name}"
    if is_first():
        if lasting and whole_store(seconds).check([key]):
            tell(key, json.loads(whole_store().get(key)))
        else:
            value = json.dumps(make())
            if lasting:
                whole_store(seconds).set(key, value)
            store(seconds).set(key, value)
    store(seconds)
    return told(key)


def check_alike(parts):
    """UserError, on all ranks, where one has other `parts` than rank 0: {kind: {name: what}}, such as code and config.

    Ranks that differ would train together without a word, and nobody could say what.
    """
    if world_size() == 1:
        return
    kinds = "/".join(parts)
    digests = {
        kind: {name: digest(what) for name, what in items.items()} for kind, items in parts.items()
    }
    store(seconds)
    tell(f"parts/{kinds}/{rank()}", digests)
    verdict = agreed(f"alike/{kinds}", lambda: difference(kinds, digests))
    if verdict is not None:
        raise UserError(verdict)


def difference(kinds, own):
    """What to say of the first rank that differs from this one, None where none does."""
    for other in range(world_size()):
        theirs = told(f"parts/{kinds}/{other}", by=other)
        for kind, items in own.items():
            names = [
                name
                for name in sorted({*items, *theirs[kind]})
                if items.get(name) != theirs[kind].get(name)
            ]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                return (
                    f"rank {other} ({who(other)}) has other {kind} than rank 0: {', '.join(names[:3])}{more}.\n"
                    "All processes need the same code, versions, config and data."
                )
    return None


def digest(what):
    what = (
        what if isinstance(what, bytes) else json.dumps(what, sort_keys=True, default=str).encode()
    )
    return hashlib.sha256(what).hexdigest()[:16]


def code(root, packages=()):
    """{file: its bytes} of this program, and of the modules of `packages` that are imported."""
    parts = [
        path
        for part in ("stoker", "trainer", "data", "models")
        for path in (root / part).rglob("*.py")
    ]
    files = {path.relative_to(root).as_posix(): path for path in parts}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.split(".")[0] in packages and path and path.endswith(".py"):
            files[name] = Path(path)
    return {name: path.read_bytes() for name, path in sorted(files.items()) if path.is_file()}


# faults


def by_rank(text):
    """The text of an error, with the rank that has it."""
    return (
        text.replace("error: ", f"error: rank {rank()}: ", 1)
        if "error: " in text
        else f"rank {rank()}:\n{text}"
    )


def watch():
    """Has a thread of this process hear its signals too: while it waits for another one, Python does not."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    try:
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    except ValueError:  # not the main thread: somebody's own program, with signals of its own
        return
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
    threading.Thread(target=guard, args=(receiver, sender, os.getppid()), daemon=True).start()


def guard(receiver, sender, parent):
    """Ends this process where it does not hear a signal, and where whoever has started it is gone."""
    receiver.settimeout(2)
    while sender:
        try:
            number = receiver.recv(1)[0]
        except TimeoutError:
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)
            continue
        if number not in stopping.SIGNALS:
            continue
        start = time.monotonic()
        time.sleep(1)
        with contextlib.suppress(RuntimeError):
            if stopping.received is None:
                tell(f"end/{rank()}", {"kind": "signal"})  # it is there, at least
            time.sleep(LATE - 1)
            text, code = not_own("signal", None, None)
            if code is not None:
                end_now(text, code)
        time.sleep(max(0, start + BLOCKED - time.monotonic()))
        if stopping.received is None or (
            stopping.gentle is None and not said
        ):  # or its exception was lost
            os._exit(128 + number)


def end_now(text, code):
    """Ends this process from another thread than its first one."""
    if text and not said:
        os.write(2, f"{text}\n".encode())
    os._exit(code)


def is_lost(error):
    """Whether an error, or what it came of, is that another rank is gone or does not answer."""
    while error is not None:
        if isinstance(error, LostContact) or (
            isinstance(error, RuntimeError) and CONTACT.search(str(error))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def last_words(kind, message, code):
    """(what this rank prints before it ends or None, its exit code), so that of each fault one rank speaks, once.

    `kind` is "error", which is this rank's own; "lost", the contact to another one; or "signal", that it was sent one.
    """
    global said
    stopping.gentle = lambda name: None  # the others' ends bring signals
    if not joined:  # what comes so early is the same on all ranks, as a rule
        if is_first() or not ended_by_signal(2 * ANSWER):
            return (message if is_first() else by_rank(message)), code
        return None, code
    said = True
    try:
        tell(f"end/{rank()}", {"kind": kind, "message": message, "code": code})
        return own_error(message, code) if kind == "error" else not_own(kind, message, code)
    except RuntimeError:  # the store is gone, and rank 0 with it, or torchrun
        return (None, code) if kind == "signal" else (by_rank(message), code)


def ended_by_signal(limit):
    """Waits for a signal; whether one came."""
    end = time.monotonic() + limit
    while stopping.received is None and time.monotonic() < end:
        time.sleep(0.05)
    return stopping.received is not None


def own_error(message, code):
    if not is_first():
        ends(SAME, [0])
        if end_of(0).get("message") == message:
            return None, code
    store().compare_set("first", "", str(code))
    if store().add(f"said/{digest(message)}", 1) > 1:
        return None, code
    return (message if is_first() else by_rank(message)), code


def not_own(kind, message, code):
    """What is said where contact was lost, or a signal came: of whom nothing is heard, unless a rank has an error."""
    present = ends(ANSWER, range(world_size()))
    first = store().compare_set("first", "", "").decode()
    if first:
        return None, int(first)
    absent = [other for other in range(world_size()) if other not in present]
    here = [other for other in absent if has_ended(other)]
    kinds = {end_of(other).get("kind") for other in present}
    speaks = rank() == min(present, default=None)
    if absent and (here or "lost" in kinds):
        names = " and ".join(f"rank {other} ({who(other)})" for other in (here or absent)[:3])
        late = TIMEOUT.search(message or "") and not here
        what = (
            f"did not answer for {seconds:g} s; the others waited for it"
            if late
            else "is gone: it was killed"
        )
        advice = (
            f"To go on from the last checkpoint:\n{again}"
            if again
            else "Type the same command again."
        )
        return (f"error: {names} {what}.\n{advice}" if speaks else None), 3
    if "lost" in kinds:
        lost = [other for other in present if end_of(other).get("kind") == "lost"]
        return (by_rank(message) if rank() == min(lost) else None), 3
    return (message if is_first() else None), code


def ends(limit, others, key="end"):
    """The ranks among `others` that have said why they end, after at most `limit` seconds; the killed never will."""
    end = time.monotonic() + limit
    while True:
        present = [other for other in others if store().check([f"{key}/{other}"])]
        if time.monotonic() > end or all(other in present or has_ended(other) for other in others):
            return present
        time.sleep(0.1)


def end_of(other):
    """{"kind", "message", "code"} that a rank has left, {} where it has not."""
    key = f"end/{other}"
    return json.loads(store().get(key)) if store().check([key]) else {}


def who(other):
    """'process 123 on host' of another rank."""
    key = f"who/{other}"
    return store().get(key).decode() if store().check([key]) else "which never came"


def has_ended(other):
    """Whether another rank is one of this machine, and no process any more."""
    found = re.fullmatch(r"process (\d+) on (.*)", who(other))
    if not found or found[2] != platform.node() or os.name != "posix":
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def end(code):
    """Ends the process; one of several that has failed without its libraries' ends, which may wait for the others."""
    if joined and code:
        sys.stdout.flush()
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def leave():
    """Says that this rank has ended, if it has not said so; the host of the store waits for the others."""
    if not joined:
        return
    with contextlib.suppress(RuntimeError):
        if not said:
            tell(f"end/{rank()}", {"kind": "done"})
        tell(f"left/{rank()}", True)
        if is_first() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            ends(ANSWER, range(world_size()), "left")


# the start of several processes on this machine


def count(strategy, devices, device):
    """How many processes this one has to start for `devices`; 1 is none. UserError where it cannot take effect."""
    name, here = strategy.partition(":")[0], world_size()
    if here > 1:
        if name not in ("auto", *SEVERAL):
            what = "and each would train by itself"
            raise UserError(
                f"strategy={strategy}: torchrun has started {here} processes, {what}.\nType strategy=auto."
            )
        if devices != "auto" and os.environ.get("ROLE_NAME") != OWN:
            what = "Leave it out; how many there are says its --nproc-per-node"
            raise UserError(f"devices={devices}: torchrun has started {here} processes. {what}.")
        return 1
    if name not in SEVERAL:
        if devices not in ("auto", 1):
            ways = " or ".join(f"strategy={way} devices={devices}" for way in SEVERAL)
            raise UserError(
                f"devices={devices}: with strategy={strategy}, one process is started. Type {ways}."
            )
        return 1
    if devices != "auto":
        return devices
    if device == "cpu" or ":" in device:
        return 1
    import torch

    return max(1, torch.accelerator.device_count())


class JobFailed(TrainingError):
    """The processes of a job of a sweep have failed with this `code`. They have printed why."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def job():
    """What `start` was given as the job of a sweep that this process is one of; None in any other run."""
    return json.loads(os.environ[JOB]) if world_size() > 1 and JOB in os.environ else None


def start(processes, arguments, of=None):
    """Runs train.py with these arguments in so many processes of torchrun's agent; gives the exit code.

    It is that of the rank that failed first, 3 for one that was killed, and 128 and its number after a signal.
    `of` is what `job()` gives in them: plain values.
    """
    import logging
    import uuid

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = str(max(1, cores() // processes))
    defaults = {"OMP_NUM_THREADS": threads, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    added |= {JOB: json.dumps(of)} if of else {}
    os.environ.update(added)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        role=OWN,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    logging.disable(logging.CRITICAL)  # the agent's own account, beside that of the ranks
    try:
        elastic_launch(config, sys.executable)("-u", sys.argv[0], *arguments)
        return 0
    except ChildFailedError as error:
        return code_of(error)
    except SignalException as error:
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
        for name in added:
            del os.environ[name]
        stopping.listen()  # the agent has heard the signals meanwhile


def code_of(error):
    """The exit code for a ChildFailedError, the agent's: it says which ranks failed, and how."""
    first, failure = error.get_first_failure()
    if failure.exitcode < 0 and all(
        other.exitcode != 3 for other in error.failures.values()
    ):  # nobody has named it
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {first} (process {failure.pid}) was ended by {name}.", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 3
