"""Compare contestants and print a table of paired ratios. Only the contestants' processes import torch."""

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
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = {  # {contestant: the package that it needs}
    "lightning": "lightning",
    "accelerate": "accelerate",
    "hf": "transformers",
    "ignite": "pytorch-ignite",
    "skorch": "skorch",
    "keras": "keras",
    "fastai": "fastai",
}
VARIANTS = [
    "ready",
    "one",
    "10x",
    "streamed",
    "writing",
    "channels_last",
    "mallopt",
    "onednn",
    "fused",
]
VARIANTS += ["timed", "saving", "100mb", "1gb"]
OURS = ("ours", "bare", "ideal", "replay", "default", "large")
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
    "fit_s": "training s",
    "cpu_s": "CPU s of the thread",
    "saves": "checkpoints",
    "blocked_s": "longest wait s",
    "delayed_s": "total wait s",
    "written_s": "written after s",
    "wall_s": "start to end s",
    "loss": "test loss",
    "rate": "samples/s",
    "mfu": "MFU",
    "device": "device",
    "processor": "processor",
    "versions": "versions",
    "outcome": "outcome",
    "before_bytes": "bytes before",
    "training_bytes": "in training",
    "left_bytes": "not returned",
    "waits_per_step": "waits per step",
}
DIGITS = {"growth": 3, "us": 1, "s": 3, "mib": 0, "saves": 0, "bytes": 0, "rate": 0, "mfu": 3}
DIGITS |= {"loss": 5, "step": 2}


class What(typing.NamedTuple):
    """What a table compares."""

    contestants: list  # contestants before the peers
    base: str  # the contestant whose ratio is 1
    peers: str | None  # variants of the peers, as in ":ready"; None to leave the peers out
    columns: list
    compared: str  # the column whose ratios are shown
    work: str | None = None  # the only possible work; None if there is a choice
    epochs: int = 3


TIMES = ["train_s", "evaluation_s", "sum_s", "step_us", "first_step_s", "peak_mib", "accuracy"]
WHATS = {
    "epochs": What(
        ["ours", "bare", "ideal", "ideal:mallopt+channels_last", "replay"],
        "ours",
        "",
        TIMES,
        "sum_s",
    ),
    "overhead": What(
        ["ours:ready", "bare:ready"],
        "bare:ready",
        ":ready",
        ["step_us", "over_bare_us"],
        "step_us",
        "linear",
    ),
    "startup": What(
        ["ours", "ours:one", "bare:one"],
        "bare:one",
        ":one",
        ["first_step_s"],
        "first_step_s",
        "linear",
        1,
    ),
    "scale": What(
        ["ours", "ours:10x"], "ours", None, ["growth", "step_us", "peak_mib", "rest_mib"], "step_us"
    ),
    "memory": What(["ours", "bare"], "bare + data", None, ["peak_mib"], "peak_mib", "mlp"),
    "folder": What(
        ["ours", "bare"],
        "ours",
        None,
        ["first_epoch_s", "sum_s", "total_s", "accuracy"],
        "total_s",
        "folder",
        10,
    ),
    "checkpoints": What(
        ["default", "default:saving"],
        "default",
        None,
        ["fit_s", "cpu_s", "step_us", "saves"],
        "fit_s",
        "digits",
        50,
    ),
    "blocking": What(
        ["large:100mb", "large:1gb"],
        "large:100mb",
        None,
        ["blocked_s", "delayed_s", "written_s", "step_us"],
        "blocked_s",
        "ballast",
    ),
}


def main():
    options = read_options()
    what = WHATS[options.what]
    names, missing = contestants(options)
    with tempfile.TemporaryDirectory() as folder:
        if options.work in ("cifar", "folder"):
            copy_images(Path(folder, "images"), 500 if options.what == "scale" else 1000)
            if options.what == "scale":
                copy_images(Path(folder, "images-10x"), 5000)
        rounds = []
        for number in range(options.rounds):
            shuffled = random.Random(number).sample(names, len(names))
            rounds.append({name: run_one(name, number, options, folder) for name in shuffled})
            derive(rounds[-1], options.what)
    command = shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]])
    lines = [f"`{command}`", "", machine(options), ""]
    lines += table(rounds, missing, what.columns, what.compared, what.base)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")


def read_options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=WHATS, default="epochs")
    parser.add_argument(
        "--work",
        choices=("linear", "mlp", "cnn", "cifar", "folder", "digits", "ballast"),
        help="default: mlp, or the work that --what requires",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        metavar="NAME[:VARIANT+VARIANT]",
        help="for example, ideal:channels_last",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="each uses a new seed")
    parser.add_argument(
        "--epochs", type=positive, help="including a warm-up epoch (default: 3; 10 for folder)"
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or another accelerator")
    parser.add_argument("--output", metavar="FILE", help="also write the table to FILE in Markdown")
    options = parser.parse_args()
    what = WHATS[options.what]
    if what.work and options.work not in (None, what.work):
        parser.error(f"--what {options.what} always uses --work {what.work}. Remove --work.")
    options.work = what.work or options.work or "mlp"
    options.epochs = options.epochs or what.epochs
    for name in options.contestants or []:
        if name.partition(":")[0] not in (*OURS, *DISTRIBUTIONS):
            parser.error(
                f"--contestants {name}: choose from ours, bare, ideal, replay, "
                f"{', '.join(DISTRIBUTIONS)}."
            )
        for variant in filter(None, name.partition(":")[2].split("+")):
            if variant not in VARIANTS and not (name.startswith("ours:") and "=" in variant):
                parser.error(
                    f"--contestants {name}: there is no variant {variant}. Choose from "
                    f"{', '.join(VARIANTS)}."
                )
    if options.output and not Path(options.output).absolute().parent.is_dir():
        parser.error(f"--output {options.output}: its folder does not exist.")
    if options.what not in ("startup", "checkpoints", "blocking"):
        needed = "cifar10_jpeg" if options.work in ("cifar", "folder") else "MNIST/raw"
        if not Path(os.environ.get("DATA_ROOT", ""), needed).is_dir():
            parser.error(f"there is no {needed} in DATA_ROOT. Set DATA_ROOT=DIR.")
    return options


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def contestants(options):
    """Return (names to run, {name: why it cannot run}) for the given names, or for all. The base is always included."""
    what = WHATS[options.what]
    names = options.contestants
    if names is None:
        names = what.contestants + [
            name + what.peers for name in DISTRIBUTIONS if what.peers is not None
        ]
        if options.what == "scale" and options.work == "folder":
            names = [*names, "ours:streamed", "ours:streamed+10x"]
    needed = [what.base] if what.base in what.contestants else what.contestants
    names = list(dict.fromkeys([*needed, *names]))
    missing = missing_contestants(names, options.device)
    return [name for name in names if name not in missing], missing


def missing_contestants(names, device):
    """Return {name: why it cannot run here}."""
    missing = {}
    for name in names:
        distribution = DISTRIBUTIONS.get(name.partition(":")[0])
        if distribution is not None and version(distribution) is None:
            missing[name] = "not installed"
        if device != "cuda" and (name == "replay" or "compile=graph" in name):
            missing[name] = "only with --device cuda"
    return missing


def version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_one(label, seed, options, folder):
    """Train one contestant in its own process. Return its numbers, or {"note": why there are none}."""
    job = make_job(label, seed, options)
    job |= {"workers": 2 if options.what == "folder" and job["name"] == "bare" else 0}
    job |= {"images": str(Path(folder, "images-10x" if "10x" in job["variants"] else "images"))}
    with tempfile.TemporaryDirectory() as scratch:
        # Each process has its own scratch folder, so that it finds no files from an earlier one.
        environment = make_environment(options.device, options.threads, scratch)
        job |= {"scratch": scratch, "started": time.time()}
        command = contestant_command(job)
        if label == "ours" and options.what == "startup":
            clock = "+callbacks.clock._target_=benchmarks.ours.FirstStep"
            command = [
                sys.executable,
                "train.py",
                "max_steps=1",
                f"run_dir={scratch}/run",
                f"seed={seed}",
                clock,
            ]
            command.append(f"device={options.device}")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    result = read_result(done, job["started"])
    shown = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()
    }
    print(f"round {seed} {label} {shown}", file=sys.stderr, flush=True)
    return result


def make_job(label, seed, options):
    name, _, variants = label.partition(":")
    job = {"name": name, "variants": variants.split("+") if variants else [], "seed": seed}
    for key in ("work", "epochs", "precision", "device"):
        job[key] = getattr(options, key)
    return job


def contestant_command(job):
    return [sys.executable, "-m", "benchmarks.contestant", json.dumps(job)]


def make_environment(device, threads, cache):
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["XDG_CACHE_HOME"] = str(cache)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # some contestants use any GPU that they find
    return environment


def read_result(done, started):
    """Return the numbers that the process printed, or why there are none."""
    for line in done.stdout.splitlines():
        kind, _, value = (
            line.rpartition(" ") if line.startswith("first step") else line.partition(" ")
        )
        if kind == "result":
            return json.loads(value)
        if kind == "first step":
            return {"first_step_s": float(value) - started}
    errors = [
        line for line in done.stderr.splitlines() if "Error" in line
    ]  # not just the last line, which may be a progress bar
    return {"note": f"failed: {errors[-1] if errors else f'exit code {done.returncode}'}"}


def derive(results, what):
    """Add the numbers of a round that are computed from two contestants."""
    for name, result in results.items():
        if "note" in result:
            continue
        if what == "overhead":
            result["over_bare_us"] = result["step_us"] - results["bare:ready"].get(
                "step_us", math.nan
            )
        if what == "scale":
            once = results.get(name.removesuffix("10x").rstrip(":+"), {})
            result["growth"] = result["step_us"] / once.get("step_us", math.nan)
            result["rest_mib"] = result["peak_mib"] - result["data_mib"]
    if what == "memory" and "note" not in results["ours"] | results["bare"]:
        results["bare + data"] = {
            "peak_mib": results["bare"]["peak_mib"] + results["ours"]["data_mib"]
        }


def table(rounds, missing, columns, compared, base):
    """Return Markdown lines with medians over the rounds, and the median (min to max) of each round's ratio to `base`.

    `rounds` is [{contestant: {column: number} or {"note": text}}]. An accuracy is a mean with its standard deviation.
    Rows are sorted by ratio. `missing` contestants, and those without numbers in some round, come last, with the
    reason. Without a `base`, there are no ratios.
    """
    notes, rows = dict(missing), []
    for number, name in enumerate(rounds[0]):
        results = [results[name] for results in rounds]
        bases = [results[base] for results in rounds] if base else []
        reasons = [result["note"] for result in results + bases if "note" in result]
        if reasons:
            notes[name] = reasons[0]
            continue
        cells = [cell(column, [result.get(column) for result in results]) for column in columns]
        rank = number
        if base:
            ratios = [
                result[compared] / one[compared] for result, one in zip(results, bases, strict=True)
            ]
            rank = statistics.median(ratios)
            cells.insert(0, spread(ratios))
        rows.append((rank, f"| {' | '.join([name, *cells])} |"))
    titles = [TITLES[column] for column in columns]
    if base:
        titles.insert(0, f"{TITLES[compared]} / {base}")
    titles.insert(0, f"n = {len(rounds)}")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return (
        lines
        + [row for _, row in sorted(rows)]
        + [f"| {name} | {notes[name]} |" for name in sorted(notes)]
    )


def spread(ratios):
    """Return the median, minimum and maximum, like "1.00 (0.98 to 1.02)"."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def cell(column, values):
    if None in values:
        return ""
    if isinstance(values[0], str):
        return values[0]
    if column == "accuracy":
        return f"{statistics.mean(values):.4f}" + (
            f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        )
    return f"{statistics.median(values):,.{DIGITS[column.rpartition('_')[2]]}f}"


def machine(options):
    """Return a line that describes the job, the processor, the GPU and the versions."""
    threads = f"{os.cpu_count()} cores, {options.threads} thread{'s' * (options.threads != 1)}"
    epochs = f"{options.epochs} epoch{'s' * (options.epochs != 1)}"
    return (
        f"{options.work}, {options.precision}, {epochs}; "
        f"{processor(options.device)}, {threads}; {versions()}."
    )


def processor(device):
    """Return the name of the processor and, for cuda, of the GPUs with their driver and memory."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), model
        )
    if device == "cuda" and shutil.which("nvidia-smi"):
        fields = "--query-gpu=name,driver_version,memory.total"
        query = ["nvidia-smi", fields, "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        model += ", " + done.stdout.strip().replace("\n", ", ")
    return model


def versions():
    names = ("torch", "torchvision", *DISTRIBUTIONS.values())
    installed = [f"{name} {version(name)}" for name in names if version(name)]
    return f"Python {platform.python_version()}, {', '.join(installed)}"


def copy_images(folder, each):
    """Copy the first `each` training images of each class, and all test images, from DATA_ROOT/cifar10_jpeg."""
    source = Path(os.environ["DATA_ROOT"], "cifar10_jpeg")
    for part, most in (("train", each), ("test", None)):
        for kind in sorted(path for path in (source / part).iterdir() if path.is_dir()):
            (folder / part / kind.name).mkdir(parents=True, exist_ok=True)
            for image in sorted(kind.glob("*.jpg"))[:most]:
                shutil.copyfile(image, folder / part / kind.name / image.name)


if __name__ == "__main__":
    main()
