"""A GAN (Goodfellow 2014, arXiv 1406.2661): a Trainer with a step of its own and two optimizers.

python train.py model._target_=examples.gan.GAN trainer._target_=examples.gan.GANTrainer 'optimizer.betas=[0.5,0.999]' optimizer.lr=1e-3
"""

import math

import torch
from torch import nn
from torch.nn.functional import softplus

from trainer import Trainer


class GAN(nn.Module):
    def __init__(self, in_shape, noise=16, width=128):
        super().__init__()
        self.noise, size = noise, math.prod(in_shape)
        self.generator = nn.Sequential(nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, size), nn.Unflatten(1, in_shape))
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, inputs):  # fakes, one for each input
        return self.generator(torch.randn(len(inputs), self.noise, device=inputs.device))


class GANTrainer(Trainer):
    def __init__(self, *args, optimizer, **kwargs):
        super().__init__(*args, optimizer=optimizer, **kwargs)
        self.judge_optimizer = optimizer(self.module.discriminator.parameters())

    def parameter_groups(self, decay_all):
        return [{"params": self.module.generator.parameters()}]

    def stateful(self):  # a checkpoint holds the second optimizer too
        return {**super().stateful(), "judge_optimizer": self.judge_optimizer}

    def compute_loss(self, batch):
        fakes = self.model(batch[0])
        return softplus(-self.module.discriminator(fakes)).mean(), fakes

    def train_step(self, batch):
        loss, fakes = self.compute_loss(batch)
        loss.backward()
        self.optimizer.step()
        self.judge_optimizer.zero_grad()  # what the generator's loss left there
        judge = self.module.discriminator
        (softplus(judge(fakes.detach())) + softplus(-judge(batch[0]))).mean().backward()
        self.judge_optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.judge_optimizer.zero_grad()
        return loss.detach()
