"""Imports packages that only some commands need."""

from __future__ import annotations

import importlib
from typing import Any

from moorage.schemas.errors import MoorageError, problem


def optional(package: str, install: str) -> Any:
    """The package, imported. Raises `MoorageError` (failed-precondition) with what installs it where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        told = problem("failed-precondition", f"the package {package} is missing", next=f"pip install {install}")
        raise MoorageError(told) from None
