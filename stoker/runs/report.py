"""The report of a run, from the files in its directory alone: report.html; `python -m stoker.runs.report DIR [--open]`.

The directory may be anybody's: what is missing or wrong in it leaves its part out, and all else is text on the page.
"""

import base64
import binascii
import contextlib
import json
import math
import re
import struct
import sys
import zlib
from pathlib import Path

from stoker.command import keys, subcommand
from stoker.command.trust import own_packages
from stoker.configs import FOLDER
from stoker.runs import rundir, saved_config
from stoker.runs.rundir import STAGES, is_number
from stoker.trainer import files
from stoker.trainer.errors import UserError, as_typed
from stoker.trainer.readable import duration, number, seconds

NAME = "report.html"
MOST_BYTES, MOST_ROWS = (
    2**25,
    100_000,
)  # of a metrics.jsonl; of more rows those of evaluations, and some others
MOST_JSON = 2**24  # bytes of an evaluation.json: 1,000 classes are 2 MB
MOST_TEXT, MOST_NAME = (
    200,
    100,
)  # letters of anything that is shown; of a class, which stands in several places
MOST_ENTRIES, MOST_TYPED = 300, 10_000  # of the settings; letters of those that were typed
MOST_CLASSES = 40  # of a matrix that is drawn
MOST_PRINTED = 20  # of a matrix that fits on paper
MOST_PAIRS = 20  # of classes that are confused, where there are more
MOST_SAMPLES = 24  # of each kind
MOST_TARGETS = 4  # of a regression that are drawn
MOST_COLUMNS = 12  # of a table's row
MOST_WARNINGS, MOST_WARNING = 20, 500  # of the doctor's; letters of each
MOST_PNG, MOST_SIDE = 2**15, 256  # bytes and pixels of a picture
MOST_PICTURES = 450_000  # letters of all pictures
MOST_PAGE = 1_000_000  # bytes
WORDS = {"train": "training", "val": "validation", "test": "test"}
PLACES = {"csv": "path", "image_folder": "root"}  # the keys of data that is the user's own
GOOD_ENDS = {"val/acc": "max", "val/r2": "max", "val/loss": "min"}  # of what monitor=auto looks at
MEMORY = ("parameters", "gradients", "optimizer", "buffers", "data")
COLOURS = dict(zip(STAGES, (0, 6, 1, 4, 3, 1, 2, 5, 6, 7), strict=True)) | {
    "parameters": 1,
    "gradients": 4,
    "buffers": 5,
}


def write(folder):
    """Makes folder/report.html anew, and gives its path; OSError where it cannot be written."""
    path = Path(folder) / NAME
    files.write_text(path, html(folder))
    return path


def html(folder):
    """The whole page, below MOST_PAGE bytes: too large a page has first no pictures and then no settings."""
    from stoker.runs.page import render

    facts = facts_of(folder)
    for smaller in ({}, {"hardest": []}, {"settings": None, "confusion": None}):
        facts |= smaller
        text = render("report.html", **facts)
        if len(text.encode()) < MOST_PAGE:
            break
    return text


def facts_of(folder):
    """What the template shows: a part that is not known is None or empty."""
    folder = Path(folder)
    config = saved_config.load_config("run_dir", folder)
    result, rows = (
        read_json(folder / "result.json", rundir.MOST_JSON),
        read_rows(folder / "metrics.jsonl"),
    )
    seen = evaluation_of(read_json(folder / "evaluation.json", MOST_JSON))
    typed = typed_in(folder, result)
    best = best_of(result, rows) if result else best_so_far(config, rows)
    return {
        "title": f"Run {folder.resolve().name}",
        "folder": str(folder),
        "about": about(config, result, seen),
        "split": WORDS.get(seen.get("split")),
        "verdict": verdict(result, rows, seen, best, last_step(folder, rows)),
        "remarks": list(remarks(result)),
        "chosen_by": seen.get("split") == "val" and best and best["name"].startswith("val/"),
        "ended": bool(result),
        "tiles": tiles(result, best, targets_of(seen)),
        "curves": curves(rows, best),
        "standardised": seen.get("standardised"),
        "doctor": warnings(result),
        "confusion": confusion(seen),
        "hardest": hardest(seen),
        "regression": regression(seen),
        "time": shares(spent := result.get("time"), STAGES, duration),
        "trained": duration(math.fsum(number_in(spent, stage) or 0 for stage in STAGES)),
        "taken": None if (taken := number_in(result, "seconds")) is None else seconds(taken),
        "speed": speed(result),
        "memory": shares(result.get("memory_mib"), MEMORY, mib),
        "peak": None
        if (peak := number_in(result.get("memory_mib"), "peak")) is None
        else mib(peak),
        "settings": settings(config, typed or []),
        "versions": versions(result),
        "commands": commands(folder, typed, result),
        "trusted": trusted(typed),
    }


# What is in the files.


def read_json(path, most):
    """The object in a JSON file, {} for anything else."""
    try:
        found = json.loads(files.read(path, most))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_rows(path):
    """The rows of a metrics.jsonl that have an epoch, each with its numbers alone."""
    try:
        lines = files.read(path, MOST_BYTES).splitlines()
    except OSError:
        return []
    every, rows = math.ceil(len(lines) / MOST_ROWS), []
    lines = [line for i, line in enumerate(lines) if i % every == 0 or b'"val/' in line]
    for line in lines[-2 * MOST_ROWS :]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        row = (
            {name: value for name, value in row.items() if is_number(value)}
            if isinstance(row, dict)
            else {}
        )
        if row.get("epoch", -1) >= 0:
            rows.append(row)
    return rows


def last_step(folder, rows):
    """The step of the last row, or of a later checkpoint: an interrupted run has that alone."""
    names = (
        path.stem.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*.ckpt")
    )
    return max(
        [
            0,
            *(row.get("step", 0) for row in rows),
            *(int(name) for name in names if name.isdecimal()),
        ]
    )


def typed_in(folder, result):
    """What was typed for the run, from its result, or the first line of its config.yaml; None where nobody knows."""
    typed = result.get("overrides")
    if typed is None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            first = files.read(folder / "config.yaml", saved_config.MOST_YAML).partition(b"\n")[0]
            typed = json.loads(first.removeprefix(rundir.TYPED.encode()))
    texts = isinstance(typed, list) and all(isinstance(one, str) for one in typed)
    return typed if texts and sum(map(len, typed)) + len(typed) <= MOST_TYPED else None


def is_count(value, most=2**53):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def number_in(mapping, key):
    """The number of that name, None where there is none."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if is_number(value) else None


def text_in(mapping, key):
    """The text of that name, in one line; None where there is none."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return short(" ".join(value.split())) if isinstance(value, str) and value else None


def short(value, most=MOST_TEXT):
    """The value as text of at most so many letters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def middle(name):
    """The name as a column has room for it: of a long one its two ends, in which such names differ."""
    return name if len(name) <= 24 else f"{name[:9]}…{name[-14:]}"


def evaluation_of(found):
    """What evaluation.json says, each entry of the form that trainer/examine.py gives it; {} if it is none."""
    if found.get("kind") not in ("classification", "regression") or found.get("split") not in (
        "train",
        "val",
        "test",
    ):
        return {}
    seen = {"kind": found["kind"], "split": found["split"]}
    if not is_count(found.get("samples")) or not found["samples"]:
        return {}
    seen["samples"], seen["target"] = found["samples"], text_in(found, "target")
    if seen["kind"] == "regression":
        seen["standardised"] = found.get("standardised") is True
        points = found.get("points")
        pairs = points if isinstance(points, list) else []
        seen["points"] = [pair for pair in pairs if is_pair(pair)]
    else:
        names = found.get("classes")
        if not isinstance(names, list) or not names:
            return {}
        seen["classes"] = [short(name, MOST_NAME) for name in names]
        if is_number(found.get("chance")) and 0 < found["chance"] <= 1:
            seen["chance"] = found["chance"]
        if is_matrix(found.get("confusion"), len(names)):
            seen["confusion"] = found["confusion"]
    for name in ("worst", "uncertain"):
        samples = found.get(name)
        samples = samples[:MOST_SAMPLES] if isinstance(samples, list) else []
        seen[name] = [
            sample
            for sample in samples
            if isinstance(sample, dict) and is_count(sample.get("index"))
        ]
    return seen


def targets_of(seen):
    """How many numbers a regression predicts, as far as its points say."""
    return min((len(true) for true, _ in seen.get("points", ())), default=1)


def is_pair(pair):
    """Whether it is [the true numbers, as many predicted ones]."""
    lists = (
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, list) for part in pair)
    )
    return (
        lists and len(pair[0]) == len(pair[1]) <= 100 and all(map(is_number, [*pair[0], *pair[1]]))
    )


def is_matrix(rows, size):
    """Whether it is a square of counts, not all of which are 0."""
    if not isinstance(rows, list) or len(rows) != size:
        return False
    lists = all(
        isinstance(row, list) and len(row) == size and all(map(is_count, row)) for row in rows
    )
    return lists and sum(map(sum, rows)) > 0


def best_of(result, rows):
    """{"name", "value", "high", "epoch"} of the evaluation whose weights were kept; None where nobody knows."""
    best = result.get("best")
    name, step = text_in(best, "name"), number_in(best, "step")
    value = number_in(best, "value")
    if name is None or value is None or step is None:
        return None
    row = next((row for row in rows if row.get("step") == step and name in row), None)
    return {
        "name": name,
        "value": value,
        "high": best.get("mode") == "max",
        "epoch": row and row["epoch"],
    }


def best_so_far(config, rows):
    """`best_of` a run that has no result yet: by its monitor, where its good end is known."""
    name, mode = text_in(config, "monitor"), text_in(config, "monitor_mode")
    if name == "auto":
        name = next((one for one in GOOD_ENDS if any(one in row for row in rows)), None)
    mode = GOOD_ENDS.get(name) if mode == "auto" else mode
    evaluated = [row for row in rows if name in row]
    if not evaluated or mode not in ("max", "min"):
        return None
    row = (max if mode == "max" else min)(evaluated, key=lambda row: row[name])
    return {"name": name, "value": row[name], "high": mode == "max", "epoch": row["epoch"]}


# What is said of it.


def about(config, result, seen):
    """'MLP on digits, cpu, fp32, 1,258 training samples': model and data by name, a file or folder by its own."""

    def named(group):
        target = text_in(config.get(group), "_target_")
        return target and target.rpartition(".")[2]

    data = named("dataset")
    if data in PLACES:
        place = config["dataset"].get(PLACES[data])
        data = (isinstance(place, str) and short(Path(place).name)) or data
    parts = [" on ".join(filter(None, (named("model"), data)))]
    parts += [f"target {seen['target']}"] if seen.get("target") else []
    parts += [text_in(result, "device"), text_in(result, "precision")]
    counts = [(number_in(result.get("samples"), name), word) for name, word in WORDS.items()]
    counts = " + ".join(f"{count:,.0f} {word}" for count, word in counts if count is not None)
    return ", ".join(filter(None, [*parts, counts and f"{counts} samples"]))


def verdict(result, rows, seen, best, step):
    """One sentence: how good the run is at this step, against chance and against its first evaluation."""
    if text := text_in(result, "error"):
        return f"The run has failed: {text}"
    tested = judged(result, seen)
    course = progress(rows, best) if result or best else so_far(rows)
    if tested is None and course is None:
        return (
            f"There is no evaluation yet, up to step {step:,.0f}."
            if rows
            else "There are no numbers yet."
        )
    still = (
        None if result or not rows else f"the run has not come to its end, up to step {step:,.0f}"
    )
    text = "; ".join(filter(None, (tested, course, still)))
    return f"{text if re.match(r'[a-z]+/', text) else text[0].upper() + text[1:]}."  # a name stays as it is


def judged(result, seen):
    """'the model gets 97.2 % of 360 test samples right, where the most frequent class alone would be 10.3 %'."""
    split, word = seen.get("split", "test"), WORDS[seen.get("split", "test")]
    total, share, chance = (
        seen.get("samples"),
        number_in(result, f"{split}/acc"),
        seen.get("chance"),
    )
    if "confusion" in seen:
        total = sum(map(sum, seen["confusion"]))
        share = sum(row[i] for i, row in enumerate(seen["confusion"])) / total
        chance = chance or max(map(sum, seen["confusion"])) / total
    if seen.get("kind") == "classification" and share is not None and chance:
        text = f"the model gets {percent(share)} of {total:,} {word} samples right"
        if share <= chance + 2 * math.sqrt(chance * (1 - chance) / total):
            return f"{text}, which is no better than chance: the most frequent class alone would be {percent(chance)}"
        return f"{text}, where the most frequent class alone would be {percent(chance)}"
    r2, mae = (number_in(result, f"{split}/{name}") for name in ("r2", "mae"))
    if seen.get("kind") == "regression" and r2 is not None and r2 <= 1:
        what = f"{seen['samples']:,} {word} samples"
        of = f"{seen['target']} in {what}" if seen.get("target") else what
        text = f"the model explains {percent(r2)} of the variance of {of}"
        text = f"{text}, where always answering their mean would explain none"
        if r2 <= 0:
            text = f"the model is no better on {what} than always answering their mean (r2 {number(r2)})"
        if mae is None or targets_of(seen) > 1:  # whose units may differ
            return text
        return f"{text}, and is off by {number(mae)} on average"
    name = next(iter(tests_of(result)), None)
    return None if name is None else f"{short(name)} is {number(result[name])}"


def tests_of(result):
    """The names of the test's numbers, the loss last: what was trained for says less."""
    names = [
        name for name, value in result.items() if name.startswith("test/") and is_number(value)
    ]
    return sorted(names, key="test/loss".__eq__)


def progress(rows, best):
    """'val/acc rose from 0.8436 after epoch 1 to 0.9777 after epoch 9'."""
    if best is None:
        return None
    name, value = best["name"], best["value"]
    first = next((row for row in rows if name in row), None)
    if first is None or best["epoch"] is None:
        return f"{name} is {number(value)} at its best"
    if first["epoch"] == best["epoch"]:
        later = "" if sum(name in row for row in rows) == 1 else ", and not better later"
        return f"{name} was {number(value)} after {epoch(first['epoch'])}{later}"
    way = "rose" if best["high"] else "fell"
    return (
        f"{name} {way} from {number(first[name])} after {epoch(first['epoch'])} to {number(value)}"
        f" after {epoch(best['epoch'])}"
    )


def so_far(rows):
    """'val/f1 went from 0.4 after epoch 1 to 0.8 after epoch 3': where nobody knows which is better."""
    name = metric_of(rows) or "val/loss"
    evaluated = [row for row in rows if name in row]
    if not evaluated:
        return None
    first, last = evaluated[0], evaluated[-1]
    way = (
        f"went from {number(first[name])} after {epoch(first['epoch'])} to"
        if first is not last
        else "is"
    )
    return f"{short(name)} {way} {number(last[name])} after {epoch(last['epoch'])}"


def metric_of(rows):
    """The first metric of the validation beside its loss; None where there is none."""
    return next(
        (name for row in rows for name in row if name.startswith("val/") and name != "val/loss"),
        None,
    )


def epoch(value):
    return f"epoch {value:.0f}" if float(value).is_integer() else f"{value:.3g} epochs"


def percent(share):
    """'97.2 %', with more digits near the ends: '99.94 %', '0.01 %'; '100 %' is all of them."""
    near = 100 * min(share, 1 - share)
    digits = 0 if near == 0 else max(1, math.ceil(-math.log10(near))) if near > 1e-4 else 1
    return f"{100 * share:.{digits}f} %"


def remarks(result):
    """Lines on what else has to be known: a stop before the end."""
    step, total, why = (
        number_in(result, "steps"),
        number_in(result, "total_steps"),
        str(rundir.stopped(result)) or None,
    )
    if step is not None and total is not None and step < total:
        yield f"It ended at step {step:,.0f} of {total:,.0f}{f': {why}' if why else ''}."


def tiles(result, best, targets):
    """[(what, value)] of the numbers one looks for first: of errors in the targets' own units, and those of one."""
    tests = {
        name: result[name]
        for name in tests_of(result)
        if targets == 1 or name not in ("test/mae", "test/mse")
    }
    if tests.get("test/mse", -1) >= 0:
        tests = {name.replace("/mse", "/rmse"): tests[name] for name in tests}
        tests["test/rmse"] = math.sqrt(tests["test/rmse"])
    found = [(short(name), tile(value)) for name, value in list(tests.items())[:3]]
    if best:
        found.append((f"best {best['name']}", tile(best["value"])))
    if (taken := number_in(result, "seconds")) is not None:
        found.append(("time", seconds(taken)))
    if (speed := number_in(result, "samples_per_second")) is not None:
        found.append(("train samples/s", f"{speed:,.0f}"))
    if (parameters := number_in(result, "parameters")) is not None:
        found.append(("parameters", amount(parameters)))
    return found


def tile(value):
    """The number as far as a tile has room for it."""
    if 0 < abs(value) < 0.001:
        return f"{value:.3g}"
    return number(value) if abs(value) < 1e6 else "-" * (value < 0) + amount(abs(value))


def amount(value):
    """'1,234', '12.3 k', '51.9 M', '3.41 T'."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= (size if unit != "k" else 1e4):
            return f"{value / size:.3g} {unit}"
    return f"{value:,.4g}" if value != int(value) else f"{value:,.0f}"


def mib(value):
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.3g} MiB"


def curves(rows, best):
    """[{"title", "keys", "svg"}] of loss, metric and learning rate."""
    from stoker.runs import plots

    def series(name):
        return [(row["epoch"], row[name]) for row in rows if name in row]

    def trained(name):
        windows = [
            (row["epoch"], row[name], max(1, row.get("train/samples", 1)))
            for row in rows
            if name in row
        ]
        return pooled(windows)

    known = (
        best
        and best["name"].startswith("val/")
        and best["name"] != "val/loss"
        and series(best["name"])
    )
    metric = best["name"] if known else metric_of(rows)
    frames = [("loss", "loss", trained("train/loss"), series("val/loss"))]
    if metric:
        frames.append(("metric", short(metric[4:]), trained(f"train/{metric[4:]}"), series(metric)))
    frames.append(
        ("rate", "learning rate", [], series("train/lr"))
    )  # in the colour of the validation
    drawn = []
    for name, title, train, val in frames:
        if max(len(train), len(val)) < 2:
            continue
        lines, keys, point = {"train": train, "val": val}, [], None
        if name != "rate":
            keys = [key for key, points in lines.items() if points]
            point = best and next((point for point in val if point[0] == best["epoch"]), None)
        svg = plots.curves(
            name, lines, point, f"{title} over the epochs", logarithmic=name == "loss"
        )
        drawn.append({"title": title, "keys": keys, "best": point and epoch(point[0]), "svg": svg})
    return drawn


def pooled(windows):
    """[(epoch, mean)] of (epoch, mean, samples), over stretches of as many samples as the largest of them has.

    What was left for the row before an evaluation may be a batch or two, whose mean would swing.
    """
    most, points, seen = max((samples for *_, samples in windows), default=0), [], math.inf
    for end, mean, samples in reversed(windows):
        if seen >= most:
            points.append([end, 0.0])
            seen = 0
        seen += samples
        points[-1][1] += (mean - points[-1][1]) * samples / seen
    return [tuple(point) for point in reversed(points)]


def warnings(result):
    """[(what, what to type)] of what the doctor has warned of."""
    said = result.get("doctor")
    said = (
        [text for text in said if isinstance(text, str) and text] if isinstance(said, list) else []
    )
    parts = [text.partition("\n") for text in said[:MOST_WARNINGS]]
    return [
        (short(what[:1].upper() + what[1:], MOST_WARNING), short(advice, MOST_WARNING))
        for what, _, advice in parts
    ]


def confusion(seen):
    """{"rows"} of the matrix of not too many classes, {"lists"} of more than paper has room for; None where none is."""
    if "confusion" not in seen:
        return None
    counts, names = seen["confusion"], seen["classes"]
    columns, rows = [sum(column) for column in zip(*counts, strict=True)], []
    for i, row in enumerate(counts):
        precision, recall = (
            f"{row[i] / all_of:.3f}" if all_of else "" for all_of in (columns[i], sum(row))
        )
        cells = (
            [cell(count, sum(row), i == j) for j, count in enumerate(row)]
            if len(names) <= MOST_CLASSES
            else []
        )
        about = {"name": names[i], "precision": precision, "recall": recall, "n": f"{sum(row):,}"}
        rows.append(about | {"short": middle(names[i]), "cells": cells})
    letters = [len(row["short"]) for row in rows]
    return {
        "rows": rows if len(names) <= MOST_CLASSES else [],
        "upright": sum(letters) > 60 and max(letters) > 4,
        "lists": confused(counts, names, rows) if len(names) > MOST_PRINTED else None,
    }


def confused(counts, names, rows):
    """The classes most often taken for others, and all classes, those of the lowest recall first."""
    wrong = [
        (-count, i, j)
        for i, row in enumerate(counts)
        for j, count in enumerate(row)
        if i != j and count
    ]
    pairs = [
        (names[i], names[j], f"{-count:,} of {rows[i]['n']}")
        for count, i, j in sorted(wrong)[:MOST_PAIRS]
    ]
    ranked = sorted(rows, key=lambda row: float(row["recall"] or 2))  # those without samples last
    ranked = [[row[key] for key in ("name", "precision", "recall", "n")] for row in ranked]
    return {"pairs": pairs, "lowest": ranked[:MOST_CLASSES], "others": ranked[MOST_CLASSES:]}


def cell(count, total, right):
    """A cell of the matrix: the count, and how strong its colour is; of the wrong ones a few are seen already."""
    share = count / total if total else 0
    strength = round(100 * (share if right else share ** (1 / 3)))
    return {
        "count": f"{count:,}" if count else "",
        "share": strength,
        "kind": "right" if right else "wrong",
    }


def hardest(seen):
    """[{"title", "samples", "pictures", and the table of them}] of the highest loss, and of the highest entropy."""
    left, groups = MOST_PICTURES, []
    titles = {
        "worst": "Worst: the highest loss",
        "uncertain": "Most uncertain: the highest entropy",
    }
    if seen.get("kind") == "regression":
        titles = {"worst": "Worst: the farthest off"}
    for name, title in titles.items():
        samples = []
        for sample in seen.get(name, ()):
            shown = sample_of(sample, seen, left)
            if shown is None:
                continue
            samples.append(shown)
            left -= len(shown["png"] or "")
        if samples:
            pictures = any(sample["png"] for sample in samples)
            numbered = not all(sample["named"] for sample in samples)
            group = {"title": title, "samples": samples, "pictures": pictures, "numbered": numbered}
            groups.append(group | table_of(samples))
    return groups


def table_of(samples):
    """The rows of samples that are no pictures."""
    more = list(dict.fromkeys(key for sample in samples for key in sample["columns"]))[
        :MOST_COLUMNS
    ]
    header = [
        "name",
        "true",
        "predicted",
        *["probability"] * any(sample["probability"] for sample in samples),
    ]
    rows = [
        [*(sample[key] for key in header), *(sample["columns"].get(key, "") for key in more)]
        for sample in samples
    ]
    header = ["", *header[1:], *more]
    numbers = [
        name
        for name, column in zip(header, zip(*rows, strict=True), strict=True)
        if all(map(has_number, column))
    ]
    return {"header": header, "rows": rows, "numbers": numbers}


def has_number(text):
    """Whether a cell of a table has a number, such as '1,234', '60.6 %' or '145.2 (the mean)', or nothing."""
    return (
        not text or re.fullmatch(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( %| \(the mean\))?", text) is not None
    )


def sample_of(sample, seen, left):
    """What is shown of a sample; None where it is not of the form that it should have."""
    true, predicted = sample.get("true"), sample.get("predicted")
    if seen["kind"] == "regression":
        if not is_pair([true, predicted]):
            return None
        true, predicted = ("; ".join(map(number, values)) for values in (true, predicted))
    else:
        if not all(is_count(label, len(seen["classes"]) - 1) for label in (true, predicted)):
            return None
        true, predicted = seen["classes"][true], seen["classes"][predicted]
    picture, columns = sample.get("png"), sample.get("columns")
    fits = isinstance(picture, str) and len(picture) <= left and is_png(picture)
    columns = list(columns.items())[:MOST_COLUMNS] if isinstance(columns, dict) else []
    probability = number_in(sample, "probability") if seen["kind"] == "classification" else None
    named = text_in(sample, "file") or (
        f"line {sample['line']}" if is_count(sample.get("line")) else None
    )
    return {
        "named": named is not None,
        "name": named or f"sample {sample['index']:,}",
        "true": true,
        "predicted": predicted,
        "right": sample["true"] == sample["predicted"],
        "probability": "" if probability is None else percent(probability),
        "png": picture if fits else None,
        "columns": {short(key): value_of(value) for key, value in columns},
    }


def value_of(value):
    return f"{value:.12g}" if is_number(value) and not isinstance(value, int) else short(value)


def is_png(text):
    """Whether this is base64 of a small PNG that has nothing but its pixels in it."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    if len(data) > MOST_PNG or data[:8] != b"\x89PNG\r\n\x1a\n":
        return False
    place, kinds = 8, []
    while place + 12 <= len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 8 : place + 8 + size]
        if data[place + 8 + size : place + 12 + size] != struct.pack(">I", zlib.crc32(kind + body)):
            return False
        if not kinds and (kind != b"IHDR" or size != 13):
            return False
        if not kinds and not all(0 < side <= MOST_SIDE for side in struct.unpack(">II", body[:8])):
            return False
        kinds.append(kind)
        place += 12 + size
    return (
        place == len(data)
        and set(kinds) <= {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
        and kinds[-1] == b"IEND"
    )


def regression(seen):
    """[{"title", "svg"}] of predicted against true and of the errors, of each of the first targets: units differ."""
    from stoker.runs import plots

    points, drawn, count = seen.get("points"), [], targets_of(seen)
    for i in range(min(count, MOST_TARGETS) if points else 0):
        pairs = [(true[i], predicted[i]) for true, predicted in points]
        errors = [predicted - true for true, predicted in pairs]
        of = f" of target {i + 1}" if count > 1 else ""
        off = f"{number(math.fsum(map(abs, errors)) / len(errors))} on average" if count > 1 else ""
        against = plots.scatter(
            f"against{i}", pairs, "true", "predicted", f"predicted against true{of}"
        )
        how_often = plots.histogram(
            f"errors{i}", errors, "predicted minus true", f"how often errors{of} come"
        )
        drawn.append({"title": f"predicted against true{of}", "off": "", "svg": against})
        drawn.append({"title": f"errors{of}", "off": off, "svg": how_often})
    return drawn


def shares(mapping, names, words):
    """[{"name", "share", "value", "colour"}] of the numbers of these names that are above 0; [] where there is none."""
    found = {
        name: value
        for name in names
        if (value := number_in(mapping, name)) is not None and value > 0
    }
    total = math.fsum(found.values())
    return [
        {
            "name": name,
            "share": f"{100 * value / total:.4f}",
            "percent": percent(value / total),
            "value": words(value),
            "colour": COLOURS[name],
        }
        for name, value in found.items()
    ]


def speed(result):
    """{"sentence", "numbers": [(what, value)]} on how fast it was."""
    names = ("flops_per_sample", "flops_per_second", "mfu", "peak_flops")
    each, rate, mfu, peak = (number_in(result, name) for name in names)
    numbers = []
    if each:
        numbers.append(("FLOPs a sample, forward and backward", amount(each)))
    if rate:
        numbers.append(("FLOP/s", amount(rate)))
    if mfu is not None:
        of = f" of {amount(peak)}FLOP/s" if peak else ""
        numbers.append(("of the device's peak (MFU)", f"{percent(mfu)}{of}"))
    return {"sentence": text_in(result, "speed"), "numbers": numbers}


def settings(config, typed):
    """{"changed": [(key, value, default)], "all": [...]} of the config, what differs from the defaults first."""
    given, usual = keys.flat(config), defaults_of(typed)
    given = dict(list(given.items())[:MOST_ENTRIES])
    rows = []
    for key, value in given.items():
        default = usual.get(key)
        if value == default and re.fullmatch(r"\$\{\w+\}", str(value)):
            continue  # it is another one's, which has its own line
        differs = bool(usual) and key != "run_dir" and (key not in usual or default != value)
        rows.append(
            {
                "key": short(key),
                "value": short(as_typed(value)),
                "changed": differs,
                "default": short(as_typed(default)) if usual.get(key, "???") != "???" else "(none)",
            }
        )
    chosen = [short(one) for one in typed if is_choice(one)]
    return {
        "changed": [row for row in rows if row["changed"]],
        "all": rows,
        "known": bool(usual),
        "chosen": chosen,
    }


def is_choice(override):
    """Whether this has chosen a file of a group in configs/, such as model=cnn."""
    match = re.fullmatch(r"(\w+)=(?:(\w+)|\[([\w,]+)\])", override)
    names = (match[2] or match[3]).split(",") if match else []
    return bool(names) and all((configs() / match[1] / f"{name}.yaml").is_file() for name in names)


def configs():
    return FOLDER


def defaults_of(typed):
    """{key: value} of this project's config with the groups that were chosen; {} where it has no such config."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    chosen = [one for one in typed if is_choice(one)]
    try:
        if GlobalHydra.instance().is_initialized():
            return keys.flat(OmegaConf.to_container(hydra.compose("train", chosen), resolve=False))
        with hydra.initialize_config_dir(str(configs())):
            return keys.flat(OmegaConf.to_container(hydra.compose("train", chosen), resolve=False))
    except (
        Exception
    ):  # Hydra raises what it likes; that nothing is marked is no reason for no report
        return {}


def versions(result):
    """[(what, value)] of the versions that the run had, and its revision."""
    found = result.get("versions")
    pairs = list(found.items())[:20] if isinstance(found, dict) else []
    rows = [(short(name), short(value)) for name, value in pairs if isinstance(value, str)]
    git = result.get("git")
    if (revision := text_in(git, "revision")) is not None:
        dirty = ", with changes that are not committed" if git.get("dirty") is True else ""
        rows.append(("git", f"{revision}{dirty}"))
    return rows


def commands(folder, typed, result):
    """[(what for, command)] of what one does with a run."""
    run, found = rundir.setting("run", folder), []
    ended = number_in(result, "steps") is not None and result.get("steps") == result.get(
        "total_steps"
    )
    if typed is not None:
        found = [
            (
                "train the same again",
                rundir.command([one for one in typed if not one.startswith("run_dir=")]),
            )
        ]
        found += [("go on with it", rundir.command(typed, rundir.setting("run_dir", folder)))] * (
            not ended
        )
    if not any(folder.glob("checkpoints/step_*.ckpt")):
        return found
    packages = trusted(typed)
    own = [f"trusted=[{','.join(packages)}]"] if packages else []
    return [
        *found,
        ("evaluate it", rundir.command(["task=evaluate", run, *own])),
        ("predict with it", rundir.command(["task=predict", run, "input=PATH", *own])),
        ("export it", rundir.command(["task=export", run, "format=onnx", *own])),
    ]


def trusted(typed):
    """The packages beside this project's whose code was typed to be trusted: the page says so where it names them."""
    return [name for name in own_packages(typed or []) if name]


def main(arguments):
    """`python -m stoker.runs.report DIR [--open]`: gives the exit code."""

    def draw(folder):
        try:
            path = write(folder)
        except UserError as error:
            raise UserError(
                str(error).replace("run_dir=", "")
            ) from None  # which nobody has typed here
        print(f"report   {path}")
        if "--open" in arguments:
            import webbrowser

            webbrowser.open(path.resolve().as_uri())

    usage = "python -m stoker.runs.report DIR, a run directory; with --open it is shown as well."
    names = [argument for argument in arguments if argument != "--open"]
    return subcommand.run(names, usage, lambda path: (path / "config.yaml").exists(), draw)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
