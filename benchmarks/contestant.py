"""Run the contestant given as a JSON job on the command line, and print its numbers as JSON."""

import importlib
import json
import sys

from benchmarks.work import Clock, Job, NotOffered, mfu

HOME = {
    "ours": "ours",
    "bare": "by_hand",
    "ideal": "by_hand",
    "replay": "by_hand",
}  # the others are peers
HOME |= {"default": "saving", "large": "saving", "memory": "counts", "waits": "counts"}
HOME |= {"machine": "counts"}


def main():
    job = Job(**json.loads(sys.argv[1]))
    clock = Clock(job)
    home = "cifar" if job.work == "cifar10_94" else HOME.get(job.name, "peers")
    contestant = getattr(importlib.import_module(f"benchmarks.{home}"), job.name)
    try:
        made = contestant(job, clock)
    except NotOffered as reason:
        result = {"note": str(reason)}
    else:
        # Some contestants return their own numbers.
        result = made if isinstance(made, dict) else clock.results()
        if job.work == "resnet50":
            result["mfu"] = mfu(job, result["step_us"])
    print("\nresult", json.dumps(result), flush=True)  # a progress bar may not have ended its line


if __name__ == "__main__":  # spawned DataLoader workers import this file
    main()
