"""A sweep from its first check to its table: Hydra's callback, and `python -m stoker.sweeps.sweep DIR`.

Before the first job it checks that the sweep goes with what is in its directory. At the end, or whenever you ask, it
prints the table and writes sweep.csv and sweep.html.
"""

import importlib
import itertools
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from stoker.command import exit_codes, settings, subcommand
from stoker.runs import rundir
from stoker.sweeps import jobs, table
from stoker.sweeps.jobs import JOB, STATUSES, SWEEP, Job, SweepRecord
from stoker.sweeps.table import Sweep
from stoker.trainer import files, launch
from stoker.trainer.errors import UserError, cause, log, printable


class SweepCallback(Callback):
    """Hydra's callback for a sweep. It ends one by a SystemExit: Hydra turns any Exception into a warning."""

    def __init__(self) -> None:
        self.refused = False
        self.planned: int | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        try:
            self.begin(config)
        except (UserError, OSError) as error:
            self.refused = True
            raise SystemExit(exit_codes.report(error)) from None

    def begin(self, config: DictConfig) -> None:
        """Check the sweep, and announce a grid; a search does that itself, once it knows its keys."""
        if launch.world_size() > 1:
            program = " ".join(launch.program())
            raise UserError(
                f"-m: a sweep is one process. Type {program} -m ... devices=N, without torchrun."
            )
        settings.check("sweep.on_error", config.sweep.on_error)
        folder = Path(config.hydra.sweep.dir)
        planned = jobs_of_grid(config)
        check_goes_on(folder, planned or [])
        if planned:
            self.planned = len(planned)
        rundir.make(folder, "hydra.sweep.dir")
        sweeper = str(config.hydra.sweeper.get("_target_"))
        if sweeper.startswith("stoker."):
            register(sweeper)
        else:
            count = self.planned or config.sweep.get("trials")
            jobs.announce(folder, SweepRecord(sys.argv[1:], count))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        if self.refused:
            return
        ended = jobs.read_jobs(folder) if jobs.announced else []
        if ended:
            exit_codes.codes += [
                job.code for job in ended if job.code and job.is_within(self.planned)
            ]
            print()
            try:
                report(folder, ended, draws=config.get("report") is not False)
            except Exception as error:
                exit_codes.report(error)
        elif {path.name for path in folder.glob("*")} <= {"multirun.yaml", SWEEP}:
            # No job has begun: a mistake leaves nothing behind.
            (folder / "multirun.yaml").unlink(missing_ok=True)
            (folder / SWEEP).unlink(missing_ok=True)


def register(sweeper: str) -> None:
    """Make one of our sweepers known to Hydra, which knows only those in hydra_plugins."""
    module, _, name = sweeper.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the libraries below Ax
            Plugins.instance().register(getattr(importlib.import_module(module), name))
    except ImportError as error:
        raise UserError(f"sweep: its sweeper cannot be imported ({error}).") from None


def jobs_of_grid(config: DictConfig) -> list[list[str]] | None:
    """What is typed for each job of a grid, in their order; None for a search, which proposes them as it goes.

    Also None where the jobs' directories are not named by their numbers.
    """
    sweep = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    is_grid = config.hydra.runtime.choices["hydra/sweeper"] == "basic"
    if not is_grid or sweep["subdir"] != "${hydra.job.num}":
        return None
    typed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    typed += OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices = {}
    for override in parser.parse_overrides(typed):
        key = override.get_key_element()
        if override.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            choices[key] = [f"{key}={override.get_value_element_as_str()}"]
    return [list(job) for job in itertools.product(*choices.values())]


def check_goes_on(folder: Path, planned: list[list[str]]) -> None:
    """Raise UserError if the directory of one of these jobs is another job's.

    A directory in which no training has begun is free. Settings that change no result may differ, unless the jobs
    themselves differ in them.
    """
    varied = jobs.varied([jobs.settings_of(typed) for typed in planned])

    def compared(typed: list[str]) -> dict[str, str]:
        return {
            key: value
            for key, value in jobs.settings_of(typed).items()
            if key in varied or jobs.changes_results(key)
        }

    for name, typed in enumerate(planned):
        place = folder / str(name)
        before = rundir.read_result(place / JOB)
        has_begun = (place / "config.yaml").exists() or (place / "checkpoints").exists()
        if not has_begun or not rundir.is_list(before):
            continue
        different = jobs.differences(compared(typed), compared(before["overrides"]))
        if different:
            raise UserError(
                f"hydra.sweep.dir={folder}: job {name} in it has other settings: {different}.\n"
                + jobs.what_to_type(folder)
            )


def report(folder: Path, ended: list[Job], draws: bool = True) -> None:
    """Print the lines that end a sweep; write sweep.csv, sweep.html and the report of the best job."""
    from stoker.sweeps import page

    sweep = Sweep(folder, ended)
    summary = summary_of(sweep)
    best = best_command(sweep)
    again = command_for_the_rest(sweep)
    lines = table.lines(sweep)
    if best:
        lines.append(f"best     {best}")
    kind = "sweep" if sweep.swept else "runs"
    lines.append(f"{kind:<9}{folder}: {summary}; also in sweep.csv, and drawn in sweep.html")
    if again:
        lines.append(f"go on    {again}")
    print("\n".join(map(printable, lines)), flush=True)
    table.write_csv(sweep, folder / "sweep.csv")
    drawn = draw_best(sweep) if best and draws and sweep.swept else None
    files.write_text(folder / "sweep.html", page.of_sweep(sweep, summary, best, again, drawn))


def summary_of(sweep: Sweep) -> str:
    """'4 done, 1 failed, 1 not begun'."""
    counts = Counter(job.status for job in sweep.jobs)
    parts = [f"{counts[status]} {status}" for status in STATUSES if counts[status]]
    if sweep.missing:
        parts.append(f"{sweep.missing} not begun")
    if not sweep.compares:
        parts.append("on different data, so that none is the best")
    return ", ".join(parts)


def best_command(sweep: Sweep) -> str | None:
    """The command of the best configuration, without the seed if the seed was swept; None where none is the best."""
    best = sweep.groups[0][0] if sweep.groups else None
    if best is None or sweep.value(best) is None or not sweep.compares:
        return None
    left_out = {"sweep", "run_dir"}
    if "seed" in sweep.keys:
        left_out.add("seed")
    typed = [
        one for one in best.overrides if re.split(r"[./=]", one.lstrip("+"))[0] not in left_out
    ]
    return rundir.command(typed, start=launch.program())


def command_for_the_rest(sweep: Sweep) -> str | None:
    """The command that runs the jobs that are left; None where none is left, or some are still running."""
    if not sweep.swept or not sweep.to_run or sweep.of("running"):
        return None
    command = jobs.command_to_continue(sweep.folder)
    if sweep.of("failed") and not sweep.is_search:  # or it would stop at the same job again
        command = command.replace(" sweep.on_error=stop ", " sweep.on_error=continue ")
    return command


def draw_best(sweep: Sweep) -> str | None:
    """Draw the report of the best job and return the link to it; None, after a warning, if that fails."""
    from stoker.runs import report

    job = sweep.groups[0][0]
    folder = sweep.folder / job.name
    if folder.is_symlink():  # it may lead anywhere
        return None
    try:
        print(printable(f"report   {report.write(folder)}"), flush=True)
    except Exception as error:
        name = printable(job.name)
        log.warning("job %s: its report could not be drawn (%s).", name, cause(error))
        return None
    return f"{quote(job.name)}/{report.NAME}"


def show(folder: Path) -> None:
    """Print the table of the sweep, or of the runs, in a folder, and write its files again; UserError if it has none."""
    ended = jobs.read_jobs(folder)
    if not ended:
        inside = sorted(filter(jobs.is_sweep, folder.glob("*")))
        example = f", as in {inside[-1]}" if inside else ""
        raise UserError(
            f"{folder}: there is no job of a sweep in it, and no run. Type the directory of a sweep{example}."
        )
    report(folder, ended)


def main(arguments: list[str]) -> int:
    """Run `python -m stoker.sweeps.sweep DIR` and return the exit code."""
    usage = "python -m stoker.sweeps.sweep DIR, the directory of a sweep, or a folder of runs."
    return subcommand.run(arguments, usage, lambda folder: bool(jobs.read_jobs(folder)), show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
