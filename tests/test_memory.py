"""A sweep of many jobs in one process ends with the memory of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_many_jobs_take_the_memory_of_one(tmp_path, large):
    """The peak of the process is that of its first jobs, give or take less than one job.

    A job is 73 MiB, and the allocator's own noise up to 40.

    Jobs that left their data or weights behind would add five times as much, or, of twenty,
    seventeen times.
    """
    jobs = 20 if large else 8
    settings = [
        "dataset=synthetic",
        "dataset.n=8000",
        "dataset.in_shape=[1000]",
        "model.hidden=[2000,1000]",
        "max_steps=2",
        "hydra.sweep.dir=sweep",
    ]
    command = [
        sys.executable,
        ROOT / "train.py",
        "-m",
        *settings,
        f"seed={','.join(map(str, range(jobs)))}",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [
        json.loads((tmp_path / "sweep" / str(job) / "result.json").read_text())["memory_mib"]
        for job in range(jobs)
    ]
    one = sum(reports[0][part] for part in ("parameters", "optimizer", "data"))
    assert one > 70
    assert reports[-1]["peak"] - reports[2]["peak"] < one
    assert all(report["gradients"] == report["parameters"] for report in reports)
