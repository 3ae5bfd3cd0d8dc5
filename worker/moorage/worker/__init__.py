"""The worker, and what a service of your own needs to be one: `EmbeddedWorker`, and what its functions are given.

Names are imported when they are first used: a part of the worker needs only its own imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moorage.worker.agent.embed import EmbeddedWorker
    from moorage.worker.drivers.handler.context import HandlerCancelled, HandlerContext
    from moorage.worker.settings import WorkerSettings

__all__ = ["EmbeddedWorker", "HandlerCancelled", "HandlerContext", "WorkerSettings"]

_MODULE_OF: Final = {
    "EmbeddedWorker": "moorage.worker.agent.embed",
    "HandlerCancelled": "moorage.worker.drivers.handler.context",
    "HandlerContext": "moorage.worker.drivers.handler.context",
    "WorkerSettings": "moorage.worker.settings",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """Return all public names, also those not imported yet, for completion by Tab."""
    return sorted({*globals(), *__all__})
