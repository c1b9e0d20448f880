"""Tuning the process changes nothing where it does not apply."""

import contextlib
import functools
import gc

import pytest
import torch
from conftest import make_model, make_trainer

from stoker.command import tuning
from stoker.tasks.train import train
from stoker.trainer import memory
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_in_a_fit(model, batch_size):
    class Count(Callback):
        def on_step_end(self, trainer):
            counts.add(torch.get_num_threads())

    counts = set()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, 6, generator=generator)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, torch.arange(batch_size) % 3), batch_size
    )
    trainer = make_trainer(model, callbacks=[Count()])
    with tuning.few_threads(trainer.module, batch_size):
        trainer.fit(loader)
    assert torch.get_num_threads() == 2
    return counts


def test_a_small_step_of_dense_layers_has_one_thread_and_others_all(two_threads, monkeypatch):
    assert threads_in_a_fit(make_model(), 64) == {1}
    images = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 3, (2, 3)), torch.nn.Flatten()
    )
    assert threads_in_a_fit(images, 64) == {2}
    monkeypatch.setattr(tuning, "FEW", 1000)
    assert threads_in_a_fit(make_model(), 64) == {2}
    monkeypatch.setattr(tuning, "FEW", 10**7)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_in_a_fit(make_model(), 64) == {2}


def test_the_collector_is_put_back_after_an_import_that_fails(monkeypatch):
    monkeypatch.delattr(tuning, "freeze_imports")
    calls = []
    for name in ("enable", "disable"):
        monkeypatch.setattr(gc, name, functools.partial(calls.append, name))
    with pytest.raises(AttributeError, match="freeze_imports"):
        train(None)
    assert calls == ["disable", "enable"]


def test_the_threads_are_put_back_after_an_error(two_threads):
    with contextlib.suppress(ZeroDivisionError), tuning.few_threads(make_model(), 64):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "device, parts, kept", [("cpu", ["allocator"], 1), ("cpu", [], 0), ("mps", ["allocator"], 0)]
)
def test_the_allocator_is_tuned_where_it_was_asked_for(device, parts, kept, monkeypatch):
    calls = []
    monkeypatch.setattr(tuning, "keep_pages", lambda: calls.append(1))
    tuning.tune_process(device if device == "cpu" else torch.device(device), parts)
    assert len(calls) == kept


def test_what_is_not_there_to_be_tuned_is_an_error():
    with pytest.raises(UserError, match=r"tune=\[fast\]: expected a list with any of allocator"):
        tuning.tune_process(torch.device("cpu"), ["fast"])
    with pytest.raises(UserError, match="tune=null: expected a list"):
        tuning.tune_process(torch.device("cpu"), None)


def test_deterministic_asks_torch_for_it():
    tuning.tune_process(torch.device("cpu"), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    tuning.tune_process(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert memory.glibc() is None
    tuning.keep_pages()
    memory.release(torch.device("cpu"))
