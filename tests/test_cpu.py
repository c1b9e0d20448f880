"""What is fitted to the processor changes no result beyond rounding, and nothing where it does not apply."""

import copy

import pytest
import torch
from conftest import make_model, make_trainer

from trainer import cpu
from trainer.callbacks import Callback
from trainer.errors import UserError

needs_onednn = pytest.mark.skipif(cpu.product is None, reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_by_onednn_give_the_same_outputs_and_derivatives(bias):
    plain = torch.nn.Sequential(torch.nn.Linear(12, 7, bias=bias), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=bias))
    fitted = copy.deepcopy(plain)
    cpu.use_onednn(fitted)
    assert [type(layer) for layer in fitted] == [cpu.Linear, torch.nn.Tanh, cpu.Linear]
    assert list(fitted.state_dict()) == list(plain.state_dict())
    inputs = torch.randn(5, 12)
    results = []
    for model in (plain, fitted):
        x = inputs.clone().requires_grad_()
        first, *_ = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        second = torch.autograd.grad(
            first.square().sum(), model.parameters(), retain_graph=True, materialize_grads=True
        )
        model(x).square().sum().backward()
        results.append([model(x), x.grad, first, *second, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@needs_onednn
def test_what_is_no_fp32_matrix_goes_the_usual_way():
    plain = torch.nn.Linear(6, 4)
    fitted = copy.deepcopy(plain)
    cpu.use_onednn(fitted)
    for inputs in (torch.randn(6), torch.randn(2, 3, 6), torch.randn(0, 6)):
        assert torch.equal(fitted(inputs), plain(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert fitted(torch.randn(2, 6)).dtype == torch.bfloat16
    inputs = torch.randn(3, 6)
    one, other = (torch.func.jvp(layer, (inputs,), (inputs,)) for layer in (plain, fitted))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(torch.jit.trace(fitted, inputs)(inputs), plain(inputs))
    mapped = torch.func.vmap(lambda row: fitted(row.unsqueeze(0)).squeeze(0))(inputs)
    torch.testing.assert_close(mapped, plain(inputs))
    assert type(copy.deepcopy(fitted)) is cpu.Linear


class MyLinear(torch.nn.Linear):
    pass


def test_a_layer_of_the_user_s_stays_what_it_is():
    model = torch.nn.Sequential(MyLinear(3, 2), torch.nn.Bilinear(2, 2, 2))
    cpu.use_onednn(model)
    assert type(model[0]) is MyLinear


@needs_onednn
def test_a_training_by_onednn_equals_one_without_up_to_rounding(monkeypatch):
    batches = [(torch.randn(8, 6), torch.arange(8) % 3) for _ in range(10)]
    weights = []
    for amd in (False, True):
        monkeypatch.setattr(cpu, "has_wide_amd", lambda amd=amd: amd)
        trainer = make_trainer()
        assert (type(trainer.module[0]) is cpu.Linear) == amd
        trainer.fit(batches)
        module = trainer.module
        weights.append(torch.nn.utils.parameters_to_vector(trainer.module.parameters()).detach())
    torch.testing.assert_close(*weights)
    trainer.close()
    assert type(module[0]) is torch.nn.Linear


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
    images = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 3, (2, 3)), torch.nn.Flatten())
    assert threads_in_a_fit(images, 64) == {2}
    monkeypatch.setattr(cpu, "FEW", 1000)
    assert threads_in_a_fit(make_model(), 64) == {2}
    monkeypatch.setattr(cpu, "FEW", 10**7)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_in_a_fit(make_model(), 64) == {2}


def test_no_tuning_is_none(monkeypatch):
    monkeypatch.setattr(cpu, "has_wide_amd", lambda: True)
    monkeypatch.setattr(cpu, "keep_pages", lambda: pytest.fail("the allocator was touched"))
    assert type(make_trainer(make_model(), tune=[]).module[0]) is torch.nn.Linear
    with pytest.raises(UserError, match="tune=fast"):
        make_trainer(make_model(), tune=["fast"])
    with pytest.raises(UserError, match="tune=null: give a list"):
        make_trainer(make_model(), tune=None)


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda name: object())
    assert cpu.glibc() is None
    cpu.keep_pages()
    cpu.give_back()
