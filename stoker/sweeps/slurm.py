"""Run the jobs of a sweep on Slurm with submitit, and manage their output and signals.

configs/hydra/launcher/submitit_slurm.yaml has the options of sbatch.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from stoker import project
from stoker.command import signals
from stoker.sweeps import progress
from stoker.sweeps.jobs import Job
from stoker.sweeps.launchers import SLURM
from stoker.trainer import stopping

POLL = 0.3  # seconds


class Slurm(Callback):
    """Hydra's callback for a sweep on Slurm. With another launcher, it does nothing.

    It is created in the sweep's process, and each job gets a copy.
    """

    is_used = False

    # In the sweep's process:

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if config.hydra.runtime.choices["hydra/launcher"] != SLURM:
            return
        self.is_used = True
        self.on_error = config.sweep.on_error
        self.argv = sys.argv
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Show the results. With sweep.on_error=stop, the first failure ends the sweep."""
        failed: list[Job] = []
        while not (failed and self.on_error == "stop"):
            time.sleep(POLL)
            failed = progress.show_ends()
        signals.code = failed[0].code
        os.kill(os.getpid(), signal.SIGTERM)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if not self.is_used:
            return
        progress.show_ends()
        if stopping.received is not None:
            print("Remove queued jobs with: scancel --name=stoker", file=sys.stderr, flush=True)

    # In a job's process:

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if not self.is_used:
            return
        sys.argv = self.argv
        project.enter()
        progress.redirect(Path(config.hydra.runtime.output_dir))
        progress.output.enter_context(contextlib.redirect_stderr(sys.stdout))
        signal.signal(signal.SIGTERM, signals.handle)
        self.requeue: Any = signal.signal(signal.SIGUSR2, signals.handle)
        signals.can_raise = True

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:
        if self.is_used and stopping.received is not None:
            # Submitit sends this signal to a job that times out or is preempted.
            if stopping.received == signal.SIGUSR2:
                self.requeue(signal.SIGUSR2, None)
            raise KeyboardInterrupt
