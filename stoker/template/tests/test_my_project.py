"""Training gives the same weights as a hand-written loop."""

import copy

import torch
from my_project.data import spirals
from my_project.model import Net

from stoker import Trainer


def test_the_training_is_a_plain_loop() -> None:
    data = spirals(samples=100)
    inputs, targets = data.train[list(range(60))]
    batches = list(zip(inputs.split(20), targets.split(20), strict=True))
    torch.manual_seed(0)
    model = Net(data.in_shape, data.num_classes, width=8)
    by_hand = copy.deepcopy(model)
    loss = torch.nn.CrossEntropyLoss()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, loss, optimizer, epochs=2, device="cpu").fit(batches)

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for batch, classes in batches * 2:
        optimizer.zero_grad()
        loss(by_hand(batch), classes).backward()
        optimizer.step()

    for name, weight in by_hand.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
