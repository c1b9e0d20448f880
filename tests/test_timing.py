import contextlib
import copy
import functools
import re
import time

import pytest
import torch
from conftest import Careless
from torch import nn

from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import HostLoader, make_loaders
from stoker.diagnostics import speed_advice
from stoker.diagnostics.speed_advice import SOON, speed_verdict
from stoker.diagnostics.timing import ALWAYS, SHARE, STAGES, Timing
from stoker.runs import live, report
from stoker.runs.loggers import Logger
from stoker.trainer import fitting
from stoker.trainer.callbacks import Callback, Checkpoint, Progress
from stoker.trainer.spans import silent_spans
from stoker.trainer.trainer import Trainer

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
POINTS = 0.05


@pytest.fixture
def virtual(monkeypatch):
    """A clock that only sleeping, and reading it (20 us), advances: a busy machine cannot fail a
    test.
    """
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def perf_counter():
        sleep(2e-5)
        return now[0]

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", perf_counter)


@pytest.fixture(autouse=True)
def short_fits_count(monkeypatch):
    """A second of training gets its sentence too."""
    monkeypatch.setattr(speed_advice, "SOON", 0.1)


@pytest.fixture(autouse=True)
def own_clock(request, large):
    """The virtual clock; `pytest --large` takes the real one, which wants a quiet machine, but
    where a test names this
    one: what it holds is of steps that are nothing but sleep, or of what a look at the clock costs.
    """
    if not large:
        request.getfixturevalue("virtual")


class Clock:
    """Seconds that were spent within it, counted where they are spent: what the shares are held
    against.
    """

    def __init__(self, at_least=0.0):
        self.at_least, self.seconds = at_least, 0.0

    @contextlib.contextmanager
    def __call__(self):
        start = time.perf_counter()
        yield
        time.sleep(self.at_least)
        self.seconds += time.perf_counter() - start


class Net(nn.Linear):
    """Takes 5 ms, or more, for a forward."""

    seconds = 0.005

    def forward(self, inputs):
        time.sleep(self.seconds)
        return super().forward(inputs)


class Sends:
    """A batch of (inputs, targets) whose way to a device takes its time."""

    def __init__(self, pair, clock):
        self.pair, self.clock = pair, clock

    def to(self, device):
        with self.clock():
            return self.pair


class OnItsWay(Trainer):
    def compute_loss(self, batch):
        return super().compute_loss(batch if isinstance(batch, tuple) else batch.pair)


class Slow:
    """A loader of `n` batches that takes its time for each."""

    def __init__(self, n, clock, size=8, sends=None):
        generator = torch.Generator().manual_seed(0)
        self.pairs = [
            (torch.randn(size, 6, generator=generator), torch.arange(size) % 3) for _ in range(n)
        ]
        self.clock, self.sends, self.batch_size = clock, sends, size

    def __len__(self):
        return len(self.pairs)

    def __iter__(self):
        for pair in self.pairs:
            with self.clock():
                pass
            yield pair if self.sends is None else Sends(pair, self.sends)


class SlowStream(torch.utils.data.IterableDataset):
    """The samples of a Slow loader, one by one."""

    def __iter__(self):
        batches = Slow(60, Clock(at_least=0.015))
        return (pair for batch in batches for pair in zip(*batch, strict=True))


def fitted(
    train,
    val=None,
    model=None,
    callbacks=(),
    trainer=Trainer,
    optimizer=SGD,
    resume=None,
    **settings,
):
    """(its Timing, the seconds of the fit) of a training on the CPU."""
    timing = Timing()
    torch.manual_seed(0)
    model = model or Net(6, 3)
    fits = trainer(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        callbacks=[*callbacks, timing],
        device="cpu",
        **settings,
    )
    fits.fit(train, val, resume)
    return timing, sum(timing.took.values())


def test_a_slow_loader():
    clock = Clock(at_least=0.015)
    timing, total = fitted(Slow(60, clock), epochs=1)
    assert abs(timing.took["data"] - clock.seconds) <= POINTS * total
    share = 100 * timing.took["data"] / total
    assert timing.said.startswith(
        f"the CPU waited {share:.0f}% of the time for data: set a larger dataset.workers"
    )


def test_skipping_the_batches_before_a_resume_is_not_waiting():
    loader = torch.utils.data.DataLoader(SlowStream(), batch_size=8)
    torch.manual_seed(0)
    states = []

    class Keep(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 50:
                states.append(copy.deepcopy(trainer.state_dict()))

    model = Net(6, 3)
    fitted(loader, model=model, callbacks=[Keep()], max_steps=60)
    timing, _ = fitted(loader, model=model, resume=states[0], max_steps=60)
    assert 9 * 0.015 <= timing.took["data"] < 10 * 0.015
    share = int(re.findall(r"waited (\d+)% of the time for data", timing.said)[0]) / 100
    assert abs(share - 0.015 / (0.015 + Net.seconds)) <= POINTS


def test_a_slow_split_that_is_streamed():
    clock = Clock(at_least=0.015)

    class Reads(TensorSplit):
        def __getitem__(self, index):
            with clock():
                return super().__getitem__(index)

    split = Reads(torch.randn(400, 6), torch.arange(400) % 3)
    (train, _, _), _ = make_loaders(
        Data("slow", split, None, None, in_shape=(6,), num_classes=3),
        batch_size=8,
        resident=False,
        workers=0,
    )
    assert isinstance(train, HostLoader)
    clock.seconds = 0.0
    timing, total = fitted(train, epochs=1)
    assert abs(timing.took["data"] - clock.seconds) <= POINTS * total
    assert "for data: set a larger dataset.workers" in timing.said
    assert timing.said.endswith("or dataset.resident=true")


def test_a_slow_way_to_the_device():
    sends = Clock(at_least=0.015)
    timing, total = fitted(Slow(60, Clock(), sends=sends), epochs=1, trainer=OnItsWay)
    assert abs(timing.took["transfer"] - sends.seconds) <= POINTS * total
    assert "for batches to be copied: give your own DataLoader pin_memory=True" in timing.said


def test_too_many_evaluations():
    clock = Clock(at_least=0.01)
    timing, total = fitted(Slow(70, Clock()), Slow(2, clock), epochs=1, eval_every=2)
    evaluated = clock.seconds + 35 * 2 * 0.005
    assert timing.took["evaluation"] >= evaluated
    assert abs(timing.took["evaluation"] - evaluated) <= POINTS * total
    share = timing.took["evaluation"] / total
    assert timing.said == (
        f"evaluations took {100 * share:.0f}% of the time: "
        "set a larger eval_every, or use a smaller validation split"
    )


def test_what_the_rows_of_evaluations_cost():
    class Slowly(Callback):
        def on_log(self, trainer, row):
            if "val/loss" in row:
                time.sleep(0.02)

    timing, total = fitted(
        Slow(70, Clock()), Slow(2, Clock()), epochs=1, eval_every=2, callbacks=[Slowly()]
    )
    assert abs(timing.took["evaluation"] - 35 * (0.02 + 2 * 0.005)) <= POINTS * total
    assert abs(timing.took["forward"] - 70 * 0.005) <= POINTS * total


def test_what_others_do_after_a_step_is_the_loop_s():
    class Slowly(Callback):
        def on_step_end(self, trainer):
            time.sleep(0.02)

    timing, total = fitted(Slow(70, Clock()), callbacks=[Slowly()], epochs=1)
    assert abs(timing.took["other"] - 70 * 0.02) <= POINTS * total


def test_the_evaluation_that_a_run_still_owes_is_no_data(tmp_path):
    trainer = Trainer(
        Net(6, 3),
        nn.CrossEntropyLoss(),
        SGD,
        callbacks=[timing := Timing()],
        device="cpu",
        epochs=1,
    )
    fitting.prepare(trainer, Slow(40, Clock()), Slow(60, Clock()), None)
    state = trainer.state_dict() | {"evaluation_due": True}
    trainer.fit(Slow(40, Clock()), Slow(60, Clock()), resume=state)
    total = sum(timing.took.values())
    assert abs(timing.took["evaluation"] - 60 * 0.005) <= POINTS * total  # the last one
    assert timing.took["data"] <= POINTS * total


def test_a_trainer_s_own_evaluation_and_predictions_are_no_data():
    class Own(Trainer):
        def evaluate(self, loader, split="val"):
            time.sleep(0.1)
            return {f"{split}/loss": 1.0}

    class Predicts(Callback):
        def on_epoch_end(self, trainer):
            trainer.predict(Slow(20, Clock()))

    timing, total = fitted(Slow(40, Clock()), [1], epochs=2, trainer=Own, callbacks=[Predicts()])
    assert abs(timing.took["evaluation"] - 2 * (0.1 + 20 * 0.005)) <= POINTS * total
    assert abs(timing.took["forward"] - 2 * 40 * 0.005) <= POINTS * total


def test_an_evaluation_within_an_evaluation_is_counted_once():
    class Twice(Trainer):
        def evaluate(self, loader, split="val"):
            time.sleep(0.1)
            return super().evaluate(loader, split)

    timing, total = fitted(Slow(40, Clock()), Slow(20, Clock()), epochs=2, trainer=Twice)
    assert abs(timing.took["evaluation"] - 2 * (0.1 + 20 * 0.005)) <= POINTS * total


def test_an_evaluation_without_a_fit_is_not_timed():
    trainer = Trainer(Net(6, 3), nn.CrossEntropyLoss(), callbacks=[Timing()], device="cpu")
    assert trainer.evaluate(Slow(2, Clock())) == Trainer(
        trainer.module, nn.CrossEntropyLoss(), device="cpu"
    ).evaluate(Slow(2, Clock()))


def test_too_many_checkpoints(tmp_path):
    clock = Clock(at_least=0.02)

    class Saves(Checkpoint):
        def save(self, trainer):
            with clock():
                super().save(trainer)

    timing, total = fitted(Slow(60, Clock()), callbacks=[Saves(tmp_path, every=1)], epochs=1)
    assert abs(timing.took["checkpoint"] - clock.seconds) <= POINTS * total
    share = timing.took["checkpoint"] / total
    assert timing.said == (
        f"checkpoints took {100 * share:.0f}% of the time: set a larger eval_every, "
        "checkpoint.every, checkpoint.epochs or checkpoint.minutes"
    )


def test_a_slow_logger():
    class SlowLogger(Logger):
        def write(self, numbers, step):
            with clock():
                time.sleep(0.02)

        end = write

    clock = Clock()
    logger = SlowLogger()
    logger.describe({})
    timing, total = fitted(Slow(60, Clock()), callbacks=[logger], epochs=1, log_every=1)
    assert abs(timing.took["logging"] - clock.seconds) <= POINTS * total
    assert timing.said.startswith(
        f"loggers took {100 * timing.took['logging'] / total:.0f}% of the time"
    )


def test_drawing_the_live_report_is_no_logging(tmp_path, monkeypatch):
    def write(folder, state):
        with clock():
            time.sleep(0.2)

    clock = Clock()
    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(live, "FIRST", 0)
    saver = Checkpoint(tmp_path / "checkpoints")
    drawn = live.LiveReport(tmp_path, saver)
    timing, total = fitted(Slow(60, Clock()), callbacks=[saver, drawn], epochs=1, log_every=2)
    assert abs(timing.took["report"] - clock.seconds) <= POINTS * total
    assert timing.took.get("logging", 0.0) == 0.0


class SlowSGD(torch.optim.SGD):
    clock = None

    @torch.no_grad()
    def step(self, closure=None):
        with self.clock():
            return super().step(closure)


def test_tiny_batches():
    SlowSGD.clock = Clock(at_least=0.004)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    timing, total = fitted(
        Slow(300, Clock(), size=1), model=model, optimizer=functools.partial(SlowSGD, lr=0.01)
    )
    assert abs(timing.took["optimizer"] - SlowSGD.clock.seconds) <= POINTS * total
    share = (timing.took["optimizer"] + timing.took["other"]) / total
    assert timing.said == (
        f"{100 * share:.0f}% of the time went to the optimizer and the loop, which cost the same for any batch size: "
        "use larger batches"
    )


def test_nothing_to_do():
    model = Net(6, 3)
    model.seconds = 0.05
    timing, total = fitted(Slow(24, Clock()), model=model)
    assert abs(timing.took["forward"] - 23 * 0.05) <= POINTS * total
    compute = sum(timing.took[stage] for stage in ("forward", "backward", "optimizer"))
    assert (
        timing.said
        == f"compute bound: {100 * compute / total:.0f}% of the time is forward, backward and optimizer"
    )


def test_the_sentence_is_said_after_the_first_epoch(capsys):
    clock = Clock(at_least=0.015)
    fitted(Slow(60, clock), callbacks=[Progress()], epochs=2)
    lines = capsys.readouterr().out.splitlines()
    said = [i for i, line in enumerate(lines) if line.startswith("speed    so far, the CPU waited")]
    assert len(said) == 1 and lines[said[0] - 1].startswith("epoch 1/2")


def test_all_of_the_time_is_in_the_split_and_none_twice():
    class Lasts(Callback):
        def on_fit_start(self, trainer):
            self.start = time.perf_counter()

        def on_fit_end(self, trainer):
            self.seconds = time.perf_counter() - self.start

    lasts = Lasts()
    timing, total = fitted(
        Slow(30, Clock(0.002)),
        Slow(3, Clock(0.002)),
        callbacks=[lasts],
        epochs=4,
        grad_accum_steps=3,
    )
    assert set(timing.took) <= set(STAGES) and all(seconds > 0 for seconds in timing.took.values())
    assert abs(total - lasts.seconds) <= 0.05 * lasts.seconds
    assert abs(timing.took["forward"] - 4 * 30 * 3 * 0.005) <= POINTS * total


@pytest.mark.parametrize(
    "settings", [{}, {"grad_accum_steps": 2, "max_grad_norm": 0.1}, {"precision": "bf16"}]
)
def test_the_weights_are_those_of_a_training_that_nobody_times(settings):
    def weights(callbacks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        fits = Trainer(
            model,
            nn.CrossEntropyLoss(),
            SGD,
            callbacks=callbacks,
            device="cpu",
            epochs=3,
            **settings,
        )
        fits.fit(Slow(40, Clock()), Slow(2, Clock()))
        assert fits.spans == silent_spans()
        return model.state_dict()

    timed, plain = weights([Timing()]), weights([])
    assert all(torch.equal(timed[name], plain[name]) for name in plain)


def test_a_step_of_one_s_own_is_one_stage(virtual):
    class Own(Careless):
        def train_step(self, batch):
            loss = super().train_step(batch)
            self.scheduler.step()
            return loss

    timing, total = fitted(Slow(40, Clock()), trainer=Own)
    assert abs(timing.took["step"] - 40 * 0.005) <= POINTS * total
    assert not {"forward", "backward", "optimizer"} & set(timing.took)


def test_a_fit_that_another_callback_refuses_fails_as_it_would_have():
    class Refuses(Callback):
        def on_fit_start(self, trainer):
            raise ZeroDivisionError

    fits = Trainer(
        Net(6, 3), nn.CrossEntropyLoss(), SGD, callbacks=[Refuses(), Timing()], device="cpu"
    )
    with pytest.raises(ZeroDivisionError):
        fits.fit(Slow(4, Clock()))


def test_a_fit_that_fails_leaves_nothing_behind():
    class Fails(Net):
        def forward(self, inputs):
            raise ZeroDivisionError

    fits = Trainer(
        Fails(6, 3), nn.CrossEntropyLoss(), SGD, callbacks=[timing := Timing()], device="cpu"
    )
    with pytest.raises(ZeroDivisionError):
        fits.fit(Slow(4, Clock()))
    assert fits.spans == silent_spans() and timing.took == {}


@pytest.mark.parametrize(("batches", "epochs"), [(4000, 1), (1, 2000), (2, 1000)])
def test_the_sampling_has_its_share_and_no_more(virtual, batches, epochs):
    cheap = nn.Sequential(nn.Linear(6, 3))
    timing, total = fitted(Slow(batches, Clock(at_least=0.003)), model=cheap, epochs=epochs)
    steps = batches * epochs
    assert timing.samples[True] == epochs - 1
    others = steps - epochs
    least = min(others, ALWAYS // 2)
    assert least <= timing.samples[False] <= ALWAYS + 2 * SHARE * others
    assert abs(timing.took["data"] - steps * 0.003) <= POINTS * total


def test_a_loader_that_waits_at_the_start_of_each_epoch_has_its_share(virtual):
    class Starting(Slow):
        def __iter__(self):
            time.sleep(1)
            return super().__iter__()

    clock = Clock(at_least=0.003)
    timing, total = fitted(Starting(100, clock), epochs=10)
    assert abs(timing.took["data"] - (9 * 1 + clock.seconds)) <= POINTS * total


@pytest.mark.parametrize("settings", [{"max_steps": 2}, {"max_steps": 3}, {"epochs": 2}])
def test_few_steps(settings):
    timing, total = fitted(Slow(2, Clock(at_least=0.1)), **settings)
    steps = settings.get("max_steps", 4)
    assert abs(timing.took["data"] - (steps - 1) * 0.1) <= POINTS * total


def test_a_fit_of_one_step_has_no_time():
    assert fitted(Slow(2, Clock(at_least=0.1)), max_steps=1)[0].took == {}


WAITS = {"data": 3.0, "forward": 1.0, "backward": 1.0}


@pytest.mark.parametrize(
    ("seconds", "idle", "said"),
    [
        (WAITS, 0, "the GPU waited 60% of the time for data: set a larger dataset.workers, or "),
        (
            {"transfer": 1.0, "step": 3.0},
            0,
            "the GPU waited 25% of the time for batches to be copied: set dataset.resident=true",
        ),
        (
            {"evaluation": 5.0, "step": 5.0},
            0,
            "evaluations took 50% of the time: set a larger eval_every, or use a smaller ",
        ),
        (
            {"logging": 2.0, "step": 8.0},
            0,
            "loggers took 20% of the time: remove one of the callbacks, or set a larger log_every",
        ),
        (
            {"evaluation": 1.9, "forward": 8.1},
            0,
            "compute bound: 81% of the time is forward, backward and optimizer",
        ),
        (
            {"step": 9.0},
            0.9,
            (
                "the GPU waited 90% of the time for Python to launch work: use larger "
                "batches, or compile=graph"
            ),
        ),
        (
            {"optimizer": 9.0, "forward": 1.0},
            0,
            (
                "90% of the time went to the optimizer and the loop, which cost the same for any "
                "batch size: use larger batches"
            ),
        ),
        (
            {"evaluation": 1.9, "data": 0.6, "transfer": 0.6, "other": 2.0, "forward": 1.0},
            0,
            "evaluations took 31% of the time: set a larger eval_every, or use a smaller ",
        ),
    ],
)
def test_the_verdict_is_a_function_of_the_shares(seconds, idle, said):
    lasting = {stage: 10 * spent for stage, spent in seconds.items()}
    assert speed_verdict(lasting, "GPU", "HostLoader", idle).startswith(said)


@pytest.mark.parametrize("loader", ["SampleLoader", "IterableLoader"])
@pytest.mark.parametrize("stage", ["data", "transfer"])
def test_data_of_any_shape_cannot_be_kept_on_the_device(loader, stage):
    said = speed_verdict({stage: 60.0, "forward": 40.0}, "GPU", loader, 0.0)
    assert said.startswith("the GPU waited 60% of the time for ") and "resident" not in said


def test_there_is_no_verdict_where_no_setting_helps():
    assert speed_verdict({"report": 5.0, "step": 4.0, "other": 1.0}, "GPU", "", 0.0) is None


def test_a_short_run_has_no_verdict(monkeypatch):
    monkeypatch.setattr(speed_advice, "SOON", SOON)
    assert speed_verdict({"step": 0.5 * SOON, "data": 0.49 * SOON}, "GPU", "", 0.0) is None


def test_slow_data_on_the_device():
    lasting = {"data": 60.0, "forward": 20.0, "backward": 10.0, "optimizer": 5.0, "other": 1.0}
    assert speed_verdict(lasting, "CPU", "DeviceLoader", 0.0) == (
        "the CPU waited 62% of the time for data: remove entries from dataset.augment, or use "
        "larger batches"
    )
