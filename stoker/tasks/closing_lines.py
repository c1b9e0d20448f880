"""The last lines that a run prints: its results, and the commands to type next."""

from collections.abc import Iterator
from pathlib import Path

from stoker.command import invocation
from stoker.command.shell import command, command_for, setting
from stoker.runs.readable import numbers, seconds
from stoker.runs.result import RunResult
from stoker.runs.status import Status
from stoker.trainer.number_format import number


def closing_lines(folder: str | Path, result: RunResult, packages: list[str]) -> Iterator[str]:
    """Yield the lines: results, time, and commands.

    `packages` are the packages that the run trusts.
    """
    best = result.best
    if best is not None:
        yield f"best     {best.name} {number(best.value)} at {result.moment(best.step)}"
    tested = numbers(result.numbers, "test")
    if tested:
        yield f"test     {tested}"
    assert result.seconds is not None
    time = f"time     {seconds(result.seconds)}"
    resumed = Status.read(Path(folder)).step
    if resumed:
        time += f" since step {resumed:,}"
    if result.samples_per_second:
        time += f", at {result.samples_per_second:,} samples/s in training"
    yield time
    if result.speed:
        yield f"speed    {result.speed}"
    yield f"run      {folder}"
    again = result.script
    if again is None:
        yield f"evaluate {command_for('evaluate', folder, packages)}"
        again = command(
            result.overrides or [], setting("run_dir", folder), start=invocation.command()
        )
    was_decided = result.stopped_by("early_stopping") or result.stopped_by("pruned")
    if (result.steps or 0) < (result.total_steps or 0) and not was_decided:
        yield f"resume   {again}"
