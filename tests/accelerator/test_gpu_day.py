"""benchmarks/gpu.py on the simulated accelerator, which its processes find as they find a plug-in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerator import build

pytestmark = pytest.mark.accelerator

ROOT = Path(__file__).resolve().parents[2]
PLUG_IN = """
def register():
    import torch
    torch.ops.load_library({library!r})
    from accelerator import simulated
"""


def test_a_gpu_day_counts_and_competes_on_any_accelerator(accelerator, tmp_path):
    library = str(build.library(build.compiler()))
    tmp_path.joinpath("plug_in.py").write_text(PLUG_IN.format(library=library))
    about = tmp_path / "plug_in-1.0.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: plug_in\nVersion: 1.0\n")
    about.joinpath("entry_points.txt").write_text("[torch.backends]\nplug_in = plug_in:register\n")
    folders = [str(tmp_path), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run"]
    command += ["--device", accelerator.NAME, "--output", str(tmp_path), "--steps"]
    subprocess.run([*command, "counts", "resnet"], env=environment, check=True)

    lines = tmp_path.joinpath("results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    results = {(row["step"], row["label"]): row["result"] for row in rows}
    memory = results["counts", "memory"]
    assert memory["left_bytes"] == 0 < memory["training_bytes"]
    ours = results["resnet", "ours"]
    by_hand = results["resnet", "ideal:channels_last+fused"]
    assert ours["loss"] == pytest.approx(by_hand["loss"], rel=1e-3)
    assert 0 < ours["peak_mib"] < 100  # of the device, where the process holds 600
