"""Trainings on the simulated accelerator, whose kernels are the CPU's, equal those on the CPU."""

import functools
from pathlib import Path

import pytest
import torch
from conftest import assert_same, make_trainer

from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader
from stoker.models.cnn import CNN
from stoker.models.linear import Linear
from stoker.models.mlp import MLP
from stoker.models.resnet import ResNet
from stoker.models.whitened_cnn import Whiten, WhitenedCNN
from stoker.trainer.callbacks import EMA

pytestmark = pytest.mark.accelerator

MODELS = {
    "linear": Linear,
    "mlp": functools.partial(MLP, hidden=[16], norm="batch"),
    "cnn": functools.partial(CNN, channels=[4, 8]),
    "resnet": functools.partial(ResNet, widths=[4, 8], blocks=[1, 1]),
    "whitened_cnn": functools.partial(WhitenedCNN, widths=[8, 8]),
}
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


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
def test_each_model_trains_as_on_the_cpu(accelerator, name):
    data = make_images()
    states = []
    histories = []
    for device in ("cpu", accelerator.NAME):
        torch.manual_seed(0)
        model = MODELS[name]((1, 8, 8), 3)
        callbacks = [EMA(0.9), *([Whiten(32)] if name == "whitened_cnn" else [])]
        with make_trainer(
            model, device=device, optimizer=ADAMW, callbacks=callbacks, max_grad_norm=1.0
        ) as trainer:
            history = trainer.fit(*loaders(data, device))
            states.append(on_cpu(trainer))
            histories.append([row["val/loss"] for row in history if "val/loss" in row])
    assert_same(states[1], states[0])
    assert histories[1] == histories[0]
