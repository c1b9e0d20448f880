"""A recurrent network that reads an image row by row, and makes its hidden state where its inputs are.

python train.py model._target_=examples.rnn.RowReader optimizer.lr=1e-2
Expect test/acc 0.977, deviation 0.007 over 3 seeds.
"""

import torch
from torch import nn


class RowReader(nn.Module):
    """(N, C, H, W) -> (N, num_classes): a GRU cell takes one row of the image after the other."""

    def __init__(self, in_shape, num_classes, width=64):
        super().__init__()
        channels, _, columns = in_shape
        self.cell = nn.GRUCell(channels * columns, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs):
        rows = inputs.transpose(1, 2).flatten(2)  # (N, H, C * W)
        # With the device and the type of the inputs: torch.zeros alone is on the CPU, whatever the model is on, and a
        # tensor made in __init__ does not move with the model unless it is a buffer (self.register_buffer).
        # rows.shape[0], for an export: len(rows) would make a constant of the number of samples.
        hidden = torch.zeros(
            rows.shape[0], self.cell.hidden_size, device=rows.device, dtype=rows.dtype
        )
        for row in rows.unbind(1):
            hidden = self.cell(row, hidden)
        return self.head(hidden)
