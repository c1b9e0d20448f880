"""Count the activations that a step keeps for its backward pass."""

import torch


class Saved:
    """Counts the bytes that autograd saves for the backward pass, except weights and buffers.

    `most` is the number for the largest micro-batch.
    """

    def __init__(self, module):
        kept = [*module.parameters(), *module.buffers()]
        self.of_model = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self.kept = {}  # {address: bytes} saved for the backward pass
        self.most = 0
        self.backward = False  # whether the backward pass has started

    def counted(self):
        """Return a context that counts saved tensors."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, self.use)

    def keep(self, tensor):
        if self.backward:  # a new micro-batch starts, and the last one's memory is free
            self.kept = {}
            self.backward = False
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.of_model:
            self.kept[storage.data_ptr()] = storage.nbytes()
            self.most = max(self.most, sum(self.kept.values()))
        return tensor

    def use(self, tensor):
        self.backward = True
        return tensor
