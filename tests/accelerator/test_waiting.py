"""Between two logged rows no step waits for the device, and no copy to it is waited for."""

import functools
import time

import pytest
import torch
from conftest import make_data, make_model, make_trainer
from torch.utils.data import DataLoader, TensorDataset

from accelerator.test_training import make_images
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.models.cnn import CNN
from stoker.trainer import device as devices
from stoker.trainer import transfer
from stoker.trainer.callbacks import EMA, Callback

pytestmark = pytest.mark.accelerator

FIRST = 3  # steps in which an optimizer makes its state
LAST = 43
FUSED = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


class Counted(Callback):
    """Notes, at the end of each step, what the host has waited for so far."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.waits = {}

    def on_step_end(self, trainer):
        self.waits[trainer.step] = self.accelerator.waits()


def resident(data, device, **options):
    return DeviceLoader(data, "train", 8, shuffle=True, device=device, **options)


def streamed(data, device):
    return HostLoader(data, "train", 8, shuffle=True, device=device, workers=2)


def plain(data, device):
    dataset = TensorDataset(data.train.inputs, data.train.targets)
    return DataLoader(dataset, 8, shuffle=True, pin_memory=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("loader", [resident, streamed, plain])
def test_no_step_waits_for_the_device(accelerator, loader, precision):
    counted = Counted(accelerator)
    trainer = make_trainer(
        make_model(dropout=0.3),
        device=accelerator.NAME,
        optimizer=FUSED,
        precision=precision,
        grad_accum_steps=2,
        max_grad_norm=1.0,
        callbacks=[EMA(0.9), counted],
        max_steps=LAST + 2,
        epochs=None,
        log_every=1000,
    )
    trainer.fit(loader(make_data(train=8 * LAST + 80), accelerator.NAME))
    assert counted.waits[LAST] == counted.waits[FIRST]


def test_no_epoch_has_a_blocking_copy(accelerator):
    """The order of the samples and the draws of the augmentation are copied beside the work too."""
    counted = Counted(accelerator)
    trainer = make_trainer(
        CNN((1, 8, 8), 3, channels=[4]), device=accelerator.NAME, callbacks=[counted], epochs=3
    )
    trainer.fit(resident(make_images(), accelerator.NAME, augment=["flip", "crop", "cutout"]))
    blocking = [waits["blocking_copies"] for waits in counted.waits.values()]
    assert blocking == blocking[:1] * len(blocking)


def test_streamed_batches_are_pinned_beside_the_steps(accelerator):
    assert streamed(make_data(), accelerator.NAME).workers.loader.pin_memory
    assert not streamed(make_data(), "cpu").workers.loader.pin_memory


def test_a_pinned_batch_is_copied_beside_the_work_which_waits_for_it(accelerator):
    batch = torch.arange(6.0).view(2, 3).pin_memory(), torch.arange(2).pin_memory()
    before = accelerator.counts()
    moved = transfer.move(batch, torch.device(accelerator.NAME, 0))
    after = accelerator.counts()
    made = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    assert made == {"copies_in": 2, "side_copies": 2, "stream_waits": 2, "recorded": 2}
    for tensor, original in zip(moved, batch, strict=True):
        assert torch.equal(tensor.cpu(), original)


def test_events_measure_the_device_without_waiting_for_it(accelerator):
    device = torch.device(accelerator.NAME, 0)
    before = accelerator.waits()
    start = devices.mark(device)
    time.sleep(0.01)
    end = devices.mark(device)
    assert devices.has_caught_up(end)
    assert 0.01 <= devices.seconds_between(start, end) < 1
    assert accelerator.waits() == before
