"""A recurrent network that reads an image row by row, with its hidden state on the inputs' device.

python train.py model._target_=examples.rnn.RowReader optimizer.lr=1e-2
Expect test/acc 0.977 ± 0.007 over 3 seeds.
"""

import torch
from torch import nn


class RowReader(nn.Module):
    """(N, C, H, W) -> (N, num_classes): a GRU cell reads the image row by row."""

    def __init__(self, in_shape, num_classes, width=64):
        super().__init__()
        channels, _, columns = in_shape
        self.cell = nn.GRUCell(channels * columns, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs):
        rows = inputs.transpose(1, 2).flatten(2)  # (N, H, C * W)
        # Use the device and dtype of the inputs: a bare torch.zeros is on the CPU, and a tensor
        # made in __init__ moves with the model only if it is a buffer (register_buffer).
        # Use rows.shape[0], because len(rows) would fix the batch size of an exported model.
        hidden = torch.zeros(
            rows.shape[0], self.cell.hidden_size, device=rows.device, dtype=rows.dtype
        )
        for row in rows.unbind(1):
            hidden = self.cell(row, hidden)
        return self.head(hidden)
