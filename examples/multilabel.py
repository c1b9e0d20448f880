"""Several labels per sample, each 0 or 1: which of eight notes sound in a noisy chord?

python train.py dataset._target_=examples.multilabel.chords loss._target_=torch.nn.BCEWithLogitsLoss \
    +metrics.f1._target_=examples.multilabel.F1
Expect test/f1 0.965 ± 0.003 over 3 seeds.
"""

import torch

from stoker.data.datasets import Data, TensorSplit
from stoker.trainer.metrics import Sums, check_same_shape

NOTES = 8


def chords(n=3000, length=64, noise=1.0):
    """Return n sounds of `length` values, each a chord of random notes. Targets (n, NOTES) are 0 or 1.

    `Data` treats this as regression with NOTES targets. The default regression metrics are omitted,
    because they are meaningless for logits. The best checkpoint is chosen by the first metric that
    you add, or by the loss if you add none.
    """
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(n, NOTES, generator=generator) < 0.3).float()
    pitch = 0.2 + 0.1 * torch.arange(NOTES)
    phase = 6.3 * torch.rand(n, NOTES, 1, generator=generator)
    sounds = torch.sin(pitch.unsqueeze(1) * torch.arange(length) + phase)
    inputs = (labels.unsqueeze(2) * sounds).sum(1) + noise * torch.randn(
        n, length, generator=generator
    )
    cuts = (slice(0, 7 * n // 10), slice(7 * n // 10, 8 * n // 10), slice(8 * n // 10, n))
    train, val, test = (TensorSplit(inputs[cut], labels[cut]) for cut in cuts)
    return Data(
        "chords", train, val, test, in_shape=(length,), num_classes=NOTES, kind="regression"
    )


class F1(Sums):
    """2 * hits / (predicted labels + true labels); a logit above 0 predicts its label.

    Outputs and targets have shape (N, labels).
    """

    higher_is_better = True

    def update(self, outputs, targets):
        check_same_shape(outputs, targets)
        predicted, true = outputs > 0, targets > 0
        self.add(torch.stack([(predicted & true).sum(), predicted.sum(), true.sum()]))

    def value(self, sums):
        hits, predicted, true = sums.double()
        return 2 * hits / (predicted + true)
