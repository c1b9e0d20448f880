"""The speed claims, runnable: `python benchmarks/run.py` prints one table of paired ratios."""
