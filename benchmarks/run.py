"""Prints one table of paired ratios: `python benchmarks/run.py --help`. It imports no torch; each contestant does."""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = {  # of the contestants that have to be installed
    "lightning": "lightning",
    "accelerate": "accelerate",
    "hf": "transformers",
    "ignite": "pytorch-ignite",
    "skorch": "skorch",
    "keras": "keras",
    "fastai": "fastai",
}
TITLES = {
    "train_s": "train s/epoch",
    "evaluation_s": "evaluation s/epoch",
    "sum_s": "sum s",
    "step_us": "us/step",
    "over_bare_us": "us/step over the bare loop",
    "first_step_s": "first step s",
    "first_epoch_s": "first epoch s",
    "total_s": "total s",
    "growth": "us/step / 1x",
    "peak_mib": "peak MiB",
    "rest_mib": "peak MiB without the data",
    "accuracy": "test accuracy",
}
DIGITS = {"growth": 3, "us": 1, "s": 3, "mib": 0}
# What is compared -> contestants before the peers, the one that is 1, whether peers come along, columns, the ratio's.
WHATS = {
    "epochs": (
        ["ours", "bare", "ideal"],
        "ours",
        True,
        ["train_s", "evaluation_s", "sum_s", "step_us", "first_step_s", "peak_mib", "accuracy"],
        "sum_s",
    ),
    "overhead": (["ours:ready", "bare:ready"], "bare:ready", True, ["step_us", "over_bare_us"], "step_us"),
    "startup": (["ours", "ours:one", "bare:one"], "bare:one", True, ["first_step_s"], "first_step_s"),
    "scale": (["ours", "ours:10x"], "ours", False, ["growth", "step_us", "peak_mib", "rest_mib"], "step_us"),
    "memory": (["ours", "bare"], "bare + data", False, ["peak_mib"], "peak_mib"),
    "folder": (["ours", "bare"], "ours", False, ["first_epoch_s", "sum_s", "total_s", "accuracy"], "total_s"),
}


def main():
    options = read_options()
    names, missing = contestants(options)
    with tempfile.TemporaryDirectory() as folder:
        if options.work in ("cifar", "folder"):
            copy_images(Path(folder, "images"), 1000)
            if "ours:10x" in names:
                copy_images(Path(folder, "images"), 500)
                copy_images(Path(folder, "images-10x"), 5000)
        rounds = []
        for number in range(options.rounds):
            shuffled = random.Random(number).sample(names, len(names))
            rounds.append({name: run_one(name, number, options, folder) for name in shuffled})
            derive(rounds[-1], options.what)
    _, base, _, columns, compared = WHATS[options.what]
    lines = [f"`python benchmarks/run.py {shlex.join(sys.argv[1:])}`".replace(" `", "`"), "", machine(options), ""]
    text = "\n".join(lines + table(rounds, missing, columns, compared, base)) + "\n"
    print(text)
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")


def read_options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=WHATS, default="epochs")
    parser.add_argument("--work", choices=("linear", "mlp", "cnn", "cifar", "folder"), help="default: mlp, or --what's")
    parser.add_argument("--contestants", nargs="+", metavar="NAME[:VARIANT+VARIANT]", help="ideal:channels_last, ...")
    parser.add_argument("--rounds", type=int, default=3, help="each has a seed of its own")
    parser.add_argument("--epochs", type=int, help="of which the first is a warm-up (default 3; folder 10)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", metavar="FILE", help="also write the table there, as Markdown")
    options = parser.parse_args()
    only = {"overhead": "linear", "startup": "linear", "memory": "mlp", "folder": "folder"}.get(options.what)
    if only and options.work not in (None, only):
        parser.error(f"--what {options.what} has a work of its own, {only}; leave --work out")
    options.work = only or options.work or "mlp"
    options.epochs = options.epochs or {"folder": 10, "startup": 1}.get(options.what, 3)
    if options.what != "startup":
        needed = "cifar10_jpeg" if options.work in ("cifar", "folder") else "MNIST/raw"
        if not Path(os.environ.get("DATA_ROOT", ""), needed).is_dir():
            parser.error(f"there is no {needed} below DATA_ROOT; set DATA_ROOT=DIR")
    return options


def contestants(options):
    """(the names to run, {name: why it is not there}) of what was asked, or of all; the base is always there."""
    usual, base, with_peers, _, _ = WHATS[options.what]
    suffix = {"overhead": ":ready", "startup": ":one"}.get(options.what, "")
    names = options.contestants
    if not names:
        names = usual + [name + suffix for name in DISTRIBUTIONS if with_peers]
        names += ["ideal:mallopt+channels_last", "replay"] if options.what == "epochs" else []
        names += ["ours:streamed", "ours:streamed+10x"] if options.what == "scale" and options.work == "folder" else []
    names = ([] if base in names or base not in usual else [base]) + list(dict.fromkeys(names))
    missing = {name: "not installed" for name in names if not installed(name)}
    if options.device == "cpu":
        missing |= {name: "only with --device cuda" for name in names if name == "replay"}
    return [name for name in names if name not in missing], missing


def installed(name):
    distribution = DISTRIBUTIONS.get(name.partition(":")[0])
    return distribution is None or version(distribution) is not None


def version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_one(label, seed, options, folder):
    """The numbers of one contestant, trained in a process of its own, or {"note": why there are none}."""
    name, _, variants = label.partition(":")
    variants = variants.split("+") if variants else []
    job = {"name": name, "variants": variants, "work": options.work, "epochs": options.epochs, "seed": seed}
    job |= {"precision": options.precision, "device": options.device}
    job |= {"workers": 2 if options.what == "folder" and name == "bare" else 0}
    job |= {"images": str(Path(folder, "images-10x" if "10x" in variants else "images"))}
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # some take a GPU wherever there is one
    with tempfile.TemporaryDirectory() as scratch:
        environment["XDG_CACHE_HOME"] = scratch  # no one finds what an earlier process has left
        job |= {"scratch": scratch, "started": time.time()}
        command = [sys.executable, "-m", "benchmarks.contestant", json.dumps(job)]
        if label == "ours" and options.what == "startup":
            clock = "+callbacks.clock._target_=benchmarks.ours.FirstStep"
            command = [sys.executable, "train.py", "max_steps=1", f"run_dir={scratch}/run", f"seed={seed}", clock]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = done.stdout.splitlines()
    results = [json.loads(line.removeprefix("result ")) for line in said if line.startswith("result ")]
    results += [
        {"first_step_s": float(line.split()[-1]) - job["started"]} for line in said if line[:10] == "first step"
    ]
    errors = [line for line in done.stderr.splitlines() if "Error" in line]  # a progress bar may come after it
    result = results[-1] if results else {"note": f"failed: {errors[-1] if errors else done.returncode}"}
    print(
        f"round {seed} {label}", {key: round_off(value) for key, value in result.items()}, file=sys.stderr, flush=True
    )
    return result


def round_off(value):
    return round(value, 4) if isinstance(value, float) else value


def derive(results, what):
    """Adds to a round what follows from two numbers of it."""
    for name, result in results.items():
        if "note" in result:
            continue
        if what == "overhead":
            result["over_bare_us"] = result["step_us"] - results["bare:ready"].get("step_us", math.nan)
        if what == "scale":
            once = results.get(name.removesuffix("10x").rstrip(":+"), {})
            result["growth"] = result["step_us"] / once.get("step_us", math.nan)
            result["rest_mib"] = result["peak_mib"] - result["data_mib"]
    if what == "memory" and "note" not in results["ours"] | results["bare"]:
        results["bare + data"] = {"peak_mib": results["bare"]["peak_mib"] + results["ours"]["data_mib"]}


def table(rounds, missing, columns, compared, base):
    """Markdown lines: medians over the rounds, and the median (least to most) of each round's ratio to `base`.

    `rounds`: [{contestant: {column: number} or {"note": text}}]. An accuracy is a mean with its deviation. The rows
    are in order of the ratio; `missing` and those without numbers in some round come last, with the reason.
    """
    notes, rows = dict(missing), []
    for name in rounds[0]:
        results = [results[name] for results in rounds]
        bases = [results[base] for results in rounds]
        reasons = [result["note"] for result in results + bases if "note" in result]
        if reasons:
            notes[name] = reasons[0]
            continue
        ratios = [result[compared] / one[compared] for result, one in zip(results, bases, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells = [cell(column, [result[column] for result in results]) for column in columns]
        rows.append((statistics.median(ratios), f"| {' | '.join([name, ratio, *cells])} |"))
    titles = [f"n = {len(rounds)}", f"{TITLES[compared]} / {base}", *(TITLES[column] for column in columns)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return lines + [row for _, row in sorted(rows)] + [f"| {name} | {notes[name]} |" for name in sorted(notes)]


def cell(column, values):
    if column == "accuracy":
        return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")
    return f"{statistics.median(values):,.{DIGITS[column.rpartition('_')[2]]}f}"


def machine(options):
    """A sentence on the processor, the versions and the GPU."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    versions = [f"{name} {version(name)}" for name in ("torch", *DISTRIBUTIONS.values()) if version(name)]
    if options.device == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        model += ", " + subprocess.run(query, capture_output=True, text=True).stdout.strip().replace("\n", ", ")
    threads = f"{os.cpu_count()} cores, {options.threads} thread{'s' * (options.threads != 1)}"
    return (
        f"{options.work}, {options.precision}, {options.epochs} epochs; {model}, {threads}; "
        f"Python {platform.python_version()}, {', '.join(versions)}."
    )


def copy_images(folder, each):
    """Copies the first `each` training images of every class, and all test images, of DATA_ROOT/cifar10_jpeg."""
    source = Path(os.environ["DATA_ROOT"], "cifar10_jpeg")
    for part, most in (("train", each), ("test", None)):
        for kind in sorted(path for path in (source / part).iterdir() if path.is_dir()):
            (folder / part / kind.name).mkdir(parents=True, exist_ok=True)
            for image in sorted(kind.glob("*.jpg"))[:most]:
                shutil.copyfile(image, folder / part / kind.name / image.name)


if __name__ == "__main__":
    main()
