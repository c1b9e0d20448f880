"""Tuning for the CPU changes nothing where it does not apply."""

import pytest
import torch
from conftest import make_model, make_trainer
from stoker.trainer import cpu
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_in_a_fit(model, batch_size, **settings):
    class Count(Callback):
        def on_step_end(self, trainer):
            seen.add(torch.get_num_threads())

    seen = set()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, 6, generator=generator)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, torch.arange(batch_size) % 3), batch_size
    )
    make_trainer(model, callbacks=[Count()], **settings).fit(loader)
    assert torch.get_num_threads() == 2
    return seen


def test_a_small_step_of_dense_layers_has_one_thread_and_others_all(two_threads, monkeypatch):
    assert threads_in_a_fit(make_model(), 64) == {1}
    assert threads_in_a_fit(make_model(), 64, tune=["allocator"]) == {2}
    images = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 3, (2, 3)), torch.nn.Flatten()
    )
    assert threads_in_a_fit(images, 64) == {2}
    monkeypatch.setattr(cpu, "FEW", 1000)
    assert threads_in_a_fit(make_model(), 64) == {2}
    monkeypatch.setattr(cpu, "FEW", 10**7)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_in_a_fit(make_model(), 64) == {2}


def test_no_tuning_is_none(monkeypatch):
    monkeypatch.setattr(cpu, "keep_pages", lambda: pytest.fail("the allocator was touched"))
    make_trainer(make_model(), tune=[])
    with pytest.raises(UserError, match="tune=fast"):
        make_trainer(make_model(), tune=["fast"])
    with pytest.raises(UserError, match="tune=null: give a list"):
        make_trainer(make_model(), tune=None)


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda name: object())
    assert cpu.glibc() is None
    cpu.keep_pages()
    cpu.give_back()
