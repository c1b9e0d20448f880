"""The wheel does in any folder what the clone does, whatever else is in that folder."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that a freshly built wheel is installed into."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True, cwd=folder)
    [wheel] = folder.glob("stoker-*.whl")
    target = folder / "site"
    install = [*pip, "install", "--no-deps", "--target", target, wheel]
    subprocess.run(install, check=True, cwd=folder)
    return target


def stoker(installed, folder, *arguments):
    """Run the installed command in `folder`; gives what it prints."""
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, installed / "bin" / "stoker", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_sweeps_reports_and_exports_in_an_empty_folder(installed, tmp_path):
    out = stoker(installed, tmp_path, "run_dir=run", "max_steps=20")
    assert "stoker evaluate run=run" in out and (tmp_path / "run/report.html").is_file()
    evaluated = stoker(installed, tmp_path, "task=evaluate", "run=run").splitlines()
    tested = next(line for line in out.splitlines() if line.startswith("test "))
    assert float(tested.split()[-1]) == pytest.approx(float(evaluated[-1].split()[-1]), abs=5e-5)
    out = stoker(installed, tmp_path, "task=export", "run=run", "format=torch_export")
    assert out.startswith("export ")
    assert stoker(installed, tmp_path, "redraw", "run") == "report   run/report.html\n"
    stoker(installed, tmp_path, "-m", "seed=0,1", "max_steps=5", "hydra.sweep.dir=sweep")
    with open(tmp_path / "sweep/sweep.csv", encoding="utf-8") as rows:
        assert [row["status"] for row in csv.DictReader(rows)] == ["done", "done"]


def test_packages_of_the_same_names_in_the_folder_change_nothing(installed, tmp_path):
    for name in ("data/__init__.py", "models/__init__.py", "trainer.py", "stoker_configs.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('imported by mistake')\n", encoding="utf-8")
    assert "test " in stoker(installed, tmp_path, "max_steps=5")
    (tmp_path / "mine.py").write_text(
        "from stoker.models.mlp import MLP\n\n\nclass Net(MLP):\n    pass\n", encoding="utf-8"
    )
    out = stoker(installed, tmp_path, "max_steps=5", "model._target_=mine.Net")
    assert "model    Net" in out


def test_options_of_the_project_s_own_configs_are_found(installed, tmp_path):
    (tmp_path / "configs/model").mkdir(parents=True)
    text = "_target_: stoker.models.mlp.MLP\nhidden: [7]\n"
    (tmp_path / "configs/model/tiny.yaml").write_text(text, encoding="utf-8")
    out = stoker(installed, tmp_path, "max_steps=5", "model=tiny")
    assert "model    MLP, 535 parameters" in out  # 64 * 7 + 7 + 7 * 10 + 10


def test_the_result_has_the_revision_of_the_users_project(installed, tmp_path):
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True)
    stoker(installed, tmp_path, "run_dir=run", "max_steps=2")
    result = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    assert result["git"]["revision"] == head.stdout.strip()
