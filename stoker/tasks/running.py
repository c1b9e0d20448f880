"""Train in a run directory, for the command and for scripts."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.command import arguments, signals
from stoker.command.trust import own_packages
from stoker.runs import directory, status
from stoker.runs.provenance import Code
from stoker.runs.result import RunResult, closing_lines
from stoker.tasks import job
from stoker.tasks.finish import efficiency, finish
from stoker.tasks.parts import Parts
from stoker.tasks.report import draw_report
from stoker.trainer import launch, stopping, terminal
from stoker.trainer.errors import TrainingError

if TYPE_CHECKING:
    from stoker.runs.loggers import Logger
    from stoker.trainer.callbacks import Checkpoint

begun: Path | None = None  # this process's run directory, once its training has begun
doctor_warnings: list[str] | None = None  # once training has failed


@dataclasses.dataclass
class Run:
    """Training in a run directory that this process has locked.

    Attributes:
        state: The contents of the checkpoint that it resumes from; None at step 0.
        started: The `time.perf_counter()` from which its time is measured.
        draws: Whether it draws its report.
        script: The command of the script that trains it; None for the command's own training.
    """

    folder: Path
    parts: Parts
    saver: "Checkpoint"
    state: dict[str, Any] | None
    started: float
    code: Code
    draws: bool
    script: str | None = None

    def train(
        self,
        loggers: Sequence["Logger"] = (),
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> RunResult | None:
        """Train, test the best weights, and write the files; return the result on rank 0.

        Args:
            loggers: The loggers to notify when it ends.
            within: A context for the fit.

        Raises:
            SystemExit: A signal stopped the run; the command to resume it was printed.
        """
        global begun, doctor_warnings
        begun = self.folder
        doctor_warnings = None
        try:
            with noting_the_end(self.folder, self.parts, loggers):
                with within or contextlib.nullcontext():
                    self.fit()
                result = finish(
                    self.folder,
                    self.code,
                    self.saver,
                    self.parts,
                    self.started,
                    self.draws,
                    self.script,
                )
            if result is not None:
                self.print_result(result)
        except KeyboardInterrupt:
            self.say_interrupted()
            raise SystemExit(signals.exit_code()) from None
        except Exception as error:
            begin = self.state["step"] if self.state else 0
            if self.parts.trainer.step == begin and not isinstance(error, TrainingError):
                directory.remove_untrained(self.folder)
            raise
        return result

    def fit(self) -> None:
        """Fit the model; stopping.Interrupted if any process of the run got a signal."""
        from stoker.trainer import parallel

        trainer = self.parts.trainer
        train_loader, val_loader, _ = self.parts.loaders
        with signals.calling(trainer.interrupt):
            trainer.fit(train_loader, val_loader, resume=self.state)
        if parallel.add_up(int(stopping.received is not None)):
            if stopping.received is None:  # another process got the signal
                stopping.received = signal.SIGTERM
            raise stopping.Interrupted

    def print_result(self, result: RunResult) -> None:
        """Print the result, and add what takes longer to measure."""
        packages = own_packages(arguments.typed())
        for line in closing_lines(self.folder, result, packages):
            terminal.show(line, "bold" if line.startswith(("best ", "test ")) else None)
        more = efficiency(self.parts, result)
        if more:
            dataclasses.replace(result, **more).write(self.folder)

    def say_interrupted(self) -> None:
        """Print at which step the run stopped, and how to resume it."""
        if not launch.is_first():
            return
        text = f"\ninterrupted at step {self.saver.saved:,}."
        if not job.in_sweep():
            text += f" To resume:\n{signals.resume_command}"
        signals.print_advice(text)
        if self.draws and (self.folder / directory.CONFIG).is_file():
            draw_report(self.folder, "stopped")

    def draw_report(self) -> None:
        """Draw the report, on rank 0."""
        if self.draws and launch.is_first():
            draw_report(self.folder)


@contextlib.contextmanager
def noting_the_end(folder: Path, parts: Parts, loggers: Sequence["Logger"]) -> Iterator[None]:
    """Record when training ends, and the doctor's warnings; tell the loggers if it failed."""
    from stoker.diagnostics import doctor

    global doctor_warnings
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        if not stopped:
            doctor_warnings = doctor.result_of(parts.trainer).get("doctor")
        for logger in loggers:
            logger.end_as("stopped" if stopped else "failed")
        raise
    finally:
        if launch.is_first():
            with contextlib.suppress(OSError):  # the disk may be full
                status.end(folder, doctor.result_of(parts.trainer).get("doctor"))
