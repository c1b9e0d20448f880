"""Every model on every shape it claims: outputs, a gradient for each parameter, learning; and what
it refuses.
"""

import functools
import itertools

import pytest
import torch
from conftest import assert_same, make_trainer

from stoker.data import datasets
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.models.cnn import CNN
from stoker.models.linear import Linear
from stoker.models.mlp import MLP
from stoker.models.resnet import ResNet
from stoker.models.whitened_cnn import Whiten, WhitenedCNN, convolution, first_images
from stoker.trainer import checkpoint, schedules
from stoker.trainer.callbacks import EMA, Callback, Checkpoint, Lookahead
from stoker.trainer.errors import UserError
from stoker.trainer.optimizers import decoupled_sgd

IMAGES = [(1, 8, 8), (3, 9, 14), (1, 28, 28), (3, 32, 32)]
SMALL_RESNET = {"widths": [8, 12, 16, 24], "blocks": [1, 2, 1, 1]}
SMALL_WHITENED = {"widths": [8, 24, 16]}
CASES = [(model, shape, {}) for model in (Linear, MLP) for shape in [(5,), *IMAGES]]
CASES += [
    (MLP, (5,), {"norm": "batch"}),
    (MLP, (5,), {"norm": "layer", "activation": "gelu", "dropout": 0.1}),
    (MLP, (5,), {"hidden": []}),
]
CASES += [
    (CNN, shape, knobs) for shape in IMAGES for knobs in ({}, {"channels": [4] * 6, "kernel": 5})
] + [
    (model, shape, knobs)
    for model, knobs in ((ResNet, SMALL_RESNET), (WhitenedCNN, SMALL_WHITENED))
    for shape in IMAGES
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
    learnt = [parameter for parameter in network.parameters() if parameter.requires_grad]
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in learnt
    )
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
        network(inputs),
        torch.cat([network(sample) for sample in inputs.split(1)]),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("in_shape", IMAGES)
@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        (CNN, {}),
        (CNN, {"channels": [4] * 6}),
        (ResNet, SMALL_RESNET),
        (WhitenedCNN, SMALL_WHITENED),
    ],
)
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
        torch.nn.functional.layer_norm(
            inputs.flatten(1) @ first.weight.T, (5,), norm.weight, norm.bias
        )
    )
    torch.testing.assert_close(network(inputs), hidden @ last.weight.T + last.bias)
    assert any(
        isinstance(layer, torch.nn.BatchNorm1d) for layer in MLP((3,), 2, norm="batch").layers
    )
    assert [
        layer.p for layer in MLP((3,), 2, dropout=0.3).layers if isinstance(layer, torch.nn.Dropout)
    ] == [0.3, 0.3]


def test_resnet_is_resnet_18():
    """11.17 million parameters at 10 classes, and maps of 32, 16, 8 and 4 pixels."""
    network = ResNet((3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_173_962
    sizes = []
    for block in network.stages:
        block.register_forward_hook(
            lambda module, inputs, output: sizes.append(tuple(output.shape[1:]))
        )
    network(torch.randn(1, 3, 32, 32))
    assert sizes[1::2] == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


@pytest.mark.parametrize(
    ("model", "knobs", "key"),
    [
        (MLP, {"hidden": [0]}, "hidden"),
        (MLP, {"hidden": [2.5]}, "hidden"),
        (MLP, {"activation": "rely"}, "activation"),
        (MLP, {"norm": "group"}, "norm"),
        (MLP, {"dropout": 1.0}, "dropout"),
        (CNN, {"dropout": -0.1}, "dropout"),
        (ResNet, {"widths": [64, -1]}, "widths"),
        (ResNet, {"blocks": [2, 2]}, "blocks"),
        (WhitenedCNN, {"widths": [0]}, "widths"),
    ],
)
def test_impossible_knobs_name_their_key(model, knobs, key):
    with pytest.raises(UserError, match=f"^model.{key}\\b"):
        model((3, 16, 16), 10, **knobs)


@pytest.mark.parametrize("model", [CNN, ResNet, WhitenedCNN])
def test_a_flat_input_names_the_models_for_it(model):
    with pytest.raises(ValueError, match="model=mlp"):
        model((20,), 10)


# WhitenedCNN


def test_whitened_cnn_is_the_papers_network():
    """1.97 million parameters at 10 classes, and maps of 31, 15, 7 and 3 pixels."""
    network = WhitenedCNN((3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == 1_972_792
    sizes = []
    for layer in [network.first, *network.blocks]:
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(
                lambda module, inputs, output: sizes.append(tuple(output.shape[1:]))
            )
    network.train()(torch.randn(2, 3, 32, 32))
    assert sizes == [
        (24, 31, 31),
        (64, 31, 31),
        (64, 15, 15),
        (256, 15, 15),
        (256, 7, 7),
        (256, 7, 7),
        (256, 3, 3),
    ]
    with pytest.raises(ValueError, match="at least 3x3 pixels"):
        WhitenedCNN((3, 2, 32), 10)
    assert WhitenedCNN((1, 3, 3), 2).train()(torch.randn(1, 1, 3, 3)).isfinite().all()


def test_a_convolution_hands_its_inputs_on_at_first():
    images = torch.randn(2, 5, 6, 7)
    assert torch.equal(convolution(5, 8)(images)[:, :5], images)
    assert torch.equal(convolution(5, 3)(images), images[:, :3])


def test_the_logits_are_the_mean_over_the_views():
    model = WhitenedCNN((3, 9, 8), 4, [8, 8]).double().eval()
    images = torch.randn(5, 3, 9, 8, dtype=torch.float64)
    plain = model.logits
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    up_left, down_right = padded[:, :, 0:9, 0:8], padded[:, :, 2:11, 2:10]
    moved = plain(up_left) + plain(up_left.flip(3)) + plain(down_right) + plain(down_right.flip(3))
    torch.testing.assert_close(
        model(images), (plain(images) + plain(images.flip(3))) / 4 + moved / 8
    )
    assert not torch.equal(model(images), plain(images))


@pytest.mark.parametrize("channels", [1, 3])
def test_whitened_patches_are_uncorrelated(channels):
    images = torch.randn(200, channels, 9, 11)
    images = (
        images + 2 * images.mean((1, 2, 3), keepdim=True) + images.roll(1, 3)
    ).clone()  # neighbours are alike
    network = WhitenedCNN(images.shape[1:], 3, [8])
    network.whiten(images.split(64), eps=1e-9)
    outputs = torch.nn.functional.conv2d(images, network.first.weight)
    half = outputs.shape[1] // 2
    assert half == 4 * channels and torch.equal(outputs[:, half:], -outputs[:, :half])
    found = outputs[:, :half].transpose(0, 1).flatten(1)
    torch.testing.assert_close(found @ found.T / found.shape[1], torch.eye(half), rtol=0, atol=1e-4)


def test_eps_keeps_a_direction_without_variance_small():
    """All pixels of each patch alike: one direction of four has a variance."""
    network, images = WhitenedCNN((1, 6, 6), 3, [8]), torch.randn(50, 1, 1, 1).expand(50, 1, 6, 6)
    network.whiten([images], eps=0.25)
    value = 4 * images[:, 0, 0, 0].square().mean()
    assert network.first.weight.flatten(1).norm(dim=1).amax() <= 2.0001
    outputs = torch.nn.functional.conv2d(images, network.first.weight)[:, :4]
    torch.testing.assert_close(outputs.square().mean((0, 2, 3)).amax(), value / (value + 0.25))


def images_data():
    return datasets.synthetic(n=90, in_shape=(3, 8, 8), num_classes=4)


def whitened_trainer(*callbacks, loader=DeviceLoader, **settings):
    """A trainer in the manner of experiment=cifar10_94, and its loader: 3 epochs of 7 steps."""
    torch.manual_seed(0)
    augment = [{"flip": "alternate"}, {"crop": 2}]
    batches = loader(images_data(), "train", 10, shuffle=True, augment=augment, drop_last=True)
    trainer = make_trainer(
        WhitenedCNN((3, 8, 8), 4, **SMALL_WHITENED),
        loss=torch.nn.CrossEntropyLoss(label_smoothing=0.2),
        optimizer=functools.partial(decoupled_sgd, lr=5, batch_size=10),
        scheduler=functools.partial(schedules.linear, warmup=0.23, final=0.07),
        callbacks=[
            Whiten(images=25, bias_epochs=1.5),
            Lookahead(every=4, decay=0.7, power=3),
            *callbacks,
        ],
        groups=[{"match": "*", "weight_decay": 0.0153}],
        **settings,
    )
    return trainer, batches


def test_whiten_sets_the_filters_once_and_the_bias_learns_for_a_while():
    trainer, batches = whitened_trainer()
    expected = WhitenedCNN((3, 8, 8), 4, **SMALL_WHITENED)
    seen = torch.cat([images for images, _ in batches])[:25]
    expected.whiten([seen])
    biases, seen_by_training = [], []

    class Watch(Callback):
        def on_step_end(self, trainer):
            biases.append(trainer.module.first.bias.detach().clone())

    trainer.callbacks.insert(0, Watch())  # the trained weights, before Lookahead
    step = trainer.train_step
    trainer.train_step = lambda batch: seen_by_training.append(batch[0].clone()) or step(batch)
    trainer.fit(batches)
    torch.testing.assert_close(
        trainer.module.first.weight, expected.first.weight, rtol=1e-4, atol=1e-5
    )
    frozen = 11  # steps of 7 an epoch that begin before 1.5 epochs
    moves = [not torch.equal(a, b) for a, b in itertools.pairwise(biases)]
    assert all(moves[: frozen - 1])
    assert (
        not trainer.module.first.bias.requires_grad
        and not trainer.module.first.weight.requires_grad
    )
    assert not any(moves[frozen:])
    # What was looked at for the filters is seen again by the training.
    assert len(seen_by_training) == 21
    torch.testing.assert_close(torch.cat(seen_by_training)[:25], seen, rtol=0, atol=0)


def test_frozen_filters_stay_what_they_are_whatever_averages_the_weights():
    trainer, batches = whitened_trainer(EMA(0.5))
    trainer.callbacks = [
        Lookahead(every=2),
        trainer.callbacks[2],
        trainer.callbacks[0],
    ]  # the whitening comes last
    seen = []

    class Watch(Callback):
        def on_step_end(self, trainer):
            seen.append(trainer.module.first.weight.clone())

        def on_eval_start(self, trainer):
            seen.append(trainer.module.first.weight.clone())

    trainer.callbacks.append(Watch())
    trainer.fit(batches, batches)
    assert len(seen) == 21 + 3 and all(torch.equal(weight, seen[0]) for weight in seen)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 9, 12])
@pytest.mark.parametrize("loader", [DeviceLoader, HostLoader])
def test_a_resumed_whitened_training_ends_as_the_whole_one(tmp_path, loader, step):
    whole, batches = whitened_trainer(Checkpoint(tmp_path, every=3, keep=99), loader=loader)
    whole.fit(batches)
    again, batches = whitened_trainer(
        Checkpoint(tmp_path / "again", every=3, keep=99), loader=loader
    )
    with torch.no_grad():
        for parameter in again.module.parameters():  # nothing of a new start may stay
            parameter.add_(0.1)
    again.fit(batches, resume=checkpoint.path_of(tmp_path, step))
    for part in ("model", "optimizer"):
        assert_same(again.state_dict()[part], whole.state_dict()[part])
    assert_same(again.callbacks[1].state_dict(), whole.callbacks[1].state_dict())


def test_first_images_are_as_many_as_asked_or_there_are():
    batches = DeviceLoader(images_data(), "train", 10, shuffle=True)
    assert [len(images) for images in first_images(batches, 25)] == [10, 10, 5]
    assert sum(len(images) for images in first_images(batches, 1000)) == batches.samples


def test_whiten_wants_the_model_that_it_is_for():
    trainer = make_trainer(CNN((3, 8, 8), 4), callbacks=[Whiten()])
    with pytest.raises(UserError, match="model=whitened_cnn"):
        trainer.fit(DeviceLoader(images_data(), "train", 10))
