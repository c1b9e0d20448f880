"""LoRA adapters (Hu 2021, arXiv 2106.09685): train small additions to frozen weights.

python train.py max_steps=20 run_dir=base
python train.py model._target_=examples.lora.adapted +model.base=base +model.rank=4 epochs=5
Expect test/acc 0.91 and 0.94; the base model has 85,002 weights, the second run saves only 4,392.
"""

import torch
from torch import nn

import stoker


class LoRA(nn.Module):
    """(..., inputs) -> (..., outputs): a linear layer plus `up @ down`, which starts at zero.

    The layer's own weights are buffers that are not saved in checkpoints or model.safetensors,
    because the base run's directory already has them.
    """

    def __init__(self, linear, rank, alpha):
        super().__init__()
        outputs, inputs = linear.weight.shape
        bias = torch.zeros(outputs) if linear.bias is None else linear.bias.detach()
        self.register_buffer("weight", linear.weight.detach(), persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = alpha / rank

    def forward(self, inputs):
        change = inputs @ self.down.T @ self.up.T
        return nn.functional.linear(inputs, self.weight, self.bias) + self.scale * change


def adapted(base, rank=4, alpha=8.0):
    """Return the model of the run directory `base`, with an adapter on each linear layer."""
    return with_adapters(stoker.load(base).module, rank, alpha)


def with_adapters(model, rank, alpha):
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, LoRA(layer, rank, alpha))
    return model


@torch.no_grad()
def merged(model):
    """Replace the adapters with linear layers that give the same outputs, and return the model."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoRA):
            outputs, inputs = layer.weight.shape
            linear = nn.Linear(inputs, outputs)
            linear.weight.copy_(layer.weight + layer.scale * layer.up @ layer.down)
            linear.bias.copy_(layer.bias)
            model.set_submodule(name, linear)
    return model
