"""Beginning with the weights of a checkpoint, a run directory or a safetensors file."""

import os
import shutil

import hydra
import pytest
import torch
from conftest import assert_same, make_data, make_model, make_trainer
from forks import PROGRAM
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict
from safetensors.torch import load_file, save_file

import stoker
from stoker import configs
from stoker.command import check, trust
from stoker.data.loader import DeviceLoader
from stoker.models.mlp import MLP
from stoker.runs.weights import init_from
from stoker.tasks.parts import building
from stoker.trainer.callbacks import EMA, Checkpoint
from stoker.trainer.errors import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A Trainer with an EMA after its fit, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    callbacks = [EMA(0.9), Checkpoint(folder, keep=9)]
    trainer = make_trainer(callbacks=callbacks)
    data = make_data()
    trainer.fit(DeviceLoader(data, "train", 8, shuffle=True), DeviceLoader(data, "val", 8))
    return trainer, folder


def evaluated(trainer):
    with trainer.evaluating():
        return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def test_the_weights_are_those_of_the_file_tensor_for_tensor(trained, tmp_path):
    trainer, folder = trained
    expected = evaluated(trainer)
    assert not torch.equal(expected["0.weight"], trainer.module[0].weight)
    save_file(expected, tmp_path / "weights.safetensors")
    sources = [folder / f"step_{24:08d}.ckpt", str(tmp_path / "weights.safetensors")]
    for source in sources:
        model = make_model(seed=3)
        report = stoker.init_from(model, source)
        assert_same(dict(model.state_dict()), expected)
        assert str(report).startswith(f"loaded 4 of 4 tensors from {source}")
        assert ("averaged by EMA" in str(report)) == (source == sources[0])
        assert not make_trainer(model).optimizer.state


def test_of_a_folder_of_checkpoints_it_is_the_best(trained):
    _, folder = trained
    best = make_trainer(callbacks=[EMA(0.9)])
    best.load(folder)
    model = make_model(seed=3)
    init_from(model, folder)
    assert_same(dict(model.state_dict()), evaluated(best))


def test_another_number_of_classes_loads_the_body_alone_and_says_so(trained):
    trainer, folder = trained
    model = make_model(classes=5, seed=3)
    head = model[3].weight.clone()
    report = init_from(model, folder / f"step_{24:08d}.ckpt")
    assert torch.equal(model[0].weight, evaluated(trainer)["0.weight"])
    assert torch.equal(model[3].weight, head)
    assert str(report).splitlines()[1:] == [
        "not loaded (different shape): 3.weight (3, 16) for (5, 16), 3.bias (3,) for (5,)"
    ]
    assert str(report).startswith("loaded 2 of 4 tensors")


def test_what_is_missing_and_what_is_not_used_is_named(tmp_path):
    file = tmp_path / "part.safetensors"
    save_file(
        {"0.weight": torch.ones(16, 6), "0.bias": torch.ones(16).half(), "x.y": torch.ones(2)}, file
    )
    model = torch.nn.Sequential(torch.nn.LazyLinear(16), torch.nn.BatchNorm1d(16))
    report = init_from(model, file)
    assert torch.equal(model[0].weight, torch.ones(16, 6)) and model[0].bias.dtype == torch.float32
    assert report.loaded == ["0.weight", "0.bias"] and report.unused == ["x.y"]
    assert str(report).splitlines()[1:] == [
        "not loaded (not in the file): 1.weight, 1.bias, 1.running_mean, ...",
        "not loaded (not in the model): x.y",
    ]


def test_files_that_fit_nothing_or_are_none_are_explained(trained, tmp_path):
    torch.save(make_model().state_dict(), tmp_path / "model.pt")
    (tmp_path / "text.txt").write_text("a text that is long enough to be a header, and is none")
    save_file({"1.num_batches_tracked": torch.tensor(3)}, tmp_path / "count.safetensors")
    (tmp_path / "empty").mkdir()
    whole = (trained[1] / f"step_{24:08d}.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[:-7])
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    (tmp_path / "flipped.ckpt").write_bytes(flipped)
    messages = {
        "model.pt": "not a readable checkpoint: .*torch.load",
        "text.txt": "not a readable checkpoint",
        "cut.ckpt": "not a readable checkpoint",
        "flipped.ckpt": "damaged",
        "empty": "no checkpoint found",
        "missing": "no checkpoint found",
        "count.safetensors": "none of its 1 tensors fits the model",
    }
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, message in messages.items():
        with pytest.raises(UserError, match=message) as raised:
            init_from(model, tmp_path / name)
        text = str(raised.value)
        assert text.startswith("init_from=") and len(text.splitlines()) <= 3, text
    assert_same(dict(model.state_dict()), before)


@pytest.fixture
def built():
    """A function from overrides to the weights that a run begins with, and the lines that are
    printed.
    """

    def weights(*overrides, resumes=False):
        options = ["dataset=synthetic", "device=cpu", "model.hidden=[16]", "run_dir=x", *overrides]
        cfg = hydra.compose("train", options, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
            cfg.dataset.n = 200
        check.check_config(cfg)
        with building(cfg, resumes=resumes) as parts:
            assert not parts.trainer.optimizer.state
            return {
                name: tensor.clone() for name, tensor in parts.trainer.module.state_dict().items()
            }

    with (
        hydra.initialize_config_dir(os.path.dirname(configs.__file__)),
        hydra.utils.execution_whitelist(trust.patterns(trust.TRUSTED, [])),
    ):
        yield weights
    HydraConfig.instance().cfg = None


def test_a_run_begins_with_them_unless_it_resumes(built, tmp_path, capsys):
    torch.manual_seed(3)
    plain = built()
    source = tmp_path / "source.safetensors"
    shape = tuple(plain[next(iter(plain))].shape[1:])
    model = MLP(shape, 7, hidden=[16])
    save_file(dict(model.state_dict()), source)
    expected = dict(model.state_dict())
    begun = built(f"init_from={source}")
    body, head = list(expected)[:2], list(expected)[2:]
    for name in body:
        assert torch.equal(begun[name], expected[name]) and not torch.equal(
            begun[name], plain[name]
        )
    for name in head:
        assert torch.equal(begun[name], plain[name])
    out = capsys.readouterr().out
    assert (
        f"init     loaded 2 of 4 tensors from {source}\n         not loaded (different shape)"
        in out
    )
    assert_same(built(f"init_from={source}", resumes=True), plain)
    assert "init " not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_begins_with_a_run_and_resumes_without_it(forks, tmp_path):
    common = ["model.hidden=[16]", "device=cpu", "report=false"]
    first = forks.run(tmp_path, *common, "epochs=1", "ema=0.9", "run_dir=first")
    assert first.code == 0, first.err
    second = [*common, "epochs=2", "init_from=first", "checkpoint.every=1"]
    tested = load_file(tmp_path / "first/model.safetensors")
    whole = forks.run(tmp_path, *second, "run_dir=whole")
    assert "6 of 6" in whole.out or "4 of 4" in whole.out, whole.out + whole.err
    began = forks.run(tmp_path, *second, "run_dir=cut", "max_minutes=1e-9")
    assert began.code == 0, began.err
    assert began.out.count(f"\nresume   {PROGRAM} ") == 1
    shutil.rmtree(tmp_path / "first")
    ended = forks.run(tmp_path, *second, "run_dir=cut")
    assert ended.code == 0 and "init " not in ended.out, ended.out + ended.err
    states = [load_file(tmp_path / run / "model.safetensors") for run in ("whole", "cut")]
    assert_same(*states)
    assert not torch.equal(states[0][next(iter(tested))], tested[next(iter(tested))])
    other = forks.run(tmp_path, *second[:-2], "checkpoint.every=1", "run_dir=cut")
    assert other.code == 2 and "init_from=null (was first)" in other.err
