"""The README: it is short, its Python runs as it stands, and its commands are understood."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100


def test_its_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    use = """
torch.manual_seed(0)
settings = dict(optimizer=torch.optim.AdamW, device="cpu", epochs=3, callbacks=[PrintRate()])
with Distiller(torch.nn.Linear(8, 2), torch.nn.CrossEntropyLoss(), **settings) as distiller:
    distiller.fit(loader)
    outputs = distiller.module(inputs)
    penalty = 0.1 * outputs.square().mean().item()
    plain = torch.nn.functional.cross_entropy(outputs, labels).item()
    assert abs(distiller.evaluate(loader)["val/loss"] - plain - penalty) < 1e-5
"""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*blocks, use])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"\{'val/loss': 0\.\d+\}\n20 ", done.stdout)
    assert "\n40 " in done.stdout and "\n60 " in done.stdout


def test_its_commands_are_understood(tmp_path):
    """Each is composed and checked, and trains nothing: that finds a wrong key or choice."""
    lines = re.findall(r"^(?:python train\.py|stoker) .*", README, re.MULTILINE)
    commands = [shlex.split(line.removeprefix("python "), comments=True)[1:] for line in lines]
    commands = [
        command
        for command in commands
        if "mypackage" not in str(command) and not {"-m", "--help"} & set(command)
    ]
    assert len(commands) >= 6
    for command in commands:
        done = subprocess.run(
            [sys.executable, ROOT / "train.py", *command, "--cfg", "job"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (command, done.stderr)
