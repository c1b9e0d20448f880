import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.diagnostics import flops, layers
from stoker.models.cnn import CNN
from stoker.trainer.trainer import Trainer


def test_the_flops_of_linear_layers_are_two_for_each_weight_and_product():
    weights = (20 * 30, 30 * 7)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7))
    # Forward, the gradient of each weight, and that of each input but the first layer's, which
    # nobody asks for.
    assert flops.per_sample(model, (20,)) == 2 * sum(weights) + 2 * sum(weights) + 2 * weights[1]


def test_a_frozen_layer_has_no_gradient_to_be_computed():
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7))
    model[0].requires_grad_(False)
    assert flops.per_sample(model, (20,)) == 2 * (20 * 30) + 2 * 2 * (30 * 7)


def test_the_flops_of_a_convolution_are_those_of_its_windows():
    model = nn.Conv2d(3, 8, kernel_size=3, padding=1)
    forward = 2 * (3 * 3 * 3) * 8 * (5 * 6)
    assert flops.per_sample(model, (3, 5, 6)) == 2 * forward  # and as much for its weights


def test_counting_changes_nothing_in_the_model():
    model = CNN((1, 8, 8), 10).eval()
    before = {
        name: (id(tensor), tensor.clone())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    assert flops.per_sample(model, (1, 8, 8)) > 0
    after = model.state_dict(keep_vars=True)
    assert all(
        id(after[name]) == was and torch.equal(after[name], value)
        for name, (was, value) in before.items()
    )
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_language_model_is_counted_on_tokens():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 7))
    assert flops.per_sample(model, (6,), tokens=True) == 3 * 2 * 6 * 8 * 7
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD, device="cpu")
    assert flops.efficiency(trainer, (6,), 100.0, tokens=True)["flops_per_second"] == 201_600


def test_a_model_of_other_inputs_and_one_without_weights_have_no_count():
    assert flops.per_sample(nn.Embedding(4, 4), (4,)) is None
    assert flops.per_sample(nn.ReLU(), (4,)) is None


def test_a_peak_that_the_training_exceeds_is_not_shown():
    trainer = Trainer(nn.Linear(6, 4), device="cpu")
    peak = torch.get_num_threads() * flops.peak(torch.device("cpu"), None)
    for share, known in ((0.5, True), (2.36, False)):
        told = flops.efficiency(trainer, (6,), share * peak / 96)
        assert told["flops_per_second"] == pytest.approx(share * peak)
        assert told["mfu"] == (pytest.approx(share) if known else None)
        assert told["peak_flops"] == (peak if known else None)
        assert told["peak_threads"] == (torch.get_num_threads() if known else None)


def test_the_peak_is_that_of_the_threads_that_trained():
    trainer = Trainer(nn.Linear(6, 4), device="cpu")
    one = flops.peak(torch.device("cpu"), None)
    for threads in (1, 3):
        told = flops.efficiency(trainer, (6,), 100.0, threads=threads)
        assert told["peak_threads"] == threads
        assert told["peak_flops"] == threads * one
        assert told["mfu"] == pytest.approx(9600 / threads / one)


class Products(TorchDispatchMode):
    """Keeps the first matrix of each product."""

    def __init__(self):
        super().__init__()
        self.matrices = []
        self.threads = []  # during each product

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.matrices.append(args[0])
            self.threads.append(torch.get_num_threads())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_peak_is_that_of_random_matrices_and_draws_from_no_global_generator(monkeypatch, dtype):
    """Ones draw less power: 13% more FLOP/s on an H200 than there are for any work."""
    monkeypatch.setattr(flops, "WIDTH_CPU", 256)
    flops.peak.cache_clear()
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    with Products() as products:
        assert flops.peak(torch.device("cpu"), dtype) > 0
    flops.peak.cache_clear()
    assert torch.equal(torch.get_rng_state(), before)
    assert set(products.threads) == {1} and torch.get_num_threads() == threads
    assert len(products.matrices) >= 2
    for matrix in products.matrices:
        assert matrix.dtype is (dtype or torch.float32)
        assert matrix.float().mean().item() == pytest.approx(0, abs=0.02)
        assert matrix.float().std().item() == pytest.approx(1, abs=0.02)


def test_where_there_is_no_memory_for_the_matrices_there_is_no_peak(monkeypatch):
    monkeypatch.setattr(flops, "WIDTH_CPU", 10**8)
    flops.peak.cache_clear()
    trainer = Trainer(nn.Linear(6, 4), device="cpu")
    assert flops.efficiency(trainer, (6,), 100.0) == {
        "flops_per_sample": 96,
        "flops_per_second": 9600.0,
        "peak_flops": None,
        "peak_threads": None,
        "mfu": None,
    }


def test_the_table_of_layers_adds_up_and_leaves_model_and_random_states_alone():
    model = CNN((1, 8, 8), 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    header, *rows, total = [line.split() for line in layers.lines(model, (1, 8, 8), False)]
    assert header == ["layer", "type", "output", "parameters", "FLOPs"]
    assert [row[0] for row in rows] == [
        name for name, layer in model.named_modules() if not any(layer.children())
    ]
    first = next(row for row in rows if row[1] == "Conv2d")
    convolution = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    channels = convolution.out_channels
    assert first[2:] == [f"{channels}x8x8", str(9 * channels), f"{2 * 9 * channels * 8 * 8:,}"]
    numbers = [[int(text.replace(",", "")) for text in row[3:]] for row in rows]
    weights = sum(weight.numel() for weight in model.parameters())
    assert sum(one[0] for one in numbers if one) == weights
    assert sum(one[1] for one in numbers if len(one) == 2) == int(total[2].replace(",", ""))
    assert total[:2] == ["total", f"{weights:,}"]
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    # A model that refuses the sample has no shapes, and no FLOPs.
    assert [line.split() for line in layers.lines(nn.Embedding(4, 4), (4,), False)][1:] == [
        ["model", "Embedding", "16"],
        ["total", "16"],
    ]
