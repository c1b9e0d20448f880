"""The cache of decoded images: the same pixels with and without it, and nothing in it is believed
unseen.
"""

import multiprocessing
import os
import pickle

import pytest
import torch

from stoker.data import cache as caches
from stoker.data import datasets, images, loader
from stoker.data.cache import PixelCache
from stoker.data.loader import DeviceLoader, HostLoader, make_loaders
from stoker.data.workers import choose_workers
from stoker.trainer import launch
from stoker.trainer.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """root/CLASS/*.png: 2 classes of 20 noisy images of 6x5 pixels."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(20):
            pixels = torch.randint(256, (5, 6, 3), generator=generator, dtype=torch.uint8)
            image = Image.frombytes("RGB", (6, 5), bytes(pixels.flatten().tolist()))
            image.save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


def open_folder(folder, cache=None, **options):
    place = str(folder.parent / "cache") if cache is None else cache
    return images.image_folder(str(folder), cache=place, mean=[0.5] * 3, std=[0.25] * 3, **options)


def decoded(folder):
    return open_folder(folder, cache=False).train.tensors()[0]


def fill(data):
    for part in (data.train, data.val, data.test):
        part.tensors()
    return data


def flip(path, offset, bit=1):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


def test_an_image_is_decoded_once(folder, monkeypatch):
    expected = decoded(folder)
    first = open_folder(folder)
    assert first.train.missing().tolist() == list(range(len(first.train)))
    assert torch.equal(first.train[[3, 1]][0], expected[[3, 1]])
    assert set(first.train.missing().tolist()) == set(range(len(first.train))) - {1, 3}
    assert torch.equal(fill(first).train.tensors()[0], expected)
    monkeypatch.setattr(images, "decode_image", None)
    again = open_folder(folder)
    assert not len(again.train.missing()) and torch.equal(again.train.tensors()[0], expected)
    [one], [label] = again.train[[7]]
    assert torch.equal(one, expected[7]) and label == again.train.targets[7]
    assert torch.equal(
        again.test.tensors()[0], open_folder(folder).test.read(list(range(len(again.test))))
    )
    # Other parts of the same images are in it too.
    assert not len(open_folder(folder, split_seed=5, val_fraction=0.3).train.missing())


def test_the_pixels_of_every_part_are_their_own(folder):
    (folder.parent / "parts").mkdir()
    folder.rename(folder.parent / "parts" / "train")
    test = folder.parent / "parts" / "test" / "dog"
    test.mkdir(parents=True)
    for i in range(3):
        (test / f"{i}.png").write_bytes(
            (folder.parent / "parts" / "train" / "cat" / f"{i}.png").read_bytes()
        )
    cached, plain = (
        fill(open_folder(folder.parent / "parts")),
        open_folder(folder.parent / "parts", cache=False),
    )
    for part in ("train", "val", "test"):
        inputs, targets = getattr(cached, part).tensors()
        assert torch.equal(inputs, getattr(plain, part).tensors()[0])
        assert torch.equal(targets, getattr(plain, part).targets)


def test_a_part_without_images_needs_no_cache(folder):
    (folder.parent / "parts" / "val" / "dog").mkdir(parents=True)
    folder.rename(folder.parent / "parts" / "train")
    with pytest.raises(UserError, match="val split: there are no samples"):
        open_folder(folder.parent / "parts")


@pytest.mark.parametrize("change", ["time", "bytes", "more", "size", "grey"])
def test_another_folder_has_another_cache_and_the_old_one_goes(folder, change):
    old = fill(open_folder(folder)).train.cache.path
    options, file = {}, folder / "cat" / "0.png"
    if change == "time":
        os.utime(file, ns=(1, 1))
    elif change == "bytes":
        file.write_bytes((folder / "dog" / "11.png").read_bytes())
    elif change == "more":
        (folder / "cat" / "0a.png").write_bytes(file.read_bytes())
    else:
        options = {"size": 4}
    data = open_folder(folder, **options)
    assert data.train.cache.path != old and len(data.train.missing()) == len(data.train)
    stale = change not in ("size", "grey")  # the same images in another size are kept beside it
    assert old.exists() != stale
    reference = open_folder(folder, cache=False, **options)
    assert torch.equal(data.train.tensors()[0], reference.train.tensors()[0])


@pytest.mark.parametrize("what", ["pixel", "sum", "zeroed pixels"])
def test_damage_is_noticed_and_mended(folder, what):
    expected = decoded(folder)
    split = fill(open_folder(folder)).train
    slot = split.slots[4].item()
    path = split.cache.path
    first = 4 * 40  # the pixels come after the sums of all 40 images
    if what == "zeroed pixels":  # as after a loss of power, when only the sums had reached the disk
        with open(path, "r+b") as file:
            file.seek(first)
            file.write(bytes(split.nbytes * 40 // len(split)))
    else:
        flip(path, first + 90 * slot + 1 if what == "pixel" else 4 * slot + 1)
    split = open_folder(folder).train
    slots = split.slots.tolist()
    damaged = list(range(len(split))) if what == "zeroed pixels" else [4]
    assert split.cache.read(slots)[1] == damaged
    assert torch.equal(split.tensors()[0], expected)
    pixels, damaged = open_folder(folder).train.cache.read(slots)
    assert torch.equal(pixels, expected) and damaged == []


def test_an_image_whose_sum_is_zero_is_there_all_the_same(tmp_path, monkeypatch):
    place = str(tmp_path / "cache")
    cache, _ = caches.open_cache(place, "ab", "cd", 2, [1, 2, 2])
    monkeypatch.setattr(caches.zlib, "crc32", lambda data: 0)
    cache.write(1, torch.full((1, 2, 2), 7, dtype=torch.uint8))
    assert cache.missing(torch.tensor([0, 1])).tolist() == [True, False]
    pixels, missing = cache.read([1, 0])
    assert (pixels[0] == 7).all() and missing == [1]


@pytest.mark.parametrize("change", ["gone", "short", "long"])
def test_a_cache_of_the_wrong_size_is_made_anew(folder, change):
    path = fill(open_folder(folder)).train.cache.path
    if change == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (1 if change == "long" else -1))
    split = open_folder(folder).train
    assert torch.equal(split.tensors()[0], decoded(folder))


@pytest.mark.skipif(os.name == "nt", reason="links and pipes of POSIX")
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_links_and_pipes_are_refused(folder, kind):
    target = fill(open_folder(folder)).train.cache.path
    victim = folder.parent / "victim"
    target.rename(victim)
    if kind == "link":
        target.symlink_to(victim)
    elif kind == "hard link":
        target.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    before = victim.read_bytes()
    with pytest.raises(
        UserError, match="dataset.cache=.*decoded images cannot be cached there"
    ) as caught:
        open_folder(folder)
    assert str(caught.value).count("\n") == 1
    assert os.path.lexists(target) and victim.read_bytes() == before
    assert kind != "folder" or (target / "mine.txt").read_text() == "mine"


def test_only_one_file_is_written(folder):
    beside = folder.parent / "cache" / "other.pixels"
    beside.parent.mkdir()
    beside.write_bytes(b"x")
    path = open_folder(folder).train.cache.path
    assert sorted(os.listdir(path.parent)) == sorted([path.name, beside.name])
    assert path.stat().st_size == 40 * 94 and beside.read_bytes() == b"x"


def test_where_it_goes_and_why_not(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data = open_folder(folder, cache="auto")
    key = data.train.cache.path.name
    assert data.train.place == f"decoded pixels in {tmp_path}/xdg/stoker/images/{key} (4 KiB)"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_folder(folder, cache="auto").train.place.startswith(
        f"decoded pixels in {tmp_path}/home/.cache/stoker/images/{key}"
    )
    mine = open_folder(folder, cache="~/mine").train.cache
    assert mine.path == tmp_path / "home" / "mine" / key
    assert open_folder(folder, cache=False).train.place == ""

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    split = open_folder(folder, cache="auto").train
    assert split.cache is None and split.place.startswith(
        "not cached ([Errno 20] Not a directory: "
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    usage = caches.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        caches.shutil, "disk_usage", lambda path: usage._replace(free=2 * 40 * 94 - 1)
    )
    split = open_folder(folder, cache="auto").train
    assert split.cache is None and "4 KiB is more than half of the 8 KiB free in" in split.place
    assert (
        torch.equal(split.tensors()[0], decoded(folder))
        and os.listdir(tmp_path / "full/stoker/images") == []
    )
    with pytest.raises(
        UserError, match=r"dataset.cache=.*more than half.*\nType dataset.cache=DIR"
    ):
        open_folder(folder, cache=str(tmp_path / "other"))
    for wrong in (True, 1, "", None, ["a"]):
        with pytest.raises(UserError, match="expected auto, false or a folder"):
            images.image_folder(str(folder), cache=wrong)


def read_in_process(split, queue):
    queue.put(bytes(split.read(list(range(len(split)))).flatten().tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_processes_write_into_one_cache(folder, method):
    """Also those that begin afresh and open it by its name."""
    context = multiprocessing.get_context(method)
    split, expected = open_folder(folder).train, decoded(folder)
    queue = context.Queue()
    process = context.Process(target=read_in_process, args=(split, queue))
    process.start()
    assert queue.get(timeout=60) == bytes(expected.flatten().tolist())
    process.join()
    assert not len(split.missing())


def test_a_process_without_the_cache_decodes(folder):
    split = open_folder(folder).train
    pickled = pickle.dumps(split)
    assert isinstance(pickle.loads(pickled).cache, PixelCache)
    split.cache.path.unlink()
    other = pickle.loads(pickled)
    assert other.cache is None and torch.equal(other.tensors()[0], decoded(folder))
    assert torch.equal(split.tensors()[0], decoded(folder))  # who has it mapped goes on


# ---- loaders ----


def epochs(train, count=3):
    """All batches of so many epochs, of the first one only from the third batch on, as after a
    resume.
    """
    train.seek(0, 2)
    return [list(train) for _ in range(count)]


def same(batches, others):
    assert [len(epoch) for epoch in batches] == [len(epoch) for epoch in others]
    for epoch, other in zip(batches, others, strict=True):
        for (inputs, targets), (again, labels) in zip(epoch, other, strict=True):
            assert torch.equal(inputs, again) and torch.equal(targets, labels)


OPTIONS = {"batch_size": 5, "seed": 3, "augment": ["flip", "mixup"]}


def test_batches_do_not_depend_on_where_the_pixels_come_from(folder, monkeypatch):
    reference = epochs(
        make_loaders(open_folder(folder, cache=False), resident=True, **OPTIONS)[0][0]
    )
    for workers in (0, 2):
        (cold, _, _), _ = make_loaders(
            open_folder(folder, cache=str(folder.parent / f"{workers}")),
            resident=False,
            workers=workers,
            **OPTIONS,
        )
        assert isinstance(cold, HostLoader)
        same(epochs(cold), reference)
        warm_data = open_folder(folder, cache=str(folder.parent / f"{workers}"))
        assert not len(warm_data.train.missing())
        fill(warm_data)
        with monkeypatch.context() as patch:
            patch.setattr(images, "decode_image", None)
            (warm, _, _), _ = make_loaders(warm_data, resident=False, workers=workers, **OPTIONS)
            same(epochs(warm), reference)
            (resident, _, _), _ = make_loaders(warm_data, **OPTIONS)
            assert isinstance(resident, DeviceLoader)
            same(epochs(resident), reference)


def test_many_images_are_streamed_until_they_are_decoded(folder, monkeypatch):
    reference = epochs(
        make_loaders(open_folder(folder, cache=False), resident=True, **OPTIONS)[0][0]
    )
    monkeypatch.setattr(loader, "MOST_DECODED", 0)
    data = open_folder(folder)
    (train, val, test), why = make_loaders(data, workers=0, **OPTIONS)
    assert why == (
        "streamed with 0 workers, because the images are not decoded yet; the next run keeps them "
        "if they fit; " + data.train.place
    )
    assert isinstance(train, HostLoader)
    same(epochs(train), reference)
    same([list(val)], [list(make_loaders(open_folder(folder, cache=False), **OPTIONS)[0][1])])
    list(test)
    # A cache is filled once, so workers that are asked for are no mistake afterwards.
    (train, _, _), why = make_loaders(open_folder(folder), workers=2, **OPTIONS)
    assert isinstance(train, DeviceLoader) and why.startswith("resident on cpu, 4 KiB (")
    same(epochs(train), reference)
    with pytest.raises(UserError, match="does not use workers"):
        make_loaders(data, batch_size=5, workers=2, resident=True)


def test_image_files_have_a_worker_per_core_and_tensors_none(folder):
    assert choose_workers(open_folder(folder).train) == min(launch.cores(), 8)
    assert choose_workers(datasets.digits().train) == 0
