"""The simulated accelerator is what torch means by one: what the other tests here rest on."""

import time

import pytest
import torch

pytestmark = pytest.mark.accelerator


def test_torch_knows_it_as_the_accelerator(accelerator):
    assert torch.accelerator.current_accelerator() == torch.device(accelerator.NAME)
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module(accelerator.NAME) is accelerator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_convolution_and_its_gradients_are_the_cpu_s(accelerator, dtype):
    layer = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1).to(dtype)
    images = torch.randn(2, 3, 8, 8, dtype=dtype)
    results = []
    for device in ("cpu", accelerator.NAME):
        layer.to(device).zero_grad()
        inputs = images.clone().to(device).requires_grad_()
        outputs = layer(inputs)
        outputs.square().sum().backward()
        tensors = (outputs, inputs.grad, layer.weight.grad, layer.bias.grad)
        results.append([tensor.detach().cpu() for tensor in tensors])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_it_casts_on_cuda(accelerator, dtype):
    inputs = torch.randn(4, 4, device=accelerator.NAME)
    with torch.autocast(accelerator.NAME, dtype):
        product = inputs @ inputs
        assert product.dtype == dtype
        assert product.softmax(1).dtype == torch.float32
        assert torch.cat([product, inputs]).dtype == torch.float32


def test_each_device_has_a_generator_and_the_cpu_s_is_another(accelerator):
    def draw(device):
        return torch.nn.functional.dropout(torch.ones(64, device=f"{accelerator.NAME}:{device}"))

    before = torch.get_rng_state()
    accelerator.manual_seed_all(7)
    first = draw(0)
    assert not draw(0).equal(first)
    assert draw(1).cpu().equal(first.cpu())
    accelerator.manual_seed_all(7)
    assert draw(0).equal(first)
    assert torch.get_rng_state().equal(before)


def test_memory_is_counted_for_each_device_and_bounded(accelerator):
    used = torch.accelerator.memory_allocated(1)
    tensor = torch.zeros(250, device=f"{accelerator.NAME}:1")
    assert torch.accelerator.memory_allocated(1) == used + 1000
    del tensor
    assert torch.accelerator.memory_allocated(1) == used
    assert torch.accelerator.max_memory_allocated(1) >= used + 1000
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == used
    with accelerator.limited_memory(1000, 1):
        torch.zeros(250, device=f"{accelerator.NAME}:1")
        with pytest.raises(torch.OutOfMemoryError, match="1004 bytes"):
            torch.zeros(251, device=f"{accelerator.NAME}:1")


def test_events_measure_time_and_streams_are_entered(accelerator):
    stream = accelerator.Stream()
    events = [accelerator.Event(enable_timing=True) for _ in range(2)]
    with accelerator.stream(stream):
        assert accelerator.current_stream() == stream
        events[0].record()
        time.sleep(0.01)
        events[1].record()
    assert accelerator.current_stream() != stream
    assert 10 <= events[0].elapsed_time(events[1]) < 1000


# What a program does, and what of it is counted.
WAITS = {
    "an item": (lambda x, _: x.sum().item(), {"items"}),
    "a condition": (lambda x, _: bool(x.sum() > 0), {"items"}),
    "a copy back": (lambda x, _: x.cpu(), {"copies_back"}),
    "positions": (lambda x, _: x.nonzero(), {"synchronisations"}),
    "a mask": (lambda x, _: x[x > 0], {"synchronisations"}),
    "a comparison": (lambda x, _: torch.equal(x, x), {"synchronisations"}),
    "a wait": (lambda x, _: torch.accelerator.synchronize(), {"synchronisations"}),
    "a constant": (lambda x, _: torch.tensor(1.0, device=x.device), {"blocking_copies"}),
    "unpinned": (lambda x, y: y.to(x.device, non_blocking=True), {"blocking_copies"}),
    "blocking": (lambda x, y: y.pin_memory().to(x.device), {"blocking_copies"}),
    "beside": (lambda x, y: y.pin_memory().to(x.device, non_blocking=True), set()),
    "kernels": (lambda x, _: (x @ x).relu().sum() + 1, set()),
    "an index": (lambda x, _: x[torch.arange(2, device=x.device)], set()),
}


@pytest.mark.parametrize("name", WAITS)
def test_it_counts_what_a_real_one_waits_for(accelerator, name):
    work, expected = WAITS[name]
    on_device = torch.ones(4, 4, device=accelerator.NAME)
    on_host = torch.ones(4, 4)
    before = accelerator.waits()
    work(on_device, on_host)
    after = accelerator.waits()
    assert {name for name in after if after[name] > before[name]} == expected
