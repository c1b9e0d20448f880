"""The examples: short, right, and with a command that does what their first lines say."""

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same, make_data
from PIL import Image
from test_docs import commands
from torch.nn.functional import cross_entropy

from examples.autoencoder import Autoencoder, AutoencoderTrainer
from examples.distillation import Distiller
from examples.finetune import FineTuned
from examples.gan import GAN, GANTrainer
from examples.lora import merged, with_adapters
from examples.mixup import MixupTrainer
from examples.own_callback import Plateau
from examples.own_loss import FocalLoss
from examples.own_metric import BalancedAccuracy
from examples.own_trainer import RDrop
from examples.regression import rows
from examples.rnn import RowReader
from stoker import Trainer
from stoker.data import datasets
from stoker.data.loader import make_loaders
from stoker.models.linear import Linear
from stoker.models.mlp import MLP
from stoker.trainer import checkpoint
from stoker.trainer.callbacks import Callback, Checkpoint, Freeze
from stoker.trainer.errors import UserError
from stoker.trainer.metrics import MSE

FILES = sorted(Path(__file__).parents[1].glob("examples/[!_]*.py"))
COMMANDS = [
    (file.stem, command) for file in FILES for command in commands(file.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_example_is_short_and_shows_its_command(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (60 if file.name.startswith("own_") else 80)
    assert commands(text)


def expected(file, number):
    """(name, value) of "Expect test/acc 0.978 and 0.722" for the command of this number; None where
    nothing is said.
    """
    found = re.search(
        r"^Expect (test/\w+) ([\d.]+)(?: and ([\d.]+))?",
        file.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return found and (found[1], float(found[3] if number and found[3] else found[2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem != "finetune"], ids=lambda file: file.name
)
def test_its_commands_come_to_what_it_says(file, forks, tmp_path):
    for number, command in enumerate(commands(file.read_text(encoding="utf-8"))):
        if command[0] == "-m":
            done = forks.run(tmp_path, *command[2:], script=file)
            assert done.code in (0, 99), (
                done.err
            )  # 99: it came to its end, and left the exit to the fork
            continue
        own = [word for word in command if word.startswith("run_dir=")] or [f"run_dir=run{number}"]
        done = forks.run(tmp_path, *command[1:], *own, "report=false")
        assert done.code == 0, done.err
        if own == [f"run_dir=run{number}"]:
            name, value = expected(file, number)
            result = json.loads(
                (tmp_path / f"run{number}" / "result.json").read_text(encoding="utf-8")
            )
            if file.stem == "gan":  # of which no two machines have the same
                assert result[name] < 2 * value and result["best"]["step"] > 0.7 * result["steps"]
                continue
            tolerance = 0.035 if name.endswith(("acc", "balanced")) else 0.1 * value
            assert abs(result[name] - value) <= tolerance
            card = (tmp_path / f"run{number}" / "model.md").read_text(encoding="utf-8")
            assert ("Outputs: as the model returns them" in card) == (
                file.stem in ("autoencoder", "multilabel")
            )
            if file.stem in ("multilabel", "own_data", "own_metric"):  # as the run's last line says
                again = forks.run(
                    tmp_path, "task=evaluate", f"run=run{number}", "trusted=[examples]"
                )
                assert (
                    again.code == 0
                    and f"{name.removeprefix('test/')} {result[name]!r}" in again.out
                ), again.err


def test_outputs_that_nobody_has_looked_at_are_not_taken_for_scores(forks, tmp_path):
    """Without a test split, nor the look at the validation split that a report wants."""
    [command] = commands(
        next(file for file in FILES if file.stem == "autoencoder").read_text(encoding="utf-8")
    )
    for own, model in ((command[1:], "autoencoder"), (["model=linear"], "linear")):
        job = [*own, "dataset.test_fraction=0", "max_steps=2", f"run_dir={model}", "report=false"]
        assert forks.run(tmp_path, *job).code == 0
        card = (tmp_path / model / "model.md").read_text(encoding="utf-8")
        assert ("Outputs: as the model returns them" in card) == (model == "autoencoder")


def fitted(kind, model, **settings):
    (train_loader, val_loader, test_loader), _ = make_loaders(datasets.digits(), batch_size=64)
    torch.manual_seed(0)
    defaults = {"optimizer": functools.partial(torch.optim.AdamW, lr=3e-3), "device": "cpu"}
    trainer = kind(model(), **(defaults | settings))
    trainer.fit(train_loader, val_loader)
    return trainer, test_loader


def test_the_autoencoder_learns_its_inputs_and_not_their_labels():
    build = functools.partial(Autoencoder, (1, 8, 8))
    trainer, test_loader = fitted(
        AutoencoderTrainer, build, loss=torch.nn.MSELoss(), metrics={"mse": MSE()}, epochs=4
    )
    images = torch.cat([inputs for inputs, _ in test_loader])
    results = trainer.evaluate(test_loader, "test")
    rebuilt = trainer.predict(test_loader)
    torch.testing.assert_close(
        results["test/loss"],
        torch.nn.functional.mse_loss(rebuilt, images).item(),
        rtol=1e-5,
        atol=0,
    )
    torch.testing.assert_close(results["test/mse"], results["test/loss"], rtol=1e-5, atol=0)
    assert results["test/loss"] < 0.3 * images.var().item()  # far better than the mean image


def test_the_gan_trains_both_its_models_and_resumes_exactly(tmp_path):
    build = functools.partial(GAN, (1, 8, 8))
    whole, _ = fitted(
        GANTrainer, build, max_steps=30, callbacks=[Checkpoint(tmp_path, every=10, keep=9)]
    )
    state = checkpoint.load(tmp_path / "step_00000010.ckpt")
    assert {int(moment["step"]) for moment in state["optimizer"]["state"].values()} == {10}

    (train_loader, val_loader, _), _ = make_loaders(datasets.digits(), batch_size=64)
    torch.manual_seed(1)  # other weights, which the checkpoint has to replace
    continued = GANTrainer(
        build(), optimizer=functools.partial(torch.optim.AdamW, lr=3e-3), device="cpu", max_steps=30
    )
    continued.fit(train_loader, val_loader, resume=tmp_path / "step_00000010.ckpt")
    for name in ("model", "optimizer", "scheduler"):
        assert_same(continued.state_dict()[name], whole.state_dict()[name], name)


def test_adapters_resume_from_themselves_alone_and_merge_into_the_layers(tmp_path):
    def make():
        torch.manual_seed(0)
        return with_adapters(MLP((1, 8, 8), 10, hidden=(16,)), rank=2, alpha=4.0)

    saver = Checkpoint(tmp_path, every=10, keep=9)
    settings = {"loss": torch.nn.CrossEntropyLoss(), "max_steps": 30}
    whole, test_loader = fitted(Trainer, make, callbacks=[saver], **settings)
    state = checkpoint.load(tmp_path / "step_00000010.ckpt")
    assert {name.rpartition(".")[2] for name in state["model"]} == {"down", "up"}

    (train_loader, val_loader, _), _ = make_loaders(datasets.digits(), batch_size=64)
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    continued = Trainer(make(), optimizer=optimizer, device="cpu", **settings)
    continued.fit(train_loader, val_loader, resume=state)
    for name in ("model", "optimizer", "scheduler"):
        assert_same(continued.state_dict()[name], whole.state_dict()[name], name)

    before = whole.predict(test_loader)
    merged(whole.module)
    assert not list(whole.module.buffers())
    torch.testing.assert_close(whole.predict(test_loader), before, rtol=1e-4, atol=1e-5)


def test_a_rate_that_follows_the_validation_is_that_of_a_run_that_was_stopped(tmp_path):
    """At such a rate the validation gets worse soon, so the rate falls more than once."""

    def trainer(*callbacks):
        torch.manual_seed(0)
        optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
        own = {
            "loss": torch.nn.CrossEntropyLoss(),
            "optimizer": optimizer,
            "epochs": 12,
            "device": "cpu",
        }
        return Trainer(
            MLP((6,), 3, hidden=[32]), callbacks=[Plateau(patience=2), *callbacks], **own
        )

    (train, val, _), _ = make_loaders(make_data(), batch_size=20)
    whole = trainer(Checkpoint(tmp_path, keep=99))
    whole.fit(train, val)
    rates = whole.scheduler.get_last_lr()
    assert rates[0] <= 0.1 / 4
    assert checkpoint.load(tmp_path / "step_00000015.ckpt")["callbacks"]["Plateau"]["waited"] == 1
    continued = trainer(Checkpoint(tmp_path / "more"))
    continued.fit(train, val, resume=tmp_path / "step_00000015.ckpt")
    assert continued.scheduler.get_last_lr() == rates
    assert_same(continued.module.state_dict(), whole.module.state_dict())


def test_a_rate_that_follows_the_validation_wants_a_schedule_that_lets_it():
    (train, val, _), _ = make_loaders(make_data(), batch_size=20)
    own = {"loss": torch.nn.CrossEntropyLoss(), "optimizer": torch.optim.AdamW, "device": "cpu"}
    torchs = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    with pytest.raises(
        UserError, match="StepLR sets the learning rates itself. Type scheduler=constant"
    ):
        Trainer(MLP((6,), 3), scheduler=torchs, callbacks=[Plateau()], **own).fit(train, val)


def test_the_focal_loss_is_its_formula_and_without_gamma_the_cross_entropy():
    outputs, targets = torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 4
    p = outputs.softmax(1)[torch.arange(50), targets]
    torch.testing.assert_close(FocalLoss(0)(outputs, targets), cross_entropy(outputs, targets))
    torch.testing.assert_close(FocalLoss(2)(outputs, targets), -((1 - p) ** 2 * p.log()).mean())


def test_the_balanced_accuracy_is_the_mean_recall_of_the_classes_that_are_there():
    outputs, targets = torch.randn(40, 5), torch.randint(0, 4, (40,))  # the class 4 is not there
    metric = BalancedAccuracy(5)
    for part in (slice(0, 7), slice(7, 40)):
        metric.update(outputs[part], targets[part])
    recalls = [(outputs.argmax(1)[targets == c] == c).double().mean() for c in range(4)]
    torch.testing.assert_close(
        metric.compute().double(), torch.stack(recalls).mean(), atol=1e-7, rtol=0
    )


def test_two_passes_without_dropout_agree_and_those_with_it_do_not():
    build, loss = functools.partial(MLP, (1, 8, 8), 10, hidden=[32]), torch.nn.CrossEntropyLoss()
    plain, _ = fitted(Trainer, build, loss=loss, max_steps=10)
    same, _ = fitted(RDrop, build, loss=loss, max_steps=10)
    for name, weight in plain.module.state_dict().items():
        torch.testing.assert_close(same.module.state_dict()[name], weight, atol=1e-5, rtol=0)
    trainer = RDrop(MLP((6,), 3, dropout=0.5), loss=loss, alpha=2.0, device="cpu")
    batch = torch.randn(20, 6), torch.arange(20) % 3
    torch.manual_seed(3)
    total, _ = trainer.compute_loss(batch)
    torch.manual_seed(3)
    p, q = trainer.model(batch[0].repeat(2, 1)).chunk(2)
    wanted = (loss(p, batch[1]) + loss(q, batch[1])) / 2
    logs = p.log_softmax(1), q.log_softmax(1)
    wanted += (
        ((logs[0].exp() - logs[1].exp()) * (logs[0] - logs[1])).sum(1).mean()
    )  # alpha / 2 times both directions
    torch.testing.assert_close(total, wanted)
    trainer.model.eval()
    torch.testing.assert_close(
        trainer.compute_loss(batch)[0], loss(trainer.model(batch[0]), batch[1])
    )


def test_a_student_learns_from_the_teachers_scores_and_is_tested_without_a_teacher(monkeypatch):
    teacher, loss, given = Linear((6,), 3), torch.nn.CrossEntropyLoss(), []
    monkeypatch.setattr(
        "stoker.load",
        lambda *where: given.append(where) or SimpleNamespace(module=teacher),
        raising=False,
    )
    (train, val, _), _ = make_loaders(make_data(), batch_size=60)
    settings = {"loss": loss, "device": "cpu", "share": 0.25, "temperature": 3.0}
    student = Distiller(
        MLP((6,), 3, hidden=[]), teacher="runs/teacher", optimizer=torch.optim.SGD, **settings
    )
    assert student.fit(train, val) is student.history
    assert given == [("runs/teacher", torch.device("cpu"))]
    batch = inputs, targets = torch.randn(20, 6), torch.arange(20) % 3
    student.model.train()
    total, outputs = student.compute_loss(batch)
    p, q = (teacher(inputs) / 3).softmax(1), (outputs / 3).softmax(1)
    wanted = 0.25 * 9 * (p * (p / q).log()).sum(1).mean() + 0.75 * loss(outputs, targets)
    torch.testing.assert_close(total, wanted)
    student.model.eval()
    student.teacher = None
    torch.testing.assert_close(student.compute_loss(batch)[0], loss(student.model(inputs), targets))


def test_mixup_is_the_loss_of_both_labels_by_their_shares():
    loss, shares = torch.nn.CrossEntropyLoss(), []
    trainer = MixupTrainer(Linear((6,), 3), mixup=0.5, loss=loss, device="cpu")
    images, labels = torch.randn(20, 6), torch.arange(20) % 3
    for seed in range(3):
        torch.manual_seed(seed)
        mixed, outputs = trainer.compute_loss((images, labels))
        # Without a bias the outputs of a linear model are mixed as its inputs are.
        with torch.no_grad():
            own, other = trainer.model(images), trainer.model(images.roll(1, 0))
        a = ((outputs - other) * (own - other)).sum() / (own - other).square().sum()
        torch.testing.assert_close(
            mixed, a * loss(outputs, labels) + (1 - a) * loss(outputs, labels.roll(1, 0))
        )
        shares.append(a.item())
    assert len({round(a, 4) for a in shares}) == 3
    assert 0 <= min(shares) <= max(shares) <= 1


def test_the_row_reader_is_torchs_gru_and_follows_its_inputs_to_another_device():
    model, images = (
        RowReader((2, 5, 3), 4, width=8).double(),
        torch.randn(6, 2, 5, 3, dtype=torch.float64),
    )
    gru = torch.nn.GRU(6, 8, batch_first=True).double()
    gru.load_state_dict({f"{name}_l0": weight for name, weight in model.cell.state_dict().items()})
    _, last = gru(images.transpose(1, 2).reshape(6, 5, 6))
    torch.testing.assert_close(model(images), model.head(last[0]))
    assert model.to("meta")(images.to("meta")).device.type == "meta"


def test_the_table_of_the_regression_has_the_noise_that_it_says():
    clean, noisy = ([float(row[-1]) for row in rows(noise=noise)] for noise in (0, 1))
    errors = torch.tensor(noisy) - torch.tensor(clean)
    assert abs(errors.std().item() - 1) < 0.05
    assert abs(errors.mean().item()) < 0.1


def tiny_resnet(num_classes=3):
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=num_classes)


def test_fine_tuning_leaves_the_body_alone_for_an_epoch_and_then_trains_it_slowly():
    seen = []

    class Watch(Callback):
        def on_step_end(self, trainer):
            seen.append(
                {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}
            )

    fitted(
        Trainer,
        lambda: FineTuned(tiny_resnet(), 10),
        loss=torch.nn.CrossEntropyLoss(),
        callbacks=[Freeze("body.*", 20), Watch()],
        max_steps=22,
        groups=[{"match": "body.*", "lr": 3e-5}],
    )
    first, at_thaw, last = seen[0], seen[19], seen[-1]
    body, head = ([name for name in first if name.startswith(part)] for part in ("body", "head"))
    assert all(
        torch.equal(first[name], at_thaw[name]) for name in body
    )  # BatchNorm's statistics included
    assert not any(torch.equal(first[name], at_thaw[name]) for name in head)
    assert not any(torch.equal(last[name], at_thaw[name]) for name in (*body, *head))
    # AdamW moves a weight by its rate in its first step: 0.01 of that of the head.
    moved = (seen[20]["body.conv1.weight"] - at_thaw["body.conv1.weight"]).abs()
    torch.testing.assert_close(moved.median(), torch.tensor(3e-5), rtol=0.05, atol=0)


def test_the_command_for_fine_tuning_takes_a_folder_of_images(forks, tmp_path):
    """As it is typed, but for the weights, which would be fetched, the sizes of the images and of
    the body, and the length.
    """
    for i in range(30):
        folder = tmp_path / "images" / ("bright" if i % 2 else "dark")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (200 * (i % 2) + i,) * 3).save(folder / f"{i}.png")
    [command] = commands((FILES[0].parent / "finetune.py").read_text(encoding="utf-8"))
    other = {"dataset.root=DIR": "dataset.root=images", "dataset.size=224": "dataset.size=32"}
    other |= {"+model.body.weights=DEFAULT": "+model.body.weights=null", "epochs=5": "epochs=2"}
    body = "+model.body._target_=torchvision.models."
    other[f"{body}resnet18"] = f"{body}shufflenet_v2_x0_5"
    other["callbacks.freeze.thaw_at=100"] = "callbacks.freeze.thaw_at=3"  # after the first epoch
    assert set(other) < set(command)
    done = forks.run(
        tmp_path, *[other.get(word, word) for word in command[1:]], "batch_size=10", "report=false"
    )
    assert done.code == 0, done.err
    assert "epoch 2/2" in done.out
