"""The trainings of test_weights.py as one of several ranks: `weighed.py STRATEGY FOLDER`."""

import math
import sys

import torch
from test_weights import CASES, LSTM, Known, TimeFirst, fitted, holes, mean_of_known, texts
from torch import nn

from stoker.command import ranks
from stoker.trainer import checkpoint, launch, parallel
from stoker.trainer.callbacks import Checkpoint, NaNGuard
from stoker.trainer.errors import NotFinite

OTHERS = {
    "your own loss": (mean_of_known, holes, {"kind": Known}),
    "time first": (nn.CrossEntropyLoss(), texts, {"kind": TimeFirst, "model": LSTM}),
    "micro-batches": (*CASES["ignore_index"], {"micro_batch": 2}),
}


def main(strategy, folder):
    ranks.quieten()
    ranks.join()
    done = {}
    for name, (loss, make, *settings) in {**CASES, **OTHERS}.items():
        options = settings[0] if settings else {}
        trainer, rows = fitted(loss, make(), strategy=strategy, **options)
        results = trainer.evaluate(make())
        state = checkpoint.copy(trainer.state_dict())
        if launch.is_first():
            done[name] = {"state": state["model"], "rows": rows, "results": results}
    if launch.is_first():
        torch.save(done, f"{folder}/done")
    loss, make = CASES["elements"]
    batches = make()
    batches[2][0][1] = math.nan  # a sample of rank 1
    watch = [NaNGuard(f"{folder}/bad"), Checkpoint(f"{folder}/run", every=1)]
    try:
        fitted(loss, batches, strategy=strategy, more=watch)
    except NotFinite as error:
        torch.save(str(error), f"{folder}/error{launch.rank()}")
    parallel.leave()
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit()
