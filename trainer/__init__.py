"""The core: the Trainer, with its callbacks, metrics, schedules and checkpoints."""

if __name__ == "trainer":  # a clone imports this package by its folder name
    from stoker.clone import alias

    alias(__name__)


def __getattr__(name: str) -> object:
    # `from stoker.trainer import errors` must not import torch, which takes seconds, so that the
    # command line can report mistakes right away.
    if name == "Trainer":
        from stoker.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
