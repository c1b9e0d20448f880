"""What goes to and from a device, in which type and from which generator."""

import functools
import os
import signal
import time

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer

from stoker.data.loader import DeviceLoader, HostLoader
from stoker.trainer import checkpoint, seeding
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import TrainingError

pytestmark = pytest.mark.accelerator
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


def tensors_of(state):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if torch.is_tensor(leaf)]


def test_a_checkpoint_is_copied_into_pinned_memory_and_waited_for_once(accelerator):
    trainer = make_trainer(device=accelerator.NAME, optimizer=ADAMW, epochs=1)
    loader = DeviceLoader(make_data(), "train", 8, device=accelerator.NAME)
    trainer.fit(loader)
    state = trainer.state_dict()
    before = accelerator.waits()
    copied = checkpoint.copy(state)
    after = accelerator.waits()
    assert after["synchronisations"] == before["synchronisations"] + 1
    assert after["items"] == before["items"]
    on_device = [tensor for tensor in tensors_of(state) if not tensor.is_cpu]
    assert len(on_device) > 8
    in_memory = tensors_of(copied)
    assert len(in_memory) == len(tensors_of(state))
    for tensor, copy in zip(tensors_of(state), in_memory, strict=True):
        assert copy.is_contiguous() and copy.is_pinned() is not tensor.is_cpu
        assert torch.equal(copy, tensor.cpu())
    values = [copy.clone() for copy in in_memory]
    trainer.fit(loader)  # changes the weights, and not the copy
    assert_same(in_memory, values)
    assert not torch.equal(trainer.module[0].weight.cpu(), copied["model"]["0.weight"])


class Waits(Callback):
    """Notes at the end of each step what has been waited for."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.counts = []

    def on_step_end(self, trainer):
        self.counts.append(self.accelerator.counts())


def test_batches_of_a_loader_of_your_own_are_copied_without_waiting(accelerator):
    data = make_data(train=80).train
    states = []
    for device in ("cpu", accelerator.NAME):
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(data.inputs, data.targets), 8, shuffle=True
        )
        waits = Waits(accelerator)
        trainer = make_trainer(
            device=device, optimizer=ADAMW, epochs=1, log_every=100, callbacks=[waits]
        )
        trainer.fit(loader)
        states.append(tensors_of(checkpoint.copy(trainer.state_dict())))
    assert_same(states[1], states[0])
    first, last = waits.counts[0], waits.counts[8]
    for name in accelerator.WAITS:
        assert last[name] == first[name], name
    assert last["side_copies"] == first["side_copies"] + 2 * 8


def test_a_trainer_is_not_disturbed_by_another_on_another_device(accelerator):
    """Each seeds and times its own device, whichever was chosen last."""

    def trained(disturb):
        place = f"{accelerator.NAME}:0"
        model = make_model(dropout=0.5)
        trainer = make_trainer(model, device=place, optimizer=ADAMW, epochs=1)
        if disturb:
            make_trainer(device=f"{accelerator.NAME}:1")
        trainer.fit(DeviceLoader(make_data(), "train", 8, device=place))
        return tensors_of(checkpoint.copy(trainer.state_dict()))

    assert_same(trained(disturb=True), trained(disturb=False))


def test_the_generators_of_replicas_are_left_as_they_were(accelerator):
    device = torch.device(accelerator.NAME, 0)
    before = [generator.get_state() for generator in accelerator.default_generators]
    with seeding.random_states_kept(device, (0, 1)):
        seeding.seed_generators(device, 5, (0, 1))
        seeded = [generator.get_state() for generator in accelerator.default_generators]
        assert not torch.equal(seeded[0], before[0]) and not torch.equal(seeded[1], before[1])
    assert_same([generator.get_state() for generator in accelerator.default_generators], before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_worker_ends_a_fit_that_pins(accelerator):
    """The thread that pins what workers read is not there on a CPU."""

    class Kill(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 3:
                os.kill(loader.workers.processes[0].pid, signal.SIGKILL)

    loader = HostLoader(make_data(train=400), "train", 4, device=accelerator.NAME, workers=2)
    trainer = make_trainer(device=accelerator.NAME, optimizer=ADAMW, callbacks=[Kill()])
    began = time.monotonic()
    with pytest.raises(TrainingError, match="was killed by SIGKILL"):
        trainer.fit(loader)
    loader.close()
    assert time.monotonic() - began < 20
