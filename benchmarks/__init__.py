"""Benchmarks behind the speed claims. `python benchmarks/run.py` prints a table of paired ratios."""
