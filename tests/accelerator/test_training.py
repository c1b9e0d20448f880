"""Trainings on the simulated accelerator, whose kernels are the CPU's, equal those on the CPU."""

import functools
from pathlib import Path

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer

from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.data.text import text
from stoker.models.cnn import CNN
from stoker.models.gpt import GPT
from stoker.models.linear import Linear
from stoker.models.mlp import MLP
from stoker.models.resnet import ResNet
from stoker.models.whitened_cnn import Whiten, WhitenedCNN
from stoker.trainer import checkpoint, parallel
from stoker.trainer.callbacks import EMA, Checkpoint

pytestmark = pytest.mark.accelerator

MODELS = {
    "linear": Linear,
    "mlp": functools.partial(MLP, hidden=[16], norm="batch"),
    "cnn": functools.partial(CNN, channels=[4, 8]),
    # The same memory format on both: see stoker.trainer.device.overruns_memory.
    "resnet": functools.partial(ResNet, widths=[16, 32], blocks=[1, 1]),
    "whitened_cnn": functools.partial(WhitenedCNN, widths=[8, 8]),
    "gpt": functools.partial(GPT, layers=1, heads=2, width=8),
}


def make_images(train=48, val=16):
    """A Data of uint8 images (1, 8, 8) in 3 classes."""
    images = torch.randint(0, 256, (train + val, 1, 8, 8), dtype=torch.uint8)
    targets = images.flatten(1).float().mean(1).argsort() % 3
    train_split = TensorSplit(images[:train], targets[:train])
    val_split = TensorSplit(images[train:], targets[train:])
    return Data("images", train_split, val_split, None, (1, 8, 8), 3, mean=[0.5], std=[0.25])


def loaders(data, device, kind=DeviceLoader, batch_size=8, **options):
    train_loader = kind(data, "train", batch_size, shuffle=True, device=device, **options)
    return train_loader, DeviceLoader(data, "val", 7, device=device)


def on_cpu(trainer):
    """The trainer's state, with all its tensors on the CPU."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.cpu(), trainer.state_dict()
    )


def test_each_model_is_among_them():
    assert set(MODELS) == {path.stem for path in Path("configs/model").glob("*.yaml")}


@pytest.mark.parametrize("name", MODELS)
def test_each_model_trains_as_on_the_cpu(accelerator, tmp_path, name):
    # The simulated device computes on the CPU, where this format is not always safe.
    is_safe = name != "resnet" or torch.backends.cpu.get_cpu_capability() == "AVX512"
    layout = "auto" if is_safe else False
    if name == "gpt":
        (tmp_path / "text").write_text("One two three four five. " * 20)
        data = text(str(tmp_path / "text"), length=8)
    else:
        data = make_images()
    states = []
    histories = []
    for device in ("cpu", accelerator.NAME):
        torch.manual_seed(0)
        model = MODELS[name](data.in_shape, data.num_classes)
        callbacks = [EMA(0.9), *([Whiten(32)] if name == "whitened_cnn" else [])]
        options = {"callbacks": callbacks, "max_grad_norm": 1.0, "channels_last": layout}
        with make_trainer(model, device=device, **options) as trainer:
            history = trainer.fit(*loaders(data, device))
            states.append(on_cpu(trainer))
            histories.append([row["val/loss"] for row in history if "val/loss" in row])
    if name == "gpt":
        # Only the CPU has fused attention, which rounds differently. The gradient of a key's bias
        # is 0 but for rounding, and Adam divides it by its size.
        torch.testing.assert_close(states[1]["model"], states[0]["model"], rtol=1e-4, atol=1e-3)
        assert histories[1] == pytest.approx(histories[0], rel=1e-5)
    else:
        assert_same(states[1], states[0])
        assert histories[1] == histories[0]


def by_hand(data, device, dtype, epochs):
    """Train the usual model as the documentation of torch does; return its weights, and how many
    steps the scaler has skipped.
    """
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, weight_decay=0.0)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    skipped = 0
    loader = DeviceLoader(data, "train", 8, shuffle=True, device=device)
    for epoch in range(epochs):
        loader.seek(epoch)
        for inputs, targets in loader:
            with torch.autocast(device, dtype=dtype):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < before
            optimizer.zero_grad()
    return model.state_dict(), skipped


@pytest.mark.parametrize(
    ("dtype", "precision", "size"),
    [
        (torch.bfloat16, "bf16", 1),
        (torch.float16, "fp16", 1),
        (torch.float16, "fp16", 3000),  # gradients overflow until the scale is small enough
    ],
)
def test_autocast_trains_as_plain_torch_does(accelerator, dtype, precision, size):
    data = make_data()
    data.train.inputs.mul_(size)
    expected, skipped = by_hand(data, accelerator.NAME, dtype, epochs=3)
    assert (skipped > 0) == (size > 1)
    trainer = make_trainer(
        device=accelerator.NAME,
        precision=precision,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0),
        scheduler=None,
    )
    trainer.fit(*loaders(data, accelerator.NAME))
    assert_same(trainer.module.state_dict(), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_batches_streamed_by_workers_train_as_resident_ones(accelerator, precision):
    states = []
    for kind in (DeviceLoader, functools.partial(HostLoader, workers=2)):
        trainer = make_trainer(device=accelerator.NAME, precision=precision)
        trainer.fit(*loaders(make_data(), accelerator.NAME, kind))
        states.append(on_cpu(trainer))
    assert_same(states[1], states[0])


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [("fp32", torch.float32, 1e-6), ("bf16", torch.bfloat16, 1e-2), ("fp16", torch.float16, 2e-3)],
)
def test_replicas_on_two_devices_train_as_one_model(
    accelerator, monkeypatch, precision, dtype, tolerance
):
    monkeypatch.setattr(parallel, "REPLICAS", (accelerator.NAME,))
    for name in ("_broadcast_coalesced", "_scatter", "_gather"):
        monkeypatch.setattr(torch._C, name, getattr(accelerator, name))
    computed = set()
    weights = []
    for strategy in ("single", "dp"):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3)
        model.register_forward_hook(
            lambda *made: computed.add((made[2].device.index, made[2].dtype))
        )
        trainer = make_trainer(
            model,
            device=accelerator.NAME,
            strategy=strategy,
            precision=precision,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )
        trainer.fit(*loaders(make_data(), accelerator.NAME))
        weights.append(trainer.module.state_dict())
    assert computed == {(0, dtype), (1, dtype)}
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=tolerance)


def test_a_run_is_resumed_on_other_devices_as_if_it_had_stayed(accelerator, tmp_path):
    def train(device, folder, resume=None, **settings):
        trainer = make_trainer(
            make_model(dropout=0.5),
            device=device,
            callbacks=[EMA(0.9), Checkpoint(folder, every=8, keep=9)],
            **settings,
        )
        trainer.fit(*loaders(make_data(), device), resume=resume)
        return on_cpu(trainer)

    device = f"{accelerator.NAME}:0"
    whole = train(device, tmp_path / "a")
    train("cpu", tmp_path / "b", checkpoint.path_of(tmp_path / "a", 8))
    last = checkpoint.path_of(tmp_path / "b", 16)
    resumed = train(f"{accelerator.NAME}:1", tmp_path / "c", last)
    assert_same(resumed, whole)
