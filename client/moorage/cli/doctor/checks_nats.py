"""The checks of `moorage doctor` that concern the server: the way to it, the user, its clock, JetStream and its
disk."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.cli.doctor.check import ANSWER_S_MAX, clock, failed, role_of
from moorage.cli.doctor.checks_tls import of_tls
from moorage.cli.framework.disk import DISK_FREE_MIN, disk_of
from moorage.cli.framework.options import CONNECT_TIMEOUT_S_MAX, TIMEOUT_DEFAULT, Options
from moorage.client.durations import seconds
from moorage.client.errors import no_server
from moorage.client.view.checks import SERVERS_NEEDED, Check
from moorage.schemas.errors import MoorageError
from moorage.schemas.roles import USER_INFO
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.bus.connection import Connection
    from moorage.bus.contexts import Context

#: a round trip that makes renewals and appends slow
ROUND_TRIP_MS_MAX: Final = 100.0
#: how the account of the ledger is called, behind the prefix of its subjects (`bus/site.py`)
_LEDGERS: Final = "_LEDGER"
_CONF_BYTES_MAX: Final = 64 * 1024
#: roles that use the servers and do not run them
_CLIENTS: Final = ("submitter", "observer", "worker")
#: roles without the right to ask the server about themselves or JetStream: a question is an error in its log
_ASK_NOT: Final = (*_CLIENTS, "operator", "service")
#: nats-server's errors.json: no server of the cluster leads JetStream; there is no such stream
_ERR_NO_JETSTREAM_LEADER: Final = 10008
_ERR_STREAM_NOT_FOUND: Final = 10059
_SERVERS_MISSING: Final = (
    "find the nats-servers of the cluster that do not run or do not reach the others, and restart each server "
    f"whose disk was full: {SERVERS_NEEDED}"
)


async def of_nats(context: Context, options: Options) -> AsyncIterator[Check]:
    from moorage.bus.connection import connect
    from moorage.bus.errors import CannotConnect
    from moorage.bus.server_version import check_oldest

    try:
        patience_s = min(seconds(options.timeout or TIMEOUT_DEFAULT), CONNECT_TIMEOUT_S_MAX)
        connection = await connect(context, "moorage doctor", give_up_after_s=patience_s)
    except CannotConnect as error:
        yield failed("nats", no_server(error))
        return
    except MoorageError as error:
        yield failed("nats", error)
        return
    try:
        began = time.monotonic()
        await connection.flush(ANSWER_S_MAX)
        try:
            check_oldest(connection)
        except MoorageError as error:
            yield failed("nats", error)
        else:
            yield _round_trip(connection, (time.monotonic() - began) * 1000)
        user = await _asked(connection, USER_INFO) if role_of(context) not in _ASK_NOT else None
        yield _user(user)
        async for check in of_tls(context):
            yield check
        if role_of(context) != "operator":  # whom the leader tells its time
            yield _clock(user)
        is_cluster = connection.is_clustered
        yield await _jetstream(connection, context)
        if role_of(context) not in _CLIENTS:  # of others' servers they can neither see nor change it
            yield _sync(context)
        if (conf := _conf_of_ours(context)) is not None:
            yield _disk(conf)
        if user is not None and user.data is not None and user.data.account.endswith(_LEDGERS):
            yield _no_leader_here(user.data.account)
            return
    except MoorageError as error:
        yield failed("nats", error)
        return
    finally:
        await connection.close()
    from moorage.cli.doctor.checks_fleet import of_moorage

    async for check in of_moorage(options, is_cluster):
        yield check


def _no_leader_here(account: str) -> Check:
    return Check(
        "leader",
        "ok",
        f"not asked: account {account} has the ledger alone, and schedulers answer in that of their users. The context"
        " of a tenant or an operator says whether one leads",
    )


def _round_trip(connection: Connection, milliseconds: float) -> Check:
    found = f"nats-server {connection.server_version}, round trip {milliseconds:.1f} ms"
    if milliseconds > ROUND_TRIP_MS_MAX:
        return Check(
            "nats",
            "warn",
            found,
            "run schedulers and workers closer to the server: leases and ledger appends need round trips "
            f"below {ROUND_TRIP_MS_MAX:g} ms",
        )
    return Check("nats", "ok", found)


class _User(msgspec.Struct):
    user: str = "?"
    account: str = "?"
    permissions: Any = None


class _Server(msgspec.Struct):
    time: str = ""


class _Error(msgspec.Struct):
    description: str = ""
    err_code: int = 0


class _Stream(msgspec.Struct):
    messages: int


class _Told(msgspec.Struct):
    """What the server answers about a user, an account or a stream."""

    data: _User | None = None
    server: _Server | None = None
    error: _Error | None = None
    state: _Stream | None = None
    streams: int = 0
    storage: int = 0


async def _asked(connection: Connection, subject: str) -> _Told | None:
    """Return the server's JSON answer on one of its own subjects; None if the key may not ask, or no JSON came.

    If there is no responder, return an `error` that says so.
    """
    from moorage.bus.errors import NoResponders

    try:
        answer = (await connection.request(subject, b"", ANSWER_S_MAX)).data
        return msgspec.json.decode(answer, type=_Told)
    except NoResponders:
        return _Told(error=_Error("JetStream does not answer: it is off on this server, or in this account"))
    except (MoorageError, msgspec.MsgspecError):
        return None


def _user(info: _Told | None) -> Check:
    if info is None or info.data is None:
        return Check(
            "user", "ok", "the name of this user is unknown: the server does not allow this user to ask for it"
        )
    data = info.data
    bounds = "with permissions for certain subjects" if data.permissions else "with all permissions in that account"
    return Check("user", "ok", f"user {data.user} of account {data.account}, {bounds}")


def _clock(info: _Told | None) -> Check:
    from moorage.bus.jetstream import wall_seconds

    if info is None:
        return Check(
            "clock",
            "ok",
            "this host's clock is not compared with another one: this user may not ask for that, an operator may",
        )
    try:
        off_s = time.time() - wall_seconds(info.server.time if info.server is not None else "")
    except ValueError:
        fix = "run chrony or ntpd on this host and on the server's; a scheduler logs a warning if the clocks differ"
        return Check("clock", "warn", "this host's clock cannot be compared: the server does not report its time", fix)
    return clock(off_s, "the server's")


async def _jetstream(connection: Connection, context: Context) -> Check:
    if role_of(context) in _ASK_NOT:
        return Check("jetstream", "ok", "this user needs no JetStream; only schedulers do")
    api, is_about = context.api_prefix, "the account"
    info = await _asked(connection, f"{api}.INFO")
    if info is None and role_of(context) in ("scheduler", ""):  # a scheduler may ask for the streams that it reads
        from moorage.schemas.subjects import Subjects

        is_about = stream = Subjects().dead_letter_stream  # which each scheduler makes
        info = await _asked(connection, f"{api}.STREAM.INFO.{stream}")
    if info is None:
        return Check(
            "jetstream",
            "warn",
            "this user may not ask for the state of JetStream",
            "submitters need no JetStream; schedulers do",
        )
    if info.error is not None:
        found, code = info.error.description, info.error.err_code
        if code == _ERR_STREAM_NOT_FOUND:
            return Check(
                "jetstream",
                "ok",
                f"JetStream answers; {is_about}: {found}, as is normal before the first scheduler has run",
            )
        if code == _ERR_NO_JETSTREAM_LEADER:
            return Check("jetstream", "fail", found, _SERVERS_MISSING)
        fix = (
            "turn JetStream on: jetstream {} in the server's file, and jetstream: enabled in the account; the "
            "ledger needs it"
        )
        return Check("jetstream", "fail", found, fix)
    if info.state is not None:
        return Check(
            "jetstream", "ok", f"JetStream answers; its stream {is_about} has {many(info.state.messages, 'message')}"
        )
    return Check(
        "jetstream",
        "ok",
        f"JetStream answers; the account has {many(info.streams, 'stream')} with {info.storage // 1024} KiB on disk",
    )


def _sync(context: Context) -> Check:
    """Check that the server syncs each record to its disk. Only the configuration of a server that `moorage up` started
    can be read here; for any other server the verdict is `warn`."""
    hint = "set sync_interval: always on the ledger's nats-servers, as moorage admin nats-config writes it"
    conf = _conf_of_ours(context)
    if conf is not None:
        always = "sync_interval: always" in _head(conf)
        found = f"sync_interval: always {'is set' if always else 'is missing'} in {conf}"
        return Check("sync", "ok", found) if always else Check("sync", "warn", found, hint)
    # no warning: no key and no setting of this user could end it
    return Check("sync", "ok", f"not checked, as a client cannot see it: {hint}")


def _conf_of_ours(context: Context) -> Path | None:
    """Return the configuration of the server that a `moorage up` of this user started; None for another server."""
    from moorage.bus.target import find_home

    conf = find_home() / "nats" / "nats.conf"
    return conf if context.source.startswith(str(find_home())) and conf.is_file() else None


def _disk(conf: Path) -> Check:
    """Check the free space of the server's disk: when it is full, the scheduler cannot answer any request."""
    disk = disk_of(conf.parent)
    found = disk.text(conf.parent)
    if disk.free >= DISK_FREE_MIN:
        return Check("disk", "ok", found)
    return Check(
        "disk",
        "fail",
        found,
        "free disk space there; moorage up then accepts jobs again without a restart, and no accepted job is lost",
    )


def _head(path: Path) -> str:
    with path.open(errors="replace") as file:
        return file.read(_CONF_BYTES_MAX)
