"""Run all tests, runs and measurements that need a GPU with one command, the most valuable first.

Each part is a separate process with a time limit. Its output is in DIR/log.txt, its numbers are a
line in DIR/results.jsonl, and the tables are in DIR/gpu.md. Running it again with the same DIR
continues where the last run stopped and retries what failed; --steps repeats the given steps. This
process does not import torch.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import run

LEAST = 5  # minimum seconds left to start a part
NOT_YET = "not measured yet"
MNIST = "MNIST/raw"
TUNED = "ideal:channels_last+fused"
GRAPH = "ours:compile=graph"
COMPILED = ("compile", "compile=true")  # suffixes of the labels that compile the model
SAME_ACCURACY = 0.001  # how much lower a mean accuracy may be and still count as the same
RUNS = [
    "compile=graph",
    "precision=fp16",
    "model=cnn deterministic=true",
    "max_steps=40 profile=true",
    "task=plan",
    "model=cnn micro_batch=auto",
    "max_steps=20 strategy=dp",
    "max_steps=60 compile=true",
]
OF_A_RUN = {  # {name in the tables: key in result.json}
    "rate": "samples_per_second",
    "loss": "test/loss",
    "accuracy": "test/acc",
}


class Step(typing.NamedTuple):
    """Measurements that belong together. Each label is a separate process, the most valuable first."""

    title: str
    labels: list[str]
    work: str = "mlp"
    base: str | None = None  # the contestant whose ratio is 1; None if there is no comparison
    compared: str = "step_us"
    precision: str = "fp32"
    epochs: int = 3  # the first of which is a warm-up
    trainings: int = 1  # training runs in one process, each with its own seed
    seconds: int = 60  # time limit for each label
    data: str = ""  # folder that must exist in DATA_ROOT


STEPS = {
    "env": Step("This machine", ["machine"]),
    "tests": Step("The GPU tests", ["tests/test_gpu.py"], seconds=200),
    "runs": Step(
        "The default run and its variants",
        ["train.py", *(f"train.py {arguments}" for arguments in RUNS)],
    ),
    "counts": Step(
        "Memory and waits while an MLP trains",
        ["memory", "waits", "waits:precision=fp16", "waits:compile=graph", "memory:compile=graph"],
    ),
    "mlp": Step(
        "MLP on MNIST, fp32 (TF32 where the GPU has it)",
        ["ours", GRAPH, "replay", "lightning", "ideal:fused", "bare"],
        base="ours",
        compared="sum_s",
        data=MNIST,
    ),
    "cifar": Step(
        "experiment=cifar10_94 and a hand-tuned loop",
        ["ours", "hand", "hand:compile", "ours:compile=true", GRAPH],
        work="cifar10_94",
        base="hand",
        precision="bf16",
        epochs=10,
        trainings=10,
        seconds=150,
        data="cifar10_jpeg",
    ),
    "resnet": Step(
        "ResNet-50 on random images, bf16, batch 256",
        ["ours:compile=true", f"{TUNED}+compile", "ours", TUNED, GRAPH],
        work="resnet50",
        base=TUNED,
        precision="bf16",
        epochs=4,
        seconds=110,
    ),
    "host": Step(
        "A linear model, whose steps are limited by the host",
        ["ours", GRAPH, "replay", "ideal:fused"],
        work="linear",
        base="ideal:fused",
        data=MNIST,
    ),
    "cnn": Step(
        "CNN on MNIST, bf16",
        ["ours", GRAPH, "replay", TUNED, "lightning"],
        work="cnn",
        base="ours",
        compared="sum_s",
        precision="bf16",
        data=MNIST,
    ),
}


class Part(typing.NamedTuple):
    """A process to run. `read` turns its output into numbers, or {"note": why there are none}."""

    step: str
    label: str
    command: list[str]
    seconds: float  # time limit
    read: typing.Callable[[subprocess.CompletedProcess], dict]
    seed: int = 0


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also kills the running part
    options = read_options()
    with tempfile.TemporaryDirectory() as scratch:
        environment = run.make_environment(options.device, options.threads, Path(scratch, "cache"))
        parts = []
        for name in options.steps or STEPS:
            reasons = left_out(name, options)
            for label, reason in reasons.items():
                print(f"{name} {label}: skipped, {reason}", flush=True)
            parts += [
                part for part in parts_of(name, options, scratch) if part.label not in reasons
            ]
        run_day(parts, options, environment)


def read_options(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or another accelerator")
    parser.add_argument("--steps", nargs="+", choices=STEPS, help="default: all unfinished steps")
    parser.add_argument("--limit", type=float, default=570, help="time limit in seconds")
    parser.add_argument("--rounds", type=run.positive, default=1, help="each uses a new seed")
    parser.add_argument("--threads", type=run.positive, help="default: one per core, at most 8")
    parser.add_argument("--output", metavar="DIR", default="gpu_day")
    parser.add_argument("--dry-run", action="store_true", help="use tiny sizes, to try the script")
    options = parser.parse_args(arguments)
    if options.threads is None:
        options.threads = 1 if options.dry_run else min(8, os.cpu_count() or 1)
    return options


def left_out(name, options):
    """Return {label: why it cannot run here}."""
    step = STEPS[name]
    root = os.environ.get("DATA_ROOT", "")
    needs_data = bool(step.data) and not options.dry_run
    if needs_data and not Path(root, step.data).is_dir():
        return dict.fromkeys(step.labels, f"there is no {step.data} in DATA_ROOT")
    reasons = run.missing_contestants(step.labels, options.device)
    for label in step.labels:
        if options.dry_run and label.endswith(COMPILED):
            reasons[label] = "a dry run skips this, because compiling takes minutes"
        if options.device == "cpu" and label.startswith("waits"):
            reasons[label] = "on a CPU, the host is the device"
    if name == "runs" and options.dry_run:
        reasons |= dict.fromkeys(step.labels[2:], "a dry run includes only the first two runs")
    return reasons


def parts_of(name, options, scratch):
    """Return the processes of a step."""
    step = STEPS[name]
    if name == "tests":
        command = [sys.executable, "-m", "pytest", *step.labels, "-o", "addopts=", "-q"]
        command += ["-p", "no:cacheprovider", "-rfEs", "--durations=8"]
        return [Part(name, step.labels[0], command, step.seconds, read_tests)]
    if name == "runs":
        return [run_of(label, options, scratch) for label in step.labels]
    settings = argparse.Namespace(
        work=step.work, epochs=step.epochs, precision=step.precision, device=options.device
    )
    size = {"trainings": step.trainings, "scratch": str(scratch)}
    if options.dry_run:
        size |= {"trainings": 1, "tiny": True, "precision": "fp32", "epochs": min(4, step.epochs)}
    has_rounds = step.base is not None and step.trainings == 1
    parts = []
    for seed in range(options.rounds if has_rounds else 1):
        for label in step.labels:
            command = run.contestant_command(run.make_job(label, seed, settings) | size)
            parts.append(Part(name, label, command, step.seconds, read_contestant, seed))
    return parts


def run_of(label, options, scratch):
    """Return the Part for a run of train.py, whose numbers come from its result.json."""
    arguments = label.removeprefix("train.py").split()
    if options.dry_run:
        arguments = [text for text in arguments if not text.startswith("max_steps=")]
        arguments.append("max_steps=4")
    folder = Path(tempfile.mkdtemp(dir=scratch), "run")
    command = [sys.executable, "train.py", f"device={options.device}", f"run_dir={folder}"]

    def read(done):
        if done.returncode != 0:
            return failed(done)
        result = {}
        with contextlib.suppress(FileNotFoundError):  # task=plan writes none
            result = json.loads(Path(folder, "result.json").read_text())
        figures = {name: result.get(key) for name, key in OF_A_RUN.items()}
        figures = {name: value for name, value in figures.items() if value is not None}
        return {"outcome": "done"} | figures

    return Part("runs", label, [*command, "report=false", *arguments], STEPS["runs"].seconds, read)


def read_tests(done):
    lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    failures = [line for line in lines[:-1] if line.startswith(("FAILED", "ERROR"))]
    return {"outcome": "; ".join([lines[-1].strip("= "), *failures])}


def read_contestant(done):
    result = run.read_result(done, 0)
    result.pop("first_step_s", None)  # unknown, because the start of the process was not recorded
    return result


def failed(done):
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    last = " ".join(lines[-2:])
    return {"note": f"exit code {done.returncode}: {last}"}


def run_day(parts, options, environment):
    """Run the parts until the time is up, writing the numbers and the tables after each part."""
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows = [row for row in read_rows(options) if "note" not in row["result"]]
    done = {(row["step"], row["label"], row["seed"]) for row in rows}
    for part in parts:
        if not options.steps and (part.step, part.label, part.seed) in done:
            continue
        left = options.limit - (time.monotonic() - began)
        if left < LEAST:
            print(f"no time left for {part.step} {part.label} and the parts after it")
            break
        start = time.monotonic()
        result = run_part(part, min(part.seconds, left), environment, output / "log.txt")
        wall_s = time.monotonic() - start
        print(f"{part.step} {part.label}: {wall_s:.0f} s, {result}", flush=True)
        row = {"step": part.step, "label": part.label, "device": options.device}
        row |= {"dry_run": options.dry_run, "command": shlex.join(part.command)}
        with Path(output, "results.jsonl").open("a") as file:
            for seed, figures in enumerate(result.get("seeds", [result]), part.seed):
                row |= {"seed": seed, "result": {"wall_s": wall_s} | figures}
                print(json.dumps(row), file=file)
        Path(output, "gpu.md").write_text("\n".join(report(options)) + "\n")
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s in total; the tables are in {output / 'gpu.md'}")


def run_part(part, seconds, environment, log_file):
    """Run the process and return its numbers. When the time is up, kill it and its children."""
    with log_file.open("a+b") as log:
        title = f"\n## {part.step} {part.label}\n"
        command = f"$ {shlex.join(part.command)}\n"
        log.write((title + command).encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            part.command,
            cwd=run.ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"note": f"stopped after {seconds:.0f} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(start)
        text = log.read().decode(errors="replace")
    return part.read(subprocess.CompletedProcess(part.command, code, text, text))


def read_rows(options):
    """Return the rows of results.jsonl that belong to this device."""
    file = Path(options.output, "results.jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    kind = (options.device, options.dry_run)
    return [row for row in rows if (row["device"], row["dry_run"]) == kind]


def report(options):
    """Return the lines of gpu.md."""
    results = {}  # {step: {label: {seed: numbers}}}, from the latest run of each part
    for row in read_rows(options):
        of_step = results.setdefault(row["step"], {})
        of_step.setdefault(row["label"], {})[row["seed"]] = row["result"]
    command = f"python benchmarks/gpu.py --device {options.device}"
    title = "# GPU day"
    if options.dry_run:
        command += " --dry-run"
        title = "# Dry run of a GPU day: the numbers are meaningless"
    lines = [title, "", *goal_table(results)]
    for name, step in STEPS.items():
        lines += ["", f"## {step.title}", f"`{command} --steps {name}`", ""]
        lines += step_table(step, results.get(name, {}), left_out(name, options))
    return lines


def step_table(step, results, reasons):
    """Return a table with the numbers of each label, or why there are none."""
    notes = dict(reasons)
    for label in step.labels:
        figures = results.get(label, {})
        failures = [result["note"] for result in figures.values() if "note" in result]
        if failures or not figures:
            notes[label] = reasons.get(label) or (failures or [NOT_YET])[0]
    names = [label for label in step.labels if label not in notes]
    rounds = pair(results, names)
    keys = {key for figures in rounds[0].values() for key in figures}
    columns = [column for column in run.TITLES if column in keys]
    base = step.base if step.base in names else None
    return run.table(rounds, notes, columns, step.compared, base)


def pair(results, names):
    """Return [{name: numbers}], with one entry for each seed that all names have; [{}] without names."""
    if not names:
        return [{}]
    seeds = set(results[names[0]])
    for name in names:
        seeds &= set(results[name])
    return [{name: results[name][seed] for name in names} for seed in sorted(seeds)]


class Goal(typing.NamedTuple):
    """A limit on the ratio between the fastest contestants whose labels begin with `over` and `under`."""

    title: str
    step: str
    over: str
    under: str
    column: str
    least: float = 0
    most: float = float("inf")
    n: int = 1  # minimum number of pairs; above 1, accuracies are compared as well

    def judge(self, results):
        """Return (what was measured, "yes" or "no")."""
        names = [fastest(results, label, self.column) for label in (self.over, self.under)]
        if None in names:
            return NOT_YET, ""
        rounds = pair(results, names)
        over = [figures[names[0]] for figures in rounds]
        under = [figures[names[1]] for figures in rounds]
        ratios = [one[self.column] / two[self.column] for one, two in zip(over, under, strict=True)]
        text = f"{run.spread(ratios)}, {' / '.join(names)}, n = {len(ratios)}"
        is_in_range = self.least <= statistics.median(ratios) <= self.most
        is_met = is_in_range and len(ratios) >= self.n
        if self.n > 1:
            ours = [figures["accuracy"] for figures in over]
            theirs = [figures["accuracy"] for figures in under]
            text += f"; accuracy {run.cell('accuracy', ours)} and {run.cell('accuracy', theirs)}"
            is_same = statistics.mean(ours) >= statistics.mean(theirs) - SAME_ACCURACY
            is_met = is_met and is_same
        if "mfu" in over[0]:
            mfu = statistics.median(figures["mfu"] for figures in over)
            text += f"; MFU {mfu:.3f}"
        return text, "yes" if is_met else "no"


class Zero(typing.NamedTuple):
    """A count that must be 0 for all labels of a step."""

    title: str
    step: str
    column: str

    def judge(self, results):
        """Return (what was measured, "yes" or "no")."""
        counts = {}
        for label, figures in results.items():
            if self.column in figures[0]:
                counts[label] = figures[0][self.column]
        if not counts:
            return NOT_YET, ""
        texts = [f"{label} {count:g}" for label, count in counts.items()]
        verdict = "no" if any(counts.values()) else "yes"
        return ", ".join(texts), verdict


EQUAL_CIFAR = "cifar10_94, ours / hand loop at the same accuracy <= 1.0 (n >= 10)"
RESNET = "ResNet-50 bf16, ours / bare compiled <= 1.02, with MFU"
GOALS = [
    Goal("MLP epoch, Lightning / ours >= 50", "mlp", "lightning", "ours", "sum_s", least=50),
    Goal("MLP step, ours / raw replay <= 1.05", "mlp", "ours", "replay", "step_us", most=1.05),
    Goal(EQUAL_CIFAR, "cifar", "ours", "hand", "step_us", most=1.0, n=10),
    Goal(RESNET, "resnet", "ours", f"{TUNED}+compile", "step_us", most=1.02),
    Zero("no synchronization per step", "counts", "waits_per_step"),
    Zero("all memory returned by close()", "counts", "left_bytes"),
]


def fastest(results, prefix, column):
    """Return the label with this prefix that has the lowest median, or None."""
    medians = {}
    for label, figures in results.items():
        values = [result[column] for result in figures.values() if column in result]
        if values and label.startswith(prefix):
            medians[label] = statistics.median(values)
    return min(medians, key=medians.get, default=None)


def goal_table(results):
    """Return the goals and what was measured, as Markdown lines."""
    lines = ["| goal | measured | met |", "|---|---|---|"]
    for goal in GOALS:
        measured, verdict = goal.judge(results.get(goal.step, {}))
        lines.append(f"| {goal.title} | {measured} | {verdict} |")
    return lines


if __name__ == "__main__":
    main()
