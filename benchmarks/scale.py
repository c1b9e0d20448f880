"""The cost of ddp and fsdp: a table calculated from formulas, or measurements on this machine (`--measure`).

docs/scale.md explains the formulas. Calculating the table does not need torch.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORLDS = (1, 2, 4, 8, 16, 64, 256, 1024)
BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel sends at once


class Model(typing.NamedTuple):
    parameters: float
    flops: float  # FLOPs of one step: the forward and backward passes of the whole batch
    batch: str
    units: int  # units that fsdp gathers one after another, assumed to be of equal size


class Cluster(typing.NamedTuple):
    """Assumed properties of each device, and of the links inside a machine and between machines."""

    flops: float = 400e12  # per second: 40% of an H100's 989e12 in bf16
    inside: float = 450e9  # bytes per second in each direction: NVLink 4
    outside: float = 50e9  # bytes per second: 400 Gb/s InfiniBand for each device
    devices: int = 8  # devices per machine
    latency_inside: float = 3e-6  # seconds per message
    latency_outside: float = 10e-6

    def link(self, world):
        """Return (bytes per second, seconds per message) of the slowest link in a ring of all devices."""
        alone = world <= self.devices
        return (self.inside, self.latency_inside) if alone else (self.outside, self.latency_outside)


MODELS = {
    # 4.1e9 multiply-adds per image of 224x224 (He 2016, arXiv 1512.03385), times three for forward and backward.
    "ResNet-50": Model(25.6e6, 3 * 2 * 4.1e9 * 4096, "4,096 images", 10),
    # 6 P per token (Kaplan 2020, arXiv 2001.08361), plus 2 P because the blocks are recomputed.
    "7B": Model(7e9, 8 * 7e9 * 2**22, "4,194,304 tokens", 33),
}


def sent(strategy, parameters, world, parts=1):
    """Return the bytes that each device sends (and receives) in a step of `parts` micro-batches, with rings and fp32."""
    share = (world - 1) / world * 4 * parameters
    return {"ddp": 2, "fsdp": 2 * parts + 1}[strategy] * share


def messages(strategy, parameters, world, units, parts=1):
    """Return the number of sequential messages in a step."""
    if strategy == "ddp":  # assumes NCCL's trees, which replace rings when there are many devices
        return math.ceil(4 * parameters / BUCKET) * 2 * math.ceil(math.log2(world))
    return (2 * parts + 1) * units * (world - 1)


def held(strategy, parameters, world, units, ema=False):
    """Return the bytes of weights, gradients, AdamW's moments and an EMA on each device, without activations."""
    numbers = 4 * (4 + ema) * parameters
    if strategy == "ddp" or world == 1:
        return numbers
    return (
        numbers / world + 3 * 4 * parameters / units
    )  # the current unit, the next one, and the gradients of one


def seconds(strategy, model, world, cluster):
    """Return (seconds of computing, seconds of sending) for a step."""
    speed, latency = cluster.link(world)
    number = messages(strategy, model.parameters, world, model.units)
    return model.flops / world / cluster.flops, sent(
        strategy, model.parameters, world
    ) / speed + number * latency


def table(model, cluster):
    """Yield Markdown lines with the calculated cost of a step for each number of devices."""
    titles = ["GB sent", "ms", "efficiency", "GB held"]
    titles = [
        "devices",
        "compute ms",
        *(f"{strategy}: {title}" for strategy in ("ddp", "fsdp") for title in titles),
    ]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for world in WORLDS:
        cells = [f"{world:,}", f"{1000 * seconds('ddp', model, world, cluster)[0]:,.1f}"]
        for strategy in ("ddp", "fsdp"):
            computing, sending = seconds(strategy, model, world, cluster)
            worst, best = computing / (computing + sending), computing / max(computing, sending)
            cells += [
                f"{sent(strategy, model.parameters, world) / 1e9:,.2f}",
                f"{1000 * sending:,.1f}",
            ]
            cells += [f"{worst:.2f} to {best:.2f}"]
            cells += [f"{held(strategy, model.parameters, world, model.units) / 1e9:,.2f}"]
        yield f"| {' | '.join(cells)} |"


# measurements on this machine, with gloo between the processes


RUNS = {  # (processes, threads of each, strategy)
    "1 process, 1 thread": (1, 1, "single"),
    "1 process, 2 threads": (1, 2, "single"),
    "ddp, 2 processes": (2, 1, "ddp"),
    "fsdp, 2 processes": (2, 1, "fsdp"),
}


def measure(work, batch_size, steps, rounds):
    """Yield Markdown lines with medians over the rounds. Each round has every run once, in random order."""
    results = {name: [] for name in RUNS}
    for number in range(rounds):
        for name in random.Random(number).sample(list(RUNS), len(RUNS)):
            processes, threads, strategy = RUNS[name]
            job = json.dumps([work, strategy, batch_size, steps, number])
            start = (
                ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
                if processes > 1
                else []
            )
            command = [sys.executable, *start, str(Path(__file__)), "--job", job]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number} {name} {results[name][-1]}", file=sys.stderr, flush=True)
    base = [result["seconds"] for result in results["1 process, 1 thread"]]
    yield "| | ms/step | time / 1 process, 1 thread | MB/step sent | MB/step by the formula |"
    yield "|---" * 5 + "|"
    for name, (processes, _, strategy) in RUNS.items():
        ratios = [result["seconds"] / one for result, one in zip(results[name], base, strict=True)]
        time_of_step = 1000 * statistics.median(result["seconds"] for result in results[name])
        parameters = results[name][0]["parameters"]
        expected = processes * sent(strategy, parameters, processes) if processes > 1 else 0
        counted = statistics.median(result["bytes"] for result in results[name])
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        yield f"| {name} | {time_of_step:.2f} | {spread} | {counted / 1e6:.2f} | {expected / 1e6:.2f} |"


def run_job(work, strategy, batch_size, steps, seed):
    """Train on random images of 1x28x28, and print the seconds per step and the bytes that the machine sent per step."""
    import functools

    import torch

    from stoker import Trainer
    from stoker.data.datasets import synthetic
    from stoker.data.loader import DeviceLoader
    from stoker.models.cnn import CNN
    from stoker.models.mlp import MLP
    from stoker.trainer import launch, parallel
    from stoker.trainer.callbacks import Callback

    marks = []

    class Clock(Callback):
        def on_step_end(self, trainer):
            if trainer.step in (steps // 4, steps):
                marks.append((time.perf_counter(), bytes_sent()))

    torch.manual_seed(seed)
    model = {"mlp": MLP, "cnn": CNN}[work]((1, 28, 28), 10)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer, loss = functools.partial(torch.optim.AdamW, lr=1e-3), torch.nn.CrossEntropyLoss()
    settings = {"device": "cpu", "max_steps": steps, "log_every": 50, "strategy": strategy}
    trainer = Trainer(model, loss, optimizer, callbacks=[Clock()], **settings)
    data = synthetic(n=8 * batch_size, in_shape=(1, 28, 28), num_classes=10)
    trainer.fit(DeviceLoader(data, "train", batch_size, shuffle=True, drop_last=True))
    (start, before), (end, after) = marks
    counted = steps - steps // 4
    if launch.is_first():
        result = {
            "seconds": (end - start) / counted,
            "bytes": (after - before) / counted,
            "parameters": parameters,
        }
        print(json.dumps(result))
    parallel.leave()


def bytes_sent():
    """Return the bytes sent over the loopback interface, which gloo uses on one machine. Linux only."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(
        int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="compare two processes with one on this machine (Linux)",
    )
    parser.add_argument("--work", choices=("mlp", "cnn"), default="mlp")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return run_job(*json.loads(options.job))
    if not options.measure:
        for name, model in MODELS.items():
            print(f"{name}: {model.parameters:,.0f} parameters, a batch of {model.batch}\n")
            print("\n".join([*table(model, Cluster()), ""]))
        return None
    print(
        f"{options.work}, batch {options.batch_size}; {platform.machine()}, {os.cpu_count()} cores\n"
    )
    for line in measure(options.work, options.batch_size, options.steps, options.rounds):
        print(line)
    return None


if __name__ == "__main__":
    main()
