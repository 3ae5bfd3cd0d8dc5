"""Import a package once it is used, where a library imports it and moorage seldom needs it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Unloaded(ModuleType):
    """Stands in `sys.modules` for a package, and gives way to it once a name of it is read.

    `importlib.util.LazyLoader` would not do: up to Python 3.12 its module is loaded by the next `import` of it.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_when_used(package: str) -> None:
    """Have this package imported once a name of it is read, although it is imported before that.

    A package that is not installed, or imported already, is left as it is. This changes the whole process: call it
    where moorage is the program, not in its libraries.
    """
    if package in sys.modules or (spec := importlib.util.find_spec(package)) is None:
        return
    sys.modules[package] = unloaded = _Unloaded(package)
    unloaded.__spec__, unloaded.__file__ = spec, spec.origin
