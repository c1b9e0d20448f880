"""The command `stoker`, also `python -m stoker`."""

import time

from stoker.trainer import stopping

START = time.perf_counter()


def main() -> None:
    """Run the command line and end the process with its exit code."""
    stopping.listen()  # before anything that takes time
    from stoker.tasks.main import run

    run(START)


if __name__ == "__main__":
    main()
