"""The learning-rate finder: the loss over a rate that grows step by step, a suggestion, and the curve as a picture."""

import copy
import itertools
import math
from dataclasses import dataclass

from stoker.trainer import checkpoint, graph, schedules
from stoker.trainer import device as devices
from stoker.trainer.errors import UserError, check_number
from stoker.trainer.loading import seekable


@dataclass
class Found:
    """The rates that were tried, the smoothed loss at each, and the suggested rate."""

    rates: list
    losses: list
    suggestion: float


def lr_find(trainer, train_loader, lowest=1e-6, highest=1.0, steps=100):
    """Trains for up to `steps` steps while the rate grows from `lowest` to `highest`; then all is as it was.

    It ends early where the smoothed loss is four times its lowest value (Smith 2017, arXiv 1506.01186, section 3.3, for
    the idea).
    """
    check_number("steps", steps, whole=True, least=10)
    loader = seekable(train_loader, trainer.seed)
    before = copy.deepcopy({name: part.state_dict() for name, part in trainer.stateful().items()})
    execute, trainer.execute = (
        trainer.execute,
        graph.eagerly,
    )  # a captured step would keep its first rate
    trainer.scheduler = schedules.build(trainer.make_scheduler, trainer.optimizer, steps)
    rates, losses, mean, batch = [], [], 0.0, None
    trainer.hold()
    trainer.model.train()
    try:
        for epoch in itertools.count():
            if len(rates) >= steps or len(rates) < epoch:  # the end, or a loader that gives nothing
                break
            loader.seek(epoch, 0)
            for batch in loader:
                rate = lowest * (highest / lowest) ** (len(rates) / (steps - 1))
                for group in trainer.optimizer.param_groups:
                    group["lr"] = rate
                seed = devices.mix_seed(trainer.seed, "step", len(rates))
                devices.seed_generators(trainer.device, seed, trainer.replicas)
                batch = devices.move(batch, trainer.device)
                loss = trainer.train_step(batch).item()
                mean = 0.9 * mean + 0.1 * loss
                rates.append(rate)
                losses.append(
                    mean / (1 - 0.9 ** len(rates))
                )  # without the pull towards the first value, 0
                if not math.isfinite(loss) or losses[-1] > 4 * min(losses):
                    steps = len(rates)
                if len(rates) >= steps:
                    break
    except (RuntimeError, ValueError, MemoryError) as error:
        trainer.explain(error, batch, trainer.micro_batch)
        raise
    finally:
        trainer.scheduler, trainer.execute = None, execute
        for name, part in trainer.stateful().items():
            checkpoint.restore(part, before[name])
        trainer.release()
    if losses and not math.isfinite(losses[-1]):
        rates, losses = rates[:-1], losses[:-1]
    if len(rates) < 10:
        what = "the loader gave no more, or the loss was no longer finite"
        raise UserError(f"No curve after {len(rates)} steps: {what}.")
    # A tenth of where the loss is lowest: within a factor of five of the best of seven rates for linear, mlp and cnn on
    # the digits with AdamW and SGD, where the steepest point and fastai's "valley" were off by up to a hundred.
    return Found(rates, losses, rates[losses.index(min(losses))] / 10)


def draw(found, path):
    """Writes the curve to `path` as a PNG and gives the path."""
    from matplotlib.figure import Figure  # half a second, for a task of its own

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    axes.semilogx(found.rates, found.losses)
    axes.axvline(
        found.suggestion,
        color="tab:red",
        linestyle="--",
        label=f"suggestion: {found.suggestion:.2g}",
    )
    low, high = min(found.losses), found.losses[0]
    axes.set(
        xlabel="learning rate",
        ylabel="smoothed training loss",
        ylim=(low - 0.1 * (high - low), high + 0.5 * (high - low)),
    )
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
