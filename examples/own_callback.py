"""Your own callback: lower the learning rate when validation stops improving.

python train.py scheduler=constant epochs=20 +callbacks.plateau._target_=examples.own_callback.Plateau \
    +callbacks.plateau.patience=2
Expect test/acc 0.973 ± 0.006 over 3 seeds.
"""

from stoker.trainer import launch
from stoker.trainer.callbacks import Monitor
from stoker.trainer.errors import UserError, check_number
from stoker.trainer.schedules import Schedule


class Plateau(Monitor):
    """Multiplies the learning rate by `factor` after `patience` evaluations without improvement.

    A callback is a subclass of `Callback` with any of its seven hooks. `Monitor` is a callback that
    watches a metric: `monitor` and `mode` work like `monitor` and `monitor_mode` in
    configs/train.yaml.
    """

    # saved, because a resumed run needs it
    state_attributes = (*Monitor.state_attributes, "waited")

    def __init__(self, patience=3, factor=0.5, monitor="auto", mode="auto"):
        super().__init__(monitor, mode)
        self.patience = check_number("callbacks.plateau.patience", patience, whole=True, least=1)
        self.factor = check_number("callbacks.plateau.factor", factor, above=0, most=1)
        self.waited = 0

    def on_fit_start(self, trainer):
        super().on_fit_start(trainer)
        if not isinstance(trainer.scheduler, Schedule):
            what = f"{type(trainer.scheduler).__name__} sets the learning rates itself"
            raise UserError(
                f"callbacks.plateau: {what}. Type scheduler=constant, or choose another schedule of stoker.trainer.schedules."
            )

    def on_log(self, trainer, row):
        better = self.improved(trainer, row)
        if better is None:  # not an evaluation row
            return
        self.waited = 0 if better else self.waited + 1
        if self.waited == self.patience:
            self.waited = 0
            for group in trainer.optimizer.param_groups:
                # This becomes the new base rate, which the schedule scales.
                group["lr"] = group["initial_lr"] * self.factor
            if launch.is_first():  # only the first process prints
                print(
                    f"lr       {trainer.scheduler.get_last_lr()[0]:.2g} from step {trainer.step} on"
                )
