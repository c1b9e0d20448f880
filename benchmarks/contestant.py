"""Runs one contestant in this process, as the job on the command line says, and prints its numbers as JSON."""

import importlib
import json
import sys

from benchmarks.work import Clock, Job, NotOffered

HOME = {
    "ours": "ours",
    "bare": "by_hand",
    "ideal": "by_hand",
    "replay": "by_hand",
}  # the others are peers
HOME |= {"default": "saving", "large": "saving"}


def main():
    job = Job(**json.loads(sys.argv[1]))
    clock = Clock(job)
    try:
        made = getattr(
            importlib.import_module(f"benchmarks.{HOME.get(job.name, 'peers')}"), job.name
        )(job, clock)
    except NotOffered as reason:
        result = {"note": str(reason)}
    else:
        result = (
            made if isinstance(made, dict) else clock.results()
        )  # some have numbers of their own
    print("\nresult", json.dumps(result), flush=True)  # a progress bar may have left its line open


if (
    __name__ == "__main__"
):  # the workers of a DataLoader import this file where processes are spawned
    main()
