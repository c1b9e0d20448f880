"""The site: it is built without a warning and without the network, knows every module, and its
commands are real.
"""

import ast
import importlib.util
import itertools
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import hydra
import pytest
from forks import PROGRAM, Forks
from PIL import Image

import stoker
from stoker.command import arguments
from stoker.command.settings import TASKS
from stoker.data import datasets

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
BUILDERS = ("sphinx", "furo", "myst_parser")
MISSING = [name for name in BUILDERS if importlib.util.find_spec(name) is None]
AFTER = ROOT / "docs" / "after-training.md"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def commands(text):
    """The `python ...` commands of a text, each a list of words without `python`; a backslash ends
    no line.
    """
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    lines = [line.strip() for line in lines if re.match(r"\s*python (train\.py|-m) ", line)]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture(scope="module")
def forks():
    forks = Forks(
        modules=("torch._dynamo", "torch.utils.flop_counter")
    )  # which each run would import anew
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-n",
        "-q",
        "-d",
        folder / "doctrees",
        ROOT / "docs",
        folder / "site",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "site"


def modules_of_stoker():
    """Each module of the package by its name, with its file."""
    modules = pkgutil.walk_packages(stoker.__path__, "stoker.")
    # The folders beside stoker/ are mapped into the package by its installation.
    for folder in ("trainer", "data", "models"):
        name = f"stoker.{folder}"
        modules = itertools.chain(modules, pkgutil.walk_packages([str(ROOT / folder)], f"{name}."))
    for module in modules:
        path = Path(module.module_finder.path, module.name.rpartition(".")[2])
        file = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        yield module.name, file


def test_the_reference_has_every_module_and_what_has_a_docstring_there(site):
    _, contents = site.joinpath("objects.inv").read_bytes().split(b"using zlib.\n")
    known = {line.split()[0] for line in zlib.decompress(contents).decode().splitlines()}
    names = set()
    for module, file in modules_of_stoker():
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        nodes = [node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        # A package that defines nothing is described by the page of its modules.
        if module.endswith("__main__") or (file.name == "__init__.py" and not public(nodes)):
            continue
        names.add(module)
        assert module in known, f"docs/api/ lacks .. automodule:: {module}"
        lacking = [name for name in public(nodes) if f"{module}.{name}" not in known]
        assert lacking == [], module
    assert {
        "stoker.trainer.trainer",
        "stoker.models.mlp",
        "stoker.data.datasets",
        "stoker.command.settings",
        "stoker.runs.report.summary",
        "stoker.sweeps.sweep",
        "stoker.diagnostics.doctor",
        "stoker.tasks.main",
    } <= names


def public(nodes):
    """The names of documented classes and functions that are not private."""
    return [node.name for node in nodes if node.name[0] != "_" and ast.get_docstring(node)]


def test_the_reference_starts_with_each_public_name():
    page = (ROOT / "docs" / "api" / "stoker.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `stoker\.(\w+)`", page, re.MULTILINE)
    assert sorted(named) == sorted(stoker.__all__)


def test_the_site_needs_no_network_and_can_be_searched(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(DOCS)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*?\b(?:src|href)="([^"]*)"', text)
        assert loaded, page
        assert [url for url in loaded if "//" in url] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(
            r"url\(['\"]?(https?:)?//|@import", style.read_text(encoding="utf-8")
        ), style
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(")
    for page in DOCS:
        assert f'"{page.relative_to(ROOT / "docs").with_suffix("").as_posix()}"' in index


def test_the_page_of_settings_has_every_file_of_the_configs():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```{literalinclude} \.\./(configs/.*)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("configs/**/*.yaml")
    )


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_pages_and_a_search_open_from_the_disk_without_an_error(site, tmp_path):
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    options += (
        " --disable-component-update --enable-logging=stderr --virtual-time-budget=3000 --dump-dom"
    )
    for page, wanted in (
        ("index.html", "<h1>Stoker"),
        ("search.html?q=EarlyStopping", "callbacks.EarlyStopping"),
    ):
        command = [
            CHROMIUM,
            *options.split(),
            f"--user-data-dir={tmp_path / page[:3]}",
            f"file://{site}/{page}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert wanted in done.stdout
        assert "CONSOLE" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_each_command_of_a_page_is_understood(page, monkeypatch):
    """Composed, and nothing is trained.

    What a page includes from examples/ is that folder's to test.
    """
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py")])  # beside which the groups lie
    for command in commands(page.read_text(encoding="utf-8")):
        if command[0] == "train.py" and "--help" not in command:
            arguments.check(command[1:])
            # Of a sweep one job, without what starts the jobs.
            words = [
                re.sub(r"^([\w.]+=[\w.-]+),.*", r"\1", word) if "-m" in command else word
                for word in command[1:]
            ]
            words = [
                word
                for word in words
                if not re.match(r"-m$|sweep|hydra|.*=(tag|choice|range)\(", word)
            ]
            with hydra.initialize_config_dir(str(ROOT / "configs")):
                config = hydra.compose("train", overrides=arguments.for_hydra(words))
            assert config.task in TASKS


def python_of(page):
    """The blocks of Python of a page, one after the other, as somebody who reads it would type
    them.
    """
    return "\n".join(
        re.findall(
            r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
    )


def run_python(code, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in DOCS if python_of(page) and page != AFTER], ids=lambda page: page.stem
)
def test_the_python_of_a_page_runs(page, tmp_path):
    run_python(python_of(page), tmp_path)


@pytest.mark.slow
def test_what_comes_after_a_training_is_as_its_page_says(forks, tmp_path):
    """Its commands for runs/mine, then its Python: what is exported and served answers as the test
    says.
    """
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    text, images = AFTER.read_text(encoding="utf-8"), datasets.digits().test.inputs
    (tmp_path / "photographs").mkdir()
    for i in range(3):
        Image.fromarray(images[i, 0].numpy()).save(tmp_path / "photographs" / f"{i}.png")
    for command in commands(text[: text.index("## ")]):
        if {"run=runs/mine", "run_dir=runs/mine"} & set(command):
            done = forks.run(tmp_path, *command[1:], *["report=false"] * ("task" not in command[1]))
            assert done.code == 0, done.err
    rows = (tmp_path / "classes.csv").read_text(encoding="utf-8").splitlines()[1:]
    classes = [int(row.split(",")[1]) for row in rows]
    ask = f"""
import threading, urllib.request
Answer.log_message = lambda *_: None
server = HTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
body = json.dumps(images[:3].tolist()).encode()
answer = urllib.request.urlopen(f"http://127.0.0.1:{{server.server_port}}", body).read()
assert json.loads(answer) == {classes}
"""
    server = 'server = HTTPServer(("localhost", 8000), Answer)'
    code = python_of(AFTER)
    assert server in code
    printed = run_python(code.replace(server, "") + ask, tmp_path)
    shown = re.search(r"^test .* acc ([\d.]+)$", text, re.MULTILINE)[1]
    assert abs(float(re.search(r"tensor\(([\d.]+)", printed)[1]) - float(shown)) < 0.01


def test_the_first_run_prints_the_lines_that_the_first_page_shows(forks, tmp_path):
    page = (ROOT / "docs" / "first-five-minutes.md").read_text(encoding="utf-8")
    shown = re.search(r"^data .*?^report .*?\n", page, re.DOTALL | re.MULTILINE)[0]
    done = forks.run(tmp_path, "run_dir=runs/mine")
    kinds = [
        {line.split()[0] for line in text.splitlines()} - {"...", "speed"}
        for text in (shown, done.out)
    ]
    assert kinds[0] == kinds[1]
    slip = re.search(r"^\$ python train\.py (.*)\n(error: .*\n.*)$", page, re.MULTILINE)
    said = forks.run(tmp_path, *slip[1].split()).err.strip()
    assert said.replace(PROGRAM, "python train.py") == slip[2]
