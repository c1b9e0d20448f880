"""Time the steps of a small GPT in Stoker, a tuned hand-written loop, and a loop like nanoGPT's.

`python benchmarks/gpt.py` prints the time of each loop relative to ours, as the median over short
turns. All loops run in one process, and the others take their turns inside a callback of our fit,
so other load on the machine affects all of them equally.
"""

import argparse
import contextlib
import functools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from stoker import Trainer
from stoker.command import tuning
from stoker.data.loader import make_loaders
from stoker.data.text import text
from stoker.models.gpt import GPT, take_rows
from stoker.trainer import schedules
from stoker.trainer.callbacks import Callback, NaNGuard

RATE = 1e-3
DECAY = 0.1
CLIP = 1.0
WARMUP = 10  # steps before the first turn


def model(job, classes):
    torch.manual_seed(0)
    return GPT((job.length,), classes, layers=job.layers, heads=4, width=job.width)


def groups(module):
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def rate(job, step):
    """Return the learning rate of a cosine schedule at this step."""
    return RATE * 0.5 * (1 + math.cos(math.pi * step / job.steps))


def tuned(job, data):
    """The fastest loop we know: resident tokens, windows that are views, fused AdamW, logits as rows for the loss."""
    module = model(job, data.num_classes).train()
    optimizer = torch.optim.AdamW(groups(module), lr=RATE, weight_decay=DECAY, fused=True)
    inputs, targets = data.train.tensors()
    step = 0
    while True:
        for indices in torch.randperm(len(inputs)).split(job.batch_size):
            x = inputs.index_select(0, indices)
            y = targets.index_select(0, indices)
            logits = module(x).transpose(1, 2)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = rate(job, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            yield


def nanogpt(job, data):
    """A loop like nanoGPT's train.py on a CPU, written from memory.

    Like nanoGPT, it opens a memory map for each batch, stacks random windows one by one, has
    micro-steps and a disabled scaler, fuses the optimizer only on CUDA, and reads the loss at each
    step, because the CPU recipe logs it at each step.
    """
    module = model(job, data.num_classes).train()
    optimizer = torch.optim.AdamW(groups(module), lr=RATE, weight_decay=DECAY)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    context = contextlib.nullcontext()

    def batch():
        tokens = np.memmap(job.tokens, np.uint16, "r")
        starts = torch.randint(len(tokens) - job.length, (job.batch_size,))
        x = [torch.from_numpy(tokens[i : i + job.length].astype(np.int64)) for i in starts]
        y = [torch.from_numpy(tokens[i + 1 : i + 1 + job.length].astype(np.int64)) for i in starts]
        return torch.stack(x), torch.stack(y)

    step = 0
    x, y = batch()
    while True:
        for group in optimizer.param_groups:
            group["lr"] = rate(job, step)
        for _ in range(1):  # gradient_accumulation_steps
            with context:
                logits = module(x).transpose(1, 2)
                loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.view(-1))
            x, y = batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        step += 1
        yield


class Turns(Callback):
    """Time `turn` steps of the fit, then as many of every other loop, in alternating order."""

    def __init__(self, loops, turn):
        self.loops = loops
        self.turn = turn
        self.seconds = {"ours": [], **{name: [] for name in loops}}

    def on_step_end(self, trainer):
        if trainer.step < WARMUP or (trainer.step - WARMUP) % self.turn:
            return
        if trainer.step == WARMUP:
            for loop in self.loops.values():
                for _ in range(WARMUP):
                    next(loop)
        else:
            self.seconds["ours"].append(time.perf_counter() - self.start)
            names = list(self.loops)
            for name in names[:: 1 if len(self.seconds["ours"]) % 2 else -1]:
                start = time.perf_counter()
                for _ in range(self.turn):
                    next(self.loops[name])
                self.seconds[name].append(time.perf_counter() - start)
        self.start = time.perf_counter()


def ours(job, data, turns):
    (loader, _, _), _ = make_loaders(data, batch_size=job.batch_size, drop_last=True)
    loss = torch.nn.CrossEntropyLoss()
    take_rows(loss)
    with Trainer(
        model(job, data.num_classes),
        loss,
        functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY),
        schedules.cosine,
        callbacks=[NaNGuard(), turns],
        max_steps=job.steps,
        max_grad_norm=CLIP,
        device="cpu",
    ) as trainer:
        trainer.fit(loader)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--turn", type=int, default=10, help="steps in a turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    job = parser.parse_args(arguments)
    job.steps = WARMUP + job.turns * job.turn
    torch.set_num_threads(job.threads)
    tuning.tune_process(torch.device("cpu"), ["allocator"], False)  # makes all loops faster
    with tempfile.TemporaryDirectory() as folder:
        job.tokens = f"{folder}/tokens.bin"
        np.random.default_rng(0).integers(65, size=200_000).astype("uint16").tofile(job.tokens)
        data = text(job.tokens, length=job.length, val_fraction=0, test_fraction=0)
        turns = Turns({"tuned": tuned(job, data), "nanogpt": nanogpt(job, data)}, job.turn)
        ours(job, data, turns)
    mine = turns.seconds["ours"]
    print(f"{job.layers} layers, width {job.width}, {job.batch_size} windows of {job.length}")
    print(f"ours     {statistics.median(mine) / job.turn * 1e3:.2f} ms per step, n = {len(mine)}")
    for name in turns.loops:
        ratios = [other / one for other, one in zip(turns.seconds[name], mine, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:8} {middle:.3f} times ours (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
