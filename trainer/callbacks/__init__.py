"""The built-in callbacks, and the base class for your own."""

from stoker.trainer.callback import Callback as Callback
from stoker.trainer.callbacks.averages import EMA as EMA
from stoker.trainer.callbacks.averages import Lookahead as Lookahead
from stoker.trainer.callbacks.freezing import Freeze as Freeze
from stoker.trainer.callbacks.monitoring import EarlyStopping as EarlyStopping
from stoker.trainer.callbacks.monitoring import Monitor as Monitor
from stoker.trainer.callbacks.monitoring import TimeLimit as TimeLimit
from stoker.trainer.callbacks.nonfinite import NaNGuard as NaNGuard
from stoker.trainer.callbacks.progress import Progress as Progress
from stoker.trainer.callbacks.saving import Checkpoint as Checkpoint
