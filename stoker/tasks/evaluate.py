"""task=evaluate: test the best weights of a run on its own data, or on other data."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from stoker.command import arguments
from stoker.runs import resume, saved_config
from stoker.tasks.parts import Parts, building, by_split
from stoker.trainer import terminal
from stoker.trainer.errors import UserError, log
from stoker.trainer.number_format import number


def evaluate(cfg: DictConfig) -> None:
    """Print the results of the best weights in the run directory `run`."""
    with tested(cfg) as (path, parts, part, loader):
        split = "all" if cfg.split == "all" else part
        results = parts.trainer.evaluate(loader, split)
    # A terminal shows rounded numbers; a file or a pipe gets the exact ones.
    shown = number if terminal.is_terminal(sys.stdout) else str
    numbers = [f"{name.removeprefix(f'{split}/')} {shown(v)}" for name, v in results.items()]
    print(f"weights  {path}")
    print(f"{split:<9}{'  '.join(numbers) or 'no loss or metrics'}")


@contextlib.contextmanager
def tested(cfg: DictConfig) -> Iterator[tuple[Path, Parts, str, Any]]:
    """Build the parts of a run with its best weights, for one split of its data or of other data.

    Yields (path of the checkpoint, parts, name of the split, loader of the split).
    """
    config = saved_config.of_this_machine(cfg)
    from stoker.runs import inference
    from stoker.trainer.loading import length_of

    if cfg.split == "all":
        leave_uncut(config)
    path, state = inference.best(cfg.run)
    about = inference.description(cfg.run, state)
    with building(config, state=state, about=about, split=cfg.split) as parts:
        parts.trainer.load_state_dict(state)
        part, loader = next(iter(by_split(parts.loaders).items()))
        if part == "train" and length_of(loader) is None:
            raise UserError(
                f"split={cfg.split}: the train split has no length, so reading it may never end.\n"
                "Type split=val or split=test."
            )
        if cfg.split != "all":
            warn_of_other_data(parts.data, state)
        yield path, parts, part, loader


def leave_uncut(config: DictConfig) -> None:
    """Use all samples of the data as one split; raise UserError if a fraction was typed."""
    for name in ("val_fraction", "test_fraction"):
        if name not in config.dataset:
            continue
        if f"dataset.{name}" in arguments.typed_keys():
            raise UserError(
                f"split=all uses all samples, but you typed dataset.{name}. Remove one of the two."
            )
        config.dataset[name] = 0


def warn_of_other_data(data: Any, state: dict[str, Any]) -> None:
    """Warn if the model was trained on different data."""
    from stoker.data.record import fingerprint

    if resume.about(state).get("data") not in (None, fingerprint(data)):
        log.warning(
            "%s: the model was trained on different data, or the data has changed since then.",
            data.name,
        )
