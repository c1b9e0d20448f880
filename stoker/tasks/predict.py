"""task=predict: write the predictions of the best weights of a run for images or table rows."""

from typing import Any

from omegaconf import DictConfig

from stoker.command import arguments
from stoker.runs import saved_config
from stoker.trainer.errors import UserError, check_choice


def predict(cfg: DictConfig) -> None:
    """Write the predictions of the best weights of the run directory `run` for `input`."""
    config = saved_config.of_this_machine(cfg)
    if cfg.input is None:
        raise UserError("task=predict needs an input. Type input=FILE or input=FOLDER.")
    from stoker.runs import inference

    if cfg.output is not None:
        inference.check_output(cfg.output, (".csv", ".jsonl"))
    model = inference.load(cfg.run, device=cfg.device)
    on_bad_sample = config.dataset.get("on_bad_sample", "error")
    check_choice("dataset.on_bad_sample", on_bad_sample, ("error", "skip"))
    rows = inference.predict(
        model,
        cfg.input,
        batch_size=config.eval_batch_size,
        skip=on_bad_sample == "skip",
        **table_options(config, model),
    )
    count = inference.write(rows, cfg.output)
    if cfg.output is not None:
        print(f"output   {cfg.output}: {count:,} row{'' if count == 1 else 's'}")


def table_options(config: DictConfig, model: Any) -> dict[str, Any]:
    """Return the typed options for reading a table; UserError for options of another input."""
    typed = arguments.typed_keys()
    takes_table = model.columns is not None
    options = {}
    for key in ("missing", "delimiter", "decimal", "marks"):
        if f"dataset.{key}" in typed:
            options[key] = config.dataset[key]
    if options and not takes_table:
        raise UserError(
            f"dataset.{next(iter(options))} is for a table, but this run takes no table. "
            "Leave it out."
        )
    if takes_table and "dataset.on_bad_sample" in typed:
        raise UserError(
            "dataset.on_bad_sample is for images, but this run takes a table. Leave it out."
        )
    return options
