"""The command `stoker`, also `python -m stoker`."""

import time

from stoker.command import signals

START = time.perf_counter()


def main() -> None:
    """Run the command line and end the process with its exit code."""
    signals.listen()  # before anything that takes time
    from stoker.tasks.main import run

    run(START)


if __name__ == "__main__":
    main()
