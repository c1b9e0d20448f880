"""Tests on a simulated accelerator: `pytest -m accelerator`."""
