"""A ledger of one copy on a cluster, which stops with its server: making one is refused unless it is said.

Nothing tells a user of an account how many servers a cluster has, and the information about a stream of one copy names
one server alone. So a stream in memory is made, with several copies, and deleted again: its information names them.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from moorage.bus.errors import ERR_NO_CLUSTER, ERR_NO_ROOM, BusError, JetStreamRefused, PermissionRefused
from moorage.bus.jetstream import JetStream, StreamInfo
from moorage.schemas.errors import refuse
from moorage.schemas.subjects import Subjects

#: more are not asked for: with three servers, three copies are the advice, whatever more there are
_ASKED: Final = (3, 2)
_WHERE: Final = (
    "under [scheduler] in the schedulers' settings file, moorage.toml, which MOORAGE_SETTINGS or --settings names"
)


async def servers_of(jetstream: JetStream, subjects: Subjects) -> frozenset[str]:
    """Return the names of the cluster's servers on which JetStream puts copies, three of them at most.

    Fewer than two if JetStream is no cluster, if no second server runs, or if this user may not ask. Raises `BusError`.
    """
    for copies in _ASKED:
        try:
            return (await try_copies(jetstream, subjects, copies)).servers
        except PermissionRefused:
            return frozenset()
        except JetStreamRefused as refused:
            if refused.err_code == ERR_NO_CLUSTER:
                return frozenset()
            if refused.err_code not in ERR_NO_ROOM:
                raise
    return frozenset()


async def try_copies(jetstream: JetStream, subjects: Subjects, copies: int, size: int = 0) -> StreamInfo:
    """Have the servers make a stream of so many copies, each of `size` bytes on a disk (0: in memory), and delete it.

    Returns the information about it. Raises `BusError`, as `JetStreamRefused` if they cannot.
    """
    stored: dict[str, Any] = {"storage": "file", "max_bytes": size} if size else {"storage": "memory"}
    probe = f"{subjects.ledger_stream}_PROBE_{copies}{'_FILE' if size else ''}"
    try:
        return await jetstream.ensure_stream(
            {"name": probe, "num_replicas": copies, **stored}, frozenset({"max_bytes"})
        )
    finally:  # also where this is cancelled
        with contextlib.suppress(BusError):  # it was not made, or another process that asks has deleted it
            await jetstream.delete_stream(probe)


async def check_one_copy(jetstream: JetStream, subjects: Subjects) -> None:
    """Raise `Refused` if JetStream is a cluster: there a new ledger gets one copy only where that is said.

    Raises `BusError`.
    """
    servers = await servers_of(jetstream, subjects)
    if len(servers) < 2:
        return
    names = ", ".join(sorted(servers))
    found = "the new ledger would have one copy, and nothing could be written while its server is away"
    if len(servers) > 2:
        raise refuse(
            "failed-precondition",
            f"JetStream is a cluster ({names}), but {found}",
            found="replicas = 1",
            allowed="replicas = 3 or 5; replicas = 1 where it is said",
            next=f"write `replicas = 3` {_WHERE} (or --replicas 3); `replicas = 1` there means one copy on purpose",
        )
    raise refuse(
        "failed-precondition",
        f"JetStream is a cluster of which two servers run ({names}), but {found}; two copies would be no better, as"
        " they accept nothing once either server is away",
        found="replicas = 1",
        allowed="replicas = 1 where it is said; with a third server, replicas = 3",
        next=f"start a third nats-server of the cluster and write `replicas = 3` {_WHERE} (or --replicas 3); to stay"
        " with two servers, write `replicas = 1` there",
    )
