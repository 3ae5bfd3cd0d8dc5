"""The Python of the environment that is active here, and the scripts that it runs, as programs of a job."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from moorage.client.notebook import in_notebook
from moorage.schemas.capabilities import DRIVER_DEFAULT

#: variables with the folder of the active environment: of venv and uv, of conda
_PREFIXES: Final = ("VIRTUAL_ENV", "CONDA_PREFIX")
_PYTHON: Final = re.compile(r"python[\d.]*")
_HEAD_BYTES: Final = 4096
#: programs that a notebook was told of
_told: Final = set[str]()


def path_of(command: Sequence[str], driver: str | None, setup: str | None, also: Sequence[str] = ()) -> str:
    """Return the path of a command's program, if that is the Python of the active venv or conda environment, or a
    script of it, such as torchrun; else "". `also` are folders of other environments. A `setup` brings its own."""
    if not command or os.sep in command[0] or driver not in (None, DRIVER_DEFAULT) or setup is not None:
        return ""
    for prefix in (*filter(None, map(os.environ.get, _PREFIXES)), *also):
        folder = os.path.join(prefix, "bin")
        path = os.path.join(folder, command[0])
        if os.access(path, os.X_OK) and _is_pythons(path, folder):
            return path
    return ""


def words_of(program: str, path: str) -> str:
    """Return what a user is told of that."""
    return f"{program} is {path}, of the environment that is active here: it has to be on the worker, too"


def as_in_a_shell(what: Any, fields: Mapping[str, Any]) -> Any:
    """Return what a notebook submits as the command line would take it: a command with the path of its Python. Said
    once for each program. Scripts and services say themselves which Python they mean."""
    if not isinstance(what, list | tuple) or not what or not isinstance(what[0], str) or not in_notebook():
        return what
    if fields.get("image") is not None or fields.get("template") is not None:
        return what
    own = [sys.prefix] if sys.prefix != sys.base_prefix else []  # that of the kernel, which no shell has activated
    path = path_of(what, fields.get("driver"), fields.get("setup"), own)
    if not path:
        return what
    if path not in _told:
        _told.add(path)
        print(words_of(what[0], path))
    return [path, *what[1:]]


def _is_pythons(path: str, folder: str) -> bool:
    """Return whether a program is a Python, or a script that the Python of this folder runs."""
    return bool(_PYTHON.fullmatch(os.path.basename(path))) or head_of(path).startswith(f"#!{folder}/python".encode())


def head_of(path: str) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""
