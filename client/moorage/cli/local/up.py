"""`moorage up`: runs a server, a scheduler and a worker on this machine with one command, and leaves no process
behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import gc
import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.options import LOCAL, LocalOptions, guarded
from moorage.cli.framework.settings import UP, UP_FILE_HELP, UpSettings, flags_of, sections, the_file
from moorage.client.errors import ClientError, Rejected, client_problem, rejected
from moorage.schemas.settings import NO_FILE, SettingsFile, declared, made, settle
from moorage.schemas.settings_file import FILE_NAME, FILE_VARIABLE, OWN_FLEET_VARIABLE, SYSTEM_FOLDER, file_here
from moorage.worker.settings import WorkerSettings

LOCK_FILE: Final = "up.lock"
#: what `moorage up` makes in its folder
OUR_NAMES: Final = (LOCK_FILE, "up.json", "ledger-url", "nats", "scheduler.log", "worker.log", "workers")

if TYPE_CHECKING:
    UpFlags: TypeAlias = Any
    _NO_FLAGS: Any = None
else:
    UpFlags = flags_of(UP, UpSettings)
    _NO_FLAGS = UpFlags()


def up(
    *,
    settings: Annotated[Path | None, Parameter(help=UP_FILE_HELP)] = None,
    restore: Annotated[
        Path | None,
        Parameter(help="Begin with the ledger of this backup instead of the one that is there.", value="FILE"),
    ] = None,
    flags: UpFlags = _NO_FLAGS,
    options: LocalOptions = LOCAL,
) -> int:
    """Run a server, a scheduler and a worker on this machine with one command. Other commands of this user find it: in
    this folder, and elsewhere if it is the only one. Other users of the machine are refused, unless --open is given.

    If the folder has a moorage.toml, it is read, and a line says so. It is a fleet of its own: it takes nothing of a
    site's /etc/moorage/moorage.toml, and of other files no setting that is for one site, such as replicas.

    Ctrl-C ends everything, running jobs included: SIGTERM, 3 s, SIGKILL. The state stays, and the next `up` in the same
    folder continues from it. Waiting jobs still wait. Jobs that ran are tried again if they have retries left; else
    they are FAILED, "its worker was stopped". A process that dies is started again; after six times within a minute,
    everything ends.
    """
    gc.enable()
    return guarded(options, lambda: asyncio.run(_up(settings, flags, options, restore)))


async def _up(given: Path | None, flags: Any, options: LocalOptions, restore: Path | None) -> int:
    from moorage.bus.target import home
    from moorage.cli.framework.files import cannot_read

    env = {**os.environ, OWN_FLEET_VARIABLE: "1"}
    file = the_file(given or _file_here(), env)
    _print_left_out(file, env)
    held = made(UpSettings, settle(UP, UpSettings, flags=dataclasses.asdict(flags), env=env, file=file))
    simulate = held.simulate or settle("worker", WorkerSettings, env=env, file=file)["simulate"].value
    _check_fleet(simulate)
    if held.play_freezing and not simulate:
        raise rejected(
            "invalid-argument",
            "--play-freezing is of simulated GPUs",
            next="moorage up --simulate 1xH100 --play-freezing; with a GPU, its driver freezes jobs by itself",
        )
    folder = home(held.data)
    if not _is_text(str(folder)):
        raise rejected(
            "invalid-argument",
            f"the state folder {str(folder)!r} has a name that is not UTF-8, and the server's settings must be text",
            found=ascii(str(folder)),
            next="run it in another folder, or name one with --data",
        )
    from moorage.cli.local.local_node import Node

    if restore is not None and not os.access(restore, os.R_OK):
        reason = "Permission denied" if restore.exists() else "No such file"
        raise cannot_read(restore, reason, "name a file of moorage admin backup")
    path = None if file is NO_FILE else file.path
    node = Node(
        folder, simulate or "", held.port, options, restore, path, is_open=held.open, plays_freezing=held.play_freezing
    )
    with _only_one(folder):
        return await node.run()


def _is_text(name: str) -> bool:
    """Return whether the name of a file is UTF-8: Python reads other bytes as surrogates, which no text has."""
    return name.isascii() or not any("\udc80" <= char <= "\udcff" for char in name)


def _file_here() -> Path | None:
    """Return the `moorage.toml` of this folder, which also has the state of `up`, unless the environment names another
    file.

    A file of another user is not read, because it could name programs to run.
    """
    from moorage.cli.framework.console import try_print_err

    here = None if os.environ.get(FILE_VARIABLE) else file_here()
    if here is None:
        return None
    if here.stat().st_uid not in (os.geteuid(), 0):
        try_print_err(f"settings: {here} belongs to another user and is not read; to read it: --settings {here.name}")
        return None
    try_print_err(f"settings: {here}")
    return here


def _print_left_out(file: SettingsFile, env: Mapping[str, str]) -> None:
    """Print which settings are those of a site, and not taken: this is a fleet of its own, with one ledger."""
    from moorage.cli.framework.console import try_print_err

    site = Path(SYSTEM_FOLDER, FILE_NAME)
    if file is NO_FILE and site.exists():
        try_print_err(f"settings: nothing of {site}, which is the site's: moorage up is a fleet of its own")
    found = [
        (section, one)
        for section, struct in sections().items()
        for key, one in (declared(section, struct).items() if section in ("scheduler", "worker") else ())
        if one.is_left_out and (key in file.table(section) or env.get(one.env))
    ]
    if found:
        names = ", ".join(
            f"[{section}] {one.key}" if one.key in file.table(section) else one.env for section, one in found
        )
        try_print_err(f"settings: {names} of a site are left out: moorage up is a fleet of its own")


def _check_fleet(simulate: str | None) -> None:
    """Raise `Rejected` for a fleet that is not written correctly, before anything is started."""
    if simulate is None:
        return
    from moorage.schemas.errors import Refused
    from moorage.worker.agent.run import simulated_of

    try:
        simulated_of(WorkerSettings(Path("unused"), simulate=simulate))
    except Refused as refused:
        raise rejected(
            "invalid-argument",
            refused.problem.message,
            found=simulate,
            next="for example --simulate 4x8xH100, or 2x4xL40S+8xH100",
        ) from None


def _check_owners(folder: Path) -> None:
    """Raise `Rejected` if a link on the way, the folder or a file of ours in it belongs to another user.

    The owner of a folder or a link on the way to a file chooses the file. Files of ours must belong to this user; links
    on the way and the folder may also belong to root, as for /tmp.
    """
    user = os.geteuid()
    trusted = {user, 0}
    for path in (*reversed(folder.parents), folder):
        with contextlib.suppress(OSError):
            if path.is_symlink() and (owner := path.lstat().st_uid) not in trusted:
                raise _not_ours(path, owner)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if (owner := folder.stat().st_uid) not in trusted:
            raise _not_ours(folder, owner)
        for name in OUR_NAMES:
            with contextlib.suppress(FileNotFoundError):
                if (owner := (folder / name).lstat().st_uid) != user:
                    raise _not_ours(folder / name, owner)


def _not_ours(path: Path, owner: int) -> Rejected:
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = str(owner)
    return rejected(
        "failed-precondition",
        f"{path} belongs to {name}: moorage up does not write into another user's folder",
        found=str(path),
        next="name a folder of your own with --data, or MOORAGE_HOME",
    )


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises `ClientError` with already-running, and `Rejected` if the folder cannot be
    used."""
    from moorage.bus.own_fleets import forget
    from moorage.bus.own_login import withdraw
    from moorage.bus.target import UP_FILE, read_up

    _check_owners(folder)
    try:
        is_ours = not folder.exists() or (folder / LOCK_FILE).exists()
        # below root's are the folders of jobs of other users. They may pass, and read nothing: our files are 0600
        mode = 0o711 if os.geteuid() == 0 else 0o700
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        if is_ours:  # never narrow a folder that is somebody's, as --data /tmp
            folder.chmod(mode)
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise rejected(
            "failed-precondition",
            f"the data folder {folder} cannot be used: {error.strerror}",
            found=str(folder),
            next="name another one with --data, or MOORAGE_HOME",
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        running = read_up(folder)
        where = f"pid {running.pid}, {running.url}" if running is not None else "it is still starting"
        raise ClientError(
            client_problem("already-running", f"moorage up already runs with the data folder {folder} ({where})"),
            (
                "use that one: moorage fleet",
                f"end that one: kill {running.pid}" if running is not None else "wait until it has started",
                "run another one: moorage up --data OTHER_FOLDER",
            ),
        ) from None
    with contextlib.suppress(OSError):
        (folder / UP_FILE).unlink(missing_ok=True)  # of one that was killed
    try:
        yield
    finally:
        forget(folder)
        withdraw(folder=folder)
        with contextlib.suppress(OSError):
            (folder / UP_FILE).unlink(missing_ok=True)
        os.close(lock)
