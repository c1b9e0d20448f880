"""The model learns the data set."""

import torch
from my_project.data import spirals
from my_project.model import Net

from stoker import Trainer


def test_the_model_learns() -> None:
    data = spirals(samples=300)
    loader = torch.utils.data.DataLoader(data.train, batch_size=20, shuffle=True)
    torch.manual_seed(0)
    model = Net(data.in_shape, data.num_classes)
    trainer = Trainer(model, torch.nn.CrossEntropyLoss(), torch.optim.AdamW, epochs=5, device="cpu")
    first = trainer.evaluate(loader)["val/loss"]
    trainer.fit(loader)
    assert trainer.evaluate(loader)["val/loss"] < first
