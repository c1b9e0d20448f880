"""Image folders: every file is in one part, its pixels are torchvision's, and each mistake has its
answer.
"""

import itertools
import os
import re
from pathlib import Path

import pytest
import torch

from stoker.data import images
from stoker.data.description import is_description
from stoker.data.images import ImageSplit
from stoker.data.loader import make_loaders
from stoker.data.record import fingerprint
from stoker.runs import inference
from stoker.trainer.errors import UserError
from stoker.trainer.seeding import mix_seed

ROOT = os.environ.get("DATA_ROOT", "")


def parts_of(data):
    return [part for part in (data.train, data.val, data.test) if part is not None]


def write_images(folder, colours, endings=("png",), size=(6, 5), each=3):
    from PIL import Image

    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for i in range(each):
            Image.new("RGB", size, (colour, i, 7)).save(
                folder / name / f"{i}.{endings[i % len(endings)]}"
            )


def test_the_fingerprint_of_a_folder_knows_names_sizes_and_labels_but_no_times_and_no_root(
    tmp_path,
):
    def of_folder(folder, **options):
        return fingerprint(images.image_folder(str(folder), cache=False, **options))

    write_images(tmp_path / "one", {"a": 1, "b": 2}, each=10)
    write_images(tmp_path / "two", {"a": 1, "b": 2}, each=10)
    for file in (tmp_path / "two").glob("*/*"):
        os.utime(file, (1, 1))
    before = of_folder(tmp_path / "one")
    assert of_folder(tmp_path / "two") == before
    assert (
        len(
            {
                before,
                of_folder(tmp_path / "two", split_seed=1),
                of_folder(tmp_path / "two", size=4),
            }
        )
        == 3
    )
    (tmp_path / "two" / "a" / "3.png").rename(tmp_path / "two" / "a" / "33.png")
    assert of_folder(tmp_path / "two") != before
    (tmp_path / "two" / "a" / "33.png").rename(tmp_path / "two" / "a" / "3.png")
    assert of_folder(tmp_path / "two") == before
    for file in (tmp_path / "two").glob("*/*"):
        file.write_bytes(file.read_bytes() + b" ")
    assert of_folder(tmp_path / "two") != before


def test_image_folder_with_its_own_parts(tmp_path):
    for part, each in (("train", 4), ("test", 2)):
        write_images(tmp_path / part, {"dog": 20, "cat": 10, "owl": 30}, ("png", "BMP"), each=each)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    data = images.image_folder(str(tmp_path), val_fraction=0.25)
    assert (
        data.classes == ["cat", "dog", "owl"]
        and data.in_shape == (3, 5, 6)
        and [len(part) for part in parts_of(data)] == [9, 3, 6]
    )
    inputs, targets = data.test.tensors()
    assert (
        inputs.shape == (6, 3, 5, 6)
        and inputs.dtype == torch.uint8
        and targets.tolist() == [0, 0, 1, 1, 2, 2]
    )
    assert (
        inputs[:, 0, 0, 0].tolist() == [10, 10, 20, 20, 30, 30]
        and inputs[:, 1, 4, 5].tolist() == [0, 1] * 3
    )
    for i in range(6):
        [one], [label] = data.test[[i]]
        assert torch.equal(one, inputs[i]) and label == targets[i]
    assert torch.equal(data.test[[5, 0]][0], inputs[[5, 0]]) and data.test.nbytes == inputs.nbytes
    pixels = data.train.tensors()[0].double() / 255
    torch.testing.assert_close(data.mean, pixels.mean((0, 2, 3)).tolist())
    torch.testing.assert_close(data.std[:1], pixels.std((0, 2, 3), correction=0).tolist()[:1])


def test_image_folder_without_parts_resized_and_grey(tmp_path):
    write_images(tmp_path, {"a": 0, "b": 255}, ("jpg", "webp", "png"), size=(40, 30), each=20)
    data = images.image_folder(
        str(tmp_path),
        size=8,
        channels=1,
        val_fraction=0.1,
        test_fraction=0.2,
        mean=[0.5],
        std=[0.5],
    )
    assert (
        data.in_shape == (1, 8, 8)
        and [len(part) for part in parts_of(data)] == [28, 4, 8]
        and data.mean == [0.5]
    )
    files = [file for part in parts_of(data) for file in part.files]
    assert len(set(files)) == 40 and list(data.test.files) == sorted(data.test.files)
    assert data.train.tensors()[0].shape == (28, 1, 8, 8)


def test_the_levels_of_16_bits_are_brought_to_8(tmp_path):
    from PIL import Image

    levels = torch.tensor([0, 255, 256, 1000, 40_000, 65_535])
    data = levels.to(torch.uint16).numpy().tobytes()
    Image.frombytes("I;16", (3, 2), data).save(tmp_path / "deep.png")
    for channels in (1, 3):
        pixels = images.decode_image(tmp_path / "deep.png", (2, 3), channels)
        assert torch.equal(
            pixels, (levels // 256).to(torch.uint8).view(1, 2, 3).expand(channels, 2, 3)
        )


def test_a_photograph_is_turned_as_the_camera_was_held(tmp_path):
    """By its EXIF data, as every program shows it; its size, too."""
    from PIL import ExifTags, Image, ImageOps

    image = Image.frombytes("L", (5, 4), bytes(range(0, 200, 10)))
    for orientation in range(1, 9):
        folder = tmp_path / str(orientation)
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        for name in ("a", "b"):
            (folder / name).mkdir(parents=True)
            image.save(folder / name / "1.png", exif=exif)
        shown = ImageOps.exif_transpose(Image.open(folder / "a" / "1.png"))
        expected = torch.tensor(list(shown.tobytes()), dtype=torch.uint8).view(
            1, shown.height, shown.width
        )
        data = images.image_folder(
            str(folder), channels=1, cache=False, val_fraction=0, test_fraction=0
        )
        assert data.in_shape == expected.shape and torch.equal(data.train[[0]][0][0], expected)
        assert (shown.size == (5, 4)) == (orientation < 5)


ENDINGS = ["jpg", "JPEG", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp", "TIF"]


def write_nested(top, each=1):
    """Classes with subfolders, all endings that torchvision knows, and what it does not read."""
    from PIL import Image

    for label, name in enumerate(("dog", "cat")):
        for i, below in enumerate(("", "2024", "2024/may", "a-b", "2024-x")):
            folder = top / name / below
            folder.mkdir(parents=True, exist_ok=True)
            for j, ending in enumerate(ENDINGS * each):
                kind = "L" if ending == "pgm" else "RGB"
                colour = (label * 100 + i * 10 + j) % 256
                image = Image.new(kind, (4, 4), colour if kind == "L" else (colour, i, j))
                image.save(folder / f"{j}.{ending}")
        (top / name / "notes.txt").write_text("no image")


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_the_images_of_a_folder_are_those_of_image_folder(tmp_path, name, caplog):
    datasets = pytest.importorskip("torchvision.datasets")
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    for part in ("train", name, "test"):
        write_nested(tmp_path / part, each=2)
    (tmp_path / "unlabelled").mkdir()
    (tmp_path / "train" / "list.csv").write_text("0.png,1")
    (tmp_path / "train" / "loose.PNG").write_bytes(b"")
    data = images.image_folder(str(tmp_path), cache=False)
    for part, folder in zip(parts_of(data), ("train", name, "test"), strict=True):
        expected = datasets.ImageFolder(str(tmp_path / folder))
        assert data.classes == expected.classes
        assert list(zip(part.files, part.targets.tolist(), strict=True)) == expected.samples
        pixels = torch.stack([functional.pil_to_tensor(image) for image, _ in expected])
        assert torch.equal(part.tensors()[0], pixels)
    [record] = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}: some files or folders were skipped: 6 of type '.txt', "
        "1 folder next to train (unlabelled), 1 outside the class folders"
    )


def test_folders_of_parts_that_cannot_be_told_apart(tmp_path):
    for part in ("train", "val", "valid"):
        write_images(tmp_path / "both" / part, {"a": 1, "b": 2})
    with pytest.raises(UserError, match="valid: .*val is already the val split"):
        images.image_folder(str(tmp_path / "both"), cache=False)
    for part in ("Train", "Test"):
        write_images(tmp_path / "capital" / part, {"a": 1, "b": 2})
    with pytest.raises(UserError, match="this folder contains Test, Train, but no train folder"):
        images.image_folder(str(tmp_path / "capital"), cache=False)


@pytest.mark.skipif(os.name != "posix", reason="links of POSIX")
def test_links_are_followed_but_not_in_circles(tmp_path, caplog):
    write_images(tmp_path / "data", {"a": 1, "b": 2})
    write_images(tmp_path / "more", {"x": 3}, each=2)
    (tmp_path / "data" / "a" / "more").symlink_to(tmp_path / "more" / "x")
    (tmp_path / "data" / "a" / "again").symlink_to(tmp_path / "data" / "a")
    (tmp_path / "data" / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "more" / "x" / "back").symlink_to(tmp_path / "data" / "a")
    (tmp_path / "data" / "b" / ".hidden.png").write_text("")
    (tmp_path / "data" / "b" / "gone.png").symlink_to(tmp_path / "nowhere")
    data = images.image_folder(str(tmp_path / "data"), cache=False, val_fraction=0, test_fraction=0)
    assert [len(data.train), data.train.targets.tolist()] == [8, [0] * 5 + [1] * 3]
    assert caplog.records[0].getMessage().partition("skipped: ")[2] == (
        "3 linking to a parent folder, 1 of type '.png'"
    )


def test_image_folder_mistakes(tmp_path):
    def refused(words, folder, **options):
        with pytest.raises(UserError, match=words) as caught:
            data = images.image_folder(str(folder), mean=[0, 0, 0], std=[1, 1, 1], **options)
            data.train.tensors()
        assert str(caught.value).count("\n") <= 2

    refused("there is no folder", tmp_path / "nowhere")
    refused("needs at least 2 class folders, but has 0", tmp_path)
    write_images(tmp_path / "one", {"a": 1})
    refused("needs at least 2 class folders, but has 1", tmp_path / "one")
    write_images(tmp_path / "two", {"a": 1, "b": 2}, each=5)
    refused("dataset.channels=2", tmp_path / "two", channels=2)
    refused("dataset.size=0", tmp_path / "two", size=0)
    refused(
        "dataset.size=4097: expected a whole number of at least 1 and at most 4096",
        tmp_path / "two",
        size=4097,
    )
    (tmp_path / "two" / "empty").mkdir()
    refused("empty: this folder has no images", tmp_path / "two")
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
        r"b/3.png: this image is 9x9 pixels, but the first is 5x6.\n.*dataset.size=",
        tmp_path / "sizes",
        val_fraction=0,
        test_fraction=0,
    )
    (tmp_path / "two" / "b" / "1.png").write_bytes(b"broken")
    refused("b/1.png: this image cannot be read", tmp_path / "two", val_fraction=0, test_fraction=0)
    (tmp_path / "two" / "a" / "0.png").write_bytes(b"broken")
    refused(r"a/0.png: this image cannot be read .*\n.*on_bad_sample=skip", tmp_path / "two")


def test_a_missing_folder_is_named_with_the_place_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        images.image_folder("photos")
    words = f"dataset.root=photos: there is no folder {tmp_path}/photos."
    assert str(caught.value).splitlines()[0] == words


def test_broken_images_can_be_left_out(tmp_path, caplog, monkeypatch):
    write_images(tmp_path / "whole", {"a": 10, "b": 20, "c": 30}, each=20)
    write_images(tmp_path / "holes", {"a": 10, "b": 20, "c": 30}, each=20)
    broken = ["a/0.png", "b/3.png", "c/7.png", "c/8.png"]
    for name in broken:
        (tmp_path / "whole" / name).unlink()
        (tmp_path / "holes" / name).write_bytes(b"broken")

    def load(name, **options):
        return images.image_folder(str(tmp_path / name), cache=str(tmp_path / "cache"), **options)

    with pytest.raises(UserError, match="a/0.png: this image cannot be read"):
        load("holes")
    whole, decode, read = load("whole"), images.decode_image, []
    monkeypatch.setattr(
        images, "decode_image", lambda file, *rest: read.append(file) or decode(file, *rest)
    )
    for tried in (60, 4):  # the second time only what could not be read is tried again
        read.clear()
        caplog.clear()
        holes = load("holes", on_bad_sample="skip")
        assert len(read) == tried
        (record,) = caplog.records
        shown = ", ".join(str(tmp_path / "holes" / name) for name in broken[:3])
        assert record.getMessage() == f"Skipped 4 of 60 images that cannot be read: {shown}, ..."
    for part, other in zip(parts_of(whole), parts_of(holes), strict=True):
        assert torch.equal(part.tensors()[0], other.tensors()[0]) and torch.equal(
            part.targets, other.targets
        )
    options = {"batch_size": 7, "seed": 3, "augment": ["flip"]}
    (resident, _, _), _ = make_loaders(holes, resident=True, **options)
    for workers in (0, 2):
        (streamed, _, _), _ = make_loaders(holes, resident=False, workers=workers, **options)
        for (inputs, targets), (others, labels) in zip(resident, streamed, strict=True):
            assert torch.equal(inputs, others) and torch.equal(targets, labels)
        streamed.close()
        resident.seek(0)
    assert whole.mean == holes.mean and fingerprint(whole) == fingerprint(holes)


def test_what_skipping_cannot_leave_out(tmp_path, caplog):
    def load(**options):
        return images.image_folder(
            str(tmp_path), cache=False, **{"on_bad_sample": "skip", **options}
        )

    write_images(tmp_path / "train", {"a": 10, "b": 20})
    write_images(tmp_path / "val", {"a": 10, "b": 20}, each=1)
    for file in (tmp_path / "val").glob("*/*"):
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match="val split: there are no samples"):
        load()
    shown = r"Skipped 2 of 8 images that cannot be read: .*a/0.png, .*b/0.png$"
    assert re.match(shown, caplog.records[0].getMessage())
    write_images(tmp_path / "more", {"a": 10, "b": 20}, each=1)
    for name in "ab":
        (tmp_path / "more" / name / "0.png").rename(tmp_path / "val" / name / "0.png")
    for file in (tmp_path / "train" / "b").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match="b: this folder has no images that can be read"):
        load()
    with pytest.raises(UserError, match="dataset.on_bad_sample=ignore: not a valid choice"):
        load(on_bad_sample="ignore")
    write_images(tmp_path / "other", {"b": 20}, size=(9, 9), each=1)  # another size is no damage
    (tmp_path / "other" / "b" / "0.png").rename(tmp_path / "train" / "b" / "0.png")
    with pytest.raises(UserError, match="this image is 9x9 pixels, but the first is 5x6"):
        load()


def test_an_image_that_breaks_after_it_was_tried_is_named(tmp_path):
    write_images(tmp_path, {"a": 10, "b": 20}, each=20)
    data = images.image_folder(str(tmp_path), cache=False, on_bad_sample="skip")
    Path(data.train.files[5]).write_bytes(b"broken")
    for workers in (0, 1):
        (train, _, _), _ = make_loaders(data, batch_size=4, resident=False, workers=workers)
        with pytest.raises(UserError, match=f"{data.train.files[5]}: this image cannot be read"):
            list(train)
        train.close()


@pytest.mark.skipif(
    not os.path.isdir(os.path.join(ROOT, "cifar10_jpeg")), reason="DATA_ROOT holds no cifar10_jpeg"
)
def test_photographs_are_decoded_as_torchvision_does():
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    from PIL import Image

    data = images.image_folder(os.path.join(ROOT, "cifar10_jpeg"), mean=[0.5] * 3, std=[0.2] * 3)
    assert [len(part) for part in parts_of(data)] == [45000, 5000, 10000] and data.in_shape == (
        3,
        32,
        32,
    )
    some = ImageSplit(
        list(data.train.files)[::3000], data.train.targets[::3000], data.train.size, 3
    )
    for file, image in zip(some.files, some.tensors()[0], strict=True):
        assert torch.equal(image, functional.pil_to_tensor(Image.open(file)))


def test_the_usual_pipeline_of_imagenet_is_that_of_torchvision(tmp_path):
    """Evaluated are Resize and CenterCrop; trained is RandomResizedCrop of the whole photograph."""
    torchvision = pytest.importorskip("torchvision")
    from PIL import Image
    from torchvision.transforms import v2

    generator = torch.Generator().manual_seed(0)
    for part, name in itertools.product(("train", "val"), ("a", "b")):
        (tmp_path / part / name).mkdir(parents=True)
        for i, size in enumerate([(50, 37), (33, 60), (41, 41)]):
            coarse = torch.rand(1, 3, 5, 5, generator=generator)
            pixels = torch.nn.functional.interpolate(coarse, size, mode="bilinear")[0] * 255
            image = v2.functional.to_pil_image(pixels.to(torch.uint8))
            image.save(tmp_path / part / name / f"{i}.jpg")
    crop = v2.RandomResizedCrop(24)
    data = images.image_folder(
        str(tmp_path), size=24, resize=28, cache=str(tmp_path / "cache"), test_fraction=0
    )
    loaders, _ = make_loaders(data, batch_size=4, augment=[crop, "flip"], seed=5)
    for split, loader in zip(("train", "val"), loaders, strict=False):
        original = torchvision.datasets.ImageFolder(tmp_path / split)
        usual = v2.Compose([v2.Resize(28), v2.CenterCrop(24), v2.PILToTensor()])
        expected = torch.stack([usual(image) for image, _ in original])
        part = data.parts()[split]
        assert torch.equal(part[list(range(6))][0], expected)
        if split == "val":
            batches = torch.cat([inputs for inputs, _ in loader])
            assert torch.equal(batches, loader.normalize(expected))
            continue
        for index, given in zip(
            loader.order(0).tolist(), torch.cat([x for x, _ in loader]), strict=True
        ):
            torch.manual_seed(mix_seed("transform", 5, 0, index))
            cropped = loader.normalize(crop(v2.functional.pil_to_tensor(original[index][0])))
            assert torch.equal(given, cropped) or torch.equal(given, cropped.flip(2))
    # What cuts and does not resize gets what an evaluation sees.
    padded = v2.RandomCrop(24, padding=4)
    loader = make_loaders(data, batch_size=6, augment=[padded], seed=5)[0][0]
    [(inputs, _)] = loader
    for index, given in zip(loader.order(0).tolist(), inputs, strict=True):
        torch.manual_seed(mix_seed("transform", 5, 0, index))
        assert torch.equal(given, loader.normalize(padded(data.train[[index]][0][0])))
    about = data.description()
    assert is_description(about) and about["resize"] == 28
    file = tmp_path / "val" / "a" / "0.jpg"
    ((_, inputs),) = inference.image_batches(str(file), about, 1, skip=False)
    assert torch.equal(inputs[0], expected[0]) and Image.open(file).size == (37, 50)
    with pytest.raises(UserError, match="dataset.resize=28 also needs dataset.size"):
        images.image_folder(str(tmp_path), resize=28)
    with pytest.raises(UserError, match="dataset.resize=20"):
        images.image_folder(str(tmp_path), size=24, resize=20)
