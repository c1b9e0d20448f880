"""The one entry point, and the only file that reads the config: `python train.py --help` shows what can be set."""

import contextlib
import datetime
import inspect
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer import cli
from trainer.errors import TrainingError, UserError, check_choice, check_number, did_you_mean

START = time.perf_counter()
# Constructors that a `_target_` may name. Those of your own packages: a `_target_` typed on the command line is trusted, one in a file wants trusted=[mypackage].
TRUSTED = [
    "trainer.*",
    "models.*",
    "data.*",
    "examples.*",
    "torch.nn.*",
    "torch.optim.*",
    "torchvision.models.*",
    "torchmetrics.*",
]
LOADING = ("augment", "resident", "workers")  # the loaders' settings, which stand beside the data set's
HARMLESS = (
    "run_dir",
    "resume",
    "device",
    "strategy",
    "log_every",
    "task",
    "run",
    "trusted",
    "dataset.workers",
    "dataset.resident",
    "dataset.root",
)


@hydra.main(config_path="configs", config_name="train", execution_whitelist=TRUSTED + cli.trusted(sys.argv[1:]))
def main(cfg):
    """Checks the config, which needs no torch, and does `task`; in a sweep, a job that fails is reported and the next one begins."""
    job = HydraConfig.get()
    try:
        if in_sweep():
            print(f"\njob {job.job.num}    {' '.join(job.overrides.task)}", flush=True)
            if cfg.run_dir is not None:
                raise UserError("run_dir names one run. For a sweep, type hydra.sweep.dir=DIR.")
        cli.check_config(cfg)
        check_choice("task", cfg.task, TASKS)
        retarget(cfg)
        TASKS[cfg.task](cfg)
    except Exception as error:
        code = cli.report(error)
        if not in_sweep() or code == cli.BUG:
            raise SystemExit(code) from error  # not the error itself: Hydra would print a line of its own above it
        write_json(
            Path(job.runtime.output_dir) / "result.json", {"overrides": list(job.overrides.task), "error": str(error)}
        )


def train(cfg):
    """Trains, and tests the best weights: the run directory then holds config.yaml, metrics.jsonl, checkpoints/ and result.json."""
    start = time.perf_counter() if in_sweep() else START
    from trainer import checkpoint, summary
    from trainer.callbacks import Checkpoint
    from trainer.loggers import RunRecord

    with open_dict(cfg):
        cfg.run_dir = run_directory(cfg)
    folder = Path(cfg.run_dir)
    resume = to_resume(cfg, folder)
    record = RunRecord(
        folder / "config.yaml", OmegaConf.to_yaml(cfg)
    )  # interpolations stay as they are: nothing from the environment gets into the file
    saver = Checkpoint(folder / "checkpoints", **cfg.checkpoint, monitor=cfg.monitor, mode=cfg.monitor_mode)
    with building(cfg, [record, saver]) as (trainer, (train_loader, val_loader, test_loader)):
        try:
            trainer.fit(train_loader, val_loader, resume=resume)
        except KeyboardInterrupt:
            print(f"\ninterrupted at step {trainer.step}. To go on:\n{again(folder)}", file=sys.stderr)
            raise SystemExit(cli.INTERRUPTED) from None
        steps = trainer.step
        best = checkpoint.best(folder / "checkpoints")
        if best is not None and saver.best:
            trainer.load_state_dict(best[1])
        test = trainer.evaluate(test_loader, "test") if test_loader is not None else {}

        result = {
            "overrides": list(HydraConfig.get().overrides.task),
            "best": {"name": saver.name, "mode": "max" if saver.sign > 0 else "min", **saver.best} if saver.best else None,
            **record.last, **test, "seconds": round(time.perf_counter() - start, 3),
            "samples_per_second": round(record.samples / record.seconds) if record.seconds else None,
            "parameters": sum(p.numel() for p in trainer.module.parameters()), "memory_mib": trainer.memory_report(),
            "device": str(trainer.device), "precision": str(trainer.dtype or "torch.float32").removeprefix("torch."), "stopped": trainer.stop_reason,
            "steps": steps, "total_steps": trainer.total_steps,
            "versions": versions(),
        }  # fmt: skip
    write_json(folder / "result.json", result)

    if saver.best:
        print(f"best     {saver.name} {summary.number(saver.best['value'])} at step {saver.best['step']:,}")
    if test:
        print(
            "test     "
            + "  ".join(
                f"{name.removeprefix('test/')} {summary.number(value)}"
                for name, value in test.items()
                if isinstance(value, float)
            )
        )
    speed = f", with {result['samples_per_second']:,} samples/s in training" if result["samples_per_second"] else ""
    print(f"time     {summary.seconds(result['seconds'])}{speed}")
    print(f"run      {folder}\n         python train.py task=evaluate run={folder}")
    if result["steps"] < result["total_steps"]:
        print(f"         {again(folder)}")


def evaluate(cfg):
    """Tests the best weights of the run directory `run`, as its own config has it, on `device`."""
    from trainer import checkpoint

    if cfg.run is None:
        raise UserError("task=evaluate needs a run directory. Type run=DIR.")
    folder = Path(cfg.run)
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"run={folder}: there is no config.yaml, so it is no run directory.{did_you_mean(folder, Path(folder.parent).glob('*'))}"
        )
    run_cfg = OmegaConf.load(folder / "config.yaml")
    run_cfg.device, run_cfg.run_dir = cfg.device, str(folder)
    best = checkpoint.best(folder / "checkpoints")
    if best is None:
        raise UserError(
            f"run={folder}: there is no checkpoint in it. Type the command that made it, with run_dir={folder}."
        )
    with building(run_cfg) as (trainer, (_, val_loader, test_loader)):
        trainer.load_state_dict(best[1])
        split, loader = ("test", test_loader) if test_loader is not None else ("val", val_loader)
        if loader is None:
            raise UserError(f"run={folder}: its data set has neither a test nor a validation split.")
        results = trainer.evaluate(loader, split)
    print(f"weights  {best[0]}")
    print(f"{split:<9}" + "  ".join(f"{name.removeprefix(split + '/')} {value}" for name, value in results.items()))


def lr_find(cfg):
    """Raises the learning rate from step to step, shows where the loss falls fastest, and draws the curve."""
    from trainer.lr_find import draw, lr_find

    with building(cfg) as (trainer, (train_loader, _, _)):
        found = lr_find(trainer, train_loader)
    picture = draw(found, Path(run_directory(cfg)) / "lr_find.png")
    print(
        f"lr       {found.suggestion:.2g}, a tenth of where the loss was lowest in {len(found.rates)} steps from {found.rates[0]:.1g} to {found.rates[-1]:.1g}"
    )
    print(f"curve    {picture}")
    typed = [
        override for override in HydraConfig.get().overrides.task if not override.startswith(("task=", "optimizer.lr="))
    ]
    print(f"use it   {shlex.join(['python', 'train.py', *typed, f'optimizer.lr={found.suggestion:.2g}'])}")


TASKS = {"train": train, "evaluate": evaluate, "lr_find": lr_find}


@contextlib.contextmanager
def building(cfg, more_callbacks=()):
    """(trainer, (train, val, test) loaders) of a config: the data first, since the model's shapes come from it. All is let go of at the end."""
    from data.loader import make_loaders
    from trainer import device as devices
    from trainer.metrics import default_metrics

    device = devices.choose(cfg.device)
    dataset = OmegaConf.to_container(cfg.dataset, resolve=True)
    loading = {key: dataset.pop(key) for key in LOADING}
    # A function of the user's own among the augmentations comes as a _target_ with _partial_.
    loading["augment"] = [build("dataset.augment", item) if "_target_" in item else item for item in loading["augment"]]
    data = build("dataset", dataset)
    sizes = {"batch_size": cfg.batch_size, "eval_batch_size": cfg.eval_batch_size, "drop_last": cfg.drop_last}
    loaders, why = make_loaders(data, **sizes, device=device, seed=cfg.seed, **loading)
    counts = ", ".join(
        f"{loader.samples:,} {name}"
        for name, loader in zip(("train", "val", "test"), loaders, strict=True)
        if loader is not None
    )
    print(
        f"data     {data.name}: {counts} samples of {'x'.join(map(str, data.in_shape))}{' numbers' * (len(data.in_shape) == 1)}, {what_to_predict(data)}; {why}"
    )

    devices.seed_generators(device, devices.mix_seed(check_number("seed", cfg.seed, whole=True, least=0), "model"))
    model = build("model", cfg.model, in_shape=data.in_shape, num_classes=data.num_classes)
    loss = build("loss", cfg.loss)
    metrics = default_metrics(data.kind, data.target_scale) if is_plain(cfg) else {}
    metrics |= {
        name: build(f"metrics.{name}", node, num_classes=data.num_classes) for name, node in cfg.metrics.items()
    }
    check_outputs(cfg, model, loss, data)
    on = {name: node for name, node in cfg.callbacks.items() if node is not None and None not in node.values()}
    callbacks = [build(f"callbacks.{name}", node) for name, node in on.items()]
    parts = {"model": model, "loss": loss, "metrics": metrics, "callbacks": [*callbacks, *more_callbacks]}
    parts |= {"optimizer": build("optimizer", cfg.optimizer), "scheduler": build("scheduler", cfg.scheduler)}
    with contextlib.ExitStack() as stack:
        for loader in filter(None, loaders):
            stack.callback(loader.close)
        yield stack.enter_context(build("trainer", cfg.trainer, **parts, device=str(device))), loaders


def build(key, node, **offered):
    """The object that a config node describes. Of the `offered` arguments it gets those that its constructor has and the node does not set."""
    node = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise UserError(f"{key}: this needs a _target_, the dotted name of what to build. Type {key}._target_=...")
    target = node["_target_"]
    parameters, takes_more = arguments_of(key, target)
    unknown = [name for name in node if not name.startswith("_") and name not in parameters]
    if unknown and not takes_more:
        settings = [name for name in parameters if name not in offered]
        raise UserError(
            f"{key}.{unknown[0]}: {target} has no such argument.{did_you_mean(unknown[0], settings)}\nIt has {', '.join(settings)}."
        )
    # As a partial, which is called here: Hydra would copy the objects that it is handed.
    try:
        factory = hydra.utils.instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        raise UserError(f"{key}._target_={target}: not among what may be built, whatever is trusted.") from error
    if node.get("_partial_"):
        return factory
    # A constructor that hands **kwargs on: a Trainer of one's own takes all of them, torchvision's models the number of classes.
    passed = {
        name: value
        for name, value in offered.items()
        if name in parameters or (takes_more and (key == "trainer" or name == "num_classes"))
    }
    passed = {name: value for name, value in passed.items() if name not in node or key == "trainer"}
    if missing := [name for name, needed in parameters.items() if needed and name not in passed and name not in node]:
        raise UserError(f"{key}.{missing[0]}: {target} needs this argument. Type +{key}.{missing[0]}=...")
    try:
        return factory(**passed)
    except UserError:
        raise
    except ValueError as error:  # how torch refuses a value
        raise UserError(f"{key} ({target}): {str(error).splitlines()[0]}") from error


def locate(key, target):
    """What `_target_` names, if it is trusted and there; UserError if not."""
    try:
        return hydra.utils.get_object(target)
    except InstantiationException:
        raise UserError(
            f"{key}._target_={target}: not among what may be built. Type trusted=[{target.split('.')[0]}] if it is your own."
        ) from None
    except (ImportError, ValueError) as error:
        cause = error.__cause__ or error
        raise UserError(f"{key}._target_={target}: {str(cause).splitlines()[0]}.") from error


def arguments_of(key, target):
    """({name: whether it has no default}, whether there are **kwargs) of the constructor or function `target`."""
    parameters = inspect.signature(locate(key, target)).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def retarget(cfg):
    """Takes the keys that belong to a group's own target, and that were not typed, out of a node whose _target_ was typed."""
    typed = {override.partition("=")[0].lstrip("+") for override in HydraConfig.get().overrides.task}
    for name in [name.removesuffix("._target_") for name in typed if name.endswith("._target_")]:
        node = OmegaConf.select(cfg, name)
        parameters, takes_more = arguments_of(name, node["_target_"])
        own = [
            key for key in node if not key.startswith("_") and key not in parameters and f"{name}.{key}" not in typed
        ]
        for key in own if not (takes_more and name == "trainer") else []:
            if key not in LOADING or name != "dataset":
                with open_dict(cfg):
                    del node[key]


def check_outputs(cfg, model, loss, data):
    """UserError where the loss is not one for this kind of data, or where the model does not take its inputs or gives another number of outputs.

    Two samples of zeros, in evaluation mode on the CPU: on a GPU a class too many is an assertion in a kernel, which ends the process.
    """
    import torch

    kind = OmegaConf.select(cfg, "loss._target_", default="").split(".")[-1]
    if kind in ("MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss") and data.kind == "classification" and is_plain(cfg):
        raise UserError(
            f"loss={kind} is for numbers, and {data.name} has {data.num_classes} classes. Type loss=cross_entropy."
        )
    if kind == "CrossEntropyLoss" and data.kind == "regression" and is_plain(cfg):
        raise UserError(
            f"loss={kind} is for classes, and {data.name} has numbers to predict. Type loss=mse (or l1, huber)."
        )
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(torch.zeros(2, *data.in_shape))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"model={cfg.model._target_} does not take inputs of shape {tuple(data.in_shape)}: {str(error).splitlines()[0]}"
        ) from error
    finally:
        model.train()
    shape = tuple(getattr(outputs, "shape", ()))
    if is_plain(cfg) and shape != (2, data.num_classes):
        raise UserError(
            f"model={cfg.model._target_} gives outputs of shape {shape[1:]}, and {data.name} needs ({data.num_classes},)."
        )


def is_plain(cfg):
    """Whether the loss is computed as the Trainer does it; a Trainer of one's own may mean something else by it."""
    from trainer import Trainer

    return locate("trainer", cfg.trainer._target_).compute_loss is Trainer.compute_loss


def what_to_predict(data):
    if data.kind == "classification":
        return f"{data.num_classes} classes"
    return "1 number" if data.num_classes == 1 else f"{data.num_classes} numbers"


def again(folder):
    """The command that continues a run."""
    typed = [override for override in HydraConfig.get().overrides.task if not override.startswith("run_dir=")]
    return shlex.join(["python", "train.py", *typed, f"run_dir={folder}"])


def in_sweep():
    return HydraConfig.get().mode.name == "MULTIRUN"


def run_directory(cfg):
    """`run_dir` if it is given, a sweep's folder for this job, else runs/<date>-<model>-<dataset> with a number where that is taken."""
    job = HydraConfig.get()
    if in_sweep():
        return f"{job.sweep.dir}/{job.sweep.subdir}"
    if cfg.run_dir is not None:
        return str(cfg.run_dir)
    choices = job.runtime.choices
    name = f"runs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{choices['model']}-{choices['dataset']}"
    return next(path for path in (name, *(f"{name}-{i}" for i in range(2, 1000))) if not Path(path).exists())


def to_resume(cfg, folder):
    """The checkpoint file to go on from, or None: as `resume` says, and never with another config than the run directory's own."""
    from trainer import checkpoint

    if cfg.resume not in ("auto", "never"):
        if not Path(cfg.resume).is_file():
            raise UserError(f"resume={cfg.resume}: there is no such file. Type auto, never, or a checkpoint file.")
        return cfg.resume
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={folder}: this is a file. Type the name of a folder.")
    if not checkpoint.files(folder / "checkpoints"):
        return None
    if cfg.resume == "never":
        raise UserError(
            f"run_dir={folder} has checkpoints, and resume=never would overwrite them. Type another run_dir."
        )
    before, now = (cli.flat(config) for config in (OmegaConf.load(folder / "config.yaml"), cfg))
    other = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not key.startswith(HARMLESS)]
    if other:
        differences = ", ".join(f"{key}={now.get(key)} (was {before.get(key)})" for key in other[:5])
        raise UserError(
            f"run_dir={folder} holds a run with other settings: {differences}.\nType the settings it had to continue it, or another run_dir."
        )
    return checkpoint.newest(folder / "checkpoints")[0]


def write_json(path, contents):
    """Writes it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def versions():
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hydra": hydra.__version__,
        "platform": platform.platform(),
    }


if __name__ == "__main__":
    cli.run(main)
