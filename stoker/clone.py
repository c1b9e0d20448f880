"""Make the folders `trainer`, `models` and `data` of a clone aliases of stoker's packages.

Without this, `import trainer` in a clone would load a second copy of every class. In an installed
package, nothing imports this module.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `trainer.callbacks` as `stoker.trainer.callbacks`."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(f"stoker.{module.__name__}")


def alias(package: str) -> None:
    """Make `package` an alias of `stoker.<package>`, including its modules."""
    sys.meta_path.insert(0, Alias(package))
    sys.modules[package] = importlib.import_module(f"stoker.{package}")
