"""The table of a sweep, best first, made from the result.json of each job."""

import json
import re
from pathlib import Path

from hydra.experimental.callback import Callback


class Table(Callback):
    """Hydra's callback that prints the table when a sweep has ended."""

    def on_multirun_end(self, config, **_):
        folder = Path(config.hydra.sweep.dir)
        if lines := table(folder):
            print("\n" + "\n".join(lines) + f"\nsweep    {folder}")
        elif [path.name for path in folder.glob("*")] == ["multirun.yaml"]:
            # Nothing was run: a mistake leaves nothing behind.
            (folder / "multirun.yaml").unlink()
            folder.rmdir()
            if folder.parent == Path("runs") and not any(folder.parent.iterdir()):
                folder.parent.rmdir()


def results(folder):
    """The results of all jobs in a sweep's folder, best first, failed ones last; each has its directory under "job"."""
    found = []
    for path in sorted(
        Path(folder).glob("*/result.json"),
        key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.parent.name)],
    ):
        found.append({"job": path.parent.name, **json.loads(path.read_text(encoding="utf-8"))})
    done = [result for result in found if result.get("best")]
    sign = -1 if done and done[0]["best"]["mode"] == "max" else 1
    done.sort(key=lambda result: sign * result["best"]["value"])
    return done + [result for result in found if not result.get("best")]


def table(folder):
    """The lines of the table: what is monitored, a test metric, the time, and what was typed."""
    if not (found := results(folder)):
        return []
    from trainer.summary import number  # it imports torch, which a mistake on the command line need not wait for

    rows, header = [], None
    for result in found:
        typed = " ".join(result["overrides"])
        if "error" in result:
            rows.append([result["job"], "failed", "", "", f"{typed}: {result['error'].splitlines()[0]}"])
            continue
        best = result.get("best") or {"name": "best", "value": float("nan")}
        test = {name: value for name, value in result.items() if name.startswith("test/") and isinstance(value, float)}
        name = f"test/{best['name'].partition('/')[2]}"
        name = name if name in test else next(iter(test), "test")
        header = header or ["job", best["name"], name, "seconds", "settings"]
        shown = number(test[name]) if name in test else ""
        rows.append([result["job"], number(best["value"]), shown, f"{result['seconds']:.1f}", typed])
    rows = [header or ["job", "best", "test", "seconds", "settings"], *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]
