"""Every data set: its parts are disjoint, complete and stratified, and each mistake has its answer."""

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import datasets
from data.datasets import Data, ImageSplit, TensorSplit, split_indices
from data.loader import make_loaders
from trainer.errors import UserError

ROOT = os.environ.get("DATA_ROOT", "")


def parts_of(data):
    return [part for part in (data.train, data.val, data.test) if part is not None]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6), st.floats(0, 0.45), st.floats(0, 0.45), st.integers(0, 2**60)
)
def test_splits_are_disjoint_complete_and_stratified(counts, val, test, seed):
    targets = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    targets = targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))]
    fractions = [val, test]
    try:
        parts = split_indices(targets, fractions, seed)
    except UserError as error:
        assert f"{val:g} and {test:g}" in str(error) and max(counts) <= 1 / min([f for f in fractions if f] or [1]) + 2
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
    assert all(torch.equal(a, b) for a, b in zip(parts, split_indices(targets, fractions, seed), strict=True))


def test_split_of_a_number_and_of_other_seeds():
    assert [len(part) for part in split_indices(torch.zeros(3), [0.5, 0.45], 0)] == [1, 1, 1]
    parts = split_indices(1000, [0.1, 0.2], 0)
    assert [len(part) for part in parts] == [700, 100, 200]
    assert not torch.equal(parts[1], split_indices(1000, [0.1, 0.2], 1)[1])
    with pytest.raises(UserError, match=r"3 samples cannot be cut by the fractions 0.1"):
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
    assert len({tuple(image.flatten().tolist()) for image in pixels}) == 1797  # no image twice, so none in two parts
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
    "labels", [torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor([[0], [1]])]
)
def test_labels_are_checked(labels):
    with pytest.raises(UserError, match="mine"):
        Data("mine", TensorSplit(torch.zeros(2, 4), labels), None, None, (4,), 3)


def tensors():
    """A sound split of two classes."""
    return TensorSplit(torch.zeros(8, 4), torch.arange(8) % 2)


@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize(
    ("inputs", "targets", "kind", "words"),
    [
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), "classification", "it is empty"),
        (torch.zeros(5, 4), torch.tensor([0, 1] * 3), "classification", "there are 5 inputs and 6 targets"),
        (
            torch.zeros(6, 3),
            torch.tensor([0, 1] * 3),
            "classification",
            r"have the shape \(3,\), and should have \(4,\)",
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
        (torch.tensor([[0.0, 0, 0, -math.inf]] * 2), torch.tensor([0, 1]), "classification", r"inputs\[0, 3\] is -inf"),
        (torch.zeros(3, 4), torch.tensor([[1.0], [2], [math.inf]]), "regression", r"targets\[2, 0\] is inf"),
        (torch.zeros(3, 4), torch.zeros(4, 1), "regression", "there are 3 inputs and 4 targets"),
    ],
)
def test_parts_are_checked(part, inputs, targets, kind, words):
    sound = {"classification": tensors(), "regression": TensorSplit(torch.zeros(8, 4), torch.zeros(8, 1))}[kind]
    parts = {"train": sound, "val": None, "test": None, part: TensorSplit(inputs, targets)}
    with pytest.raises(UserError, match=f"^mine, {part} part: .*{words}") as caught:
        Data("mine", **parts, in_shape=(4,), num_classes=3, kind=kind)
    assert "\n" not in str(caught.value)


def test_classes_are_checked():
    one = TensorSplit(torch.zeros(3, 4), torch.ones(3, dtype=torch.int64))
    with pytest.raises(UserError, match="mine: all 3 training samples are of one class, 'dog'. There is nothing"):
        Data("mine", one, None, None, (4,), 3, classes=["cat", "dog", "owl"])
    more = TensorSplit(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(UserError, match="the val part has the class 2, and the training part has not.\n.*split_seed"):
        Data("mine", tensors(), more, None, (4,), 3)
    assert Data("mine", more, one, tensors(), (4,), 9).num_classes == 9
    with pytest.raises(UserError, match="there is no training part"):
        Data("mine", None, one, None, (4,), 3)


def test_a_class_that_the_training_rows_of_a_table_lack(table):
    lines = [f"{i},{'ab'[i % 2]}" for i in range(40)] + ["1,c"] * 2
    with pytest.raises(UserError, match="the (val|test) part has the class 'c', and the training part has not"):
        table("x,y\n" + "\n".join(lines), target="y", val_fraction=0.45, test_fraction=0.5)


def test_constants_are_checked():
    with pytest.raises(UserError, match="mean="):
        datasets.digits(mean=[0.1, 0.2, 0.3])
    with pytest.raises(UserError, match="std="):
        datasets.digits(std=[0])


@pytest.mark.skipif(not os.path.isdir(os.path.join(ROOT, "MNIST", "raw")), reason="DATA_ROOT holds no MNIST")
def test_mnist_is_the_real_one():
    data = datasets.mnist(ROOT)
    assert [abs(len(part) - n) <= 5 for part, n in zip(parts_of(data), (54000, 6000, 10000), strict=True)] == [True] * 3
    assert (
        data.in_shape == (1, 28, 28)
        and data.train.inputs.is_contiguous()
        and data.test.targets[:5].tolist() == [7, 2, 1, 0, 4]
    )
    assert len(data.train) + len(data.val) == 60000
    torch.testing.assert_close(data.train.inputs.double().mean().item() / 255, data.mean[0], atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100"])
def test_a_missing_data_set_says_what_to_type(name, tmp_path):
    pytest.importorskip("torchvision")
    with pytest.raises(UserError, match=r"dataset.download=true .*MB.*dataset.root=DIR") as caught:
        getattr(datasets, name)(str(tmp_path))
    assert str(caught.value).count("\n") == 1


def test_a_fingerprint_changes_with_what_a_training_depends_on():
    def fingerprint(**changes):
        data = datasets.digits(**changes)
        return datasets.fingerprint(data)

    assert fingerprint() == fingerprint() and len(fingerprint()) == 32
    assert len({fingerprint(), fingerprint(split_seed=1), fingerprint(val_fraction=0)}) == 3
    assert fingerprint(mean=[0.5]) == fingerprint()  # the config says that
    for part, name, place in (
        ("train", "inputs", (3, 0, 2, 2)),
        ("val", "inputs", (0, 0, 1, 1)),
        ("val", "targets", 5),
    ):
        data = datasets.digits()
        getattr(getattr(data, part), name)[place] ^= 1
        assert datasets.fingerprint(data) != fingerprint()
    data = datasets.digits()
    data.test.inputs.zero_()
    assert datasets.fingerprint(data) == fingerprint()
    data.train.inputs = data.train.inputs.transpose(2, 3)
    assert datasets.fingerprint(data) != fingerprint()


def test_the_fingerprint_of_a_folder_knows_names_sizes_and_labels_but_no_times_and_no_root(tmp_path):
    def fingerprint(folder, **options):
        return datasets.fingerprint(datasets.image_folder(str(folder), cache=False, **options))

    write_images(tmp_path / "one", {"a": 1, "b": 2}, each=10)
    write_images(tmp_path / "two", {"a": 1, "b": 2}, each=10)
    for file in (tmp_path / "two").glob("*/*"):
        os.utime(file, (1, 1))
    before = fingerprint(tmp_path / "one")
    assert fingerprint(tmp_path / "two") == before
    assert len({before, fingerprint(tmp_path / "two", split_seed=1), fingerprint(tmp_path / "two", size=4)}) == 3
    (tmp_path / "two" / "a" / "3.png").rename(tmp_path / "two" / "a" / "33.png")
    assert fingerprint(tmp_path / "two") != before
    (tmp_path / "two" / "a" / "33.png").rename(tmp_path / "two" / "a" / "3.png")
    assert fingerprint(tmp_path / "two") == before
    for file in (tmp_path / "two").glob("*/*"):
        file.write_bytes(file.read_bytes() + b" ")
    assert fingerprint(tmp_path / "two") != before


def test_the_fingerprint_of_a_users_own_split_is_its_size_and_its_targets():
    class Own:
        nbytes = 100

        def __init__(self, targets):
            self.targets = targets

        def __len__(self):
            return len(self.targets)

    def fingerprint(targets):
        return datasets.fingerprint(Data("own", Own(torch.tensor(targets)), None, None, (4,), 3))

    assert fingerprint([0, 1, 2]) == fingerprint([0, 1, 2])
    assert len({fingerprint([0, 1, 2]), fingerprint([0, 2, 1]), fingerprint([0, 1, 2, 0])}) == 3


def write_images(folder, colours, endings=("png",), size=(6, 5), each=3):
    from PIL import Image

    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for i in range(each):
            Image.new("RGB", size, (colour, i, 7)).save(folder / name / f"{i}.{endings[i % len(endings)]}")


def test_image_folder_with_its_own_parts(tmp_path):
    for part, each in (("train", 4), ("test", 2)):
        write_images(tmp_path / part, {"dog": 20, "cat": 10, "owl": 30}, ("png", "BMP"), each=each)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    data = datasets.image_folder(str(tmp_path), val_fraction=0.25)
    assert (
        data.classes == ["cat", "dog", "owl"]
        and data.in_shape == (3, 5, 6)
        and [len(part) for part in parts_of(data)] == [9, 3, 6]
    )
    inputs, targets = data.test.tensors()
    assert inputs.shape == (6, 3, 5, 6) and inputs.dtype == torch.uint8 and targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert inputs[:, 0, 0, 0].tolist() == [10, 10, 20, 20, 30, 30] and inputs[:, 1, 4, 5].tolist() == [0, 1] * 3
    for i in range(6):
        assert torch.equal(data.test[i][0], inputs[i]) and data.test[i][1] == targets[i]
    assert torch.equal(data.test[[5, 0]][0], inputs[[5, 0]]) and data.test.nbytes == inputs.nbytes
    pixels = data.train.tensors()[0].double() / 255
    torch.testing.assert_close(data.mean, pixels.mean((0, 2, 3)).tolist())
    torch.testing.assert_close(data.std[:1], pixels.std((0, 2, 3), correction=0).tolist()[:1])


def test_image_folder_without_parts_resized_and_grey(tmp_path):
    write_images(tmp_path, {"a": 0, "b": 255}, ("jpg", "webp", "png"), size=(40, 30), each=20)
    data = datasets.image_folder(
        str(tmp_path), size=8, channels=1, val_fraction=0.1, test_fraction=0.2, mean=[0.5], std=[0.5]
    )
    assert data.in_shape == (1, 8, 8) and [len(part) for part in parts_of(data)] == [28, 4, 8] and data.mean == [0.5]
    files = [file for part in parts_of(data) for file in part.files]
    assert len(set(files)) == 40 and list(data.test.files) == sorted(data.test.files)
    assert data.train.tensors()[0].shape == (28, 1, 8, 8)


def test_image_folder_mistakes(tmp_path):
    def refused(words, folder, **options):
        with pytest.raises(UserError, match=words) as caught:
            data = datasets.image_folder(str(folder), mean=[0, 0, 0], std=[1, 1, 1], **options)
            data.train.tensors()
        assert str(caught.value).count("\n") <= 2

    refused("no such folder", tmp_path / "nowhere")
    refused("here is no folder", tmp_path)
    write_images(tmp_path / "one", {"a": 1})
    refused("only a", tmp_path / "one")
    write_images(tmp_path / "two", {"a": 1, "b": 2}, each=5)
    refused("dataset.channels=2", tmp_path / "two", channels=2)
    refused("dataset.size=0", tmp_path / "two", size=0)
    (tmp_path / "two" / "empty").mkdir()
    refused("empty: there is no image", tmp_path / "two")
    (tmp_path / "two" / "empty").rmdir()
    write_images(tmp_path / "parts" / "train", {"cat": 1, "dog": 2}, each=5)
    write_images(tmp_path / "parts" / "test", {"cats": 1})
    refused("no class 'cats'. Did you mean 'cat'", tmp_path / "parts")
    write_images(tmp_path / "sizes", {"a": 1, "b": 2}, each=5)
    write_images(tmp_path / "sizes" / "tmp", {"x": 1}, size=(9, 9), each=1)
    (tmp_path / "sizes" / "tmp" / "x" / "0.png").rename(tmp_path / "sizes" / "b" / "3.png")
    (tmp_path / "sizes" / "tmp" / "x").rmdir()
    (tmp_path / "sizes" / "tmp").rmdir()
    refused(
        r"b/3.png: this image has 9x9 pixels, and the first one 5x6.\n.*dataset.size=",
        tmp_path / "sizes",
        val_fraction=0,
        test_fraction=0,
    )
    (tmp_path / "two" / "b" / "1.png").write_bytes(b"broken")
    refused("b/1.png: this image cannot be read", tmp_path / "two", val_fraction=0, test_fraction=0)
    (tmp_path / "two" / "a" / "0.png").write_bytes(b"broken")
    refused("a/0.png: this image cannot be read", tmp_path / "two")


def test_broken_images_can_be_left_out(tmp_path, caplog, monkeypatch):
    write_images(tmp_path / "whole", {"a": 10, "b": 20, "c": 30}, each=20)
    write_images(tmp_path / "holes", {"a": 10, "b": 20, "c": 30}, each=20)
    broken = ["a/0.png", "b/3.png", "c/7.png", "c/8.png"]
    for name in broken:
        (tmp_path / "whole" / name).unlink()
        (tmp_path / "holes" / name).write_bytes(b"broken")

    def load(name, **options):
        return datasets.image_folder(str(tmp_path / name), cache=str(tmp_path / "cache"), **options)

    with pytest.raises(UserError, match="a/0.png: this image cannot be read"):
        load("holes")
    whole, decode, read = load("whole"), datasets.decode_image, []
    monkeypatch.setattr(datasets, "decode_image", lambda file, *rest: read.append(file) or decode(file, *rest))
    for tried in (60, 4):  # the second time only what could not be read is tried again
        read.clear()
        caplog.clear()
        holes = load("holes", on_bad_sample="skip")
        assert len(read) == tried
        (record,) = caplog.records
        shown = ", ".join(str(tmp_path / "holes" / name) for name in broken[:3])
        assert record.getMessage() == f"4 of 60 images cannot be read and are left out: {shown}, ..."
    for part, other in zip(parts_of(whole), parts_of(holes), strict=True):
        assert torch.equal(part.tensors()[0], other.tensors()[0]) and torch.equal(part.targets, other.targets)
    options = {"batch_size": 7, "seed": 3, "augment": ["flip"]}
    (resident, _, _), _ = make_loaders(holes, resident=True, **options)
    for workers in (0, 2):
        (streamed, _, _), _ = make_loaders(holes, resident=False, workers=workers, **options)
        for (inputs, targets), (others, labels) in zip(resident, streamed, strict=True):
            assert torch.equal(inputs, others) and torch.equal(targets, labels)
        streamed.close()
        resident.seek(0)
    assert whole.mean == holes.mean and datasets.fingerprint(whole) == datasets.fingerprint(holes)


def test_what_skipping_cannot_leave_out(tmp_path):
    def load(**options):
        return datasets.image_folder(str(tmp_path), cache=False, **{"on_bad_sample": "skip", **options})

    write_images(tmp_path / "train", {"a": 10, "b": 20})
    write_images(tmp_path / "val", {"a": 10, "b": 20}, each=1)
    for file in (tmp_path / "val").glob("*/*"):
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match=r"skip: all of the val images cannot be read \(.*a/0.png, .*b/0.png\)"):
        load()
    write_images(tmp_path / "more", {"a": 10, "b": 20}, each=1)
    for name in "ab":
        (tmp_path / "more" / name / "0.png").rename(tmp_path / "val" / name / "0.png")
    for file in (tmp_path / "train" / "b").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match="skip: all of the class b cannot be read"):
        load()
    with pytest.raises(UserError, match="dataset.on_bad_sample=ignore: there is no such choice"):
        load(on_bad_sample="ignore")
    write_images(tmp_path / "other", {"b": 20}, size=(9, 9), each=1)  # another size is no damage
    (tmp_path / "other" / "b" / "0.png").rename(tmp_path / "train" / "b" / "0.png")
    with pytest.raises(UserError, match="this image has 9x9 pixels, and the first one 5x6"):
        load()


def test_an_image_that_breaks_after_it_was_tried_is_named(tmp_path):
    write_images(tmp_path, {"a": 10, "b": 20}, each=20)
    data = datasets.image_folder(str(tmp_path), cache=False, on_bad_sample="skip")
    Path(data.train.files[5]).write_bytes(b"broken")
    for workers in (0, 1):
        (train, _, _), _ = make_loaders(data, batch_size=4, resident=False, workers=workers)
        with pytest.raises(UserError, match=f"{data.train.files[5]}: this image cannot be read"):
            list(train)
        train.close()


@pytest.mark.skipif(not os.path.isdir(os.path.join(ROOT, "cifar10_jpeg")), reason="DATA_ROOT holds no cifar10_jpeg")
def test_photographs_are_decoded_as_torchvision_does():
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    from PIL import Image

    data = datasets.image_folder(os.path.join(ROOT, "cifar10_jpeg"), mean=[0.5] * 3, std=[0.2] * 3)
    assert [len(part) for part in parts_of(data)] == [45000, 5000, 10000] and data.in_shape == (3, 32, 32)
    some = ImageSplit(list(data.train.files)[::3000], data.train.targets[::3000], data.train.size, 3)
    for file, image in zip(some.files, some.tensors()[0], strict=True):
        assert torch.equal(image, functional.pil_to_tensor(Image.open(file)))


@pytest.mark.parametrize("in_shape", [(20,), (3, 8, 9)])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_synthetic_can_be_learnt_by_least_squares(kind, in_shape):
    data = datasets.synthetic(kind, 3000, in_shape, 4, noise=0.5)
    assert data.in_shape == in_shape and data.train.inputs.dtype == (
        torch.uint8 if len(in_shape) == 3 else torch.float32
    )
    inputs = [
        torch.cat([part.inputs.flatten(1).double(), torch.ones(len(part), 1)], 1) for part in (data.train, data.test)
    ]
    targets = data.train.targets if kind == "regression" else torch.nn.functional.one_hot(data.train.targets, 4)
    outputs = inputs[1] @ torch.linalg.lstsq(inputs[0], targets.double()).solution
    if kind == "regression":
        assert data.test.targets.dtype == torch.float32 and data.test.targets.shape == (300, 4)
        assert ((outputs - data.test.targets) ** 2).mean() < 0.25
    else:
        assert (outputs.argmax(1) == data.test.targets).double().mean() > 0.9
    again = datasets.synthetic(kind, 3000, in_shape, 4, noise=0.5)
    assert torch.equal(again.test.inputs, data.test.inputs) and torch.equal(again.test.targets, data.test.targets)
    assert not torch.equal(
        datasets.synthetic(kind, 3000, in_shape, 4, noise=0.5, split_seed=1).test.inputs, data.test.inputs
    )


@pytest.mark.parametrize(
    "options",
    [{"kind": "cluster"}, {"n": 0}, {"num_classes": 1}, {"noise": -1}, {"in_shape": [3, 4]}, {"in_shape": [0]}],
)
def test_synthetic_mistakes_name_their_key(options):
    with pytest.raises(UserError, match=f"dataset.{next(iter(options))}"):
        datasets.synthetic(**options)


@pytest.fixture
def table(tmp_path):
    def write(text, **options):
        path = tmp_path / "table.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return datasets.csv(str(path), **options)

    return write


def rows(n=100):
    """age is numeric, city a category, kind a class in text, price a number."""
    return [f"{20 + i % 40},{'abc'[i % 3]},{'yes' if i % 4 else 'no'},{i * 1.5 + 0.25}" for i in range(n)]


HEADER = "age,city,kind,price\n"


def test_csv_classes(table):
    data = table(HEADER + "\n".join(rows()), target="kind")
    assert (data.kind, data.classes, data.num_classes, data.in_shape) == ("classification", ["no", "yes"], 2, (5,))
    assert sum(len(part) for part in parts_of(data)) == 100 and data.target_scale == 1.0 and data.mean is None
    train = data.train.inputs.double()
    torch.testing.assert_close(train[:, [0, 4]].mean(0), torch.zeros(2).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(train[:, [0, 4]].std(0, correction=0), torch.ones(2).double(), atol=1e-6, rtol=0)
    for part in parts_of(data):
        assert part.inputs.dtype == torch.float32 and torch.equal(part.inputs[:, 1:4].sum(1), torch.ones(len(part)))


def test_csv_regression_is_told_in_the_users_units(table):
    data = table(HEADER + "\n".join(rows()), target="price", val_fraction=0.1, test_fraction=0.2)
    assert (
        data.kind == "regression" and data.num_classes == 1 and [len(part) for part in parts_of(data)] == [70, 10, 20]
    )
    prices = torch.cat([part.targets for part in parts_of(data)]).double() * data.target_scale + data.target_mean
    torch.testing.assert_close(
        prices.view(-1).sort().values, torch.arange(100).double() * 1.5 + 0.25, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(data.train.targets.double().std(correction=0).item(), 1.0, atol=1e-6, rtol=0)
    assert data.train.targets.shape == (70, 1) and data.train.targets.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "kind", "classes"),
    [
        (lambda i: i % 3, "classification", ["0", "1", "2"]),
        (lambda i: i % 10, "regression", None),  # ten of a hundred rows are not fewer than a tenth
        (lambda i: i % 3 / 2, "regression", None),
        (lambda i: "xy"[i % 2], "classification", ["x", "y"]),
        (lambda i: f"{i % 2 + 9}.0", "classification", ["9", "10"]),
    ],
)
def test_csv_kind_auto(table, values, kind, classes):
    data = table("a,y\n" + "\n".join(f"{i},{values(i)}" for i in range(100)), target="y")
    assert (data.kind, data.classes) == (kind, classes)
    if kind == "regression":
        assert (
            table("a,y\n" + "\n".join(f"{i},{values(i)}" for i in range(100)), target="y", kind="classification").kind
            == "classification"
        )


def test_csv_learns_from_the_training_part_alone(table):
    """Rows of the other parts change no training row, and a category that they alone have is all zeros."""
    text = rows()
    plain = table(HEADER + "\n".join(text), target="price", split_seed=5)
    _, val, test = split_indices(100, [0.1, 0.2], 5, stratified=False)
    for i in [*val.tolist(), *test.tolist()]:
        text[i] = "9999,elsewhere,yes,0"
    changed = table(HEADER + "\n".join(text), target="price", split_seed=5)
    assert torch.equal(plain.train.inputs, changed.train.inputs) and torch.equal(
        plain.train.targets, changed.train.targets
    )
    assert changed.test.inputs[:, 1:4].abs().sum() == 0 and changed.test.inputs[:, 0].min() > 100


def test_csv_forms(table):
    expected = table(HEADER + "\n".join(rows()), target="kind")
    assert table(b"\xef\xbb\xbf" + (HEADER + "\n".join(rows())).encode(), target="kind", ignore="age").in_shape == (4,)
    for text, options in [
        (b"\xef\xbb\xbf" + (HEADER + "\r\n".join(rows())).encode(), {}),
        ((HEADER + "\n\n".join(rows())).replace(",", ";"), {"delimiter": ";"}),
        ((HEADER + "\n".join(rows())).replace(",", "\t"), {"delimiter": "tab"}),
        (
            HEADER.replace(",", " , ")
            + "\n".join(rows())
            .replace(",", ', "')
            .replace("\n", '"\n')
            .replace(', "', '","')
            .replace("\n", '\n"')
            .join('""'),
            {},
        ),
    ]:
        data = table(text, target="kind", **options)
        assert torch.equal(data.train.inputs, expected.train.inputs) and torch.equal(
            data.test.targets, expected.test.targets
        )
    assert table(HEADER + "\n".join(rows()), target="kind", ignore=["price", "city"]).in_shape == (1,)
    assert table(HEADER + "\n".join(rows()), target="kind", categorical=["age"], ignore="price").in_shape[0] > 35


def test_csv_missing_values(table):
    lines = rows()
    for i, empty in enumerate(["", "NA", "?", "nan", "None", "null"]):
        lines[i] = f"{empty},{'abc'[i % 3]},yes,1.5"
    lines[10] = "30,,yes,4"
    text = HEADER + "\n".join(lines)
    with pytest.raises(
        UserError, match=r"'age' in 6, 'city' in 1 of 100 rows.\nType dataset.missing=mean .* dataset.missing=drop"
    ):
        table(text, target="kind")
    assert sum(len(part) for part in parts_of(table(text, target="kind", missing="drop"))) == 93
    filled = table(text, target="kind", missing="mean", val_fraction=0, test_fraction=0)
    assert (
        len(filled.train) == 100
        and filled.train.inputs[:6, 0].tolist() == [0] * 6
        and filled.train.inputs[10, 1:4].tolist() == [0] * 3
    )
    lines[20] = "30,a,,4"
    with pytest.raises(UserError, match=r"'kind' in 1 of 100 rows.\nType dataset.missing=drop"):
        table(HEADER + "\n".join(lines), target="kind")
    with pytest.raises(UserError, match="target 'kind' is missing in 1 of 100"):
        table(HEADER + "\n".join(lines), target="kind", missing="mean")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (HEADER + "\n".join(rows()), {"target": "prise"}, "dataset.target=prise.*Did you mean 'price'"),
        (HEADER + "\n".join(rows()), {"categorical": ["town"]}, "dataset.categorical=town"),
        (HEADER + "\n".join(rows()), {"kind": "cluster"}, "dataset.kind"),
        (HEADER + "\n".join(rows()), {"missing": "guess"}, "dataset.missing"),
        (HEADER + "\n".join(rows()), {"delimiter": ";;"}, "dataset.delimiter"),
        (HEADER + "\n".join(rows()), {"delimiter": ";"}, "one column only"),
        (HEADER + "\n".join(rows()), {"target": "city", "kind": "regression"}, "'a' is not a number"),
        (HEADER, {}, "is empty"),
        ("", {}, "is empty"),
        (HEADER + "1,a,yes,2\n1,a,yes\n", {}, "line 3: 3 values for the 4 columns"),
        (HEADER + "1,a,yes,2\n" * 30, {}, "all 30 rows have the same value, 'yes'"),
        (HEADER + "1,a,yes,2\n" * 30, {"target": "price"}, "all 30 rows have the same value"),
        ("age,age,kind\n1,2,3\n", {}, "'age' 2 times"),
        ("age,,kind\n1,2,3\n", {}, "a column without a name"),
        (
            HEADER + "\n".join(f"{i},{i}x,{i % 2},3" for i in range(100)),
            {},
            "'city' has .* different values.*dataset.ignore=.city.",
        ),
        (b"age,kind\n\xff\xfe,1\n", {}, "no table that can be read"),
        ("kind,id\n" + "\n".join(f"{i % 2},{i}" for i in range(50)), {"ignore": ["id"]}, "no column besides"),
        ("a,b,kind\n" + "\n".join(f",{i},{i % 2}" for i in range(50)), {"missing": "mean"}, "'a' has no value"),
        ("a,b,kind\n" + "\n".join(f",{i},{i % 2}" for i in range(50)), {"missing": "drop"}, "leaves no row"),
    ],
)
def test_csv_mistakes(table, text, options, words):
    with pytest.raises(UserError, match=f"(?s){words}") as caught:
        table(text, **{"target": "kind", **options})
    assert str(caught.value).count("\n") <= 2


def test_csv_without_a_file(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        datasets.csv(str(tmp_path / "none.csv"), "y")


def test_every_config_is_its_constructor():
    """The keys and values of configs/dataset/NAME.yaml are the arguments and defaults of data.datasets.NAME."""
    import inspect

    from omegaconf import OmegaConf

    for file in sorted(Path(__file__).parents[1].glob("configs/dataset/*.yaml")):
        config = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        function = getattr(datasets, file.stem)
        assert config.pop("_target_") == f"data.datasets.{file.stem}"
        assert list(config)[-4:] == ["augment", "resident", "workers", "timeout"]
        for key in ("augment", "resident", "workers", "timeout", "root"):
            config.pop(key, None)
        parameters = {name: p for name, p in inspect.signature(function).parameters.items() if name != "root"}
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
