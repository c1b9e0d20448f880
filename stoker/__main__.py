"""The command `stoker`, also `python -m stoker`."""

import sys
import time

from stoker.command import signals

START = time.perf_counter()


def main() -> None:
    """Run the command line and end the process with its exit code."""
    signals.listen()  # before anything that takes time
    from stoker.tasks.main import run

    # Like `python -m`, find the modules of the folder that the command runs in, as in
    # model._target_=mine.Net.
    if "" not in sys.path:
        sys.path.insert(0, "")
    run(START)


if __name__ == "__main__":
    main()
