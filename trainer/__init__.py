"""The training framework: one Trainer, and callbacks, metrics, schedules and checkpoints beside it."""


def __getattr__(name):
    # `from trainer import Trainer`, while `import trainer.errors` stays free of torch:
    # a mistake on the command line is answered before its import.
    if name == "Trainer":
        from trainer.trainer import Trainer

        return Trainer
    if name == "load":
        from trainer.inference import load

        return load
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
