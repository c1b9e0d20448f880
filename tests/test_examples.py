"""The examples: short, and right."""

import functools
from pathlib import Path

import pytest
import torch
from conftest import assert_same

from data import datasets
from data.loader import make_loaders
from examples.autoencoder import Autoencoder, AutoencoderTrainer
from examples.gan import GAN, GANTrainer
from trainer import checkpoint
from trainer.callbacks import Checkpoint
from trainer.metrics import MSE

FILES = sorted(Path(__file__).parents[1].glob("examples/[!_]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_example_is_short(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 40


def fitted(kind, model, **settings):
    (train_loader, val_loader, test_loader), _ = make_loaders(datasets.digits(), batch_size=64)
    torch.manual_seed(0)
    trainer = kind(model(), optimizer=functools.partial(torch.optim.AdamW, lr=3e-3), device="cpu", **settings)
    trainer.fit(train_loader, val_loader)
    return trainer, test_loader


def test_the_autoencoder_learns_its_inputs_and_not_their_labels():
    build = functools.partial(Autoencoder, (1, 8, 8))
    trainer, test_loader = fitted(AutoencoderTrainer, build, loss=torch.nn.MSELoss(), metrics={"mse": MSE()}, epochs=4)
    images = torch.cat([inputs for inputs, _ in test_loader])
    results = trainer.evaluate(test_loader, "test")
    rebuilt = trainer.predict(test_loader)
    torch.testing.assert_close(
        results["test/loss"], torch.nn.functional.mse_loss(rebuilt, images).item(), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(results["test/mse"], results["test/loss"], rtol=1e-5, atol=0)
    assert results["test/loss"] < 0.3 * images.var().item()  # far better than the mean image


def test_the_gan_steps_both_its_optimizers_and_resumes_exactly(tmp_path):
    build = functools.partial(GAN, (1, 8, 8))
    whole, _ = fitted(GANTrainer, build, max_steps=30, callbacks=[Checkpoint(tmp_path, every=10, keep=9)])
    state = checkpoint.load(tmp_path / "step_00000010.ckpt")
    assert {int(moment["step"]) for moment in state["judge_optimizer"]["state"].values()} == {10}
    assert {int(moment["step"]) for moment in state["optimizer"]["state"].values()} == {10}

    (train_loader, val_loader, _), _ = make_loaders(datasets.digits(), batch_size=64)
    torch.manual_seed(1)  # other weights, which the checkpoint has to replace
    continued = GANTrainer(build(), optimizer=functools.partial(torch.optim.AdamW, lr=3e-3), device="cpu", max_steps=30)
    continued.fit(train_loader, val_loader, resume=tmp_path / "step_00000010.ckpt")
    for name in ("model", "optimizer", "judge_optimizer", "scheduler"):
        assert_same(continued.state_dict()[name], whole.state_dict()[name], name)
