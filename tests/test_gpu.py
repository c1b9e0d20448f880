"""What only a GPU can show: skipped, with the reason, where there is none."""

import copy
import functools
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import GoBack, assert_same, make_data, make_model, make_trainer

from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.diagnostics.timing import Timing
from stoker.models.cnn import CNN
from stoker.models.mlp import MLP
from stoker.models.resnet import ResNet
from stoker.models.whitened_cnn import WhitenedCNN
from stoker.trainer import checkpoint, optimizers, parallel, schedules
from stoker.trainer import device as devices
from stoker.trainer.callbacks import EMA, Callback, Checkpoint
from stoker.trainer.device import choose
from stoker.trainer.errors import TrainingError, UserError, explanation_of
from stoker.trainer.trainer import Trainer
from stoker.trainer.transfer import move

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TRAIN = Path(__file__).resolve().parent.parent / "train.py"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def loaders(kind=DeviceLoader, batch_size=8, device="cuda", **options):
    data = make_data(**options)
    return kind(data, "train", batch_size, shuffle=True, device=device), kind(
        data, "val", 7, device=device
    )


def make_images(train=64, size=8):
    """A Data of uint8 images (3, size, size) in 3 classes."""
    images = torch.randint(0, 256, (train + 8, 3, size, size), dtype=torch.uint8)
    targets = torch.arange(train + 8) % 3
    train_split = TensorSplit(images[:train], targets[:train])
    val_split = TensorSplit(images[train:], targets[train:])
    return Data("images", train_split, val_split, None, (3, size, size), 3)


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
    assert loaders(HostLoader)[0].workers.loader.pin_memory


class Guard(Callback):
    """Lets any synchronisation between two logged rows raise."""

    def on_step_end(self, trainer):
        torch.cuda.set_sync_debug_mode("error" if 8 <= trainer.step < 18 else "default")

    def on_fit_end(self, trainer):
        torch.cuda.set_sync_debug_mode("default")


def own_loader(data):
    tensors = torch.utils.data.TensorDataset(data.train.inputs, data.train.targets)
    return torch.utils.data.DataLoader(tensors, 8, shuffle=True)


AUGMENTED = {"augment": ["flip", {"crop": 2}, "mixup"]}
STREAMED = functools.partial(HostLoader, workers=2)


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        (DeviceLoader, {}, {"precision": "fp32", "grad_accum_steps": 2, "max_grad_norm": 1.0}),
        (DeviceLoader, {}, {"precision": "bf16", "grad_accum_steps": 2, "max_grad_norm": 1.0}),
        (DeviceLoader, {}, {"precision": "fp16", "grad_accum_steps": 2, "max_grad_norm": 1.0}),
        (DeviceLoader, AUGMENTED, {}),
        (DeviceLoader, {}, {"compile": "graph"}),
        (STREAMED, AUGMENTED, {}),
        (None, {}, {}),
    ],
    ids=["fp32", "bf16", "fp16", "augmented", "graph", "streamed", "of your own"],
)
def test_no_step_waits_for_the_gpu(kind, options, settings):
    data = make_images(train=200)  # 25 steps an epoch: the guard sees one epoch
    loader = own_loader(make_data(train=200, features=192))
    if kind is not None:
        loader = kind(data, "train", 8, shuffle=True, device="cuda", **options)
    model = torch.nn.Sequential(torch.nn.Flatten(), make_model(features=192))
    trainer = make_trainer(model, device="cuda", max_steps=20, log_every=1000, **settings)
    trainer.callbacks = [EMA(0.9), Guard()]
    trainer.fit(loader)
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


def held():
    """The memory of tensors, and that which this process keeps from others."""
    gc.collect()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize(
    "settings", [{}, {"compile": "graph"}, {"ema": 0.9}, {"grad_accum_steps": 4}], ids=str
)
def test_memory_is_returned(settings):
    settings = dict(settings)
    callbacks = [EMA(settings.pop("ema"))] if "ema" in settings else []
    given = loaders(features=4096, train=512)  # these stay: `close` returns all but them

    def job():
        model = make_model(features=4096)
        with make_trainer(
            model, device="cuda", epochs=1, callbacks=callbacks, **settings
        ) as trainer:
            trainer.fit(*given)

    for _ in range(2):  # cuBLAS keeps a workspace (32 MiB on an H200) per thread and stream
        job()
    allocated, reserved = held()
    for _ in range(20):
        job()
    after = held()
    assert after[0] <= allocated
    assert after[1] <= reserved


def test_memory_is_returned_after_an_error():
    class Fails(Callback):
        def on_step_end(self, trainer):
            raise ZeroDivisionError

    def job():
        model = make_model(features=4096)
        with (
            pytest.raises(ZeroDivisionError),
            make_trainer(model, device="cuda", callbacks=[Fails()]) as trainer,
        ):
            trainer.fit(*loaders(features=4096, train=512))

    job()  # as above
    torch.cuda.empty_cache()
    before, _ = held()
    job()
    assert held()[0] <= before + 2**20


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


def test_a_tensor_left_on_the_cpu_is_explained_at_its_line():
    class Mask(torch.nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.mask = torch.ones(3)  # not a buffer

        def forward(self, inputs):
            return super().forward(inputs) * self.mask

    with pytest.raises(RuntimeError, match="same device") as caught:
        make_trainer(Mask(), device="cuda").fit(*loaders())
    text = explanation_of(caught.value)
    assert text.startswith("RuntimeError in forward (") and "self.register_buffer" in text


def test_out_of_memory_names_the_batch():
    class Hungry(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) + torch.ones(2**42, device=inputs.device).sum()

    with pytest.raises(TrainingError, match="batch of 8"):
        make_trainer(Hungry(6, 3), device="cuda").fit(*loaders())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_compute_in_the_type_of_the_step(dtype):
    """Two replicas on one GPU; torch gives their threads fp16 whatever the step's type is."""
    layer = torch.nn.Linear(6, 3).cuda()
    types = []
    layer.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    model = parallel.Replicated(layer, device_ids=[0, 0])
    with devices.autocast(torch.device("cuda", 0), dtype):
        model(torch.randn(8, 6, device="cuda"))
    assert types == [dtype, dtype]


def test_two_replicas_on_one_gpu_train_what_it_does_alone():
    ends = []
    for strategy in ("single", "dp"):
        trainer = make_trainer(device="cuda", precision="fp32", epochs=1)
        if strategy == "dp":
            trainer.model = parallel.Replicated(trainer.module, device_ids=[0, 0])
            trainer.replica_indices = parallel.replica_indices(trainer.model)
        trainer.fit(*loaders())
        ends.append(trainer.module.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-5, atol=1e-6)


def test_a_step_is_captured_beside_a_thread_that_pins_memory():
    for _ in range(5):
        loader = HostLoader(
            make_images(train=2048, size=96), "train", 64, shuffle=True, device="cuda", workers=4
        )
        model = torch.nn.Sequential(torch.nn.Flatten(), make_model(features=3 * 96 * 96))
        with make_trainer(model, device="cuda", compile="graph", epochs=1) as trainer:
            trainer.fit(loader)
            assert len(trainer.special_step.captured.graphs) == 1
        loader.close()


GRAPHED = """
import functools, torch, warnings
from stoker import Trainer
loader = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 2]))] * 10
optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
model, loss = torch.nn.Linear(6, 3), torch.nn.CrossEntropyLoss()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Trainer(model, loss, optimizer, device="cuda", compile="graph") as trainer:
        trainer.fit(loader)
        print(len(trainer.special_step.captured.graphs))
print([str(warning.message) for warning in caught])
"""


def test_the_steps_before_a_graph_warn_of_nothing():
    """In a process of its own: torch warns once, and an earlier test may have had the warning."""
    done = subprocess.run(
        [sys.executable, "-c", GRAPHED], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-2:] == ["1", "[]"], done.stderr


class Asking(Trainer):
    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        return (loss * 2 if loss.item() > 100 else loss), outputs


class Copying(Trainer):
    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        return loss * torch.tensor([0.5]).to(loss.device).sum(), outputs


class Stepping(Trainer):
    def compute_loss(self, batch):
        loss, outputs = super().compute_loss(batch)
        return loss * (1 + self.step), outputs


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(Asking, "waits for"), (Copying, "waits for"), (Stepping, "reads self.step")],
)
def test_a_step_that_no_graph_can_repeat_is_refused_and_the_process_goes_on(kind, problem):
    trainer = make_trainer(kind=kind, device="cuda", compile="graph")
    with pytest.raises(UserError, match=f"compile=graph: the step {problem}"):
        trainer.fit(*loaders())
    trainer = make_trainer(make_model(dropout=0.5), device="cuda", compile="graph", epochs=1)
    trainer.fit(*loaders())
    assert trainer.special_step.captured.graphs


def test_a_state_that_is_loaded_in_a_captured_fit_is_trained_on():
    devices.choose_kernels(torch.device("cuda"), deterministic=True)
    ends = []
    for compile in (False, "graph"):
        trainer = make_trainer(
            device="cuda", compile=compile, callbacks=[GoBack()], scheduler=schedules.constant
        )
        optimizers.make_capturable(trainer.optimizer, trainer.device)
        trainer.fit(*loaders(train=64))
        ends.append(copy.deepcopy(trainer.module.state_dict()))
    assert_same(*ends)


def test_a_checkpoint_is_copied_into_pinned_memory_before_the_next_step():
    trainer = make_trainer(device="cuda", epochs=1)
    trainer.fit(*loaders())
    state = trainer.state_dict()
    copied = checkpoint.copy(state)
    expected = {name: tensor.cpu() for name, tensor in state["model"].items()}
    trainer.fit(*loaders())
    assert_same(dict(copied["model"]), expected)
    assert all(tensor.is_pinned() for tensor in copied["model"].values())


def test_too_little_memory_halves_the_micro_batches_and_changes_no_weight():
    devices.choose_kernels(torch.device("cuda"), deterministic=True)
    loader = DeviceLoader(make_data(features=64, train=2**15), "train", 2**15, device="cuda")

    def trained(**settings):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 4096), torch.nn.Tanh()]
        layers += [torch.nn.Linear(4096, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 3)]
        optimizer = functools.partial(torch.optim.SGD, lr=0.1)
        settings.update(device="cuda", precision="fp32", optimizer=optimizer, max_steps=3)
        with make_trainer(torch.nn.Sequential(*layers), **settings) as trainer:
            trainer.fit(loader)
            weights = {name: x.cpu() for name, x in trainer.module.state_dict().items()}
            return trainer.splitter.size, weights

    _, expected = trained()
    most = torch.cuda.max_memory_allocated()  # nearly all of it activations, 512 MiB a layer
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.5 * most / total)
    try:
        size, weights = trained(micro_batch="auto")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert size in (2**12, 2**13, 2**14)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


MODELS = {
    "mlp": functools.partial(MLP, hidden=[16], norm="batch"),
    "cnn": functools.partial(CNN, channels=[8, 16]),
    "resnet": functools.partial(ResNet, widths=[16, 32], blocks=[1, 1]),
    "whitened_cnn": functools.partial(WhitenedCNN, widths=[8, 8]),
}


@pytest.mark.parametrize("name", MODELS)
def test_deterministic_kernels_exist_for_each_model(name):
    devices.choose_kernels(torch.device("cuda"), deterministic=True)
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        data = make_images()
        trainer = make_trainer(MODELS[name]((3, 8, 8), 3), device="cuda", epochs=2)
        trainer.fit(DeviceLoader(data, "train", 8, shuffle=True, device="cuda", **AUGMENTED))
        ends.append(trainer.module.state_dict())
    assert_same(dict(ends[0]), dict(ends[1]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_worker_ends_a_fit_that_pins():
    class Kill(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 3:
                os.kill(loader.workers.processes[0].pid, signal.SIGKILL)

    loader = HostLoader(make_data(train=400), "train", 4, device="cuda", workers=2)
    began = time.monotonic()
    with pytest.raises(TrainingError, match="was killed by SIGKILL"):
        make_trainer(device="cuda", callbacks=[Kill()]).fit(loader)
    loader.close()
    assert time.monotonic() - began < 20


OUT_OF_RANGE = """
import functools, torch
from stoker import Trainer
from stoker.trainer.callbacks import EMA
loader = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 7]))] * 60
optimizer = functools.partial(torch.optim.SGD, lr=0.1)
model, loss = torch.nn.Linear(6, 3), torch.nn.CrossEntropyLoss()
with Trainer(model, loss, optimizer, device="cuda", callbacks=[EMA(0.9)]) as trainer:
    trainer.fit(loader)
"""


def test_a_class_out_of_range_is_named_as_the_likely_cause():
    """In a process of its own, which cannot use the GPU any more."""
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_RANGE], capture_output=True, text=True, timeout=120
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("An assertion inside a GPU kernel failed"), done.stderr
    assert last.endswith("Type device=cpu: there, the same step fails with a clear message.")


@two_gpus
def test_a_chosen_gpu_leaves_the_others_empty():
    assert choose("cuda:1") == torch.device("cuda", 1)
    gc.collect()
    before = torch.cuda.memory_allocated(0)  # of the tests before this one
    make_trainer(device="cuda:1", epochs=1).fit(*loaders(device="cuda:1"))
    assert torch.cuda.memory_allocated(0) == before


@two_gpus
def test_data_parallel_gives_what_one_gpu_gives():
    results = []
    for strategy in ("single", "dp"):
        trainer = make_trainer(device="cuda:0", strategy=strategy, precision="fp32", epochs=1)
        trainer.fit(*loaders())
        results.append(trainer.module.state_dict())
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("wait", "least", "most"), [(0, 0.0, 0.1), (2, 0.4, 0.9)])
def test_the_split_of_time_is_the_gpu_s_own_and_not_that_of_the_queue(wait, least, most):
    """Python is far ahead of large products, which are not its waiting; a loader that takes twice
    as long as they do is.
    """

    class Slow:
        batch_size = 8

        def __init__(self, batches, seconds):
            self.batches = batches
            self.seconds = seconds

        def __len__(self):
            return self.batches

        def __iter__(self):
            for _ in range(self.batches):
                time.sleep(self.seconds)
                yield torch.randn(8, 64), torch.arange(8) % 3

    class Heavy(torch.nn.Linear):
        def forward(self, inputs):
            self.large @ self.large
            return super().forward(inputs)

    model = Heavy(64, 3)
    model.register_buffer("large", torch.randn(8192, 8192))
    timing = Timing()
    trainer = make_trainer(
        model,
        device="cuda",
        precision="fp32",
        epochs=1,
        callbacks=[timing],
        scheduler=schedules.constant,
    )
    trainer.fit(Slow(3, 0))  # the first step of a process loads libraries
    inputs = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            model(inputs)
        torch.cuda.synchronize()
        product = (time.perf_counter() - began) / 10
    trainer.fit(Slow(40, wait * product))
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
