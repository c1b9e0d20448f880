"""All built-in callbacks, and the base class for your own."""

from stoker.trainer.averages import EMA as EMA
from stoker.trainer.averages import Lookahead as Lookahead
from stoker.trainer.callback import Callback as Callback
from stoker.trainer.monitoring import EarlyStopping as EarlyStopping
from stoker.trainer.monitoring import Monitor as Monitor
from stoker.trainer.monitoring import TimeLimit as TimeLimit
from stoker.trainer.nonfinite import NaNGuard as NaNGuard
from stoker.trainer.progress import Progress as Progress
from stoker.trainer.saving import Checkpoint as Checkpoint
