"""What the tests of the Trainer share: small data, small models, and how two trainings are
compared.
"""

import copy
import functools
import gc
import os
import sys

# Two test processes share the cores: one thread each, or they would wait for each other. Before
# torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from stoker import Trainer
from stoker.data.datasets import Data, TensorSplit
from stoker.trainer import schedules
from stoker.trainer.callbacks import Callback

modules_frozen = 0  # how many modules `little_garbage` has seen


def make_data(train=60, val=25, features=6, classes=3, dtype=torch.float32, seed=0):
    """A Data with a train and a val split of random inputs (features,), and classes that can be
    learnt in part.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(train + val, features, generator=generator, dtype=dtype)
    targets = (
        inputs[:, :classes]
        + 0.5 * torch.randn(train + val, classes, generator=generator, dtype=dtype)
    ).argmax(1)
    return Data(
        "small",
        TensorSplit(inputs[:train], targets[:train]),
        TensorSplit(inputs[train:], targets[train:]),
        None,
        (features,),
        classes,
    )


def make_model(features=6, classes=3, dropout=0.0, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layers = [
        torch.nn.Linear(features, 16),
        torch.nn.Tanh(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(16, classes),
    ]
    return torch.nn.Sequential(*layers).to(dtype)


def make_trainer(model=None, kind=Trainer, **settings):
    """A Trainer with AdamW and a per-step cosine schedule on the CPU, unless the settings say
    otherwise.
    """
    defaults = {
        "loss": torch.nn.CrossEntropyLoss(),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2),
        "scheduler": functools.partial(schedules.cosine, warmup=0.125),
        "device": "cpu",
        "epochs": 3,
    }
    return kind(make_model() if model is None else model, **(defaults | settings))


class Careless(Trainer):
    """A train_step of your own that ignores clipping, micro-batches, precision and the schedule."""

    def train_step(self, batch):
        loss, _ = self.compute_loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class GoBack(Callback):
    """Loads the optimizer's state of step 8 at step 16."""

    def on_step_end(self, trainer):
        if trainer.step == 8:
            self.state = copy.deepcopy(trainer.optimizer.state_dict())
        if trainer.step == 16:
            trainer.optimizer.load_state_dict(self.state)


def assert_same(state, other, where="state"):
    """Bit-identical, for any nesting of dicts, lists, tensors and values."""
    assert type(state) is type(other), where
    if isinstance(state, torch.Tensor):
        assert state.dtype == other.dtype, where
        assert torch.equal(state, other), where
    elif isinstance(state, dict):
        assert list(state) == list(other), where
        for key in state:
            assert_same(state[key], other[key], f"{where}/{key}")
    elif isinstance(state, (list, tuple)):
        assert len(state) == len(other), where
        for i, (item, same) in enumerate(zip(state, other, strict=True)):
            assert_same(item, same, f"{where}/{i}")
    else:
        assert state == other, where


def pytest_addoption(parser):
    parser.addoption(
        "--large", action="store_true", help="the large counts: 500 kills, 2,000 mutations, ..."
    )


def pytest_configure(config):
    if config.getoption("--large") and config.option.markexpr == "not slow and not accelerator":
        config.option.markexpr = ""  # the large counts are those of the slow tests


def pytest_unconfigure():
    gc.unfreeze()  # or some libraries take what is left at the end for leaks


@pytest.fixture(autouse=True)
def little_garbage():
    """Keep what was imported out of the garbage collector.

    Each fit ends with a collection, which would take longer than the fit.
    """
    global modules_frozen
    if len(sys.modules) != modules_frozen:
        gc.collect()
        gc.freeze()
        modules_frozen = len(sys.modules)


@pytest.fixture(scope="session")
def forks():
    """Runs of train.py in forks of one process that has imported what they need."""
    if not hasattr(os, "fork"):
        pytest.skip("os.fork is not on this platform")
    from forks import Forks

    forks = Forks(os.path.dirname(__file__), distributed=True)
    yield forks
    forks.close()


@pytest.fixture
def as_train_py(monkeypatch):
    """Printed commands begin as in a run of train.py, also where this process prints them."""
    from forks import TRAIN

    monkeypatch.setattr(sys, "argv", [str(TRAIN)])


@pytest.fixture(scope="session")
def large(request):
    """Whether the large counts were asked for."""
    return request.config.getoption("--large")


@pytest.fixture
def processed():
    """A function from overrides to the config, as the tasks get it."""

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from stoker.command import arguments, trust
    from stoker.tasks import main

    def process(*overrides):
        with hydra.initialize_config_module("stoker.configs"):
            typed = arguments.for_hydra(overrides)
            cfg = hydra.compose("train", typed, return_hydra_config=True)
            HydraConfig.instance().set_config(cfg)
            with open_dict(cfg):
                del cfg["hydra"]
            main.prepare(cfg)
        return cfg

    with hydra.utils.execution_whitelist(trust.patterns(trust.TRUSTED, [])):
        yield process
    HydraConfig.instance().cfg = None


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A function that writes one of the project's own configs, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """No test reads or leaves decoded images in the home of who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def one_world():
    """Each test begins with the same global generator and leaves deterministic mode off."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
