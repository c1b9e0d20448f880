"""task=predict: write the predictions of a run's best weights for files or for the run's data."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from stoker.command import arguments
from stoker.runs import saved_config
from stoker.tasks.evaluate import tested
from stoker.trainer.errors import UserError
from stoker.trainer.number_format import counted


def predict(cfg: DictConfig) -> None:
    """Write the predictions of the best weights in the run directory `run`.

    The predictions are for the files of `input`, or for the split `split` of the run's own data.
    """
    if (cfg.input is None) == (cfg.split is None):
        raise UserError(
            "task=predict needs either input= or split=. Type input=FILE or input=FOLDER for new "
            "data, or split=test for a split of the run's data."
        )
    from stoker.runs import inference

    if cfg.output is not None:
        inference.check_output(cfg.output, (".csv", ".jsonl"))
    rows = for_split(cfg) if cfg.input is None else for_input(cfg)
    count = inference.write(rows, cfg.output)
    if cfg.output is not None:
        print(f"output   {cfg.output}: {counted(count, 'row')}")


def for_input(cfg: DictConfig) -> Iterator[Any]:
    """Yield the predictions for an image, for a folder of images or for the rows of a table."""
    config = saved_config.of_this_machine(cfg)
    from stoker.runs import inference

    model = inference.load(cfg.run, device=cfg.device)
    return inference.predict(
        model,
        cfg.input,
        batch_size=config.eval_batch_size,
        skip=config.dataset.get("on_bad_sample") == "skip",
        **table_options(config, model),
    )


def for_split(cfg: DictConfig) -> Iterator[Any]:
    """Yield the predictions for a split of the run's own data, computed one batch at a time.

    Each prediction has the index of its sample in the split, and the sample's file or line if
    known.
    """
    from stoker.runs import examine, inference

    with contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is reserved for the rows
            _, parts, name, loader = stack.enter_context(tested(cfg))
        part = parts.data.parts()[name]
        model = inference.Trained(parts.trainer.module, parts.data.description())
        count = 0
        for outputs in parts.trainer.predictions(loader):
            inference.check_finite(outputs, model.about, "sample ", range(count, sys.maxsize))
            for answer in inference.answers(model.in_units(outputs), model.about):
                yield {"sample": count, **examine.place_of(part, count), **answer}
                count += 1


def table_options(config: DictConfig, model: Any) -> dict[str, Any]:
    """Return the typed options for reading a table; raise UserError for options of other inputs."""
    typed = arguments.typed_keys()
    keys = ("missing", "delimiter", "decimal", "marks")
    options = {key: config.dataset[key] for key in keys if f"dataset.{key}" in typed}
    unused = "on_bad_sample" if model.columns is not None else next(iter(options), "")
    if f"dataset.{unused}" in typed:
        raise UserError(
            f"dataset.{unused}: this key does not apply to this kind of input. Remove it."
        )
    return options
