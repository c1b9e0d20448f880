"""Every model on every shape it claims: outputs, a gradient for each parameter, learning; and what it refuses."""

import pytest
import torch

from models.cnn import CNN
from models.linear import Linear
from models.mlp import MLP
from models.resnet import ResNet
from trainer.errors import UserError

IMAGES = [(1, 8, 8), (3, 9, 14), (1, 28, 28), (3, 32, 32)]
SMALL_RESNET = {"widths": [8, 12, 16, 24], "blocks": [1, 2, 1, 1]}
CASES = [(model, shape, {}) for model in (Linear, MLP) for shape in [(5,), *IMAGES]]
CASES += [
    (MLP, (5,), {"norm": "batch"}),
    (MLP, (5,), {"norm": "layer", "activation": "gelu", "dropout": 0.1}),
    (MLP, (5,), {"hidden": []}),
]
CASES += [(CNN, shape, knobs) for shape in IMAGES for knobs in ({}, {"channels": [4] * 6, "kernel": 5})] + [
    (ResNet, shape, SMALL_RESNET) for shape in IMAGES
]


@pytest.mark.parametrize(("model", "in_shape", "knobs"), CASES)
def test_shapes_gradients_and_learning(model, in_shape, knobs):
    torch.manual_seed(0)
    network = model(in_shape, 7, **knobs)
    inputs, targets = torch.randn(14, *in_shape), torch.arange(14) % 7
    outputs = network(inputs)
    assert outputs.shape == (14, 7)
    first = torch.nn.functional.cross_entropy(outputs, targets)
    first.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
    assert loss < first.detach() - 0.05


@pytest.mark.parametrize(("model", "in_shape", "knobs"), CASES)
def test_a_batch_is_the_sum_of_its_samples_in_evaluation(model, in_shape, knobs):
    network = model(in_shape, 3, **knobs).double().eval()
    inputs = torch.randn(4, *in_shape, dtype=torch.float64)
    torch.testing.assert_close(
        network(inputs), torch.cat([network(sample) for sample in inputs.split(1)]), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("in_shape", IMAGES)
@pytest.mark.parametrize(("model", "knobs"), [(CNN, {}), (CNN, {"channels": [4] * 6}), (ResNet, SMALL_RESNET)])
def test_a_last_batch_of_one_sample_trains(model, knobs, in_shape):
    assert model(in_shape, 3, **knobs).train()(torch.randn(1, *in_shape)).isfinite().all()


def test_mlp_is_what_its_knobs_say():
    torch.manual_seed(0)
    network, inputs = (
        MLP((2, 3), 4, hidden=[5], activation="tanh", norm="layer").double(),
        torch.randn(7, 2, 3, dtype=torch.float64),
    )
    first, norm, last = (layer for layer in network.layers if list(layer.parameters()))
    assert first.bias is None
    hidden = torch.tanh(
        torch.nn.functional.layer_norm(inputs.flatten(1) @ first.weight.T, (5,), norm.weight, norm.bias)
    )
    torch.testing.assert_close(network(inputs), hidden @ last.weight.T + last.bias)
    assert any(isinstance(layer, torch.nn.BatchNorm1d) for layer in MLP((3,), 2, norm="batch").layers)
    assert [layer.p for layer in MLP((3,), 2, dropout=0.3).layers if isinstance(layer, torch.nn.Dropout)] == [0.3, 0.3]


def test_resnet_is_resnet_18():
    """11.17 million parameters at 10 classes, and maps of 32, 16, 8 and 4 pixels."""
    network = ResNet((3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_173_962
    sizes = []
    for block in network.stages:
        block.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    network(torch.randn(1, 3, 32, 32))
    assert sizes[1::2] == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


@pytest.mark.parametrize(
    ("model", "knobs", "key"),
    [
        (MLP, {"hidden": [0]}, "model.hidden"),
        (MLP, {"hidden": 256}, "model.hidden"),
        (MLP, {"hidden": [2.5]}, "model.hidden"),
        (MLP, {"activation": "rely"}, "model.activation"),
        (MLP, {"norm": "group"}, "model.norm"),
        (MLP, {"dropout": 1.0}, "model.dropout"),
        (CNN, {"channels": []}, "model.channels"),
        (CNN, {"kernel": 4}, "model.kernel"),
        (CNN, {"kernel": 0}, "model.kernel"),
        (CNN, {"dropout": -0.1}, "model.dropout"),
        (ResNet, {"widths": [64, -1]}, "model.widths"),
        (ResNet, {"blocks": [2, 2]}, "model.blocks"),
    ],
)
def test_impossible_knobs_name_their_key(model, knobs, key):
    with pytest.raises(UserError, match=key):
        model((3, 16, 16), 10, **knobs)


@pytest.mark.parametrize("model", [CNN, ResNet])
def test_a_flat_input_names_the_models_for_it(model):
    with pytest.raises(UserError, match="model=mlp"):
        model((20,), 10)
