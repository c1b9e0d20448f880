"""Real trainings on 1, 2 and 4 processes (gloo, on the CPU) have the numbers of one process."""

import functools
import json
import math
import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_samples
import torch
from conftest import assert_same
from safetensors.torch import load_file

from stoker.trainer import checkpoint
from stoker.trainer.state import WAYS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform")

# 57 samples in batches of 10, the last of 7: none can be dealt out evenly to 2 or 4; 18 steps.
JOB = [
    "run_dir=run",
    "dataset._target_=jobs.numbered",
    "model.hidden=[16]",
    "trainer._target_=jobs.Recording",
]
JOB += [
    "optimizer=sgd",
    "epochs=3",
    "batch_size=10",
    "eval_batch_size=9",
    "log_every=4",
    "eval_every=5",
]
JOB += ["max_grad_norm=0.5", "checkpoint.every=7", "checkpoint.keep=50"]
CLASSES = ["+metrics.top2._target_=stoker.trainer.metrics.TopK", "+metrics.top2.k=2"]
CLASSES += ["+metrics.confusion._target_=stoker.trainer.metrics.Confusion"]
STEPS = 18
CLOSE = 1e-6
SEED = int(os.environ.get("KILL_SEED", "0"))
SCRIPTS = Path(__file__).with_name("jobs.py")
WORLDS = [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")]


@pytest.fixture(scope="module")
def single(forks, tmp_path_factory):
    """What a single process leaves of a job: a function of its settings."""

    @functools.cache
    def left_by(*job):
        folder = tmp_path_factory.mktemp("single")
        done = forks.run(folder, *job)
        assert done.code == 0 and done.err == "", done.err
        return left(folder)

    return left_by


def train(forks, folder, world, *job, err=""):
    """What so many processes leave of a job; only the first one prints, `err` to standard error."""
    done = forks.ranks(folder, world, *job)
    assert done.codes == [0] * world, (done.codes, done.late, done.errs)
    if world == 1:  # which is not worth a mistake
        assert (
            done.errs[0].endswith("has no effect with a single process.\n")
            and done.errs[0].count("\n") == 1
        )
    else:
        assert done.errs == [err] + [""] * (world - 1) and done.outs[1:] == [""] * (world - 1), (
            done.errs,
            done.outs[1:],
        )
    return left(folder, world)


def saved(folder):
    """{step: state} of the checkpoints in a folder; not how the optimizer works there, nor what is
    about them.
    """
    states = {step: checkpoint.load(path) for step, path in checkpoint.files(folder).items()}
    for state in states.values():
        state.pop("about", None)
        for group in state["optimizer"]["param_groups"]:
            for way in WAYS:
                group.pop(way, None)
    return states


def left(folder, world=1):
    """The checkpoints, rows and results in a run directory, without what a clock says, and what
    each rank was given.
    """
    run = folder / "run"
    states = saved(run / "checkpoints")
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for row in rows:
        row.pop("train/seconds", None)
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    numbers = {
        name: value
        for name, value in result.items()
        if "/" in name and not name.endswith("/seconds")
    }
    given = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("given.*"))
    ]
    assert len(given) in (0, world)
    return SimpleNamespace(states=states, rows=rows, numbers=numbers, given=given)


def assert_close(value, other, where="", within=CLOSE):
    """Any nesting of dicts, lists, tensors and values: the same but for roundings, of a tensor's
    largest number.
    """
    assert type(value) is type(other), (where, value, other)
    if isinstance(value, torch.Tensor):
        assert value.dtype == other.dtype and value.shape == other.shape, where
        if value.numel():
            error = (
                (value - other).abs().max().item()
                if value.is_floating_point()
                else int(not value.equal(other))
            )
            assert error <= within * other.abs().max().item(), (
                where,
                error,
                other.abs().max().item(),
            )
    elif isinstance(value, dict):
        assert list(value) == list(other), where
        for key in value:
            assert_close(value[key], other[key], f"{where}/{key}", within)
    elif isinstance(value, (list, tuple)):
        assert len(value) == len(other), where
        for i, (item, same) in enumerate(zip(value, other, strict=True)):
            assert_close(item, same, f"{where}/{i}", within)
    elif isinstance(value, float):
        same = math.isclose(value, other, rel_tol=within, abs_tol=within / 10) or (
            math.isnan(value) and math.isnan(other)
        )
        assert same, (where, value, other)
    else:
        assert value == other, where


def assert_same_training(several, one, within=CLOSE):
    """The weights and all other state of each checkpoint, all rows, and the test of the best
    weights.
    """
    assert_close(several.states, one.states, "state", within)
    assert_close(several.rows, one.rows, "rows", within)
    assert_close(several.numbers, one.numbers, "result", within)


# The same numbers


@pytest.mark.parametrize("ema", ["null", "0.9"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_numbers_are_those_of_one_process(
    forks, single, tmp_path, world, strategy, parts, ema, large
):
    if not (large or (parts, ema) == (3, "0.9") or (world == 2 and (parts, ema) == (1, "null"))):
        pytest.skip("--large")
    job = [*JOB, *CLASSES, f"grad_accum_steps={parts}", f"ema={ema}"]
    one, several = single(*job), train(forks, tmp_path, world, *job, f"strategy={strategy}")
    assert max(one.states) == STEPS
    assert_same_training(several, one)
    given = one.given[0]
    assert [len(numbers) for _, numbers in given] == [10, 10, 10, 10, 10, 7] * 3
    assert several.given == [
        [[step, numbers[rank::world]] for step, numbers in given] for rank in range(world)
    ]


JOBS = {
    "AdamW, tanh, a norm a layer": ["optimizer=adamw", "model.activation=tanh", "model.norm=layer"],
    "a last batch of 2": ["batch_size=11"],
    "one batch of all": ["batch_size=64", "epochs=18"],
    "streamed by workers": ["dataset.resident=false", "dataset.workers=2"],
    "streamed by none": ["dataset.resident=false", "dataset.workers=0"],
    "a regression": ["+dataset.kind=regression", "loss=mse"],
    "Lookahead and EMA": ["callbacks.lookahead.every=4", "ema=0.8"],
    "a loss of one's own": ["trainer._target_=jobs.Penalised"],
    "micro-batches of at most 2": ["micro_batch=2"],
    "torchmetrics": [
        "+metrics.f1._target_=torchmetrics.classification.MulticlassF1Score",
        "+metrics.f1.num_classes=4",
        "+metrics.f1.average=macro",
    ],
}


def test_each_of_several_processes_loads_the_weights_that_were_tested(forks, tmp_path):
    done = forks.run(tmp_path, *JOB, "ema=0.9", "epochs=1", "checkpoint.every=3", "report=false")
    assert done.code == 0, done.err
    done = forks.ranks(tmp_path, 2, "loads", "ddp", script=SCRIPTS)
    assert done.codes == [0, 0], done.errs
    tested = load_file(tmp_path / "run" / "model.safetensors")
    assert_same(load_file(tmp_path / "loaded.0"), tested)
    assert_same(load_file(tmp_path / "loaded.1"), tested)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_so_they_are_for_other_jobs(forks, single, tmp_path, job, large):
    one = single(*JOB, *JOBS[job])
    for world, strategy in WORLDS if large else [(2, ("ddp", "fsdp")[list(JOBS).index(job) % 2])]:
        if job == "a last batch of 2" and world == 4:
            continue  # refused
        assert_same_training(
            train(
                forks,
                tmp_path / f"{strategy}{world}",
                world,
                *JOB,
                *JOBS[job],
                f"strategy={strategy}",
            ),
            one,
        )


# 64 images in batches of 10, the last of 4; the statistics of BatchNorm are those of the whole
# batch. In float64: in float32 another order in memory alone puts the weights of convolutions and
# BatchNorm off by 3e-6.
IMAGES = [
    "run_dir=run",
    "dataset._target_=jobs.pictures",
    "model._target_=jobs.double_cnn",
    "optimizer=sgd",
    "epochs=2",
]
IMAGES += ["batch_size=10", "eval_batch_size=3", "checkpoint.every=5", "checkpoint.keep=50"]
AUGMENTATIONS = [
    "[]",
    "[flip,{crop: 2},{cutout: 3}]",
    "[{flip: alternate},{shift: 2},{mixup: 0.3}]",
    "[{cutmix: 1.0},{crop: 1}]",
]


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_images_and_their_augmentation(forks, single, tmp_path, augment, streamed, large):
    if not large and streamed != AUGMENTATIONS.index(augment) % 2:
        pytest.skip("--large")
    job = [*IMAGES, f"dataset.augment={augment}", "ema=0.9"]
    one = single(*job)
    job += ["dataset.resident=false", "dataset.workers=1"] if streamed else []
    for world, strategy in WORLDS if large else [(4, "fsdp")] if streamed else [(2, "ddp")]:
        several = train(forks, tmp_path / f"{strategy}{world}", world, *job, f"strategy={strategy}")
        assert_same_training(several, one, within=1e-12)


@pytest.mark.slow
def test_a_folder_of_images(forks, tmp_path):
    """Decoded by each rank, or read from one cache."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for i in range(60):
        pixels = torch.randint(0, 256, (8, 8, 3), generator=generator, dtype=torch.uint8) // (
            1 + i % 3
        )
        path = tmp_path / "images" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(path)
    job = [
        "run_dir=run",
        "dataset=image_folder",
        f"dataset.root={tmp_path / 'images'}",
        "dataset.augment=[flip]",
    ]
    job += ["model=cnn", "model.channels=[4,8]", "optimizer=sgd", "epochs=2", "batch_size=10"]
    done = forks.run(tmp_path / "one", *job, "dataset.cache=false")
    assert done.code == 0, done.err
    for cache in ("false", tmp_path / "cache"):
        several = train(
            forks, tmp_path / f"two {cache == 'false'}", 2, *job, f"dataset.cache={cache}"
        )
        assert_same_training(several, left(tmp_path / "one"), within=1e-5)


@pytest.mark.slow
def test_dropout_repeats_itself(forks, tmp_path):
    """The same command twice is bit-identical, and the ranks drop different units."""
    job = [*JOB, "model.dropout=0.3", "grad_accum_steps=2"]
    once, twice = (train(forks, tmp_path / name, 2, *job) for name in ("once", "twice"))
    assert_same(vars(once), vars(twice))


# Evaluation and prediction


def scripted(forks, folder, world, name, strategy="auto"):
    """What `jobs.py NAME` has left on each of so many ranks, or the one process."""
    if world == 1:
        done = forks.run(folder, name, "single", script=SCRIPTS)
        assert done.code == 0 and done.err == "", done.err
    else:
        done = forks.ranks(folder, world, name, strategy, script=SCRIPTS)
        assert done.codes == [0] * world and done.errs == [""] * world, (
            done.codes,
            done.late,
            done.errs,
        )
    return [json.loads(path.read_text()) for path in sorted(folder.glob("results.*"))]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_evaluation_counts_every_sample_once_and_a_prediction_has_their_order(
    forks, tmp_path, strategy, large
):
    (one,) = scripted(forks, tmp_path / "one", 1, "evaluate")
    assert one["constant"]["val/r2"] == 0
    for world in (2, 3, 4) if large else (4,):
        several = scripted(forks, tmp_path / str(world), world, "evaluate", strategy)
        assert len(several) == world and len(one) > 15
        for results in several:
            assert_close(results, one)


# What a user brings


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_plain_data_loaders_in_a_notebook(forks, tmp_path, strategy):
    scripted(forks, tmp_path / "one", 1, "plain")
    scripted(forks, tmp_path / "three", 3, "plain", strategy)
    for part in ("whole", "cut"):
        one, three = (saved(tmp_path / name / part) for name in ("one", "three"))
        assert max(one) == STEPS
        assert_close(three, one)
    assert_same(*(saved(tmp_path / "three" / name)[STEPS] for name in ("cut", "whole")))


@pytest.mark.parametrize(
    "name, words",
    [
        ("with_distributed_sampler", ["DistributedSampler", "total for all processes"]),
        ("with_a_median", ["median"]),
        ("small_batches", ["batch", "2"]),
    ],
)
def test_what_cannot_be_spread_out_is_refused(forks, tmp_path, name, words):
    done = forks.ranks(tmp_path, 2, name, "ddp", script=SCRIPTS)
    assert done.codes == [2, 2], (done.codes, done.late, done.errs)
    for error in done.errs:
        assert error.startswith("error: ") and len(error.splitlines()) <= 3, error
        assert all(word in error for word in words), error


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [3, 18])
def test_more_ranks_than_samples_in_a_batch_are_refused(forks, tmp_path, batch_size):
    """57 = 3 * 18 + 3."""
    done = forks.ranks(tmp_path, 4, *JOB, f"batch_size={batch_size}")
    assert done.codes == [2] * 4, (done.codes, done.late, done.errs)
    printed = [error for error in done.errs if error]  # by the rank that came first
    assert len(printed) == 1, done.errs
    assert "batch_size" in printed[0] and "Type" in printed[0]
    assert len(printed[0].splitlines()) <= 3, done.errs
    assert not list(tmp_path.glob("run/*"))


# Checkpoints

FULL = [
    *JOB,
    *CLASSES,
    "optimizer=adamw",
    "ema=0.9",
    "callbacks.lookahead.every=4",
    "patience=3",
    "grad_accum_steps=2",
]
CUT = 7  # the step of the checkpoint that is gone on from, in the middle of the second epoch
OFTEN = ("single", "ddp2", "fsdp4")  # without --large
KINDS = {"single": (1, "single")} | {
    f"{strategy}{world}": (world, strategy) for world, strategy in WORLDS
}


CHANGED = (
    "The number of processes has changed from {} to {}: the weights will not match bit for "
    "bit, and a loss or metric that compares the samples of a batch with each other will be on a different scale.\n"
)


def run_as(forks, folder, kind, *job, before=None):
    """What a run of this kind leaves; `before` is the kind that wrote the checkpoint, if any."""
    world, strategy = KINDS[kind]
    begun = world if before is None else KINDS[before][0]
    err = "" if begun == world else CHANGED.format(begun, world)
    if world > 1:
        return train(forks, folder, world, *job, f"strategy={strategy}", err=err)
    done = forks.run(folder, *job)
    assert done.code == 0 and done.err == err, done.err
    return left(folder)


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """(folder, what is left) of the undisturbed run of a kind: a function."""

    @functools.cache
    def made(kind, *job):
        folder = tmp_path_factory.mktemp(kind)
        return folder, run_as(forks, folder, kind, *job)

    return made


def cut_off(folder, copy, step=CUT):
    """A copy of a run as it was when it had just saved after this step."""
    shutil.copytree(folder, copy)
    for path in [
        path
        for pattern in ("*.*", "out", "err", "run/result.json", "run/model.*")
        for path in copy.glob(pattern)
    ]:
        path.unlink()
    checkpoint.go_back(copy / "run" / "checkpoints", step)
    assert max(checkpoint.files(copy / "run" / "checkpoints")) == step


def assert_continued(forks, whole, tmp_path, writer, reader, job, within=CLOSE):
    folder, written = whole(writer, *job)
    cut_off(folder, tmp_path / reader)
    end = run_as(forks, tmp_path / reader, reader, *job, before=writer)
    _, state = checkpoint.newest(tmp_path / reader / "run" / "checkpoints")
    assert state["about"]["processes"] == KINDS[reader][0]
    assert max(end.states) == STEPS and end.given[0][0][0] == CUT + 1
    assert_same_training(end, whole(reader, *job)[1], within)
    if reader == writer:
        assert_same(end.states, written.states)
        assert_same([end.rows, end.numbers], [written.rows, written.numbers])


@pytest.mark.slow
@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
def test_a_checkpoint_of_any_kind_is_gone_on_from_by_any_kind(
    forks, whole, tmp_path, writer, reader, large
):
    if not (large or {writer, reader} <= {*OFTEN}):
        pytest.skip("--large")
    assert_continued(forks, whole, tmp_path, writer, reader, FULL)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_the_same_whoever_wrote_it(whole, kind, large):
    if not (large or kind in OFTEN):
        pytest.skip("--large")
    """Names in their order, types, shapes, values."""
    states, one = (whole(name, *FULL)[1].states for name in (kind, "single"))
    assert_close(states, one)


def steps_done(state):
    """How many steps the optimizer has taken: without those that the fp16 scaler skipped."""
    return int(next(iter(state["optimizer"]["state"].values()))["step"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp2", "fsdp4", "ddp4", "fsdp2"])
def test_the_scale_of_fp16_is_that_of_all_ranks(forks, whole, tmp_path, kind, large):
    """A step is skipped by all or by none: the weights would fall apart.

    A single process goes on with the scale.
    """
    if not (large or kind in ("ddp2", "fsdp2")):
        pytest.skip("--large")
    job = [*JOB, "optimizer=adamw", "trainer._target_=jobs.Scaled", "precision=fp16"]
    states = whole(kind, *job)[1].states
    assert 3 < STEPS - steps_done(states[STEPS]) < STEPS - 3
    assert_continued(forks, whole, tmp_path, kind, kind, job)
    cut_off(whole(kind, *job)[0], tmp_path / "one")
    end = run_as(forks, tmp_path / "one", "single", *job, before=kind).states[STEPS]
    assert steps_done(end) > steps_done(states[CUT]) and end["scaler"]["scale"] < 2.0**22


# Stops

SLOW = [*FULL, "+callbacks.slow._target_=jobs.Slow", "+callbacks.slow.seconds=0.06"]


def steps_of(folder, world):
    """The step to which all ranks have come, and which is saved."""
    lines = [(folder / f"given.{rank}").read_text().splitlines() for rank in range(world)]
    last = {json.loads(of_rank[-1])[0] for of_rank in lines}
    assert len(last) == 1 and max(checkpoint.files(folder / "run" / "checkpoints")) in last, last
    return last.pop()


def assert_stopped(forks, folder, kind, *job, codes=0, **options):
    """The step after which all ranks of a run have stopped, each with this exit code."""
    world, strategy = KINDS[kind]
    done = forks.ranks(folder, world, *job, f"strategy={strategy}", **options)
    assert done.codes == [codes] * world, (done.codes, done.late, done.errs)
    assert not any(done.outs[1:]) and not any(done.errs[1:]), (done.outs, done.errs)
    assert (done.errs[0] == "") == (codes == 0) and len(done.errs[0].strip().splitlines()) <= 3, (
        done.errs[0]
    )
    return steps_of(folder, world)


def assert_goes_on(forks, whole, folder, kind, *job):
    """The same command ends with the very bits of the undisturbed run."""
    for path in folder.glob("given.*"):
        path.unlink()
    end, undisturbed = run_as(forks, folder, kind, *job), whole(kind, *job)[1]
    assert_same(end.states[STEPS], undisturbed.states[STEPS])
    assert_same([end.rows, end.numbers], [undisturbed.rows, undisturbed.numbers])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, to", [("ddp2", 0), ("ddp2", None), ("fsdp2", 1), ("fsdp2", None), ("ddp4", None)]
)
def test_a_signal_stops_all_ranks_after_the_same_step(forks, whole, tmp_path, kind, to, large):
    """A signal to one rank, or to each at a moment of its own."""
    if not large and to is None:  # a few of those are in the next test
        pytest.skip("--large")
    for i in range(20 if large else 1):
        folder, draw = tmp_path / str(i), random.Random(f"{SEED} {kind} {to} {i}")
        first = {
            "signal": signal.SIGTERM,
            "watch": "given.*",
            "count": KINDS[kind][0],
            "delay": draw.uniform(0, 0.3),
        }
        if to is None:
            others = draw.sample(range(KINDS[kind][0]), KINDS[kind][0])
            signals = [
                {"signal": signal.SIGTERM, "rank": rank, "delay": draw.uniform(0, 0.02)}
                for rank in others
            ]
            signals[0] |= first
        else:
            signals = [first | {"rank": to}]
        step = assert_stopped(
            forks, folder, kind, *SLOW, codes=128 + signal.SIGTERM, signals=signals
        )
        assert 0 < step < STEPS
        assert_goes_on(forks, whole, folder, kind, *SLOW)


@pytest.mark.slow
def test_signals_at_any_moment(forks, whole, tmp_path, large):
    """Also while the ranks start, and after the last step: all end, and nothing is lost."""
    for i in range(60 if large else 2):
        folder, draw = tmp_path / str(i), random.Random(f"any {SEED} {i}")
        kind = draw.choice(["ddp2", "fsdp2"])
        signals = [{"signal": signal.SIGTERM, "rank": 0, "delay": draw.uniform(0, 4)}]
        signals += [{"signal": signal.SIGTERM, "rank": 1, "delay": draw.uniform(0, 0.02)}]
        done = forks.ranks(folder, 2, *SLOW, f"strategy={KINDS[kind][1]}", signals=signals)
        assert not done.late and set(done.codes) <= {0, 143, -15}, (i, kind, done.codes, done.errs)
        assert not any(
            "Traceback" in error or len(error.strip().splitlines()) > 3 for error in done.errs
        ), done.errs
        assert_goes_on(forks, whole, folder, kind, *SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [-1, 1], ids=["all", "one"])
def test_a_time_that_is_over_is_over_for_all(forks, whole, tmp_path, slow):
    """Whoever is slow; the same command goes on, as often as it takes."""
    job = [*SLOW, f"+callbacks.slow.rank={slow}", "max_minutes=0.01", "checkpoint.minutes=0.002"]
    stops = [0]
    while stops[-1] < STEPS:
        stops.append(assert_stopped(forks, tmp_path, "ddp2", *job))
        assert stops[-1] > stops[-2]
    assert len(stops) > 2
    end, undisturbed = left(tmp_path, 2), whole("ddp2", *FULL)[1]
    for part in ("model", "optimizer", "scheduler"):
        assert_same(end.states[STEPS][part], undisturbed.states[STEPS][part])
    assert_same([end.rows, end.numbers], [undisturbed.rows, undisturbed.numbers])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [-1, 1, 3], ids=["all", "one", "last"])
def test_a_callback_of_ones_own_stops_all(forks, whole, tmp_path, rank, large):
    if rank == 3 and not large:
        pytest.skip("--large")
    stop = [
        "+callbacks.stop._target_=jobs.StopAt",
        "+callbacks.stop.step=8",
        f"+callbacks.stop.rank={rank}",
    ]
    step = assert_stopped(forks, tmp_path, "ddp4", *SLOW, *stop)
    assert step == 8 if rank == -1 else 8 <= step < STEPS


@pytest.mark.slow
def test_patience_ends_for_all_where_it_ends_for_one_process(forks, single, tmp_path):
    job = [*FULL, "patience=2", "eval_every=1", "monitor=val/acc"]
    one = single(*job)
    for world, strategy in ((4, "ddp"), (2, "fsdp")):
        several = train(forks, tmp_path / strategy, world, *job, f"strategy={strategy}")
        assert max(several.states) == max(one.states) < STEPS
        assert_same_training(several, one)


@pytest.mark.slow
def test_any_samples_are_dealt_out_to_two_ranks(forks, tmp_path):
    """Dicts with ragged lists, of which a sample draws the same on any rank."""
    model = ["model._target_=torch.nn.Linear", "+model.in_features=6", "+model.out_features=3"]
    job = [*test_samples.RUN, *model, "optimizer=sgd"]
    alone = forks.run(tmp_path, *job, "run_dir=alone")
    assert alone.code == 0, alone.err
    done = forks.ranks(tmp_path, 2, *job, "run_dir=ranks")
    assert done.codes == [0, 0], done.errs
    results = [
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("alone", "ranks")
    ]
    for name in ("train/loss", "val/loss", "hard/loss", "test/loss"):
        assert results[1][name] == pytest.approx(results[0][name], rel=CLOSE)
