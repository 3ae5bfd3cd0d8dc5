"""The password of this user's `moorage up`: other users of the machine cannot read it, and so run no jobs.

The server's folder has it in a file that this user alone reads. Clients of moorage find it there. Other clients of NATS
find it in a nats context, `moorage-up-PORT`, which is there while the `moorage up` runs, and is selected if none is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from moorage.bus.contexts import Context, config_dir, selected_context
from moorage.bus.own_fleets import is_ours, is_own_home, running
from moorage.bus.target import UP_CONTEXTS, Up, find_home, read_up
from moorage.system.private_files import replace_private

USER: Final = "moorage"
#: in the server's folder, which is in that of `moorage up`
PASSWORD_FILE: Final = "local-password"
SERVER_FOLDER: Final = "nats"
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost"})
#: how a context names its folder, so that what a killed `moorage up` left can be removed
_OF: Final = "moorage up in "
_BYTES_MAX: Final = 4096


class Login(NamedTuple):
    """The user and the password of a `moorage up` of this user."""

    user: str
    password: str


def own_login(context: Context, env: Mapping[str, str] | None = None) -> Login | None:
    """Return the login for the server of a context, if that is a `moorage up` of this user that runs now; else None,
    and for a context that has a login."""
    if context.has_login or len(context.servers) != 1:
        return None
    with suppress(ValueError, OSError):  # no port; a folder that is gone
        parts = urlsplit(context.servers[0])
        if parts.hostname in _LOOPBACK:
            for folder, up in _own_fleets(env):
                if urlsplit(up.url).port == parts.port and (login := _login_in(folder)) is not None:
                    return login
    return None


def with_own_login(context: Context, env: Mapping[str, str] | None = None) -> Context:
    """Return the context, with the login that it lacks for this user's own `moorage up`."""
    login = own_login(context, env)
    return context if login is None else msgspec.structs.replace(context, user=login.user, password=login.password)


def offer(folder: Path, url: str, env: Mapping[str, str] | None = None) -> str:
    """Write a nats context for clients other than moorage's, and select it unless another one is. Returns its name, ""
    if there is no place for it: no home of this user's."""
    with suppress(OSError, UnicodeEncodeError):
        withdraw(env)  # what one that was killed has left
        login, base = _login_in(folder), config_dir(env)
        if login is None or not _has_place(base, env):
            return ""
        name = f"{UP_CONTEXTS}{urlsplit(url).port}"
        (base / "context").mkdir(mode=0o700, parents=True, exist_ok=True)
        about = {"description": f"{_OF}{folder}", "url": url, "user": login.user, "password": login.password}
        replace_private(base / "context" / f"{name}.json", msgspec.json.encode(about), is_synced=False)
        if not selected_context(env):
            (base / "context.txt").write_text(name)
        return name
    return ""


def withdraw(env: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
    """Remove the contexts of this user's fleets that have ended, and that of `folder`."""
    with suppress(OSError):
        base = config_dir(env)
        for file in (base / "context").glob(f"{UP_CONTEXTS}*.json"):
            of = _folder_of(file)
            if of is not None and (of == folder or read_up(of) is None):
                file.unlink(missing_ok=True)
                if selected_context(env) == file.stem:
                    (base / "context.txt").unlink()


def _own_fleets(env: Mapping[str, str] | None) -> Iterator[tuple[Path, Up]]:
    here = find_home(env)
    if (up := read_up(here)) is not None:
        yield here, up
    yield from running(env)


def _login_in(folder: Path) -> Login | None:
    file = folder / SERVER_FOLDER / PASSWORD_FILE
    with suppress(OSError, UnicodeDecodeError):
        if is_ours(file):
            with file.open(encoding="ascii") as opened:
                return Login(USER, opened.read(_BYTES_MAX).strip())
    return None


def _has_place(base: Path, env: Mapping[str, str] | None) -> bool:
    """Return whether contexts may be written: a folder of configuration that somebody named has to be there."""
    named = (os.environ if env is None else env).get("XDG_CONFIG_HOME")
    return is_own_home(base) and (base.parent if named else base.parent.parent).is_dir()


def _folder_of(file: Path) -> Path | None:
    try:
        said = msgspec.json.decode(file.read_bytes())["description"] if is_ours(file) else ""
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None
    return Path(said.removeprefix(_OF)) if isinstance(said, str) and said.startswith(_OF) else None
