"""The command `stoker`, also available as `python -m stoker`."""

import gc
import time

from stoker.command import signals

START = time.perf_counter()


def main() -> None:
    """Run the command line and end the process with its exit code."""
    signals.install()  # before any slow import
    gc.disable()  # imports leave little garbage, and each collection would scan all their objects
    try:
        from stoker.tasks.main import run
    finally:
        gc.enable()
    run(START)


if __name__ == "__main__":
    main()
