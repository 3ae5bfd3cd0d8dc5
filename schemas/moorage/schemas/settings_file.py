"""Finds the settings file. A module of its own, so that a one-shot command imports nothing else to find it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FILE_VARIABLE: Final = "MOORAGE_SETTINGS"
FILE_NAME: Final = "moorage.toml"
SYSTEM_FOLDER: Final = "/etc/moorage"
#: set for the processes of a `moorage up`, which is a fleet of its own on whatever site's machine it runs
OWN_FLEET_VARIABLE: Final = "MOORAGE_OWN_FLEET"


def find_file(given: str | Path | None = None, env: Mapping[str, str] | None = None) -> Path | None:
    """Return the settings file: the one given, else $MOORAGE_SETTINGS, else `moorage/moorage.toml` in the user's
    configuration folder, else the one in /etc/moorage; None if there is none. The first two need not exist.

    For a process of a `moorage up` (`OWN_FLEET_VARIABLE`) the last one is none: it is the site's of this machine.

    A file in the current folder is never read: a checkout must not choose the server that a command talks to. `moorage
    up`, whose state is in the folder as well, does read it: see `file_here`.
    """
    env = os.environ if env is None else env
    if given:
        return Path(given)
    if named := env.get(FILE_VARIABLE):
        return Path(named)
    base = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".config")
    places = [os.path.join(base, "moorage", FILE_NAME)]
    places += [] if env.get(OWN_FLEET_VARIABLE) else [os.path.join(SYSTEM_FOLDER, FILE_NAME)]
    for path in places:
        if os.path.exists(path):
            return Path(path)
    return None


def file_here(folder: Path | None = None) -> Path | None:
    """Return the `moorage.toml` of the current folder, or of `folder`; None if it has none."""
    path = (folder or Path.cwd()) / FILE_NAME
    return path if path.is_file() else None
