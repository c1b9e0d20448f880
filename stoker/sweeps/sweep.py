"""Check and report a sweep, in a Hydra callback and in the command that prints the table again.

Before the first job, the callback checks that the sweep matches the one in its directory. At the
end, and for `stoker redraw DIR`, the table is printed, and sweep.csv and sweep.html are written.
"""

import contextlib
from pathlib import Path
from typing import Any

import hydra.utils
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # private: it lists the jobs
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from stoker.command import check, exit_codes
from stoker.command.shell import command
from stoker.runs import lock
from stoker.runs.directory import CONFIG, SWEEP, make, remove_untrained
from stoker.sweeps import jobs, launchers, progress, ranking, table
from stoker.sweeps.jobs import STATUSES
from stoker.sweeps.table import Sweep
from stoker.trainer import files, launch, stopping, terminal
from stoker.trainer.errors import UserError, printable

PLACE = "hydra.sweep.dir"

holding = contextlib.ExitStack()  # holds the lock of a running grid


class SweepCallback(Callback):
    """Hydra's callback for a sweep. It exits on an error, because Hydra would only warn."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        try:
            self.begin(config)
        except (UserError, OSError, HydraException, OmegaConfBaseException) as error:
            raise SystemExit(exit_codes.report(error)) from None

    def begin(self, config: DictConfig) -> None:
        """Check the sweep, and announce a grid. A search is announced once its keys are known."""
        if launch.world_size() > 1:
            raise UserError(
                "-m: a sweep starts its own processes, so do not start it with torchrun. "
                f"Type {command([])} -m ... strategy=ddp devices=N."
            )
        launchers.check(config)
        is_search = "trials" in config.sweep
        sweeper = config.hydra.runtime.choices["hydra/sweeper"]
        if sweeper != ("stoker_optuna" if is_search else "basic"):
            kind = "optuna" if is_search else "grid"
            raise UserError(
                f"hydra/sweeper={sweeper}: sweep={kind} has its own sweeper. Remove this setting."
            )
        planned = [] if is_search else jobs_of_grid(config)
        if planned:
            check_first(config, planned[0])
        folder = Path(config.hydra.sweep.dir)
        varied = ranking.varied([jobs.settings_of(typed) for typed in planned])
        jobs.check_command(folder, varied)
        make(folder, PLACE)
        if is_search:
            # On its own, Hydra only finds the sweepers in hydra_plugins.
            target = config.hydra.sweeper._target_
            Plugins.instance().register(hydra.utils.get_class(target))
        else:
            if not lock.is_held(folder):
                # While the lock is held, the index shows the sweep as running.
                holding.enter_context(lock.held(folder))
            progress.announce(folder, len(planned), varied)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Redirect the output of a job in this process to the job's file."""
        is_here = progress.ends is not None
        if is_here and is_training(config):
            progress.redirect(Path(config.hydra.runtime.output_dir))

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:
        """Print the line for the job that has ended."""
        progress.output.close()
        progress.show_ends()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        progress.output.close()
        holding.close()
        if progress.ends is None:  # the sweep was rejected
            return
        folder = Path(config.hydra.sweep.dir)
        sweep = Sweep(folder)
        exit_codes.codes += [job.code for job in sweep.jobs if job.code]
        if not sweep.jobs:  # interrupted early, or a task that writes no results
            if stopping.received is not None and is_training(config):
                remove_untrained(folder)
            for name in ("multirun.yaml", SWEEP):
                (folder / name).unlink(missing_ok=True)
            return
        is_refused = all(job.code == exit_codes.USER_ERROR for job in sweep.jobs)
        if is_refused and not any(folder.glob(f"*/{CONFIG}")):
            remove_untrained(folder)
            return
        print()
        exit_codes.has_summary = True
        try:
            report(sweep)
        except Exception as error:
            exit_codes.report(error)


def is_training(config: DictConfig) -> bool:
    """Return whether the jobs are training runs, which write results."""
    return config.task == "train" and config.overfit is None


def jobs_of_grid(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each job of a grid, in order."""
    task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    params = config.hydra.sweeper.params or {}
    more = [f"{key}={value}" for key, value in params.items()]
    loader = GlobalHydra.instance().config_loader()
    parser = OverridesParser.create(config_loader=loader)
    [planned] = BasicSweeper.split_arguments(parser.parse_overrides([*more, *task]), None)
    return [list(typed) for typed in planned]


def check_first(config: DictConfig, typed: list[str]) -> None:
    """Raise UserError if the settings of the first job are invalid: the others usually are too.

    `typed` are the overrides of the job.
    """
    cfg = GlobalHydra.instance().config_loader().load_sweep_config(config, typed)
    with open_dict(cfg):  # as Hydra does for a job
        cfg.hydra.job.num = 0
        cfg.hydra.job.id = "job_id_for_0"
    hydra_config = HydraConfig.instance()
    before = hydra_config.cfg
    hydra_config.set_config(cfg)  # the checks read the typed settings from here
    try:
        with open_dict(cfg):
            del cfg["hydra"]
        check.check_config(cfg)
    finally:
        hydra_config.cfg = before


def report(sweep: Sweep) -> None:
    """Print the table and summary of a sweep, and write sweep.csv and sweep.html."""
    from stoker.sweeps import page

    summary = summary_of(sweep)
    best = best_command(sweep)
    again = command_for_the_rest(sweep)
    for line in table.lines(sweep):
        terminal.show(printable(line))
    # Commands are not wrapped, so that you can copy them.
    if best:
        print(printable(f"best     {best}"), flush=True)
    page_path = sweep.folder / "sweep.html"
    terminal.show(printable(f"sweep    {sweep.folder}: {summary}; the table is in sweep.csv"))
    terminal.show(printable(f"report   {page_path}"))
    if again:
        print(printable(f"resume   {again}"), flush=True)
    table.write_csv(sweep, sweep.folder / "sweep.csv")
    typed = again or jobs.command_to_continue(sweep.folder)
    html = page.of_sweep(sweep, summary, best, typed, is_over=again is None)
    files.write_text(page_path, html)
    table.list_in_index(sweep)


def summary_of(sweep: Sweep) -> str:
    """Return the number of jobs by status, such as '4 done, 1 failed, 1 not started'."""
    counts = {status: len(sweep.of(status)) for status in STATUSES}
    counts["not started"] = sweep.missing
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def best_command(sweep: Sweep) -> str | None:
    """Return the command of the best configuration, without a swept seed or fold.

    None if no job has a value.
    """
    if not sweep.best:
        return None
    overrides = sweep.best[0].overrides
    return command([typed for typed in overrides if typed.partition("=")[0] not in sweep.left_out])


def command_for_the_rest(sweep: Sweep) -> str | None:
    """Return the command that runs the remaining jobs; None if none remain or some are running."""
    repeats = sweep.of("failed") and not sweep.is_search  # a search does not repeat failed trials
    remains = sweep.missing or sweep.of("unfinished") or repeats
    if remains and not sweep.of("running"):
        return jobs.command_to_continue(sweep.folder)
    return None
