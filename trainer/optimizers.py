"""Optimizers that torch has not: SGD whose rate, momentum and decay can each be set without the others."""

import torch

from trainer.errors import check_number


def decoupled_sgd(
    params, lr, batch_size, momentum=0.85, weight_decay=0.0153, bias_scale=64.0, fused=None, foreach=None
):
    """A torch.optim.SGD with Nesterov momentum, on parameter groups, of a rate and a decay per 1,024 samples.

    `lr` is how far 1,024 samples of the same gradient move a weight, and `weight_decay` the share by which they shrink
    it, whatever the batch size and the momentum are and, for the decay, the rate. Biases and the weights of norms (one
    dimension) have `bias_scale` times the rate and the same decay. Jordan 2024, arXiv 2404.00498, section 3.4.
    """
    check_number("optimizer.lr", lr, above=0)
    check_number("optimizer.batch_size", batch_size, whole=True, least=1)
    check_number("optimizer.momentum", momentum, above=0, most=0.999)
    check_number("optimizer.weight_decay", weight_decay, least=0)
    check_number("optimizer.bias_scale", bias_scale, above=0)
    # The loss is a mean over the batch, and momentum repeats its gradient (so much, as the paper counts it).
    per_step = batch_size / 1024 / (1 + 1 / (1 - momentum))
    groups = []
    for group in params:
        matrices, vectors = ([p for p in group["params"] if (p.ndim > 1) is many] for many in (True, False))
        for parameters, scale in ((matrices, 1.0), (vectors, bias_scale)):
            if parameters:
                rate, decay = lr * scale * per_step, group.get("weight_decay", weight_decay) * per_step
                # torch's decay is times the rate.
                groups.append({"params": parameters, "lr": rate, "weight_decay": decay / rate})
    return torch.optim.SGD(groups, lr=lr * per_step, momentum=momentum, nesterov=True, fused=fused, foreach=foreach)
