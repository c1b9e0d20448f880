"""Check the settings of loaders without importing torch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stoker.trainer.errors import UserError, as_typed
from stoker.trainer.settings import COUNT, Choice, Limit, Number


@dataclasses.dataclass(frozen=True)
class FractionOrCount:
    """A fraction of the samples (0.1), a number of samples, or None."""

    def check(self, key: str, value: Any) -> Any:
        is_fraction = isinstance(value, float) and 0 < value <= 1
        is_count = type(value) is int and value > 0
        if value is None or is_fraction or is_count:
            return value
        raise UserError(
            f"{key}={as_typed(value)}: expected a fraction above 0 and at most 1.0, or a number of "
            "samples."
        )


LIMITS: Mapping[str, Limit] = {
    "batch_size": COUNT,
    "eval_batch_size": COUNT,
    "limit_train": FractionOrCount(),
    "limit_val": FractionOrCount(),
    "dataset.resident": Choice(("auto", True, False)),
    "dataset.workers": Number(whole=True, least=0, auto=True),
    "dataset.timeout": Number(least=0),
}


def check(key: str, value: Any) -> Any:
    """Return `value` if it is valid for `key`; otherwise raise UserError."""
    return LIMITS[key].check(key, value)
