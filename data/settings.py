"""Check the settings of loaders without importing torch."""

from collections.abc import Mapping
from typing import Any

from stoker.trainer.settings import COUNT, Choice, Limit, Number

# A fraction of the samples (0.1), or a number of samples.
FRACTION_OR_COUNT = Number(above=0, optional=True)

LIMITS: Mapping[str, Limit] = {
    "batch_size": COUNT,
    "eval_batch_size": COUNT,
    "limit_train": FRACTION_OR_COUNT,
    "limit_val": FRACTION_OR_COUNT,
    "dataset.resident": Choice(("auto", True, False)),
    "dataset.workers": Number(whole=True, least=0, auto=True),
    "dataset.timeout": Number(least=0),
}


def check(key: str, value: Any) -> Any:
    """Return `value` if it is valid for `key`; otherwise raise UserError."""
    return LIMITS[key].check(key, value)
