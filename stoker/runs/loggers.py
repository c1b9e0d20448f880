"""Loggers: callbacks that write each row of numbers somewhere. JSONL is always on; each of the others is an extra."""

import contextlib
import errno
import importlib.util
import itertools
import json
import logging
import os
import re
import secrets
import shlex
import time
from pathlib import Path

from stoker.command import settings
from stoker.runs import pictures
from stoker.runs.directory import ENDING
from stoker.runs.json_files import finite
from stoker.runs.lock import wait_for
from stoker.runs.result import has_failed
from stoker.runs.rows import lines_of, read_rows
from stoker.trainer import parallel
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, as_typed, check_choice, check_number, log, printable
from stoker.trainer.files import open_plain, read, replacing, write_text
from stoker.trainer.state import check_like

PATIENCE = 30  # seconds that a logger's server may take to answer
# What MLflow does unless the environment says otherwise: it tries 7 times for 2 minutes each, and tells its makers.
MLFLOW = {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(PATIENCE), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
MLFLOW |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "CRITICAL"}
MLFLOW |= {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


class JSONL(Callback):
    """Appends each row to the file `path`, one JSON object a line.

    Before the first row of a fit, those go that the state at its beginning did not know of: none is there twice.
    """

    first_rank_only = True

    def __init__(self, path):
        self.path, self.rows = Path(path), None
        self.begun_at = None  # the step, until the first row

    def on_fit_start(self, trainer):
        self.begun_at = trainer.step

    def on_log(self, trainer, row):
        if self.begun_at is not None:
            self.cut()
        line = (json.dumps(finite(row)) + "\n").encode()
        with open_plain(self.path, os.O_RDWR | os.O_CREAT) as file:
            end = file.seek(0, os.SEEK_END)
            if file.write(line) < len(line):  # at once, so that a killed run leaves whole lines
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.rows += 1

    def cut(self):
        """Leaves the rows up to the fit's beginning, in a new file: others may have a link to the old one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if os.path.lexists(self.path):
            before = itertools.takewhile(
                lambda pair: pair[0]["step"] <= self.begun_at, lines_of(self.path)
            )
            kept = [line for _, line in before][: self.rows] if self.begun_at else []
            with replacing(self.path) as partial:
                Path(partial).write_bytes(b"".join(kept))
        self.rows, self.begun_at = len(kept), None

    def state_dict(self):
        return {"rows": self.rows} if self.rows else {}

    def check_state(self, trainer, state, name):
        check_like(state, {"rows": 0} if state else {}, name)

    def load_state_dict(self, state):
        self.rows = state.get("rows", 0)


class Logger(Callback):
    """Hands the numbers of a run to a tool, which may fail: that is one warning, and the run goes on without it.

    What a tool does is in `begin`, before the first row; `write`, for each; `add_result`, where train.py has one; and
    `end`. Nothing begins before there is a row: what is wrong with the settings has been found by then.
    """

    first_rank_only = True
    config, group, revision, awaits_result = {}, None, None, False
    begun, failed, begun_at = False, False, None
    start_seconds = 0.0  # that `begin` took: as long for any run, so Timing leaves them out

    def describe(self, config, group=None, revision=None):
        """What train.py says before the fit: {key: value}, the sweep's name, git's, and that `finish` will follow."""
        self.config, self.group, self.revision, self.awaits_result = config, group, revision, True

    def on_fit_start(self, trainer):
        self.begun, self.failed, self.begun_at = False, False, trainer.step
        self.start_seconds = 0.0

    def on_log(self, trainer, row):
        with trainer.spans["logging"]:
            self.begin_once(trainer)
            self.attempt(self.write, charted(row), row["step"])

    def begin_once(self, trainer):
        if not self.begun:
            self.begun = True
            start = time.perf_counter()
            self.attempt(self.begin, trainer)
            self.start_seconds = time.perf_counter() - start

    def on_fit_end(self, trainer):
        outcome = "failed" if trainer.failed else "stopped" if trainer.interrupted else "done"
        if outcome == "failed" and self.begun_at is not None and trainer.step > self.begun_at:
            self.begin_once(trainer)  # it may have failed before its first row
        if not (self.awaits_result and outcome == "done"):
            self.end_as(outcome)

    def end_as(self, outcome):
        """Tells the tool, once, that the run is "done", was "stopped", or has "failed"."""
        if self.begun:
            self.begun = False
            self.attempt(self.end, outcome)

    def finish(self, step, numbers, evaluation, outcome="done"):
        """After the fit: its final numbers, and evaluation.json; nothing of a run that was only looked at."""
        if self.begun:
            self.attempt(self.add_result, step, numbers, evaluation)
            self.end_as(outcome)

    def attempt(self, method, *args):
        """Calls the tool, unless it has failed before; one that fails is ended, as far as that goes."""
        if self.failed:
            return
        try:
            method(*args)
        except Exception as error:
            self.failed = True
            reason = " ".join(str(error).split()) or type(error).__name__
            which = f"callbacks={type(self).__name__.lower()}"
            log.warning("%s: %s\nThe run goes on without it.", which, printable(reason)[:300])
            if method != self.end:
                with contextlib.suppress(Exception):
                    self.end("failed")


def charted(row):
    """{name: number} of a row, without the epoch: against the step that would be a straight line."""
    return {
        name: value for name, value in row.items() if isinstance(value, float) and name != "epoch"
    }


class TensorBoard(Logger):
    """Writes event files in `folder`; needs the extra `tensorboard`.

    With `histograms` also the distribution of each weight, at the end of every so many epochs.
    """

    def __init__(self, folder, histograms=0):
        self.folder = os.fspath(folder)
        self.histograms = check_number(
            "callbacks.tensorboard.histograms", histograms, whole=True, least=0
        )
        need("tensorboard", "TensorBoard")

    def on_fit_start(self, trainer):
        super().on_fit_start(trainer)
        if self.histograms and any(map(parallel.is_shard, trainer.module.parameters())):
            what = "no process has a whole weight"
            raise UserError(
                f"callbacks.tensorboard.histograms={self.histograms}: {what}. Leave it out."
            )

    def begin(self, trainer):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # What a run that was killed has written after its last checkpoint is hidden, since it comes again.
        self.writer = SummaryWriter(self.folder, purge_step=self.begun_at + 1)
        # Of the settings those that change the result: the tab has a column for each.
        kept = {
            key: x
            for key, x in self.config.items()
            if not settings.may_differ(key) and not key.startswith("callbacks.")
        }
        plain = {key: as_typed(x) if isinstance(x, (list, dict)) else x for key, x in kept.items()}
        # Without the list of metrics, which would be that of all runs in the tab: it finds theirs, and what differs.
        _, begins, self.is_done = hparams(plain, {})
        self.writer.file_writer.add_summary(begins)

    def write(self, numbers, step):
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def on_epoch_end(self, trainer):
        if self.histograms and trainer.step // trainer.steps_per_epoch % self.histograms == 0:
            with trainer.spans["logging"]:
                self.attempt(self.write_weights, trainer)

    def write_weights(self, trainer):
        for name, weight in trainer.module.named_parameters():
            self.writer.add_histogram(
                name, weight.detach()[weight.isfinite()].float().cpu(), trainer.step
            )

    def add_result(self, step, numbers, evaluation):
        self.write(numbers, step)
        for name, image in pictures.of(evaluation).items():
            self.writer.add_image(name, image, step, dataformats="HWC")

    def end(self, outcome):
        if outcome == "done":
            self.writer.file_writer.add_summary(self.is_done)
        self.writer.close()


class WandB(Logger):
    """Weights & Biases, with its files in `folder`/wandb; needs the extra `wandb`.

    `mode` auto is online where one has logged in, and offline elsewhere: `wandb sync` sends it later.
    """

    def __init__(self, folder, project="stoker", mode="auto"):
        self.folder, self.project = Path(folder), project
        self.mode = check_choice("callbacks.wandb.mode", mode, ["auto", "online", "offline"])
        need("wandb", "Weights & Biases")

    def begin(self, trainer):
        import wandb

        mode = os.environ.get("WANDB_MODE") if self.mode == "auto" else self.mode
        if mode is None:  # it would ask for a login, and wait
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        path = self.folder / "wandb-id.txt"
        found = read_id(path) if self.begun_at else None
        limits = {
            "init_timeout": PATIENCE,
            "finish_timeout": PATIENCE,
            "finish_timeout_raises": True,
        }
        self.run = wandb.init(
            id=found or write_id(path, secrets.token_hex(4)), resume="allow", reinit="create_new", mode=mode,
            project=self.project, group=self.group, name=name_of(self.folder, self.group), dir=self.folder,
            config=self.config, settings=wandb.Settings(silent=True, console="off", **limits),
        )  # fmt: skip
        if (
            self.run.offline and self.begun_at
        ):  # its service may not have written what a killed run has logged
            for row in read_rows(self.folder / "metrics.jsonl"):
                if row["step"] <= self.begun_at:
                    self.write(charted(row), row["step"])

    def write(self, numbers, step):
        self.run.log(numbers, step=step)

    def add_result(self, step, numbers, evaluation):
        import wandb

        self.run.summary.update(numbers)
        self.run.log(
            {name: wandb.Image(image) for name, image in pictures.of(evaluation).items()}, step=step
        )

    def end(self, outcome):
        own = shlex.quote(str(Path(self.run.dir).parent))
        where = f"wandb sync {own}" if self.run.offline else self.run.url
        self.run.finish(
            {"done": 0, "failed": 1, "stopped": 255}[outcome]
        )  # as its own hook has it for a Ctrl-C
        print(f"wandb    {where}", flush=True)


class MLflow(Logger):
    """A run in MLflow, under the name of `folder`; needs the extra `mlflow`.

    `uri` is a server, or a database with the images in mlartifacts/ beside it; auto is what MLFLOW_TRACKING_URI says,
    else runs/mlflow.db.
    """

    def __init__(self, folder, uri="auto", experiment="stoker"):
        self.folder, self.uri, self.experiment = Path(folder), uri, experiment
        need("mlflow", "MLflow")

    def begin(self, trainer):
        for name, value in MLFLOW.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Param

        logging.getLogger("alembic").setLevel(logging.WARNING)  # which tells of each table
        uri = (
            os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///runs/mlflow.db"
            if self.uri == "auto"
            else self.uri
        )
        self.client, experiment = open_experiment(uri, self.experiment)
        self.where = f"mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite:") else uri
        path = self.folder / "mlflow-id.txt"
        self.id = read_id(path) if self.begun_at else None
        self.last = {}  # {name: the step of the last value that is there}: MLflow would have one of the same step twice
        if self.id and self.goes_on():
            for name in self.client.get_run(self.id).data.metrics:
                self.last[name] = max(
                    value.step for value in self.client.get_metric_history(self.id, name)
                )
            return
        tags = {"sweep": self.group} if self.group else {}
        tags |= {"mlflow.source.git.commit": self.revision} if self.revision else {}
        run = self.client.create_run(
            experiment, tags=tags, run_name=name_of(self.folder, self.group)
        )
        self.id = write_id(path, run.info.run_id)
        params = [Param(key, as_typed(value)) for key, value in self.config.items()]
        for i in range(0, len(params), 100):  # it takes no more at once
            self.client.log_batch(self.id, params=params[i : i + 100])

    def goes_on(self):
        """Whether the run is in this database: its own may have been another one."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.update_run(self.id, status="RUNNING") is None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def write(self, numbers, step):
        from mlflow.entities import Metric

        now, new = (
            int(1000 * time.time()),
            [name for name in numbers if step > self.last.get(name, -1)],
        )
        self.client.log_batch(
            self.id, metrics=[Metric(name, numbers[name], now, step) for name in new]
        )
        self.last |= dict.fromkeys(new, step)

    def add_result(self, step, numbers, evaluation):
        self.write(numbers, step)
        for name, image in pictures.of(evaluation).items():
            self.client.log_image(self.id, image, artifact_file=f"{name}.png")

    def end(self, outcome):
        self.client.set_terminated(
            self.id, {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[outcome]
        )
        print(f"mlflow   {self.where}", flush=True)


def open_experiment(uri, name):
    """(MLflow's client, the experiment's id). What is not there yet is made, of a database by one process at a time."""
    from mlflow import MlflowClient

    with contextlib.ExitStack() as stack:
        images = None
        if uri.startswith("sqlite:///"):
            folder = Path(uri.removeprefix("sqlite:///")).absolute().parent
            folder.mkdir(parents=True, exist_ok=True)
            images = (folder / "mlartifacts").as_uri()
            wait_for(
                stack.enter_context(open_plain(folder / ".mlflow.lock", os.O_RDWR | os.O_CREAT)),
                PATIENCE,
            )
        client = MlflowClient(uri)
        found = client.get_experiment_by_name(name)
        return client, found.experiment_id if found else client.create_experiment(name, images)


def need(package, tool):
    """UserError, before anything is trained, where the package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"callbacks={package} needs {tool}.\nType pip install -e '.[{package}]'.")


def name_of(folder, group):
    """A run's name for people: that of its folder, in a sweep behind the sweep's."""
    return f"{group}/{folder.absolute().name}" if group else folder.absolute().name


def read_id(path):
    """The id that `write_id` has left, with which a run that is continued goes on; None where there is none."""
    try:
        text = read(path, 100).decode()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[A-Za-z0-9-]+", text) else None


def write_id(path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, name)
    return name


class ConfigFile(Callback):
    """Writes the config to `path` when all is checked and the training begins: last in the list, after what checks.

    One that begins at step 0 removes the files `stale` beside it, which an older run has left; one that goes on those
    that say how it ended before.
    """

    first_rank_only = True

    def __init__(self, path, config, stale=()):
        self.path, self.config, self.stale = Path(path), config, stale

    def on_fit_start(self, trainer):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = trainer.step < trainer.total_steps or has_failed(self.path.parent)
        ended = ENDING if goes_on else ()
        for name in ended if trainer.step else self.stale:
            (self.path.parent / name).unlink(missing_ok=True)
        write_text(self.path, self.config)  # and not through a link that somebody left there
