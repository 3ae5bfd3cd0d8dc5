"""What `moorage doctor` looks at. Each check gives lines: what, ok or warn or fail, what was found, and a fix.

`fail` is what stops moorage here, `warn` what a worker or an operator on this machine would miss.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from moorage.cli.disk import DISK_FREE_MIN, disk_of
from moorage.cli.options import CONNECT_TIMEOUT_S_MAX, TIMEOUT_DEFAULT, Options
from moorage.cli.render import age
from moorage.schemas.errors import MoorageError
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.bus.connection import Connection
    from moorage.bus.contexts import Context
    from moorage.client.client import AsyncClient

ANSWER_S_MAX: Final = 3.0
NVML_S_MAX: Final = 10.0
#: this machine's wall clock against the server's
CLOCK_OFF_S_MAX: Final = 1.0
#: a round trip that makes renewals and appends slow
ROUND_TRIP_MS_MAX: Final = 100.0
_CONF_BYTES_MAX: Final = 64 * 1024
#: roles that use the servers and do not run them
_CLIENTS: Final = ("submitter", "observer", "worker")
#: nats-server's errors.json: no server of the cluster leads JetStream; there is no such stream
_ERR_NO_JETSTREAM_LEADER: Final = 10008
_ERR_STREAM_NOT_FOUND: Final = 10059
_HALF: Final = "without more than half of the servers nothing is recorded"
_SERVERS_MISSING: Final = (
    "see which nats-servers of the cluster do not run, do not reach the others, or had a full disk (such a one is to be"
    f" started again): {_HALF}"
)
#: workers that a line names
NAMES_MAX: Final = 3

Verdict = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="check"):
    """A line of the doctor. `fix` says what to do where it is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


async def all_checks(options: Options) -> AsyncIterator[Check]:
    """Every check in the order in which one would ask; those that need what is missing are left out.

    Raises `Rejected` where a flag itself is wrong.
    """
    from moorage.client.durations import seconds

    options = options.settled()
    seconds(options.timeout or TIMEOUT_DEFAULT)
    for check in [_python(), _uvloop(), _cgroup(), await _nvml()]:
        yield check
    yield _settings()
    if (secrets := _secrets()) is not None:
        yield secrets
    context: Context | None = None
    try:
        from moorage.bus.target import find_context

        context = find_context(options.nats)
        shown = f"{context.safe_url}, from {context.source or f'context {context.name}'}"
        yield Check("context", "ok", shown)
    except MoorageError as error:
        yield _failed("context", error)
    if context is not None:
        async for check in _of_nats(context, options):
            yield check


def _failed(name: str, error: MoorageError, verdict: Verdict = "fail", fix: str = "") -> Check:
    fixes = (*getattr(error, "fixes", ()), error.problem.next)
    return Check(name, verdict, error.problem.message, fix or next(filter(None, fixes), ""))


# ------------------------------------------------------------------------------------------------------ this host


def _settings() -> Check:
    from moorage.cli.settings import the_file
    from moorage.schemas.settings import NO_FILE

    try:
        file = the_file()
    except MoorageError as error:
        return _failed("settings", error)
    if file is NO_FILE:
        return Check("settings", "ok", "no settings file: defaults, environment and flags")
    return Check("settings", "ok", f"{file.path}: {', '.join(f'[{name}]' for name in file.tables) or 'empty'}")


def _secrets() -> Check | None:
    """The folder that the settings name for a worker on this machine, as this user finds it; None where none is."""
    from moorage.cli.settings import the_file
    from moorage.schemas.settings import made, settle
    from moorage.worker.policy import Policy
    from moorage.worker.secret_files import trouble_with_secrets
    from moorage.worker.settings import SECTION, WorkerSettings

    try:
        found = settle(SECTION, WorkerSettings, file=the_file(), defaults={"state_dir": Path()})
        folder: Path | None = found["secrets_dir"].value
        if folder is None:
            return None
        is_open = Policy.of(made(WorkerSettings, found)).leaves_secrets_open
    except MoorageError:
        return None  # the line of the settings has told it
    if trouble := trouble_with_secrets(folder):
        fix = f"as the worker's user: mkdir -p -m 700 {folder}; chmod 700 {folder}; chmod 600 {folder}/*"
        return Check("secrets", "warn", trouble, fix)
    if is_open:
        fix = "say in secrets_for which secrets are whose: moorage doctor --example has a line of it"
        return Check("secrets", "warn", f"{folder}: every tenant may name every secret there", fix)
    return Check("secrets", "ok", f"{folder}, for this user alone")


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def _uvloop() -> Check:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Check("uvloop", "ok", version("uvloop"))
    except PackageNotFoundError:
        return Check("uvloop", "warn", "not installed", "pip install uvloop halves what a scheduler costs when idle")


def _cgroup() -> Check:
    from moorage.worker.cgroup import own_cgroup

    own = own_cgroup()
    if own is None:
        return Check(
            "cgroup", "warn", "no cgroup v2 is mounted", "mount one: without it a worker proves ends by a process walk"
        )
    probe = own / f"moorage-doctor-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return Check(
            "cgroup",
            "warn",
            f"{own} is not writable: {error.strerror}",
            "run workers as root, or give their unit Delegate=yes",
        )
    return Check("cgroup", "ok", f"v2 at {own}, writable")


async def _nvml() -> Check:
    from moorage.worker.inventory.nvml import NvmlUnavailable, open_nvml

    try:
        inventory = await open_nvml(open_timeout_s=NVML_S_MAX)
    except NvmlUnavailable as error:
        return Check("nvml", "warn", str(error), "nvidia-smi must work here before a worker can lend these GPUs")
    try:
        devices = inventory.devices()
        if inventory.faults:
            return Check("nvml", "warn", "; ".join(inventory.faults), "reset or replace those devices")
        names = ", ".join(sorted({device.name for device in devices}))
        return Check("nvml", "ok", f"{many(len(devices), 'GPU')}: {names}" if devices else "no NVIDIA GPU here")
    finally:
        inventory.close()


# ----------------------------------------------------------------------------------------------------------- NATS


async def _of_nats(context: Context, options: Options) -> AsyncIterator[Check]:
    from moorage.bus.connection import connect
    from moorage.bus.errors import CannotConnect
    from moorage.client.durations import seconds
    from moorage.client.errors import no_server

    try:
        patience_s = min(seconds(options.timeout or TIMEOUT_DEFAULT), CONNECT_TIMEOUT_S_MAX)
        connection = await connect(context, "moorage doctor", give_up_after_s=patience_s)
    except CannotConnect as error:
        yield _failed("nats", no_server(error))
        return
    except MoorageError as error:
        yield _failed("nats", error)
        return
    try:
        began = time.monotonic()
        await connection.flush(ANSWER_S_MAX)
        yield _round_trip(connection, (time.monotonic() - began) * 1000)
        user = await _asked(connection, "$SYS.REQ.USER.INFO")
        yield _user(user)
        yield _clock(user)
        is_cluster = connection.is_clustered
        yield await _jetstream(connection, context)
        if role_of(context) not in _CLIENTS:  # of others' servers they can neither see nor change it
            yield _sync(context)
        if (conf := _conf_of_ours(context)) is not None:
            yield _disk(conf)
    except MoorageError as error:
        yield _failed("nats", error)
        return
    finally:
        await connection.close()
    async for check in _of_moorage(options, is_cluster):
        yield check


def _round_trip(connection: Connection, milliseconds: float) -> Check:
    found = f"nats-server {connection.server_version}, round trip {milliseconds:.1f} ms"
    if milliseconds > ROUND_TRIP_MS_MAX:
        return Check("nats", "warn", found, f"come nearer: leases and appends count on under {ROUND_TRIP_MS_MAX:g} ms")
    return Check("nats", "ok", found)


async def _asked(connection: Connection, subject: str) -> dict[str, Any]:
    """The JSON that answers on a subject of the server's own; {} where nobody may ask, or it says nothing."""
    from moorage.bus.errors import NoResponders

    try:
        answer = (await connection.request(subject, b"", ANSWER_S_MAX)).data
        data: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
    except NoResponders:
        return {"error": {"description": "nobody answers for it: it is off on this server, or in this account"}}
    except (MoorageError, msgspec.MsgspecError):
        return {}
    return data


def _user(info: dict[str, Any]) -> Check:
    data = info.get("data", {})
    if not data:
        return Check("user", "ok", "the server does not say who we are: this user may not ask")
    bounds = "with permissions of its own" if data.get("permissions") else "without limits in its account"
    return Check("user", "ok", f"{data.get('user', '?')} of account {data.get('account', '?')}, {bounds}")


def _clock(info: dict[str, Any]) -> Check:
    from moorage.bus.jetstream import wall_seconds

    if not info:
        return Check("clock", "ok", "not compared: this user may not ask for the server's, and a scheduler does")
    try:
        off_s = time.time() - wall_seconds(info["server"]["time"])
    except (KeyError, ValueError):
        fix = "run chrony or ntpd on both: a scheduler's log tells of a clock that is off"
        return Check("clock", "warn", "cannot be compared with the server's, which does not say its time", fix)
    found = f"{age(abs(off_s) * 1000)} {'ahead of' if off_s > 0 else 'behind'} the server's"
    if abs(off_s) > CLOCK_OFF_S_MAX:
        fix = "run chrony or ntpd: deadlines are told in wall time at a takeover"
        return Check("clock", "warn", f"{found}, more than {CLOCK_OFF_S_MAX:g} s", fix)
    return Check("clock", "ok", found)


async def _jetstream(connection: Connection, context: Context) -> Check:
    api, is_about = context.api_prefix, "the account"
    info = await _asked(connection, f"{api}.INFO")
    if not info and role_of(context) in ("scheduler", ""):  # a scheduler may ask for the streams that it reads
        from moorage.schemas.subjects import Subjects

        is_about = stream = Subjects().request_stream
        info = await _asked(connection, f"{api}.STREAM.INFO.{stream}")
    if not info:
        if role_of(context) in (*_CLIENTS, "operator"):
            return Check("jetstream", "ok", "this user needs none: schedulers alone do")
        return Check("jetstream", "warn", "this user may not ask for it", "submitters need none; schedulers do")
    if error := info.get("error"):
        found = str(error.get("description", error))
        if error.get("err_code") == _ERR_STREAM_NOT_FOUND:
            return Check("jetstream", "ok", f"it answers: {is_about}: {found}, as before the first scheduler")
        if error.get("err_code") == _ERR_NO_JETSTREAM_LEADER:
            return Check("jetstream", "fail", found, _SERVERS_MISSING)
        fix = "turn it on: jetstream {} in the server's file, and jetstream: enabled in the account; a ledger needs it"
        return Check("jetstream", "warn", found, fix)
    if (state := info.get("state")) is not None:
        return Check("jetstream", "ok", f"it answers: {is_about} holds {many(state['messages'], 'message')}")
    return Check("jetstream", "ok", f"{many(info['streams'], 'stream')}, {info['storage'] // 1024} KiB on disk")


def _sync(context: Context) -> Check:
    """Only the server of a `moorage up` shows its file; of others a client cannot see it."""
    hint = "see that sync_interval is always on the ledger's servers, as moorage admin nats-config writes it"
    conf = _conf_of_ours(context)
    if conf is not None:
        always = "sync_interval: always" in _head(conf)
        found = f"sync_interval {'always' if always else 'is not always'}, in {conf}"
        return Check("sync", "ok", found) if always else Check("sync", "warn", found, hint)
    return Check("sync", "warn", "a client cannot see whether the server writes through", hint)


def _conf_of_ours(context: Context) -> Path | None:
    """The configuration of the server that a `moorage up` of this user started, where that is who answers."""
    from moorage.bus.target import home

    conf = home() / "nats" / "nats.conf"
    return conf if context.source.startswith(str(home())) and conf.is_file() else None


def _disk(conf: Path) -> Check:
    """A server whose disk is full takes no record: the scheduler answers nobody until there is room."""
    disk = disk_of(conf.parent)
    found = disk.text(conf.parent)
    if disk.free >= DISK_FREE_MIN:
        return Check("disk", "ok", found)
    return Check("disk", "fail", found, "make room there: moorage up then goes on by itself, and nothing is lost")


def _head(path: Path) -> str:
    with path.open(errors="replace") as file:
        return file.read(_CONF_BYTES_MAX)


# -------------------------------------------------------------------------------------------------------- moorage


async def _of_moorage(options: Options, is_cluster: bool) -> AsyncIterator[Check]:
    from moorage.cli.options import client_of
    from moorage.client.errors import NoScheduler, NotPermitted

    try:
        async with client_of(options) as client:
            heard = await _may_hear(client)
            try:
                listed = await client.answer("ls", {"limit": 1})
            except NoScheduler as error:
                yield heard
                yield _failed("leader", error)
                return
            except NotPermitted as error:
                others = [check async for check in _of_other_roles(client)]
                if not others and role_of(client.context) in ("", "submitter"):
                    yield heard
                    raise
                if heard.verdict == "ok":  # of a key that is for no tenant's jobs nothing is missing
                    yield heard
                yield Check("submitter", "ok", f"{error.problem.message}: jobs are for who has a tenant's key")
                for check in others:
                    yield check
                return
            yield heard
            yield await _submitter(client)
            yield await _queue(client, is_cluster)
            async for check in _of_operators(client, listed.ledger):
                yield check
    except MoorageError as error:
        from moorage.client.tenant import find_tenant

        role = f"give this user the submitter's role of tenant {find_tenant(options.tenant)}, or name one with --tenant"
        yield _failed("submitter", error, fix=role if isinstance(error, NotPermitted) else "")


def role_of(context: Context | None) -> str:
    """The role that a key was made for, as the inbox of its context says; empty where nothing says so."""
    from moorage.schemas.roles import INBOX, ROLES

    prefix = context.inbox_prefix if context is not None else ""
    first, _, rest = prefix.partition(".")
    role = rest.partition(".")[0]
    return role if first == INBOX and role in ROLES else ""


async def _of_other_roles(client: AsyncClient) -> AsyncIterator[Check]:
    """What a key may do here that submits nothing: an operator's asks for the fleet, an observer's hears of it."""
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            fleet = await client.fleet()
    except (MoorageError, TimeoutError):
        pass
    else:
        for check in of_fleet(fleet):
            yield check
        return
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            frame = await anext(client.fleet_frames())
    except (MoorageError, TimeoutError):
        return
    yield Check("leader", "ok", f"epoch {frame.epoch}, ledger record {frame.ledger}")
    yield Check("observer", "ok", "this user hears of the fleet: moorage fleet --watch")
    yield _workers(frame.workers)


async def _may_hear(client: AsyncClient) -> Check:
    try:
        await (await client.subscribe(client.subjects.events(client.tenant), lambda _: None)).unsubscribe()
    except MoorageError as error:
        return _failed("events", error, "warn", "let this user subscribe to its tenant's events: waits need them")
    return Check("events", "ok", f"tenant {client.tenant}'s may be heard")


async def _submitter(client: AsyncClient) -> Check:
    """Whether who may ask may hand in, too: an operator may not. An empty request is refused, and leaves nothing."""
    from moorage.bus.errors import PermissionRefused

    try:
        await client.link.request(client.subjects.api(client.tenant, "submit"), b"", ANSWER_S_MAX)
    except PermissionRefused:
        return Check("submitter", "ok", f"of tenant {client.tenant} it may ask; jobs are for who has a tenant's key")
    return Check("submitter", "ok", f"tenant {client.tenant} may ask and submit")


#: JetStream refuses before it stores: the question leaves nothing behind
_NOT_HERE: Final = {"Nats-Expected-Stream": "moorage-doctor-asks"}
_WEDGE: Final = "one publish with a false header stops a replicated queue for good (nats-server 2.14 and 2.15)"


async def _queue(client: AsyncClient, is_cluster: bool) -> Check:
    """Who may publish to the durable queue of a cluster can stop it for everybody."""
    from moorage.bus.errors import PermissionRefused

    try:
        await client.link.request(client.subjects.request(client.tenant, "submit"), b"", ANSWER_S_MAX, _NOT_HERE)
    except PermissionRefused:
        if is_cluster:
            return Check("queue", "ok", f"the endpoint alone, as it should be in a cluster: {_WEDGE}")
        return Check("queue", "ok", "the endpoint alone: the durable queue is for who has an account of their own")
    except MoorageError as error:
        return Check("queue", "warn", f"the durable queue does not answer: {error}", "a scheduler makes it: start one")
    if is_cluster:
        fix = "in a cluster let submitters use the endpoint alone: moorage admin nats-config writes it so"
        return Check("queue", "warn", f"this user may publish to the durable queue: {_WEDGE}", fix)
    return Check("queue", "ok", "the durable queue takes requests while no scheduler lives")


async def _of_operators(client: AsyncClient, ledger: int) -> AsyncIterator[Check]:
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            fleet = await client.fleet()
    except (MoorageError, TimeoutError):
        yield Check("leader", "ok", f"answers, at ledger record {ledger}")
        yield Check("operator", "ok", "this user may not ask for the fleet: drain and audit are for operators")
        return
    for check in of_fleet(fleet):
        yield check


def of_fleet(fleet: dict[str, Any]) -> Iterator[Check]:
    yield Check("leader", "ok", f"{fleet['leader']}, epoch {fleet['epoch']}, ledger record {fleet['ledger']}")
    yield Check("operator", "ok", "this user may ask for the fleet")
    if (copies := fleet.get("ledger_copies")) is not None:
        yield _copies(copies["wanted"], copies["lacking"])
    if (schedulers := _schedulers(fleet.get("schedulers", []))) is not None:
        yield schedulers
    yield _workers(fleet["workers"])
    if (twice := fleet.get("lent_twice")) is not None:
        yield lent_twice(twice)


def _copies(wanted: int, lacking: list[str]) -> Check:
    """Of a ledger in a cluster: one copy less is noticed by nobody, and the next one stops everything."""
    if not lacking:
        return Check("copies", "ok", f"the ledger has all of its {wanted} copies")
    found = f"copies of the ledger that are not kept up: {len(lacking)} of {wanted}: {', '.join(lacking)}"
    fix = f"see that these nats-servers run and reach the others; start one again whose disk was full: {_HALF}"
    return Check("copies", "warn", found, fix)


def _schedulers(rows: list[dict[str, Any]]) -> Check | None:
    """Whoever leads goes by its own settings: one that stands by with others changes them by taking over."""
    leader = next((row for row in rows if row.get("leads")), None)
    if leader is None or len(rows) < 2:
        return None
    ours = leader.get("settings")
    if ours is None or all(row.get("settings") in (ours, None) for row in rows):
        return Check("schedulers", "ok", f"{many(len(rows), 'scheduler')}: {leader['scheduler']} leads")
    told = []
    for row in rows:
        theirs = row.get("settings")
        if theirs is not None and theirs != ours:
            names = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
            told.append(f"{row['scheduler']} ({', '.join(names[:NAMES_MAX])})")
    found = f"{leader['scheduler']} leads, and {', '.join(told[:NAMES_MAX])} would lead by other settings"
    return Check("schedulers", "warn", found, "give all schedulers one settings file, and restart those that differ")


def lent_twice(rows: list[dict[str, str]]) -> Check:
    """GPUs that two workers lend, each to jobs of its own: only where both joined before a scheduler looked for it."""
    pairs = dict.fromkeys((row["worker"], row["other"]) for row in rows)
    first = rows[0]
    more = f", and so do {many(len(pairs) - 1, 'more pair')} of workers" if len(pairs) > 1 else ""
    found = f"{first['worker']} and {first['other']} lend one GPU ({first['uuid']}){more}: both get jobs for it"
    fix = f"restart the agent that is not to have it, say {first['other']}: it is then refused and says why"
    return Check("lent-twice", "warn", found, fix)


def _workers(rows: list[dict[str, Any]]) -> Check:
    if not rows:
        return Check("workers", "warn", "none has joined", "start one: moorage worker")
    counts: dict[str, list[str]] = {}
    for row in rows:
        counts.setdefault(row["state"], []).append(row["worker"])
    simulated = sum(row["simulated"] for row in rows)
    found = ", ".join(f"{len(names)} {state}{_named(state, names)}" for state, names in sorted(counts.items()))
    found += f" ({simulated} simulated)" if simulated else ""
    if "stale" in counts or "not-heard" in counts:
        fix = "see the log of its moorage worker (of a moorage up: worker.log in its folder), and its way to the server"
        return Check("workers", "warn", found, fix)
    if "up" not in counts:
        return Check("workers", "warn", found, "moorage fleet shows them; moorage worker starts one")
    return Check("workers", "ok", found)


def _named(state: str, names: list[str]) -> str:
    """Which ones are not as they should be, up to `NAMES_MAX`."""
    if state == "up":
        return ""
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f": {' '.join(sorted(names)[:NAMES_MAX])}{more}"
