"""Whether this installation is compiled: `HATCH_BUILD_HOOKS_ENABLE=1 pip install .`, see deploy/compiled."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec


def is_compiled() -> bool:
    """True where the scheduling core is machine code; it decides the same, and is only faster."""
    found = find_spec("moorage.scheduler.core.engine")
    return found is not None and (found.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
