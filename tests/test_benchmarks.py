"""The benchmarks: the contestants do the same work, and the table is right. Nothing is timed."""

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hydra.core.hydra_config import HydraConfig

from benchmarks import by_hand, gpu, run, saving, scale, work
from benchmarks.ours import ours
from stoker.data.loader import make_loaders
from stoker.trainer import checkpoint

pytestmark = pytest.mark.slow

RUN = Path(run.__file__)


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """Files in MNIST's format, of 700 + 200 images that can be learnt; DATA_ROOT is where they
    are.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 200, (10, 28, 28), generator=generator)
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, n in (("train", 700), ("t10k", 200)):
        labels = torch.randint(0, 10, (n,), generator=generator)
        images = patterns[labels] + torch.randint(0, 56, (n, 28, 28), generator=generator)
        head = struct.pack(">IIII", 2051, n, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + bytes(images.flatten().tolist()))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, n) + bytes(labels.tolist())
        )
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))


@pytest.fixture
def images(tmp_path):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for part in ("train", "test"):
        for kind in range(10):
            folder = tmp_path / part / f"kind{kind}"
            folder.mkdir(parents=True)
            for i in range(2):
                pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.jpg")
    return str(tmp_path)


def trained(contestant, job):
    """(weights, the accuracy after each epoch)"""
    clock = work.Clock(job)
    model = contestant(job, clock)
    return model.state_dict(), clock.accuracies


def bare_on_our_batches(job, clock):
    """The bare loop, with the order of samples that the others have."""
    (train, test, _), _ = make_loaders(
        work.read(job), batch_size=job.batch_size, eval_batch_size=work.EVAL_BATCH, seed=job.seed
    )
    clock.begin()
    model = work.model(job)
    by_hand.fit(job, clock, model, work.optimizer(job)(model.parameters()), train, test)
    return model


def distance(weights, others):
    """Euclidean.

    Not by element: Adam divides by the gradient's size, so that rounding counts where that is tiny.
    """
    return sum((weights[name] - others[name]).square().sum().item() for name in weights) ** 0.5


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("variant", ["plain", "fused", "channels_last"])
def test_ours_and_the_loops_by_hand_train_the_same_weights(mnist, name, variant):
    job = work.Job("ideal", (variant,), name, epochs=2)
    weights, accuracies = trained(by_hand.ideal, job)
    assert accuracies[-1] > 0.5
    for contestant in (ours, bare_on_our_batches):
        others, other_accuracies = trained(contestant, work.Job("other", (), name, epochs=2))
        apart, way = distance(others, weights), distance(weights, work.model(job).state_dict())
        assert apart < 0.01 * way
        assert other_accuracies == pytest.approx(accuracies, abs=0.0101)  # two of the 200 images


@pytest.mark.parametrize("data", ["ready", "one"])
def test_on_ready_batches_all_loops_train_the_same_weights(mnist, data):
    job = work.Job("each", (data,), "linear", epochs=2)
    weights, accuracies = trained(by_hand.bare, job)
    others, other_accuracies = trained(ours, job)
    torch.testing.assert_close(others, weights, rtol=1e-4, atol=1e-6)
    assert other_accuracies == pytest.approx(accuracies)


def test_the_tutorials_data_sets_hold_the_same_pixels_and_labels(mnist, images):
    for name in ("mlp", "cifar", "folder"):
        job = work.Job("bare", (), name, images=images)
        _, (inputs, targets), *scale = work.arrays(job)
        _, test = work.tutorial_datasets(job)
        assert [label for _, label in test] == targets.tolist()
        pixels = torch.stack([image for image, _ in test])
        torch.testing.assert_close(pixels, work.normalize(inputs, *scale), rtol=1e-5, atol=1e-6)


def test_ten_times_the_data_is_the_same_data_ten_times(mnist):
    once, tenfold = (work.read(work.Job("ours", variants)).train for variants in ((), ("10x",)))
    assert len(tenfold) == 10 * len(once)
    assert torch.equal(tenfold.inputs[-len(once) :], once.inputs)


def test_the_crop_moves_each_image_by_its_own_amount_and_mirrors_half():
    ramp = torch.arange(32 * 32, dtype=torch.float32).view(1, 1, 32, 32).expand(64, 3, 32, 32) + 1
    moved = by_hand.crop_and_flip(ramp)
    steps = {round((image[0, 16, 17] - image[0, 16, 16]).item()) for image in moved}
    assert steps == {1, -1}
    corners = {tuple(image[0, 16, 16:18].sort().values.tolist()) for image in moved}
    assert len(corners) > 16


def test_the_clock_leaves_out_the_first_epoch():
    clock = work.Clock(work.Job("ours"))
    clock.steps, clock.first_step = 4, 1.5
    clock.ends, clock.evaluation_starts, clock.accuracies = (
        [0.0, 10.0, 13.0, 17.0],
        [9.0, 12.0, 16.0],
        [0.1, 0.2, 0.3],
    )
    results = clock.results()
    assert (results["train_s"], results["evaluation_s"], results["sum_s"]) == (2.5, 1.0, 3.5)
    assert (results["total_s"], results["first_epoch_s"], results["step_us"]) == (
        17.0,
        10.0,
        625000.0,
    )
    assert (results["accuracy"], results["first_step_s"]) == (0.3, 1.5)


def test_the_ratios_of_the_table_are_paired_by_round():
    sums = [{"ours": 1.0, "slow": 2.0}, {"ours": 4.0, "slow": 12.0}, {"ours": 2.0, "slow": 8.0}]
    rounds = [
        {name: {"sum_s": seconds, "accuracy": 0.9 + 0.01 * i} for name, seconds in row.items()}
        for i, row in enumerate(sums)
    ]
    rounds[0]["broken"] = {"sum_s": 1.0, "accuracy": 0.5}
    rounds[1]["broken"] = rounds[2]["broken"] = {"note": "failed: no memory"}
    lines = run.table(rounds, {"hf": "not installed"}, ["sum_s", "accuracy"], "sum_s", "ours")
    assert lines == [
        "| n = 3 | sum s / ours | sum s | test accuracy |",
        "|---|---|---|---|",
        "| ours | 1.00 (1.00 to 1.00) | 2.000 | 0.9100 ± 0.0100 |",
        "| slow | 3.00 (2.00 to 4.00) | 8.000 | 0.9100 ± 0.0100 |",
        "| broken | failed: no memory |",
        "| hf | not installed |",
    ]


def test_what_is_derived_within_a_round():
    results = {
        "ours:ready": {"step_us": 120.0},
        "bare:ready": {"step_us": 100.0},
        "hf:ready": {"note": "failed"},
    }
    run.derive(results, "overhead")
    assert [result.get("over_bare_us") for result in results.values()] == [20.0, 0.0, None]
    results = {"ours": {"peak_mib": 500.0, "data_mib": 50.0}, "bare": {"peak_mib": 450.0}}
    run.derive(results, "memory")
    assert results["bare + data"] == {"peak_mib": 500.0}
    names = {"ours:streamed": 100.0, "ours:10x": 150.0, "ours:streamed+10x": 110.0, "ours": 50.0}
    results = {
        name: {"step_us": us, "peak_mib": 7.0, "data_mib": 4.0} for name, us in names.items()
    }
    run.derive(results, "scale")
    assert [result["growth"] for result in results.values()] == [1.0, 3.0, 1.1, 1.0]
    assert results["ours"]["rest_mib"] == 3.0


def test_a_step_has_waited_for_as_long_as_it_came_late():
    times = [0.0, 1.0, 2.0, 3.0, 7.0, 9.0, 10.0, 11.0, 12.0, 13.0]  # 3 s late, and 1 s
    held_up = saving.held_up(times, begun=[3.0], written=[9.5])
    assert held_up == {"blocked_s": 3.0, "delayed_s": 4.0, "written_s": 6.5, "step_us": 1e6}


def test_the_default_job_with_and_without_checkpoints_does_the_same_steps(tmp_path):
    found = {}
    for name in ("plain", "saving"):
        (tmp_path / name).mkdir()
        try:
            found[name] = saving.default(
                work.Job("default", (name,), "digits", 2, scratch=str(tmp_path / name)), None
            )
        finally:
            HydraConfig.instance().cfg = None
    assert found["plain"]["saves"] == 0 and not checkpoint.files(
        tmp_path / "plain" / "run" / "checkpoints"
    )
    assert found["saving"]["saves"] == 2 and list(
        checkpoint.files(tmp_path / "saving" / "run" / "checkpoints")
    ) == [
        40,
        20,
    ]


def test_large_checkpoints_are_as_large_as_they_should_be(tmp_path):
    numbers = saving.large(work.Job("large", ("1mb",), scratch=str(tmp_path)), None, every=4)
    assert numbers.keys() == {"blocked_s", "delayed_s", "written_s", "step_us"}
    found = checkpoint.files(tmp_path / "checkpoints")
    assert max(found) == 14 and 2**20 < found[14].stat().st_size < 2.3 * 2**20


def test_the_command_prints_its_table_and_writes_it(tmp_path):
    """Start-up needs no data: train.py with its defaults, and the loop by hand."""
    command = [
        sys.executable,
        str(RUN),
        "--what",
        "startup",
        "--contestants",
        "ours",
        "hf:one",
        "--rounds",
        "1",
    ]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "table.md")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert done.stdout.splitlines()[: len(lines)] == lines
    assert lines[0].startswith("`python benchmarks/run.py --what startup")
    first = [line.split(" | ")[0] for line in lines[4:]]
    assert {"| n = 1", "| bare:one", "| ours"} <= set(first)
    if run.version("transformers") is None:
        assert lines[-1] == "| hf:one | not installed |"


def test_missing_data_is_said_at_once(tmp_path):
    environment = os.environ | {"DATA_ROOT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(RUN)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "there is no MNIST/raw in DATA_ROOT" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--contestants", "ideal:malloc"], "there is no variant malloc"),
        (["--contestants", "mine"], "choose from ours, bare, ideal"),
        (["--what", "startup", "--output", "nowhere/table.md"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(arguments, words):
    done = subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr


def test_the_tables_of_the_costs_are_those_of_the_formulas():
    text = Path(RUN).parents[1].joinpath("docs", "scale.md").read_text(encoding="utf-8")
    for model in scale.MODELS.values():
        assert "\n".join(scale.table(model, scale.Cluster())) in text
    four = 4 * 1000  # bytes of 1,000 numbers
    assert scale.sent("ddp", 1000, 1) == scale.sent("fsdp", 1000, 1) == 0
    assert scale.sent("ddp", 1000, 2) == four and scale.sent("ddp", 1000, 4, parts=3) == 1.5 * four
    assert (
        scale.sent("fsdp", 1000, 2) == 1.5 * four
        and scale.sent("fsdp", 1000, 2, parts=3) == 3.5 * four
    )
    assert (
        scale.held("ddp", 1000, 8, 10) == 4 * four
        and scale.held("fsdp", 1000, 8, 10) == 0.5 * four + 0.3 * four
    )
    one, two = (
        scale.seconds("ddp", scale.MODELS["7B"], world, scale.Cluster()) for world in (1, 2)
    )
    assert one[0] == 2 * two[0] and one[1] == 0 < two[1]


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="the bytes are counted by Linux")
def test_a_job_of_the_costs_counts_steps_and_bytes(capsys):
    scale.run_job("mlp", "single", 16, 8, 0)
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == 269322 and result["seconds"] > 0 and result["bytes"] >= 0


def dry_run(folder, steps):
    """(what a dry run of the GPU day prints, the rows that its results.jsonl has then)"""
    command = [sys.executable, gpu.__file__, "--device", "cpu", "--dry-run", "--output", folder]
    if steps:
        command += ["--steps", *steps]
    with tempfile.TemporaryDirectory() as working:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=working)
        assert os.listdir(working) == []
    lines = Path(folder, "results.jsonl").read_text(encoding="utf-8").splitlines()
    return done.stdout, [json.loads(line) for line in lines]


def test_a_dry_run_of_the_gpu_day_goes_through_its_steps(tmp_path, large):
    """All of them with --large, which takes a minute."""
    steps = list(gpu.STEPS) if large else ["env", "mlp", "host"]
    output, rows = dry_run(str(tmp_path), [] if large else steps)
    options = gpu.read_options(["--device", "cpu", "--dry-run"])
    expected = []
    for name in steps:
        step = gpu.STEPS[name]
        left_out = gpu.left_out(name, options)
        expected += [(name, label) for label in step.labels if label not in left_out]
        assert all(f"{name} {label}: skipped, {left_out[label]}" in output for label in left_out)
    results = {(row["step"], row["label"]): row["result"] for row in rows}
    assert list(results) == expected
    assert [result for result in results.values() if "note" in result] == []

    # The same data, weights and order: the hand-written loops end where the Trainer does.
    for name in set(TUNED) & set(steps):
        ours, by_hand = results[name, "ours"], results[name, TUNED[name]]
        assert ours["loss"] == pytest.approx(by_hand["loss"], rel=1e-3), name
    if large:
        assert results["counts", "memory"]["left_bytes"] == 0
        assert results["counts", "memory"]["training_bytes"] > 4 * 269322  # the weights at least
        assert 0 < results["resnet", "ours"]["mfu"] < 1

    tables = tmp_path.joinpath("gpu.md").read_text(encoding="utf-8")
    assert tables.startswith("# Dry run of a GPU day")
    for _, label in expected:
        assert f"\n| {label} |" in tables
    if large:
        assert dry_run(str(tmp_path), [])[1] == rows  # nothing is left to do


TUNED = {"mlp": "ideal:fused", "cifar": "hand", "resnet": gpu.TUNED}
TUNED |= {"host": "ideal:fused", "cnn": gpu.TUNED}


def test_a_gpu_day_survives_failures_and_hangs_and_ends_in_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST", 0)
    late = tmp_path / "late"
    child = f"import time; time.sleep(3); open({str(late)!r}, 'w')"
    codes = {
        "ours": """print('result {"sum_s": 2.0, "step_us": 3.0}')""",
        "replay": "print(1 / 0)",
        "ideal:fused": f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
        "bare": """print('result {"sum_s": 4.0, "step_us": 5.0}')""",
        "lightning": "import time; time.sleep(60)",
        "cut off": "",
    }
    parts = []
    for label, code in codes.items():
        seconds = 1 if label == "ideal:fused" else 60
        command = [sys.executable, "-c", code]
        parts.append(gpu.Part("mlp", label, command, seconds, gpu.read_contestant))
    options = gpu.read_options(["--device", "cuda", "--limit", "4", "--output", str(tmp_path)])
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    monkeypatch.setattr(run, "version", lambda distribution: "1")
    began = time.monotonic()
    gpu.run_day(parts, options, os.environ)
    assert time.monotonic() - began < 60  # Lightning's stand-in was not waited for
    assert "no time left for mlp cut off" in capsys.readouterr().out
    rows = tmp_path.joinpath("results.jsonl").read_text(encoding="utf-8")
    gpu.run_day(parts[:1], options, os.environ)
    assert tmp_path.joinpath("results.jsonl").read_text(encoding="utf-8") == rows  # it is done
    tables = tmp_path.joinpath("gpu.md").read_text(encoding="utf-8")
    assert "| bare | 2.00 (2.00 to 2.00) |" in tables
    assert "| replay | failed: ZeroDivisionError: division by zero |" in tables
    assert "| ideal:fused | stopped after 1 s |" in tables
    assert "| lightning | stopped after " in tables
    time.sleep(max(0, began + 5 - time.monotonic()))
    assert not late.exists()  # the child has ended with its parent


def test_a_goal_is_met_by_the_fastest_of_paired_trainings_at_the_same_accuracy():
    def trainings(times, accuracy):
        rows = [{"step_us": time, "accuracy": accuracy} for time in times]
        return dict(enumerate(rows))

    goal = gpu.Goal("", "cifar", "ours", "hand", "step_us", most=1.0, n=3)
    results = {"ours": trainings([9, 9, 9], 0.9), "ours:compile=true": trainings([2, 6, 3], 0.9)}
    assert goal.judge(results) == (gpu.NOT_YET, "")
    results["hand"] = trainings([4, 4, 4], 0.9005)
    text, verdict = goal.judge(results)
    assert text.startswith("0.75 (0.50 to 1.50), ours:compile=true / hand, n = 3; accuracy 0.9000")
    assert verdict == "yes"
    assert goal._replace(n=4).judge(results)[1] == "no"
    assert goal._replace(most=0.7).judge(results)[1] == "no"
    results["hand"] = trainings([4, 4, 4], 0.92)
    assert goal.judge(results)[1] == "no"
    zero = gpu.Zero("", "counts", "left_bytes")
    assert zero.judge({"memory": {0: {"left_bytes": 0}}}) == ("memory 0", "yes")
    assert zero.judge({"memory": {0: {"left_bytes": 8}}}) == ("memory 8", "no")


def test_the_readme_has_every_goal_of_a_gpu_day():
    text = Path(RUN).with_name("README.md").read_text(encoding="utf-8")
    assert [goal.title for goal in gpu.GOALS if f"| {goal.title} |" not in text] == []
