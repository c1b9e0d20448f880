"""A GAN (Goodfellow 2014, arXiv 1406.2661), a Trainer with a step of its own and two optimizers.
python train.py model._target_=examples.gan.GAN trainer._target_=examples.gan.GANTrainer optimizer.lr=1e-3"""

from math import prod

from torch import nn, randn
from torch.nn.functional import softplus

from trainer import Trainer


class GAN(nn.Module):
    def __init__(self, in_shape, noise=16):
        super().__init__()
        self.noise, size = noise, prod(in_shape)
        self.generator = nn.Sequential(
            nn.Linear(noise, 128), nn.ReLU(), nn.Linear(128, size), nn.Unflatten(1, in_shape)
        )
        self.judge = nn.Sequential(nn.Flatten(), nn.Linear(size, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def forward(self, inputs):  # as many fakes as there are inputs
        return self.generator(randn(len(inputs), self.noise, device=inputs.device))


class GANTrainer(Trainer):
    def __init__(self, model, *, optimizer, **settings):
        super().__init__(model, optimizer=lambda _: optimizer(model.generator.parameters()), **settings)
        self.judge_optimizer = optimizer(model.judge.parameters())

    def stateful(self):  # a checkpoint holds the second optimizer too
        return {**super().stateful(), "judge_optimizer": self.judge_optimizer}

    def compute_loss(self, batch):
        fakes = self.model(batch[0])
        return softplus(-self.module.judge(fakes)).mean(), fakes

    def train_step(self, batch):
        loss, fakes = self.compute_loss(batch)
        loss.backward()
        self.optimizer.step()
        self.judge_optimizer.zero_grad()  # what the generator's loss left there
        real, fake = self.module.judge(batch[0]), self.module.judge(fakes.detach())
        (softplus(-real) + softplus(fake)).mean().backward()
        self.judge_optimizer.step()
        self.scheduler.step()
        self.module.zero_grad()
        return loss.detach()
