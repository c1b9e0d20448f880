"""States that no training has written are refused before anything is loaded; those of every
optimizer load.
"""

import copy
import functools

import pytest
import torch
from conftest import assert_same, make_data, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.trainer import checkpoint, fitting
from stoker.trainer.callbacks import EMA, Callback, Checkpoint, EarlyStopping, Lookahead
from stoker.trainer.errors import UserError


def loaders():
    data = make_data()
    return DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 25)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)
    )


def trainer(folder, **settings):
    callbacks = [Lookahead(), EMA(0.9), EarlyStopping(9), Checkpoint(folder, every=5, keep=9)]
    settings = {
        "callbacks": callbacks,
        "precision": "fp16",
        "max_grad_norm": 1.0,
        "log_every": 3,
        **settings,
    }
    return make_trainer(model(), **settings)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    trainer(folder).fit(*loaders())
    return checkpoint.load(checkpoint.path_of(folder, 10))


def at(path, value):
    """A change: the value at the place, `GONE` to leave it out."""

    def change(whole):
        *way, last = path.split("/")
        for key in way:
            whole = whole[int(key) if key.isdigit() else key]
        last = int(last) if last.isdigit() else last
        if value is GONE:
            del whole[last]
        else:
            whole[last] = value

    return pytest.param(change, id=f"{path} {'gone' if value is GONE else value}"[:60])


GONE = object()
GROUP = "optimizer/param_groups/0"
NAMES = ("EMA", "Lookahead", "EarlyStopping", "Checkpoint")
WRONG = [
    *[at("step", value) for value in (2.5, "10", None, True, GONE, [10], torch.tensor(10))],
    *[at("evaluation_due", value) for value in (GONE, 1, "no")],
    *[at("frozen", value) for value in (GONE, "0.weight", 3)],
    *[at("optimizer_class", value) for value in (GONE, "SGD", 3)],
    *[at(name, value) for name in ("model", "optimizer", "scheduler", "scaler") for value in (GONE, [], "x", None, 3)],
    *[at(f"model/{name}", GONE) for name in ("0.weight", "1.running_mean")],
    *[at("model/0.weight", value) for value in (torch.ones(16, 7), torch.ones(1), torch.tensor(1.0), "x", 1.0, None)],
    at("model/extra", torch.ones(1)),
    at("optimizer/state", []),
    at("optimizer/state/other", 1),
    at("optimizer/param_groups", []),
    at("optimizer/param_groups", {}),
    at(GROUP, "x"),
    *[at(f"{GROUP}/lr", value) for value in (GONE, "0.1", [0.1], torch.ones(2), None, True)],
    *[at(f"{GROUP}/betas", value) for value in (GONE, "ab")],
    *[at(f"{GROUP}/params", value) for value in (GONE, [0], [], "x", [[0], [1]], [torch.ones(2)])],
    *[at(f"{GROUP}/amsgrad", value) for value in (GONE, True, "x", None)],
    *[at(f"{GROUP}/initial_lr", value) for value in (GONE, "x")],
    *[at("scheduler/steps", value) for value in ("x", None, [1])],
    at("scheduler/given", [0.1]),
    at("scheduler/other", 1),
    at("scaler/scale", GONE),
    *[at("train_loss/total", value) for value in (GONE, "x", torch.ones(3), None)],
    *[at("callbacks", value) for value in (GONE, [], "x")],
    *[at(f"callbacks/{name}", value) for name in NAMES for value in ([], 1, GONE)],
    *[at(f"callbacks/{place}", GONE) for place in ("EMA/average", "Lookahead/step", "EarlyStopping/waited", "Checkpoint/best")],
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_state_is_refused_and_nothing_of_it_loaded(tmp_path, good, change):
    wrong = copy.deepcopy(good)
    change(wrong)
    made = trainer(tmp_path)
    fitting.prepare(made, *loaders(), None)
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(UserError, match="^The checkpoint does not match this ") as caught:
        made.load_state_dict(wrong)
    assert 1 <= len(str(caught.value).splitlines()) <= 3 and len(str(caught.value)) < 400
    assert_same(made.state_dict(), before)


class Counting(EarlyStopping):
    """Adds a number of its own to the state."""

    seen = 0

    def on_log(self, trainer, row):
        self.seen += 1
        super().on_log(trainer, row)

    def state_dict(self):
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.seen = state["seen"]


class Forgetful(Counting):
    """Saves nothing but its own number."""

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Averaging(EMA):
    """Adds a number of its own to the averages."""

    seen = 0

    def on_step_end(self, trainer):
        super().on_step_end(trainer)
        self.seen += 1

    def state_dict(self):
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.seen = state["seen"]


@pytest.mark.parametrize(("kind", "setting"), [(Counting, 9), (Forgetful, 9), (Averaging, 0.9)])
def test_a_subclass_of_a_callback_may_save_what_it_likes(tmp_path, kind, setting):
    whole = kind(setting)
    made = make_trainer(callbacks=[whole, Checkpoint(tmp_path, every=1, keep=99)], epochs=2)
    made.fit(*loaders())
    resumed = kind(setting)
    again = make_trainer(callbacks=[resumed], epochs=2)
    again.fit(*loaders(), resume=checkpoint.path_of(tmp_path, 3))
    assert resumed.seen == whole.seen > 3
    assert_same(again.state_dict()["callbacks"][kind.__name__], whole.state_dict())
    if kind is not Forgetful:
        (key,) = {"best", "average"} & set(whole.state_dict())
        wrong = made.state_dict()
        del wrong["callbacks"][kind.__name__][key]
        with pytest.raises(UserError, match=f"match this {kind.__name__}: KeyError: '{key}'"):
            make_trainer(callbacks=[kind(setting)], epochs=2).load_state_dict(wrong)


@pytest.mark.parametrize("value", [None, [], "text", 3, torch.ones(2), {}])
def test_what_is_no_state_at_all_is_refused(tmp_path, value):
    with pytest.raises(UserError, match="The checkpoint does not match this Trainer: "):
        trainer(tmp_path).load_state_dict(value)


def test_the_place_and_what_was_wanted_are_named(tmp_path, good):
    wrong = copy.deepcopy(good)
    wrong["model"]["0.weight"] = torch.ones(3)
    with pytest.raises(UserError) as caught:
        trainer(tmp_path).load_state_dict(wrong)
    assert str(caught.value) == (
        "The checkpoint does not match this model: RuntimeError: Error(s) in loading state_dict for "
        "Sequential: size mismatch for 0.weight: copying a param with shape torch.Size([3]) from "
        "checkpoint, the shape in current model is torch.Size([16, 6])."
    )


def test_a_good_state_loads_in_a_fit_and_without_one(tmp_path, good):
    made = trainer(tmp_path)
    made.load_state_dict(copy.deepcopy(good))
    assert made.step == 10 and made.evaluate(loaders()[1])["val/loss"] > 0
    resumed, whole = trainer(tmp_path / "resumed"), trainer(tmp_path / "whole")
    resumed.fit(*loaders(), resume=copy.deepcopy(good))
    whole.fit(*loaders())
    assert_same(dict(resumed.module.state_dict()), dict(whole.module.state_dict()))


def test_a_callback_of_ones_own_may_have_any_state(tmp_path):
    class Own(Callback):
        seen = ()

        def on_step_end(self, trainer):
            self.seen = [*self.seen, {"at": trainer.step}]

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    one = make_trainer(callbacks=[Own(), Checkpoint(tmp_path)], epochs=1)
    one.fit(*loaders())
    other = make_trainer(callbacks=[Own()], epochs=1)
    other.load(checkpoint.newest(tmp_path)[0])
    assert other.callbacks[0].seen[-1] == {"at": 8}


# Optimizers

KINDS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]
OPTIONS = {
    "SGD": [{}, {"momentum": 0.9}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}],
}
OPTIONS |= {"RMSprop": [{}, {"centered": True, "momentum": 0.9}], "LBFGS": [], "SparseAdam": []}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id=f"{kind.__name__} {options}")
        for kind in KINDS
        for options in OPTIONS.get(kind.__name__, [{}])
    ],
)
def test_the_state_of_each_optimizer_loads(kind, options):
    def build():
        torch.manual_seed(0)
        matrices = [torch.nn.Parameter(torch.randn(4, 5)), torch.nn.Parameter(torch.randn(3, 2))]
        others = [] if kind.__name__ == "Muon" else [torch.nn.Parameter(torch.randn(7))]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        return kind([group for group in groups if group["params"]], lr=0.01, **options)

    def step(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().clone()
        optimizer.step()

    one, other = build(), build()
    for _ in range(3):
        step(one)
    saved = copy.deepcopy(one.state_dict())
    checkpoint.check_options("optimizer", other, saved)
    checkpoint.restore("optimizer", other, copy.deepcopy(saved))
    for mine, theirs in zip(one.param_groups, other.param_groups, strict=True):
        for source, target in zip(mine["params"], theirs["params"], strict=True):
            target.data.copy_(source.data)
    step(one)
    step(other)
    assert_same(other.state_dict(), one.state_dict())


def test_the_state_of_parameters_in_another_order_is_refused():
    """Torch would give each weight the moments of the other."""
    named = [(name, torch.nn.Parameter(torch.zeros(2, 2))) for name in "ab"]
    saved = torch.optim.SGD(named, lr=0.1).state_dict()
    other = torch.optim.SGD(named[::-1], lr=0.1)
    with pytest.raises(UserError, match=r"param_groups.0.param_names is \['a', 'b'\], not \['b'"):
        checkpoint.check_options("optimizer", other, saved)


def test_an_optimizer_of_ones_own_loads_what_it_saved(tmp_path):
    class Counting(torch.optim.SGD):
        """Keeps what it likes, in a form of its own."""

        def state_dict(self):
            return {"anything": [1, {"a": "b"}], "inner": super().state_dict()}

        def load_state_dict(self, state):
            assert state["anything"] == [1, {"a": "b"}]
            super().load_state_dict(state["inner"])

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=0.01):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in (
                p for group in self.param_groups for p in group["params"] if p.grad is not None
            ):
                kept = self.state[parameter]
                kept["mean"] = 0.9 * kept.get("mean", 0) + parameter.grad
                kept["shape of its own"] = torch.ones(2, 3)
                parameter -= self.param_groups[0]["lr"] * kept["mean"].sign()

    for i, kind in enumerate((functools.partial(Counting, lr=0.1, momentum=0.9), Lion)):
        whole = make_trainer(
            optimizer=kind, callbacks=[Checkpoint(tmp_path / str(i), every=5, keep=9)]
        )
        whole.fit(*loaders())
        resumed = make_trainer(optimizer=kind)
        resumed.fit(*loaders(), resume=checkpoint.path_of(tmp_path / str(i), 10))
        assert_same(dict(resumed.module.state_dict()), dict(whole.module.state_dict()))


def test_a_checkpoint_of_another_device_works_the_way_of_this_one():
    """A graph on a GPU has capturable=True and rates in tensors, which the CPU's own form cannot do
    with.
    """
    parameter = torch.nn.Parameter(torch.ones(3))
    one, other = (torch.optim.AdamW([parameter], lr=0.1, fused=fused) for fused in (True, None))
    parameter.grad = torch.ones(3)
    one.step()
    saved = one.state_dict()
    saved["param_groups"][0] |= {"capturable": True, "lr": torch.tensor(0.1)}
    checkpoint.check_options("optimizer", other, saved)
    checkpoint.restore("optimizer", other, saved)
    assert not other.param_groups[0]["fused"] and not other.param_groups[0]["capturable"]
    other.step()


@pytest.mark.parametrize(("before", "after"), [("NAdam", "RAdam"), ("Adam", "Adamax")])
def test_a_state_of_another_optimizer_is_refused(before, after):
    kinds = {
        name: functools.partial(getattr(torch.optim, name), lr=0.01) for name in (before, after)
    }
    trained = make_trainer(optimizer=kinds[before], epochs=1)
    data = make_data()
    batches = [(data.train.inputs, data.train.targets)]
    trained.fit(batches)
    state = trained.state_dict()
    with pytest.raises(UserError, match=f"optimizer_class is '{before}', not '{after}'"):
        make_trainer(optimizer=kinds[after], epochs=2).fit(batches, resume=state)
    make_trainer(optimizer=None).load_state_dict(state)


@pytest.mark.parametrize(("size", "loads"), [((1,), False), ((3, 16), True)])
def test_a_moment_of_another_shape_is_refused_before_a_fused_step_reads_it(size, loads):
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    made = make_trainer(model(), optimizer=optimizer, epochs=1)
    made.fit(loaders()[0])
    state = copy.deepcopy(made.state_dict())
    moments = state["optimizer"]["state"]
    (number,) = [i for i in moments if moments[i]["exp_avg"].shape == (3, 16)]
    moments[number]["exp_avg"] = torch.zeros(size)
    if loads:
        made.load_state_dict(state)
        return
    with pytest.raises(UserError) as error:
        made.load_state_dict(state)
    assert str(error.value) == (
        "The checkpoint does not match this AdamW: exp_avg has shape (1,), not (3, 16)."
    )


@pytest.mark.parametrize("averages", [{"0.weight": torch.ones(1)}, {}])
def test_an_average_of_another_shape_is_refused(averages):
    made = make_trainer(model(), callbacks=[EMA(0.9)], epochs=1)
    made.fit(loaders()[0])
    state = copy.deepcopy(made.state_dict())
    average = state["callbacks"]["EMA"]["average"]
    del average["0.weight"]
    average.update(averages)
    made.load_state_dict(state)
    with pytest.raises(UserError) as error:
        made.evaluate(loaders()[1])
    assert str(error.value) == (
        "The checkpoint does not match this model: the average of 0.weight is missing or has a "
        "different shape."
    )


def test_a_callback_in_a_state_does_not_replace_a_part_of_its_name():
    made = make_trainer(model())
    state = copy.deepcopy(made.state_dict())
    state["callbacks"]["model"] = {"0.weight": torch.zeros(16, 6)}
    made.load_state_dict(state)
    assert_same(made.module.state_dict(), state["model"])


def test_a_state_gives_a_scheduler_of_torch_no_attributes():
    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    made = make_trainer(scheduler=scheduler, epochs=1)
    made.fit(loaders()[0])
    wrong = made.state_dict()
    wrong["scheduler"] = {**wrong["scheduler"], "step": 3}
    with pytest.raises(UserError, match="scheduler.step is 3, not None"):
        made.load_state_dict(wrong)
    assert callable(made.scheduler.step)


def test_a_state_loads_into_a_model_without_shapes():
    def build():
        torch.manual_seed(0)
        return make_trainer(torch.nn.Sequential(torch.nn.LazyLinear(3)), epochs=1)

    whole = build()
    whole.fit(loaders()[0])
    other = build()
    other.load_state_dict(whole.state_dict())
    assert_same(dict(other.module.state_dict()), dict(whole.module.state_dict()))
