"""Build the parts of a run from its config: data, loaders, model, metrics and Trainer."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from stoker import configs
from stoker.command import ranks, settings
from stoker.command.build import build, build_dataset, check_node, check_shapes, is_on
from stoker.command.dotted import plain
from stoker.command.trust import locate
from stoker.runs import directory
from stoker.sweeps import launchers
from stoker.trainer import launch, terminal
from stoker.trainer.errors import UserError

if TYPE_CHECKING:
    import torch

    from stoker.data.record import Data
    from stoker.trainer.callbacks import Callback
    from stoker.trainer.trainer import Trainer


@dataclasses.dataclass
class Parts:
    """The parts of a run. `loaders` contains None for each split that the data lacks."""

    trainer: "Trainer"
    data: "Data"
    loaders: tuple[Any, Any, Any]  # for train, val (or several by name) and test

    def threads(self, cfg: DictConfig) -> contextlib.AbstractContextManager[None]:
        """Return the context for a fit: one thread if the steps are too small for several."""
        from stoker.command import tuning

        if "threads" not in cfg.tune or self.trainer.device.type != "cpu":
            return contextlib.nullcontext()
        return tuning.few_threads(self.trainer.module, cfg.batch_size)


def by_split(loaders: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Return {split: loader} for every split that has a loader."""
    from stoker.trainer.loading import by_name

    train, val, test = loaders
    named = {"train": train, **by_name(val), "test": test}
    return {name: loader for name, loader in named.items() if loader is not None}


@contextlib.contextmanager
def building(
    cfg: DictConfig,
    more_callbacks: Sequence["Callback"] = (),
    *,
    resumes: bool = False,
    state: dict[str, Any] | None = None,
    about: dict[str, Any] | None = None,
    split: str | None = None,
) -> Iterator[Parts]:
    """Build the parts that a config describes, and close them at the end.

    The data is built first, since it determines the shapes of the model.

    Args:
        cfg: The checked config.
        more_callbacks: Callbacks in addition to those of the config.
        resumes: Whether the weights come from a checkpoint instead of `init_from`.
        state: The state of a checkpoint to evaluate. Raises UserError if the data has different
            classes, or if the model has different shapes. Only the evaluated split gets a loader.
        about: The description of the data that the checkpoint was trained on. The new data is
            prepared in the same way.
        split: The split to evaluate.
    """
    from stoker.command import tuning
    from stoker.data.description import columns_line, data_line
    from stoker.data.samples import loader_line
    from stoker.trainer import device as devices
    from stoker.trainer import misuse, parallel, seeding

    device = devices.choose(launchers.device(cfg.device, devices.available()))
    tuning.tune_process(device, list(cfg.tune), cfg.deterministic)
    parallel.start(cfg.strategy, device)
    data, loading = build_data(cfg, about)
    only = None
    if state is not None:
        if about is not None:
            data.prepare_as(about)
        only = data.part_to_evaluate(split)
    loaders, why = build_loaders(cfg, data, device, only, loading)
    terminal.show(data_line(data, by_split(loaders), why))
    if loader_line(data) and only is None:
        terminal.show(loader_line(data))
    if data.table is not None:
        terminal.show(f"columns  {columns_line(data.description())}")
        if data.kind == "regression":
            terminal.show(f"loss     on {data.table['target']} after standardization")

    seeding.seed_generators(device, seeding.mix_seed(cfg.seed, "model"))
    model, loss = build_model(cfg, data, state)
    if cfg.init_from is not None and not resumes and state is None:
        from stoker.runs.weights import init_from

        report = str(init_from(model, cfg.init_from))
        terminal.show("init     " + report.replace("\n", "\n         "))
    if state is None and cfg.model_summary:
        from stoker.diagnostics import layers

        in_shape = sizes(data).get("in_shape")
        print("\n".join(layers.lines(model, in_shape, data.tokens is not None)))
    trainer = build(
        "trainer",
        cfg.trainer,
        model=model,
        loss=loss,
        metrics=build_metrics(cfg, model, loss, data),
        callbacks=build_callbacks(cfg, [*samples(cfg, model, data), *more_callbacks]),
        optimizer=build("optimizer", cfg.optimizer),
        scheduler=build("scheduler", cfg.scheduler),
        **{**settings_of_trainer(cfg), "device": str(device)},
    )
    misuse.check_built(trainer)
    with contextlib.ExitStack() as stack:
        for loader in by_split(loaders).values():
            if hasattr(loader, "close"):  # the user's own loader may lack it
                stack.callback(loader.close)
        stack.enter_context(trainer)
        yield Parts(trainer, data, loaders)


def settings_of_trainer(cfg: DictConfig) -> dict[str, Any]:
    """Return the run's settings, such as epochs, that the config of the Trainer does not set."""
    usual = OmegaConf.load(configs.FOLDER / "trainer/default.yaml")
    return {
        key: value
        for key, value in plain(cfg, resolve=True).items()
        if key in usual and key not in cfg.trainer
    }


def build_data(cfg: DictConfig, about: Mapping[str, Any] | None) -> tuple["Data", dict[str, Any]]:
    """Return the data set, and the loader settings from the config group `dataset`."""
    dataset = plain(cfg.dataset, resolve=True)
    loading = {key: dataset.pop(key) for key in settings.LOADER_KEYS if key in dataset}
    augmentations = loading.get("augment") or []
    for i, item in enumerate(augmentations):
        if isinstance(item, dict) and "_target_" in item:  # the user's own function
            augmentations[i] = build("dataset.augment", item)
    loading["augment"] = augmentations
    trained = {"trained": about} if about else {}
    with ranks.one_first():  # fills the caches that the other processes use
        return build_dataset(dataset, **trained), loading


def build_loaders(
    cfg: DictConfig,
    data: "Data",
    device: "torch.device",
    only: str | None,
    loading: Mapping[str, Any],
) -> tuple[tuple[Any, Any, Any], str]:
    """Return the (train, val, test) loaders, and a phrase that says where the data is held."""
    from stoker.data.loader import make_loaders

    loaders, why = make_loaders(
        data,
        batch_size=cfg.batch_size,
        eval_batch_size=cfg.eval_batch_size,
        drop_last=cfg.drop_last,
        device=device,
        seed=cfg.seed,
        only=only,
        limit_train=cfg.limit_train,
        limit_val=cfg.limit_val,
        **loading,
    )
    if only is None and cfg.steps_per_epoch is not None:
        loaders = (in_epochs(loaders[0], cfg.steps_per_epoch), *loaders[1:])
    return loaders, why


def in_epochs(loader: Any, steps: int) -> Any:
    """Make each epoch of a loader `steps` steps long. Raise UserError if its length is fixed."""
    from stoker.trainer.loading import IterableLoader

    if isinstance(loader, IterableLoader):
        loader = loader.loader
    if hasattr(loader, "seek"):
        raise UserError(
            f"steps_per_epoch={steps}: this data set already has a fixed epoch length of "
            f"{len(loader)} steps. Remove steps_per_epoch."
        )
    return IterableLoader(loader, steps_per_epoch=steps)


def build_model(
    cfg: DictConfig, data: "Data", state: Mapping[str, Any] | None
) -> tuple["torch.nn.Module", Any]:
    """Return the model and the loss; raise UserError if they do not fit the checkpoint `state`."""
    from stoker.models import gpt, recompute

    shapes = sizes(data)
    loss_node = plain(cfg.loss, resolve=True)
    if loss_node.get("weight") == "balanced":
        loss_node["weight"] = data.balanced_weights()
    if state is not None:
        check_shapes(cfg.model, state["model"], **shapes)
    model = build("model", cfg.model, **shapes)
    if cfg.activation_checkpointing:
        recompute.checkpoint_blocks(model)
    loss = build("loss", loss_node)
    if data.tokens is not None:
        gpt.take_rows(loss)
    return model, loss


def sizes(data: "Data") -> dict[str, Any]:
    """Return the arguments that the data offers to models and metrics; {} if they are unknown."""
    if data.kind == "other":
        return {}
    return {"in_shape": data.in_shape, "num_classes": data.num_classes}


def build_metrics(
    cfg: DictConfig,
    model: "torch.nn.Module",
    loss: Any,
    data: "Data",
) -> dict[str, Any]:
    """Return the default metrics, if they suit the task, and the metrics from the config."""
    from stoker.command.sample_check import check_fit, has_usual_outputs
    from stoker.data.record import default_metrics
    from stoker.trainer.overrides import is_usual

    # A Trainer subclass may use the loss and the metrics differently, so skip the checks for it.
    kind = locate("trainer", cfg.trainer._target_)
    is_known = data.kind != "other"  # if not, the first batch shows which metrics fit
    if is_known and is_usual(kind, "compute_loss"):
        check_fit(model, loss, data)
    metrics: dict[str, Any] = {}
    if is_known and is_usual(kind, "update_metrics") and has_usual_outputs(model, loss, data):
        dims = len(data.target_shape)
        metrics = default_metrics(
            data.kind, data.target_scale, target_dims=dims, num_classes=data.num_classes
        )
    for name, node in cfg.metrics.items():
        key = f"metrics.{name}"
        metrics[name] = build(key, node, **sizes(data))
    return metrics


def samples(cfg: DictConfig, model: "torch.nn.Module", data: "Data") -> list["Callback"]:
    """Return the callbacks that write sample texts for the report of a language model."""
    writes = data.tokens is not None and hasattr(model, "generate")
    if not writes or cfg.run_dir is None or not cfg.report:
        return []
    from stoker.runs.samples import Samples

    return [Samples(Path(cfg.run_dir) / directory.SAMPLES, data.description())]


def build_callbacks(cfg: DictConfig, more: Sequence["Callback"]) -> list["Callback"]:
    """Return the config's enabled callbacks, and then `more`."""
    callbacks = []
    for name, node in cfg.callbacks.items():
        key = f"callbacks.{name}"
        if is_on(node):
            callbacks.append(build(key, node))
        elif node is not None:
            check_node(key, plain(node))  # a misspelled key may have turned it off
    return in_order([*callbacks, *more])


def in_order(callbacks: Iterable["Callback"]) -> list["Callback"]:
    """Return the callbacks for this rank; Timing comes last, to measure the others."""
    from stoker.diagnostics.timing import Timing

    here = [one for one in callbacks if launch.is_first() or not one.first_rank_only]
    return sorted(here, key=lambda callback: isinstance(callback, Timing))
