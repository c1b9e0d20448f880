"""Every data set: its parts are disjoint, complete and stratified, and each mistake has its
answer.
"""

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data import datasets, images, tables, text
from stoker.data.datasets import Data, DatasetSplit, TensorSplit
from stoker.data.description import is_description
from stoker.data.loader import HostLoader
from stoker.data.record import fingerprint, input_type
from stoker.data.splits import split_indices
from stoker.data.workers import TIMEOUT
from stoker.trainer.errors import UserError

ROOT = os.environ.get("DATA_ROOT", "")


def parts_of(data):
    return [part for part in (data.train, data.val, data.test) if part is not None]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.floats(0, 0.45),
    st.floats(0, 0.45),
    st.integers(0, 2**60),
)
def test_splits_are_disjoint_complete_and_stratified(counts, val, test, seed):
    targets = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    targets = targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))]
    fractions = [val, test]
    try:
        parts = split_indices(targets, fractions, seed)
    except UserError as error:
        assert (
            "cannot be split with these fractions" in str(error)
            and max(counts) <= 1 / min([f for f in fractions if f] or [1]) + 2
        )
        return
    assert torch.cat(parts).sort().values.tolist() == list(range(len(targets)))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    asked = sum(fraction > 0 for fraction in fractions)
    for label, count in enumerate(counts):
        for part, fraction in zip(parts[1:], fractions, strict=True):
            got = (targets[part] == label).sum().item()
            assert (got == 0) if fraction == 0 else abs(got - count * fraction) <= 1 + asked
            assert not (fraction and count > asked) or got >= 1
        assert count <= asked or (targets[parts[0]] == label).any()
    assert all(
        torch.equal(a, b)
        for a, b in zip(parts, split_indices(targets, fractions, seed), strict=True)
    )


def test_split_of_a_number_and_of_other_seeds():
    assert [len(part) for part in split_indices(torch.zeros(3), [0.5, 0.45], 0)] == [1, 1, 1]
    parts = split_indices(1000, [0.1, 0.2], 0)
    assert [len(part) for part in parts] == [700, 100, 200]
    assert not torch.equal(parts[1], split_indices(1000, [0.1, 0.2], 1)[1])
    with pytest.raises(
        UserError, match=r"3 samples or groups cannot be split with these fractions"
    ):
        split_indices(torch.tensor([0, 1, 2]), [0.1], 0)


def test_digits():
    data = datasets.digits()
    assert (data.in_shape, data.num_classes, data.kind, data.classes) == (
        (1, 8, 8),
        10,
        "classification",
        list("0123456789"),
    )
    assert sum(len(part) for part in parts_of(data)) == 1797
    for part in parts_of(data):
        assert (
            part.inputs.dtype == torch.uint8
            and part.inputs.shape[1:] == (1, 8, 8)
            and part.targets.unique().tolist() == list(range(10))
        )
    assert abs(len(data.val) - 180) <= 5 and abs(len(data.test) - 359) <= 5
    pixels = torch.cat([part.inputs for part in parts_of(data)])
    assert (
        len({tuple(image.flatten().tolist()) for image in pixels}) == 1797
    )  # no image twice, so none in two parts
    assert pixels.max() == 255 and (pixels[0, 0, 0] * 16 / 255).round().frac().abs().max() == 0
    torch.testing.assert_close((pixels / 255).mean().item(), data.mean[0], atol=1e-4, rtol=0)
    torch.testing.assert_close((pixels / 255).std().item(), data.std[0], atol=1e-4, rtol=0)
    assert torch.equal(datasets.digits().val.inputs, data.val.inputs)
    assert not torch.equal(datasets.digits(split_seed=1).val.inputs[:100], data.val.inputs[:100])
    whole = datasets.digits(val_fraction=0, test_fraction=0)
    assert whole.val is whole.test is None and len(whole.train) == 1797


@pytest.mark.parametrize(
    "options",
    [
        {"val_fraction": 1.5},
        {"test_fraction": -0.1},
        {"val_fraction": 0.6, "test_fraction": 0.6},
        {"val_fraction": "a"},
    ],
)
def test_fractions_are_checked(options):
    with pytest.raises(UserError, match="_fraction"):
        datasets.digits(**options)


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 3]),
        torch.tensor([-1, 0]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0], [1]]),
        torch.tensor([[0, 1], [3, -100]]),
        torch.tensor([[0, 1], [-1, -100]]),
    ],
)
def test_labels_are_checked(labels):
    with pytest.raises(UserError, match="mine"):
        Data("mine", TensorSplit(torch.zeros(2, 4), labels), None, None, (4,), 3)


class Pairs(torch.utils.data.Dataset):
    """What most people have: one (input, target) for an index."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.read = inputs, targets, 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.read += 1
        return self.inputs[index].numpy(), self.targets[index]


def pairs():
    """The samples of 20 photographs, and their labels."""
    return torch.arange(20 * 12).view(20, 3, 2, 2).to(torch.uint8), torch.arange(20) * 3 % 5


@pytest.mark.parametrize("given", [False, True])
def test_a_torch_dataset_becomes_a_part(given):
    inputs, labels = pairs()
    dataset = Pairs(inputs, labels.tolist())
    split = DatasetSplit(dataset, dataset.targets if given else None)
    assert dataset.read == (1 if given else 21)
    loaders = [
        HostLoader(
            Data("pairs", part, part, None, (3, 2, 2), 5, mean=[0.5] * 3, std=[0.2] * 3),
            "train",
            6,
            **options,
        )
        for part, options in ((split, {"workers": 2}), (TensorSplit(inputs, labels), {}))
    ]
    for epoch in zip(*loaders, strict=True):
        assert all(map(torch.equal, *epoch))
    loaders[0].close()
    assert split.nbytes == inputs.nbytes and input_type(split) == torch.uint8


def test_a_torch_dataset_of_numbers_becomes_a_part():
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)
    for part, expected in (
        (DatasetSplit(torch.utils.data.TensorDataset(inputs, targets)), targets),
        (DatasetSplit(Pairs(inputs, targets[:, 0].tolist())), targets[:, :1]),
    ):
        data = Data("numbers", part, None, None, (4,), expected.shape[1], kind="regression")
        assert torch.equal(part.targets, expected) and all(
            map(torch.equal, part[[3, 1]], (inputs[[3, 1]], expected[[3, 1]]))
        )
        assert is_description(data.description())


def test_a_folder_of_torchvision_becomes_a_part(tmp_path):
    folder = pytest.importorskip("torchvision").datasets.ImageFolder
    from PIL import Image

    for name, grey in (("dark", 20), ("light", 200)):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (4, 4), (grey + i,) * 3).save(tmp_path / name / f"{i}.png")
    seen = folder(tmp_path, lambda image: torch.tensor(image.getpixel((0, 0))))
    _, val = torch.utils.data.random_split(seen, [4, 2], torch.Generator().manual_seed(0))
    data = Data(
        "photos",
        DatasetSplit(seen, seen.targets),
        DatasetSplit(val),
        None,
        (3,),
        2,
        classes=seen.classes,
    )
    assert (
        data.train[[5, 0]][0].tolist() == [[202] * 3, [20] * 3]
        and data.train.targets.tolist() == [0] * 3 + [1] * 3
    )
    assert (data.val[[0, 1]][0][:, 0] > 100).long().tolist() == data.val.targets.tolist()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda inputs, labels: Pairs(inputs, labels), "this Pairs .* __len__, nbytes, targets"),
        (
            lambda inputs, labels: TensorSplit(inputs, labels.tolist()),
            "this TensorSplit .* needs .*\nTargets must be a tensor",
        ),
        (
            lambda inputs, labels: TensorSplit(inputs, labels.numpy()),
            "this TensorSplit .* needs .*\nTargets must be a tensor",
        ),
        (
            lambda inputs, labels: torch.utils.data.TensorDataset(inputs, labels),
            "this TensorDataset .* needs __len__, nbytes, targets",
        ),
        (lambda inputs, labels: iter(labels), "tuple_iterator .* needs __len__, nbytes, targets"),
        (
            lambda inputs, labels: DatasetSplit(iter(labels)),
            "DatasetSplit: this .* or has no length",
        ),
        (lambda inputs, labels: DatasetSplit([]), "this list is empty"),
        (lambda inputs, labels: DatasetSplit([{"x": 1}]), "a sample of this list is a dict, not"),
        (lambda inputs, labels: DatasetSplit(inputs), "a sample of this Tensor is a Tensor, not"),
        (lambda inputs, labels: DatasetSplit(["text"]), "is a str, not .input, target"),
    ],
)
def test_what_is_no_part_says_what_one_is(part, words):
    with pytest.raises(UserError, match=words) as caught:
        Data("mine", part(*pairs()), None, None, (3, 2, 2), 5)
    assert "DatasetSplit" in str(caught.value) and str(caught.value).count("\n") <= 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "regresion"}, "kind=regresion: .*Did you mean 'regression'"),
        (
            {"kind": "regression", "classes": ["a", "b", "c"]},
            "mine: there are 3 class names for a regression",
        ),
        ({"classes": ["a", "b"]}, "mine: there are 2 class names for .* num_classes=3"),
    ],
)
def test_what_would_be_refused_after_the_training_is_refused_before_it(changes, words):
    with pytest.raises(UserError, match=words):
        Data("mine", tensors(), None, None, (4,), 3, **changes)


def tensors():
    """A sound split of two classes."""
    return TensorSplit(torch.zeros(8, 4), torch.arange(8) % 2)


@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize(
    ("inputs", "targets", "kind", "words"),
    [
        (
            torch.zeros(0, 4),
            torch.zeros(0, dtype=torch.int64),
            "classification",
            "there are no samples",
        ),
        (
            torch.zeros(5, 4),
            torch.tensor([0, 1] * 3),
            "classification",
            "there are 5 inputs but 6 targets",
        ),
        (
            torch.zeros(6, 3),
            torch.tensor([0, 1] * 3),
            "classification",
            r"have shape \(3,\), but should have shape \(4,\)",
        ),
        (
            torch.zeros(6, 4),
            torch.tensor([0, 1, 1, 3, 0, 1]),
            "classification",
            "the label 3 of sample 3 is not one of",
        ),
        (
            torch.tensor([[0.0, 0, 0, 0], [0, 0, math.nan, 0]]),
            torch.tensor([0, 1]),
            "classification",
            r"\[1, 2\] is nan",
        ),
        (
            torch.tensor([[0.0, 0, 0, -math.inf]] * 2),
            torch.tensor([0, 1]),
            "classification",
            r"inputs\[0, 3\] is -inf",
        ),
        (
            torch.zeros(3, 4),
            torch.tensor([[1.0], [2], [math.inf]]),
            "regression",
            r"targets\[2, 0\] is inf",
        ),
        (torch.zeros(3, 4), torch.zeros(4, 1), "regression", "there are 3 inputs but 4 targets"),
    ],
)
def test_parts_are_checked(part, inputs, targets, kind, words):
    sound = {
        "classification": tensors(),
        "regression": TensorSplit(torch.zeros(8, 4), torch.zeros(8, 1)),
    }[kind]
    parts = {"train": sound, "val": None, "test": None, part: TensorSplit(inputs, targets)}
    with pytest.raises(UserError, match=f"^mine, {part} split: .*{words}") as caught:
        Data("mine", **parts, in_shape=(4,), num_classes=3, kind=kind)
    assert "\n" not in str(caught.value)


def test_classes_are_checked():
    one = TensorSplit(torch.zeros(3, 4), torch.ones(3, dtype=torch.int64))
    with pytest.raises(
        UserError,
        match="mine: all training samples belong to class 'dog', so there is nothing",
    ):
        Data("mine", one, None, None, (4,), 3, classes=["cat", "dog", "owl"]).check_classes()
    more = TensorSplit(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(
        UserError,
        match="the val split has the class 2, which does not occur in the training split.\n.*split_seed",
    ):
        Data("mine", tensors(), more, None, (4,), 3).check_classes()
    Data("mine", more, one, tensors(), (4,), 9).check_classes()
    with pytest.raises(UserError, match="has no training split"):
        Data("mine", None, one, None, (4,), 3)


def test_constants_are_checked():
    with pytest.raises(UserError, match="mean="):
        datasets.digits(mean=[0.1, 0.2, 0.3])
    with pytest.raises(UserError, match="std="):
        datasets.digits(std=[0])


@pytest.mark.skipif(
    not os.path.isdir(os.path.join(ROOT, "MNIST", "raw")), reason="DATA_ROOT holds no MNIST"
)
def test_mnist_is_the_real_one():
    data = datasets.mnist(ROOT)
    assert [
        abs(len(part) - n) <= 5
        for part, n in zip(parts_of(data), (54000, 6000, 10000), strict=True)
    ] == [True] * 3
    assert (
        data.in_shape == (1, 28, 28)
        and data.train.inputs.is_contiguous()
        and data.test.targets[:5].tolist() == [7, 2, 1, 0, 4]
    )
    assert len(data.train) + len(data.val) == 60000
    torch.testing.assert_close(
        data.train.inputs.double().mean().item() / 255, data.mean[0], atol=5e-4, rtol=0
    )


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_a_missing_data_set_says_what_to_type(name, tmp_path):
    pytest.importorskip("torchvision")
    with pytest.raises(UserError, match=r"dataset.download=true .*dataset.root=DIR") as caught:
        getattr(datasets, name)(str(tmp_path))
    assert str(caught.value).count("\n") == 1


def test_a_fingerprint_changes_with_what_a_training_depends_on():
    def of_digits(**changes):
        return fingerprint(datasets.digits(**changes))

    assert of_digits() == of_digits() and len(of_digits()) == 32
    assert len({of_digits(), of_digits(split_seed=1), of_digits(val_fraction=0)}) == 3
    assert of_digits(mean=[0.5]) == of_digits()  # the config says that
    for part, name, place in (
        ("train", "inputs", (3, 0, 2, 2)),
        ("val", "inputs", (0, 0, 1, 1)),
        ("val", "targets", 5),
    ):
        data = datasets.digits()
        getattr(getattr(data, part), name)[place] ^= 1
        assert fingerprint(data) != of_digits()
    data = datasets.digits()
    data.test.inputs.zero_()
    assert fingerprint(data) == of_digits()
    data.train.inputs = data.train.inputs.transpose(2, 3)
    assert fingerprint(data) != of_digits()


def test_the_fingerprint_of_a_users_own_split_is_its_size_and_its_targets():
    class Own:
        nbytes = 100

        def __init__(self, targets):
            self.targets = targets

        def __len__(self):
            return len(self.targets)

    def of(*targets):
        return fingerprint(Data("own", Own(torch.tensor(targets)), None, None, (4,), 3))

    assert of(0, 1, 2) == of(0, 1, 2)
    assert len({of(0, 1, 2), of(0, 2, 1), of(0, 1, 2, 0)}) == 3


@pytest.mark.parametrize("in_shape", [(20,), (3, 8, 9)])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_synthetic_can_be_learnt_by_least_squares(kind, in_shape):
    data = datasets.synthetic(kind, 3000, in_shape, 4, noise=0.5)
    assert data.in_shape == in_shape and data.train.inputs.dtype == (
        torch.uint8 if len(in_shape) == 3 else torch.float32
    )
    inputs = [
        torch.cat([part.inputs.flatten(1).double(), torch.ones(len(part), 1)], 1)
        for part in (data.train, data.test)
    ]
    targets = (
        data.train.targets
        if kind == "regression"
        else torch.nn.functional.one_hot(data.train.targets, 4)
    )
    outputs = inputs[1] @ torch.linalg.lstsq(inputs[0], targets.double()).solution
    if kind == "regression":
        assert data.test.targets.dtype == torch.float32 and data.test.targets.shape == (300, 4)
        assert ((outputs - data.test.targets) ** 2).mean() < 0.25
    else:
        assert (outputs.argmax(1) == data.test.targets).double().mean() > 0.9
    again = datasets.synthetic(kind, 3000, in_shape, 4, noise=0.5)
    assert torch.equal(again.test.inputs, data.test.inputs) and torch.equal(
        again.test.targets, data.test.targets
    )
    assert not torch.equal(
        datasets.synthetic(kind, 3000, in_shape, 4, noise=0.5, split_seed=1).test.inputs,
        data.test.inputs,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "cluster"},
        {"n": 0},
        {"num_classes": 1},
        {"noise": -1},
        {"in_shape": [3, 4]},
        {"in_shape": [0]},
    ],
)
def test_synthetic_mistakes_name_their_key(options):
    with pytest.raises(UserError, match=f"dataset.{next(iter(options))}"):
        datasets.synthetic(**options)


def test_every_config_is_its_constructor():
    """The keys and values of configs/dataset/NAME.yaml are the arguments and defaults of the
    function NAME.
    """
    import inspect

    from omegaconf import OmegaConf

    for file in sorted(Path(__file__).parents[1].glob("configs/dataset/*.yaml")):
        config = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        modules = {"image_folder": images, "csv": tables, "text": text}
        function = getattr(modules.get(file.stem, datasets), file.stem)
        assert config.pop("_target_") == f"{function.__module__}.{file.stem}"
        loading = ["augment", "resident", "workers", "timeout"]
        if file.stem == "text":  # there is nothing to augment
            loading.remove("augment")
        assert list(config)[-len(loading) :] == loading
        assert config["timeout"] == TIMEOUT
        for key in ("augment", "resident", "workers", "timeout", "root"):
            config.pop(key, None)
        parameters = {
            name: p
            for name, p in inspect.signature(function).parameters.items()
            if name not in ("root", "trained")
        }
        assert set(config) == set(parameters)
        for key, value in config.items():
            default = parameters[key].default
            assert (
                value == "???"
                if default is inspect.Parameter.empty
                else value == (list(default) if isinstance(default, tuple) else default)
            ), (
                file,
                key,
            )


def test_the_number_of_classes_is_a_number():
    part = TensorSplit(*pairs())
    with pytest.raises(UserError, match="num_classes='5': expected a whole number of at least 1"):
        Data("mine", part, None, None, (3, 2, 2), "5")
    assert Data("mine", part, None, None, (3, 2, 2), part.targets.max() + 1).num_classes == 5
