"""Imports packages that only some commands need."""

from __future__ import annotations

import importlib
from typing import Any

from moorage.schemas.errors import MoorageError, problem


def optional(package: str, install: str) -> Any:
    """Import a package and return it. If it is missing, raises `MoorageError` (failed-precondition), which says how to
    install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        told = problem("failed-precondition", f"the package {package} is missing", next=f"pip install {install}")
        raise MoorageError(told) from None
