"""The Trainer against loops written by hand: what it computes, how it resumes, what cannot change a
training.
"""

import collections
import copy
import functools
import gc
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer
from saved import Saved
from torch.utils._python_dispatch import TorchDispatchMode

from stoker import Trainer
from stoker.data.datasets import Data, TensorSplit
from stoker.data.loader import DeviceLoader, HostLoader
from stoker.diagnostics.lr_find import lr_find
from stoker.models.cnn import CNN
from stoker.runs.inference import samples_of
from stoker.trainer import checkpoint, parallel, schedules
from stoker.trainer import device as devices
from stoker.trainer.callbacks import EMA, Callback, Checkpoint, EarlyStopping, NaNGuard
from stoker.trainer.errors import TrainingError, UserError, explanation_of
from stoker.trainer.metrics import Accuracy
from stoker.trainer.seeding import mix_seed, seed_generators


def loaders(data=None, batch_size=8, kind=DeviceLoader, **options):
    data = data or make_data()
    return kind(data, "train", batch_size, shuffle=True, **options), kind(data, "val", 7)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def trained(val=True, model=None, loader_options=None, **settings):
    """The weights after a fit."""
    train_loader, val_loader = loaders(**(loader_options or {}))
    trainer = make_trainer(model, **settings)
    trainer.fit(train_loader, val_loader if val else None)
    return weights(trainer)


# What a fit computes


@pytest.mark.parametrize("clip", [None, 0.1])
def test_fit_is_the_loop_one_would_have_written(clip):
    train_loader, _ = loaders()
    model = make_model(dropout=0.3)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    scheduler = schedules.cosine(optimizer, total_steps=3 * 8, warmup=3)
    criterion, step = torch.nn.CrossEntropyLoss(), 0
    for epoch in range(3):
        train_loader.seek(epoch)
        for inputs, targets in train_loader:
            seed_generators(torch.device("cpu"), mix_seed(0, "step", step))
            criterion(model(inputs), targets).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
    assert_same(
        trained(model=make_model(dropout=0.3), max_grad_norm=clip), dict(model.state_dict())
    )


@pytest.mark.parametrize(
    "samples", [56, 60]
)  # the last batch of 60 has 4 samples, and cannot be cut into 7
@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulation_changes_memory_and_not_the_mathematics(samples, clip):
    data = make_data(samples, dtype=torch.float64)
    results = [
        trained(
            model=make_model(dtype=torch.float64),
            loader_options={"data": data},
            grad_accum_steps=parts,
            max_grad_norm=clip,
        )
        for parts in (1, 2, 4, 7)
    ]
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-12, atol=1e-12)
    assert not torch.equal(results[0]["0.weight"], make_model(dtype=torch.float64)[0].weight)


def test_the_loss_of_a_step_is_the_mean_over_its_samples():
    batch = next(iter(loaders(make_data(dtype=torch.float64))[0]))
    losses = []
    for parts in (1, 3):
        trainer = make_trainer(make_model(dtype=torch.float64), grad_accum_steps=parts)
        trainer.scheduler = schedules.constant(trainer.optimizer, 1)
        losses.append(trainer.train_step(batch))
    expected = torch.nn.functional.cross_entropy(
        make_model(dtype=torch.float64)(batch[0]), batch[1]
    )
    torch.testing.assert_close(losses[0], expected.detach(), rtol=0, atol=0)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)


def test_biases_and_norms_do_not_decay_unless_asked():
    for decay_all in (False, True):
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)
        )
        torch.nn.init.ones_(model[0].bias)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer = make_trainer(
            model,
            optimizer=functools.partial(torch.optim.SGD, lr=0.5, weight_decay=0.5),
            groups=[{"match": "*", "weight_decay": 0.5}] if decay_all else [],
        )
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        trainer.optimizer.step()
        for name, p in model.named_parameters():
            decays = decay_all or p.ndim > 1
            assert torch.equal(p, before[name] * 0.75 if decays else before[name]), name


def test_a_second_fit_trains_as_long_again():
    train_loader, _ = loaders()
    trainer = make_trainer(callbacks=[EMA(0.9), EarlyStopping(2)])
    trainer.fit(train_loader)
    first = weights(trainer)
    trainer.fit(train_loader)
    assert trainer.step == 24
    assert not torch.equal(weights(trainer)["0.weight"], first["0.weight"])
    assert trainer.optimizer.state[trainer.module[0].weight]["step"] == 48


@pytest.mark.parametrize(
    "scheduler",
    [
        functools.partial(schedules.cosine, warmup=3),
        functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=24),
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10),
        functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2),
    ],
)
def test_a_second_fit_has_the_rates_of_the_first(scheduler):
    """torch's schedules go on from the rate that is there, which is that of the first one's end."""
    trainer = make_trainer(scheduler=scheduler)
    rates = []
    for _ in range(2):
        trainer.fit(DeviceLoader(make_data(), "train", 8, shuffle=True))
        rates.append([trainer.lr, *trainer.scheduler.get_last_lr()])
    assert rates[0] == rates[1] and trainer.lr < 1e-2


def test_gradients_of_before_are_none_of_the_first_steps():
    model = make_model()
    model(torch.ones(2, 6)).sum().backward()
    assert_same(trained(model=model), trained())


def test_max_steps_is_the_length_instead_of_epochs():
    train_loader, _ = loaders()
    for max_steps, epochs in ((5, 3), (20, 1), (5, None)):
        trainer = make_trainer(max_steps=max_steps, epochs=epochs)
        trainer.fit(train_loader)
        assert trainer.step == trainer.total_steps == max_steps


def test_a_step_that_the_fp16_scaler_skips_changes_no_weight_and_advances_the_schedule():
    train_loader, _ = loaders()
    trainer = make_trainer(precision="fp16", max_steps=2)
    trainer.scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**60
    )  # its first gradients are infinite in float16
    before, seen = weights(trainer), []

    class Watch(Callback):
        def on_step_end(self, trainer):
            seen.append((trainer.step, trainer.scheduler.steps, trainer.scaler.get_scale()))

    trainer.callbacks = [Watch()]
    trainer.fit(train_loader)
    assert seen == [(1, 1, 2.0**59), (2, 2, 2.0**58)]
    assert_same(weights(trainer), before)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first is skipped
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_fp16_with_skipped_steps_is_the_loop_of_torch_s_own_documentation(kind):
    """The schedule advances with each step, as it does there; RMSprop has no fused form."""
    train_loader, _ = loaders()
    settings = {"lr": 0.05}
    decay = 0.01 if kind is torch.optim.AdamW else 0.0
    fused = {} if kind is torch.optim.RMSprop else {"fused": True}
    model = make_model()
    optimizer = kind(model.parameters(), **settings, **fused)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    norms = [[], []]  # of the steps that are not skipped
    for epoch in range(2):
        train_loader.seek(epoch)
        for inputs, targets in train_loader:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() == before:
                norms[epoch].append(norm.item())
            optimizer.zero_grad()
            scheduler.step()

    rows = []

    class Rows(Callback):
        def on_log(self, trainer, row):
            rows.append(row)

    factory = functools.partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=16
    )
    trainer = Trainer(
        make_model(),
        torch.nn.CrossEntropyLoss(),
        functools.partial(kind, **settings),
        factory,
        callbacks=[Rows()],
        epochs=2,
        device="cpu",
        precision="fp16",
        max_grad_norm=1.0,
        groups=[{"match": "*", "weight_decay": decay}],
    )
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    trainer.fit(train_loader)
    assert_same(weights(trainer), dict(model.state_dict()))
    assert 0 < len(norms[0]) < 6 and norms[1]
    means = [sum(taken) / len(taken) for taken in norms]
    assert [row["train/grad_norm"] for row in rows] == pytest.approx(means, rel=1e-6)


def test_a_state_with_the_number_of_skipped_steps_of_earlier_versions_is_loaded():
    trainer, other = (make_trainer(precision="fp16", max_grad_norm=1.0) for _ in range(2))
    trainer.fit(loaders()[0])
    skipped = {"total": torch.tensor(2.0), "samples": 24, "weight": 24.0}
    other.load_state_dict({**trainer.state_dict(), "skipped": skipped})
    assert_same(weights(other), weights(trainer))
    assert other.step == trainer.step


def test_fp16_steps_may_be_skipped_but_not_for_ever():
    trainer, rows = make_trainer(precision="fp16", max_grad_norm=1.0, log_every=4, epochs=9), []

    class Rows(NaNGuard):
        def on_log(self, trainer, row):
            super().on_log(trainer, row)
            rows.append(row)

    trainer.scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**26
    )  # some of its first gradients are infinite
    trainer.callbacks = [Rows()]
    trainer.fit(loaders()[0])
    done = int(trainer.optimizer.state[trainer.module[0].weight]["step"])
    assert trainer.step - done > 4 and trainer.step == 72
    norms = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    assert 0 < len(norms) < len(rows) and all(map(math.isfinite, norms))

    class Endless(torch.nn.Sequential):
        def forward(self, inputs):
            outputs = super().forward(inputs).float()
            return outputs.detach() + math.inf * (outputs - outputs.detach())

    trainer = make_trainer(Endless(*make_model()), precision="fp16", epochs=9, log_every=1000)
    with pytest.raises(
        TrainingError,
        match=r"still not finite at step 32, .* only 1.53e-05 .*\nType precision=bf16",
    ):
        trainer.fit(loaders()[0])


def test_the_norm_that_is_logged_is_the_mean_over_the_steps_of_its_window(monkeypatch):
    norms, rows = [], []

    class Watch(Callback):
        def on_log(self, trainer, row):
            rows.append(row.get("train/grad_norm"))

    def noting(parameters, most):
        norm = clip(parameters, most)
        norms.append(norm.item())
        return norm

    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noting)
    settings = {
        "loss": torch.nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW,
        "device": "cpu",
        "epochs": 1,
    }
    Trainer(make_model(), callbacks=[Watch()], max_grad_norm=0.5, log_every=3, **settings).fit(
        loaders()[0]
    )
    windows = [norms[0:3], norms[3:6], norms[6:8]]
    assert rows == pytest.approx([sum(window) / len(window) for window in windows], rel=1e-12)
    make_trainer(callbacks=[Watch()], epochs=1).fit(loaders()[0])
    assert rows[3:] == [None]  # no norm is computed where nothing is clipped


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_what_torch_does(precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    _, val_loader = loaders()
    trainer = make_trainer(precision=precision)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        expected = torch.cat([trainer.module(inputs) for inputs, _ in val_loader])
    outputs = trainer.predict(val_loader)
    assert expected.dtype == dtype
    assert outputs.dtype == torch.float32  # for whoever goes on with it, in numpy say
    assert torch.equal(outputs, expected.float())


# What cannot change a training


@pytest.mark.parametrize(
    "change",
    [{"log_every": 1}, {"eval_every": 3}, {"eval_every": 1, "log_every": 7}, {"val": False}],
)
def test_neither_logging_nor_validation_changes_a_weight(change):
    assert_same(
        trained(model=make_model(dropout=0.5), **change), trained(model=make_model(dropout=0.5))
    )


def test_global_generators_do_not_reach_a_training():
    torch.manual_seed(1)
    first = trained(model=make_model(dropout=0.5, seed=3))
    torch.manual_seed(2)
    assert_same(trained(model=make_model(dropout=0.5, seed=3)), first)
    assert not torch.equal(
        trained(model=make_model(dropout=0.5, seed=3), seed=1)["0.weight"], first["0.weight"]
    )


def test_what_is_drawn_after_a_training_is_what_would_have_been_without():
    """Or the models that are made in a loop, each after the training of the last, would all be the
    same one.
    """
    train_loader, val_loader = loaders()
    trainer = make_trainer(make_model(dropout=0.5))
    before = torch.get_rng_state()
    for use in (
        lambda: trainer.fit(train_loader, val_loader),
        lambda: trainer.evaluate(val_loader),
        lambda: trainer.predict(val_loader),
        lambda: lr_find(make_trainer(make_model(dropout=0.5)), train_loader, steps=20),
    ):
        use()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_training_is_resident_training(workers):
    streamed = trained(
        model=make_model(dropout=0.5),
        loader_options={"kind": functools.partial(HostLoader, workers=workers)},
    )
    assert_same(streamed, trained(model=make_model(dropout=0.5)))


def test_evaluation_leaves_everything_as_it_was():
    train_loader, val_loader = loaders()
    trainer = make_trainer(make_model(dropout=0.5), metrics={"acc": Accuracy()})
    trainer.fit(train_loader)
    before = copy.deepcopy(trainer.state_dict())
    trainer.module[1].eval()  # a frozen part stays frozen
    modes = [module.training for module in trainer.module.modules()]
    assert trainer.evaluate(val_loader) == trainer.evaluate(val_loader)
    assert_same(trainer.state_dict(), before)
    assert (
        [module.training for module in trainer.module.modules()]
        == modes
        == [True, True, False, True, True]
    )


# Evaluation and prediction


def test_evaluation_in_small_batches_is_that_of_one_full_batch():
    data = make_data(dtype=torch.float64)
    model = make_model(dtype=torch.float64)
    outputs = model(data.val.inputs)
    for batch_size in (1, 7, 25):
        results = make_trainer(model, metrics={"acc": Accuracy()}).evaluate(
            DeviceLoader(data, "val", batch_size), "test"
        )
        assert results["test/acc"] == (outputs.argmax(1) == data.val.targets).double().mean().item()
        assert math.isclose(
            results["test/loss"],
            torch.nn.functional.cross_entropy(outputs, data.val.targets).item(),
            rel_tol=1e-12,
        )


def test_predict_gives_the_outputs_in_order():
    data = make_data()
    trainer = make_trainer(make_model(dropout=0.5))
    trainer.module.eval()
    expected = trainer.module(data.val.inputs).detach()
    trainer.module.train()
    torch.testing.assert_close(trainer.predict(DeviceLoader(data, "val", 7)), expected)
    torch.testing.assert_close(trainer.predict(data.val.inputs.split(7)), expected)  # inputs alone
    assert trainer.module.training


Boxes = collections.namedtuple("Boxes", ["corners", "score"])


class Detector(torch.nn.Module):
    """Gives a nesting of tensors, some of them ragged: by batch, or by sample."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, inputs):
        scores = self.layer(inputs)
        counts = (4 * inputs[:, 0].sigmoid()).long().tolist()
        boxes = [
            Boxes(row.expand(count, 3), row[:1]) for row, count in zip(scores, counts, strict=True)
        ]
        tokens = scores.unsqueeze(1).expand(-1, len(inputs), 3)  # as if padded to the batch
        return {"scores": (scores, None), "boxes": boxes, "tokens": tokens.to(torch.bfloat16)}


@pytest.mark.parametrize("micro_batch", [None, "auto"])
def test_predict_gives_the_nesting_that_the_model_gives(micro_batch):
    data = make_data()
    model = Detector().eval()
    batches = data.val.inputs.split(7)  # the last one has 4 samples
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
    trainer = make_trainer(model, loss=None, micro_batch=micro_batch)
    outputs = trainer.predict(batches)
    assert_same(outputs["scores"], (torch.cat([one["scores"][0] for one in expected]), None))
    assert_same(outputs["boxes"], [box for one in expected for box in one["boxes"]])
    assert_same(outputs["tokens"], [row.float() for one in expected for row in one["tokens"]])

    streamed = []
    for count, one in enumerate(trainer.predictions(batches), 1):
        assert torch.is_grad_enabled() and not trainer.module.training
        streamed += samples_of(one)
        if count == 3:
            break
    assert len(streamed) == 21 and torch.is_grad_enabled()
    for i, sample in enumerate(streamed):
        assert_same(sample["scores"], (outputs["scores"][0][i], None))
        assert_same(sample["boxes"], outputs["boxes"][i])
        assert_same(sample["tokens"], outputs["tokens"][i])


def test_no_samples_and_no_optimizer_are_explained():
    with pytest.raises(UserError, match="The val loader is empty"):
        make_trainer().evaluate([])
    with pytest.raises(UserError, match="the loader is empty"):
        make_trainer().predict([])
    with pytest.raises(UserError, match="optimizer"):
        make_trainer(optimizer=None).fit(loaders()[0])
    with pytest.raises(UserError, match="training loader is empty"):
        make_trainer().fit([])


def test_a_fit_that_cannot_begin_keeps_no_data(tmp_path):
    trainer = make_trainer()
    with pytest.raises(UserError, match="nothing.ckpt"):
        trainer.fit(*loaders(), resume=tmp_path / "nothing.ckpt")
    assert trainer.train_loader is None and trainer.val_loader is None


def test_a_metric_that_counts_is_a_number_like_all_others():
    """Those who show numbers look for floats."""

    class Wrong(Accuracy):
        def value(self, sums):
            hits, count = sums
            return count - hits

    found = make_trainer(metrics={"wrong": Wrong(), "acc": Accuracy()}).evaluate(loaders()[1])
    assert isinstance(found["val/wrong"], float) and found["val/wrong"] == round(
        25 * (1 - found["val/acc"])
    )


# Resume


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)]
)
def test_a_channels_last_model_resumes_exactly(tmp_path, optimizer):
    """A file holds contiguous tensors, and a fused optimizer reads the memory of its means as it
    lies.
    """

    def images(split):
        generator = torch.Generator().manual_seed(len(split))
        inputs = torch.randint(0, 256, (40, 3, 8, 8), generator=generator, dtype=torch.uint8)
        return TensorSplit(inputs, torch.randint(0, 3, (40,), generator=generator))

    data = Data("images", images("train"), images("val"), None, (3, 8, 8), 3)

    def trainer():
        torch.manual_seed(0)
        model = CNN((3, 8, 8), 3, channels=[8, 16])
        callbacks = [EMA(0.9), Checkpoint(tmp_path, every=3, keep=9)]
        made = make_trainer(
            model, optimizer=functools.partial(optimizer, lr=1e-2), callbacks=callbacks, epochs=2
        )
        assert model.features[0].weight.is_contiguous(memory_format=torch.channels_last)
        return made

    whole = trainer()
    whole.fit(DeviceLoader(data, "train", 8, shuffle=True))
    whole = copy.deepcopy(whole.state_dict())
    continued = trainer()
    continued.fit(
        DeviceLoader(data, "train", 8, shuffle=True), resume=tmp_path / "step_00000003.ckpt"
    )
    assert_same(continued.state_dict(), whole)


@pytest.mark.parametrize("more", [2, -2])
def test_a_wrong_length_is_a_warning_and_the_training_has_its_steps(more, caplog):
    class Wrong(list):
        def __len__(self):
            return super().__len__() + more

    batches = list(loaders()[0])
    wrong = make_trainer(scheduler=schedules.cosine, epochs=3)
    wrong.fit(Wrong(batches))
    assert f"len() is {8 + more}, but it yielded 8 batches" in caplog.text
    right = make_trainer(scheduler=schedules.cosine, epochs=None, max_steps=3 * (8 + more))
    right.fit([*batches, *batches, *batches, *batches])
    assert_same(wrong.module.state_dict(), right.module.state_dict())
    assert wrong.step == right.step == 3 * (8 + more)


@pytest.mark.parametrize("more", [2, -2])
def test_a_loader_with_seek_and_a_wrong_length_is_refused(more):
    class Wrong(list):
        def seek(self, epoch, position=0):
            assert position == 0

        def __len__(self):
            return super().__len__() + more

    batches = Wrong(loaders()[0])
    with pytest.raises(
        UserError, match=re.escape(f"len() is {8 + more}, but it yielded 8 batches")
    ):
        make_trainer().fit(batches)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer = make_trainer(callbacks=[Checkpoint(tmp_path)], max_steps=2)
    trainer.fit(loaders()[0])
    other = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Identity(), torch.nn.Linear(5, 3)
    )
    with pytest.raises(UserError, match="does not match this model: .* size mismatch for 0.weight"):
        make_trainer(other).fit(loaders()[0], resume=tmp_path / "step_00000002.ckpt")


def test_a_state_that_is_refused_without_a_word_is_refused_by_the_class_of_the_error(tmp_path):
    class Refuses(torch.optim.SGD):
        def load_state_dict(self, state):
            raise ValueError

    make = functools.partial(make_trainer, optimizer=functools.partial(Refuses, lr=0.1))
    make(callbacks=[Checkpoint(tmp_path)], max_steps=2).fit(loaders()[0])
    with pytest.raises(UserError, match=r"does not match this optimizer: ValueError$"):
        make().fit(loaders()[0], resume=tmp_path / "step_00000002.ckpt")


# The course of a fit


class Recorder(Callback):
    """Writes down every call."""

    def __init__(self):
        self.calls = []
        for hook in (
            "on_fit_start",
            "on_step_end",
            "on_epoch_end",
            "on_eval_start",
            "on_eval_end",
            "on_log",
            "on_fit_end",
        ):
            setattr(self, hook, functools.partial(self.record, hook))

    def record(self, hook, trainer, *row):
        self.calls.append(
            (
                hook.removeprefix("on_"),
                trainer.step,
                *(sorted(name for name in entry if "/" in name)[0] for entry in row),
            )
        )


def test_the_order_of_the_hooks():
    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder], max_steps=3, log_every=2)
    trainer.fit(*loaders(make_data(16)))
    assert recorder.calls == [
        ("fit_start", 0),
        ("step_end", 1),
        ("log", 2, "train/loss"), ("eval_start", 2), ("eval_end", 2), ("log", 2, "val/loss"),
        ("epoch_end", 2), ("step_end", 2),
        ("log", 3, "train/loss"), ("eval_start", 3), ("eval_end", 3), ("log", 3, "val/loss"),
        ("step_end", 3),  # the end of the training, and not of an epoch
        ("fit_end", 3),
    ]  # fmt: skip


def test_a_failure_ends_the_hooks_and_keeps_the_error():
    class Fails(Recorder):
        def record(self, hook, trainer, *row):
            super().record(hook, trainer, *row)
            if hook == "on_eval_start":
                raise ZeroDivisionError

    recorder = Fails()
    with pytest.raises(ZeroDivisionError):
        make_trainer(callbacks=[recorder]).fit(*loaders(make_data(8)))
    assert [call[0] for call in recorder.calls] == [
        "fit_start",
        "log",
        "eval_start",
        "eval_end",
        "fit_end",
    ]


def test_rows_hold_the_mean_over_their_window():
    rows, losses = [], []

    class Watch(Callback):
        def on_log(self, trainer, row):
            rows.append(row)

    trainer = make_trainer(callbacks=[Watch()], epochs=1, log_every=3)
    step = trainer.train_step

    def watched(batch):
        loss = step(batch)
        losses.append((loss.item(), len(batch[1])))
        return loss

    trainer.train_step = watched
    trainer.fit(loaders(make_data(60))[0])  # 7 batches of 8 and one of 4
    windows = [losses[0:3], losses[3:6], losses[6:8]]
    assert [row["step"] for row in rows] == [3, 6, 8]
    assert [row["train/samples"] for row in rows] == [24, 24, 12]
    for row, window in zip(rows, windows, strict=True):
        assert math.isclose(
            row["train/loss"],
            sum(loss * n for loss, n in window) / sum(n for _, n in window),
            rel_tol=1e-12,
        )


def test_a_step_reads_nothing_but_its_loss_and_norm():
    """On the CPU, the means of the window read both at once. test_waiting.py counts on a device."""

    class Syncs(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in (
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten.nonzero.default,
                torch.ops.aten.is_nonzero.default,
            )
            return func(*args, **(kwargs or {}))

    for steps in (1, 20):
        trainer = make_trainer(
            max_steps=steps,
            log_every=1000,
            max_grad_norm=1.0,
            grad_accum_steps=2,
            callbacks=[EMA(0.9)],
        )
        train_loader, _ = loaders(batch_size=3, data=make_data(60))
        with Syncs() as syncs:
            trainer.fit(train_loader)
        assert syncs.count == 2 * steps + 2  # the row at the end: the mean loss and norm


# Strategies, compilation, memory


def test_sparse_gradients_train_without_a_fused_optimizer():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 3, sparse=True))
    trainer = make_trainer(model, optimizer=functools.partial(torch.optim.SGD, lr=1.0), epochs=1)
    before = model[0].weight.detach().clone()
    trainer.fit([(torch.arange(8).view(4, 2), torch.tensor([0, 1, 2, 0]))])
    changed = (model[0].weight != before).any(1)
    assert changed[:8].all()
    assert not changed[8:].any()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.nn.CrossEntropyLoss(reduction="sum"), "reduction='sum'"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), "has parameters. Make it part"),
    ],
)
def test_a_loss_that_would_train_wrongly_is_refused(loss, message):
    with pytest.raises(UserError, match=message):
        make_trainer(loss=loss)


def test_dp_without_gpus_says_so_once_and_changes_nothing(caplog):
    assert_same(trained(strategy="dp"), trained())
    assert [record.getMessage() for record in caplog.records] == [
        "strategy=dp has no effect with fewer than two GPUs."
    ]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_replica_in_a_thread_computes_in_the_type_of_the_step(dtype):
    """A thread begins with autocast's default; torch hands over whether it is on, and no type."""
    module = torch.nn.Linear(6, 3)
    inputs = torch.randn(4, 6)
    with devices.autocast(torch.device("cpu"), dtype):
        expected = module(inputs)
        replicas = [parallel.autocasting(module, "cpu") for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            outputs = list(threads.map(lambda replica: replica(inputs), replicas))
    for output in outputs:
        assert_same(output, expected)
        assert output.dtype is (dtype or torch.float32) and output.requires_grad


def test_data_parallel_state_has_plain_names(tmp_path):
    """Without a GPU torch's own wrapper passes through: what is saved under it goes into a plain
    trainer.
    """
    wrapped = make_trainer(callbacks=[Checkpoint(tmp_path)], epochs=1)
    wrapped.model = torch.nn.DataParallel(wrapped.module)
    wrapped.fit(*loaders())
    other = make_trainer(epochs=1)
    other.load(tmp_path / "step_00000008.ckpt")
    assert_same(weights(other), weights(wrapped))
    assert list(weights(wrapped)) == ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize("strategy", ["ddp:0", "dp:x", "dp:0+1", "single:0", "fast"])
def test_a_strategy_that_there_is_not_is_refused(strategy):
    with pytest.raises(UserError, match=re.escape(f"strategy={strategy}")):
        make_trainer(strategy=strategy)


@pytest.mark.slow
def test_compile_keeps_names_and_numbers(tmp_path):
    trainer = make_trainer(compile=True, max_steps=4, callbacks=[Checkpoint(tmp_path)])
    trainer.fit(loaders(make_data(32))[0])
    eager = make_trainer(max_steps=4)
    eager.fit(loaders(make_data(32))[0])
    assert list(checkpoint.load(tmp_path / "step_00000004.ckpt")["model"]) == list(weights(eager))
    for name, tensor in weights(eager).items():
        torch.testing.assert_close(weights(trainer)[name], tensor, rtol=1e-4, atol=1e-6)


COMPILED = """
import functools, torch
from stoker import Trainer
from stoker.command.messages import message
optimizer = functools.partial(torch.optim.SGD, lr=0.1)
model, loss = torch.nn.Linear(6, 3), torch.nn.CrossEntropyLoss()
loader = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))]
try:
    Trainer(model, loss, optimizer, device="cpu", compile=True).fit(loader)
except Exception as error:
    print(message(error))
"""


@pytest.mark.slow
def test_compile_without_a_compiler_says_what_is_missing(tmp_path):
    """In a process of its own, because torch keeps the compiler that it has found."""
    environment = {key: value for key, value in os.environ.items() if key != "CXX"}
    environment |= {"PATH": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment
    )
    assert "\ncompile=true needs a compiler, but none is installed. On the CPU, " in done.stdout


def test_memory_report_of_a_sparse_buffer():
    model = torch.nn.Linear(6, 3)
    model.register_buffer("graph", torch.eye(5).to_sparse(), persistent=False)
    report = make_trainer(model).memory_report()
    assert report["buffers"] * 2**20 == 4 * 25


def test_memory_report_counts_every_element():
    train_loader, val_loader = loaders()
    trainer = make_trainer(
        torch.nn.Sequential(
            torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3)
        )
    )
    trainer.fit(train_loader, val_loader)
    report = {name: value * 2**20 for name, value in trainer.memory_report().items()}
    parameters = 6 * 10 + 10 + 10 + 10 + 10 * 3 + 3
    assert report["parameters"] == report["gradients"] == 4 * parameters
    assert (
        report["optimizer"] == 2 * 4 * parameters + 6 * 4
    )  # two means, and a step count for each of the six tensors
    assert report["buffers"] == 4 * (10 + 10) + 8
    assert report["data"] == (60 + 25) * (6 * 4 + 8)  # inputs in fp32, targets in int64
    assert report["peak"] > report["data"]


def test_what_a_forward_pass_saves_is_counted():
    """As counted by hand."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.ReLU(), torch.nn.Dropout(0.5)
    )
    saved = Saved(model)
    with saved.counted():
        outputs = model(torch.randn(20, 6))
    # The inputs of Linear and BatchNorm, its mean and deviation, ReLU's outputs, Dropout's mask.
    floats = 20 * 6 + 20 * 10 + 2 * 10 + 20 * 10 + 20 * 10
    assert saved.most == 4 * floats and outputs.requires_grad


def test_fit_and_close_give_memory_back():
    train_loader, val_loader = loaders(make_data(features=11))
    with make_trainer(make_model(features=11)) as trainer:
        trainer.fit(train_loader, val_loader)
        assert all(p.grad is None for p in trainer.module.parameters())
    del train_loader, val_loader
    gc.collect()
    assert trainer.module is trainer.model is trainer.optimizer is None
    # The first layer, its gradient, its means: nothing else in this file has this shape.
    assert not [
        tensor
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.shape == (16, 11)
    ]


def test_running_out_of_memory_is_explained():
    class Hungry(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def forward(self, inputs):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TrainingError, match="batch of 8"):
        make_trainer(Hungry()).fit(loaders()[0])


@pytest.mark.parametrize(
    "setting",
    [
        {"epochs": 0},
        {"epochs": -1},
        {"epochs": 1.5},
        {"epochs": None},
        {"max_steps": 0},
        {"grad_accum_steps": 0},
        {"max_grad_norm": 0},
    ]
    + [{"log_every": 0}, {"eval_every": 0}, {"seed": -1}, {"precision": "fp8"}, {"device": "tpu"}],
)
def test_impossible_settings_are_named(setting):
    (key,) = setting
    with pytest.raises(UserError, match=f"{key}="):
        make_trainer(**setting)


class Viewing(torch.nn.Module):
    """As many models are written: a view of the image in front of the last layer."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4 * 8 * 8, 3)

    def forward(self, inputs):
        hidden = self.norm(self.convolution(inputs))
        return self.head(hidden.view(len(inputs), -1))


class ViewingInAMethod(Viewing):
    def flat(self, hidden):
        return hidden.view(len(hidden), -1)

    def forward(self, inputs):
        return self.head(self.flat(self.norm(self.convolution(inputs))))


class Function(torch.nn.Module):
    """As in PyTorch's own tutorial on torch.nn."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


def viewing_in_a_lambda():
    model = Viewing()
    flat = Function(lambda hidden: hidden.view(len(hidden), -1))
    return torch.nn.Sequential(model.convolution, model.norm, flat, model.head)


@pytest.mark.parametrize("kind", [Viewing, ViewingInAMethod, viewing_in_a_lambda])
def test_a_model_that_views_images_trains_as_it_would_without_channels_last(kind):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(4, 3, 8, 8, generator=generator)
    batches = [(inputs, torch.arange(4) % 3)]
    states = []
    for channels_last in ("auto", False):
        torch.manual_seed(0)
        trainer = make_trainer(kind(), epochs=3, channels_last=channels_last)
        assert trainer.predict([inputs]).shape == (4, 3)
        trainer.fit(batches, batches)
        states.append(trainer.module.state_dict())
    assert_same(*states)
    advice = r"Use .flatten\(1\) or .reshape\(\) instead, or type channels_last=false"
    with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
        make_trainer(kind(), channels_last=True).fit(batches)
    assert re.search(advice, explanation_of(caught.value))
    with pytest.raises(RuntimeError, match="view size is not compatible") as caught:
        make_trainer(kind(), channels_last=True).predict([inputs])
    assert re.search(advice, explanation_of(caught.value))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_checkpoint_of_another_scheduler_is_refused(tmp_path, order):
    kinds = [schedules.cosine, functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)]
    written, read = (kinds[i] for i in order)
    make_trainer(scheduler=written, callbacks=[Checkpoint(tmp_path)], epochs=1).fit(*loaders())
    path = checkpoint.newest(tmp_path)[0]
    with pytest.raises(
        UserError, match=r"scheduler.step(s|_size) is None, not \d.\nUse the .* scheduler "
    ):
        make_trainer(scheduler=read, epochs=2).fit(*loaders(), resume=path)


@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        (
            functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2),
            "scheduler.total_steps is 8, not 16",
        ),
        (
            lambda optimizer, total_steps: torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, total_steps
            ),
            "scheduler.T_max is 8, not 16",
        ),
    ],
)
def test_a_schedule_of_torchs_cannot_be_made_longer(tmp_path, scheduler, key):
    """It would keep the length it began with: one raises after it, the other one comes back up."""
    make_trainer(scheduler=scheduler, callbacks=[Checkpoint(tmp_path)], epochs=1).fit(*loaders())
    path = checkpoint.newest(tmp_path)[0]
    with pytest.raises(UserError, match=key):
        make_trainer(scheduler=scheduler, epochs=2).fit(*loaders(), resume=path)
    make_trainer(scheduler=scheduler, epochs=1).fit(*loaders(), resume=path)
