"""What `import stoker` gives, and what it does not import; the command in a folder with modules of
its own.
"""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import stoker

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {"python -m stoker": [sys.executable, "-m", "stoker"]}
SCRIPT = Path(sys.executable).with_name("stoker")
if SCRIPT.exists():
    COMMANDS["stoker"] = [str(SCRIPT)]


def modules_after(statement):
    """The names of the modules that a statement imports in a fresh process."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_public_names_are_these():
    names = ["Callback", "Trainer", "TrainingError", "UserError", "__version__", "init_from"]
    names[-1:] = ["fit", "init_from", "load", "short_errors", "tune_process"]
    assert stoker.__all__ == names == dir(stoker)
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None
    assert stoker.Trainer is importlib.import_module("stoker.trainer.trainer").Trainer
    with pytest.raises(AttributeError, match="module 'stoker' has no attribute 'Trainr'"):
        stoker.Trainr  # noqa: B018


def test_importing_the_package_imports_no_torch():
    assert not modules_after("import stoker") & {"torch", "numpy", "hydra", "omegaconf"}


def test_importing_the_trainer_imports_torch_and_no_application():
    modules = modules_after("from stoker import Trainer")
    assert "torch" in modules
    assert not modules & {"hydra", "omegaconf", "matplotlib", "jinja2"}


def test_a_clone_gives_the_same_classes_by_the_names_of_its_folders():
    code = """
        import models, stoker.models.mlp, trainer, trainer.callbacks
        from models.mlp import MLP
        from stoker.trainer import callbacks
        from trainer import Trainer
        import stoker
        assert Trainer is stoker.Trainer and trainer.callbacks is callbacks
        assert MLP is stoker.models.mlp.MLP
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=True)


NET = """
import torch

class Net(torch.nn.Linear):
    def __init__(self, in_shape, num_classes, scale):
        super().__init__(in_shape[-1] * in_shape[-2], num_classes)

    def forward(self, inputs):
        return super().forward(inputs.flatten(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_works_beside_packages_of_the_users_own(name, tmp_path):
    """Modules named like the package's folders break nothing, and a folder configs/ adds
    options.
    """
    for own in ("data/__init__.py", "models.py", "trainer.py", "examples/__init__.py"):
        path = tmp_path / own
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise ImportError('imported without being asked for')\n")
    (tmp_path / "mine.py").write_text(NET, encoding="utf-8")
    option = tmp_path / "configs" / "model" / "net.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# Mine.\n_target_: mine.Net\nscale: 1.0  # of nothing\n", encoding="utf-8")
    (tmp_path / "configs" / "train.yaml").write_text("epochs: 3\n", encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments):
        return subprocess.run(
            [*COMMANDS[name], *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    quick = ["max_steps=2", "report=false", "device=cpu"]
    done = run("model=net", "trusted=[mine]", "run_dir=a", *quick)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Net, 650 parameters" in done.stdout
    assert "stoker evaluate run=a 'trusted=[mine]'" in done.stdout
    asked = run("task=evaluate", "run=a", 'trusted=["mine"]')
    assert asked.returncode == 0 and "test     loss" in asked.stdout
    if name != "stoker":  # another door to the same program
        return
    typed = run("model._target_=mine.Net", "+model.scale=2", "run_dir=b", *quick)
    assert (typed.returncode, typed.stderr) == (0, "")
    untrusted = run("model=net", *quick)
    assert untrusted.returncode == 2 and 'type trusted=["mine"].' in untrusted.stderr
    misspelt = run("model=nett")
    assert misspelt.returncode == 2 and "Did you mean 'net'?" in misspelt.stderr
    assert "  model.scale: " in run("model=net", "--help").stdout


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (b"width: [16\n", "model=broken: these settings cannot be read (while parsing"),
        (b"- a\n", "model: this must be a mapping with a _target_ key."),
        ("width: 16\n".encode("utf-16"), "model=broken: these settings cannot be read ("),
    ],
)
def test_a_broken_file_of_your_own_configs_is_named(tmp_path, text, answer):
    (tmp_path / "configs/model").mkdir(parents=True)
    (tmp_path / "configs/model/broken.yaml").write_bytes(text)
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "model=broken"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert answer in done.stderr and len(done.stderr.splitlines()) <= 3
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]
