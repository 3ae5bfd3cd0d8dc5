"""The verbs' functions by name, ready for cyclopts, each imported when it is first asked for.

Importing cyclopts costs as much processor time as NATS itself, so the modules of the verbs do not: their annotations
are text until somebody reads them, and who reads them comes by here and finds `Parameter` in place. `quick` runs the
plain forms of the commonest verbs without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from moorage.cli.main import VERBS

_WHERE: Final = {verb.name: verb.where for verbs in VERBS.values() for verb in verbs}
#: dataclasses whose fields are options, and the group of the help that they are
_GROUPS: Final = {"Options": "Common", "JobFlags": "Job"}


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, function = _WHERE[name].partition(":")
    found = importlib.import_module(module)
    _make_ready(found)
    _make_ready(importlib.import_module("moorage.cli.options"))
    act: Callable[..., Any] = getattr(found, function)
    return act


def _make_ready(module: ModuleType) -> None:
    """Put `Parameter` where the annotations of the module, and of the groups that it uses, look for it."""
    from cyclopts import Parameter

    vars(module).setdefault("Parameter", Parameter)
    for name, group in _GROUPS.items():
        kind = vars(module).get(name)
        if kind is not None and "__cyclopts__" not in vars(kind):
            vars(sys.modules[kind.__module__]).setdefault("Parameter", Parameter)
            Parameter(name="*", group=group)(kind)
