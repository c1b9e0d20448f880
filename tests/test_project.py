"""A project: its file, its modules and configs, and the commands that are printed in it."""

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forks import PROGRAM
from omegaconf import OmegaConf

from stoker import configs, project
from stoker.command import arguments, invocation
from stoker.command.help import help_text
from stoker.runs import provenance
from stoker.tasks.new import TEMPLATE, new
from stoker.trainer.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory, and the path of imports as it was before the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


FULL = 'trusted = ["mine"]\nexperiment = "first"\nruns = "out"\n'


@pytest.mark.parametrize("name", ["stoker.toml", "pyproject.toml"])
def test_the_file_of_the_working_directory_makes_the_project(folder, monkeypatch, name):
    text = FULL if name == "stoker.toml" else f'[project]\nname = "stoker"\n[tool.stoker]\n{FULL}'
    write(folder / name, text)
    write(folder / "configs/experiment/first.yaml", "# @package _global_\nepochs: 1\n")
    (folder / "src").mkdir()
    assert project.current() == project.Project(("mine",), "first", "out")
    assert project.import_folders() == [str(folder), str(folder / "src")]
    assert configs.folders() == [configs.FOLDER, folder / "configs"]
    builtin = configs.options("model")
    for option in ("mlp", "own"):
        write(folder / f"configs/model/{option}.yaml")
    own = folder / "configs/model/own.yaml"
    assert sorted(configs.options("model")) == sorted([*builtin, own.stem])  # mlp is found once
    added = ["experiment=first", "hydra.sweep.dir='out/${now:%Y-%m-%d_%H-%M-%S-%f}-sweep'"]
    search = f"hydra.searchpath=['file://{folder}/configs']"
    assert arguments.for_hydra(["model=cnn"]) == [*added, "model=cnn", search]
    assert arguments.for_hydra(["task=evaluate"]) == ["task=evaluate", search]
    typed = ["experiment=none", "hydra.sweep.dir=s"]
    assert arguments.for_hydra(typed) == [*typed, search]
    write(folder / "inner/pyproject.toml", "[tool.other]\nstoker = 1\n")
    monkeypatch.chdir(folder / "inner")
    assert project.current() == project.Project() and arguments.of_project(["model=net"]) == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('trustd = ["mine"]', ": unknown key trustd. The valid keys are trusted = "),
        ('trusted = "mine"', ".trusted: expected tuple[str, ...], not 'mine'. The valid keys are trusted = "),
        ("experiment = 1", ".experiment: expected "),
        ("runs = ", ": this is not valid TOML ("),
        ("[tool.stoker]", ": unknown key tool. The valid keys are "),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_sentence(folder, text, answer):
    write(folder / "stoker.toml", text)
    with pytest.raises(UserError) as caught:
        arguments.for_hydra([])
    assert str(caught.value).startswith(f"{folder / 'stoker.toml'}{answer}")
    assert len(str(caught.value).splitlines()) == 1


def test_the_command_is_found_again_from_where_it_was_typed(folder, monkeypatch):
    """A console script on the path by its name, another one by its path."""
    for place in ("env/bin", "other env/bin"):
        write(folder / place / "stoker", "#!/bin/sh\n")
        (folder / place / "stoker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/env/bin{os.pathsep}{os.environ['PATH']}")
    for typed, words in {
        f"{folder}/env/bin/stoker": ["stoker"],
        "env/bin/stoker": ["env/bin/stoker"],
        "other env/bin/stoker": ["other env/bin/stoker"],
    }.items():
        monkeypatch.setattr(sys, "argv", [typed])
        assert invocation.program() == words
    monkeypatch.setenv("PATH", str(folder))
    assert invocation.python() == sys.executable
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert invocation.python() in ("python", "python3")


def test_a_new_project_is_the_template_and_its_test_passes(folder, capsys):
    new(["blue_net"])
    written = {path.relative_to("blue_net") for path in Path("blue_net").rglob("*.*")}
    names = [str(path.relative_to(TEMPLATE)) for path in TEMPLATE.rglob("*.*")]
    expected = {name.replace("my_project", "blue_net") for name in names if ".pyc" not in name}
    assert {Path(name) for name in expected} == written
    assert not any("my_project" in path.read_text() for path in Path("blue_net").rglob("*.*"))
    assert capsys.readouterr().out.splitlines()[1] == "         cd blue_net"
    sys.path.insert(0, str(folder / "blue_net"))
    runpy.run_path("blue_net/tests/test_blue_net.py")["test_the_model_learns"]()
    for name in [name for name in sys.modules if name.startswith("blue_net")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name", ["my-net", "3d", "class", "../net", "torch", "__main__", "configs", "here"]
)
def test_a_name_that_no_new_package_can_have_is_refused(folder, name):
    write(folder / "here")
    with pytest.raises(UserError) as caught:
        new([name])
    assert str(caught.value) == (
        f"new {name}: this name is taken or is not a valid package name.\n"
        "Choose an unused name made of letters, digits and underscores, as in: new my_project."
    )
    assert [path.name for path in folder.iterdir()] == ["here"]


def git(*words):
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    done = subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout


def test_the_code_of_a_run_is_its_revision_and_the_diff_from_it(folder, monkeypatch):
    assert provenance.Code(folder).revision() is None
    write(folder / "tracked.py", "a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    head = git("rev-parse", "HEAD").strip()
    clean = provenance.Code(folder)
    assert clean.revision() == provenance.Revision(head, dirty=False)
    assert set(clean.files()) == {"provenance/packages.txt"}
    write(folder / "tracked.py", "a = 2\n")
    write(folder / "secret.env", "KEY=s3cret\n")
    code = provenance.Code(folder)
    assert code.revision() == provenance.Revision(head, dirty=True)
    changes = code.files()["provenance/changes.diff"]
    assert "s3cret" not in changes
    write(folder / "changes.diff", changes)
    git("checkout", "tracked.py")
    git("apply", "changes.diff")
    assert (folder / "tracked.py").read_text() == "a = 2\n"
    monkeypatch.setattr(provenance, "MOST_CHANGES", 20)
    short = provenance.Code(folder).files()["provenance/changes.diff"].splitlines()
    assert short[0].endswith(" 20 characters") and short[1:] == ["diff --git a/tracked"]


def test_the_packages_are_those_that_importlib_finds():
    expected = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.name).lower()
        expected.setdefault(name, package.version)
    assert provenance.packages() == dict(sorted(expected.items()))


def test_the_help_has_examples_groups_and_keys_in_80_columns(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stoker"])
    write(folder / "configs/model/net.yaml", "_target_: mine.Net\nwidth: 1  # of a layer\n")
    write(folder / "configs/model/broken.yaml", "[")
    text = help_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    examples, groups, keys = map(text.index, ("\nExamples:\n", "\nGroups:\n", "\nTraining\n"))
    assert examples < groups < keys
    models = text[text.index("\n  model  ") : text.index("\n  optimizer  ")]
    assert {"broken,", "cnn,", "net,"} <= set(models.split())
    for key in OmegaConf.load(configs.FOLDER / "train.yaml"):
        assert f"\n  {key}:" in text or key in ("defaults", "hydra")
    asked = help_text(["model=net", "optimizer=adamw", "--help"])
    assert "  model.width: 1             of a layer\n" in asked and "_target_" not in asked
    for key in OmegaConf.load(configs.FOLDER / "optimizer/adamw.yaml"):
        assert f"\n  optimizer.{key}: " in asked or key == "_target_" or key == "_partial_"


@pytest.mark.slow
def test_a_run_is_reproduced_bit_for_bit_or_what_differs_is_named(forks, tmp_path):
    quick = ["dataset=synthetic", "dataset.n=60", "batch_size=8", "epochs=1", "report=false"]
    done = forks.run(tmp_path, *quick, "run_dir=run")
    assert done.code == 0, done.err
    same = forks.run(tmp_path, "reproduce", "run=run", "run_dir=same")
    weights = (tmp_path / "run/model.safetensors").read_bytes()
    assert same.code == 0 and (tmp_path / "same/model.safetensors").read_bytes() == weights
    assert same.out.splitlines()[-1].startswith("same     bit for bit: model.safetensors (SHA-256 ")
    itself = forks.run(tmp_path, "reproduce", "run=run", "run_dir=./run")
    assert itself.code == 2 and "this is the run itself" in itself.err
    config = (tmp_path / "run/config.yaml").read_text()
    assert "  lr: 0.003\n" in config
    write(tmp_path / "run/config.yaml", config.replace("  lr: 0.003\n", "  lr: 0.004\n"))
    write(tmp_path / "run/provenance/packages.txt", "torch==2.0.0\n")
    other = forks.run(tmp_path, "reproduce", "run=run", "run_dir=other")
    lines = other.out.splitlines()
    assert other.code == 4
    assert any(line.startswith("differs  model.safetensors=") for line in lines)
    assert "because  optimizer.lr=0.004 (was 0.003)" in lines
    assert any(line.startswith("         torch=") and "(was 2.0.0)" in line for line in lines)
    write(tmp_path / "run/config.yaml", config)
    (tmp_path / "run/model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    shutil.rmtree(tmp_path / "other")
    flipped = forks.run(tmp_path, "reproduce", "run=run", "run_dir=other")
    [differs] = [line for line in flipped.out.splitlines() if line.startswith("differs")]
    assert flipped.code == 4 and differs.startswith("differs  model.safetensors=")
    assert flipped.out.splitlines()[-1].startswith("because")
    outside = config.replace("${run_dir}/not_finite", str(tmp_path / "elsewhere"))
    write(tmp_path / "run/config.yaml", outside)
    refused = forks.run(tmp_path, "reproduce", "run=run")
    assert refused.code == 2 and "this path is outside the run directory" in refused.err
    (tmp_path / "run/result.json").unlink()
    unfinished = forks.run(tmp_path, "reproduce", "run=run")
    assert unfinished.code == 2 and "has not finished" in unfinished.err


@pytest.mark.slow
def test_a_new_project_trains_and_prints_commands_that_work(forks, tmp_path):
    assert forks.run(tmp_path, "new", "blue_net").code == 0
    inner = tmp_path / "blue_net"
    trained = forks.run(inner, "epochs=1", "report=false")
    assert trained.code == 0 and "model    Net, 1,251 parameters" in trained.out, trained.err
    [line] = [line for line in trained.out.splitlines() if " evaluate run=" in line]
    assert line.startswith(f"evaluate {PROGRAM} ") and "run=runs/" in line
    words = shlex.split(line.removeprefix(f"evaluate {PROGRAM}"))
    evaluated = forks.run(inner, *words)
    assert evaluated.code == 0 and "\ntest     loss " in evaluated.out, evaluated.err
    without = ["experiment=none", "epochs=1"]
    planned = forks.run(inner, "plan", *without)
    assert planned.code == 0 and "model    MLP" in planned.out, planned.err
    assert planned.out.rstrip().endswith(f"{PROGRAM} {' '.join(without)}")
    text = "# @package _global_\nmodel: {_target_: blue_net.model.Net, width: 8}\n"
    write(inner / "configs/experiment/direct.yaml", text)
    named = forks.run(inner, "plan", "experiment=direct")  # by what is trained, not by model=mlp
    assert "run      runs/<date>-Net-digits;" in named.out, named.err
    if importlib.util.find_spec("optuna"):  # a project's configs/ does not hide sweep's groups
        search = ["-m", "sweep=optuna", "sweep/pruner=none", "sweep.trials=1"]
        assert forks.run(inner, *search, *without).code == 0
    swept = forks.run(inner, "-m", *without, "seed=0,1")
    assert f"best     {PROGRAM} {' '.join(without)}" in swept.out, swept.err
