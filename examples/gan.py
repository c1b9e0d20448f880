"""A GAN (Goodfellow 2014, arXiv 1406.2661): a Trainer whose step trains two models in turn.

python train.py model._target_=examples.gan.GAN trainer._target_=examples.gan.GANTrainer \
    optimizer=adam optimizer.lr=1e-3 'optimizer.betas=[0.5,0.99]' epochs=20 precision=fp32 \
    'groups=[{match: "judge.*", scheduler: constant}]'
Expect test/loss 1.00 ± 0.16 over 5 seeds. It is an energy distance; after one epoch, it is 5.
"""

from torch import Size, cdist, nn, randn
from torch.nn.functional import softplus

from stoker import Trainer
from stoker.trainer.parallel import average_gradients


class GAN(nn.Module):
    """(N, *in_shape) -> N fakes of the same shape. The input values are ignored."""

    def __init__(self, in_shape):
        super().__init__()
        size = Size(in_shape).numel()
        self.generator = nn.Sequential(
            nn.Linear(16, 99), nn.ReLU(), nn.Linear(99, size), nn.Unflatten(1, in_shape)
        )
        self.judge = nn.Sequential(
            nn.Flatten(), nn.Linear(size, 99), nn.LeakyReLU(0.2), nn.Linear(99, 1)
        )

    def forward(self, inputs):
        return self.generator(randn(inputs.shape[0], 16, device=inputs.device))


class GANTrainer(Trainer):
    def compute_loss(self, batch):
        """Return the energy distance between fake and real samples (Székely 2013, eq. 2.1).

        Only evaluations use this distance, to measure progress. The judge's score is no measure of
        progress: it is best in the first epoch, before the judge has learned anything.
        """
        real, fakes = batch[0].flatten(1), self.model(batch[0]).flatten(1)
        return 2 * cdist(real, fakes).mean() - cdist(real, real).mean() - cdist(
            fakes, fakes
        ).mean(), fakes

    def train_step(self, batch):
        judge = self.module.judge
        fakes = self.module(batch[0])
        loss = softplus(-judge(fakes)).mean()
        self.train_part(self.module.generator, loss)
        scores = softplus(-judge(batch[0])) + softplus(judge(fakes.detach()))
        self.train_part(judge, scores.mean())
        self.scheduler.step()
        return loss.detach()

    def train_part(self, part, loss):
        """Update one of the two models. The optimizer skips the other, which has no gradient."""
        (loss * self.process_weight).backward(inputs=list(part.parameters()))
        average_gradients(part)  # over all processes
        self.optimizer.step()
        self.optimizer.zero_grad()
