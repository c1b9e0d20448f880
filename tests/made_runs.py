"""Run directories as a training leaves them, made in an instant."""

import json
import math

CONFIG = """task: train
run_dir: runs/x
optimizer: {_target_: torch.optim.AdamW, lr: 0.003}
dataset: {_target_: stoker.data.datasets.%s}
model: {_target_: stoker.models.%s}
"""

# Entries of a result.json about the run itself, not its outcome.
MEASURED = ("seconds", "time", "speed", "doctor", "git")


def make_run(
    folder, typed=(), status="done", data="digits", model="mlp.MLP", rate=0.1, at=0, epochs=40
):
    """Write a run whose loss falls by `rate` each epoch; return its validation accuracies."""
    folder.mkdir(parents=True)
    rows, accuracies = [], []
    for epoch in range(1, epochs + 1):
        now = {"step": 20 * epoch, "epoch": float(epoch)}
        loss = math.exp(-rate * epoch)
        accuracies.append(1 - 0.5 * loss)
        rows.append({**now, "train/loss": loss, "train/samples": 100, "train/seconds": 0.1})
        rows.append({**now, "val/loss": 1.1 * loss, "val/acc": accuracies[-1]})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text(CONFIG % (data, model))
    (folder / "status.json").write_text(json.dumps({"started": at, "overrides": list(typed)}))
    if status == "stopped":
        return accuracies
    result = {"overrides": list(typed), "error": "The loss is nan.\nLower the rate.", "code": 3}
    if status == "done":
        best = {"name": "val/acc", "mode": "max", "step": 20 * epochs, "value": accuracies[-1]}
        numbers = {"seconds": 60 * rate, "test/loss": loss, "test/acc": accuracies[-1]}
        result = {"overrides": list(typed), "best": best, "steps": 20 * epochs, **numbers}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "report.html").write_text("<!doctype html><title>report</title>")
    return accuracies
