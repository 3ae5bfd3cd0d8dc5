"""The fleets that `moorage up` runs for this user, whatever the folder: commands in other folders find them here.

A file for each is in the user's state folder, $XDG_STATE_HOME/moorage/up, and holds the path of the fleet's folder. Its
name begins with where it runs: a home may be that of several hosts and containers, none of which sees another's
processes.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from moorage.bus.contexts import DEFAULT, Context
from moorage.bus.errors import BadContext
from moorage.bus.target import UP_FILE, Up, read_up
from moorage.system.private_files import replace_private

STATE_VARIABLE: Final = "XDG_STATE_HOME"
#: how long the default server may take to accept a connection, in seconds
ANSWER_S: Final = 0.5
#: longest path that is read from a file
_PATH_BYTES_MAX: Final = 4096


class Fleet(NamedTuple):
    """A `moorage up` that runs now, and its folder."""

    folder: Path
    up: Up


def remember(folder: Path, env: Mapping[str, str] | None = None) -> None:
    """Write down that `moorage up` runs with this folder. Without a state folder to write to, do nothing."""
    with suppress(OSError, UnicodeEncodeError):  # a folder whose name is no text is found in that folder alone
        file = _file(folder, env)
        if not is_own_home(file):
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_private(file, f"{folder}\n", is_synced=False)


def is_own_home(file: Path) -> bool:
    """Return whether a file of this user's may be made there.

    A home of another user stays as it is: with `sudo -E`, root would leave folders there that their user cannot use.
    Raises OSError.
    """
    there = next(each for each in file.parents if each.exists())
    return there.stat().st_uid in (os.geteuid(), 0)


def forget(folder: Path, env: Mapping[str, str] | None = None) -> None:
    with suppress(OSError):
        _file(folder, env).unlink()


def running(env: Mapping[str, str] | None = None) -> list[Fleet]:
    """Return this user's fleets that run here now, in the order of their folders. Files of those that have ended are
    removed."""
    found = []
    with suppress(OSError):
        for file in sorted(_state(env).glob(f"{_here()}-*")):
            folder = _folder_in(file)
            if folder is None:
                continue
            up = read_up(folder) if is_ours(folder / UP_FILE) else None
            if up is not None:
                found.append(Fleet(folder, up))
            else:
                file.unlink(missing_ok=True)
    return sorted(found)


def own_fleet(context: Context, env: Mapping[str, str] | None = None) -> tuple[Context, Fleet | None]:
    """Return the context to use and, where nothing is named, this user's fleet that was found elsewhere: the one at
    the default server, and in place of a server that does not answer the one that runs.

    Raises `BadContext` if several run: none of them is taken.
    """
    if context.source != DEFAULT:
        return context, None
    fleets = running(env)
    if not fleets:
        return context, None
    if is_served(context.servers[0]):
        return context, next((fleet for fleet in fleets if is_at(fleet, context.servers[0])), None)
    if len(fleets) > 1:
        listed = ", ".join(f"{fleet.folder} ({fleet.up.url})" for fleet in fleets)
        raise BadContext(
            f"{len(fleets)} fleets of yours run, and none is named: {listed}",
            next_step=f"name one, as --nats {fleets[0].up.url} or NATS_URL; or type this in its folder",
        )
    [fleet] = fleets
    return Context(source=str(fleet.folder / UP_FILE), url=fleet.up.url), fleet


def is_at(fleet: Fleet, url: str) -> bool:
    """Return whether a fleet of this machine has the server of this URL, which is one of this machine."""
    return urlsplit(fleet.up.url).port == urlsplit(url).port


def is_served(url: str) -> bool:
    """Return whether a server accepts connections there."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _state(env: Mapping[str, str] | None) -> Path:
    env = os.environ if env is None else env
    base = env.get(STATE_VARIABLE) or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return Path(base, "moorage", "up")


def _file(folder: Path, env: Mapping[str, str] | None) -> Path:
    return _state(env) / f"{_here()}-{_digest(os.fsencode(folder))}"


def _here() -> str:
    """Return a name of this boot of this host, and of this namespace of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return _digest(boot + os.fsencode(os.readlink("/proc/self/ns/pid")))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _folder_in(file: Path) -> Path | None:
    """Return the folder that a file of this user names; None for another's."""
    try:
        if not is_ours(file):
            return None
        with file.open("rb") as opened:
            return Path(os.fsdecode(opened.read(_PATH_BYTES_MAX)).removesuffix("\n"))
    except OSError:
        return None


def is_ours(file: Path) -> bool:
    """Return whether a file is this user's own, and no link: another user could lead commands astray."""
    try:
        about = file.lstat()
    except OSError:
        return False
    return about.st_uid == os.geteuid() and not file.is_symlink()
