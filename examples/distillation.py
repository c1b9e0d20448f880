"""Distillation (Hinton 2015, arXiv 1503.02531): a small model learns from the outputs of a large one.

python train.py model=cnn epochs=15 run_dir=runs/teacher
python train.py 'model.hidden=[16]' epochs=40 optimizer.lr=1e-2 \
    trainer._target_=examples.distillation.Distiller +trainer.teacher=runs/teacher
Expect test/acc 0.973 ± 0.007 over 3 seeds; without a teacher, 0.970.
"""

import torch
from torch.nn.functional import kl_div

import stoker
from stoker import Trainer
from stoker.trainer.errors import check_number


class Distiller(Trainer):
    """Adds `share` times the divergence from the teacher to `1 - share` times the usual loss.

    `teacher` is the directory of a run on the same data. Dividing the scores by the `temperature`
    gives less likely classes more weight; the factor `temperature**2` restores the scale of the
    gradients.
    """

    def __init__(self, model, *, teacher, share=0.7, temperature=2.0, **settings):
        super().__init__(model, **settings)
        self.folder, self.teacher = teacher, None
        self.share = check_number("trainer.share", share, least=0, most=1)
        self.temperature = check_number("trainer.temperature", temperature, above=0)

    def fit(self, *loaders, **more):
        # Load the teacher here and not in __init__, because evaluating a run does not need it. The
        # loader already normalizes the inputs, so use the module without its preprocessing.
        self.teacher = stoker.load(self.folder, self.device).module
        return super().fit(*loaders, **more)

    def compute_loss(self, batch):
        if not self.model.training:
            return super().compute_loss(batch)
        inputs, targets = batch
        outputs = self.model(inputs)
        with torch.no_grad():
            wanted = self.teacher(inputs)
        soft = [(scores / self.temperature).log_softmax(-1) for scores in (outputs, wanted)]
        distance = kl_div(*soft, reduction="batchmean", log_target=True) * self.temperature**2
        return self.share * distance + (1 - self.share) * self.loss(outputs, targets), outputs
