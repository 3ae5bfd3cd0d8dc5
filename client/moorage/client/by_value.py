"""Pickle a call by cloudpickle, with the code of modules that no other machine has.

cloudpickle names a function of an importable module by that module. Modules that are not installed, as those beside the
script, are sent by value instead. What comes back of their classes is of the same classes here.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from moorage.client.errors import rejected

_installed: Final = {
    Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")
}
#: modules that were looked at: whether they travel by value
_known: dict[str, bool] = {}
#: which modules cloudpickle takes by value is a state of the whole process
_turn: Final = threading.Lock()


def cloudpickle() -> Any:
    """Return the package cloudpickle. Raises `Rejected` where it is not installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        from moorage.schemas.optional import pip_install

        install = pip_install("cloudpickle")
        raise rejected("failed-precondition", "cloudpickle is not installed here", next=install) from None


def pickled(value: Any, what: str) -> bytes:
    """Return a value as a pickle. Raises `Rejected`, which calls it `what`, for one that cannot be pickled."""
    package = cloudpickle()
    with _turn, _by_value(package):
        try:
            blob: bytes = package.dumps(value, protocol=5)
        except Exception as error:  # of whatever it refers to
            raise rejected(
                "invalid-argument", f"cloudpickle cannot pickle {what}: {error}", found=repr(value)[:80],
                next="open files, clients and locks inside the function",
            ) from None  # fmt: skip
    return blob


def copy_cloudpickle(folder: Path) -> None:
    """Put cloudpickle itself into a folder: the host may not have it."""
    package = Path(cloudpickle().__file__).parent
    shutil.copytree(package, folder / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__"))


@contextlib.contextmanager
def _by_value(package: Any) -> Iterator[None]:
    own = package.list_registry_pickle_by_value()  # of the caller
    added = []
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if isinstance(module, ModuleType) and name not in own and sys.modules.get(name) is module and _is_local(module):
            package.register_pickle_by_value(module)
            added.append(module)
    try:
        yield
    finally:
        for module in added:
            package.unregister_pickle_by_value(module)


def _is_local(module: ModuleType) -> bool:
    """Return whether a module's file is below the script's folder or this one, and neither installed nor of moorage."""
    name = module.__name__
    if name not in _known:
        file = getattr(module, "__file__", None)
        _known[name] = False
        if file is not None and name != "__main__" and name.partition(".")[0] not in ("moorage", "cloudpickle"):
            above = set(Path(file).resolve().parents)
            near = {Path(each or ".").resolve() for each in (sys.path[0], "")}
            _known[name] = bool(near & above) and not _installed & above
    return _known[name]
