"""The simulated accelerator as a fixture. It is registered in processes that run only its tests."""

import os

import pytest
import torch

from accelerator import build


@pytest.fixture(autouse=True, scope="session")
def accelerator(pytestconfig):
    """The device's module, once it is built and registered."""
    if pytestconfig.option.markexpr != "accelerator":
        pytest.skip("a simulated accelerator stays in its process: run `pytest -m accelerator`")
    compiler = build.compiler()
    if compiler is None:
        assert "STOKER_CI" not in os.environ, "CI needs a C++ compiler"
        pytest.skip("building a simulated accelerator takes a C++ compiler: install g++")
    torch.ops.load_library(build.library(compiler))
    from accelerator import simulated

    return simulated
