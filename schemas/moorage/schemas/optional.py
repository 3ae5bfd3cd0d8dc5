"""Packages that only some programs need: those of the extra `server`, and those of single commands."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Final

from moorage.schemas.errors import MoorageError, problem

#: modules of the extra `server` that a scheduler and a worker cannot do without
_OF_SERVER: Final = ("pynvml", "yaml")


def need_server(what: str) -> None:
    """Raise `MoorageError` (failed-precondition) with the command to run, unless the extra `server` is installed.

    `what` needs it: a command or a class, as the message names it.
    """
    missing = [module for module in _OF_SERVER if find_spec(module) is None]
    if missing:
        why = f"{what} needs more than a client's installation has: no {', '.join(missing)}"
        raise MoorageError(problem("failed-precondition", why, next="pip install 'moorage[server]'"))


def optional(package: str, install: str) -> Any:
    """Import a package and return it. If it is missing, raises `MoorageError` (failed-precondition), which says how to
    install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        told = problem("failed-precondition", f"the package {package} is missing", next=f"pip install {install}")
        raise MoorageError(told) from None
