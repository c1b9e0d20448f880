"""The core: one Trainer, and the callbacks, metrics, schedules and checkpoints beside it."""

if __name__ == "trainer":  # a clone imports it as `trainer`, the folder's name
    from stoker.clone import alias

    alias(__name__)


def __getattr__(name: str) -> object:
    # `from stoker.trainer import errors` stays free of torch: a mistake on the command line is
    # reported before torch is imported.
    if name == "Trainer":
        from stoker.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
