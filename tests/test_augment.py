"""The fused augmentation against one written pixel by pixel; mixing; Beta draws; and what is
refused.
"""

import math

import pytest
import torch

from stoker.data.augment import Augment, sample_beta
from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader, make_loaders
from stoker.trainer.errors import UserError
from stoker.trainer.seeding import mix_seed


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def augmented(augment, inputs, targets, generator):
    """A batch as a loader augments it."""
    augment.check(inputs.shape[1:])
    inputs, targets = augment.move(inputs, targets, augment.draw(inputs.shape, generator))
    return augment.mix(inputs, targets, generator)


def reference(inputs, spec, seed):
    """The same draws in the same order, then the four operations one after the other on each
    sample.
    """
    g, n, (height, width) = generator(seed), len(inputs), inputs.shape[2:]

    def draw(low, high):
        return torch.randint(low, high + 1, (n, 1), generator=g).view(-1).tolist()

    flips = (
        (torch.rand((n, 1), generator=g) < 0.5).view(-1).tolist() if "flip" in spec else [False] * n
    )
    crops, shifts = [], []
    for _ in range(2):
        crops.append(draw(-spec["crop"], spec["crop"]) if "crop" in spec else [0] * n)
        shifts.append(draw(-spec["shift"], spec["shift"]) if "shift" in spec else [0] * n)
    squares = [draw(0, size - 1) for size in (height, width)] if "cutout" in spec else None
    results = []
    for i, image in enumerate(inputs):
        image = image.flip(2) if flips[i] else image
        moved = torch.zeros_like(image)
        for y in range(height):
            for x in range(width):
                from_y, from_x = y - shifts[0][i], x - shifts[1][i]
                if 0 <= from_y < height and 0 <= from_x < width:
                    moved[:, y, x] = image[:, from_y, from_x]
        if "crop" in spec:
            k = spec["crop"]
            padded = torch.nn.functional.pad(
                moved.double().unsqueeze(0), (k, k, k, k), mode="reflect"
            )[0].to(image.dtype)
            moved = padded[
                :,
                k + crops[0][i] : k + crops[0][i] + height,
                k + crops[1][i] : k + crops[1][i] + width,
            ].clone()
        if squares:
            top, left = (square[i] - spec["cutout"] // 2 for square in squares)
            moved[
                :,
                max(top, 0) : max(top + spec["cutout"], 0),
                max(left, 0) : max(left + spec["cutout"], 0),
            ] = 0
        results.append(moved)
    return torch.stack(results)


SPECS = [
    {"flip": True},
    {"shift": 2},
    {"crop": 4},
    {"cutout": 3},
    {"flip": True, "crop": 3},
    {"flip": True, "shift": 3, "crop": 2, "cutout": 5},
]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 10)])
@pytest.mark.parametrize("spec", SPECS)
def test_geometry_equals_the_slow_reference(spec, shape, dtype):
    inputs, targets = (
        torch.randint(1, 256, (16, *shape), generator=generator(9)).to(dtype),
        torch.arange(16),
    )
    before = inputs.clone()
    for seed in range(3):
        augment = Augment([{name: value} for name, value in reversed(spec.items())])
        outputs, same = augmented(augment, inputs, targets, generator(seed))
        assert (
            outputs.dtype == dtype
            and torch.equal(outputs, reference(inputs, spec, seed))
            and same is targets
        )
    assert torch.equal(inputs, before)


def test_samples_differ_and_seeds_repeat():
    inputs, targets = (
        torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8).repeat(64, 1, 1, 1),
        torch.zeros(64, dtype=torch.int64),
    )
    augment = Augment(["flip", "shift", "crop", "cutout"])
    outputs = augmented(augment, inputs, targets, generator(1))[0]
    assert len({image.numpy().tobytes() for image in outputs}) > 60
    assert torch.equal(outputs, augmented(augment, inputs, targets, generator(1))[0])
    assert not torch.equal(outputs, augmented(augment, inputs, targets, generator(2))[0])


def test_nothing_is_drawn_from_the_global_generator():
    inputs, state = torch.rand(8, 3, 16, 16), torch.get_rng_state()
    augment = Augment(["flip", "shift", "crop", "cutout", "mixup", "cutmix"], 10)
    augmented(augment, inputs, torch.arange(8), generator())
    assert torch.equal(state, torch.get_rng_state())


def test_geometry_then_normalize_then_the_rest_in_the_order_of_the_list():
    seen = []

    def double(inputs, targets, generator):
        seen.append(inputs.clone())
        return inputs * 2, targets + 1

    inputs, targets = (
        torch.randint(1, 256, (6, 1, 8, 8), dtype=torch.uint8),
        torch.zeros(6, dtype=torch.int64),
    )
    spec = [double, {"shift": 1}, lambda inputs, targets, generator: (inputs + 1, targets)]
    data = Data("mine", TensorSplit(inputs, targets), None, None, (1, 8, 8), 3)
    loader = DeviceLoader(data, "train", 6, augment=spec)
    [(outputs, labels)] = loader
    shifted = reference(inputs, {"shift": 1}, mix_seed(0, "augment", 0, 0))
    assert torch.equal(seen[0], loader.normalize(shifted))
    torch.testing.assert_close(seen[0], shifted.float() / 255)
    assert torch.equal(outputs, seen[0] * 2 + 1) and labels.tolist() == [1] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixup_mixes_inputs_and_targets_by_one_share(dtype):
    inputs, targets = torch.randn(5, 3, 4, 4, dtype=dtype), torch.tensor([0, 1, 2, 1, 0])
    outputs, soft = augmented(Augment([{"mixup": 0.7}], 3), inputs, targets, generator(3))
    share = sample_beta(0.7, generator(3))
    hot = torch.nn.functional.one_hot(targets, 3).to(dtype)
    torch.testing.assert_close(outputs, share * inputs + (1 - share) * inputs[[4, 0, 1, 2, 3]])
    torch.testing.assert_close(soft, share * hot + (1 - share) * hot[[4, 0, 1, 2, 3]])
    flat, mixed = augmented(
        Augment(["mixup"]),
        torch.ones(5, 2, dtype=dtype),
        torch.arange(5, dtype=dtype).unsqueeze(1),
        generator(3),
    )
    torch.testing.assert_close(flat, torch.ones_like(flat))
    torch.testing.assert_close(mixed.sum(), torch.tensor(10, dtype=dtype))


def test_cutmix_shares_are_the_areas():
    """With image i filled by i and class i, each output's mean has to be the expectation of its
    soft targets.
    """
    inputs, targets = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 2, 9, 12), torch.arange(6)
    pasted = 0
    for seed in range(30):
        outputs, soft = augmented(Augment(["cutmix"], 6), inputs, targets, generator(seed))
        torch.testing.assert_close(outputs.mean((1, 2, 3)), soft @ torch.arange(6.0))
        torch.testing.assert_close(soft.sum(1), torch.ones(6))
        changed = (outputs[1, 0] == 0).nonzero()  # image 1 gets a rectangle of image 0
        if len(changed):
            height, width = (changed.amax(0) - changed.amin(0) + 1).tolist()
            assert len(changed) == height * width
            pasted += 1
    assert pasted > 20


@pytest.mark.parametrize("a", [0.1, 0.5, 1.0, 3.0])
def test_beta_has_the_moments_of_beta(a):
    g = generator(5)
    draws = torch.tensor([sample_beta(a, g) for _ in range(4000)], dtype=torch.float64)
    variance = 1 / (4 * (2 * a + 1))
    fourth = variance**2 * (3 - 6 / (2 * a + 3))
    assert draws.isfinite().all() and draws.min() >= 0 and draws.max() <= 1
    assert abs(draws.mean() - 0.5) < 4 * math.sqrt(variance / 4000)
    assert abs(draws.var() - variance) < 4 * math.sqrt((fourth - variance**2) / 4000)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (["flop"], "Did you mean 'flip'"),
        ([{"crop": 0}], "augment.crop"),
        ([{"shift": 1.5}], "augment.shift"),
        ([{"mixup": 0}], "augment.mixup"),
        ([{"flip": 3}], "augment.flip=3: .*\nChoose one of: true, alternate"),
        ([{"flip": "sometimes"}], "augment.flip=sometimes: not a valid choice"),
        ([3], "not a valid choice"),
    ],
)
def test_refused(spec, words):
    with pytest.raises(UserError, match=words):
        augmented(Augment(spec), torch.rand(4, 3, 8, 8), torch.arange(4), generator())


@pytest.mark.parametrize("name", ["flip", "shift", "crop", "cutout", "cutmix"])
def test_flat_inputs_are_refused(name):
    with pytest.raises(UserError, match=name):
        Augment([name], 4).check((10,))
    with pytest.raises(UserError, match=name):
        augmented(Augment([name], 4), torch.rand(4, 10), torch.arange(4), generator())


def test_a_crop_as_wide_as_the_image_is_refused():
    Augment([{"crop": 7}]).check((1, 8, 8))
    with pytest.raises(
        UserError, match="choose a number less than 8, the shorter side of the images"
    ):
        Augment([{"crop": 8}]).check((1, 8, 9))


def test_masks_move_with_their_images():
    """Images that show their masks still do; what an image lost is ignored."""
    masks = torch.randint(9, (64, 8, 6), generator=generator(1))
    masks[torch.rand(masks.shape, generator=generator(2)) < 0.1] = -100
    images = (masks + 1).where(masks >= 0, 0).to(torch.uint8).unsqueeze(1)
    for spec in (["flip"], [{"shift": 3}], [{"crop": 2}], ["cutout"], ["flip", "shift", "crop"]):
        inputs, targets = augmented(Augment(spec), images, masks, generator())
        assert not torch.equal(inputs, images)
        assert torch.equal((targets + 1).where(targets >= 0, 0), inputs[:, 0].long())


@pytest.mark.parametrize(
    ("spec", "in_shape", "target_shape", "words"),
    [
        (["mixup"], (3, 8, 8), (8, 8), "mixup cannot be applied to inputs of shape"),
        (["cutmix"], (3, 8, 8), (8, 8), "cutmix cannot be applied to inputs of shape"),
        (["flip"], (3, 8, 8), (4, 4), r"shape \(3, 8, 8\) with targets of shape \(4, 4\)"),
    ],
)
def test_what_masks_cannot_do_is_refused(spec, in_shape, target_shape, words):
    with pytest.raises(UserError, match=words):
        Augment(spec, 4).check(in_shape, target_shape)


def photographs(n=20, masks=False):
    """Random pixels, with the first channel as mask if asked for."""
    pixels = torch.randint(256, (n, 3, 12, 10), dtype=torch.uint8, generator=generator(5))
    targets = pixels[:, 0].long() % 5 if masks else torch.arange(n) % 5
    if masks:
        pixels = torch.stack([(targets + 1).to(torch.uint8)] * 3, 1)
    split = TensorSplit(pixels, targets)
    return Data("photographs", split, split, None, (3, 12, 10), 5)


def test_transforms_of_torchvision_are_called_for_each_sample_with_its_own_draws():
    """Each sample of a batch is what torchvision makes of it, called with the sample's seed."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    transforms = [v2.RandomResizedCrop((12, 10)), v2.ColorJitter(0.4, 0.4, 0.4), v2.RandAugment()]
    data = photographs()
    options = {"seed": 3, "augment": [transforms[0], "flip", *transforms[1:]]}
    (loader, val, _), why = make_loaders(data, batch_size=8, **options)
    assert "the training split streamed" in why and val.resident_bytes == val.nbytes
    state = torch.get_rng_state()
    for epoch in range(2):
        before = loader.order(epoch).tolist()
        expected = []
        for index in before:
            torch.manual_seed(mix_seed("transform", 3, epoch, index))
            expected.append(v2.Compose(transforms)(data.train.inputs[index]))
        torch.set_rng_state(state)
        loader.seek(epoch)
        batches = list(loader)
        assert torch.equal(torch.cat([targets for _, targets in batches]), torch.tensor(before) % 5)
        flips = 0
        given = (torch.cat([images for images, _ in batches]) * 255).round().to(torch.uint8)
        for pixels, image in zip(given, expected, strict=True):
            is_flipped = not torch.equal(pixels, image)
            assert torch.equal(pixels, image.flip(2) if is_flipped else image)
            flips += is_flipped
        assert 0 < flips < 20 and torch.equal(torch.get_rng_state(), state)
        loader.seek(epoch, 1)
        assert torch.equal(next(iter(loader))[0], batches[1][0])


def test_one_function_or_transform_needs_no_list():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images = torch.rand(2, 3, 4, 4)
    flip = v2.RandomHorizontalFlip(1.0)

    def double(inputs, targets, generator):
        return 2 * inputs, targets

    assert Augment(flip).transforms == [flip]
    inputs, _ = augmented(Augment(double), images, torch.zeros(2), torch.Generator())
    assert torch.equal(inputs, 2 * images)


def test_transforms_of_torchvision_move_masks_with_their_images():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    nearest = {"interpolation": v2.InterpolationMode.NEAREST}
    transforms = [v2.RandomHorizontalFlip(), v2.RandomAffine(90, (0.3, 0.3), **nearest)]
    (loader, _, _), _ = make_loaders(photographs(masks=True), batch_size=20, augment=transforms)
    images, masks = next(iter(loader))
    shown = (images[:, 0] * 255).round().long()
    assert (shown == 0).any() and torch.equal((masks + 1).where(masks >= 0, 0), shown)


@pytest.mark.slow
def test_workers_transform_as_this_process_does():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    epochs = []
    for workers in (0, 2):
        options = {"augment": ["flip", v2.TrivialAugmentWide()], "workers": workers}
        (loader, _, _), _ = make_loaders(photographs(), batch_size=8, **options)
        epochs.append([torch.cat([images for images, _ in loader]) for _ in range(2)])
        loader.close()
    assert all(map(torch.equal, *epochs)) and not torch.equal(*epochs[0])


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (
            "FiveCrop",
            {"size": 8},
            r"FiveCrop must return a single torch.uint8 image of shape \(3, ",
        ),
        ("RandomCrop", {"size": 8}, "RandomCrop must return a single torch.uint8 image of"),
        ("RandomCrop", {"size": 80}, "larger than input image size"),
        (
            "ConvertImageDtype",
            {},
            r"must return a single torch.uint8 image of .*\nRemove ToDtype",
        ),
    ],
)
def test_transforms_that_do_not_fit_are_refused(name, arguments, words):
    v2 = pytest.importorskip("torchvision.transforms.v2")
    with pytest.raises(UserError, match=words):
        make_loaders(photographs(), batch_size=8, augment=[getattr(v2, name)(**arguments)])


def test_transforms_of_v1_are_refused():
    transforms = pytest.importorskip("torchvision.transforms")
    crop = transforms.RandomCrop(4)
    for given in (
        crop,
        transforms.ToTensor(),
        transforms.Lambda(abs),
        transforms.Compose([crop]),
        transforms.RandomApply([crop], 1),
    ):
        with pytest.raises(UserError, match=f"{type(given).__name__}: .*list"):
            make_loaders(photographs(), batch_size=8, augment=[given])


def test_transforms_are_for_images_that_are_streamed():
    transforms = pytest.importorskip("torchvision.transforms")
    flip = transforms.v2.RandomHorizontalFlip()
    with pytest.raises(UserError, match="resident=true: RandomHorizontalFlip"):
        make_loaders(photographs(), batch_size=8, augment=[flip], resident=True)
    with pytest.raises(UserError, match=r"transforms cannot be applied to inputs of shape \(10,\)"):
        Augment([flip]).check((10,))
