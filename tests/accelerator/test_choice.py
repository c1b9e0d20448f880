"""Any accelerator that torch knows is chosen, described and refused as a GPU is."""

import pytest
import torch
from conftest import make_model, make_trainer
from saved import Saved

from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import make_loaders
from stoker.trainer import device as devices
from stoker.trainer import memory, transfer
from stoker.trainer.errors import TrainingError, UserError

pytestmark = pytest.mark.accelerator


def batches():
    return [(torch.randn(8, 6), torch.arange(8) % 3)] * 2


@pytest.mark.parametrize(
    "name", ["auto", "simulated", "simulated:0", "simulated:1", torch.device("cpu")]
)
def test_its_names_are_those_of_a_gpu(accelerator, name):
    assert devices.available() == ["cpu", "simulated", "simulated:0", "simulated:1"]
    chosen = devices.choose(name)
    expected = {"auto": "simulated:0", "simulated": "simulated:0"}.get(name, str(name))
    assert str(chosen) == expected
    if chosen.index is not None:
        assert torch.accelerator.current_device_index() == chosen.index
        assert devices.describe(chosen) == f"{chosen} (simulated accelerator)"
    torch.accelerator.set_device_index(0)


def test_a_trainer_takes_a_torch_device(accelerator):
    assert make_trainer(device=torch.device(accelerator.NAME)).device == torch.device(
        "simulated", 0
    )


@pytest.mark.parametrize("name", ["simulated:2", "simulate", "mps"])
def test_a_device_that_is_not_there_is_refused(accelerator, name):
    with pytest.raises(UserError) as caught:
        devices.choose(name)
    assert str(caught.value) == (
        f"device={name}: this machine has no such device.\n"
        "Type device=auto, or one of: cpu, simulated, simulated:0, simulated:1."
    )


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"strategy": "dp"}, "Type strategy=single, or strategy=ddp."),
        ({"compile": "graph"}, "or change the setting that does not fit."),
    ],
)
def test_what_its_backend_lacks_is_refused(accelerator, settings, advice):
    with pytest.raises(UserError) as caught:
        make_trainer(device=accelerator.NAME, **settings)
    assert str(caught.value).endswith(advice)


def not_implemented(*arguments):
    raise NotImplementedError


@pytest.mark.parametrize("lacks", ["get_memory_info", "get_device_name", "empty_cache"])
def test_what_its_backend_does_not_tell_is_left_out(accelerator, monkeypatch, lacks):
    device = torch.device(accelerator.NAME, 0)
    if lacks == "get_memory_info":
        monkeypatch.setattr(torch.accelerator, lacks, not_implemented)
    else:
        monkeypatch.delattr(accelerator, lacks)
    text = devices.describe(device)
    assert ("accelerator" in text) == (lacks != "get_device_name")
    assert (memory.free_memory(device) == 4 * 2**30) == (lacks == "get_memory_info")
    memory.release(device)


def test_the_activations_are_those_on_the_cpu(accelerator):
    reports = []
    for device in ("cpu", accelerator.NAME):
        trainer = make_trainer(make_model(), device=device)
        saved = Saved(trainer.module)
        with saved.counted():
            loss = trainer.compute_loss(transfer.move(batches()[0], trainer.device))
        reports.append({**trainer.memory_report(), "activations": saved.most / 2**20})
        del loss
    for part in ("activations", "parameters", "gradients", "optimizer", "buffers"):
        assert reports[0][part] == reports[1][part]
    assert reports[1]["peak"] >= reports[1]["activations"] > 0


def test_what_is_resident_has_to_fit(accelerator):
    inputs = torch.zeros(64, 2**16)
    targets = torch.arange(64) % 2
    data = Data("wide", TensorSplit(inputs, targets), None, None, (2**16,), 2)
    options = {"batch_size": 8, "device": "simulated:0"}
    with accelerator.limited_memory(2**24 - 1):
        with pytest.raises(TrainingError, match="does not fit in the memory of simulated:0"):
            make_loaders(data, resident=True, **options)
        _, why = make_loaders(data, **options)
    assert why.startswith("streamed")
