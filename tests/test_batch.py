"""Every kind of nesting walks, is measured and is cut, and the cut pieces put together are the
batch.
"""

import collections
import copy
import dataclasses
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from stoker.trainer import batches
from stoker.trainer.errors import UserError


class Pair(typing.NamedTuple):
    inputs: torch.Tensor
    extra: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    inputs: torch.Tensor
    name: str
    length: int = dataclasses.field(init=False, default=0)
    doubled: torch.Tensor = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "length", self.length + len(self.inputs))
        object.__setattr__(self, "doubled", 2 * self.inputs)


@dataclasses.dataclass
class Plain:
    inputs: torch.Tensor
    seen: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    inputs: torch.Tensor


class Movable:
    """An object that knows how to move itself, and that is nothing else."""

    def __init__(self, value, device="cpu"):
        self.value, self.device = value, device

    def to(self, device):
        return Movable(self.value, str(device))


def leaves(batch, **options):
    found = []
    batches.walk(lambda name, leaf: found.append((name, leaf)), batch, **options)
    return found


def plus_one(batch):
    return batches.walk(lambda _, leaf: leaf + 1, batch)


def equal(first, second):
    """Whether two nestings are the same, types and all."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    if dataclasses.is_dataclass(first):
        return all(
            equal(getattr(first, field.name), getattr(second, field.name))
            for field in dataclasses.fields(first)
        )
    return first == second


def ones(*shape):
    return torch.ones(*shape)


# walk


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ones(2), ones(2) + 1),
        ([ones(2), (ones(1), "a")], [ones(2) + 1, (ones(1) + 1, "a")]),
        (
            {"x": ones(2), "y": {"z": [ones(1), 3]}},
            {"x": ones(2) + 1, "y": {"z": [ones(1) + 1, 3]}},
        ),
        (Pair(ones(2), "a"), Pair(ones(2) + 1, "a")),
        (Pair(ones(2), Pair(ones(1), None)), Pair(ones(2) + 1, Pair(ones(1) + 1, None))),
        (Plain(ones(2), [ones(1)]), Plain(ones(2) + 1, [ones(1) + 1])),
        (Slotted(ones(2)), Slotted(ones(2) + 1)),
        (
            collections.OrderedDict(b=ones(1), a=ones(2)),
            collections.OrderedDict(b=ones(1) + 1, a=ones(2) + 1),
        ),
        ([], []),
        ((), ()),
        ({}, {}),
    ],
)
def test_walk_keeps_the_structure(batch, expected):
    before = copy.deepcopy(batch)
    assert equal(plus_one(batch), expected)
    assert equal(batch, before)  # and leaves the batch that it was given alone


@pytest.mark.parametrize(
    "value", ["text", b"bytes", 3, 2.5, True, None, {1, 2}, range(3), object(), Frozen, int]
)
def test_anything_else_comes_through_as_it_is(value):
    assert plus_one(value) is value
    assert plus_one([value, {"x": value}, Pair(ones(1), value)])[0] is value


def test_a_frozen_dataclass_is_not_built_again():
    before = Frozen(ones(3), "a")
    after = plus_one(before)
    assert type(after) is Frozen and after is not before
    assert after.length == 3 and after.name == "a"  # __post_init__ did not count again
    assert torch.equal(after.inputs, ones(3) + 1) and torch.equal(after.doubled, 2 * ones(3) + 1)
    assert torch.equal(before.inputs, ones(3)) and torch.equal(before.doubled, 2 * ones(3))


def test_a_defaultdict_stays_one():
    batch = collections.defaultdict(list, x=ones(2))
    after = plus_one(batch)
    assert (
        type(after) is collections.defaultdict
        and after["new"] == []
        and "new" not in batch
        and torch.equal(after["x"], ones(2) + 1)
    )


def test_an_object_with_to_is_one_leaf():
    packed, own = pack_sequence([torch.arange(3.0), torch.arange(2.0)]), Movable(7)
    assert [leaf for _, leaf in leaves({"packed": packed, "own": [own]})] == [packed, own]
    moved = batches.walk(
        lambda _, leaf: leaf.to("meta"), {"packed": packed, "own": [own], "tensor": ones(2)}
    )
    assert (
        isinstance(moved["packed"], PackedSequence) and moved["packed"].data.device.type == "meta"
    )
    assert (
        moved["own"][0].device == "meta"
        and moved["own"][0].value == 7
        and moved["tensor"].device.type == "meta"
    )


def test_the_names_read_like_code():
    batch = [{"mask": ones(1), 3: (ones(2), "a")}, Pair(ones(3), Frozen(ones(4), "b")), Movable(1)]
    named = dict(leaves(batch))
    assert list(named) == [
        "batch[0]['mask']",
        "batch[0][3][0]",
        "batch[1][0]",
        "batch[1][1].inputs",
        "batch[1][1].doubled",
        "batch[2]",
    ]
    for name, leaf in named.items():
        assert eval_name(name, batch) is leaf
    assert [name for name, _ in leaves({"x": ones(1)}, name="row")] == ["row['x']"]


def eval_name(name, batch):
    """What the code `name` reaches, by hand."""
    steps = (
        name.removeprefix("batch")
        .replace("]", "")
        .replace("'", "")
        .replace(".", "[.")
        .split("[")[1:]
    )
    for step in steps:
        batch = (
            getattr(batch, step[1:])
            if step.startswith(".")
            else batch[int(step) if step.isdigit() else step]
        )
    return batch


# entries and size


def test_entries_are_the_tensors_only():
    x, y = ones(2), ones(3)
    found = batches.entries({"x": x, "own": Movable(1), "name": "a", "more": [y]})
    assert [(name, id(tensor)) for name, tensor in found] == [
        ("batch['x']", id(x)),
        ("batch['more'][0]", id(y)),
    ]
    assert batches.entries("text") == []


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (ones(5, 2), 5),
        ((ones(5, 2), ones(5)), 5),
        ([ones(4), "x"], 4),
        ({"weight": torch.tensor(2.0), "x": ones(3, 1)}, 3),  # 0-dim tensors do not count
        ((torch.tensor(1.0), {"x": ones(6)}), 6),
        (("a", "b", Frozen(ones(7), "c")), 7),
        (Pair(ones(2), None), 2),
        (torch.tensor(1.0), 1),
        ({}, 1),
        ([], 1),
        ("text", 1),
        ((ones(0, 3), ones(0)), 0),
    ],
)
def test_size(batch, samples):
    assert batches.size(batch) == samples


# split


def rows(n):
    return torch.arange(n * 3.0).view(n, 3)


@pytest.mark.parametrize(
    ("samples", "parts"), [(8, 1), (8, 2), (8, 4), (7, 2), (7, 3), (10, 4), (3, 5), (1, 4), (2, 2)]
)
def test_the_pieces_are_the_samples_in_parts_of_nearly_one_size(samples, parts):
    pieces = batches.split((rows(samples), torch.arange(samples)), parts)
    assert len(pieces) == min(samples, parts)
    sizes = [len(inputs) for inputs, _ in pieces]
    assert sum(sizes) == samples and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert torch.equal(torch.cat([inputs for inputs, _ in pieces]), rows(samples))
    assert torch.equal(torch.cat([targets for _, targets in pieces]), torch.arange(samples))


def test_one_part_is_the_batch_itself():
    batch = {"x": rows(3)}
    [part] = batches.split(batch, 1)
    assert part is batch


def test_lists_of_plain_values_are_cut_and_the_rest_is_repeated():
    batch = {
        "x": rows(5),
        "names": list("abcde"),
        "ids": (1, 2, 3, 4, 5),
        "scale": torch.tensor(2.0),
        "lr": 0.1,
        "kind": "image",
        "sizes": [8, 8],
        "own": Movable(7),
    }

    def sample_dim(name, value):
        has_none = name in ("batch['sizes']", "batch['own']")
        return None if has_none else batches.usual_dim(name, value)

    first, second = batches.split(batch, 2, sample_dim)
    assert (first["names"], second["names"]) == (list("ab"), list("cde"))
    assert (first["ids"], second["ids"]) == ((1, 2), (3, 4, 5))
    for part in (first, second):
        assert (
            part["scale"] is batch["scale"]
            and part["lr"] == 0.1
            and part["kind"] == "image"
            and part["sizes"] == [8, 8]
            and part["own"] is batch["own"]
        )
    assert list(batch["names"]) == list("abcde") and len(batch["x"]) == 5


@pytest.mark.parametrize("length", [10, 4])
def test_a_tensor_without_samples_goes_to_each_part_however_long_it_is(length):
    weights = torch.arange(float(length))

    def sample_dim(name, value):
        return None if name == "batch[2]" else batches.usual_dim(name, value)

    for *_, part_weights in batches.split((rows(4), torch.arange(4), weights), 3, sample_dim):
        assert part_weights is weights


# samples that are not rows


def time_first(name, value):
    return 1 if name == "batch['text']" else batches.usual_dim(name, value)


def test_a_time_first_text_is_counted_and_cut_along_its_second_dimension():
    text, labels = torch.randn(7, 5, 2), torch.arange(5)
    batch = {"text": text, "label": labels}
    assert batches.size(batch, time_first) == 5
    pieces = batches.split(batch, 2, time_first)
    assert [piece["text"].shape for piece in pieces] == [(7, 2, 2), (7, 3, 2)]
    assert torch.equal(torch.cat([piece["text"] for piece in pieces], 1), text)
    for rank in range(3):
        samples, part = batches.deal(batch, rank, 3, time_first)
        assert samples == 5
        assert torch.equal(part["text"], text[:, rank::3])
        assert torch.equal(part["label"], labels[rank::3])


@pytest.mark.parametrize("sizes", [[8, 9, 7, 8], [8, 8, 8, 8]], ids=["several", "one"])
def test_a_list_of_images_is_as_long_as_the_list(sizes):
    images = [torch.randn(3, size, size) for size in sizes]
    targets = [{"boxes": torch.rand(i + 1, 4), "labels": torch.arange(i + 1)} for i in range(4)]
    for batch in ((images, targets), (images, torch.arange(4)), (tuple(images), tuple(targets))):
        assert batches.size(batch) == 4
        pieces = batches.split(batch, 2)
        assert [len(inputs) for inputs, _ in pieces] == [2, 2]
        assert [image for inputs, _ in pieces for image in inputs] == images
        samples, (inputs, _) = batches.deal(batch, 1, 3)
        assert samples == 4 and list(inputs) == [images[1]]


def test_inputs_that_were_stacked_are_cut_each_in_rows():
    batch = [[rows(6), rows(6) + 1], torch.arange(6)]
    assert batches.size(batch) == 6
    first, second = batches.split(batch, 2)
    assert equal(first, [[rows(6)[:3], rows(6)[:3] + 1], torch.arange(3)])
    assert equal(second, [[rows(6)[3:], rows(6)[3:] + 1], torch.arange(3, 6)])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            (ones(7, 5), ones(5)),
            "unclear how to split this batch. The number of samples is 7 in batch[0], 5 in batch[1].",
        ),
        ({"x": ones(4, 2), "weights": ones(3)}, "4 in batch['x'], 3 in batch['weights']"),
        ({"x": ones(4, 2), "sizes": [8, 8]}, "4 in batch['x'], 2 in batch['sizes']"),
        ([[ones(3, 8), ones(3, 8), ones(3, 8)], ones(3)], "3 in batch[0][0], 3 in batch[0][1]"),
        (
            (pack_sequence([ones(3), ones(2)]), ones(2)),
            "is unknown in batch[0], 2 in batch[1].",
        ),
    ],
)
def test_a_batch_that_could_be_cut_wrongly_is_refused_by_name(batch, says):
    for cut in (lambda: batches.split(batch, 2), lambda: batches.deal(batch, 0, 2)):
        with pytest.raises(UserError) as caught:
            cut()
        first, second = str(caught.value).splitlines()
        assert says in first and second.startswith("Override Trainer.sample_dim")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: (x, x),
        lambda x: {"a": {"b": [x]}, "c": x},
        lambda x: collections.OrderedDict(a=x),
        lambda x: Pair(x, "name"),
        lambda x: Pair(x, {"y": [x, 3]}),
        lambda x: Plain(x),
        lambda x: [Slotted(x), "a", None],
        lambda x: {"d": Frozen(x, "a")},
    ],
)
def test_every_nesting_is_cut(wrap):
    pieces = batches.split(wrap(rows(7)), 3)
    for piece, bounds in zip(pieces, [(0, 2), (2, 4), (4, 7)], strict=True):
        expected = batches.walk(lambda _, leaf, bounds=bounds: leaf[slice(*bounds)], wrap(rows(7)))
        assert equal(piece, expected)


def test_a_defaultdict_is_cut_into_defaultdicts():
    pieces = batches.split(collections.defaultdict(int, x=rows(4)), 2)
    assert all(
        type(piece) is collections.defaultdict and piece["new"] == 0 and len(piece["x"]) == 2
        for piece in pieces
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda names: Pair(rows(4), names),
        lambda names: Plain(rows(4), names),
        lambda names: [Plain(rows(4), names)],
    ],
)
def test_lists_of_plain_values_are_cut_in_named_tuples_and_dataclasses_too(wrap):
    pieces = [
        piece[0] if isinstance(piece, list) else piece
        for piece in batches.split(wrap(list("abcd")), 2)
    ]
    assert [piece[1] if isinstance(piece, Pair) else piece.seen for piece in pieces] == [
        list("ab"),
        list("cd"),
    ]


def test_a_named_tuple_of_plain_values_is_no_list_of_samples():
    """Two fields in a batch of two samples: the fields are not samples."""
    size = collections.namedtuple("Size", "height width")(8, 9)
    assert [piece["size"] for piece in batches.split({"x": rows(2), "size": size}, 2)] == [
        size,
        size,
    ]


def nestings(samples):
    """Nestings in which every tensor has one row a sample, with other things beside them."""
    tensor = st.builds(
        lambda width, kind: torch.arange(samples * width).view(samples, width).to(kind),
        st.integers(1, 3),
        st.sampled_from([torch.float32, torch.int64, torch.uint8]),
    )
    plain = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.booleans())
    columns = st.lists(plain, min_size=samples, max_size=samples)
    return st.recursive(
        tensor | plain,
        lambda inner: st.one_of(
            columns,
            columns.map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.builds(Pair, tensor, inner),
            st.builds(Plain, tensor, columns),
        ),
        max_leaves=8,
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 12))
def test_the_cut_tensors_put_together_are_the_batch(data, samples, parts):
    batch = (torch.arange(samples), data.draw(nestings(samples)))
    pieces = batches.split(batch, parts)
    assert len(pieces) == min(samples, parts)
    found = [batches.entries(piece) for piece in pieces]
    whole = batches.entries(batch)
    assert all([name for name, _ in part] == [name for name, _ in whole] for part in found)
    for i, (_, tensor) in enumerate(whole):
        assert torch.equal(torch.cat([part[i][1] for part in found]), tensor)
    assert sum(map(batches.size, pieces)) == samples


@settings(max_examples=100, deadline=None)
@given(nestings(4))
def test_walk_with_the_identity_gives_an_equal_copy(batch):
    walked = batches.walk(lambda _, leaf: leaf, batch)
    assert equal(walked, batch)
    assert [id(tensor) for _, tensor in batches.entries(walked)] == [
        id(tensor) for _, tensor in batches.entries(batch)
    ]
