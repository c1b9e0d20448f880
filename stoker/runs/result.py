"""result.json: the result of a run, or why it failed, as one typed record."""

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.command import arguments, exit_codes
from stoker.data.typed import is_number, typed
from stoker.runs import json_files
from stoker.runs.directory import RESULT
from stoker.runs.provenance import Revision
from stoker.runs.rows import last_values, metrics_in, read_rows, training_speed
from stoker.trainer.errors import NotFinite
from stoker.trainer.number_format import brief
from stoker.trainer.stopping import StopReason

if TYPE_CHECKING:
    from stoker.trainer.callbacks import Checkpoint

# The stages in `RunResult.time`. If a whole step is one CUDA graph, "step" replaces the three
# stages before it.
STAGES = (
    "data",
    "transfer",
    "forward",
    "backward",
    "optimizer",
    "step",
    "evaluation",
    "checkpoint",
    "logging",
    "report",
    "other",
)


@dataclasses.dataclass
class Best:
    """The evaluation whose weights a run kept: the monitored metric, and its value after `step`."""

    name: str
    mode: str | None  # "max" or "min"
    step: int | None
    value: float


@dataclasses.dataclass
class RunResult:
    """The result of a run. Unknown entries are None, and null in the file."""

    overrides: list[str] | None = None  # the typed settings
    script: str | None = None  # the command line of the script that started the run
    # why the run failed; if set, only the entries that `write_failure` sets are filled in
    error: str | None = None
    code: int | None = None  # the exit code of a failed run
    will_repeat: bool | None = None  # whether the same command would fail at the same step again
    replay: str | None = None  # the checkpoint before a step that failed because it was not finite
    git: Revision | None = None
    best: Best | None = None
    steps: int | None = None
    total_steps: int | None = None
    stopped: StopReason | None = None  # why the run stopped before `total_steps`
    device: str | None = None
    precision: str | None = None
    versions: dict[str, str] | None = None
    parameters: int | None = None
    memory_mib: dict[str, float | None] | None = None
    time: dict[str, float] | None = None  # seconds by stage
    speed: str | None = None  # the verdict on where the time went
    doctor: list[str] | None = None  # the doctor's warnings
    samples: dict[str, int] | None = None  # by split
    samples_per_second: int | None = None  # in training
    seconds: float | None = None
    # The metrics, such as "test/acc", and "step" and "epoch"; top-level entries in the file.
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: str | Path) -> "RunResult":
        """Read the result of an untrusted run directory; without one, all its entries are unknown.

        If an entry has the wrong type, the file is treated as the result of a failed run.
        """
        contents = json_files.read_json(Path(folder) / RESULT)
        try:
            result: RunResult = typed(contents, cls)
        except TypeError:
            return cls(error=f"its {RESULT} is damaged", code=exit_codes.TRAINING_ERROR)
        result.numbers = metrics_in(contents)
        return result

    def write(self, folder: str | Path) -> None:
        """Write result.json atomically."""
        contents = dataclasses.asdict(self)
        contents |= contents.pop("numbers")
        json_files.write_json(Path(folder) / RESULT, contents)

    @property
    def has_failed(self) -> bool:
        """Whether the run recorded a failure."""
        return self.error is not None

    @property
    def is_finished(self) -> bool:
        """Whether the run finished."""
        return self.error is None and self.overrides is not None and self.seconds is not None

    @property
    def has_ended(self) -> bool:
        """Whether the run finished or recorded a failure."""
        return self.is_finished or self.has_failed

    def stopped_by(self, kind: str) -> bool:
        """Return whether the run stopped early for a reason of this kind, such as "pruned"."""
        return self.stopped is not None and self.stopped.kind == kind

    def tests(self) -> dict[str, float]:
        """Return the test results: the monitored metric first, the loss last."""
        monitored = "" if self.best is None else f"test/{self.best.name.rpartition('/')[2]}"
        return tests_in(self.numbers, monitored)

    def final_numbers(self) -> dict[str, float]:
        """Return the best value of the monitored metric, and the test results."""
        best = {} if self.best is None else {f"best/{self.best.name}": self.best.value}
        return best | self.tests()

    def best_metrics(self) -> dict[str, Any]:
        """Return the metrics of the best weights, which are the ones in model.safetensors."""
        metrics = {name: value for name, value in self.numbers.items() if "/" in name}
        if self.best is not None and self.best.step != self.steps:
            # The last evaluation used different weights.
            metrics = {key: value for key, value in metrics.items() if not key.startswith("val/")}
            metrics[self.best.name] = self.best.value
        return metrics

    def moment(self, step: int | None) -> str:
        """Return 'epoch 7 (step 140)', or only the step if the whole run is a single epoch."""
        last = self.numbers.get("step")
        epochs = self.numbers.get("epoch")
        text = f"step {step:,}"
        if not step or not last or not epochs or epochs <= 1:
            return text
        return f"epoch {brief(step / last * epochs)} ({text})"

    def add_rows(self, path: Path) -> None:
        """Add the last value of each metric in a metrics.jsonl, and the training speed."""
        rows = read_rows(path)
        self.numbers.update(last_values(rows))
        self.samples_per_second = training_speed(rows)

    def evaluated_again(self, before: "RunResult") -> "RunResult":
        """Return this result, or `before` with the new numbers if the run had already ended.

        A run that resumes at its last step only evaluates, so its times do not describe training.
        """
        if before.seconds is None:
            return self
        if before.steps == self.steps == self.total_steps:
            return dataclasses.replace(before, numbers=self.numbers, best=self.best)
        return self


def tests_in(numbers: dict[str, Any], first: str = "") -> dict[str, float]:
    """Return the test results, with `first` at the beginning and the loss at the end."""
    names = [name for name in numbers if name.startswith("test/") and is_number(numbers[name])]
    names.sort(key=lambda name: (name == "test/loss", name != first))
    return {name: numbers[name] for name in names}


def of_fit(trainer: Any, saver: "Checkpoint") -> RunResult:
    """Return the result of a fit, without metrics. `saver` is the `Checkpoint` callback."""
    from stoker.trainer import summary

    return RunResult(
        overrides=arguments.typed(),
        steps=trainer.step,
        total_steps=trainer.total_steps,
        stopped=trainer.stop_reason,
        device=str(trainer.device),
        precision=summary.precision(trainer),
        parameters=sum(p.numel() for p in trainer.module.parameters()),
        memory_mib=trainer.memory_report(),
        best=best_of(saver),
    )


def best_of(saver: "Checkpoint") -> Best | None:
    """Return the best evaluation of a fit, or None before the first one."""
    if saver.best is None:
        return None
    mode = "max" if saver.sign > 0 else "min"
    return Best(saver.name, mode, int(saver.best["step"]), saver.best["value"])


def finished(folder: str | Path) -> RunResult | None:
    """Return the result of a run, or None if the run has not finished."""
    result = RunResult.read(folder)
    return result if result.is_finished else None


def write_failure(
    folder: str | Path,
    error: BaseException,
    code: int,
    warnings: list[str] | None = None,
    script: str | None = None,
    overrides: list[str] | None = None,
) -> bool:
    """Record why a run failed, and its exit code. Return whether result.json was written.

    `warnings` come from the doctor. `overrides` are the typed settings of the run, and default to
    those of this process. An existing result or failure is not overwritten.
    """
    if RunResult.read(folder).has_ended:
        return False
    text = exit_codes.failure_text(error)
    replay = getattr(error, "replay", None)
    if replay and not script:
        text = text.rpartition("\n")[0]  # the last line is the command for `replay`
    result = RunResult(
        overrides=arguments.typed() if overrides is None else overrides,
        script=script,
        error=text,
        code=code,
        will_repeat=isinstance(error, NotFinite) or None,
        replay=replay and str(replay),
        doctor=warnings,
    )
    with contextlib.suppress(OSError):  # the disk might be full
        result.write(folder)
        return True
    return False
