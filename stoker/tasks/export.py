"""task=export: write the best weights of a run in a format that other programs can read."""

from omegaconf import DictConfig

from stoker.command import settings
from stoker.command.dotted import plain
from stoker.data.description import names_of
from stoker.runs import saved_config
from stoker.trainer import terminal
from stoker.trainer.errors import UserError, first_few, item_as_typed


def export(cfg: DictConfig) -> None:
    """Write the model of the run directory `run` in `format`, and check the file's outputs."""
    config = saved_config.of_this_machine(cfg)
    if cfg.device not in ("auto", "cpu"):
        raise UserError(f"device={cfg.device}: models are exported on the CPU. Remove device.")
    from stoker.runs import exporting, inference

    exporting.check(cfg.format, cfg.output)
    model = inference.load(cfg.run)
    if model.about["kind"] == "other":
        raise UserError(
            f"run={cfg.run}: format={cfg.format} needs the shape of the inputs, which is unknown.\n"
            "Use the run's model.safetensors, or call stoker.load and export the model with torch."
        )
    dataset = plain(config.dataset, resolve=True)
    dataset = {key: value for key, value in dataset.items() if key not in settings.LOADER_KEYS}
    inputs, whose = exporting.samples(model.about, dataset)
    path, outputs = exporting.export(model, cfg.run, cfg.format, inputs, whose, cfg.output)
    terminal.show(f"export   {path}")
    terminal.show(f"takes    inputs: {exporting.describe(inputs)}")
    if model.about["table"] is not None:
        columns = model.about["table"]["columns"]
        names = [item_as_typed(name) for column in columns for name in names_of(column)]
        how = "unscaled; for a category, 1 in its column and 0 in the others"
        terminal.show(f"columns  {first_few(names, 20)}; {how}")
    values = "logits" if model.about["kind"] == "classification" else "predicted values"
    terminal.show(f"returns  outputs: {values}, {exporting.describe(outputs)}")
    tolerance = f"{exporting.TOLERANCE:.2%} of the largest output"
    terminal.show(f"check    on {whose}, the outputs match PyTorch's to within {tolerance}")
