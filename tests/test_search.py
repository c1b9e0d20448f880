"""Searches: what Optuna proposes is trained, pruned, told, and gone on with after a kill; by
real runs.
"""

import importlib.util
import inspect
import json
import os
import random
import signal
from pathlib import Path

import hydra
import pytest
from forks import TRAIN, Forks
from omegaconf import OmegaConf

from stoker.command import messages
from stoker.sweeps.jobs import read_job, read_jobs
from stoker.sweeps.table import Sweep
from stoker.trainer.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "sweep"
OPTUNA = importlib.util.find_spec("optuna") is not None
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform")
needs_optuna = pytest.mark.skipif(not OPTUNA, reason="needs pip install -e '.[optuna]'")
SMALL = ["epochs=3", "callbacks.progress=null", "hydra.sweep.dir=s"]
ASHA = ["-m", "sweep=optuna", "sweep/pruner=asha", *SMALL]
LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


@pytest.fixture(scope="module")
def forks():
    made = Forks(modules=["stoker.sweeps.optuna_search"] if OPTUNA else [])
    yield made
    made.close()


def study_of(folder):
    import optuna

    from stoker.sweeps.optuna_search import open_storage

    return optuna.load_study(study_name="search", storage=open_storage(folder / "s"))


def trials_of(folder):
    """What is the same in two searches that are: no times."""
    return [
        (trial.number, trial.state.name, trial.params, trial.intermediate_values, trial.values)
        for trial in study_of(folder).trials
    ]


def best_of(folder):
    """The best value of the jobs, as the table shows it."""
    sweep = Sweep(folder / "s")
    return sweep.value(sweep.groups[0][0])


def weights_of(folder):
    return {
        path.parent.name: path.read_bytes() for path in (folder / "s").glob("*/model.safetensors")
    }


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """The folder of an undisturbed search, some trials of which are pruned."""
    folder = tmp_path_factory.mktemp("whole")
    done = forks.run(folder, *ASHA, "sweep.trials=8")
    assert (done.code, done.err) == (0, "")
    return folder


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_a_killed_search_ends_as_if_nothing_had_been(forks, whole, tmp_path, large):
    generator = random.Random(0)
    for i in range(30 if large else 1):
        folder = tmp_path / str(i)
        for kill in range(2):
            watch = (
                f"s/{generator.choice((0, 1, 2) if kill == 0 else (4, 5, 6))}/"
                + generator.choice(
                    ("config.yaml", "metrics.jsonl", "checkpoints/step_*.ckpt", "result.json")
                )
            )
            moment = {"signal": signal.SIGKILL, "watch": watch, "delay": generator.random() * 0.05}
            done = forks.run(folder, *ASHA, "sweep.trials=8", signals=[moment])
            assert done.code in (0, -signal.SIGKILL), done.err
        done = forks.run(folder, *ASHA, "sweep.trials=8")
        assert (done.code, done.err) == (0, "")
        assert trials_of(folder) == trials_of(whole)
        assert weights_of(folder) == weights_of(whole)
    assert "8/8" not in forks.run(folder, *ASHA, "sweep.trials=8").out  # nothing to do


# A search that is killed once it has stored trial 3.
KILLED = """
import os, runpy, sys
from optuna.storages import JournalStorage

def kill_after(name):
    method = getattr(JournalStorage, name)
    def counted(self, *given, **more):
        result = method(self, *given, **more)
        trial = result if name == "create_new_trial" else given[0]
        if self.get_trial(trial).number == 3 and os.path.exists("kill"):
            left = int(open("kill").read())
            open("kill", "w").write(str(left - 1))
            if left == 0:
                os._exit(9)
        return result
    setattr(JournalStorage, name, counted)

kill_after("create_new_trial")
runpy.run_path(%r, run_name="__main__")
"""


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_a_search_killed_after_it_stored_a_trial_keeps_it(forks, whole, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED % str(TRAIN))
    (tmp_path / "kill").write_text("0")
    killed = forks.run(tmp_path, *ASHA, "sweep.trials=8", script=script)
    assert killed.code == 9, killed.err
    done = forks.run(tmp_path, *ASHA, "sweep.trials=8")
    assert (done.code, done.err) == (0, "")
    assert trials_of(tmp_path) == trials_of(whole)
    assert weights_of(tmp_path) == weights_of(whole)


@needs_fork
@needs_optuna
def test_a_trial_ends_where_the_pruner_says_so_and_is_told_so(whole):
    """The same reports, given to Optuna's pruner by hand in the same order."""
    import optuna

    study = optuna.create_study(
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )
    states = []
    for trial in study_of(whole).trials:
        own, pruned = study.ask(), []
        for evaluation, value in sorted(trial.intermediate_values.items()):
            own.report(value, evaluation)
            pruned.append(own.should_prune())
        states.append(
            optuna.trial.TrialState.PRUNED if any(pruned) else optuna.trial.TrialState.COMPLETE
        )
        assert trial.state is states[-1]
        assert not any(pruned[:-1]), "it went on after the pruner's word"
        study.tell(own, state=states[-1], values=None if any(pruned) else trial.value)

        folder = whole / "s" / str(trial.number)
        result = json.loads((folder / "result.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        curve = [row["val/acc"] for row in rows if "val/acc" in row]
        assert [-value for value in curve] == list(trial.intermediate_values.values())
        assert result["best"]["value"] == max(curve)
        assert result["steps"] == result["total_steps"] * len(curve) / 3
        assert len(curve) == 3 or result["stopped"] == {
            "kind": "pruned",
            "text": f"pruned at evaluation {len(curve)}",
        }
    assert len(set(states)) == 2
    assert [job.status for job in read_jobs(whole / "s")] == [
        "pruned" if state is optuna.trial.TrialState.PRUNED else "done" for state in states
    ]


@needs_fork
@needs_optuna
def test_a_trial_of_several_processes_is_pruned(forks, tmp_path, large):
    if not large:
        pytest.skip("seven starts of the agent: pytest --large")
    several = ["sweep/space=none", "strategy=ddp", "devices=2", "device=cpu"]
    lr = "optimizer.lr=choice(1e-5,1e-2)"
    done = forks.run(tmp_path, *ASHA, *several, lr, "sweep.trials=6")
    assert done.code == 0, done.err
    trials = study_of(tmp_path).trials
    pruned = [trial.state.name == "PRUNED" for trial in trials]
    assert [job.status == "pruned" for job in read_jobs(tmp_path / "s")] == pruned
    assert any(pruned) and not all(pruned)
    assert [len(trial.intermediate_values) < 3 for trial in trials] == pruned
    own = ["model._target_=examples.autoencoder.Autoencoder", "loss=mse"]
    own += ["trainer._target_=examples.autoencoder.AutoencoderTrainer"]
    done = forks.run(tmp_path / "own", *ASHA, *several, LR, "sweep.trials=2", *own)
    assert done.code == 0 and len(trials_of(tmp_path / "own")) == 2, done.err


@needs_optuna
def test_a_range_that_was_changed_in_a_file_is_another_search(tmp_path):
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    from stoker.sweeps.optuna_search import OptunaSearch

    searching = OptunaSearch.__new__(OptunaSearch)
    searching.folder = tmp_path
    size = CategoricalDistribution([32, 64])
    rate = FloatDistribution(1e-4, 1e-1, log=True)
    searching.space = {"batch_size": size, "optimizer.lr": rate}
    searching.open_study().ask(searching.space)
    assert len(searching.open_study().trials) == 1
    for key, changed in (
        ("batch_size", CategoricalDistribution([8, 16])),
        ("optimizer.lr", FloatDistribution(1e-4, 1e-2, log=True)),
    ):
        searching.space = {"batch_size": size, "optimizer.lr": rate, key: changed}
        with pytest.raises(UserError, match=f"its trials have a different range for {key}"):
            searching.open_study()


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_a_failed_trial_is_marked_and_the_search_goes_on(forks, tmp_path):
    typed = [
        "-m",
        "sweep=optuna",
        "sweep/space=none",
        "optimizer.lr=choice(1e-2,1e30)",
        "sweep.trials=5",
        *SMALL,
    ]
    done = forks.run(tmp_path, *typed)
    failed = [job.status == "failed" for job in read_jobs(tmp_path / "s")]
    assert done.code == 3 and any(failed) and not all(failed) and len(failed) == 5
    assert [trial.state.name == "FAIL" for trial in study_of(tmp_path).trials] == failed
    assert forks.run(tmp_path, *typed, "sweep.trials=6").code == 3
    assert len(trials_of(tmp_path)) == 6
    done = forks.run(tmp_path / "stop", *typed, "sweep.on_error=stop")
    assert done.code == 3
    assert [job.status for job in read_jobs(tmp_path / "stop" / "s")][-1] == "failed"
    assert len(trials_of(tmp_path / "stop")) == failed.index(True) + 1
    # The same command goes on after the failed trial, also after half a line was written.
    study = tmp_path / "stop" / "s" / "study.log"
    with study.open("a") as file:
        file.write('{"op_code": 6')
    for _ in range(len(failed)):
        forks.run(tmp_path / "stop", *typed, "sweep.on_error=stop")
    assert trials_of(tmp_path / "stop") == trials_of(tmp_path)[:5]
    study.unlink()  # or, for example, from an earlier version
    done = forks.run(tmp_path / "stop", *typed, "sweep.on_error=stop")
    assert done.code == 2 and "it has jobs, but study.log has no trials" in done.err


@needs_fork
@needs_optuna
def test_the_good_end_is_that_of_the_monitored_number(forks, whole, tmp_path):
    typed = ["-m", "sweep=optuna", "sweep/space=none", LR, "sweep.trials=2", *SMALL]
    assert forks.run(tmp_path, *typed, "monitor=val/loss").code == 0
    for folder, sign in ((tmp_path, 1), (whole, -1)):
        assert study_of(folder).best_value == sign * best_of(folder)
    other = forks.run(tmp_path, *typed)
    assert (
        other.code == 2
        and "this sweep was started with monitor=val/loss, not (default)" in other.err
    )
    own = ["model._target_=examples.autoencoder.Autoencoder", "loss=mse"]
    own += ["trainer._target_=examples.autoencoder.AutoencoderTrainer"]
    assert forks.run(tmp_path / "own", *typed, *own).code == 0
    assert study_of(tmp_path / "own").best_value == best_of(tmp_path / "own")


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_a_search_with_other_settings_is_another_one(forks, whole):
    before = trials_of(whole)
    done = forks.run(whole, *ASHA, "sweep.trials=9", "epochs=4")
    assert done.code == 2 and "this sweep was started with epochs=3, not 4." in done.err
    done = forks.run(whole, *ASHA, "sweep.trials=9", "batch_size=interval(16,64)")
    assert done.code == 2 and "started with batch_size=(default), not interval" in done.err
    done = forks.run(whole, *ASHA, "sweep.trials=9", "sweep.space.batch_size='choice(8,16)'")
    assert done.code == 2 and "started with sweep.space.batch_size=(default), not" in done.err
    said = (whole / "s" / "sweep.json").read_bytes()
    done = forks.run(whole, *ASHA, "sweep/space=none", LR)
    first, _, again = done.err.splitlines()
    assert done.code == 2 and done.out == "" and (whole / "s" / "sweep.json").read_bytes() == said
    assert ": this sweep was started with sweep/space=(default), not none." in first
    assert "sweep/space" not in again and "sweep.trials=8 hydra.sweep.dir=" in again
    assert trials_of(whole) == before


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_of_a_foreign_study_nothing_is_typed(forks, tmp_path):
    """A search goes on only with trials that it could have drawn."""
    import optuna

    from stoker.sweeps.optuna_search import open_storage

    for name, value in (("model._target_", "antigravity.Net"), ("optimizer.eps", "${oc.env:HOME}")):
        folder = tmp_path / name
        (folder / "s").mkdir(parents=True)
        study = optuna.create_study(study_name="search", storage=open_storage(folder / "s"))
        study.ask({name: optuna.distributions.CategoricalDistribution([value])})
        typed = ["-m", "sweep=optuna", "sweep/space=none", LR, "sweep.trials=3", *SMALL]
        done = forks.run(folder, *typed)
        keys = ", ".join(sorted([name, "optimizer.lr"]))
        assert done.code == 2 and f"its trials have a different range for {keys}." in done.err
        assert [trial.state.name for trial in study_of(folder).trials] == ["RUNNING"]
        assert [path.name for path in (folder / "s").iterdir()] == ["study.log"]


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_mistakes_have_one_word_and_leave_nothing(forks, tmp_path):
    for typed, word in (
        (["sweep.trials=0"], "error: sweep.trials=0: expected a whole number of at least 1.\n"),
        (
            ["model.hiden=interval(1,3)"],
            "error: model.hiden: no such key. Did you mean 'model.hidden'?",
        ),
        (["epochs=0"], "error: epochs=0: expected a whole number of at least 1.\n"),
        (["optimizer.lr=tag(log,interval(0,1))"], "error: optimizer.lr=tag(log,interval(0,1)): "),
        (
            ["sweep/space=none"],
            "error: sweep=optuna: there is nothing to search. Type a key and its range",
        ),
        (
            ["sweep/pruner=mediann"],
            "error: sweep/pruner=mediann: not a valid choice. Did you mean 'median'?",
        ),
        (
            ["hydra/sweeper=optuna"],
            "error: hydra/sweeper=optuna: sweep=optuna has its own sweeper. Remove this setting.\n",
        ),
        (["hydra/sweeper/sampler=grid"], "type sweep=grid instead.\n"),
        (
            ["hydra.sweeper.direction=maximize"],
            "error: hydra.sweeper.direction: no such key.\nType --help to see the keys.\n",
        ),
    ):
        done = forks.run(tmp_path, "-m", "sweep=optuna", *SMALL, *typed)
        assert done.code == 2 and word in done.err and len(done.err.splitlines()) <= 3, done.err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["err", "out"]
    assert forks.run(tmp_path, "sweep=optuna").err == (
        "error: sweep=optuna: this setting is for sweeps. Add -m to start a sweep.\n"
    )


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_a_study_that_cannot_be_read_is_refused(forks, tmp_path):
    """Also one that is a link to somebody else's file, or that has a value of another type."""
    import optuna

    from stoker.sweeps.optuna_search import open_storage

    (tmp_path / "file").write_text("{}\n")
    for name in ("damaged", "link", "value"):
        study = tmp_path / name / "s" / "study.log"
        study.parent.mkdir(parents=True)
        if name == "damaged":
            study.write_text("a\nb\n")
        elif name == "link":
            study.symlink_to(tmp_path / "file")
        else:
            rate = optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)
            trial = optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params={"optimizer.lr": 0.015625},
                distributions={"optimizer.lr": rate},
            )
            storage = open_storage(study.parent)
            optuna.create_study(study_name="search", storage=storage).add_trial(trial)
            study.write_text(study.read_text().replace("0.015625", '"${oc.env:HOME}"'))
        before = study.read_text()
        done = forks.run(tmp_path / name, "-m", "sweep=optuna", "sweep/space=none", LR, *SMALL)
        assert done.code == 2 and f"{study.parent}: study.log cannot be read (" in done.err
        assert [path.name for path in study.parent.iterdir()] == ["study.log"]
        if name == "value":  # Optuna records each attempt to create the study
            assert study.read_text().startswith(before)
        else:
            assert study.read_text() == before


@pytest.mark.slow
@needs_fork
@needs_optuna
def test_the_launcher_of_several_processes(forks, tmp_path):
    """The trials of one batch have numbers that follow one another, and the jobs have the same
    ones.
    """
    typed = ["-m", "sweep=optuna", "sweep.trials=5", "sweep.at_once=2", *SMALL]
    assert forks.run(tmp_path, *typed).code == 0
    trials = study_of(tmp_path).trials
    assert [trial.number for trial in trials] == list(range(5))
    for trial in trials:
        job = read_job(tmp_path / "s" / str(trial.number))
        assert {key: job.settings[key] for key in trial.params} == {
            key: str(v) for key, v in trial.params.items()
        }


@needs_optuna
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("pruner/*.yaml")), ids=lambda path: path.stem)
def test_the_keys_of_a_pruner_are_its_constructors_arguments(path):
    node = OmegaConf.to_container(OmegaConf.load(path))
    arguments = inspect.signature(hydra.utils.get_object(node.pop("_target_"))).parameters
    assert node.keys() == arguments.keys()


def test_a_sweeper_that_is_not_installed_says_what_to_type():
    from hydra.errors import MissingConfigException

    error = MissingConfigException("", "hydra/sweeper/sampler/tpe", [])
    assert messages.explanation(error).endswith("Type pip install -e '.[optuna]'.")
