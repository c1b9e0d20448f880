"""Train in a run directory, for the command and for scripts."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.command import arguments, signals
from stoker.command.trust import own_packages
from stoker.runs import directory, resume, status
from stoker.runs.provenance import Code, versions
from stoker.runs.result import RunResult, finished, of_fit, write_failure
from stoker.tasks import current_job
from stoker.tasks.closing_lines import closing_lines
from stoker.tasks.parts import Parts, by_split
from stoker.tasks.report import draw_report
from stoker.trainer import launch, stopping, terminal
from stoker.trainer.errors import TrainingError

if TYPE_CHECKING:
    from stoker.data.record import Data
    from stoker.runs.loggers import Logger
    from stoker.trainer.callbacks import Callback, Checkpoint

begun: Path | None = None  # this process's run directory, once its training has begun


@dataclasses.dataclass
class Run:
    """Training in a run directory that this process has locked: `begin`, `train`, then `close`.

    Attributes:
        started: The `time.perf_counter()` from which the time of the run is measured.
        draws: Whether to draw the report.
        script: The command of the script that trains; None if the command `stoker` trains.
        code: The state of the project's code.
        loggers: The loggers that receive the result.
        state: The contents of the checkpoint that the run resumes from; None at step 0.
        result: The result once the run has ended; always None on ranks above 0.
    """

    folder: Path
    saver: "Checkpoint"
    started: float
    draws: bool = True
    script: str | None = None
    code: Code = dataclasses.field(default_factory=lambda: Code(Path.cwd()))
    loggers: Sequence["Logger"] = ()
    parts: Parts = dataclasses.field(init=False)
    state: dict[str, Any] | None = None
    result: RunResult | None = None

    def begin(self, config: Any, mode: str = "auto", overwrite: bool = False) -> str | None:
        """Find the checkpoint to resume from; return its origin (see `resume.to_resume`)."""
        from stoker.trainer import checkpoint

        begins = checkpoint.together(
            "resume", lambda: resume.to_resume(self.folder, mode, overwrite, config)
        )
        _, self.state, origin = begins or (None, None, None)
        self.check_processes()
        return origin

    def check_processes(self) -> None:
        """Warn if the run resumes with a different number of processes."""
        now = launch.world_size()
        before = resume.about(self.state or {}).get("processes")
        if isinstance(before, int) and before != now and finished(self.folder) is None:
            launch.warn(
                f"The number of processes has changed from {before} to {now}: the weights will not "
                "match bit for bit, and a loss or metric that compares the samples of a batch with "
                "each other will be on a different scale."
            )

    def files(self, config: str) -> list["Callback"]:
        """Return the callbacks that write the checkpoints, the live report and config.yaml."""
        from stoker.runs.live import LiveReport
        from stoker.runs.loggers import ConfigFile

        live = [LiveReport(self.folder, self.saver)] if self.draws else []
        return [
            self.saver,
            *live,
            ConfigFile(self.folder / directory.CONFIG, config, self.code.files, self.samples),
        ]

    def samples(self) -> dict[str, int]:
        """Return the number of samples in each split, except where it is unknown."""
        from stoker.data.description import sample_counts

        return sample_counts(by_split(self.parts.loaders))

    def describe(self, config: dict[str, Any], data: "Data", /, **more: Any) -> None:
        """Set what the checkpoints store about the run: its config, its data, and `more`."""
        self.saver.about = {
            "config": config,
            "versions": versions(),
            "processes": launch.world_size(),
            "inputs": data.description(),
            **more,
        }

    def train(
        self, parts: Parts, threads: contextlib.AbstractContextManager[Any] | None = None
    ) -> None:
        """Train within the context `threads`, test the best weights, and write the files.

        Raises:
            SystemExit: A signal stopped the run; the command to resume it was printed.
        """
        global begun
        begun = self.folder
        self.parts = parts
        try:
            with self.noting_the_end():
                with threads or contextlib.nullcontext():
                    self.fit()
                self.result = self.finish()
            if self.result is not None:
                packages = own_packages(arguments.typed())
                for line in closing_lines(self.folder, self.result, packages):
                    is_result = line.startswith(("best ", "test "))
                    terminal.show(line, "bold" if is_result else None)
        except KeyboardInterrupt:
            self.say_interrupted()
            raise SystemExit(signals.exit_code()) from None
        except Exception as error:
            begin = self.state["step"] if self.state else 0
            if self.parts.trainer.step == begin and not isinstance(error, TrainingError):
                begun = None
                directory.remove_untrained(self.folder)
            raise

    @contextlib.contextmanager
    def noting_the_end(self) -> Iterator[None]:
        """At the end, record the time and the doctor's warnings; report an error to the loggers."""
        from stoker.diagnostics import doctor

        try:
            yield
        except BaseException as error:
            is_stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
            for logger in self.loggers:
                logger.end_as("stopped" if is_stopped else "failed")
            raise
        finally:
            if launch.is_first():
                seconds = time.perf_counter() - self.started
                warnings = doctor.result_of(self.parts.trainer).get("doctor")
                with contextlib.suppress(OSError):  # the disk may be full
                    status.end(self.folder, seconds, warnings)

    def fit(self) -> None:
        """Fit the model; raise stopping.Interrupted if any process of the run received a signal."""
        from stoker.trainer import parallel

        trainer = self.parts.trainer
        train_loader, val_loader, _ = self.parts.loaders
        with signals.calling(trainer.interrupt):
            trainer.fit(train_loader, val_loader, resume=self.state)
            if launch.is_first():
                with contextlib.suppress(OSError):  # the disk may be full
                    status.keep_best(self.folder, self.saver)
            signaled_ranks = parallel.add_up(int(stopping.received is not None))
        if signaled_ranks and stopping.received is None:
            signals.record(signal.SIGTERM)
        if stopping.received is not None:
            raise stopping.Interrupted

    def finish(self) -> RunResult | None:
        """Test the best weights and write the files; return the result, or None on ranks above 0.

        If there is no test split, the report shows the validation split.
        """
        from stoker.diagnostics import doctor, timing
        from stoker.runs import card, examine
        from stoker.trainer.loading import resident_bytes

        trainer = self.parts.trainer
        data = self.parts.data
        loaders = by_split(self.parts.loaders)
        trainer.data_bytes = resident_bytes(*loaders.values())  # including the test split
        result = dataclasses.replace(
            of_fit(trainer, self.saver),
            **timing.result_of(trainer),
            **doctor.result_of(trainer),
            git=self.code.revision(),
            versions=versions(),
            script=self.script,
            samples=self.samples(),
        )
        if not self.load_best():
            result.best = None
        usual = examine.is_usual(trainer, data)
        numbers: dict[str, Any] = {}
        evaluation = None
        split = "test" if "test" in loaders else "val"
        if split == "test" or (split in loaders and self.draws and usual):
            numbers, evaluation = examine.evaluate(trainer, loaders[split], split, data)
            usual = evaluation is not None
        weights = card.weights(trainer)
        if not launch.is_first():
            return None
        result.add_rows(self.folder / directory.METRICS)
        if split == "test":
            result.numbers.update(numbers)
        result.seconds = round(time.perf_counter() - self.started, 3)
        result = result.evaluated_again(RunResult.read(self.folder))
        card.write(self.folder, weights, trainer.module, data, result, usual, evaluation)
        if evaluation is not None:
            examine.write(self.folder / directory.EVALUATION, evaluation, data)
        result.write(self.folder)
        return result

    def load_best(self) -> bool:
        """Load the best weights. If their file is damaged, load the newest and return False."""
        from stoker.trainer import checkpoint

        trainer = self.parts.trainer
        if not self.saver.best or self.saver.best["step"] == trainer.step:
            return True
        best = checkpoint.together("best", lambda: checkpoint.best(self.saver.folder))
        assert best is not None
        trainer.load_state_dict(best[1])
        return bool(trainer.step == self.saver.best["step"])

    def say_interrupted(self) -> None:
        """Print at which step the run stopped, and how to resume it."""
        if not launch.is_first():
            return
        text = f"\ninterrupted at step {self.saver.saved:,}."
        if not current_job.in_sweep():
            text += f" To resume:\n{signals.resume_command}"
        signals.print_advice(text)
        if self.draws and (self.folder / directory.CONFIG).is_file():
            draw_report(self.folder, "stopped")

    def close(self) -> None:
        """Draw the report, and only then send the result to the loggers, which may be slow."""
        if self.result is None:
            return
        if self.draws:
            draw_report(self.folder)
        outcome = "stopped" if self.result.stopped_by("time_limit") else "done"
        for logger in self.loggers:
            logger.finish(self.result.steps or 0, self.result.final_numbers(), outcome)


def leave_reason(
    folder: Path, error: BaseException, code: int, *, draws: bool, script: str | None = None
) -> None:
    """Record in the run directory why a run failed; draw the report if training had started."""
    warnings = status.Status.read(folder).doctor
    written = write_failure(folder, error, code, warnings, script)
    if written and draws and (folder / directory.CONFIG).is_file():
        draw_report(folder)
