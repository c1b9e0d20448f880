"""Workers of a loader that raise, die, hang or outlive the training: real processes, each ending as
documented.
"""

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import HostLoader
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import IterableLoader

ROOT = Path(__file__).parents[1]
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

# A split of the user's own: what happens at sample 7 is told by the command line.
SCRIPT = """
import multiprocessing, os, signal, sys, threading, time
import torch
from stoker.data.datasets import Data
from stoker.data.loader import HostLoader
from stoker.command import exit_codes
from stoker.trainer.errors import TrainingError, UserError

class Own:
    nbytes = 100 * 4
    files = [f"dog/{i}.jpg" for i in range(100)]

    def __init__(self, what):
        self.what, self.targets = what, torch.arange(100) % 2

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if 7 in index:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "exit":
                os._exit(5)
            elif self.what == "segfault":
                import ctypes
                ctypes.string_at(0)
            elif self.what in ("hang", "stubborn"):
                if self.what == "stubborn":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    time.sleep(100)
            elif self.what == "sys.exit":
                sys.exit(4)
            elif self.what == "raise":
                raise KeyError("no such label")
        return torch.tensor(index).float().unsqueeze(1), self.targets[index]

def loader(what, **options):
    own = Own(what)
    return HostLoader(Data("own", own, None, None, (1,), 2), "train", 4, **options)

def main():
    if len(sys.argv) > 4:
        multiprocessing.set_start_method(sys.argv[4])
    train = loader(sys.argv[1], workers=int(sys.argv[2]), timeout=float(sys.argv[3]))
    try:
        print(sum(len(inputs) for inputs, _ in train), flush=True)
    except (UserError, TrainingError) as error:
        sys.exit(exit_codes.report(error))

if __name__ == "__main__":
    main()
    # torch does not wait for the threads that feed its queues. One that drops the last reference to
    # a lock during the exit of the interpreter leaves a semaphore behind, with a warning.
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(*arguments, code=None, **options):
        path = tmp_path / "script.py"
        if code is not None:
            path = tmp_path / "other.py"
            path.write_text("from script import *\n" + textwrap.dedent(code))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, str(path), *map(str, arguments)]
        return subprocess.Popen(
            command, env=environment, cwd=tmp_path, start_new_session=True, **pipes, **options
        )

    return start


def ends(process, seconds=60):
    """(exit code, stdout, stderr); nothing of its process group is left."""
    out, err = process.communicate(timeout=seconds)
    if os.name == "posix":
        assert gone(process.pid), "a worker is still there"
    return process.returncode, out, err


def gone(group, seconds=10):
    """Whether no process of the group is there within so many seconds."""
    for _ in range(seconds * 20):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


LOST = {
    "kill": "was killed by SIGKILL while reading the train split of own, starting at sample 4 (dog/4.jpg)",
    "segfault": "was killed by SIGSEGV while reading the train split of own, starting at sample 4",
    "exit": "exited with code 5 while reading the train split of own, starting at sample 4",
    "hang": "dataset.timeout=2: no batch arrived within 2 seconds while reading the train split",
    "stubborn": " while reading the train split of own, starting at sample 4 (dog/4.jpg)",
    "raise": "Sample 7 (dog/7.jpg) of the train split of own cannot be read: KeyError: 'no such label' (/",
    "sys.exit": "Sample 7 (dog/7.jpg) of the train split of own cannot be read: SystemExit: 4 (/",
}


@posix
def test_a_lost_worker_is_an_error_that_names_its_samples(script):
    code, out, _ = ends(
        script(
            *LOST,
            code="""
            for what in sys.argv[1:]:
                train = loader(what, workers=2, timeout=2)
                try:
                    list(train)
                except TrainingError as error:
                    print(repr(str(error)))
            """,
        )
    )
    messages = [ast.literal_eval(line) for line in out.splitlines()]
    assert code == 0 and len(messages) == len(LOST)
    for message, words in zip(messages, LOST.values(), strict=True):
        assert words in message and message.count("\n") <= 1


@pytest.mark.slow
@posix
def test_a_hanging_worker_is_exit_code_3_and_the_process_ends(script):
    code, out, err = ends(script("stubborn", 2, 1))
    assert (code, out, err.count("\n")) == (3, "", 2) and err.startswith(
        "error: dataset.timeout=1: no batch arrived "
    )


@pytest.mark.slow
@posix
def test_a_worker_that_dies_between_two_epochs_is_noticed_at_the_next_one(script):
    code, out, _ = ends(
        script(
            code="""
            for batches in (25, 3):
                train = loader("nothing", workers=2)
                for _, _ in zip(range(batches), train):
                    pass
                os.kill(train.workers.processes[1].pid, signal.SIGKILL)
                time.sleep(0.2)
                try:
                    next(iter(train))
                except TrainingError as error:
                    print(error)
            """,
        )
    )
    assert code == 0 and out.count("was killed by SIGKILL") == 2


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("method", "what"), [("spawn", "nothing"), ("forkserver", "kill")])
def test_workers_that_begin_afresh(script, method, what):
    # Their start takes seconds, which is no hang.
    code, out, err = ends(script(what, 1, 60, method))
    if what == "nothing":
        assert (code, out, err) == (0, "100\n", "")
    else:
        assert code == 3 and LOST[what] in err


@pytest.mark.slow
def test_what_cannot_be_handed_to_workers_says_so(script):
    code, _, err = ends(
        script(
            code="""
            multiprocessing.set_start_method("spawn")
            if __name__ == "__main__":
                train = loader(lambda: 1, workers=1)
                try:
                    next(iter(train))
                except UserError as error:
                    sys.exit(exit_codes.report(error))
            """
        )
    )
    assert code == 2 and "The loader's workers could not be started: " in err
    assert "\nSet a lower dataset.workers (0: read in this process), or provide" in err


@posix
def test_a_signal_to_the_group_does_not_end_the_workers(script):
    """The training finishes its step when it is told to stop, and may want another batch for it."""
    process = script(
        code="""
        seen = []
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda number, frame: seen.append(number))
        train = loader("nothing", workers=2)
        batches = iter(train)
        next(batches)  # of one worker; the other may not have begun
        for name in (signal.SIGINT, signal.SIGTERM):
            os.killpg(0, name)
        alive = [worker.is_alive() for worker in train.workers.processes]
        print(len(list(batches)), len(seen), alive, signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)
        """
    )
    assert ends(process) == (0, "24 2 [True, True] True\n", "")


@pytest.mark.slow
@posix
def test_no_orphan_is_left_by_kill_9(script):
    process = script(
        code="""
        train = loader("stubborn", workers=3, timeout=0)
        batches = iter(train)
        next(batches)
        print("begun", flush=True)
        time.sleep(100)
        """,
    )
    assert process.stdout.readline() == "begun\n"
    process.kill()
    process.wait()
    assert gone(process.pid, seconds=30)
    process.communicate()


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("what", "end"),
    [("nothing", "1 / 0"), ("stubborn", "train.close()"), ("stubborn", "sys.exit(0)")],
)
def test_the_process_ends_with_idle_and_with_hanging_workers(script, what, end):
    code, _, _ = ends(
        script(
            what,
            code=f"""
            train = loader(sys.argv[1], workers=2, timeout=0)
            batches = iter(train)
            next(batches)
            {end}
            """,
        ),
        seconds=30,
    )
    assert code == (1 if end == "1 / 0" else 0)


class Failing(TensorSplit):
    """Sample 11 cannot be read; with `together`, no two can be read at once."""

    def __init__(self, inputs, targets, together=False):
        super().__init__(inputs, targets)
        self.together = together

    def __getitem__(self, index):
        if len(index) > 1 if self.together else 11 in index:
            raise IndexError("a\nb")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_sample_and_the_line(workers):
    for together, words in ((False, "Sample 11 of "), (True, "8 samples of ")):
        split = Failing(torch.zeros(20, 3), torch.arange(20) % 2, together)
        loader = HostLoader(Data("mine", split, None, None, (3,), 2), "train", 8, workers=workers)
        where = r"the train split of mine.* cannot be read: IndexError: a \(.*test_workers.py:\d+\)\.($|\n)"
        with pytest.raises(TrainingError, match=words + where):
            list(loader)
        loader.close()


def test_a_slow_worker_is_waited_for(monkeypatch):
    class Slow(TensorSplit):
        def __getitem__(self, index):
            time.sleep(0.2)
            return super().__getitem__(index)

    monkeypatch.setattr("stoker.data.workers.POLL", 0.05)
    split = Slow(torch.zeros(4, 3), torch.arange(4) % 2)
    data = Data("slow", split, None, None, (3,), 2)
    for timeout in (60, 0):
        loader = HostLoader(data, "train", 1, workers=1, timeout=timeout)
        loader.seek(0, 2)
        assert len(list(loader)) == 2
        next(iter(loader))  # a seek in the middle waits for what was begun
        loader.seek(0, 2)
        assert len(list(loader)) == 2
        loader.close()
    for wrong in (-1, "never", None):
        with pytest.raises(UserError, match="dataset.timeout="):
            HostLoader(data, "train", 1, timeout=wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_users_own_loader_names_batch_and_line(workers):
    split = [torch.tensor(1.0)] * 9 + ["no tensor"]
    loader = IterableLoader(torch.utils.data.DataLoader(split, batch_size=2, num_workers=workers))
    with pytest.raises(
        TrainingError,
        match=r"The loader failed at batch 5 of pass 1: (Type|Attribute)Error: .*\(.*\.py:\d+\)\.$",
    ):
        list(loader)
