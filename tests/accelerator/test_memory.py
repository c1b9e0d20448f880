"""Memory of the simulated accelerator: bounded, measured, and all returned."""

import contextlib
import gc

import pytest
import torch
from conftest import make_data, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.tasks.plan import plan
from stoker.trainer.callbacks import EMA, Callback
from stoker.trainer.errors import TrainingError

pytestmark = pytest.mark.accelerator


class Fails(Callback):
    def on_step_end(self, trainer):
        raise ZeroDivisionError


def train(device, **settings):
    """Train in doubles, where the order of a sum is not to be seen; return the weights on the CPU.

    Activations take most of the memory.
    """
    data = make_data(train=256, dtype=torch.float64)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 3)
    ).double()
    loader = DeviceLoader(data, "train", 128, shuffle=True, device=device)
    with make_trainer(model, device=device, precision="fp32", **settings) as trainer:
        trainer.fit(loader, DeviceLoader(data, "val", 7, device=device))
        return model.cpu().state_dict(), trainer.splitter.size


def test_micro_batches_that_fit_a_bounded_memory_give_the_result_of_whole_batches(
    accelerator, caplog
):
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    torch.manual_seed(0)
    expected, _ = train(accelerator.NAME)
    needed = torch.accelerator.max_memory_allocated() - before
    gc.collect()
    with accelerator.limited_memory(needed // 2):
        with pytest.raises(TrainingError, match="Out of memory on simulated:0 with a batch of 128"):
            train(accelerator.NAME)
        torch.manual_seed(0)
        weights, size = train(accelerator.NAME, micro_batch="auto")
        assert torch.accelerator.max_memory_allocated() - before <= needed
    assert size == 32
    assert "Out of memory with 128 samples at once" in caplog.text
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fails", [False, True])
def test_closing_the_trainer_returns_all_memory(accelerator, precision, fails):
    gc.collect()
    before = torch.accelerator.memory_allocated()
    device = accelerator.NAME
    trainer = make_trainer(device=device, precision=precision, max_grad_norm=1.0)
    trainer.callbacks = [EMA(0.9), *([Fails()] if fails else [])]
    train_loader = DeviceLoader(make_data(), "train", 8, shuffle=True, device=device)
    val_loader = DeviceLoader(make_data(), "val", 7, device=device)
    with contextlib.suppress(ZeroDivisionError), trainer:
        trainer.fit(train_loader, val_loader)
        trainer.predict(val_loader)
    del train_loader, val_loader
    assert torch.accelerator.memory_allocated() == before


def test_the_plan_measures_the_memory_and_writes_nothing(accelerator, processed, capsys, tmp_path):
    folder = tmp_path / "run"
    cfg = processed(
        f"device={accelerator.NAME}", "task=plan", f"run_dir={folder}", "model.hidden=[16]"
    )
    plan(cfg)
    lines = capsys.readouterr().out
    assert "device   simulated:0 (simulated accelerator)" in lines
    assert "at the peak: parameters 0.0, gradients 0.0, optimizer 0.0, data 0.1" in lines
    assert not folder.exists()


def test_rows_have_the_memory_that_the_device_holds(accelerator):
    with make_trainer(device=accelerator.NAME, log_every=4) as trainer:
        trainer.fit(DeviceLoader(make_data(), "train", 8, device=accelerator.NAME))
        values = [row["device/memory_mib"] for row in trainer.history if "train/loss" in row]
        weights = sum(weight.nbytes for weight in trainer.module.parameters()) / 2**20
    assert len(values) > 1 and min(values) >= weights
