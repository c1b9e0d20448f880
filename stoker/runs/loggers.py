"""Loggers: callbacks that record the logged rows. JSONL is always on; the others are optional."""

import contextlib
import errno
import importlib.util
import json
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.command import invocation, settings
from stoker.runs import status
from stoker.runs.directory import ENDING, WRITTEN
from stoker.runs.json_files import finite, read_text
from stoker.runs.lock import wait_for
from stoker.runs.result import RunResult
from stoker.runs.rows import Row, lines_of
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, as_typed, check_choice, first_line, log, printable
from stoker.trainer.files import open_plain, replacing, write_text
from stoker.trainer.trainer import Trainer

PATIENCE = 30  # seconds to wait for a logger's server
# By default, MLflow tries 7 times for 2 minutes each, and sends telemetry.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(PATIENCE),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
MLFLOW_PARAMS = 100  # maximum parameters in one call
LONGEST_REASON = 300  # maximum characters of an error message in a warning
# The outcomes in W&B's and MLflow's terms; W&B itself reports 255 for Ctrl-C.
WANDB_CODES = {"done": 0, "failed": 1, "stopped": 255}
MLFLOW_STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class JSONL(Callback):
    """Append each row to the file `path`, one JSON object per line.

    A resumed fit first removes the rows after its checkpoint, so that no row appears twice.
    """

    first_rank_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.rows: int | None = None  # number of rows in the file, as saved in checkpoints
        self.resume_step: int | None = None  # set until the first row is written

    def on_fit_start(self, trainer: Trainer) -> None:
        self.resume_step = trainer.step

    def on_log(self, trainer: Trainer, row: Row) -> None:
        if self.resume_step is not None:
            self.rows = self.keep_rows(self.resume_step)
            self.resume_step = None
        line = (json.dumps(finite(row)) + "\n").encode()
        with open_plain(self.path, os.O_RDWR | os.O_CREAT) as file:
            end = file.seek(0, os.SEEK_END)
            # One unbuffered write, so that a killed run leaves whole lines.
            if file.write(line) < len(line):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.rows = (self.rows or 0) + 1

    def keep_rows(self, step: int) -> int:
        """Rewrite the file with only the rows up to this step, and return how many there are."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(self.path):
            return 0
        kept: list[bytes] = []
        if step > 0:
            for row, line in lines_of(self.path):
                if row["step"] > step or len(kept) == self.rows:
                    break
                kept.append(line)
        with replacing(self.path) as partial:
            Path(partial).write_bytes(b"".join(kept))
        return len(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows} if self.rows else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state.get("rows", 0)


class Logger(Callback):
    """Send a run's metrics to an experiment tracker. If sending fails, warn once and stop.

    A subclass implements `begin`, which is called just before the first row, `write`, which is
    called for each row, and `end`. It can also implement `add_result`, which receives the final
    results. `begin` waits for the first row, by which time all settings have been checked.
    """

    first_rank_only = True
    config: dict[str, Any] = {}  # noqa: RUF012 (replaced, never changed)
    group: str | None = None  # the name of the sweep
    awaits_result = False  # whether `finish` will be called after the fit
    begun = False
    failed = False
    begun_at = 0  # the step at which the fit began

    def begin(self, trainer: Trainer) -> None:
        """Start a run in the tracker, or resume it if `begun_at` is above 0."""

    def write(self, numbers: dict[str, float], step: int) -> None:
        """Send a row of numbers."""

    def add_result(self, step: int, numbers: dict[str, float]) -> None:
        """Send the final results; by default, as a last row."""
        self.write(numbers, step)

    def end(self, outcome: str) -> None:
        """End the run in the tracker. The outcome is "done", "stopped" or "failed"."""

    def describe(self, config: dict[str, Any], group: str | None = None) -> None:
        """Receive the config and the sweep's name from the command, which later calls `finish`."""
        self.config = config
        self.group = group
        self.awaits_result = True

    def kept_id(self, path: Path) -> str | None:
        """If the fit resumes, return the id that `write_id` saved, or None if there is none."""
        text = read_text(path, 100) if self.begun_at else ""
        return text if re.fullmatch(r"[A-Za-z0-9-]+", text) else None

    def on_fit_start(self, trainer: Trainer) -> None:
        self.begun = False
        self.failed = False
        self.begun_at = trainer.step

    def on_log(self, trainer: Trainer, row: Row) -> None:
        with trainer.spans["logging"]:
            if not self.begun:
                self.begun = True
                self.attempt(self.begin, trainer)
            self.attempt(self.write, charted(row), row["step"])

    def on_fit_end(self, trainer: Trainer) -> None:
        if trainer.failed:
            self.end_as("failed")
        elif trainer.interrupted:
            self.end_as("stopped")
        elif not self.awaits_result:
            self.end_as("done")

    def end_as(self, outcome: str) -> None:
        """End the tracker's run as "done", "stopped" or "failed", unless it has already ended."""
        if self.begun:
            self.begun = False
            self.attempt(self.end, outcome)

    def finish(self, step: int, numbers: dict[str, float], outcome: str = "done") -> None:
        """Send the final results after the fit and end the run; do nothing if no row was sent."""
        if self.begun:
            results = {chart_of(name): value for name, value in numbers.items()}
            self.attempt(self.add_result, step, results)
            self.end_as(outcome)

    def attempt(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method unless an earlier call failed. If it fails, warn and end the run."""
        if self.failed:
            return
        try:
            method(*args)
        except Exception as error:
            self.failed = True
            log.warning(
                "callbacks=%s: %s\nThe run continues without this logger.",
                type(self).__name__.lower(),
                printable(first_line(error))[:LONGEST_REASON],
            )
            if method != self.end:
                with contextlib.suppress(Exception):
                    self.end("failed")


def charted(row: Row) -> dict[str, float]:
    """Return the numbers in a row to plot against the step. The epoch is left out."""
    return {
        chart_of(name): value
        for name, value in row.items()
        if isinstance(value, float) and name != "epoch"
    }


def chart_of(name: str) -> str:
    """Return the name of a metric in the trackers, chosen so that the losses come first."""
    split, _, metric = name.partition("/")
    if split in ("best", "test"):
        return f"result/{name}"
    return f"loss/{split}" if metric == "loss" else name


class TensorBoard(Logger):
    """Write event files into `folder`. Requires the extra `tensorboard`."""

    writer: Any  # a SummaryWriter

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        need("tensorboard", "TensorBoard")

    def begin(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # Hide the rows that a killed run wrote after its last checkpoint; they are logged again.
        self.writer = SummaryWriter(self.folder, purge_step=self.begun_at + 1)
        # The HParams tab has a column per setting, so only pass settings that change the result.
        shown = {}
        for key, value in self.config.items():
            if not settings.may_differ(key) and not key.startswith("callbacks."):
                is_text = isinstance(value, (list, dict, bool))  # the tab would show true as 1.0000
                shown[key] = as_typed(value) if is_text else value
        # A list of metrics would apply to all runs. Without one, the tab finds each run's metrics.
        _, begins, self.is_done = hparams(shown, {})
        self.writer.file_writer.add_summary(begins)

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def end(self, outcome: str) -> None:
        if outcome == "done":
            self.writer.file_writer.add_summary(self.is_done)
        self.writer.close()


class WandB(Logger):
    """Send the run to Weights & Biases. Requires the extra `wandb`.

    W&B keeps its files in `folder`/wandb. With `mode="auto"`, the run is online if you are logged
    in. Otherwise the run is offline, and `wandb sync` can upload it later.
    """

    def __init__(
        self, folder: str | os.PathLike[str], project: str = "stoker", mode: str = "auto"
    ) -> None:
        self.folder = Path(folder)
        self.project = project
        self.mode = check_choice("callbacks.wandb.mode", mode, ["auto", "online", "offline"])
        need("wandb", "Weights & Biases")

    def begin(self, trainer: Trainer) -> None:
        import wandb

        mode: Any = self.mode
        if mode == "auto":  # wandb's own default would prompt for a login
            mode = os.environ.get("WANDB_MODE")
            if mode is None:
                mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        path = self.folder / "wandb-id.txt"
        self.run = wandb.init(
            id=self.kept_id(path) or write_id(path, secrets.token_hex(4)),
            resume="allow",
            reinit="create_new",
            mode=mode,
            project=self.project,
            group=self.group,
            name=name_of(self.folder, self.group),
            dir=self.folder,
            config=self.config,
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=PATIENCE,
                finish_timeout=PATIENCE,
                finish_timeout_raises=True,
            ),
        )

    def write(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def add_result(self, step: int, numbers: dict[str, float]) -> None:
        self.run.summary.update(numbers)

    def end(self, outcome: str) -> None:
        # A resumed run has several offline-run folders.
        sync = f"wandb sync {shlex.quote(str(self.folder / 'wandb'))}/offline-run-*"
        where = sync if self.run.offline else self.run.url
        self.run.finish(WANDB_CODES[outcome])
        print(f"wandb    {where}", flush=True)


class MLflow(Logger):
    """Send the run to MLflow, under the name of `folder`. Requires the extra `mlflow`.

    `uri` names a server or database. "auto" uses MLFLOW_TRACKING_URI if set, else runs/mlflow.db.
    """

    def __init__(
        self, folder: str | os.PathLike[str], uri: str = "auto", experiment: str = "stoker"
    ) -> None:
        self.folder = Path(folder)
        self.uri = uri
        self.experiment = experiment
        need("mlflow", "MLflow")

    def begin(self, trainer: Trainer) -> None:
        for name, value in MLFLOW_ENVIRONMENT.items():  # read when MLflow is imported
            os.environ.setdefault(name, value)
        logging.getLogger("alembic").setLevel(logging.WARNING)  # otherwise, alembic logs each table
        uri = self.uri
        if uri == "auto":
            uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///runs/mlflow.db"
        self.client, experiment = open_experiment(uri, self.experiment)
        self.where = f"mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite:") else uri
        path = self.folder / "mlflow-id.txt"
        self.id = self.kept_id(path) or write_id(path, self.create_run(experiment))
        self.client.update_run(self.id, status="RUNNING")

    def create_run(self, experiment: str) -> str:
        """Create an MLflow run with the settings of this run, and return its id."""
        from mlflow.entities import Param

        tags = {"sweep": self.group} if self.group else {}
        name = name_of(self.folder, self.group)
        run = self.client.create_run(experiment, tags=tags, run_name=name)
        created: str = run.info.run_id
        params = [Param(key, as_typed(value)) for key, value in self.config.items()]
        for i in range(0, len(params), MLFLOW_PARAMS):
            self.client.log_batch(created, params=params[i : i + MLFLOW_PARAMS])
        return created

    def write(self, numbers: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self, outcome: str) -> None:
        self.client.set_terminated(self.id, MLFLOW_STATUS[outcome])
        print(f"mlflow   {self.where}", flush=True)


def open_experiment(uri: str, name: str) -> tuple[Any, str]:
    """Return MLflow's client and the id of the experiment, which is created if missing."""
    from mlflow import MlflowClient

    with contextlib.ExitStack() as stack:
        if uri.startswith("sqlite:///"):
            folder = Path(uri.removeprefix("sqlite:///")).absolute().parent
            folder.mkdir(parents=True, exist_ok=True)
            file = open_plain(folder / ".mlflow.lock", os.O_RDWR | os.O_CREAT)
            wait_for(stack.enter_context(file), PATIENCE)
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return client, client.create_experiment(name)
        return client, experiment.experiment_id


def need(package: str, tool: str) -> None:
    """Raise UserError, before anything is trained, if the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"callbacks={package} needs {tool}.\nType {invocation.pip_install(package)}."
        )


def name_of(folder: Path, group: str | None) -> str:
    """Return a run's display name: FOLDER, or SWEEP/FOLDER in a sweep."""
    name = folder.absolute().name
    return f"{group}/{name}" if group else name


def write_id(path: Path, name: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, name)
    return name


class ConfigFile(Callback):
    """Write the config to `path` when training begins. List this after callbacks that may fail.

    A run that begins at step 0 removes the files of an older run from the same folder; a resumed
    run removes the files that describe how it last ended. `beside` returns {name: text} for
    additional files to write, and `samples` the number of samples in each split.
    """

    first_rank_only = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: str,
        beside: Callable[[], Mapping[str, str]],
        samples: Callable[[], dict[str, int]],
    ) -> None:
        self.path = Path(path)
        self.config = config
        self.beside = beside
        self.samples = samples

    def on_fit_start(self, trainer: Trainer) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        outdated: tuple[str, ...] = WRITTEN
        if trainer.step:
            has_failed = RunResult.read(folder).has_failed
            continues = trainer.step < trainer.total_steps or has_failed
            outdated = ENDING if continues else ()
        for name in outdated:
            (folder / name).unlink(missing_ok=True)
        write_text(self.path, self.config)  # replaces a link instead of following it
        for name, text in self.beside().items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_text(folder / name, text)
        status.begin(folder, trainer, self.samples())
