"""The callback that saves checkpoints."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stoker.trainer import checkpoint, launch, parallel, settings
from stoker.trainer.callback import Row, State
from stoker.trainer.callbacks.monitoring import Monitor
from stoker.trainer.errors import NotFinite, UserError, cause, log
from stoker.trainer.loading import IterableLoader

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


def advice(trainer: "Trainer") -> str:
    """Return what to do if training diverges."""
    text = "Use a lower optimizer.lr. If that is not enough, set max_grad_norm=1"
    if trainer.scaler.is_enabled():
        text += ", or precision=bf16 instead of fp16"
    return f"{text}."


class Checkpoint(Monitor):
    """Save the whole state to `folder`/step_<number>.ckpt; keep the last `keep` and the best.

    The state is saved every `every` steps, every `epochs` epochs and every `minutes` minutes (None
    means never), when the monitored number is the best so far, and at the end. Put this callback
    last in the list, so that it saves the state of the other callbacks after the same step.
    Training waits only while the state is copied; a thread writes the copy. The plain values in
    `about`, such as the config, are saved too.
    """

    state_attributes: ClassVar[tuple[str, ...]] = (*Monitor.state_attributes, "metrics")
    saved: int  # the step of the last save

    def __init__(
        self,
        folder: str | Path,
        every: int | None = None,
        epochs: int | None = 1,
        minutes: float | None = 10,
        keep: int = 2,
        monitor: str = "auto",
        mode: str = "auto",
        overwrite: bool = False,
    ) -> None:
        super().__init__(monitor, mode)
        self.folder = Path(folder)
        self.overwrite = overwrite
        self.about: State = {}
        self.every = settings.check("checkpoint.every", every)
        self.epochs = settings.check("checkpoint.epochs", epochs)
        self.minutes = settings.check("checkpoint.minutes", minutes)
        self.keep = settings.check("checkpoint.keep", keep)
        self.due = False
        self.metrics: Row = {}  # the last value of each logged number
        self.last_time = 0.0  # time of the last save, by the clock of `trainer.agreement`
        self.writer: ThreadPoolExecutor | None = None
        self.writing: Future[None] | None = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        """Raise UserError if the folder contains checkpoints from another run."""
        super().on_fit_start(trainer)
        is_gone = False
        if launch.is_first():
            self.check_folder(trainer)
            checkpoint.go_back(self.folder, trainer.step)
            steps = checkpoint.files(self.folder)
            is_gone = self.best is not None and self.best["step"] not in steps
        if parallel.add_up(int(is_gone)):
            self.best = None  # the best checkpoint is in another folder
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.saved = trainer.step
        self.due = False
        self.last_time = trainer.agreement.now()
        if not trainer.step:
            self.metrics = {}

    def check_folder(self, trainer: "Trainer") -> None:
        """Raise UserError if the folder has checkpoints from another run, or is not a folder."""
        if not trainer.step and not self.overwrite and checkpoint.files(self.folder):
            raise UserError(
                f"{self.folder} already contains checkpoints. Pass a different folder, or resume "
                f"from them with fit(..., resume={str(self.folder)!r})."
            )
        is_file = self.folder.exists() and not self.folder.is_dir()
        if is_file or self.folder.is_symlink():  # a link may point anywhere
            raise UserError(
                f"{self.folder} is not a folder, so checkpoints cannot be saved there. Move or "
                "delete it."
            )

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        if self.improved(trainer, row):
            self.due = True
        numbers = {**self.metrics, **row}
        # These numbers are bookkeeping, not results.
        for name in ("train/seconds", "train/samples", "device/memory_mib"):
            numbers.pop(name, None)
        self.metrics = dict(sorted(numbers.items()))

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if self.epochs and trainer.step % (self.epochs * trainer.steps_per_epoch) == 0:
            self.due = True

    def on_step_end(self, trainer: "Trainer") -> None:
        if self.writing is not None and self.writing.done():
            self.wait()  # raises the thread's error, if any
        waited = trainer.agreement.now() - self.last_time
        if (
            self.due
            or trainer.stop_reason is not None
            or trainer.step == trainer.total_steps
            or (self.every and trainer.step % self.every == 0)
            or (self.minutes and waited >= 60 * self.minutes)
        ):
            with trainer.spans["checkpoint"]:
                self.save(trainer)

    def on_fit_end(self, trainer: "Trainer") -> None:
        if trainer.failed:
            self.save_after_error(trainer)
        # Save if the run was interrupted in an evaluation, or after this callback's `on_step_end`.
        elif trainer.interrupted and trainer.step != self.saved:
            with trainer.spans["checkpoint"]:
                self.save(trainer)
        if self.writer is not None:
            self.writer.shutdown()
            self.writer = None
            self.wait()
        super().on_fit_end(trainer)

    def save_after_error(self, trainer: "Trainer") -> None:
        """Save if the fit failed between two steps: in an evaluation, or while loading a batch.

        Within a step, the state may be half updated. With several processes, the others may have
        exited.
        """
        error = sys.exc_info()[1]
        if self.writer is None or not isinstance(error, Exception) or isinstance(error, NotFinite):
            return
        loader = trainer.train_loader
        may_read_ahead = isinstance(loader, IterableLoader) and (
            loader.is_stateful or loader.accumulate > 1
        )
        is_between_steps = trainer.evaluation_due or not (trainer.in_step or may_read_ahead)
        if parallel.process_count > 1 or not is_between_steps or trainer.step == self.saved:
            return
        try:
            self.save(trainer)
            self.wait()
        except Exception as failure:  # must not hide the error that ended the fit
            log.warning("After the error, no checkpoint could be saved: %s", cause(failure))

    def save(self, trainer: "Trainer") -> None:
        """Copy the state, and write the copy in a thread. There is only one copy at a time.

        All processes must call this, because each may hold only part of the state. Rank 0 writes.

        Raises:
            NotFinite: A weight is not finite.
            TrainingError: The previous copy could not be written.
        """
        self.wait()
        self.due = False
        self.saved = trainer.step
        self.last_time = trainer.agreement.now()
        name = checkpoint.first_nonfinite(trainer.module)
        if name is not None:
            symptom = f"{name} has non-finite values at step {trainer.step:,}"
            raise NotFinite(
                f"{symptom}, so no checkpoint is saved.\n{advice(trainer)}",
                symptom,
            )
        state = checkpoint.copy({**trainer.state_dict(), "about": self.about})
        if launch.is_first():
            assert self.writer is not None
            path = checkpoint.path_of(self.folder, trainer.step)
            self.writing = self.writer.submit(self.write, path, state, self.best)

    def write(self, path: Path, state: State, best: dict[str, float] | None) -> None:
        """Write the new checkpoint, then remove old ones. This runs in the writer thread."""
        checkpoint.save(path, state)
        old = list(checkpoint.files(self.folder).items())[self.keep :]
        for step, old_path in old:
            if best is None or step != best["step"]:
                old_path.unlink()

    def wait(self) -> None:
        """Wait until everything is written; re-raise the writer thread's error, if any."""
        if self.writing is not None:
            writing = self.writing
            self.writing = None
            writing.result()
