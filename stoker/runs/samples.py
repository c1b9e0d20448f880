"""Text from a language model: samples during training, and continuations of a prompt."""

import math
from pathlib import Path
from typing import Any

import torch

from stoker.data.description import Description
from stoker.data.text import decode, encode
from stoker.runs.loggers import JSONL
from stoker.runs.rows import Row
from stoker.trainer import parallel
from stoker.trainer.errors import cause, log
from stoker.trainer.seeding import mix_seed
from stoker.trainer.trainer import Trainer

TOKENS = 200  # tokens in a sample


def write_on(
    module: Any,
    about: Description,
    prompt: str | None = None,
    tokens: int = TOKENS,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return the prompt, followed by `tokens` new tokens from `module.generate`.

    The text depends only on the weights and these arguments. `about` is the description of the
    data, which contains the vocabulary. Without a prompt, the text begins after a newline.

    Raises:
        UserError: The prompt has a character that the model does not know.
    """
    begin = encode(prompt or "", about)
    hidden = 0
    if not begin:
        has_lines = about["tokens"] == "bytes" or "\n" in (about["classes"] or [])
        begin = encode("\n", about) if has_lines else [0]
        hidden = len(begin)
    device = next(module.parameters()).device
    ids = module.generate(
        torch.tensor([begin], device=device),
        tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(mix_seed(seed, "generate")),
    )
    return decode(ids[0, hidden:].tolist(), about)


class Samples(JSONL):
    """Append a sample of text to the file `path` at each evaluation.

    The text is generated with the evaluated weights, and does not affect the results of the run.
    """

    def __init__(self, path: Path, about: Description) -> None:
        super().__init__(path)
        self.about = about
        self.failed = False

    def on_log(self, trainer: Trainer, row: Row) -> None:
        sharded = any(map(parallel.is_shard, trainer.module.parameters()))
        # If the loss is nan, the weights cannot generate text. If they are sharded, no process has
        # all of them.
        if sharded or not math.isfinite(row.get("val/loss", math.nan)):
            return
        try:
            with trainer.evaluating():
                sample = write_on(trainer.module, self.about, seed=trainer.seed)
        except Exception as error:  # the user's `generate` can raise any exception
            if not self.failed:
                log.warning(
                    "%s.generate failed (%s). Training continues without text samples. "
                    "For a working example, see stoker.models.gpt.GPT.",
                    type(trainer.module).__name__,
                    cause(error),
                )
            self.failed = True
            return
        super().on_log(trainer, {"step": row["step"], "epoch": row["epoch"], "text": sample})
