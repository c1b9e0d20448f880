"""Rates, decays, schedules, optimizers and frozen parameters by name: as a loop in plain torch."""

import copy
import functools

import pytest
import torch
from conftest import assert_same, make_model, make_trainer
from torch.optim import LBFGS, SGD, AdamW, Muon

from stoker.trainer import checkpoint, schedules, summary
from stoker.trainer.callbacks import Callback, Checkpoint, Freeze
from stoker.trainer.combined import Combined, muon
from stoker.trainer.errors import UserError
from stoker.trainer.groups import labels, parameter_groups

STEPS = 12  # of 4 an epoch
LR = 0.05
ADAMW = functools.partial(AdamW, lr=LR, weight_decay=0.1)


def batches():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8, 6, generator=generator, dtype=torch.float64)
    return [(batch, batch[:, :3].argmax(1)) for batch in inputs]


def make():
    """A matrix 0, a BatchNorm 1, and Linears 3 and 5."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Tanh()]
    layers += [torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).double()


def cosine(step):
    return (1 + torch.tensor(step / STEPS * torch.pi, dtype=torch.float64).cos().item()) / 2


def linear(step):
    return 1 - step / STEPS


class Averaging(SGD):
    """The protocol of schedule-free: steps in training mode, and a mean of them to evaluate."""

    is_training = False

    def step(self, closure=None):
        assert self.is_training
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["count"] = state.get("count", 0) + 1
            mean = state.setdefault("mean", torch.zeros_like(weight))
            mean += (weight.detach() - mean) / state["count"]

    def swap(self):
        self.is_training = not self.is_training
        for weight, state in self.state.items():
            with torch.no_grad():
                mean = state["mean"].clone()
                state["mean"].copy_(weight)
                weight.copy_(mean)

    def train(self):
        if not self.is_training:
            self.swap()

    def eval(self):
        if self.is_training:
            self.swap()


# Each case: what the Trainer is given; and of a model, [(optimizer, schedule of each group)].


def by_name(model):
    groups = [
        {"params": [model[3].weight, model[5].weight]},
        {"params": [model[3].bias, model[5].bias], "weight_decay": 0.0},
        {"params": [model[0].weight], "lr": 0.01},
        {"params": list(model[1].parameters()), "lr": 0.01, "weight_decay": 0.3},
    ]
    return [(ADAMW(groups), [cosine, cosine, cosine, linear])]


def by_layer(model):
    groups = []
    for power, layer in ((3, 0), (2, 1), (1, 3), (0, 5)):
        for weight in model[layer].parameters():
            decay = 0.1 if weight.ndim > 1 else 0.0
            groups.append({"params": [weight], "lr": LR * 0.5**power, "weight_decay": decay})
    return [(ADAMW(groups), [cosine] * len(groups))]


def two_optimizers(model):
    vectors = [p for p in model.parameters() if p.ndim == 1]
    ours = Muon([model[0].weight, model[3].weight], LR, 0.1, adjust_lr_fn="match_rms_adamw")
    rest = [{"params": [model[5].weight]}, {"params": vectors, "weight_decay": 0.0}]
    return [(ours, [cosine]), (ADAMW(rest), [cosine, cosine])]


def made_by_hand(model):
    return [
        (SGD([model[5].weight], LR, momentum=0.9), [cosine]),
        (AdamW(model[0].parameters(), LR), [cosine]),
    ]


def closures(model):
    return [(LBFGS(model.parameters(), LR, max_iter=4, line_search_fn="strong_wolfe"), [cosine])]


def frozen(model):
    return [(SGD(model.parameters(), LR, momentum=0.9), [cosine])]


CASES = {
    "groups": (
        by_name,
        {
            "optimizer": ADAMW,
            "groups": [
                {"match": "0.weight", "lr": 0.01},
                {
                    "match": "[01].*",
                    "lr": 0.01,
                    "weight_decay": 0.3,
                    "scheduler": {"linear": {"final": 0.0}},
                },
            ],
        },
    ),
    "layers": (by_layer, {"optimizer": ADAMW, "groups": [{"match": "*", "lr_decay": 0.5}]}),
    "muon": (two_optimizers, {"optimizer": functools.partial(muon, lr=LR, weight_decay=0.1)}),
    "two of torch's": (
        made_by_hand,
        {"optimizer": lambda model: Combined([one for one, _ in made_by_hand(model)])},
    ),
    "LBFGS": (
        closures,
        {
            "optimizer": functools.partial(LBFGS, lr=LR, max_iter=4, line_search_fn="strong_wolfe"),
        },
    ),
    "frozen": (
        frozen,
        {
            "optimizer": functools.partial(SGD, lr=LR, momentum=0.9),
            "callbacks": [Freeze(["[01].*"], 5)],
        },
    ),
    "schedule-free": (
        lambda model: [(Averaging(model.parameters(), LR), [cosine])],
        {"optimizer": functools.partial(Averaging, lr=LR)},
    ),
}


def in_plain_torch(make_optimizers, freezes):
    model = make()
    optimizers = make_optimizers(model)
    rates = [[group["lr"] for group in one.param_groups] for one, _ in optimizers]
    for one, _ in optimizers:
        if isinstance(one, Averaging):
            one.train()
    for step in range(STEPS):
        inputs, targets = batches()[step % 4]
        model.train()
        is_frozen = freezes and step < 5
        for layer in (model[0], model[1]):
            layer.requires_grad_(not is_frozen)
            layer.train(not is_frozen)

        def closure(inputs=inputs, targets=targets):
            model.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        if not isinstance(optimizers[0][0], LBFGS):
            closure()
        for (optimizer, factors), own in zip(optimizers, rates, strict=True):
            for group, factor, rate in zip(optimizer.param_groups, factors, own, strict=True):
                group["lr"] = rate * factor(step)
            optimizer.step(*([closure] if isinstance(optimizer, LBFGS) else []))
    return model


def fitted(folder, resume=None, **settings):
    """The Trainer after STEPS, with an evaluation in each epoch."""
    model = make()
    settings = copy.deepcopy(settings)
    if isinstance(settings["optimizer"], type(lambda: 0)):
        settings["optimizer"] = settings["optimizer"](model)
    saver = Checkpoint(folder, every=1, keep=99, overwrite=True)
    settings["callbacks"] = [*settings.get("callbacks", ()), saver]
    trainer = make_trainer(model, scheduler=schedules.cosine, **settings)
    trainer.fit(batches(), batches(), resume=resume)
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_it_is_a_loop_in_plain_torch_and_resumes_to_the_bit(tmp_path, case):
    make_optimizers, settings = CASES[case]
    trainer = fitted(tmp_path, **settings)
    expected = in_plain_torch(make_optimizers, freezes=case == "frozen")
    for name, value in trainer.module.state_dict().items():
        torch.testing.assert_close(
            value, expected.state_dict()[name], rtol=1e-11, atol=1e-12, msg=name
        )
    whole = copy.deepcopy(trainer.state_dict())
    again = fitted(tmp_path, resume=checkpoint.path_of(tmp_path, 5), **settings)
    for part in ("model", "optimizer", "scheduler", "frozen"):
        assert_same(again.state_dict()[part], whole[part], part)


def test_lbfgs_adds_up_micro_batches():
    settings = {"optimizer": functools.partial(LBFGS, lr=LR, max_iter=4), "scheduler": None}
    weights = []
    for parts in (1, 4):
        trainer = make_trainer(
            make_model(dtype=torch.float64), grad_accum_steps=parts, max_grad_norm=9.0, **settings
        )
        trainer.fit(batches())
        weights.append(trainer.module[0].weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-12)
    with pytest.raises(
        UserError, match="LBFGS evaluates the loss several times per step. Use one process"
    ):
        make_trainer(precision="fp16", **settings)
    with pytest.raises(UserError, match="LBFGS doesn't support per-parameter options"):
        make_trainer(groups=[{"match": "0.*", "lr": 0.1}], **settings)
    with pytest.raises(UserError, match="LBFGS doesn't support per-parameter options"):
        make_trainer(groups=[{"match": "*", "lr": 0.1}], **settings)


class Ends(Callback):
    def on_eval_end(self, trainer):
        self.weight = trainer.module[0].weight.detach().clone()


def test_an_evaluation_has_the_weights_of_the_optimizers_eval_and_changes_nothing():
    settings = {"optimizer": functools.partial(Averaging, lr=LR), "scheduler": None}
    ends = Ends()
    trainer = make_trainer(make(), callbacks=[ends], **settings)
    seen = []
    plain = trainer.train_step

    def watched(batch):
        loss = plain(batch)
        seen.append(trainer.module[0].weight.detach().clone())
        return loss

    trainer.train_step = watched
    trainer.fit(batches(), batches())
    with trainer.evaluating():
        mean = torch.stack(seen).mean(0)
        torch.testing.assert_close(trainer.module[0].weight, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ends.weight, mean, rtol=1e-12, atol=1e-12)
    assert torch.equal(trainer.module[0].weight, seen[-1])


def test_schedule_free_of_its_own_package(tmp_path):
    schedulefree = pytest.importorskip("schedulefree")
    settings = {"optimizer": functools.partial(schedulefree.AdamWScheduleFree, lr=LR)}
    trainer = fitted(tmp_path, **settings)
    model = make()
    groups = parameter_groups(model)
    expected = schedulefree.AdamWScheduleFree(groups, lr=LR)
    expected.train()
    for step in range(STEPS):
        inputs, targets = batches()[step % 4]
        for group in expected.param_groups:
            group["lr"] = LR * cosine(step)
        expected.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        expected.step()
    expected.eval()
    with trainer.evaluating():
        for ours, theirs in zip(trainer.module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    whole = copy.deepcopy(trainer.state_dict()["model"])
    again = fitted(tmp_path, resume=checkpoint.path_of(tmp_path, 6), **settings)
    assert_same(again.state_dict()["model"], whole)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"match": "4.*", "lr": 1}], "no parameter of the model matches 4"),
        ([{"match": "3.wieght", "lr": 1}], "matches 3.wieght. Did you mean '3.weight'"),
        (
            [{"match": "*", "lr": 1}, {"match": "0.*", "lr": 1}],
            "already cover everything that match=0.* matches",
        ),
        (
            [{"match": "*", "momentun": 1}],
            "sets momentun, but the optimizer has no such option. Did you mean 'mom",
        ),
        ([{"match": "*", "lr": -1}], r"groups: lr of \*=-1: expected a number of at least 0"),
        (
            [{"match": "*", "scheduler": "cosin"}],
            "scheduler=cosin: not a valid choice. Did you mean 'cosine'",
        ),
        ([{"match": "*", "scheduler": {}}], "scheduler={}: not a valid choice"),
        (
            [{"match": "*", "scheduler": {"cosine": {"warmpu": 1}}}],
            "groups: scheduler.cosine=warmpu: not a valid choice. Did you mean 'warmup'",
        ),
        ([{"match": "*", "name": "all"}], "expected a list of rules, each"),
        ([{"lr": 1}], "expected a list of rules, each with a name pattern"),
        ([{"match": "*"}], "expected a list of rules, each"),
    ],
)
def test_a_mistake_in_a_rule_is_named(rules, message):
    with pytest.raises(UserError, match=message):
        make_trainer(optimizer=functools.partial(SGD, lr=LR), groups=rules)


def test_a_decay_of_rates_needs_a_rate():
    def without(groups):
        return SGD(groups, lr=LR)

    with pytest.raises(UserError) as error:
        make_trainer(optimizer=without, groups=[{"match": "*", "lr_decay": 0.5}])
    assert str(error.value) == (
        "groups: lr_decay of * needs a learning rate. Add an lr to the rule, because the optimizer "
        "has none."
    )


def test_mistakes_in_what_is_frozen_are_named():
    for match, message in (
        ("9.*", "matches 9"),
        ("*", "the patterns match all parameters, so nothing is left to train"),
    ):
        with pytest.raises(UserError, match=message):
            trainer = make_trainer(make(), callbacks=[Freeze(match)])
            trainer.fit(batches())
    for thaw_at in ("soon", "2 epochs", -1):
        with pytest.raises(UserError, match=f"thaw_at={thaw_at}: expected a number of steps, or"):
            Freeze("0.*", thaw_at)


def test_rates_are_logged_by_the_names_of_their_groups():
    trainer = make_trainer(groups=[{"match": "3.*", "lr": 0.5}], scheduler=None)
    row = trainer.fit([(x.float(), y) for x, y in batches()])[0]
    assert {key: row[key] for key in row if "lr" in key} == {"train/lr": 0.01, "train/lr/3": 0.5}
    assert "AdamW lr 0.01, 0.5, constant" in " ".join(summary.plan(trainer)).replace(" (fused)", "")
    rules = [{"match": "3.*", "lr": 0.5}, {"match": "*", "lr": 0.25}]
    trainer = make_trainer(groups=rules, scheduler=None)
    row = trainer.fit([(x.float(), y) for x, y in batches()])[0]
    assert {key: row[key] for key in row if "lr" in key} == {"train/lr": 0.5, "train/lr/rest": 0.25}
    names = ["*.bias", "bias*", "rest", "*.bias", "bias*"]
    labelled = labels([{"name": name} for name in names])
    assert labelled == ["bias", "bias_1", "rest", "bias", "bias_1"]


def test_wsd_stays_and_goes_down_by_the_root():
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = schedules.wsd(optimizer, 24, warmup=4, decay=0.5, final=0.1)
    factors = [schedule.factor(step) for step in range(25)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factors[4:15] == [1.0] * 11
    expected = [1 - 0.9 * (k / 10) ** 0.5 for k in range(11)]
    assert factors[14:] == pytest.approx(expected)


@pytest.mark.parametrize("is_tied", [True, False])
def test_muon_trains_the_last_block_of_a_model_whose_head_is_its_embedding(is_tied):
    model = torch.nn.Sequential()
    model.tokens = torch.nn.Embedding(9, 4)
    model.widen = torch.nn.Linear(4, 6)
    model.shrink = torch.nn.Linear(6, 4)
    if not is_tied:
        model.head = torch.nn.Linear(4, 9)
    groups = [{"params": list(model.parameters())}]
    matrices = muon(groups, LR, module=model).optimizers[0].param_groups
    assert {id(p) for group in matrices for p in group["params"]} == {
        id(model.widen.weight),
        id(model.shrink.weight),
    }
