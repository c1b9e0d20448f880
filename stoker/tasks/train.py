"""task=train: train, test the best weights, and write the files of the run directory."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

from stoker.command import arguments, dotted, invocation, processes, ranks, settings, shell, signals
from stoker.command.build import build
from stoker.command.trust import of_project, own_packages
from stoker.runs import index, provenance, resume, saved_config
from stoker.tasks import current_job
from stoker.tasks.parts import building
from stoker.tasks.running import Run
from stoker.tasks.unused_settings import check_unused
from stoker.trainer import launch
from stoker.trainer.errors import NotFinite

if TYPE_CHECKING:
    from stoker.trainer.callbacks import Callback, Checkpoint


def train(cfg: DictConfig) -> None:
    """Lock the run directory, and train in it."""
    gc.disable()  # speeds up importing torch, as in __main__
    try:
        from stoker.command import tuning

        tuning.freeze_imports()
    finally:
        gc.enable()
    versions = provenance.versions()
    del versions["platform"]  # the machines of a run may have different platforms
    config = dotted.flat(dotted.plain(cfg, resolve=True))
    with open_dict(cfg):
        launch.timeout = cfg.rank_timeout
        ranks.check_alike(
            {
                "code": processes.source_code(),
                "versions": versions,
                "config": {key: config[key] for key in config if not settings.record(key).local},
            }
        )
        cfg.run_dir = launch.agreed("run_dir", lambda: current_job.run_directory(cfg), lasting=True)
        signals.resume_command = shell.command(
            arguments.typed(), shell.setting("run_dir", cfg.run_dir), start=invocation.command()
        )
    folder = Path(cfg.run_dir)
    with index.held(folder) if launch.is_first() else contextlib.nullcontext():
        train_in(folder, cfg)


def train_in(folder: Path, cfg: DictConfig) -> None:
    """Train in a run directory that this process has locked."""
    started = current_job.started_at()
    from stoker.data.record import fingerprint
    from stoker.runs.loggers import Logger
    from stoker.trainer import parallel

    run = Run(folder, build_saver(cfg, folder), started, draws=bool(cfg.report))
    origin = run.begin(cfg, cfg.resume, cfg.overwrite)
    callbacks = [*pruning(cfg), *run.files(OmegaConf.to_yaml(cfg))]
    with building(cfg, callbacks, resumes=run.state is not None) as parts:
        check_unused(cfg, parts)
        run.code.revision()  # wait for git, so that it does not run during training
        data = parts.data
        config = dotted.plain(cfg)  # unresolved, so that it contains no values from the environment
        del config["run_dir"]
        classes = data.classes and list(data.classes)
        stamp = fingerprint(data)
        run.describe(config, data, origin=origin, data=stamp, classes=classes)
        if cfg.profile and launch.is_first():
            from stoker.diagnostics.profiling import Profile

            parts.trainer.callbacks.insert(0, Profile(folder / "profile"))
        run.loggers = [one for one in parts.trainer.callbacks if isinstance(one, Logger)]
        for logger in run.loggers:
            logger.describe(saved_config.for_reading(dotted.plain(cfg)), current_job.sweep_name())
        ranks.check_alike(
            {
                "data": [data.name, stamp],
                "code": processes.source_code({*own_packages(arguments.typed()), *of_project()}),
            }
        )
        if run.state is not None:
            resume.check_data(run.state, stamp)
        with offering_replay():
            run.train(parts, parts.threads(cfg))
    run.close()
    parallel.leave()


def build_saver(cfg: DictConfig, folder: Path) -> "Checkpoint":
    """Return the callback that writes the checkpoints."""
    node = {
        "_target_": "stoker.trainer.callbacks.Checkpoint",
        "folder": str(folder / "checkpoints"),
        "monitor": cfg.monitor,
        "mode": cfg.monitor_mode,
        "overwrite": cfg.overwrite,
        **cfg.checkpoint,
    }
    saver: Checkpoint = build("checkpoint", node)
    return saver


def pruning(cfg: DictConfig) -> list["Callback"]:
    """Return a list with the callback that may end a trial early; [] for any other run."""
    if not current_job.in_sweep() or "pruner" not in cfg.sweep:
        return []
    from stoker.sweeps.optuna_search import Pruning, open_trial

    folder = current_job.folder_in_sweep().resolve()
    pruner = build("sweep.pruner", cfg.sweep.pruner)
    return [Pruning(open_trial(folder, pruner), cfg.monitor, cfg.monitor_mode)]


@contextlib.contextmanager
def offering_replay() -> Iterator[None]:
    """Add the command that replays the failed step to the message of a NotFinite error."""
    try:
        yield
    except NotFinite as error:
        if error.replay is None:
            raise
        text, _, _ = str(error).rpartition("\n")
        command = shell.replay_command(arguments.typed(), error.replay)
        text += f"\nTo replay that step: {command}"
        raise NotFinite(text, replay=error.replay) from error
