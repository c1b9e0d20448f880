"""What only a GPU can show: skipped, with the reason, where there is none."""

import copy
import functools
import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer

from stoker.data.loader import DeviceLoader, HostLoader
from stoker.diagnostics.timing import Timing
from stoker.trainer import checkpoint, optimizers
from stoker.trainer import device as devices
from stoker.trainer.callbacks import EMA, Callback, Checkpoint
from stoker.trainer.device import choose, move
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TRAIN = Path(__file__).resolve().parent.parent / "train.py"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def loaders(kind=DeviceLoader, batch_size=8, device="cuda", **options):
    data = make_data(**options)
    return kind(data, "train", batch_size, shuffle=True, device=device), kind(
        data, "val", 7, device=device
    )


def test_auto_is_the_gpu_and_everything_is_on_it():
    trainer = make_trainer(device="auto", epochs=1)
    trainer.fit(*loaders())
    assert trainer.device == torch.device("cuda", 0)
    tensors = [*trainer.module.state_dict().values()]
    tensors += [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    assert {tensor.device for tensor in tensors} == {torch.device("cuda", 0)}
    assert trainer.optimizer.defaults["fused"]


def test_auto_precision_follows_the_architecture():
    major, _ = torch.cuda.get_device_capability()
    expected = torch.bfloat16 if major >= 8 else torch.float16 if major == 7 else None
    assert make_trainer(device="cuda").dtype is expected


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_precision_learns_what_fp32_on_the_cpu_learns(precision):
    def loss(device, precision):
        trainer = make_trainer(device=device, precision=precision, epochs=20)
        train_loader, val_loader = loaders(device=device, train=400)
        trainer.fit(train_loader)
        return trainer.evaluate(val_loader)["val/loss"]

    assert loss("cuda", precision) == pytest.approx(loss("cpu", "fp32"), abs=0.02)


def test_pinned_batches_move_without_waiting_and_arrive_whole():
    source = torch.arange(2**22, dtype=torch.float32).pin_memory()
    moved = move({"inputs": [source], "name": "x"}, torch.device("cuda", 0))
    assert moved["name"] == "x"
    assert torch.equal(moved["inputs"][0].cpu(), source)


def test_streamed_batches_are_resident_batches_on_the_gpu():
    resident, streamed = (
        list(loaders(kind)[0]) for kind in (DeviceLoader, functools.partial(HostLoader, workers=2))
    )
    assert_same(streamed, resident)
    assert resident[0][0].is_cuda
    assert loaders(HostLoader)[0].loader.pin_memory


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_step_waits_for_the_gpu(precision):
    """Any synchronisation between two logged rows raises."""

    class Guard(Callback):
        def on_step_end(self, trainer):
            torch.cuda.set_sync_debug_mode("error" if 2 <= trainer.step < 18 else "default")

    trainer = make_trainer(
        device="cuda",
        precision=precision,
        max_steps=20,
        log_every=1000,
        grad_accum_steps=2,
        max_grad_norm=1.0,
    )
    trainer.callbacks = [EMA(0.9), Guard()]
    train_loader, _ = loaders(train=200)  # 25 steps an epoch: the guard sees one epoch
    try:
        trainer.fit(train_loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.step == 20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_are_eager_steps_to_the_bit(precision):
    """With dropout, clipping, micro-batches, EMA, a schedule and a ragged last batch in each
    epoch.
    """
    devices.choose_kernels(torch.device("cuda"), deterministic=True)
    results = []
    for compile in (False, "graph"):
        settings = {
            "max_grad_norm": 0.5,
            "grad_accum_steps": 2,
            "precision": precision,
        }
        model = make_model(dropout=0.3)
        trainer = make_trainer(
            model, device="cuda", compile=compile, callbacks=[EMA(0.9)], **settings
        )
        optimizers.make_capturable(
            trainer.optimizer, trainer.device
        )  # on both sides: the rate as a float32 tensor
        trainer.fit(*loaders())
        results.append(copy.deepcopy(trainer.state_dict()))
    assert len(trainer.special_step.captured.graphs) == 2
    for name in ("model", "callbacks", "scheduler", "step"):
        assert_same(results[1][name], results[0][name], name)


def test_memory_is_returned():
    def job():
        with make_trainer(make_model(features=4096), device="cuda", epochs=1) as trainer:
            trainer.fit(*loaders(features=4096, train=512))

    job()  # what the libraries keep for themselves
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):
        job()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before[0]
    assert torch.cuda.memory_reserved() <= before[1]


def test_memory_is_returned_after_an_error():
    class Fails(Callback):
        def on_step_end(self, trainer):
            raise ZeroDivisionError

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with (
        pytest.raises(ZeroDivisionError),
        make_trainer(make_model(features=4096), device="cuda", callbacks=[Fails()]) as trainer,
    ):
        trainer.fit(*loaders(features=4096, train=512))
    del trainer
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_a_resume_is_bit_identical_with_deterministic_kernels(tmp_path):
    devices.choose_kernels(torch.device("cuda"), deterministic=True)

    def trainer(folder):
        callbacks = [EMA(0.9), Checkpoint(folder, every=10, keep=9)]
        return make_trainer(
            make_model(dropout=0.5),
            device="cuda",
            callbacks=callbacks,
            precision="bf16",
        )

    whole, continued = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    whole.fit(*loaders())
    continued.fit(*loaders(), resume=checkpoint.path_of(tmp_path / "a", 10))
    assert_same(continued.state_dict(), whole.state_dict())


def test_a_tensor_left_on_the_cpu_is_named():
    class Mask(torch.nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.mask = torch.ones(3)  # not a buffer

        def forward(self, inputs):
            return super().forward(inputs) * self.mask

    with pytest.raises(UserError, match=r"attribute 'mask'.*is on cpu"):
        make_trainer(Mask(), device="cuda").fit(*loaders())


def test_out_of_memory_names_the_batch():
    class Hungry(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) + torch.ones(2**42, device=inputs.device).sum()

    with pytest.raises(TrainingError, match="batch of 8"):
        make_trainer(Hungry(6, 3), device="cuda").fit(*loaders())


@two_gpus
def test_a_chosen_gpu_leaves_the_others_empty():
    assert choose("cuda:1") == torch.device("cuda", 1)
    make_trainer(device="cuda:1", epochs=1).fit(*loaders(device="cuda:1"))
    assert torch.cuda.memory_allocated(0) == 0


@two_gpus
def test_data_parallel_gives_what_one_gpu_gives():
    results = []
    for strategy in ("single", "dp"):
        trainer = make_trainer(device="cuda:0", strategy=strategy, precision="fp32", epochs=1)
        trainer.fit(*loaders())
        results.append(trainer.module.state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("wait", "least", "most"), [(0.0, 0.0, 0.1), (0.04, 0.4, 0.9)])
def test_the_split_of_time_is_the_gpu_s_own_and_not_that_of_the_queue(wait, least, most):
    """Python is far ahead of large products, which are not its waiting; a loader that is slower
    than they are is.
    """

    class Slow:
        batch_size = 8

        def __len__(self):
            return 40

        def __iter__(self):
            for _ in range(40):
                time.sleep(wait)
                yield torch.randn(8, 64), torch.arange(8) % 3

    class Heavy(torch.nn.Linear):
        def forward(self, inputs):
            self.large @ self.large  # 10 to 40 ms
            return super().forward(inputs)

    model = Heavy(64, 3)
    model.register_buffer("large", torch.ones(8192, 8192))
    optimizer, timing = functools.partial(torch.optim.SGD, lr=0.1), Timing()
    loss, more = (
        torch.nn.CrossEntropyLoss(),
        {"device": "cuda", "precision": "fp32", "callbacks": [timing]},
    )
    trainer = Trainer(model, loss, optimizer, **more)
    trainer.fit(Slow())
    took = timing.took
    assert least <= took.get("data", 0.0) / sum(took.values()) <= most
    assert took["forward"] >= 10 * took["backward"]


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_train_what_one_does(tmp_path, strategy):
    """With NCCL, the statistics of BatchNorm over both, accumulation, clipping, EMA, and an exact
    resume.
    """
    job = [
        "model=cnn",
        "model.channels=[8,16]",
        "dataset=synthetic",
        "dataset.in_shape=[1,8,8]",
        "device=cuda",
    ]
    job += [
        "precision=fp32",
        "deterministic=true",
        "optimizer=sgd",
        "batch_size=30",
        "max_steps=24",
        "eval_every=10",
    ]
    job += [
        "max_grad_norm=1",
        "ema=0.9",
        "checkpoint.every=12",
        "checkpoint.keep=9",
        "dataset.n=400",
    ]

    def train(name, *command):
        command = [*command, str(TRAIN), f"run_dir={tmp_path / name}", *job]
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return checkpoint.load(checkpoint.path_of(tmp_path / name / "checkpoints", 24))

    several = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job.append(f"strategy={strategy}")
    whole = train("several", *several)
    checkpoint.path_of(tmp_path / "several" / "checkpoints", 24).unlink()
    again = train("several", *several)
    assert_same(again["model"], whole["model"])
    job[-1] = "strategy=single"
    one = train("one")
    for name, tensor in one["model"].items():
        torch.testing.assert_close(whole["model"][name], tensor, rtol=1e-3, atol=1e-4)
