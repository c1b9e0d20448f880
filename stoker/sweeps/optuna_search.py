"""The Optuna search, which can resume from its study, and the callback that prunes trials."""

import math
import os
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from hydra_plugins.hydra_optuna_sweeper._impl import (  # private: it parses ranges, Hydra 1.4
    create_optuna_distribution_from_override,
)
from omegaconf import DictConfig
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from stoker.runs.directory import RESULT
from stoker.runs.lock import held
from stoker.runs.result import finished
from stoker.sweeps import launchers, progress
from stoker.sweeps.jobs import read_job, settings_of
from stoker.sweeps.sweep import check_first
from stoker.trainer import files, launch, parallel
from stoker.trainer.callbacks import Callback, Monitor
from stoker.trainer.errors import UserError, first_line
from stoker.trainer.seeding import mix_seed
from stoker.trainer.trainer import Trainer

STUDY = "study.log"  # the file in the sweep's folder that holds the study
NAME = "search"  # the name of the study in the file
# The targets that a config may use as a sampler.
SAMPLERS = ("hydra_plugins.hydra_optuna_sweeper.*", "optuna.samplers.*")

optuna.logging.set_verbosity(optuna.logging.ERROR)


class OptunaSearch(Sweeper):
    """A sweeper with the samplers and ranges of Hydra's Optuna sweeper, but with its own loop.

    Hydra's sweeper supports neither pruning nor resuming. Here, the values of a trial depend only
    on (seed, number, earlier results), so a resumed search proposes the same trials. A trial has
    the same number as its job and its folder. Results are read from the folder, so a killed search
    can resume.
    """

    config: DictConfig

    def __init__(self, sampler: DictConfig, **_: Any) -> None:
        self.sampler = sampler

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config = config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        cfg = self.config
        self.folder = Path(cfg.hydra.sweep.dir).resolve()
        self.total = cfg.sweep.trials
        count = launchers.trials_at_once(cfg)
        space = [f"{key}={values}" for key, values in cfg.sweep.space.items()]
        ranges = [*space, *arguments]
        parsed = OverridesParser.create().parse_overrides(ranges)
        last = {override.key_or_group: override for override in parsed}  # typed overrides win
        self.space: dict[str, BaseDistribution] = {}
        self.fixed: list[str] = []
        for override in last.values():
            if override.is_sweep_override():
                self.space[override.get_key_element()] = distribution_of(override)
            else:
                self.fixed.append(str(override.input_line))
        if not self.space:
            raise UserError(
                "sweep=optuna: there is nothing to search. Type a key and its range, "
                "as in 'optimizer.lr=tag(log, interval(1e-4, 1e-1))'."
            )
        example = typed(self.draw(optuna.create_study()))
        check_first(cfg, [*example, *self.fixed])
        varied = list(settings_of(example))
        with held(self.folder):
            self.study = self.open_study()
            progress.announce(Path(cfg.hydra.sweep.dir), self.total, varied, sorted(varied))
            while trials := self.next_trials(count):
                self.run(trials)

    def run(self, trials: list[FrozenTrial]) -> None:
        """Run these trials, whose numbers are consecutive, and report their results to the study.

        As in a grid, a job that is already finished does not run again.
        """
        overrides = [[*typed(trial), *self.fixed] for trial in trials]
        self.launcher.launch(overrides, initial_job_idx=trials[0].number)
        for trial in trials:
            result = finished(self.folder / str(trial.number))
            if result is None or result.best is None:
                self.study.tell(trial.number, state=TrialState.FAIL)
            elif result.stopped_by("pruned"):  # Optuna uses the last value that the trial reported
                self.study.tell(trial.number, state=TrialState.PRUNED)
            else:
                sign = -1 if result.best.mode == "max" else 1  # the study minimizes
                self.study.tell(trial.number, sign * result.best.value)

    def next_trials(self, count: int) -> list[FrozenTrial]:
        """Return consecutive trials that an earlier process did not finish or, if there are none,
        up to `count` new ones; [] at the end of the search. A failed trial is not repeated.
        """
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            if read_job(self.folder / str(trial.number)).status == "failed":
                self.study.tell(trial.number, state=TrialState.FAIL)
        begun = self.study.get_trials(states=(TrialState.RUNNING,))
        if begun:
            return [one for i, one in enumerate(begun) if one.number == begun[0].number + i]
        trials = self.study.trials
        # Trials are drawn in memory and then stored whole, so that a killed search leaves no trial
        # with only some of its values.
        memory = optuna.create_study()
        memory.add_trials(trials)
        for _ in range(min(self.total - len(trials), count)):
            self.draw(memory)
            self.study.add_trial(memory.trials[-1])
        return self.study.trials[len(trials) :]

    def draw(self, study: optuna.Study) -> optuna.Trial:
        """Return the next trial of the study, with its values."""
        study.sampler = self.make_sampler(len(study.trials))
        return study.ask(self.space)

    def make_sampler(self, number: int) -> BaseSampler:
        """Return the sampler for the trial with this number."""
        config: dict[str, Any] = dict(self.sampler)
        if config.get("_partial_"):
            raise UserError(
                "hydra/sweeper/sampler=grid: to run every combination, type sweep=grid instead."
            )
        if config.get("seed") is not None:
            config["seed"] = mix_seed(config["seed"], "trial", number) % 2**32
        return instantiate(config, _execution_whitelist_=SAMPLERS)

    def open_study(self) -> optuna.Study:
        """Open or create the study; raise UserError if it belongs to another search."""
        try:
            cut_last_line(self.folder / STUDY)
            storage = open_storage(self.folder)
            study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True)
            optuna.create_study().add_trials(study.trials)  # checks that their values are in range
        except Exception as error:  # the file is damaged
            raise UserError(
                f"hydra.sweep.dir={self.folder}: {STUDY} cannot be read ({first_line(error)}). "
                "Choose a different hydra.sweep.dir."
            ) from None
        if not study.trials and any(self.folder.glob(f"*/{RESULT}")):
            raise UserError(
                f"hydra.sweep.dir={self.folder}: it has jobs, but {STUDY} has no trials. "
                "Choose a different hydra.sweep.dir."
            )
        # The file is untrusted, so accept only trials that this search could have drawn.
        for trial in study.trials:
            changed = trial.distributions.items() ^ self.space.items()
            if changed:
                keys = ", ".join(sorted({key for key, _ in changed}))
                raise UserError(
                    f"hydra.sweep.dir={self.folder}: its trials have a different range for {keys}. "
                    "Choose a different hydra.sweep.dir."
                )
        return study


def distribution_of(override: Override) -> BaseDistribution:
    """Return the distribution of a range; raise UserError if it is invalid."""
    try:
        distribution: BaseDistribution = create_optuna_distribution_from_override(override)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(f"{override.input_line}: {first_line(error)}") from None
    return distribution


def typed(trial: optuna.Trial | FrozenTrial) -> list[str]:
    """Return a trial's parameter values as overrides."""
    return [f"{key}={value}" for key, value in trial.params.items()]


def cut_last_line(path: Path) -> None:
    """Remove an incomplete last line, which a full disk or a crash of the machine can leave.

    Raise OSError for a link.
    """
    with files.open_plain(path, os.O_RDWR | os.O_CREAT) as file:
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)


def open_storage(folder: Path) -> BaseStorage:
    """Open the file with the study of a search. Several processes can use it, also over NFS."""
    path = str(folder / STUDY)
    return JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))


def open_trial(folder: Path, pruner: BasePruner) -> optuna.Trial:
    """Return the trial of the job with this folder."""
    storage = open_storage(folder.parent)
    study = optuna.load_study(study_name=NAME, storage=storage, pruner=pruner)
    study_id = storage.get_study_id_from_name(NAME)
    number = int(folder.name)
    return optuna.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))


class Pruning(Callback):
    """Report each evaluation to the trial, and stop training if the pruner says so.

    Trials are compared after the same number of evaluations instead of steps, since their batch
    sizes may differ.
    """

    def __init__(self, trial: optuna.Trial, monitor: str = "auto", mode: str = "auto") -> None:
        self.trial = trial
        self.watched = Monitor(monitor, mode)

    def on_fit_start(self, trainer: Trainer) -> None:
        self.watched.on_fit_start(trainer)
        stored = self.trial.study.trials[self.trial.number]
        self.reported = max(stored.intermediate_values, default=0)
        if trainer.step and self.reported == self.evaluations(trainer):
            self.stop_if_hopeless(trainer)  # the run was killed before it asked the pruner

    def on_log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        now = self.evaluations(trainer)
        is_evaluation = self.watched.name in row and trainer.is_due(self.every(trainer))
        if not is_evaluation or now < self.reported:
            return
        if now > self.reported and launch.is_first():
            value = -self.watched.sign * row[self.watched.name]  # the study minimizes
            self.trial.report(value if math.isfinite(value) else math.nan, now)
        self.reported = now
        self.stop_if_hopeless(trainer)

    def stop_if_hopeless(self, trainer: Trainer) -> None:
        """Stop all processes of the trial if the pruner on rank 0 says so."""
        if parallel.add_up(int(launch.is_first() and self.trial.should_prune())):
            trainer.stop(f"pruned at evaluation {self.reported}", "pruned")

    def every(self, trainer: Trainer) -> int:
        return trainer.eval_every or trainer.steps_per_epoch

    def evaluations(self, trainer: Trainer) -> int:
        return math.ceil(trainer.step / self.every(trainer))
