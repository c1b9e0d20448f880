"""A sweep, as what is in its job directories says: the table, sweep.csv, sweep.html; `python -m stoker.sweeps.sweep DIR`.

Its Hydra callback looks before the first job whether the sweep goes with what is in the directory, and writes all of
this at the end. A job is a folder with a job.json, which has what was typed for it, or a result.json. They may be
anybody's.
"""

import contextlib
import csv
import functools
import json
import math
import os
import re
import shlex
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from hydra.experimental.callback import Callback

from stoker.command import cli, settings
from stoker.runs import rundir
from stoker.runs.rundir import MOST_SETTINGS, finished, is_list, is_number, is_whole
from stoker.trainer import files, launch
from stoker.trainer.errors import UserError, as_typed, cause, log, printable
from stoker.trainer.readable import number, numbers

JOB, SWEEP = "job.json", "sweep.json"  # what was typed for a job, and for the whole sweep
STATUSES = ("done", "pruned", "running", "unfinished", "failed")
MOST_ROWS = 40  # of the table on a screen
MOST_PROGRESS = 2**16  # bytes of a metrics.jsonl, from its end
announced = False  # whether the sweep of this process goes with what is in its directory
DATA = {
    "dataset",
    *(f"dataset.{key}" for key in ("_target_", "root", "path", "target")),
}  # what says which data it is
GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class Table(Callback):
    """Hydra's callback of a sweep. Only a SystemExit ends one from here: of an Exception Hydra makes a warning."""

    def __init__(self):
        self.refused, self.planned = False, None

    def on_multirun_start(self, config, **_):
        folder = Path(config.hydra.sweep.dir)
        try:
            if launch.world_size() > 1:
                raise UserError(
                    "-m: a sweep is one process. Type python train.py -m ... devices=N, without torchrun."
                )
            settings.check("sweep.on_error", config.sweep.on_error)
            jobs = planned(config)
            check_goes_on(folder, jobs)
            self.planned = len(jobs) if jobs else None
            rundir.make(folder, "hydra.sweep.dir")
            if not str(config.hydra.sweeper.get("_target_")).startswith(
                "stoker."
            ):  # a search of ours looks first
                announce(folder, len(jobs) if jobs else config.sweep.get("trials"))
        except (UserError, OSError) as error:
            self.refused = True
            raise SystemExit(cli.report(error)) from None

    def on_multirun_end(self, config, **_):
        folder = Path(config.hydra.sweep.dir)
        if self.refused:
            return
        if announced and (jobs := read_jobs(folder)):
            cli.codes += [job.code for job in jobs if job.code and job.is_of(self.planned)]
            print()
            try:
                report(folder, jobs, config.get("report") is not False)
            except Exception as error:
                cli.report(error)
        elif {path.name for path in folder.glob("*")} <= {"multirun.yaml", SWEEP}:
            for name in (
                "multirun.yaml",
                SWEEP,
            ):  # nothing was run: a mistake leaves nothing behind
                (folder / name).unlink(missing_ok=True)


def announce(folder, jobs, searched=None):
    """Leaves in the directory what this sweep is, a search with its keys. It goes with all that is there."""
    global announced
    said = {"typed": sys.argv[1:], "jobs": jobs, "search": searched is not None}
    rundir.write_json(
        Path(folder) / SWEEP,
        said | ({"searched": sorted(searched)} if searched is not None else {}),
    )
    announced = True


def planned(config):
    """[[what is typed for a job]] of a grid in the order of the jobs; None for a search, which finds them as it goes.

    None also where the directories are not named by the jobs' numbers.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    sweep = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if config.hydra.sweeper.get("_target_") != GRID or sweep["subdir"] != "${hydra.job.num}":
        return None
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    more = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    [jobs] = BasicSweeper.split_arguments(parser.parse_overrides([*more, *typed]), None)
    return [[override for override in job if not override.startswith("hydra.")] for job in jobs]


def check_goes_on(folder, jobs):
    """UserError where a directory of these jobs is another job's. One in which nothing was trained yet is free.

    What changes no weights may be another setting than before, unless the jobs differ in it.
    """
    varied = swept([setting_of(typed) for typed in jobs or ()])
    for name, typed in enumerate(jobs or ()):
        begun = (
            is_list(before := rundir.read_result(folder / str(name) / JOB)) and before["overrides"]
        )
        if begun is False or not any(
            (folder / str(name) / part).exists() for part in ("config.yaml", "checkpoints")
        ):
            continue
        was, now = setting_of(begun), setting_of(typed)
        other = [
            key
            for key in {**now, **was}
            if was.get(key) != now.get(key) and (key in varied or matters(key))
        ]
        if other:
            differences = ", ".join(
                f"{key}={as_typed(now.get(key, '(default)'))} (was {was.get(key, '(default)')})"
                for key in other[:3]
            )
            again = f"Type another hydra.sweep.dir, or to go on with that one:\n{command(folder)}"
            raise UserError(
                f"hydra.sweep.dir={folder}: job {name} in it has other settings: {differences}.\n{again}"
            )


def matters(key):
    """Whether jobs with another value of it have other results: some change no weights, but which are the best."""
    return key in ("eval_every", "max_minutes") or not settings.may_differ(key)


def begin(folder, number):
    """Writes what was typed for the job into its directory; a failure of an earlier start goes."""
    folder = Path(folder)
    if rundir.has_failed(folder):
        (folder / "result.json").unlink()
    typed = {"number": number, "overrides": cli.typed()}
    if rundir.read_result(folder / JOB) != typed:
        rundir.write_json(folder / JOB, typed)


def pass_over(folder, job):
    """Says that the job is done, and gives what it gave."""
    result = finished(folder)
    best = (
        f", {result['best']['name']} {number(result['best']['value'])}"
        if result.get("best")
        else ""
    )
    print(printable(f"job {job}    {' '.join(cli.typed())}: done{best}"), flush=True)
    return value(folder)


def is_pruned(result):
    """Whether the search that it is of has ended a run early."""
    return rundir.stopped(result).kind == "pruned"


def value(folder):
    """The number that a job gives to a sweeper: what is monitored at its best; None where there is none."""
    best = (finished(folder) or {}).get("best")
    return best["value"] if best else None


@dataclass
class Job:
    """What a job's directory says of it. `best` is result.json's, `note` why it failed or how far it is."""

    name: str
    overrides: list
    status: str
    best: dict | None = None
    test: dict = field(default_factory=dict)
    seconds: float | None = None
    note: str = ""
    code: int = 0

    def __post_init__(self):
        self.settings = setting_of(self.overrides)

    def is_of(self, planned):
        """Whether it is of a sweep of so many jobs: a larger one may have been in its directory before."""
        return planned is None or not self.name.isdecimal() or int(self.name) < planned


def read_jobs(folder):
    """The jobs of a sweep's directory in the order of their names, numbers as numbers; or the runs in any folder."""
    names = (JOB, "result.json") if is_sweep(Path(folder)) else ("config.yaml",)
    paths = {path.parent for name in names for path in Path(folder).glob(f"*/{name}")}
    parts = {path: re.split(r"(\d+)", path.name) for path in paths}
    order = {
        path: [(0, int(part)) if part.isdecimal() else (1, part) for part in parts[path]]
        for path in paths
    }
    return [read_job(path) for path in sorted(paths, key=order.get)]


def read_job(folder):
    from stoker.runs.report import typed_in

    held = rundir.is_held(folder)  # asked first: a job that ends meanwhile has its result then
    result, begun = (rundir.read_result(folder / name) for name in ("result.json", JOB))
    typed = typed_in(folder, next((said for said in (begun, result) if is_list(said)), {})) or []
    job = Job(folder.name, typed, "done")
    if rundir.is_finished(result):
        job.best, job.seconds = result.get("best"), result["seconds"]
        job.test = {
            name: value
            for name, value in result.items()
            if name.startswith("test/") and is_number(value)
        }
        if is_pruned(result):
            job.status, job.note = "pruned", str(rundir.stopped(result))
    elif held:
        job.status, job.note, job.code = "running", progress(folder), 75
    elif result is None and (begun is not None or (folder / "config.yaml").is_file()):
        job.status, job.note, job.code = "unfinished", progress(folder), 3
    else:
        code = result.get("code") if is_whole(result) else None
        job.status, job.code = "failed", code if code in (1, 2, 3) else 3
        job.note = result["error"] if is_whole(result) else "its result.json is none of a run's"
    return job


def progress(folder):
    """'at step 140, loss 0.2546  acc 0.9330': the last rows of a job's metrics.jsonl."""
    try:
        with files.open_plain(folder / "metrics.jsonl") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_PROGRESS))
            lines = file.read(MOST_PROGRESS).splitlines()
    except OSError:
        return "no row yet"
    step, values = 0, ""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                found = {
                    name: value
                    for name, value in row.items()
                    if name.startswith("val/") and is_number(value)
                }
                step, values = row["step"], numbers(found) or values
    return f"at step {step}{', ' * bool(values)}{values}"[:MOST_SETTINGS]


def setting_of(overrides):
    """{key: value as it was typed}, without what is the sweep's own."""
    pairs = (override.partition("=") for override in overrides)
    typed = {key.lstrip("+"): value for key, _, value in pairs}
    return {
        key: value
        for key, value in typed.items()
        if not re.match(r"(sweep|hydra|run_dir)([./]|$)", key)
    }


def swept(settings):
    """The keys that are not the same in the settings of all jobs, in the order typed."""
    keys = dict.fromkeys(key for job in settings for key in job)
    return [key for key in keys if len({job.get(key) for job in settings}) > 1]


@dataclass
class Sweep:
    """The jobs of a directory. `name` is the number that decides, and `high` whether more of it is better.

    `groups` are the jobs that are done, best first; those that differ only in their seed are one group. Behind them
    stand those with another number than the most jobs have, or none. `planned` is how many jobs there are to be, None
    where nobody knows.
    """

    folder: Path
    jobs: list
    keys: list
    name: str
    high: bool
    groups: list
    planned: int | None
    search: bool = False

    @functools.cached_property
    def swept(self):
        """Whether these are a sweep's jobs, and not runs that were started one by one."""
        return is_sweep(self.folder)

    @functools.cached_property
    def compares(self):
        """Whether one can be the best: of single runs on different data that would be the one on the easiest."""
        return self.swept or not DATA & set(swept([job.settings for job in self.of("done")]))

    def of(self, status):
        return [job for job in self.jobs if job.status == status]

    def value(self, job):
        """What decides of this job, None where it has none."""
        return job.best["value"] if job.best and job.best["name"] == self.name else None

    def to_run(self):
        """How many jobs the same command would run: those that failed, those left off, and those not begun.

        A search takes a trial that failed for an answer.
        """
        again = ("unfinished",) if self.search else ("failed", "unfinished")
        return sum(job.status in again for job in self.wanted()) + self.missing()

    def wanted(self):
        """The jobs that the last command was for; a search's trials may have any numbers."""
        return self.jobs if self.search else [job for job in self.jobs if job.is_of(self.planned)]

    def missing(self):
        """How many jobs were not begun."""
        return max(0, (self.planned or 0) - len(self.wanted()))


def read(folder, jobs=None):
    """The Sweep of a directory."""
    jobs = read_jobs(folder) if jobs is None else jobs
    names = Counter((job.best["name"], job.best.get("mode") == "max") for job in jobs if job.best)
    name, high = max(names, key=names.get, default=("", True))
    keys, groups = swept([job.settings for job in jobs]), {}
    sweep = Sweep(Path(folder), jobs, keys, name, high, [], None)
    for job in sweep.of("done"):
        same = (sweep.value(job) is None, *(job.settings.get(key) for key in keys if key != "seed"))
        groups.setdefault(same, []).append(job)

    def order(group):
        mean = mean_of(map(sweep.value, group))
        return (mean is None, -mean if high and mean is not None else mean or 0)

    sweep.groups = sorted(groups.values(), key=order)
    said = rundir.read_result(sweep.folder / SWEEP) or {}
    sweep.planned = said["jobs"] if isinstance(said.get("jobs"), int) else None
    sweep.search = said.get("search") is True
    return sweep


def mean_of(values):
    values = [value for value in values if value is not None]
    return math.fsum(values) / len(values) if values else None


def shown(values, sign="+-"):
    """'0.9888 +- 0.0012', the mean and the deviation; one value alone, and '' for none."""
    values = [value for value in values if value is not None]
    deviation = f" {sign} {number(statistics.stdev(values))}" if len(values) > 1 else ""
    return f"{number(mean_of(values))}{deviation}" if values else ""


def groups(sweep, tests, sign="+-"):
    """[its jobs, how many, what decides, each of the `tests`, seconds] in words of each group, best first."""
    for group in sweep.groups:
        means = [shown([job.test.get(test) for job in group], sign) for test in tests]
        seconds = f"{mean_of(job.seconds for job in group):.1f}"
        value = shown(map(sweep.value, group), sign)
        if not value and (other := group[0].best):
            value = (
                f"{other['name']} {shown([job.best['value'] for job in group if job.best], sign)}"
            )
        yield [ranges(group), str(len(group)), value, *means, seconds]


def tests_of(sweep):
    """The names of the test's numbers of all jobs, as a report has them in order."""
    from stoker.runs import report

    return report.tests_of({name: value for job in sweep.jobs for name, value in job.test.items()})


def test_name(sweep):
    """The test metric of the same name as the one that decides, or the first that there is; '' for none."""
    names, wanted = tests_of(sweep), f"test/{sweep.name.partition('/')[2]}"
    return wanted if wanted in names else next(iter(names), "")


def table(sweep):
    """The lines of the table: a group of jobs each, best first, and then each job that is not done.

    Shown are the settings that differ, or all where none does.
    """
    test, grouped, first = (
        test_name(sweep),
        any(len(group) > 1 for group in sweep.groups),
        sweep.jobs[0],
    )
    keys, all_keys = (
        [key for key in those if not (grouped and key == "seed")]
        for those in (sweep.keys, first.settings)
    )
    rows = [
        [
            "jobs" if grouped else "job",
            *["n"] * grouped,
            sweep.name or "best",
            test or "test",
            "seconds",
            "settings",
        ]
    ]
    for group, (names, count, *means) in zip(sweep.groups, groups(sweep, [test]), strict=True):
        rows.append([names, *[count] * grouped, *means, typed_for(group[0], keys or all_keys)])
    others = [job for status in STATUSES[1:] for job in sweep.of(status)]
    for job in others:
        shown_keys, why = sweep.keys or job.settings, job.note.partition("\n")[0]
        blamed = [key for key in shown_keys if why.startswith(f"{key}={job.settings.get(key)}: ")]
        typed = typed_for(job, [key for key in shown_keys if key not in blamed])
        typed = (
            f"{typed} {why}".strip() if blamed else f"{typed}: {why}"
        )  # what is to blame stands in both
        rows.append([job.name, *[""] * grouped, job.status, "", "", typed])
    if (hidden := len(rows) - 1 - MOST_ROWS) > 0:  # the best and some of those that are not done
        keep = max(MOST_ROWS - len(others), MOST_ROWS // 2)
        rows[keep + 1 : keep + 1 + hidden] = [
            ["...", *[""] * (4 + grouped), f"{hidden} more: see sweep.csv"]
        ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def typed_for(job, keys):
    """What was typed for a job of these keys."""
    typed = {key: job.settings[key] for key in keys if key in job.settings}
    return " ".join(
        f"{key}={value}" if value or key[:1] != "~" else key for key, value in typed.items()
    )


def ranges(jobs):
    """'0-2,5' of the jobs 0, 1, 2 and 5; the first of other names."""
    names = [job.name for job in jobs]
    if not all(name.isascii() and name.isdecimal() and len(name) < 10 for name in names):
        return f"{names[0]} +{len(names) - 1}" if len(names) > 1 else names[0]
    runs = []
    for i in sorted(map(int, names)):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def csv_rows(sweep):
    """The rows of sweep.csv, the header first: a job each, in their order."""
    names = list(dict.fromkeys(job.best["name"] for job in sweep.jobs if job.best))
    tests = list(dict.fromkeys(name for job in sweep.jobs for name in job.test))
    yield ["job", "status", *sweep.keys, *names, *tests, "seconds", "error"]
    for job in sweep.jobs:
        best = {job.best["name"]: job.best["value"]} if job.best else {}
        values = (
            [best.get(name) for name in names]
            + [job.test.get(name) for name in tests]
            + [job.seconds]
        )
        yield [
            job.name,
            job.status,
            *(job.settings.get(key) for key in sweep.keys),
            *values,
            job.note,
        ]


def cell(value):
    """A cell of the file, in one line; in front of a text that a spreadsheet would run as a formula is a '."""
    if not isinstance(value, str):
        return value
    text = printable(" ".join(value.splitlines()))
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@") else text


def best_command(sweep):
    """The command of the best configuration, without the seed where that is one of the settings swept; or None."""
    if not sweep.groups or sweep.value(sweep.groups[0][0]) is None or not sweep.compares:
        return None
    left_out = {"sweep", "run_dir", *["seed"] * ("seed" in sweep.keys)}
    typed = sweep.groups[0][0].overrides
    return rundir.command(
        [one for one in typed if re.split(r"[./=]", one.lstrip("+"))[0] not in left_out]
    )


def command(folder):
    """The command that goes on with a sweep."""
    typed = (rundir.read_result(Path(folder) / SWEEP) or {}).get("typed")
    if not isinstance(typed, list) or not all(isinstance(one, str) for one in typed):
        return f"the same command with {rundir.setting('hydra.sweep.dir', folder)}"
    typed = [one for one in typed if not one.startswith("hydra.sweep.dir=")]
    return shlex.join(["python", "train.py", *typed, rundir.setting("hydra.sweep.dir", folder)])


def report(folder, jobs, draws=True):
    """Prints the lines that end a sweep, and writes its sweep.csv and sweep.html, and the report of its best job."""
    from stoker.sweeps import page

    sweep = read(folder, jobs)
    counts = Counter(job.status for job in jobs)
    said = [f"{counts[status]} {status}" for status in STATUSES if counts[status]]
    if missing := sweep.missing():
        said.append(f"{missing} not begun")
    if not sweep.compares:
        said.append("on different data, so that none is the best")
    said = ", ".join(said)
    goes_on = sweep.swept and sweep.to_run() and not counts["running"]
    best, again = best_command(sweep), command(folder) if goes_on else None
    if again and counts["failed"] and not sweep.search:  # or it would stop again at the same job
        again = again.replace(" sweep.on_error=stop ", " sweep.on_error=continue ")
    lines = table(sweep) + [f"best     {best}"] * bool(best)
    lines.append(
        f"{'sweep' if sweep.swept else 'runs':<9}{folder}: {said}; also in sweep.csv, and drawn in sweep.html"
    )
    lines += [f"go on    {again}"] * bool(again)
    print("\n".join(map(printable, lines)), flush=True)
    with (
        files.replacing(sweep.folder / "sweep.csv") as partial,
        open(partial, "w", newline="", encoding="utf-8") as f,
    ):
        csv.writer(f).writerows([cell(value) for value in row] for row in csv_rows(sweep))
    drawn = draw_best(sweep) if best and draws and sweep.swept else None
    files.write_text(sweep.folder / "sweep.html", page.of_sweep(sweep, said, best, again, drawn))


def draw_best(sweep):
    """Draws the report of the best job and gives its path as a link has it; None, and a warning, where it cannot be."""
    from stoker.runs import report

    job = sweep.groups[0][0]
    if (sweep.folder / job.name).is_symlink():  # it may lead anywhere
        return None
    try:
        print(printable(f"report   {report.write(sweep.folder / job.name)}"), flush=True)
    except Exception as error:
        log.warning(
            "job %s: its report could not be drawn (%s).", printable(job.name), cause(error)
        )
        return None
    return f"{quote(job.name)}/{report.NAME}"


def is_sweep(folder):
    """Whether a folder is a sweep's: a folder of single runs has results in it too."""
    return any((folder / name).is_file() for name in (SWEEP, "multirun.yaml")) or any(
        folder.glob(f"*/{JOB}")
    )


def show(folder):
    """Prints the table of the sweep, or of the runs, in the folder, and writes its files anew; UserError for none."""
    if not (jobs := read_jobs(folder)):
        inside = sorted(filter(is_sweep, folder.glob("*")))
        example = f", as in {inside[-1]}" if inside else ""
        raise UserError(
            f"{folder}: there is no job of a sweep in it, and no run. Type the directory of a sweep{example}."
        )
    report(folder, jobs)


def main(arguments):
    """`python -m stoker.sweeps.sweep DIR`: gives the exit code."""
    usage = "python -m stoker.sweeps.sweep DIR, the directory of a sweep, or a folder of runs."
    return cli.with_folder(arguments, usage, lambda folder: bool(read_jobs(folder)), show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
