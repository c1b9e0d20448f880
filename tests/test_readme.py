"""The README: its Python runs as it stands, its commands are understood, and its tree names every module."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    use = """
own = rings()
(train, val, test), _ = make_loaders(own, batch_size=20)
settings = dict(optimizer=functools.partial(torch.optim.AdamW, lr=3e-2), metrics={"acc": Accuracy()}, epochs=20)
settings |= dict(loss=torch.nn.CrossEntropyLoss(), device="cpu")
with Distiller(MLP(own.in_shape, 2), callbacks=[PrintGradientSteps()], **settings) as trainer:
    trainer.fit(train, val)
    assert trainer.evaluate(test)["val/acc"] > 0.95
"""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*blocks, use])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 5/5" in done.stdout
    assert re.search(r"'test/acc': 0\.9\d", done.stdout)
    assert "\n100 " in done.stdout


def environment():
    import os

    return os.environ | {"PYTHONPATH": str(ROOT)}


def test_its_commands_are_understood(tmp_path):
    """Each is composed and checked, and trains nothing: what is wrong with a key or a choice is found without that."""
    commands = [
        shlex.split(line, comments=True)
        for line in re.findall(r"^python train\.py.*", README, re.MULTILINE)
    ]
    commands = [
        command
        for command in commands
        if "mypackage" not in str(command) and not {"-m", "--help"} & set(command)
    ]
    assert len(commands) >= 9
    for command in commands:
        done = subprocess.run(
            [sys.executable, ROOT / "train.py", *command[2:], "--cfg", "job"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (command, done.stderr)


def test_its_tree_names_every_module():
    tree = README[README.index("## What is where") :]
    for folder in ("trainer", "data"):
        for file in (ROOT / folder).glob("[!_]*.py"):
            assert re.search(rf"^  {file.name} ", tree, re.MULTILINE), file
