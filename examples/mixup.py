"""Mixup (Zhang 2018, arXiv 1710.09412), in the two places where it can stand.

As an augmentation, which is all it takes here:
    python train.py 'dataset.augment=[{mixup: 0.2}]'
And as a Trainer of one's own, where a batch and its labels are seen before the model is:
    python train.py trainer._target_=examples.mixup.MixupTrainer +trainer.mixup=0.2
Expect test/acc 0.974 and 0.972, deviation 0.004 and 0.007 over 3 seeds.
"""

import torch
from stoker.data.augment import sample_beta
from stoker.trainer.errors import check_number
from torch.nn.functional import one_hot

from stoker import Trainer


class MixupTrainer(Trainer):
    """Trains on a * sample + (1 - a) * another one of its batch, with the labels mixed alike; a ~ Beta(m, m)."""

    def __init__(self, model, *, mixup=0.2, **settings):
        super().__init__(model, **settings)
        self.mixup = check_number("trainer.mixup", mixup, above=0)

    def compute_loss(self, batch):
        inputs, targets = batch
        if not self.model.training:
            return super().compute_loss(batch)
        a = sample_beta(
            self.mixup, torch.default_generator
        )  # which the Trainer has seeded for this step
        inputs = a * inputs + (1 - a) * inputs.roll(1, 0)
        outputs = self.model(inputs)
        labels = one_hot(targets, outputs.shape[-1]).to(
            outputs.dtype
        )  # soft labels: cross-entropy takes them
        return self.loss(outputs, a * labels + (1 - a) * labels.roll(1, 0)), outputs
