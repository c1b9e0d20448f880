"""The search by Optuna: Hydra's sweeper with pruning and a storage to go on from, and the callback that prunes."""

import itertools
import math
from pathlib import Path

import optuna
from hydra.utils import instantiate
from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides
from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper
from optuna.trial import TrialState

from stoker.runs import rundir
from stoker.sweeps import sweep
from stoker.sweeps.search import (
    at_once,
    check_goes_on,
    check_mode,
    maximizes,
    nothing_to_search,
    outcome,
    space_of,
    trials_of,
)
from stoker.trainer import launch, parallel
from stoker.trainer.callbacks import Callback, Monitor
from stoker.trainer.device import mix_seed
from stoker.trainer.errors import UserError

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Search(OptunaSweeper):
    """Hydra's Optuna sweeper, with a loop of its own: that one knows no pruned trials and does not go on after a kill.

    The job of a trial has the trial's number, and so has its folder. What the sampler draws for a trial is a function
    of (seed, number, the results before): a search that was killed and goes on proposes what it would have proposed.
    """

    def __init__(self, sampler, **others):
        super().__init__(sampler, **others)
        self.sampler = sampler

    def sweep(self, arguments):
        cfg = self.sweeper.config
        self.folder, self.launcher = Path(cfg.hydra.sweep.dir).resolve(), self.sweeper.launcher
        trials, jobs, self.maximize = trials_of(cfg), at_once(cfg), maximizes(cfg)
        self.space, self.fixed, self.deleted = distributions(
            space_of(cfg, arguments, self.sweeper.params)
        )
        if not self.space and not self.sweeper.custom_search_space_extender:
            raise nothing_to_search("optuna")
        # A key that is not there is noticed before anything is written.
        self.sweeper.validate_batch_is_legal([self.typed(self.ask(optuna.create_study(), 0))])
        with rundir.held(self.folder):
            check_goes_on(
                self.folder, [f"{key}={value}" for key, value in self.fixed.items()], self.space
            )
            study = self.open_study()
            sweep.announce(self.folder, trials, self.space)
            self.run(study, [trial for trial in study.trials if self.is_left_off(trial)])
            while to_go := max(
                0, trials - sum(trial.state.is_finished() for trial in study.trials)
            ):
                first = len(study.trials)
                self.run(study, [self.ask(study, first + i) for i in range(min(to_go, jobs))])

    def ask(self, study, number):
        """The trial of this number, its values drawn."""
        study.sampler = self.make_sampler(number)
        trial = study.ask(self.space)
        if self.sweeper.custom_search_space_extender:
            self.sweeper.custom_search_space_extender(self.sweeper.config, trial)
        trial.set_user_attr("folder", str(self.folder))
        return trial

    def is_left_off(self, trial):
        """Whether a search in this folder was killed while the trial ran. Other folders may be at work on the study."""
        return trial.user_attrs.get("folder") == str(self.folder) and not trial.state.is_finished()

    def typed(self, trial):
        """What is typed for the job of a trial."""
        return [
            *(f"{key}={value}" for key, value in {**trial.params, **self.fixed}.items()),
            *self.deleted,
        ]

    def make_sampler(self, number):
        """The sampler for the trial of this number."""
        config = dict(self.sampler)
        if config.get("_partial_"):
            raise UserError(
                "hydra/sweeper/sampler=grid: every combination is what sweep=grid runs. Type sweep=grid."
            )
        if config.get("seed") is not None:
            config["seed"] = mix_seed(config["seed"], "trial", number) % 2**32
        allowed = ("hydra_plugins.hydra_optuna_sweeper.*", "optuna.samplers.*")
        return instantiate(config, _execution_whitelist_=allowed)

    def open_study(self):
        """The study in the storage, made where it is not there; UserError where it cannot be, or is another one."""
        direction, sweeper = (
            "maximize" if self.maximize else "minimize",
            self.sweeper.config.hydra.sweeper,
        )
        try:
            place, name = place_of(sweeper, self.folder)
            study = optuna.create_study(
                storage=open_storage(place),
                study_name=name,
                direction=direction,
                load_if_exists=True,
            )
            before = study.direction.name.lower()
        except Exception as error:  # of SQLAlchemy, of a driver that is not installed, of Optuna
            reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"hydra.sweeper.storage: it cannot be opened ({reason}).") from None
        if before != direction:
            what = f"holds a search for the {'lowest' if self.maximize else 'highest'} value"
            raise UserError(f"hydra.sweep.dir={self.folder} {what}. Type another hydra.sweep.dir.")
        for key, old in (
            (key, old) for trial in study.trials for key, old in trial.distributions.items()
        ):
            try:
                optuna.distributions.check_distribution_compatibility(old, self.space.get(key, old))
            except ValueError as error:
                reason = f"its trials have another space for {key} ({str(error).rstrip('.')})"
                raise UserError(
                    f"hydra.sweep.dir={self.folder}: {reason}. Type another hydra.sweep.dir."
                ) from None
        return study

    def run(self, study, trials):
        """Runs the jobs of these trials, where no killed search has left a result, and tells what became of all."""
        folders = {trial.number: self.folder / str(trial.number) for trial in trials}
        todo = [trial for trial in trials if outcome(folders[trial.number]) is None]
        # Of a trial in a storage, which may be anybody's, nothing is typed that this search would not have drawn.
        drawn = [
            trial
            for trial in todo
            if isinstance(trial, optuna.Trial) or trial.distributions == self.space
        ]
        todo = [(trial.number, self.typed(trial)) for trial in drawn]
        # A launcher counts the jobs up from a number: one launch for those that follow one another.
        for _, group in itertools.groupby(enumerate(todo), key=lambda pair: pair[1][0] - pair[0]):
            numbers, overrides = zip(*(job for _, job in group), strict=True)
            self.launcher.launch(overrides, initial_job_idx=numbers[0])
        for number, folder in folders.items():
            state, best = outcome(folder) or ("failed", None)
            if best:
                check_mode(self.maximize, best["name"], best.get("mode"))
            if state == "complete":
                study.tell(number, best["value"])
            else:  # the value of a pruned one is the last that it has reported
                study.tell(
                    number, state=TrialState.PRUNED if state == "pruned" else TrialState.FAIL
                )
        if "mode" in study.user_attrs:  # of trials that have failed for it
            check_mode(self.maximize, study.user_attrs["monitor"], study.user_attrs["mode"])


def distributions(overrides):
    """({key: distribution}, {key: value}, [~key]) of the overrides, of each key the last; UserError for a bad one."""
    space, fixed, deleted = {}, {}, []
    for override in overrides:
        try:
            searched, values, without = create_params_from_overrides([override])
        except (ValueError, AssertionError, NotImplementedError) as error:
            reason = (str(error).splitlines() or ["this is no space to search"])[0]
            raise UserError(f"{override}: {reason}") from None
        for key in {**searched, **values}:
            space.pop(key, None)
            fixed.pop(key, None)
        space, fixed, deleted = space | searched, fixed | values, deleted + without
    return space, fixed, deleted


def place_of(sweeper, folder):
    """(where the study is stored, its name) of the sweeper's settings and the sweep's folder."""
    if sweeper.storage is None:
        # Other trials are waited for, for a minute.
        return f"sqlite:///{folder / 'study.db'}?timeout=60", sweeper.study_name or "search"
    return sweeper.storage, sweeper.study_name or folder.name


def open_storage(place):
    """The storage of an SQLAlchemy URL, or of `journal:FILE`: a file that several machines may share by NFS."""
    kind, _, path = place.partition(":")
    if kind == "journal":
        journal = optuna.storages.journal
        return journal.JournalStorage(journal.JournalFileBackend(path))
    return optuna.storages.RDBStorage(place)


class Pruning(Callback):
    """Reports each evaluation's monitored number to the trial, and ends the training where the pruner sees no hope.

    The trial's clock is evaluations, so that trials with other batch sizes can be compared.
    """

    def __init__(self, place, study, trial, pruner, monitor="auto", mode="auto"):
        self.place, self.study_name, self.number, self.pruner = place, study, trial, pruner
        self.watched = Monitor(monitor, mode)

    def on_fit_start(self, trainer):
        """UserError where the search looks for the other end of this number."""
        self.watched.on_fit_start(trainer)
        storage = open_storage(self.place)
        study = optuna.load_study(study_name=self.study_name, storage=storage, pruner=self.pruner)
        name, mode = self.watched.name, "max" if self.watched.sign > 0 else "min"
        if launch.is_first():
            study.set_user_attr("monitor", name)
            study.set_user_attr("mode", mode)
        check_mode(study.direction.name == "MAXIMIZE", name, mode)
        study_id = storage.get_study_id_from_name(self.study_name)
        self.trial = optuna.Trial(
            study, storage.get_trial_id_from_study_id_trial_number(study_id, self.number)
        )
        self.reported = max(study.trials[self.number].intermediate_values, default=0)
        if trainer.step and self.reported == self.evaluations(trainer):
            self.stop_if_hopeless(trainer)  # the run was killed before it was asked

    def on_log(self, trainer, row):
        now = self.evaluations(trainer)
        if (
            self.watched.name not in row
            or not trainer.is_time(self.every(trainer))
            or now < self.reported
        ):
            return
        if now > self.reported and launch.is_first():
            self.trial.report(row[self.watched.name], now)
        self.reported = max(now, self.reported)
        self.stop_if_hopeless(trainer)

    def stop_if_hopeless(self, trainer):
        """Stops all processes of the trial where the first one, which asks, sees no hope: others could see another."""
        if parallel.add_up(int(launch.is_first() and self.trial.should_prune())):
            trainer.stop(f"pruned at evaluation {self.reported}", "pruned")

    def every(self, trainer):
        return trainer.eval_every or trainer.steps_per_epoch

    def evaluations(self, trainer):
        return math.ceil(trainer.step / self.every(trainer))
