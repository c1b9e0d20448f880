"""The table of a sweep, best first, made from the result.json of each job."""

import re
from pathlib import Path

from hydra.experimental.callback import Callback

from trainer.errors import printable
from trainer.rundir import read_result


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
        result = read_result(path)
        unknown = {"overrides": [], "error": "its result.json is none of a run's"}
        found.append({**(result if is_whole(result) else unknown), "job": path.parent.name})
    done = [result for result in found if result.get("best")]
    sign = -1 if done and done[0]["best"].get("mode") == "max" else 1
    done.sort(key=lambda result: sign * result["best"]["value"])
    return done + [result for result in found if not result.get("best")]


def is_whole(result):
    """Whether what a result.json holds has what the table needs: the file may be anybody's."""
    if not isinstance(result, dict) or not isinstance(result.get("overrides"), list):
        return False
    if not all(isinstance(typed, str) for typed in result["overrides"]):
        return False
    if "error" in result:
        return isinstance(result.get("error"), str) and not result.get("best")
    best = result.get("best") or {"name": "", "value": 0}
    numbers = (result.get("seconds"), best.get("value")) if isinstance(best, dict) else (None,)
    return all(isinstance(value, (int, float)) and abs(value) < 1e300 for value in numbers) and isinstance(
        best.get("name"), str
    )


def table(folder):
    """The lines of the table: what is monitored, a test metric, the time, and what was typed."""
    if not (found := results(folder)):
        return []
    from trainer.summary import number  # it imports torch, which a mistake on the command line need not wait for

    rows, header = [], None
    for result in found:
        typed = " ".join(result["overrides"])
        if "error" in result:
            rows.append([result["job"], "failed", "", "", f"{typed}: {result['error'].partition(chr(10))[0]}"])
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
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    return [printable(line) for line in lines]
