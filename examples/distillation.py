"""Distillation (Hinton 2015, arXiv 1503.02531): a small model learns what a large one says of each sample.

python train.py model=cnn epochs=15 run_dir=runs/teacher
python train.py 'model.hidden=[16]' epochs=40 optimizer.lr=1e-2 \
    trainer._target_=examples.distillation.Distiller +trainer.teacher=runs/teacher
Expect test/acc 0.973, deviation 0.007 over 3 seeds; without a teacher 0.970, as the digits are too easy for more.
"""

import torch
from stoker.trainer.errors import check_number
from torch.nn.functional import kl_div

import stoker
from stoker import Trainer


class Distiller(Trainer):
    """The loss is `share` times the divergence from the teacher, and for the rest the usual one.

    `teacher` is a run directory, of a run on the same data. Divided by the `temperature`, scores of other classes than
    the first tell more; its square keeps the gradients as large as they were.
    """

    def __init__(self, model, *, teacher, share=0.7, temperature=2.0, **settings):
        super().__init__(model, **settings)
        self.folder, self.teacher = teacher, None
        self.share = check_number("trainer.share", share, least=0, most=1)
        self.temperature = check_number("trainer.temperature", temperature, above=0)

    def fit(self, *loaders, **more):
        # Here, since an evaluation needs no teacher. Its module alone: the loader has normalised the inputs already.
        self.teacher = stoker.load(self.folder, self.device).module
        super().fit(*loaders, **more)

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
