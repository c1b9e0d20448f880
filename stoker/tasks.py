"""What the command does for each task, and the only file that knows the config's keys."""

import contextlib
import dataclasses
import functools
import json
import math
import re
import signal
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from stoker.command import cli, processes, settings, shell
from stoker.command.build import (
    TRUSTED,
    build,
    check_fit,
    check_size,
    has_usual_outputs,
    is_on,
    locate,
    own_packages,
    retarget,
)
from stoker.runs import directory, json_files, lock, provenance, resume, saved_config
from stoker.runs.result import RunResult, closing_lines, finished, of_fit, write_failure
from stoker.sweeps import jobs, launchers
from stoker.trainer import launch, stopping
from stoker.trainer.errors import TrainingError, UserError, cause, check_choice, log

ROOT = Path(__file__).resolve().parents[1]
begun: Path | None = None  # the run directory in which this process trains, once it does
START = 0.0  # when the process began, by time.perf_counter()


def main(cfg):
    """Checks the config, which needs no torch, and does `task`.

    A job of a sweep gives what is monitored at its best, for Hydra's sweepers. One that fails gives nan, which they
    take for a trial that failed, and ends the sweep only with sweep.on_error=stop.
    """
    job = HydraConfig.get()
    folder = job.runtime.output_dir  # of a job of a sweep
    try:
        if in_sweep():
            if not is_finished(cfg):
                print(f"\njob {job.job.num}    {' '.join(cli.typed())}", flush=True)
            if cfg.run_dir is not None:
                raise UserError("run_dir names one run. For a sweep, type hydra.sweep.dir=DIR.")
        cli.keep_texts(cfg)
        cli.check_config(cfg)
        settings.check_task(OmegaConf.to_container(cfg, resolve=True))
        if cfg.debug:
            values = OmegaConf.to_container(cfg, resolve=False)
            for key, value in settings.debug_values(values, cli.typed_keys()).items():
                OmegaConf.update(cfg, key, value)
        retarget(cfg, keep=settings.LOADER_KEYS)
        if in_place_of_run(cfg) and launch.world_size() > 1:
            raise UserError(
                f"{in_place_of_run(cfg)} is for one process. Type python train.py, without torchrun."
            )
        if in_sweep() and not in_place_of_run(cfg):
            if is_finished(cfg):
                resume.check_same(
                    f"run_dir={folder}", saved_config.load_config("run_dir", folder), cfg
                )
                return jobs.pass_over(folder, job.job.num)
            jobs.begin(folder, job.job.num)
        if (several := processes.count(cfg.strategy, cfg.devices, cfg.device)) > 1:
            start(several, cfg)
        else:
            with debugging() if cfg.debug else contextlib.nullcontext():
                (TASKS[cfg.task] if cfg.overfit is None else overfit)(cfg)
        return jobs.value_of(folder) if in_sweep() else None
    except Exception as error:
        if cli.is_interruption(error):
            raise KeyboardInterrupt from None
        code = cli.report(error, functools.partial(leave_reason, cfg, error))
        if not in_sweep() or isinstance(error, BrokenPipeError):
            raise SystemExit(
                code
            ) from error  # not the error itself: Hydra would print a line of its own above it
        if OmegaConf.select(cfg, "sweep.on_error") == "stop" and not launchers.apart:
            raise SystemExit(code) from error
        return float("nan")


def in_place_of_run(cfg):
    """'task=plan' or 'overfit=1', as it was typed; '' where this is a run."""
    if cfg.task != "train":
        return f"task={cfg.task}"
    return f"overfit={cfg.overfit}" if cfg.overfit is not None else ""


@contextlib.contextmanager
def debugging():
    """Autograd's anomaly mode: TrainingError where a gradient is not a number, by the line that it comes from."""
    import torch

    with torch.autograd.set_detect_anomaly(True):
        try:
            yield
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            what = "The traceback of the forward call, printed above, ends with the line that it comes from"
            raise TrainingError(f"{str(error).splitlines()[0]}\n{what}.") from error


def start(several, cfg):
    """Does this run in several processes, which are this program again: as rank 0 to the last one."""
    if task := in_place_of_run(cfg):
        typed = [override for override in cli.typed() if re.match("(strategy|devices)=", override)]
        what = f"Leave out {' and '.join(typed)}" if typed else "Type strategy=single"
        raise UserError(f"{task} is for one process. {what}.")
    if not in_sweep():
        raise SystemExit(processes.start(several, sys.argv[1:]))
    folder = run_directory(cfg)
    of = {"folder": folder, "trial": trial_of(cfg)}
    code = processes.start(several, [*cli.typed(), shell.setting("run_dir", folder)], of)
    if code > 128:
        stopping.received = code - 128
        raise KeyboardInterrupt
    if code:
        raise processes.JobFailed(
            f"its {several} processes have ended with exit code {code}.", code
        )


def leave_reason(cfg, error, code):
    """Leaves in its directory why a training has failed, of a job of a sweep also why it has not begun; draws that."""
    if (job := processes.job()) or in_sweep():
        folder = Path(job["folder"] if job else HydraConfig.get().runtime.output_dir)
        leaves = code != cli.IN_USE
    else:
        folder = begun
        # One of which a process was lost goes on, as one that was killed. Without a config.yaml nothing has begun, or
        # this is another machine than that of rank 0.
        failed = code == 3 and not (launch.world_size() > 1 and launch.is_lost(error))
        leaves = failed and folder is not None and (folder / "config.yaml").is_file()
    if leaves and write_failure(folder, error, code) and code == 3 and draws_report(cfg):
        draw_report(folder)


def train(cfg):
    """Trains, tests the best weights, and leaves all of it in the run directory, which the README describes."""
    with open_dict(cfg):
        launch.timeout = cfg.rank_timeout
        launch.check_alike(
            {"code": processes.source_files(), "versions": versions_alike(), "config": settled(cfg)}
        )
        cfg.run_dir = launch.agreed("run_dir", lambda: run_directory(cfg), lasting=True)
        launch.resume_command = shell.command(
            cli.typed(), shell.setting("run_dir", cfg.run_dir), start=launch.command()
        )
    with lock.held(Path(cfg.run_dir)) if launch.is_first() else contextlib.nullcontext():
        train_in(Path(cfg.run_dir), cfg)


def versions_alike():
    """The versions that all processes of a run have alike: they may be on several machines."""
    return {name: number for name, number in provenance.versions().items() if name != "platform"}


def settled(cfg):
    """{key: value} of the settings that all processes of a run have alike."""
    settings_of_all = cli.flat(OmegaConf.to_container(cfg, resolve=True))
    return {key: value for key, value in settings_of_all.items() if not settings.record(key).local}


def train_in(folder, cfg):
    """`train` in a run directory that is this process's own."""
    global begun
    start = time.perf_counter() if in_sweep() else START
    from stoker.data.record import fingerprint
    from stoker.runs.loggers import ConfigFile, Logger
    from stoker.trainer import checkpoint, parallel

    typed, revision = cli.typed(), provenance.revision(ROOT)
    found = checkpoint.together(
        "resume", lambda: resume.to_resume(folder, cfg.resume, cfg.overwrite, cfg)
    )
    _, state, origin = found or (None, None, None)
    own = {"_target_": "stoker.trainer.callbacks.Checkpoint", "folder": str(folder / "checkpoints")}
    own |= {"monitor": cfg.monitor, "mode": cfg.monitor_mode, "overwrite": cfg.overwrite}
    saver = build("checkpoint", {**own, **cfg.checkpoint})
    # Interpolations stay as they are: nothing from the environment gets into a file.
    config = {
        key: value
        for key, value in OmegaConf.to_container(cfg, resolve=False).items()
        if key != "run_dir"
    }
    about = {
        "config": config,
        "versions": provenance.versions(),
        "world_size": launch.world_size(),
        "origin": origin,
    }
    text = f"{directory.TYPED}{json.dumps(typed)}\n{OmegaConf.to_yaml(cfg)}"
    config_file = ConfigFile(folder / "config.yaml", text, directory.WRITTEN)
    with building(cfg, [*pruning(cfg), saver, config_file]) as (trainer, data, loaders):
        git = revision()  # which has ended long ago, and would stay as a defunct process
        saver.about = {
            **about,
            "data": fingerprint(data),
            "classes": data.classes and list(data.classes),
        }
        saver.about["inputs"] = data.description()
        if cfg.profile and launch.is_first():
            from stoker.diagnostics.profiling import Profile

            trainer.callbacks.insert(0, Profile(folder / "profile"))
        loggers = [callback for callback in trainer.callbacks if isinstance(callback, Logger)]
        for logger in loggers:
            described = saved_config.for_reading({**config, "run_dir": str(folder)})
            logger.describe(described, sweep_name(), git and git.revision)
        launch.check_alike(
            {
                "data": {data.name: saver.about["data"]},
                "code": processes.source_files(own_packages(typed)),
            }
        )
        if state is not None:
            resume.check_data(state, saver.about["data"])
        begun = folder
        try:
            with ended_also_by_a_failure(loggers):
                with stopping.gently(trainer.interrupt):
                    trainer.fit(*loaders[:2], resume=state)
                if parallel.add_up(int(stopping.received is not None)):
                    stopping.received = (
                        stopping.received or signal.SIGTERM
                    )  # it came to another process
                    raise stopping.Interrupted
                result = finish(
                    folder, git, trainer, saver, data, loaders, start, draws_report(cfg)
                )
            if launch.is_first():
                print("\n".join(closing_lines(folder, result, own_packages(typed))), flush=True)
                if more := efficiency(trainer, data, result):
                    dataclasses.replace(result, **more).write(folder)
        except KeyboardInterrupt:
            if not launch.is_first():
                raise SystemExit(stopping.exit_code()) from None
            again = "" if in_sweep() else f" To go on from there:\n{launch.resume_command}"
            seen = (
                f"\nTo see it so far: {report_command(folder)}"
                if again and draws_report(cfg)
                else ""
            )
            print(f"\ninterrupted at step {saver.saved}.{again}{seen}", file=sys.stderr)
            raise SystemExit(stopping.exit_code()) from None
    if launch.is_first() and draws_report(cfg):
        draw_report(folder)
    if loggers:
        seen = json_files.read_json(folder / directory.EVALUATION) or {}
        outcome = "stopped" if result.stopped_by("time_limit") else "done"
        for logger in loggers:  # what takes longest, last
            logger.finish(result.steps, result.final_numbers(), seen, outcome)
    parallel.leave()


@contextlib.contextmanager
def ended_also_by_a_failure(loggers):
    """What comes after a fit's own end may fail, or be interrupted: the loggers' tools hear of that as well."""
    try:
        yield
    except BaseException as error:
        outcome = "stopped" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
        for logger in loggers:
            logger.end_as(outcome)
        raise


def draws_report(cfg):
    """Whether the run draws its report: by itself, but a sweep draws that of its best job alone."""
    return sweep_name() is None if cfg.report == "auto" else cfg.report


def report_command(folder):
    """The command that draws a run's report."""
    return shell.command([], start=["python", "-m", "stoker.runs.report", str(folder)])


def draw_report(folder):
    """Draws the report. The run is whole without it: what keeps it from being drawn is a warning."""
    from stoker.runs import report

    again = report_command(folder)
    try:
        print(f"report   {report.write(folder)}")
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; the run has ended before. To draw its report:\n{again}",
            file=sys.stderr,
        )
        raise SystemExit(stopping.exit_code()) from None
    except Exception as error:
        log.warning("the report could not be drawn (%s). To try again: %s", cause(error), again)


def pruning(cfg):
    """The callback of a trial, which its search may end early; none in any other run."""
    if (trial := trial_of(cfg)) is None:
        return []
    from stoker.sweeps.optuna_search import Pruning

    return [Pruning(*trial, build("sweep.pruner", cfg.sweep.pruner), cfg.monitor, cfg.monitor_mode)]


def trial_of(cfg):
    """[where its study is stored, the study's name, the trial's number] of a trial of Optuna's; None of any other run.

    The processes that a trial is trained in hear it from the one that has started them.
    """
    if of := processes.job():
        return of["trial"]
    if not in_sweep() or "pruner" not in cfg.sweep:
        return None
    from stoker.sweeps.optuna_search import place_of

    job = HydraConfig.get()
    return [*place_of(job.sweeper, Path(job.sweep.dir).resolve()), job.job.num]


def finish(folder, git, trainer, saver, data, loaders, start, draws):
    """Tests the best weights, and writes result.json, evaluation.json and the model to share.

    Where there is no test part and a report is drawn, it shows the validation part.
    """
    from stoker.diagnostics import doctor, timing
    from stoker.runs import card, examine
    from stoker.trainer import checkpoint
    from stoker.trainer.metrics import default_metrics

    result = of_fit(trainer, saver)
    result.git = git
    result = dataclasses.replace(result, **timing.result_of(trainer), **doctor.result_of(trainer))
    parts = zip(("train", "val", "test"), loaders, strict=True)
    result.samples = {name: loader.samples for name, loader in parts if loader is not None}
    if saver.best and saver.best["step"] != trainer.step:  # or these are the weights that are there
        trainer.load_state_dict(
            checkpoint.together("best", lambda: checkpoint.best(saver.folder))[1]
        )
        if trainer.step != saver.best["step"]:  # it was damaged, and these are the newest weights
            result.best = None
    _, val_loader, test_loader = loaders
    test, seen = {}, None
    if test_loader is not None:
        test, seen = examine.evaluate(trainer, test_loader, "test", data)
    elif val_loader is not None and draws:
        _, seen = examine.evaluate(trainer, val_loader, "val", data)
    weights = card.weights(trainer)
    if not launch.is_first():
        return None
    result.add_rows(folder / directory.METRICS)
    result.numbers.update(test)
    result.seconds = round(time.perf_counter() - start, 3)
    result.keep_measurements(RunResult.read(folder))
    examined = test_loader is not None or (val_loader is not None and draws)
    usual = (seen is not None or not examined) and default_metrics(
        data.kind
    ).keys() <= trainer.metrics.keys()
    card.write(folder, weights, trainer.module, data, result, usual)
    if seen is not None:
        examine.write(folder / "evaluation.json", seen, data)
    result.write(folder)
    return result


def efficiency(trainer, data, result):
    """What result.json says of FLOPs; it takes 0.2 s, so it comes after the result is shown, and not in a sweep."""
    from stoker.diagnostics import flops

    if sweep_name() or result.peak_flops is not None:
        return {}
    return flops.efficiency(trainer, data.in_shape, result.samples_per_second)


def evaluate(cfg):
    """Tests the best weights of the run directory `run` on `device`: on its own data, or on what is typed."""
    own = saved_config.of_this_machine(cfg)
    from stoker.data.record import fingerprint
    from stoker.runs import inference

    fractions = {"val_fraction", "test_fraction"} & own.dataset.keys() if cfg.split == "all" else ()
    for name in fractions:
        if f"dataset.{name}" in cli.typed_keys():
            raise UserError(
                f"split=all is not cut, and there is dataset.{name}. Leave out one of them."
            )
        own.dataset[name] = 0
    path, state = inference.best(cfg.run)
    about = inference.description(cfg.run, state)
    with building(own, state=state, about=about, split=cfg.split) as (trainer, data, loaders):
        trainer.load_state_dict(state)
        part, loader = next(
            found for found in zip(("train", "val", "test"), loaders, strict=True) if found[1]
        )
        split = "all" if cfg.split == "all" else part
        if cfg.split is None and resume.about(state).get("data") not in (None, fingerprint(data)):
            what = "this is other data than the run was trained on, or it has changed since, and is cut anew"
            log.warning(
                "%s: %s; this is its %s part. All of it: split=all.", data.name, what, split
            )
        if lacking := data.classes_without_samples(part):
            shown = ", ".join(lacking[:10]) + ", ..." * (len(lacking) > 10)
            log.warning("%s: there are no samples of %s.", data.name, shown)
        results = trainer.evaluate(loader, split)
    print(f"weights  {path}")
    print(
        f"{split:<9}"
        + "  ".join(f"{name.removeprefix(split + '/')} {value}" for name, value in results.items())
    )


def predict(cfg):
    """Writes what the best weights of the run directory `run` say of `input`: images, or the rows of a table."""
    own = saved_config.of_this_machine(cfg)
    if cfg.input is None:
        raise UserError("task=predict needs something to look at. Type input=FILE or input=FOLDER.")
    from stoker.runs import inference

    if cfg.output is not None:
        inference.check_output(cfg.output, (".csv", ".jsonl"))
    model = inference.load(cfg.run, device=cfg.device)
    ways = {
        key: own.dataset[key]
        for key in ("missing", "delimiter")
        if f"dataset.{key}" in cli.typed_keys()
    }
    if ways and model.columns is None:
        raise UserError(
            f"dataset.{next(iter(ways))} is for a table, and this run takes none. Leave it out."
        )
    if model.columns is not None and "dataset.on_bad_sample" in cli.typed_keys():
        raise UserError(
            "dataset.on_bad_sample is for images, and this run takes a table. Leave it out."
        )
    broken = check_choice(
        "dataset.on_bad_sample", own.dataset.get("on_bad_sample", "error"), ("error", "skip")
    )
    rows = inference.predict(
        model, cfg.input, batch_size=own.eval_batch_size, skip=broken == "skip", **ways
    )
    count = inference.write(rows, cfg.output)
    if cfg.output is not None:
        print(f"output   {cfg.output}: {count:,} row{'s' * (count != 1)}")


def export(cfg):
    """Writes the best weights of the run directory `run`, preprocessing included, in a `format` that others read."""
    own = saved_config.of_this_machine(cfg)
    if cfg.device not in ("auto", "cpu"):
        raise UserError(f"device={cfg.device}: an export is computed on the CPU. Leave device out.")
    from stoker.runs import exporting, inference

    exporting.check(cfg.format, cfg.output)
    model = inference.load(cfg.run)
    dataset = OmegaConf.to_container(own.dataset, resolve=True)
    dataset = {key: value for key, value in dataset.items() if key not in settings.LOADER_KEYS}
    inputs, whose = exporting.samples(model.about, dataset)
    path, difference, largest = exporting.export(
        model, cfg.run, cfg.format, inputs, whose, cfg.output
    )
    print(f"export   {path}; {path.name}.md beside it says how to use it")
    by = f"at most {difference:.2g}, on a scale of {largest:.2g}"
    print(f"check    its outputs differ by {by}, from PyTorch's on {whose}")


def lr_find(cfg):
    """Raises the learning rate from step to step, suggests one, and draws the curve."""
    from stoker.diagnostics.lr_find import draw, lr_find

    with building(cfg) as (trainer, _, (train_loader, _, _)):
        found = lr_find(trainer, train_loader)
    picture = draw(found, Path(run_directory(cfg)) / "lr_find.png")
    tried = f"{len(found.rates)} steps from {found.rates[0]:.1g} to {found.rates[-1]:.1g}"
    print(f"lr       {found.suggestion:.2g}, a tenth of where the loss was lowest in {tried}")
    print(f"curve    {picture}")
    print(f"use it   {shell.command(typed_of_run(), f'optimizer.lr={found.suggestion:.2g}')}")


def overfit(cfg):
    """Says whether the model can learn `overfit` batches by heart; TrainingError where not. Writes nothing."""
    from stoker.diagnostics.overfit import learn

    with open_dict(cfg):
        cfg.dataset.augment = []
    with building(cfg) as (trainer, _, (train_loader, _, _)):
        print(f"verdict  {learn(trainer, train_loader, cfg.overfit, cfg.max_steps)}")


def plan(cfg):
    """Says what this run would take, by a few real steps of it; trains nothing, and writes nothing."""
    from stoker.diagnostics.plan import lines, look
    from stoker.trainer import checkpoint

    folder = None if cfg.run_dir is None else Path(cfg.run_dir)
    if folder is not None and cfg.resume == "auto" and (folder / "config.yaml").exists():
        resume.check_same(f"run_dir={folder}", saved_config.load_config("run_dir", folder), cfg)
    with building(cfg) as (trainer, _, loaders):
        started = time.perf_counter() - START
        per_epoch = len(loaders[0])
        between = [cfg.checkpoint.every, (cfg.checkpoint.epochs or 0) * per_epoch]
        between += [cfg.eval_every or per_epoch] * (
            loaders[1] is not None
        )  # each may be the best, which is saved
        found = look(trainer, *loaders, every=min(filter(None, between), default=math.inf))
    at = next(iter(checkpoint.files(folder / "checkpoints")), 0) if folder is not None else 0
    found.steps -= min(at, found.steps)
    evaluations = (
        math.ceil(found.steps / (cfg.eval_every or per_epoch)) if loaders[1] is not None else 0
    )
    every, epochs = cfg.checkpoint.every, cfg.checkpoint.epochs
    saves = (found.steps // every if every else 0) + (
        math.ceil(found.steps / (per_epoch * epochs)) if epochs else 0
    )
    print(
        "\n".join(lines(found, started, evaluations, saves, cfg.checkpoint.keep, cfg.max_minutes))
    )
    where = cfg.run_dir or f"runs/<date>-{'-'.join(names_of(cfg))}"
    where += f", where it goes on at step {at:,}" if at else ""
    print(f"run      {where}; nothing was written\n         {shell.command(typed_of_run())}")


TASKS = {
    "train": train,
    "plan": plan,
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
    "lr_find": lr_find,
}


@contextlib.contextmanager
def building(cfg, more_callbacks=(), state=None, about=None, split=None):
    """(trainer, data, (train, val, test) loaders) of a config; all is let go of at the end.

    The data comes first, since the model's shapes come from it. For the `state` of a checkpoint, other
    classes and another model are a UserError before they take time and memory. The data is then prepared as that
    which the checkpoint is `about`, and of it there is the one loader that an evaluation wants, of `split`.
    """
    from stoker.data.loader import make_loaders
    from stoker.diagnostics.timing import Timing
    from stoker.trainer import device as devices
    from stoker.trainer import parallel, process, summary
    from stoker.trainer.metrics import default_metrics
    from stoker.trainer.trainer import Trainer

    process.freeze_imports()
    device = devices.choose(launchers.device(cfg.device, devices.available()))
    parallel.start(cfg.strategy, device, cfg.rank_timeout)
    dataset = OmegaConf.to_container(cfg.dataset, resolve=True)
    loading = {key: dataset.pop(key) for key in settings.LOADER_KEYS if key in dataset}
    # A function of the user's own among the augmentations comes as a _target_ with _partial_.
    loading["augment"] = [
        build("dataset.augment", item) if has_target(item) else item
        for item in loading.get("augment") or ()
    ]
    with launch.one_first(
        "data"
    ):  # it downloads, and decodes images into the cache that the others use
        data = build("dataset", dataset, **({"trained": about} if about else {}))
    if state is not None:
        resume.check_classes(state, data) if about is None else data.prepare_as(about)
    only = None if state is None else data.part_to_evaluate(split)
    sizes = {
        "batch_size": cfg.batch_size,
        "eval_batch_size": cfg.eval_batch_size,
        "drop_last": cfg.drop_last,
    }
    loaders, why = make_loaders(data, **sizes, device=device, seed=cfg.seed, only=only, **loading)
    print(summary.data_line(data, loaders, why, whole=split == "all"))

    devices.seed_generators(device, devices.mix_seed(settings.check("seed", cfg.seed), "model"))
    if state is not None:
        check_size("loss", cfg.loss)
        check_size(
            "model", cfg.model, state["model"], in_shape=data.in_shape, num_classes=data.num_classes
        )
    model = build("model", cfg.model, in_shape=data.in_shape, num_classes=data.num_classes)
    loss = build("loss", cfg.loss)
    # A Trainer with a loss or metrics of its own may mean something else by them.
    own = locate("trainer", cfg.trainer._target_)
    if getattr(own, "compute_loss", None) is Trainer.compute_loss:
        check_fit(model, loss, data)
    usual = getattr(own, "update_metrics", None) is Trainer.update_metrics and has_usual_outputs(
        model, loss, data
    )
    metrics = default_metrics(data.kind, data.target_scale) if usual else {}
    for name, node in cfg.metrics.items():
        if state is not None:
            check_size(f"metrics.{name}", node, num_classes=data.num_classes)
        metrics[name] = build(f"metrics.{name}", node, num_classes=data.num_classes)
    callbacks = [
        build(f"callbacks.{name}", node) for name, node in cfg.callbacks.items() if is_on(node)
    ]
    # Timing's clock goes on when the others are done.
    callbacks = sorted(
        [*callbacks, *more_callbacks], key=lambda callback: isinstance(callback, Timing)
    )
    parts = {"model": model, "loss": loss, "metrics": metrics, "callbacks": callbacks}
    parts |= {
        "optimizer": build("optimizer", cfg.optimizer),
        "scheduler": build("scheduler", cfg.scheduler),
    }
    with contextlib.ExitStack() as stack:
        for loader in filter(None, loaders):
            stack.callback(loader.close)
        yield (
            stack.enter_context(build("trainer", cfg.trainer, **parts, device=str(device))),
            data,
            loaders,
        )


def has_target(item):
    return isinstance(item, dict) and "_target_" in item


def in_sweep():
    return HydraConfig.get().mode.name == "MULTIRUN"


def sweep_name():
    """The name of the sweep that this is a job of; None where it is none."""
    if of := processes.job():
        return Path(of["folder"]).parent.name
    return Path(HydraConfig.get().sweep.dir).name if in_sweep() else None


def is_finished(cfg):
    """Whether this is a job of a sweep that came to its end when the same sweep was started before."""
    job = HydraConfig.get()
    again = not in_place_of_run(cfg) and cfg.resume != "never"
    return in_sweep() and again and finished(job.runtime.output_dir) is not None


def typed_of_run():
    """What was typed, without the task that was done in place of a run."""
    return [override for override in cli.typed() if not override.startswith("task=")]


def run_directory(cfg):
    """`run_dir` if it is given, in a sweep the job's folder, else a new one below runs/."""
    job = HydraConfig.get()
    if in_sweep():
        return f"{job.sweep.dir}/{job.sweep.subdir}"
    return str(cfg.run_dir or directory.claim(*names_of(cfg)))


def names_of(cfg):
    """The model's and the data set's names, for that of the run directory."""
    typed = [override.partition("=")[0] for override in cli.typed()]
    names = {group: HydraConfig.get().runtime.choices[group] for group in ("model", "dataset")}
    names |= {
        group: cfg[group]._target_.split(".")[-1] for group in names if f"{group}._target_" in typed
    }
    return names["model"], names["dataset"]


def run(start):
    """Run the command line; `start` is the `time.perf_counter()` at which the process began."""
    global START
    START = start
    trusted = cli.trusted(TRUSTED, sys.argv[1:])
    cli.run(
        hydra.main(
            config_path="pkg://stoker.configs", config_name="train", execution_whitelist=trusted
        )(main)
    )
