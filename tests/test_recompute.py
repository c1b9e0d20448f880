"""Activation checkpointing: the same training to the bit, in less memory."""

import copy

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer
from saved import Saved

from stoker.data.loader import make_loaders
from stoker.models.recompute import checkpoint_blocks
from stoker.trainer.errors import UserError


class Residual(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        norm, dropout = torch.nn.BatchNorm1d(width, momentum=None), torch.nn.Dropout(0.3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), norm, dropout)

    def forward(self, inputs, *, scale=1.0):
        return inputs + scale * self.layers(inputs).tanh()


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Residual(6) for _ in range(3)])
        self.head = torch.nn.Linear(6, 3)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs, scale=0.5)
        return self.head(inputs)


@pytest.mark.parametrize("settings", [{}, {"grad_accum_steps": 2}, {"precision": "bf16"}])
def test_recomputed_blocks_train_to_the_same_bits(settings):
    states = []
    (loader, val_loader, _), _ = make_loaders(make_data(), batch_size=8)
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = Deep()
        printed = str(model)
        if recomputes:
            assert checkpoint_blocks(model) == ["blocks.0", "blocks.1", "blocks.2"]
            assert checkpoint_blocks(model) and str(model) == printed
        trainer = make_trainer(model, **settings)
        trainer.fit(loader, val_loader)
        states.append(copy.deepcopy(trainer.state_dict()))
        saved = Saved(model)
        with saved.counted():
            model.train()(torch.ones(8, 6))
        states.append(saved.most)
    assert_same(states[0], states[2])
    if not settings:
        assert states[3] < 0.6 * states[1]


def test_a_model_without_blocks_is_not_recomputed():
    with pytest.raises(UserError, match="Sequential has no repeated blocks"):
        checkpoint_blocks(make_model())
