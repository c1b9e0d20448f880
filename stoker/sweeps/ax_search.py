"""The search by Ax: Hydra's sweeper, which goes on after a failed trial, and with a search that was killed."""

import logging
import warnings
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra_plugins.hydra_ax_sweeper._core import CoreAxSweeper, create_ax_raw_data
from omegaconf import OmegaConf

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
from stoker.trainer.errors import UserError


class Search(CoreAxSweeper):
    """Hydra's Ax sweeper, whose state is in memory alone, with the folders of the jobs for a storage.

    What is in them is told to Ax first, in the order of their numbers.
    """

    def sweep(self, arguments):
        for name in ("ax", "botorch", "gpytorch", "linear_operator"):
            logging.getLogger(name).setLevel(logging.ERROR)
            warnings.filterwarnings("ignore", module=f"{name}.*")
        self.folder, self.max_trials = Path(self.sweep_dir).resolve(), trials_of(self.config)
        self.max_batch_size, self.maximize = at_once(self.config), maximizes(self.config)
        self.experiment = OmegaConf.merge(self.experiment, {"minimize": not self.maximize})
        self.early_stopper.minimize = not self.maximize
        parsed = OverridesParser.create().parse_overrides(space_of(self.config, arguments))
        last = {one.key_or_group: one for one in parsed}
        searched = {key: one.input_line for key, one in last.items() if one.is_sweep_override()}
        self.fixed = [one.input_line for key, one in last.items() if key not in searched]
        self.keys = [*searched, *self.ax_params]
        if not self.keys:
            raise nothing_to_search("ax")
        with rundir.held(self.folder):
            check_goes_on(self.folder, self.fixed, self.keys)
            sweep.announce(self.folder, self.max_trials, self.keys)
            super().sweep([*searched.values()])

    def setup_ax_client(self, arguments):
        """The client, when it knows the trials in the folder. Those that were left off are run to their end first."""
        try:
            client = super().setup_ax_client(arguments)
        except (ValueError, AssertionError, TypeError) as error:
            reason = (str(error).splitlines() or ["this is no space to search"])[0]
            raise UserError(f"{' '.join(arguments)}: {reason}") from None
        self.numbers = {}  # {Ax's index of a trial: the number of its job}
        before = [job for job in sweep.read_jobs(self.folder) if job.name.isdecimal()]
        for job in before:
            values = {key: value_of(job.settings.get(key)) for key in self.keys}
            try:
                index = client.attach_trial(values)
            except ValueError as error:
                raise UserError(
                    f"{self.folder / job.name}: this is no trial of this search ({error})."
                ) from None
            self.numbers[index] = int(job.name)
            self.run(client, {index: values})
        self.max_trials = max(0, self.max_trials - len(before))
        return client

    def sweep_over_batches(self, ax_client, list_of_trials):
        for trial in list_of_trials:
            self.numbers[trial.trial_index] = max(self.numbers.values(), default=-1) + 1
        values = {
            trial.trial_index: dict(one.split("=", 1) for one in trial.overrides)
            for trial in list_of_trials
        }
        self.run(ax_client, values)

    def run(self, client, trials):
        """Runs the jobs of {index: values}, where there is no result yet, and tells Ax what became of them."""
        folders = {index: self.folder / str(self.numbers[index]) for index in trials}
        todo = [index for index in trials if outcome(folders[index]) is None]
        overrides = [
            [*(f"{key}={trials[index][key]}" for key in self.keys), *self.fixed] for index in todo
        ]
        self.validate_batch_is_legal(overrides)
        if todo:
            self.launcher.launch(overrides, initial_job_idx=self.numbers[todo[0]])
        for index, folder in folders.items():
            state, best = outcome(folder) or ("failed", None)
            if state == "failed":
                client.mark_trial_abandoned(index)  # a failed one would be proposed again
                continue
            check_mode(self.maximize, best["name"], best["mode"])
            raw = create_ax_raw_data(best["value"], self.experiment.objective_name, self.is_noisy)
            client.complete_trial(index, raw)


def value_of(text):
    """A trial's value as Ax has it, of what was typed for its job: a number, true or false, or any other text."""
    value = None if text is None else OverridesParser.create().parse_override(f"key={text}").value()
    return value if isinstance(value, (bool, int, float)) else text
