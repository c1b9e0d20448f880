"""What a step costs, in things that can be counted: Python calls, operators, host syncs, reads of
the data, imports.
"""

import functools
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path
from traceback import extract_stack

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.command.tuning import spare_the_compiler
from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.diagnostics import timing
from stoker.trainer.callbacks import EMA, NaNGuard
from stoker.trainer.metrics import Mean
from stoker.trainer.trainer import Trainer

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def batches(n):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 5, generator=generator), torch.arange(4) % 3) for _ in range(n)]


def trainer(optimizer=SGD, **settings):
    torch.manual_seed(0)
    return Trainer(
        torch.nn.Linear(5, 3), torch.nn.CrossEntropyLoss(), optimizer, device="cpu", **settings
    )


def bare_loop(batches):
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(5, 3), torch.nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), fused=True)
    for inputs, targets in batches:
        loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def python_calls(function):
    """How many Python functions were called while the function ran."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def per_step(count):
    """What 200 steps more add to `count(steps)`, a step."""
    count(20)  # what is done once
    return (count(300) - count(100)) / 200


def calls_beyond_the_bare_loop(*callbacks):
    """How many more Python functions a step calls.

    In a process as the command tunes it: the bare loop's zero_grad calls fewer functions there.
    """
    spare_the_compiler()

    def ours(steps):
        fitted, given = trainer(callbacks=[NaNGuard(), *callbacks], log_every=10**6), batches(steps)
        return python_calls(lambda: fitted.fit(given))

    def bare(steps):
        given = batches(steps)
        return python_calls(lambda: bare_loop(given))

    return per_step(ours) - per_step(bare)


def test_python_calls_of_a_step():
    calls = calls_beyond_the_bare_loop()
    assert calls <= 8, calls


def test_python_calls_of_a_step_that_timing_does_not_sample(monkeypatch):
    monkeypatch.setattr(timing, "ALWAYS", 2)
    monkeypatch.setattr(timing, "SHARE", 0.0)
    calls = calls_beyond_the_bare_loop(timing.Timing())
    assert calls <= 12, calls


class Frames(torch.autograd.Function):
    """The identity; writes down the calls that lead from `fit` to the backward pass."""

    seen = None

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        stack = [(Path(frame.filename).resolve(), frame.name) for frame in extract_stack()]
        names = [name for _, name in stack]
        Frames.seen = stack[names.index("fit") : names.index("backward")]
        return gradient


class Framed(torch.nn.Linear):
    def forward(self, inputs):
        return Frames.apply(super().forward(inputs))


def test_two_frames_of_one_file_from_fit_to_backward():
    Trainer(Framed(5, 3), torch.nn.CrossEntropyLoss(), SGD, device="cpu").fit(batches(1))
    file = Path(inspect.getsourcefile(Trainer)).resolve()
    assert Frames.seen == [(file, "fit"), (file, "train_step")]


def test_the_trainer_is_short():
    assert len(Path(inspect.getsourcefile(Trainer)).read_text().splitlines()) <= 300
    assert len(inspect.signature(Trainer).parameters) <= 20


def test_the_trainer_documents_each_argument():
    for name in inspect.signature(Trainer).parameters:
        assert f"\n        {name}: " in Trainer.__doc__, name


class Uniform(list):
    """Batches of which it is known that no target is ignored."""

    targets_are_uniform = True


def operators_beyond_the_bare_loop(kind):
    """{operator: how many more of it a step runs}."""

    def count(run, steps):
        given = kind(batches(steps))
        with Operators() as operators:
            run(given)
        return operators.counts

    def ours(given):
        trainer(log_every=10**6).fit(given)

    extra = count(ours, 300) - count(ours, 100)
    extra.subtract(count(bare_loop, 300) - count(bare_loop, 100))
    return {name: n / 200 for name, n in extra.items() if n and not name.startswith("profiler.")}


def test_operators_of_a_step_are_the_bare_loop_s_and_two_more():
    assert operators_beyond_the_bare_loop(Uniform) == {
        "aten.detach.default": 1,  # the loss, for the window
        "aten._local_scalar_dense.default": 1,  # on the CPU, its value for the running mean
    }


def test_operators_of_a_step_whose_loss_may_ignore_targets_count_them_too():
    assert operators_beyond_the_bare_loop(list) == {
        "aten.detach.default": 1,
        "aten.amin.default": 1,  # the lowest target: none is ignored
        "aten._local_scalar_dense.default": 2,  # its value, and that of the loss
    }


def test_a_mean_on_a_device_takes_one_kernel_per_value():
    mean = Mean()
    value = torch.zeros((), device="meta", requires_grad=True)
    mean.update(value, 4)
    with Operators() as operators:
        mean.update(value, 4)
    assert operators.counts == {"aten.detach.default": 1, "aten.add_.Tensor": 1}


# On the CPU, a mean reads each value at once. tests/accelerator tests that no step waits for a
# device.
def test_a_step_reads_its_loss_and_its_norm_and_a_row_reads_their_means():
    for optimizer in (SGD, functools.partial(torch.optim.AdamW, lr=1e-3)):
        rows = []

        class Rows(NaNGuard):
            def on_log(self, trainer, row, rows=rows):
                rows.append(row)

        with Operators() as operators:
            trainer(optimizer, callbacks=[Rows(), EMA(0.9)], log_every=25, max_grad_norm=1.0).fit(
                Uniform(batches(100))
            )
        assert len(rows) == 4
        # the weights' counts at the end are copied at once
        assert operators.counts["aten._local_scalar_dense.default"] == 2 * 100 + 2 * len(rows)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_with_fp16_reads_only_its_loss_and_a_row_its_numbers(max_grad_norm):
    rows = []

    class Rows(NaNGuard):
        def on_log(self, trainer, row):
            rows.append(row)

    scaled = trainer(
        callbacks=[Rows()], log_every=25, max_grad_norm=max_grad_norm, precision="fp16"
    )
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    with Operators() as operators:
        scaled.fit(Uniform(batches(100)))
    assert scaled.scaler.get_scale() < 2.0**22, "no step was skipped"
    assert len(rows) == 4
    # the loss and the scale, the number of norms and their sum
    asked = 2 if max_grad_norm is None else 4
    assert operators.counts["aten._local_scalar_dense.default"] == 100 + asked * len(rows)


class Counted(TensorSplit):
    """Counts how often each sample is read."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.reads, self.wholes = Counter(), 0

    def __getitem__(self, index):
        self.reads.update(index)
        return super().__getitem__(index)

    def tensors(self):
        self.wholes += 1
        return super().tensors()


def test_resident_data_is_read_once_and_streamed_data_once_an_epoch():
    for kind in (DeviceLoader, HostLoader):
        split = Counted(torch.randn(30, 5), torch.arange(30) % 3)
        loader = kind(Data("counted", split, None, None, (5,), 3), "train", 4, shuffle=True)
        trainer(epochs=3).fit(loader)
        if kind is DeviceLoader:
            assert split.wholes == 1 and not split.reads
        else:
            assert not split.wholes and split.reads == Counter(dict.fromkeys(range(30), 3))


def test_the_default_job_imports_no_compiler(tmp_path):
    code = f"""
import sys
sys.argv = ["train.py", "max_steps=2", "run_dir={tmp_path / "run"}"]
import runpy
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as error:
    assert not error.code, error.code
print("compiler:", [name for name in ("torch._dynamo", "torch._inductor", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compiler: []" in done.stdout
