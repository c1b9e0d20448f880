"""What is saved comes back bit for bit, damage is refused, and a save that is killed leaves the old
file as it was.
"""

import collections
import errno
import hashlib
import logging
import os
import random
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.trainer import checkpoint
from stoker.trainer.checkpoint import DamagedCheckpoint, load, path_of, save
from stoker.trainer.errors import TrainingError, UserError

ROOT = Path(__file__).resolve().parent.parent
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def equal(first, second):
    """Whether two states are the same to the bit: types, keys in their order, nan equal to
    itself.
    """
    if isinstance(first, torch.Tensor):
        same = (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and first.shape == second.shape
        )
        return same and bits(first) == bits(second)
    if isinstance(first, dict):
        return (
            type(second) is dict
            and list(first) == list(second)
            and all(equal(first[key], second[key]) for key in first)
        )
    if isinstance(first, (list, tuple)):
        return (
            type(second) is (list if isinstance(first, list) else tuple)
            and len(first) == len(second)
            and all(map(equal, first, second))
        )
    return type(first) is type(second) and repr(first) == repr(
        second
    )  # nan, and -0.0 apart from 0.0


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def round_trip(folder, state):
    save(folder / "state.ckpt", checkpoint.copy(state))
    assert [path.name for path in folder.iterdir()] == ["state.ckpt"]
    return load(folder / "state.ckpt")


# the round trip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0, 3), (1,)])
def test_tensors(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert equal({"x": tensor}, round_trip(tmp_path, {"x": tensor}))


def test_numbers_that_are_none(tmp_path):
    values = [
        float("nan"),
        float("inf"),
        -float("inf"),
        -0.0,
        1e-323,
        0.1,
        2**80,
        -(2**63),
        True,
        None,
    ]
    state = {
        "plain": values,
        **{str(dtype): torch.tensor(values[:6], dtype=dtype) for dtype in FLOATS},
    }
    assert equal(state, round_trip(tmp_path, state))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": {"b": {"c": [[], {}, (), ((),), [{}]]}}},
        {1: "a", 0: "b", -3: {7: [torch.ones(2)]}},
        {"1": "text", "state": {"exp_avg": torch.ones(2), 5: torch.zeros(3)}},
        {None: 1, True: 2, 2.5: 3},
        {"$": "tensor", "name": "state/x"},  # what looks like our own marks
        {"x": {"$": "dict", "items": [[1, 2]]}, "y": [{"$": None}]},
        {"": {"": torch.ones(1)}},
        {"betas": (0.9, 0.999), "deep": ([(1,)], {"t": (torch.ones(1), "a")})},
        {"text": "ünï🔥\n\"\\\x00\ud800", "ключ": [torch.ones(1)], 'with "quotes"\n': torch.zeros(2)},
        [1, torch.ones(2)],
        torch.ones(2),
        "only text",
    ],
    ids=str,
)  # fmt: skip
def test_structures(tmp_path, state):
    assert equal(state, round_trip(tmp_path, state))


def test_an_ordered_dict_and_a_named_tuple_come_back_as_plain_ones(tmp_path):
    pair = collections.namedtuple("Pair", "a b")(1, torch.ones(2))
    found = round_trip(
        tmp_path,
        {
            "o": collections.OrderedDict(b=1, a=2),
            "n": pair,
            "p": torch.nn.Parameter(torch.ones(2)),
            "s": torch.Size([2, 3]),
        },
    )
    assert equal(
        {"o": {"b": 1, "a": 2}, "n": (1, torch.ones(2)), "p": torch.ones(2), "s": (2, 3)}, found
    )
    assert type(found["p"]) is torch.Tensor and not found["p"].requires_grad


def test_tied_and_non_contiguous_tensors(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    state = {
        "whole": whole,
        "again": whole,
        "view": whole[1:3],
        "column": whole[:, 2],
        "turned": whole.T,
        "strided": whole[::2, ::3],
    }
    state |= {"expanded": torch.ones(1).expand(5), "tail of another": torch.arange(1000)[990:]}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    found = round_trip(tmp_path, state)
    assert equal(expected, found)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(
        found
    )  # each its own memory
    assert (
        tmp_path / "state.ckpt"
    ).stat().st_size < 4000  # and not the 8,000 bytes that the tail is a view of


def test_what_it_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"state/a/1: .* not a set"):
        save(tmp_path / "new" / "state.ckpt", {"a": [1, {2}]})
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_read_again_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TrainingError, match="more than 64 MiB outside its tensors"):
        save(tmp_path / "new" / "state.ckpt", {"text": "x" * 2**26})
    assert list(tmp_path.iterdir()) == []


def test_keys_that_make_the_same_name_are_two_tensors(tmp_path):
    state = {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1)}
    assert equal(state, round_trip(tmp_path, state))


def test_a_number_and_its_text_are_two_keys(tmp_path):
    state = {1: torch.zeros(1), "1": torch.ones(1)}
    assert equal(state, round_trip(tmp_path, state))


def test_a_tuple_as_a_key_comes_back_or_is_refused(tmp_path):
    state = {(0, 1): 2}
    try:
        save(tmp_path / "state.ckpt", checkpoint.copy(state))
    except UserError:
        return
    assert equal(state, load(tmp_path / "state.ckpt"))


def tensors():
    def build(dtype, shape, seed, turned):
        tensor = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(
            dtype
        )
        return tensor.T if turned and tensor.ndim == 2 else tensor

    return st.builds(
        build,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 3), max_size=3),
        st.integers(0, 99),
        st.booleans(),
    )


TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
KEYS = st.one_of(
    TEXT.filter(lambda key: "/" not in key and not key.lstrip("-").isdigit()), st.integers()
)
STATES = st.recursive(
    st.one_of(tensors(), st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(state=STATES)
def test_any_nesting(tmp_path, state):
    assert equal(state, round_trip(tmp_path, state))


def step(model, optimizer, scaler=None):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    loss = model(inputs).square().mean()
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"lr": 0.1, "fused": True}),
        ("AdamW", {"lr": 0.1, "amsgrad": True, "foreach": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1}),
        ("Adagrad", {"lr": 0.1}),
        ("RMSprop", {"lr": 0.1, "centered": True}),
    ],
)
def test_optimizers_go_on_as_if_nothing_had_been(tmp_path, name, options):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
        )
        groups = [
            {"params": list(model[0].parameters())},
            {"params": list(model[1:].parameters()), "lr": 0.01},
        ]
        return model, getattr(torch.optim, name)(groups, **options)

    model, optimizer = build()
    for _ in range(3):
        step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = round_trip(tmp_path, state)
    assert equal(dict(state["model"]), found["model"]) and equal(
        state["optimizer"], found["optimizer"]
    )

    other, other_optimizer = build()
    other.load_state_dict(found["model"])
    other_optimizer.load_state_dict(found["optimizer"])
    for _ in range(3):
        step(model, optimizer)
        step(other, other_optimizer)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))


def test_scaler_scheduler_and_tied_weights(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.amp.GradScaler("cpu", growth_interval=2),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(3):
        step(model, optimizer, scaler)
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "scaler": scaler.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    found = round_trip(tmp_path, state)
    assert equal({**state, "model": dict(state["model"])}, found)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(found["scaler"])
    assert other.state_dict() == scaler.state_dict() and scaler.get_scale() == 2 * 65536.0
    assert torch.equal(found["model"]["0.weight"], found["model"]["2.weight"])


# damage

SMALL = {
    "step": 2,
    "callbacks": {"EMA": {"average": {"weight": torch.arange(30.0)}, "step": 2}},
    "model": {"weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(3)},
    "optimizer": {0: (0.9, None, "ü")},
    "flags": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "step_7.ckpt"
    save(path, SMALL)
    return path.read_bytes()


def assert_refused(path, contents, what):
    path.write_bytes(contents)
    try:
        found = load(path)
    except DamagedCheckpoint as error:
        assert str(path) in str(error)
    except BaseException as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    else:
        pytest.fail(f"{what}: loaded as {found}")


@pytest.fixture
def two(tmp_path, small, caplog):
    """A function: where the newer of two checkpoints is these bytes, one warning names both, and
    the older is used.
    """
    save(path_of(tmp_path, 1), {"step": 1, "callbacks": {}, "x": torch.ones(3)})
    before, after = path_of(tmp_path, 1), path_of(tmp_path, 2)

    def use_the_one_before(contents, what):
        caplog.clear()
        after.write_bytes(contents)
        try:
            path, state = checkpoint.newest(tmp_path)
        except BaseException as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        assert path == before and state["step"] == 1 and torch.equal(state["x"], torch.ones(3)), (
            what
        )
        [warning] = [record.getMessage() for record in caplog.records]
        assert after.name in warning and before.name in warning, warning
        assert before.read_bytes() and after.read_bytes() == contents, what

    return use_the_one_before


def test_every_truncation_is_seen_and_the_one_before_is_used(two, small):
    for length in range(len(small)):
        two(small[:length], f"the first {length} of {len(small)} bytes")


def test_every_flipped_bit_is_seen_and_the_one_before_is_used(two, small, large):
    """Of the header's length all 64 bits, of its padding all, and of its JSON and of the tensors
    some.
    """
    header = 8 + int.from_bytes(small[:8], "little")
    padding = range(8 * len(small[:header].rstrip(b" ")), 8 * header)
    draw, many = random.Random(0), 10 if large else 1
    places = [*range(64), *padding]
    places += draw.sample(range(64, padding.start), 155 * many)
    places += draw.sample(range(8 * header, 8 * len(small)), 40 * many)
    assert len(places) >= 200 * many
    for place in places:
        damaged = bytearray(small)
        damaged[place // 8] ^= 1 << place % 8
        two(
            damaged,
            f"bit {place % 8} of byte {place // 8} of {len(small)}, the header ending at {header}",
        )


def test_other_contents_are_refused(tmp_path, small):
    for contents in (
        small + b"\0",
        b"\0" * len(small),
        b"not a checkpoint",
        bytes(random.Random(1).randbytes(1000)),
        small[8:],
    ):
        assert_refused(tmp_path / "other.ckpt", contents, contents[:20])
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "foreign.ckpt")
    with pytest.raises(DamagedCheckpoint, match=r"foreign\.ckpt is damaged, or not a stoker"):
        load(tmp_path / "foreign.ckpt")


def test_a_missing_file_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint .*nope\.ckpt"):
        load(tmp_path / "nope.ckpt")


def test_the_file_is_the_same_for_the_same_state(tmp_path, small):
    save(tmp_path / "again.ckpt", SMALL)
    assert load(tmp_path / "again.ckpt").keys() == SMALL.keys() and len(
        (tmp_path / "again.ckpt").read_bytes()
    ) == len(small)


# which one


def state_of(number, best=None):
    return {"step": number, "callbacks": {"Checkpoint": {"best": best}} if best else {}}


def fill(folder, *numbers, **options):
    for number in numbers:
        save(folder / f"step_{number}.ckpt", state_of(number, **options))


def damage(path):
    contents = bytearray(path.read_bytes())
    contents[-20] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize("numbers", [(9, 10), (9, 10, 100), (100, 99), (1,), (99999999, 100000000)])
def test_newest_is_by_number(tmp_path, numbers):
    fill(tmp_path, *numbers)
    path, state = checkpoint.newest(tmp_path)
    assert state["step"] == max(numbers) and path == tmp_path / f"step_{max(numbers)}.ckpt"
    assert list(checkpoint.files(tmp_path)) == sorted(numbers, reverse=True)


def test_the_names_are_read_as_they_are_written(tmp_path):
    for number in (9, 10, 123456789):
        save(path_of(tmp_path, number), state_of(number))
    assert checkpoint.files(tmp_path) == {
        number: path_of(tmp_path, number) for number in (123456789, 10, 9)
    }
    assert path_of("runs/a", 9).name == "step_00000009.ckpt"


def test_newest_passes_over_what_is_no_checkpoint_of_ours(tmp_path, caplog):
    fill(tmp_path, 3)
    good = (tmp_path / "step_3.ckpt").read_bytes()
    for name in (
        ".step_9.ckpt.123.part",
        "step_9.ckpt.part",
        "step_9.ckpt~",
        "step_x9.ckpt",
        "xstep_9.ckpt",
        "step_-9.ckpt",
        "step_9.5.ckpt",
        "step_.ckpt",
        "best.ckpt",
    ):
        (tmp_path / name).write_bytes(good)
    (tmp_path / "step_8.ckpt").mkdir()
    (tmp_path / "step_7.ckpt").symlink_to(tmp_path / "step_3.ckpt")
    (tmp_path / "step_6.ckpt").symlink_to(tmp_path / "nowhere")
    assert checkpoint.files(tmp_path) == {3: tmp_path / "step_3.ckpt"}
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(tmp_path)[1]["step"] == 3
    assert not caplog.records


def test_newest_passes_over_damaged_ones_with_a_warning(tmp_path, caplog):
    fill(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "step_4.ckpt")
    (tmp_path / "step_3.ckpt").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        path, state = checkpoint.newest(tmp_path)
    assert state["step"] == 2 and path.name == "step_2.ckpt"
    assert [
        ("step_4.ckpt" in record.message, "step_3.ckpt" in record.message)
        for record in caplog.records
    ] == [
        (True, False),
        (False, True),
    ]


def test_no_good_one_is_an_error_and_none_at_all_is_none(tmp_path):
    assert (
        checkpoint.newest(tmp_path) is None
        and checkpoint.newest(tmp_path / "nowhere") is None
        and checkpoint.best(tmp_path) is None
    )
    fill(tmp_path, 1, 2)
    damage(tmp_path / "step_1.ckpt")
    damage(tmp_path / "step_2.ckpt")
    with pytest.raises(TrainingError, match=r"(?s)All 2 checkpoints .*run_dir=DIR") as caught:
        checkpoint.newest(tmp_path)
    assert 1 <= len(str(caught.value).splitlines()) <= 3
    with pytest.raises(TrainingError):
        checkpoint.best(tmp_path)


def test_best_is_what_the_newest_one_says(tmp_path):
    best = {"step": 2, "value": 0.5}
    for number, entry in [(2, {"step": 2, "value": 0.5}), (3, best), (10, best)]:
        save(path_of(tmp_path, number), state_of(number, best=entry))
    path, state = checkpoint.best(tmp_path)
    assert path == path_of(tmp_path, 2) and state["step"] == 2
    save(path_of(tmp_path, 11), state_of(11, best={"step": 11, "value": 0.6}))
    assert checkpoint.best(tmp_path)[1]["step"] == 11
    save(path_of(tmp_path, 12), state_of(12))  # nothing monitored
    assert checkpoint.best(tmp_path)[0] == path_of(tmp_path, 12)


def test_the_newest_is_let_go_of_before_the_best_is_read(tmp_path, monkeypatch):
    """A training that fits into memory has to fit into it at its end too."""
    for number in (2, 3):
        state = state_of(number, best={"step": 2, "value": 0.5}) | {"weight": torch.ones(3)}
        save(path_of(tmp_path, number), state)
    read, alive = [], []

    def watched(*given):
        alive.append([number for number, tensor in read if tensor() is not None])
        state = load_whole(*given)
        read.append((state["step"], weakref.ref(state["weight"])))
        return state

    load_whole = checkpoint.load_whole
    monkeypatch.setattr(checkpoint, "load_whole", watched)
    assert checkpoint.best(tmp_path)[1]["step"] == 2
    assert alive == [[], []] and [number for number, _ in read] == [3, 2]


def test_a_damaged_best_is_named_and_the_newest_is_used(tmp_path, caplog):
    best = {"step": 2, "value": 0.5}
    for number in (2, 3):
        save(path_of(tmp_path, number), state_of(number, best=best))
    damage(path_of(tmp_path, 2))
    assert checkpoint.best(tmp_path)[0] == path_of(tmp_path, 3)
    [warning] = caplog.messages
    assert "step_00000002.ckpt" in warning and "step_00000003.ckpt" in warning


def test_what_cannot_be_read_now_is_not_taken_for_damaged(tmp_path, monkeypatch):
    """Or a run would go on from an older one, and write over the newer ones."""
    for number in (2, 3):
        save(path_of(tmp_path, number), state_of(number))

    def too_many(*_, **__):
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), "x")

    monkeypatch.setattr(checkpoint, "open_plain", too_many)
    with pytest.raises(
        TrainingError, match="step_00000003.ckpt cannot be read: too many open files in system"
    ):
        checkpoint.newest(tmp_path)


# a save that does not end


def test_an_error_while_saving_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "step_1.ckpt"
    save(path, {"old": torch.ones(3)})
    before = hashlib.sha256(path.read_bytes()).hexdigest()

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    for place in ("os.replace", "os.fsync", "stoker.trainer.checkpoint.save_file"):
        with monkeypatch.context() as patch:
            patch.setattr(place, no_space)
            with pytest.raises(TrainingError, match="No space left"):
                save(path, {"new": torch.zeros(3)})
            with pytest.raises(TrainingError, match="No space left"):
                save(tmp_path / "step_2.ckpt", {"new": torch.zeros(3)})
        assert [entry.name for entry in tmp_path.iterdir()] == ["step_1.ckpt"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    save(path, {"new": torch.zeros(3)})
    assert equal({"new": torch.zeros(3)}, load(path))


KILLED = """
    import os, sys, torch
    from stoker.trainer import checkpoint

    real = checkpoint.save_file

    def killed_in_the_middle(tensors, path, metadata):
        real(tensors, path, metadata)
        os.truncate(path, os.path.getsize(path) * 2 // 3)
        os._exit(9)

    def killed_at_the_end(*_):
        os._exit(9)

    state = {"step": 2, "x": torch.ones(1000)}
    if sys.argv[2] == "write":
        checkpoint.save_file = killed_in_the_middle
    else:
        os.replace = killed_at_the_end
    checkpoint.save(sys.argv[1], state)
    """


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_kill_while_saving_leaves_the_old_file(tmp_path, where, caplog):
    save(path_of(tmp_path, 1), {"step": 1, "callbacks": {}, "x": torch.zeros(1000)})
    save(path_of(tmp_path, 2), {"step": 2, "callbacks": {}, "x": torch.zeros(1000)})
    before = path_of(tmp_path, 2).read_bytes()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path_of(tmp_path, 2)), where]
    assert subprocess.run(command, env=environment, check=False, timeout=120).returncode == 9
    assert path_of(tmp_path, 2).read_bytes() == before
    with caplog.at_level(logging.WARNING):
        path, state = checkpoint.newest(tmp_path)
    assert (
        path == path_of(tmp_path, 2)
        and torch.equal(state["x"], torch.zeros(1000))
        and not caplog.records
    )
    save(
        path_of(tmp_path, 3), {"step": 3, "callbacks": {}}
    )  # what the killed one left is in nobody's way
    assert checkpoint.newest(tmp_path)[1]["step"] == 3
