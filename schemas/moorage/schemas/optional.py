"""Packages that only some programs need: those of the extra `server`, and those of single commands.

An error about one that is missing names the command that installs it here: into the Python that runs, from where
moorage itself came. No index need have moorage: it may be a clone, or a wheel that somebody copied.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moorage.schemas.errors import MoorageError, problem

if TYPE_CHECKING:
    from importlib.metadata import Distribution

#: modules of the extra `server` that a scheduler and a worker cannot do without
_OF_SERVER: Final = ("pynvml", "yaml")


def need_server(what: str) -> None:
    """Raise `MoorageError` (failed-precondition) with the command to run, unless the extra `server` is installed.

    `what` needs it: a command or a class, as the message names it.
    """
    missing = [module for module in _OF_SERVER if find_spec(module) is None]
    if missing:
        why = f"{what} needs more than a client's installation has: no {', '.join(missing)}"
        error = MoorageError(problem("failed-precondition", why, next=install_extra("server")))
        error.add_note(f"fix: {error.problem.next}")  # who imports a package sees a traceback
        raise error


def optional(package: str, *, extra: str = "", distribution: str = "") -> Any:
    """Import a package of an extra of moorage, or of a distribution, and return it.

    If it is missing, raises `MoorageError` (failed-precondition), which says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        install = install_extra(extra) if extra else pip_install(distribution)
        raise MoorageError(problem("failed-precondition", f"the package {package} is missing", next=install)) from None


def pip_install(*wanted: str) -> str:
    """Return the command that installs this into the environment of Python that runs, whatever PATH has."""
    import shlex
    import shutil

    words = shlex.join(wanted)
    if find_spec("pip") is None:  # as in an environment that uv made
        return f"uv pip install --python {shlex.quote(_from_here(sys.executable))} {words}"
    beside = os.path.join(sys.prefix, "bin", "pip")
    if shutil.which("pip") == beside:
        return f"pip install {words}"
    if os.access(beside, os.X_OK):
        return f"{shlex.quote(_from_here(beside))} install {words}"
    return f"{shlex.quote(_from_here(sys.executable))} -m pip install {words}"


def install_extra(name: str) -> str:
    """Return the command that installs an extra of moorage here: from its clone, its file or its index.

    If its file is gone, the command names the packages of the extra.
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution("moorage")
    except PackageNotFoundError:  # its sources are on Python's path
        return _install_moorage(f"{_from_here(str(Path(__file__).resolve().parents[3]))}[{name}]")
    source = json.loads(found.read_text("direct_url.json") or "{}")
    url = source.get("url", "")
    if not url:
        return _install_moorage(f"moorage[{name}]=={found.version}")
    if not url.startswith("file:"):
        vcs = source.get("vcs_info")
        return _install_moorage(f"moorage[{name}] @ " + (f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url))
    from urllib.parse import unquote, urlsplit

    path = unquote(urlsplit(url).path)
    if not os.path.exists(path):
        return pip_install(*_of_extra(found, name))
    is_editable = source.get("dir_info", {}).get("editable", False)
    return _install_moorage(f"{_from_here(path)}[{name}]", *(["-e"] if is_editable else []))


def _install_moorage(wanted: str, *options: str) -> str:
    import shlex

    if "archive-v0" in Path(sys.prefix).parts:  # uvx made it: what is installed there, the next run does not have
        return f"uvx --from {shlex.quote(wanted)} moorage …"
    return pip_install(*options, wanted)


def _of_extra(found: Distribution, name: str) -> list[str]:
    """Return the requirements of an extra, as moorage's metadata has them: without markers and without other extras."""
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(name)}['"]""")
    split = (requirement.partition(";") for requirement in found.requires or ())
    return [
        wanted.strip() for wanted, _, markers in split if marker.search(markers) and not wanted.startswith("moorage")
    ]


def _from_here(path: str) -> str:
    """Return a path as one types it in this folder: relative below it, as a path that pip takes for no name."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return path
    if not f"{path}/".startswith(f"{here}/"):
        return path
    below = os.path.relpath(path, here)
    return below if os.sep in below or below == "." else f"./{below}"
