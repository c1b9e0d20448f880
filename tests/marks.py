"""A callback that leaves marks in the working directory, by which a test sees where a run is, and
holds it there.
"""

import time
from pathlib import Path

from stoker.trainer.callbacks import Callback


class Marks(Callback):
    """`steps` has a line for the fit's beginning and for each step; `evaluating.<step>` is there
    during an evaluation.

    Where there is a file `hold.<step>`, the evaluation waits until it is gone.
    """

    def on_fit_start(self, trainer):
        Path("steps").write_text(f"{trainer.step}\n")

    def on_step_end(self, trainer):
        with open("steps", "a") as file:
            file.write(f"{trainer.step}\n")

    def on_eval_start(self, trainer):
        Path(f"evaluating.{trainer.step}").touch()
        self.on_step_end(trainer)
        while Path(f"hold.{trainer.step}").exists():
            time.sleep(0.001)

    def on_eval_end(self, trainer):
        Path(f"evaluating.{trainer.step}").unlink()
