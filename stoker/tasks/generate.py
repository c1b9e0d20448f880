"""task=generate: continue a prompt with the best weights of a run that was trained on text."""

from omegaconf import DictConfig

from stoker.runs import saved_config
from stoker.trainer.errors import UserError, printable


def generate(cfg: DictConfig) -> None:
    """Print the `prompt`, continued by the model of the run directory `run`."""
    saved_config.of_this_machine(cfg)
    from stoker.runs import inference, samples

    model = inference.load(cfg.run, device=cfg.device)
    if model.about.get("tokens") is None:
        raise UserError(
            f"run={cfg.run}: the model was trained on {model.about['dataset']}, not on text."
        )
    if not hasattr(model.module, "generate"):
        raise UserError(
            f"run={cfg.run}: the model {type(model.module).__name__} has no generate(tokens, "
            "count, temperature, top_k, generator) method. For an example, see "
            "stoker.models.gpt.GPT."
        )
    options = {"tokens": cfg.tokens, "temperature": cfg.temperature}
    given = {name: value for name, value in options.items() if value is not None}
    text = samples.write_on(
        model.module, model.about, cfg.prompt, top_k=cfg.top_k, seed=cfg.seed, **given
    )
    # The text is untrusted, and some characters control the terminal.
    print("\n".join(printable(line) for line in text.split("\n")))
