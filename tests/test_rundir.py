"""The run directory: what continues what, and what is never lost by a command that somebody
typed.
"""

import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import test_samples
import torch
from safetensors.torch import load_file

from stoker.command import signals
from stoker.runs import json_files
from stoker.runs.report.inputs import Run, read_run
from stoker.runs.report.setup import commands, origin
from stoker.runs.result import RunResult, finished, write_failure
from stoker.sweeps.jobs import read_jobs
from stoker.trainer import checkpoint, stopping
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import NotFinite, TrainingError, UserError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform")
JOB = (
    "dataset=synthetic",
    "dataset.n=400",
    "batch_size=16",
    "epochs=3",
    "log_every=5",
)  # 20 steps an epoch
JOB += ("+callbacks.stop._target_=test_rundir.Stop",)


class Stop(Callback):
    """Sends this process a SIGTERM after the step whose number is in the file `stop`, where there
    is one.
    """

    def on_fit_start(self, trainer):
        self.at = int(Path("stop").read_text()) if Path("stop").exists() else None

    def on_step_end(self, trainer):
        if trainer.step == self.at:
            Path("stop").unlink()
            os.kill(os.getpid(), signal.SIGTERM)


class Failing(Callback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, trainer):
        if trainer.step == self.at:
            raise UserError("at: give another number.")


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """The folder of the uninterrupted run `run`."""
    folder = tmp_path_factory.mktemp("whole")
    done = forks.run(folder, *JOB, "run_dir=run")
    assert done.code == 0, done.err
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def measured_of(folder):
    """How the run in `folder` went, as its result.json has it."""
    result = json_files.read_json(folder / "run" / "result.json")
    return {key: value for key, value in result.items() if "/" not in key and key != "best"}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(forks, folder, *arguments, code=2):
    """The message of a command that is refused and has changed nothing in `folder`/run."""
    before = contents(folder / "run")
    done = forks.run(folder, *arguments)
    assert done.code == code and "Traceback" not in done.err and len(done.err.splitlines()) <= 3, (
        done.err
    )
    assert contents(folder / "run") == before
    return done.err


@pytest.mark.slow
def test_a_file_of_another_run_begins_no_run_in_its_place(forks, whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    assert forks.run(tmp_path, *JOB, "seed=1", "run_dir=other").code == 0
    file = next(iter(checkpoint.files(tmp_path / "other" / "checkpoints").values()))
    assert "did not start from" in refused(
        forks, tmp_path, *JOB, "seed=1", "run_dir=run", f"resume={file}"
    )


def test_a_mistake_that_a_step_finds_ends_the_run_as_failed(forks, tmp_path):
    fail = ("+callbacks.fail._target_=test_rundir.Failing", "+callbacks.fail.at=7")
    assert forks.run(tmp_path, *JOB, *fail, "run_dir=runs/run").code == 2
    result = RunResult.read(tmp_path / "runs" / "run")
    assert (result.error, result.code) == ("at: give another number.", 2)
    assert (tmp_path / "runs/run/report.html").exists()
    assert '"status":"failed"' in (tmp_path / "runs/index.html").read_text()


def test_the_same_command_with_resume_goes_on_with_what_it_has_begun(forks, whole, tmp_path):
    file = checkpoint.path_of(whole / "run" / "checkpoints", 40)
    shutil.copy(file, tmp_path / "file.ckpt")
    command = (*JOB, "run_dir=run", "resume=file.ckpt")
    (tmp_path / "stop").write_text("47")
    stopped = forks.run(tmp_path, *command)
    assert stopped.code == 143 and "resume" not in stopped.err.splitlines()[-1]
    assert max(checkpoint.files(tmp_path / "run" / "checkpoints")) == 47
    again = forks.run(tmp_path, *command, "callbacks=doctor")  # who looks on may come and go
    assert again.code == 0 and "continued at step 47" in again.out, again.err
    measured = measured_of(tmp_path)
    ends = [
        checkpoint.newest(folder / "run" / "checkpoints")[1]["model"]
        for folder in (tmp_path, whole)
    ]
    assert same(*ends)  # its best weights are the best of its own directory
    finished = forks.run(tmp_path, *command)
    assert finished.code == 0 and "continued at step 60" in finished.out
    assert measured_of(tmp_path) == measured and measured.keys() >= {
        "seconds",
        "time",
    }  # it has only looked at it
    (tmp_path / "file.ckpt").rename(tmp_path / "moved.ckpt")
    moved = forks.run(tmp_path, *JOB, "run_dir=run", "resume=moved.ckpt")
    assert moved.code == 0 and "continued at step 60" in moved.out
    shutil.copy(checkpoint.path_of(whole / "run" / "checkpoints", 60), tmp_path / "file.ckpt")
    assert "did not start from file.ckpt" in refused(forks, tmp_path, *command)


def test_a_step_back_within_the_run(forks, whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    back = (*JOB, "run_dir=run", "resume=run/checkpoints/step_00000040.ckpt")
    (tmp_path / "stop").write_text("47")
    stopped = forks.run(tmp_path, *back)
    assert stopped.code == 143 and "continued at step 40" in stopped.out
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"result.json", "evaluation.json"} and "model.safetensors" in left
    done = forks.run(tmp_path, *back)
    assert done.code == 0 and "continued at step 47" in done.out
    assert (tmp_path / "run" / "report.html").is_file()
    assert same(weights(tmp_path / "run"), weights(whole / "run"))


def test_overwrite_is_not_among_what_is_typed_to_go_on(forks, whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    (tmp_path / "stop").write_text("30")
    stopped = forks.run(tmp_path, *JOB, "run_dir=run", "seed=3", "resume=never", "overwrite=true")
    assert stopped.code == 143 and "overwrite" not in stopped.err and "resume=" not in stopped.err
    # Nothing of the old run is left to be taken for the new one's.
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "provenance",
        "report.html",
        "status.json",
    ]
    assert list(checkpoint.files(tmp_path / "run" / "checkpoints")) == [30, 20]
    assert forks.run(tmp_path, *JOB, "run_dir=run", "seed=3").code == 0


def test_files_that_are_no_runs_are_not_replaced(forks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.md").write_text("mine")
    (tmp_path / "run" / ".mine.part").write_text("mine")
    assert "model.md" in refused(forks, tmp_path, *JOB, "run_dir=run")


def test_checkpoints_that_are_gone_are_missed(forks, whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "its checkpoints are missing" in refused(forks, tmp_path, *JOB, "run_dir=run", code=3)


def test_a_damaged_best_does_not_hold_up_a_run_that_is_done(forks, whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    best = json.loads((tmp_path / "run" / "result.json").read_text())["best"]["step"]
    path = checkpoint.path_of(tmp_path / "run" / "checkpoints", best)
    newest = max(checkpoint.files(path.parent))
    assert newest != best
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for arguments in ((*JOB, "run_dir=run"), ("task=evaluate", "run=run", "trusted=[test_rundir]")):
        done = forks.run(tmp_path, *arguments)
        assert done.code == 0 and path.name in done.err and f"step_{newest:08d}.ckpt" in done.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    # Not the best of other weights than those that are shared.
    assert result["best"] is None and result["steps"] == newest
    assert f"from step {newest}" in (tmp_path / "run" / "model.md").read_text()
    last = checkpoint.load(checkpoint.path_of(path.parent, newest))["model"]
    assert same(
        weights(tmp_path / "run"), {name: tensor.contiguous() for name, tensor in last.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2024", "1e3", "nan"])
def test_a_folder_may_be_named_by_a_number(forks, tmp_path, name):
    done = forks.run(tmp_path, *JOB, "max_steps=2", "epochs=null", f"run_dir={name}")
    assert done.code == 0 and f"evaluate run={name}" in done.out, done.err
    done = forks.run(tmp_path, "task=evaluate", f"run={name}", "trusted=[test_rundir]")
    assert done.code == 0 and "test" in done.out, done.err


def test_a_result_outlives_a_command_that_is_refused_in_its_sweep(forks, tmp_path):
    sweep = ("-m", *JOB, "hydra.sweep.dir=all")
    assert forks.run(tmp_path, *sweep, "seed=0").code == 0
    before = json.loads((tmp_path / "all" / "0" / "result.json").read_text())
    assert forks.run(tmp_path, *sweep, "seed=5").code == 2
    assert json.loads((tmp_path / "all" / "0" / "result.json").read_text()) == before


def test_a_copy_by_hard_links_stays_as_it_is(forks, whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    checkpoint.path_of(tmp_path / "run" / "checkpoints", 60).unlink()
    (tmp_path / "run" / ".lock").write_text("old")
    shutil.copytree(tmp_path / "run", tmp_path / "backup", copy_function=os.link)
    before = contents(tmp_path / "backup")
    done = forks.run(tmp_path, *JOB, "run_dir=run")
    assert done.code == 0, done.err
    assert contents(tmp_path / "backup") == before
    assert same(weights(tmp_path / "run"), weights(whole / "run"))


@pytest.mark.slow
def test_an_evaluation_on_other_classes_is_refused(forks, tmp_path):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for folder, names in (("a", ("bird", "cat", "dog")), ("b", ("aardvark", "cat", "dog"))):
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
            for i in range(20):
                pixels = torch.randint(0, 255, (8, 8, 3), generator=generator, dtype=torch.uint8)
                Image.frombytes("RGB", (8, 8), pixels.numpy().tobytes()).save(
                    tmp_path / folder / name / f"{i}.png"
                )
    images = ("dataset=image_folder", "dataset.cache=false", "batch_size=8", "epochs=1")
    assert forks.run(tmp_path, *images, "dataset.root=a", "run_dir=run").code == 0
    assert (
        forks.run(
            tmp_path, "task=evaluate", "run=run", "trusted=[test_rundir]", "dataset.root=a"
        ).code
        == 0
    )
    assert "'aardvark'" in refused(
        forks, tmp_path, "task=evaluate", "run=run", "trusted=[test_rundir]", "dataset.root=b"
    )


def test_a_signal_while_a_checkpoint_is_read_does_not_make_it_a_damaged_one(tmp_path, monkeypatch):
    """Its exception would come up in the middle of safetensors' code, which gives another one for
    it.
    """
    path = checkpoint.path_of(tmp_path, 1)
    checkpoint.save(path, {"step": 1, "callbacks": {}, "weight": torch.ones(3)})
    digest, before = checkpoint.digest, signal.getsignal(signal.SIGTERM)

    def signalled(*arguments):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            return digest(*arguments)
        except stopping.Interrupted:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr(checkpoint, "digest", signalled)
    monkeypatch.setattr(stopping, "received", None)
    monkeypatch.setattr(signals, "can_raise", True)
    signal.signal(signal.SIGTERM, signals.handle)
    try:
        with pytest.raises(stopping.Interrupted):
            checkpoint.newest(tmp_path)
        monkeypatch.setattr(stopping, "received", None)
        heard = []
        with signals.calling(heard.append):
            assert checkpoint.newest(tmp_path)[0] == path
        assert heard == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_was_measured_stays_that_of_the_run_that_has_ended(tmp_path):
    now = RunResult(steps=20, total_steps=20, numbers={"test/acc": 0.5})
    for before, kept in (
        ({"steps": 20, "seconds": 3.5, "speed": "fast", "mfu": 0.5, "test/acc": 1.0}, True),
        ({"steps": 10, "seconds": 3.5}, False),  # this one has trained the rest
        ({"steps": 20, "seconds": "x", "speed": "fast"}, False),  # damaged
        ([], False),
    ):
        (tmp_path / "result.json").write_text(json.dumps(before))
        result = now.evaluated_again(RunResult.read(tmp_path))
        expected = RunResult(steps=20, seconds=3.5, speed="fast", numbers=now.numbers)
        assert result == (expected if kept else now)


def test_a_step_is_also_told_as_an_epoch_where_a_run_has_several():
    texts = {}
    for step, last, epochs in ((238, 280, 20.0), (150, 150, 37.5), (20, 200, 1.0), (7, None, None)):
        result = RunResult(numbers={"step": last, "epoch": epochs})
        texts[step] = result.moment(step)
    assert texts == {
        238: "epoch 17 (step 238)",
        150: "epoch 37.5 (step 150)",
        20: "step 20",
        7: "step 7",
    }


@pytest.mark.skipif(
    not hasattr(os, "waitid"), reason="only some systems keep processes that have ended"
)
def test_no_process_of_git_is_left_in_the_training(forks, tmp_path):
    fault = [
        f"+callbacks.fault.{setting}"
        for setting in ("_target_=faults.Fault", "kind=children", "step=2", "rank=0")
    ]
    done = forks.run(
        tmp_path, "dataset=synthetic", "max_steps=2", "report=false", "run_dir=run", *fault
    )
    assert done.code == 0 and (tmp_path / "children").read_text() == "none", done.err
    assert json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))["seconds"]


class Fail(Callback):
    """Raises a TrainingError after the step whose number is in the file `fail`, where there is
    one.
    """

    def on_step_end(self, trainer):
        if Path("fail").exists() and trainer.step == int(Path("fail").read_text()):
            raise TrainingError(f"{trainer.step} is no good.\nType something else.")


def test_a_run_that_failed_says_why_until_it_goes_on(forks, whole, tmp_path):
    command = (*JOB, "+callbacks.fail._target_=test_rundir.Fail", "run_dir=run")
    for step in (5, 25):  # without and with a checkpoint
        (tmp_path / "fail").write_text(str(step))
        failed = forks.run(tmp_path, *command)
        assert (failed.code, failed.err) == (
            3,
            f"error: {step} is no good.\nType something else.\n",
        )
        assert failed.out.splitlines()[-1] == "report   run/report.html"
        found = {
            "overrides": [*command],
            "error": f"{step} is no good.\nType something else.",
            "code": 3,
        }
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert {name: value for name, value in result.items() if value is not None} == found
        assert [job.status for job in read_jobs(tmp_path)] == ["failed"]
        seen = read_run(tmp_path / "run")
        offered = {purpose for purpose, _ in origin(seen) + commands(seen)}
        with_weights = {"Evaluate it", "Make predictions"}
        expected = {"Started by", "Resume the run once the cause is fixed"}
        assert offered == (expected | with_weights if step > 20 else expected)
    refused(forks, tmp_path, *command, "seed=1")  # which leaves it as it is
    (tmp_path / "fail").unlink()
    assert forks.run(tmp_path, *command, "report=false").code == 0
    assert (
        same(weights(tmp_path / "run"), weights(whole / "run"))
        and not (tmp_path / "run" / "report.html").exists()
    )


def test_a_reason_is_left_once_and_takes_no_results_place(tmp_path):
    assert write_failure(tmp_path, TrainingError("one"), 3)
    assert not write_failure(tmp_path, TrainingError("two"), 3)
    assert RunResult.read(tmp_path).error == "one"
    typed = [f"dataset.columns=[{','.join(['age'] * 1000)}]"]  # one of any length counts
    whole = {"overrides": typed, "best": None, "seconds": 1.0}
    json_files.write_json(tmp_path / "result.json", whole)
    assert not write_failure(tmp_path, TrainingError("three"), 3)
    assert finished(tmp_path) == RunResult(overrides=typed, seconds=1.0)
    (tmp_path / "file").touch()
    assert not write_failure(tmp_path / "file", TrainingError("nowhere"), 3)


def test_a_step_that_is_not_finite_is_replayed_by_the_command_that_is_printed(forks, tmp_path):
    typed = ["dataset=synthetic", "optimizer.lr=1e30", "report=false", "run_dir=a b"]
    failed = forks.run(tmp_path, *typed)
    first, _, third = failed.err.splitlines()[-3:]
    found = first.partition(": in step ")[2]
    command = third.partition("To replay that step: ")[2]
    assert failed.code == 3 and found.endswith("the loss is nan (learning rate 3.17e28).")
    again = forks.run(tmp_path, *shlex.split(command)[2:])
    assert again.code == 3 and again.err.splitlines()[-3].endswith(f": in step {found}")
    (state,) = checkpoint.files(tmp_path / "a b" / "not_finite")
    kept = f"batch_{state + 1:08d}.safetensors"
    whole = load_file(tmp_path / "a b" / "not_finite" / kept)
    (folder,) = (tmp_path / "runs").glob("*/not_finite")
    assert same(whole, load_file(folder / kept))


class OfDicts(test_samples.OfDicts):
    def predict_batch(self, batch):
        return self.model(batch["inputs"])


BATCHES_OF_DICTS = [
    "dataset._target_=test_samples.make_data",
    "trainer._target_=test_rundir.OfDicts",
    "model._target_=test_samples.Net",
]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (BATCHES_OF_DICTS, ["evaluate", "predict"]),
        (["dataset=synthetic"], ["evaluate", "predict"]),
        (
            ["dataset=text", "dataset.path=text", "dataset.length=8", "model=gpt", "model.width=8"],
            ["evaluate", "generate"],
        ),
    ],
)
def test_the_commands_that_are_offered_work_for_data_that_are_no_files(
    forks, tmp_path, typed, offered
):
    (tmp_path / "text").write_text("to be or not to be\n" * 40)
    trained = forks.run(tmp_path, *typed, "max_steps=2", "run_dir=run", "report=false")
    assert trained.code == 0, trained.err
    after = [command for _, command in commands(read_run(tmp_path / "run"))]
    assert [shlex.split(command)[2] for command in after] == offered
    for command in after[:2]:
        done = forks.run(tmp_path, *shlex.split(command)[2:])
        assert done.code == 0 and done.out, done.err


def test_a_command_that_would_fail_again_is_not_offered(tmp_path):
    slower = ["Train again with a lower learning rate"]
    replayed = [*slower, "Replay the failed step"]
    for error, code, offered in (
        (TrainingError("the disk is full"), 3, ["Resume the run once the cause is fixed"]),
        (NotFinite("it is nan\nlower it"), 3, slower),
        (NotFinite("it is nan\nlower it\nTo replay it: x", replay=Path("x y")), 3, replayed),
        (UserError("no such file"), 2, ["Resume the run once the cause is fixed"]),
    ):
        (tmp_path / "result.json").unlink(missing_ok=True)
        assert write_failure(tmp_path, error, code, ["dead: a\nuse GELU"])
        result = RunResult.read(tmp_path)
        assert result.doctor == ["dead: a\nuse GELU"]
        config = {"optimizer.lr": 1e4}
        run = Run(tmp_path, config, result, state="failed", overrides=["seed=1", "run_dir=x"])
        [started, *others] = origin(run)
        assert started[0] == "Started by" and [purpose for purpose, _ in others] == offered
        assert started[1].endswith("seed=1 run_dir=x")
        if offered and isinstance(error, NotFinite):
            assert others[0][1].endswith("seed=1 optimizer.lr=1000")
            assert result.error == "it is nan\nlower it"
        if offered == replayed:
            assert others[1][1].endswith(" 'resume=x y' seed=1 log_every=1")
