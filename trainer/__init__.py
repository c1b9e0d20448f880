"""The training framework: one Trainer, and callbacks, metrics, schedules and checkpoints beside it."""

import os

# How often a thread looks for another one before it sleeps (300,000 times unless told): while a third program runs, two
# threads train 4,000 samples a second with that and 31,000 with this (the default job). Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __getattr__(name):
    # `from trainer import Trainer`, while `import trainer.errors` stays free of torch:
    # a mistake on the command line is answered before its import.
    if name == "Trainer":
        from trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
