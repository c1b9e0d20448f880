"""The table of layers that model_summary=true prints."""

import re

import torch
from torch import nn

from stoker.diagnostics import layers
from stoker.models.cnn import CNN


def test_the_table_of_layers_adds_up_and_leaves_model_and_random_states_alone():
    model = CNN((1, 8, 8), 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    header, *lines = layers.lines(model, (1, 8, 8), False)
    *rows, total = map(str.split, lines)
    names = ["layer", "type", "output", "parameters", "FLOPs per sample (forward)"]
    assert re.split("  +", header) == names
    assert [row[0] for row in rows] == [
        name for name, layer in model.named_modules() if not any(layer.children())
    ]
    first = next(row for row in rows if row[1] == "Conv2d")
    convolution = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    channels = convolution.out_channels
    assert first[2:] == [f"{channels}x8x8", str(9 * channels), f"{2 * 9 * channels * 8 * 8:,}"]
    numbers = [[int(text.replace(",", "")) for text in row[3:]] for row in rows]
    weights = sum(weight.numel() for weight in model.parameters())
    assert sum(one[0] for one in numbers if one) == weights
    assert sum(one[1] for one in numbers if len(one) == 2) == int(total[2].replace(",", ""))
    assert total[:2] == ["total", f"{weights:,}"]
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    # A model that refuses the sample has no shapes, and no FLOPs.
    assert [line.split() for line in layers.lines(nn.Embedding(4, 4), (4,), False)][1:] == [
        ["model", "Embedding", "16"],
        ["total", "16"],
    ]


def test_the_layers_of_a_language_model_are_shown_for_a_sample_of_tokens():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 7))
    *_, total = layers.lines(model, (6,), tokens=True)
    assert total.split() == ["total", "103", str(2 * 6 * 8 * 7)]
