"""Find the server for a command that names none: by NATS_URL, the `moorage up` of this folder, or a nats context."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.call_key import context_of_caller
from moorage.bus.contexts import CONTEXT_VARIABLE, DEFAULT, URL_VARIABLE, Context, resolve, selected_context, with_inbox
from moorage.bus.errors import BadContext
from moorage.schemas.unreadable import UNREADABLE

HOME_VARIABLE: Final = "MOORAGE_HOME"
HOME_DEFAULT: Final = ".moorage"
UP_FILE: Final = "up.json"
#: names of the contexts that `moorage up` writes begin so, and nats-server's port follows
UP_CONTEXTS: Final = "moorage-up-"
#: in the home: a state folder for each worker that was started there
WORKERS_FOLDER: Final = "workers"
_UP_BYTES_MAX: Final = 64 * 1024


class Up(msgspec.Struct, frozen=True):
    """What `moorage up` writes into its folder for other commands. It has no secret; clients of this user find the
    password beside it (`own_login`).

    `pid` and `started_ticks` (field 22 of /proc/<pid>/stat, proc(5)) name the process as long as it lives. `simulate`
    is the simulated fleet as given, "" for a real worker; `children` are the pids of what it runs. `context` names
    the nats context with the password: "" if the server asks for none, or if there is no place for one.
    """

    url: str
    pid: int
    started_ticks: int
    simulate: str = ""
    children: dict[str, int] = {}
    context: str = ""
    door: str = ""  # where OpenAI's clients find its services, on this machine; "" without a door


def home(data: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """Return the data folder for a new `moorage up`: `data` if given, else $MOORAGE_HOME, else ./.moorage."""
    env = os.environ if env is None else env
    return Path(data or env.get(HOME_VARIABLE) or HOME_DEFAULT).absolute()


def find_home(env: Mapping[str, str] | None = None) -> Path:
    """Return the data folder of the `moorage up` that commands use here: of this folder, or the nearest above.

    $MOORAGE_HOME goes first. In a folder above, only an `up` of this user counts: another user could lead commands
    astray there. Without one it is `home`.
    """
    here = home(env=env)
    if (os.environ if env is None else env).get(HOME_VARIABLE) or (here / UP_FILE).exists():
        return here
    for folder in here.parent.parents:
        try:
            if (folder / HOME_DEFAULT / UP_FILE).stat().st_uid == os.geteuid():
                return folder / HOME_DEFAULT
        except OSError:
            continue
    return here


def read_up(folder: Path) -> Up | None:
    """Return the `moorage up` that runs on this folder now, or None."""
    try:
        with (folder / UP_FILE).open("rb") as file:
            up = msgspec.json.decode(file.read(_UP_BYTES_MAX), type=Up)
    except (OSError, *UNREADABLE):
        return None
    return up if started_ticks(up.pid) == up.started_ticks else None


def started_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot; 0 if there is none. A pid alone is used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read(4096).rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def find_context(target: Context | str | None = None, env: Mapping[str, str] | None = None) -> Context:
    """Return the context to use: `target`, NATS_CONTEXT and NATS_URL as `contexts.resolve`, else that of a job with
    `run.calls` in which this runs, else that of this folder's `moorage up`, else the selected nats context, else the
    default.

    A `moorage up` above this folder counts too, see `find_home`. Raises `BadContext`, also if the `moorage up` was
    killed or is another user's, and no context is selected.
    """
    variables = os.environ if env is None else env
    if target or variables.get(CONTEXT_VARIABLE) or variables.get(URL_VARIABLE):
        return resolve(target, env)
    if (given := context_of_caller(variables)) is not None:
        return given
    folder = find_home(env)
    if (up := read_up(folder)) is not None:
        return with_inbox(Context(source=str(folder / UP_FILE), url=up.url), env)
    context = (
        with_inbox(Context(source=DEFAULT), env)
        if selected_context(env).startswith(UP_CONTEXTS)
        else resolve(None, env)
    )
    if context.source != DEFAULT:
        return context
    _refuse_anothers(folder)
    if (folder / UP_FILE).exists():  # one that ends in order takes its file along
        raise BadContext(
            f"the moorage up of {folder} was killed, or the machine went down: it does not run any more",
            next_step=f"moorage up --data {folder} goes on from there; or name a server: --nats URL",
        )
    return context


def _refuse_anothers(folder: Path) -> None:
    """Raise `BadContext` if the folder is another user's `moorage up`, so that the default port is not tried."""
    try:
        (folder / UP_FILE).open("rb").close()
    except PermissionError:
        raise BadContext(
            f"{folder} belongs to another user's moorage up",
            next_step=f"name a server: --nats URL or NATS_URL; or a folder of yours: {HOME_VARIABLE}",
        ) from None
    except OSError:
        return
