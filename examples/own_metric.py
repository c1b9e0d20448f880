"""Your own metric: accuracy with every class weighted equally.

python train.py +metrics.balanced._target_=examples.own_metric.BalancedAccuracy monitor=val/balanced
Expect test/balanced 0.972 ± 0.016 over 3 seeds.
"""

import torch

from stoker.trainer.metrics import Sums, class_of


class BalancedAccuracy(Sums):
    """The mean recall over the classes. Outputs are (N, C), targets are class indices (N,).

    A metric has `update(outputs, targets)`, `compute()` and `reset()`. A subclass of `Sums` only
    defines what to sum and how to compute the value from the sums. The sums stay on the device, and
    are added up across all processes.
    """

    higher_is_better = True  # monitor=val/balanced keeps the checkpoint with the highest value

    def __init__(self, num_classes):
        self.num_classes = num_classes
        super().__init__()

    def update(self, outputs, targets):
        targets = class_of(targets, outputs)
        hits = outputs.argmax(1) == targets
        counts = torch.zeros(2, self.num_classes, dtype=torch.int64, device=outputs.device)
        counts[0].scatter_add_(0, targets, hits.long())
        counts[1].scatter_add_(0, targets, torch.ones_like(targets))
        self.add(counts)

    def value(self, sums):
        hits, samples = sums
        return (hits[samples > 0] / samples[samples > 0]).mean()
