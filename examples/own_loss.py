"""Your own loss: the focal loss (Lin 2017, arXiv 1708.02002), for data with rare classes.

python train.py loss._target_=examples.own_loss.FocalLoss +loss.gamma=1
Expect test/acc 0.970 ± 0.013 over 3 seeds.
"""

from torch import nn
from torch.nn.functional import cross_entropy

from stoker.trainer.errors import check_number


class FocalLoss(nn.Module):
    """The mean of -(1 - p)^gamma log p, where p is the probability of the true class.

    Outputs are (N, C), targets are class indices (N,); gamma=0 is cross-entropy. A loss is a module
    that takes (outputs, targets) and returns the mean over the samples; it has no parameters.
    """

    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = check_number("loss.gamma", gamma, least=0)

    def forward(self, outputs, targets):
        losses = cross_entropy(outputs, targets, reduction="none")  # -log p
        return ((1 - (-losses).exp()) ** self.gamma * losses).mean()
