"""An optimizer that was made before the Trainer: the steps of plain torch, or a plain word."""

import pytest
import torch
from conftest import assert_same, make_model, make_trainer

from stoker import Trainer
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import Checkpoint
from stoker.trainer.errors import UserError


def tiny_batches():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8, 6, generator=generator, dtype=torch.float64)
    return [(batch, batch[:, :3].argmax(1)) for batch in inputs]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("part", ["all", "the last layer", "two groups"])
def test_a_ready_made_optimizer_does_what_it_does_in_plain_torch(tmp_path, kind, part):
    def make(model):
        if part == "the last layer":
            return kind(model[3].parameters(), lr=0.05, weight_decay=0.1)
        if part == "two groups":
            groups = [
                {"params": model[0].parameters(), "lr": 0.01},
                {"params": model[3].parameters(), "weight_decay": 0.2},
            ]
            return kind(groups, lr=0.05)
        return kind(model.parameters(), lr=0.05)

    plain = make_model(dtype=torch.float64)
    optimizer = make(plain)
    batches = tiny_batches()
    for inputs, targets in batches * 2:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()

    def fit(resume=None):
        model = make_model(dtype=torch.float64)
        saver = Checkpoint(tmp_path, every=1, keep=99, overwrite=True)
        given = make(model)
        trainer = make_trainer(model, optimizer=given, scheduler=None, epochs=2, callbacks=[saver])
        trainer.fit(batches, resume=resume)
        assert trainer.optimizer is given
        return trainer.state_dict()

    whole = fit()
    for name, weight in whole["model"].items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-12, atol=1e-14)
    again = fit(checkpoint.path_of(tmp_path, 3))
    assert_same(again["model"], whole["model"])
    assert_same(again["optimizer"], whole["optimizer"])


def test_a_ready_made_optimizer_that_would_not_train_the_model_is_refused():
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        UserError, match="this SGD has parameters that do not belong to the Trainer's model"
    ):
        make_trainer(make_model(), optimizer=sgd)
    with pytest.raises(UserError, match=r"groups= and parameter_groups\(\) cannot change"):
        make_trainer(model, optimizer=sgd, groups=[{"match": "*", "weight_decay": 0}])

    class ByLayer(Trainer):
        def parameter_groups(self, rules):
            return super().parameter_groups(rules)

    with pytest.raises(UserError, match=r"groups= and parameter_groups\(\) cannot change"):
        make_trainer(model, kind=ByLayer, optimizer=sgd)


def test_a_ready_made_optimizer_begins_with_the_rate_that_it_has():
    model = make_model(dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.StepLR(sgd, 30)  # leaves an initial_lr
    sgd.param_groups[0]["lr"] = 0.125
    trainer = make_trainer(model, optimizer=sgd, scheduler=None, epochs=1)
    trainer.fit(tiny_batches())
    assert trainer.lr == sgd.param_groups[0]["lr"] == 0.125
