"""The site is built without a warning and needs no network, the reference has each public name, and
the commands and blocks of all pages work.
"""

import ast
import importlib.util
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from forks import PROGRAM
from PIL import Image

import stoker
from stoker.command import arguments
from stoker.command.dotted import flat
from stoker.command.settings import TASKS
from stoker.data import datasets
from stoker.project import tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
README = ROOT / "README.md"
PAGES = [README, *DOCS]
BUILDERS = ("sphinx", "furo", "myst_parser")
MISSING = [name for name in BUILDERS if importlib.util.find_spec(name) is None]
AFTER = ROOT / "docs" / "after-training.md"
MODEL = ROOT / "docs" / "tutorials" / "model.md"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
THEIRS = "my(package|_project)|=mine|=mixer|=wide|^(new|redraw)$"  # files of the reader
TEMPLATE = ROOT / "stoker" / "template" / "configs"  # of the project that a tutorial makes


def text_of(page):
    return page.read_text(encoding="utf-8")


def commands(text):
    """The commands of a text that train, each a list of words that starts with train.py, or with -m
    for a module; a backslash ends no line.
    """
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    result = []
    for line in lines:
        match = re.match(r"\s*(python |stoker |torchrun .* )(?=train\.py|-m |\S+=|\w+ )", line)
        if match is not None and (match[1] == "stoker " or re.search("train.py|-m ", line)):
            words = shlex.split(line[match.end() :], comments=True)
            result.append(["train.py", *words] if match[1] == "stoker " else words)
    return result


def blocks(page, language):
    """The fenced blocks of a page in a language."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, text_of(page), re.DOTALL | re.MULTILINE)


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


def names_in(code):
    """The names of the package that a piece of Python imports, each where it is defined."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stoker"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                place = pkgutil.resolve_name(name)
                is_module = not hasattr(place, "__module__")
                yield name if is_module else f"{place.__module__}.{place.__qualname__}"


@pytest.mark.slow
def test_the_reference_has_each_name_that_the_docs_and_configs_use(site):
    _, contents = site.joinpath("objects.inv").read_bytes().split(b"using zlib.\n")
    known = {line.split()[0] for line in zlib.decompress(contents).decode().splitlines()}
    used = set()
    for file in (*ROOT.glob("examples/*.py"), *ROOT.glob("stoker/template/my_project/*.py")):
        used.update(names_in(text_of(file)))
    for page in PAGES:
        used.update(names_in(python_of(page)))
    for path in ROOT.glob("configs/*/*.yaml"):
        if path.parent.name != "sweep":
            targets = re.findall(r"_target_: (stoker\.\w+\.[\w.]+)", text_of(path))
            used.update(target for target in targets)
    assert {"stoker.data.record.Data", "stoker.models.mlp.MLP"} <= used
    modules = {name.rpartition(".")[0] for name in known}
    assert used - known - modules == set()
    page = text_of(ROOT / "docs" / "api" / "stoker.md")
    table = dict(re.findall(r"^\| `stoker\.(\w+)` \|.*?(?:`(stoker[\w.]+)`|$)", page, re.MULTILINE))
    assert sorted(table) == sorted(stoker.__all__)
    assert {place for place in table.values() if place} <= known


@pytest.mark.slow
def test_the_page_of_settings_has_every_key_and_option(site):
    page = (site / "settings.html").read_text(encoding="utf-8")
    options = set(re.findall(r">([\w/]+=\w+)<", page))
    for path in ROOT.glob("configs/*/**/*.yaml"):
        group = path.parent.relative_to(ROOT / "configs").as_posix()
        assert f"{group}={path.stem}" in options
    keys = flat(yaml.safe_load(text_of(ROOT / "configs" / "train.yaml")))
    for key in [*keys, "optimizer.lr", "sweep.trials", "callbacks.early_stopping.min_delta"]:
        if not re.match(r"defaults|hydra", key):
            assert f'id="setting-{re.sub("[._]", "-", key)}"' in page, key
    [row] = re.findall(r'<p id="setting-optimizer-lr">.*?</tr>', page, re.DOTALL)
    cells = re.sub(r"<[^>]*>", " ", row)
    assert "number" in cells and "0.003" in cells and "0.05" in cells


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_pages_and_a_search_open_from_the_disk_without_an_error(site, tmp_path):
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    options += (
        " --disable-component-update --enable-logging=stderr --virtual-time-budget=3000 --dump-dom"
    )
    for page, wanted in (
        ("index.html", '<button class="copy"'),
        ("search.html?q=learning+rate", 'search"><li class="kind-index"><a href="settings.html'),
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
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_of_a_page_is_understood(page, monkeypatch):
    """Composed, and nothing is trained.

    What a page includes from examples/ is that folder's to test.
    """
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py")])  # beside which the groups lie
    for command in commands(text_of(page)):
        is_theirs = any(re.search(THEIRS, word) for word in command)
        if command[0] != "train.py" or "--help" in command or is_theirs:
            continue
        arguments.check(command[1:])
        # Of a sweep one job, without what starts the jobs.
        words = command[1:]
        if "-m" in command:
            words = [re.sub(r"^([\w.]+=[\w.-]+),.*", r"\1", word) for word in words]
        left_out = r"-m$|--cfg|job$|sweep|hydra|.*=(tag|choice|range)\("
        words = [word for word in words if not re.match(left_out, word)]
        if page.stem == "project":
            words += [f"hydra.searchpath=[file://{TEMPLATE}]", "model=net", "dataset=spirals"]
        with hydra.initialize_config_dir(str(ROOT / "configs")):
            config = hydra.compose("train", overrides=arguments.for_hydra(words))
        assert config.task in TASKS


def test_each_block_of_a_page_has_a_language_and_can_be_read():
    for page in PAGES:
        fences = re.findall(r"^```(.*)\n", text_of(page), re.MULTILINE)[::2]
        assert [fence for fence in fences if not fence] == [], page
        for block in blocks(page, "yaml"):
            assert yaml.safe_load(block), page
        for block in blocks(page, "toml"):
            assert tomllib.loads(block), page
        for block in blocks(page, "{code-block} python"):  # of other libraries
            ast.parse(re.sub(r"^:.*\n", "", block, flags=re.MULTILINE))


def test_the_tests_that_a_page_names_exist():
    for page in PAGES:
        for name in re.findall(r"`(tests/[\w/]+\.(?:py|sh))`", text_of(page)):
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_the_readme_is_short_and_its_links_exist():
    lines = text_of(README).splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100
    for link in re.findall(r"\]\(([^)#]+)", text_of(README)):
        assert link.startswith("https:") or (ROOT / link).exists(), link


def python_of(page):
    """The blocks of Python of a page, one after the other, as somebody who reads it would type
    them.
    """
    return "\n".join(blocks(page, "python"))


def run_python(code, folder):
    """Run code as a script in a folder, in this process, and return its names."""
    file = folder / "blocks.py"
    file.write_text(code, encoding="utf-8")
    before, place = signal.getsignal(signal.SIGINT), Path.cwd()
    os.chdir(folder)
    try:
        return runpy.run_path(str(file), run_name="__main__")
    finally:
        os.chdir(place)
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if python_of(page) and page != AFTER],
    ids=lambda page: page.stem,
)
def test_the_python_of_a_page_runs(page, forks, tmp_path, monkeypatch, capfd):
    if page == MODEL:  # its Python loads the run of its first command
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "mynet.py").write_text(blocks(page, "python")[0], encoding="utf-8")
        done = forks.run(tmp_path, *commands(text_of(page))[0][1:], "report=false")
        assert done.code == 0, done.err
    names = run_python(python_of(page), tmp_path)
    if page == README:
        printed, _ = capfd.readouterr()
        torch, inputs = names["torch"], names["inputs"]
        assert re.match(r"\{'val/loss': 0\.\d+\}\n", printed)
        distiller = names["SmallOutputs"](
            torch.nn.Linear(8, 2),
            torch.nn.CrossEntropyLoss(),
            torch.optim.AdamW,
            device="cpu",
            epochs=3,
            callbacks=[names["PrintRate"]()],
        )
        distiller.fit(names["loader"])
        steps = [line.split()[0] for line in capfd.readouterr()[0].splitlines()]
        assert steps == ["20", "40", "60"]
        outputs = distiller.module(inputs)
        plain = torch.nn.functional.cross_entropy(outputs, names["labels"])
        loss = plain + 0.1 * outputs.square().mean()
        assert abs(distiller.evaluate(names["loader"])["val/loss"] - loss.item()) < 1e-5


def test_the_weights_of_a_lightning_checkpoint_are_converted_as_its_page_says(tmp_path):
    page = blocks(ROOT / "docs" / "migration.md", "{code-block} python")
    [code] = [block for block in page if "lightning.ckpt" in block]
    layer = torch.nn.Linear(3, 2)
    tied = torch.nn.ModuleDict({"first": layer, "second": layer})  # save_file refuses shared memory
    state = {f"model.{name}": tensor for name, tensor in tied.state_dict().items()}
    saved = {"state_dict": {**state, "metric.total": torch.ones(1)}, "hyper_parameters": {"lr": 1}}
    torch.save(saved, tmp_path / "lightning.ckpt")
    run_python(code, tmp_path)
    other = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in tied})
    loaded = stoker.init_from(other, tmp_path / "weights.safetensors")
    assert len(loaded.loaded) == 4 and not loaded.unused
    torch.testing.assert_close(other.state_dict(), tied.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_what_comes_after_a_training_is_as_its_page_says(forks, tmp_path, capfd):
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
    capfd.readouterr()
    run_python(code.replace(server, "") + ask, tmp_path)
    printed, _ = capfd.readouterr()
    shown = re.search(r"^test .* acc ([\d.]+)$", text, re.MULTILINE)[1]
    assert abs(float(re.search(r"tensor\(([\d.]+)", printed)[1]) - float(shown)) < 0.01


def test_the_first_run_prints_the_lines_that_the_first_page_shows(forks, tmp_path):
    page = (ROOT / "docs" / "first-five-minutes.md").read_text(encoding="utf-8")
    shown = re.search(r"^data .*?^report .*?^report .*?\n", page, re.DOTALL | re.MULTILINE)[0]
    done = forks.run(tmp_path, "run_dir=runs/mine")
    kinds = [
        {line.split()[0] for line in text.splitlines()} - {"...", "speed"}
        for text in (shown, done.out)
    ]
    assert kinds[0] == kinds[1]
    slip = re.search(r"^\$ python train\.py (.*)\n(error: .*\n.*)$", page, re.MULTILINE)
    said = forks.run(tmp_path, *slip[1].split()).err.strip()
    assert said.replace(PROGRAM, "python train.py") == slip[2]
