"""The search by Ax, which survives failed trials and resumes a killed search."""

import contextlib
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from ax.exceptions.core import SearchSpaceExhausted
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra_plugins.hydra_ax_sweeper._core import (  # private: _core, makes Ax's client, 1.4
    CoreAxSweeper,
    create_ax_raw_data,
)
from omegaconf import DictConfig, OmegaConf

from stoker.sweeps.jobs import read_jobs
from stoker.sweeps.search import Search, Trials
from stoker.trainer.errors import UserError, first_line


class AxSearch(Search):
    """Hydra's Ax sweeper, and its settings, with our loop.

    Ax keeps its state in memory. The folders of the jobs are its storage, which it reads first, in
    the order of their numbers.
    """

    name = "ax"

    def __init__(self, ax_config: DictConfig, max_batch_size: int | None) -> None:
        for library in ("ax", "botorch", "gpytorch", "linear_operator"):
            logging.getLogger(library).setLevel(logging.ERROR)
            warnings.filterwarnings("ignore", module=f"{library}.*")
        self.core = CoreAxSweeper(ax_config, max_batch_size)

    def define(self, searched: dict[str, Override]) -> list[str]:
        minimize = not self.maximize
        self.core.experiment = OmegaConf.merge(self.core.experiment, {"minimize": minimize})
        self.core.early_stopper.minimize = minimize
        self.searched = [str(override.input_line) for override in searched.values()]
        names = [override.get_key_element() for override in searched.values()]
        self.names = list(dict.fromkeys([*names, *self.core.ax_params]))
        if not self.names:
            return []
        [example] = self.make_client().get_next_trials(max_trials=1).values()
        return self.typed(example)

    def make_client(self) -> Any:
        try:
            return self.core.setup_ax_client(self.searched)
        except (ValueError, AssertionError, TypeError) as error:
            raise UserError(f"{' '.join(self.searched)}: {first_line(error)}") from None

    def typed(self, values: Mapping[str, Any]) -> list[str]:
        """Return the overrides for the values of a trial."""
        return [f"{name}={values[name]}" for name in self.names]

    def open(self) -> Trials:
        self.client = self.make_client()
        self.indices: dict[int, int] = {}  # of the trials in Ax, by the number of their jobs
        begun: Trials = {}
        for job in read_jobs(self.folder):
            if not job.name.isdecimal():
                continue
            values = {key: value_of(job.settings.get(key.lstrip("+"))) for key in self.names}
            try:
                index = self.client.attach_trial(values)
            except ValueError as error:
                raise UserError(
                    f"{self.folder / job.name}: this trial is not from this search ({error})."
                ) from None
            self.indices[int(job.name)] = index
            begun[int(job.name)] = self.typed(values)
        return begun

    def propose(self, count: int) -> Trials:
        count = min(count, self.trials - len(self.indices))
        if count <= 0 or self.has_converged():
            return {}
        proposed: Trials = {}
        with contextlib.suppress(SearchSpaceExhausted):
            for index, values in self.client.get_next_trials(max_trials=count).items():
                number = max(self.indices, default=-1) + 1
                self.indices[number] = index
                proposed[number] = self.typed(values)
        return proposed

    def has_converged(self) -> bool:
        """Whether the last proposals were no better than earlier ones (`ax_config.early_stop`)."""
        best = self.core.get_best_point(self.client) if self.indices else None
        return best is not None and self.core.early_stopper.should_stop(best[1], best[0])

    def tell(self, number: int, state: str, value: float | None) -> None:
        index = self.indices[number]
        if state == "failed":
            self.client.mark_trial_abandoned(index)  # a failed one would be proposed again
            return
        name = self.core.experiment.objective_name
        self.client.complete_trial(index, create_ax_raw_data(value, name, self.core.is_noisy))


def value_of(text: str | None) -> Any:
    """Parse a typed value for Ax: a number, a bool or a string."""
    if text is None:
        return None
    value = OverridesParser.create().parse_override(f"key={text}").value()
    return value if isinstance(value, (bool, int, float)) else text
