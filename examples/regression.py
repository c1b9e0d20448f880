"""Regression on a CSV table: Friedman's function (1991, Ann. Statist. 19, 1) with two extra columns.

python -m examples.regression friedman.csv
python train.py dataset=csv dataset.path=friedman.csv dataset.target=y dataset.ignore=[id] loss=mse epochs=40
Expect test/mse 1.24 ± 0.04 over 3 seeds; the noise alone accounts for 1.
"""

import csv
import math
import random
import sys

COLUMNS = ["x1", "x2", "x3", "x4", "x5", "colour", "id", "y"]


def rows(n=2000, noise=1.0, seed=0):
    """Yield n rows of COLUMNS. `noise` is the standard deviation of the noise in `y`, and so the
    lowest RMSE that a model can reach.
    """
    draw = random.Random(seed)
    for i in range(n):
        x = [draw.random() for _ in range(5)]
        colour = draw.choice(["red", "green", "blue"])
        y = 10 * math.sin(math.pi * x[0] * x[1]) + 20 * (x[2] - 0.5) ** 2 + 10 * x[3] + 5 * x[4]
        y += {"red": 0, "green": 2, "blue": -2}[colour] + draw.gauss(0, noise)
        yield [*(f"{value:.4f}" for value in x), colour, i, f"{y:.3f}"]


def main(path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows()])


if __name__ == "__main__":
    main(sys.argv[1])
