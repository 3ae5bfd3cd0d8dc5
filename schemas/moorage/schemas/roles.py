"""The rights of the five roles, from the table of subjects: what each may publish and subscribe to, and its inbox.

Permission templates, the reference page and the scheduler's check of reply subjects all come from here. A reply subject
is chosen by who asks, and no server checks it: `may_answer` does, or a legal question would have the scheduler write
where the asker may not (a worker's subject, JetStream's API, another user's inbox).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, get_args

from moorage.schemas.subjects import SubjectRow, Subjects

Role = Literal["submitter", "operator", "observer", "worker", "scheduler"]
ROLE_NAMES: Final[tuple[Role, ...]] = get_args(Role)
#: what a role is, and the words of the table's columns that mean it
ROLES: Final[dict[Role, tuple[str, tuple[str, ...]]]] = {
    "submitter": ("a service or a person, of one tenant", ("submitter", "tenant")),
    "operator": ("who runs the fleet", ("operator", "operators", "observers")),
    "observer": ("dashboards: all that is public, no tenant's job", ("observers",)),
    "worker": ("one machine, by its id", ("worker", "workers", "that worker")),
    "scheduler": ("leaders and standbys", ("leader", "schedulers", "scheduler")),
}
#: what operators may ask of any tenant, whose events they hear as well
OPERATOR_READS: Final = ("show", "ls", "explain", "history", "usage")
INBOX: Final = "_INBOX"
_INBOX_HEAD: Final = f"{INBOX}."
#: an inbox as `inbox` names them, with something below it
_OWNED: Final = re.compile(rf"{INBOX}\.(?:{'|'.join(ROLES)})\.[^.]*\.").match
#: by which JetStream of the users' account is asked from a tenant's, for results (NATS' `jetstream_api_prefix`)
RESULT_API: Final = "$JS.moorage.API"
#: what a user is told of its own rights: a scheduler finds in them which tenants have a queue of their own
USER_INFO: Final = "$SYS.REQ.USER.INFO"
#: what a server makes of a reply subject that comes from another account
IMPORTED_REPLY: Final = "_R_"
#: asked of every service by discovery (NATS ADR-32)
_DISCOVERY: Final = {f"$SRV.{verb}{of}" for verb in ("PING", "INFO", "STATS") for of in ("", ".moorage", ".moorage.*")}
_PLACE: Final = re.compile(r"<[a-z]+>")
_STREAM_VERBS: Final = ("CREATE", "UPDATE", "INFO", "PURGE", "MSG.GET", "MSG.DELETE")


class Rights(NamedTuple):
    """Subjects that a user may publish to and subscribe to, sorted, each once; `answers` is how many answers it may
    give to each question that it hears, on whatever subject that names."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: int = 0


def names(cell: str) -> set[str]:
    """Return the roles of a cell of the table, without what stands in brackets behind one."""
    return {name.partition(" (")[0].strip() for name in cell.split(",")}


def inbox(role: Role, name: str) -> str:
    """Return the inbox prefix of one user, for its nats context: no other user may subscribe below it."""
    return f"{INBOX}.{role}.{name}"


def rights(
    role: Role,
    name: str,
    subjects: Subjects,
    *,
    queue: bool = False,
    results_of: Iterable[str] = (),
    queues_of: Iterable[str] = (),
) -> Rights:
    """What one user may do. `name` is a submitter's tenant, a worker's id, else the user's own.

    `queue` gives a submitter the durable queue; `results_of` are the tenants whose functions' results workers keep,
    schedulers make room for, and the tenant reads, and whose jobs bring files, which tenant and workers write and read.
    In both the server itself answers, on whatever subject the asker names. So they are for submitters in an account of
    their own, where no subject of others can be named, and the queue only where it is not replicated (one false header
    wedges it for everybody). `queues_of` are the tenants with a stream of their own for it, which schedulers make and
    read.
    """
    words = set(ROLES[role][1])
    rows = [row for row in subjects.table() if row.kind != "ledger"]
    publish = {_filled(row, role, name) for row in rows if names(row.writes) & words}
    subscribe = {_filled(row, role, name) for row in rows if names(row.reads) & words}
    subscribe.add(f"{inbox(role, name)}.>")
    if role == "submitter":
        if not queue:
            publish -= {subjects.request(name, "submit"), subjects.request(name, "cancel")}
        if name in results_of:
            publish |= {*object_reads(subjects.result_bucket(name)), *object_reads(subjects.files_bucket(name))}
            publish.add(f"$O.{subjects.files_bucket(name)}.>")
    elif role == "operator":
        publish |= {subjects.api("*", verb) for verb in OPERATOR_READS}
        publish |= _DISCOVERY
    elif role == "worker":
        publish |= {f"$O.{subjects.result_bucket(tenant)}.>" for tenant in results_of}
        publish |= {f"$O.{subjects.files_bucket(tenant)}.>" for tenant in results_of}
        for tenant in results_of:
            publish |= set(object_reads(subjects.files_bucket(tenant), "$JS.API"))
    elif role == "scheduler":
        streams = [subjects.request_stream, subjects.dead_letter_stream, subjects.history_stream]
        streams += [subjects.request_stream_of(tenant) for tenant in queues_of]
        streams += [f"OBJ_{subjects.result_bucket(tenant)}" for tenant in results_of]
        streams += [f"OBJ_{subjects.files_bucket(tenant)}" for tenant in results_of]
        publish.add(USER_INFO)
        publish |= {f"$JS.API.STREAM.{verb}.{stream}" for verb in _STREAM_VERBS for stream in streams}
        publish |= {f"$JS.API.DIRECT.GET.{stream}" for stream in streams}
        publish |= {f"{INBOX}.>", f"{IMPORTED_REPLY}.>"}
        subscribe |= {subjects.request_all} | _DISCOVERY
    return Rights(tuple(sorted(publish)), tuple(sorted(subscribe)), answers=1 if role == "worker" else 0)


def object_reads(bucket: str, api: str = RESULT_API) -> tuple[str, str]:
    """Return the subjects by which objects of a bucket are read: one message, and several.

    In a tenant's account `$JS.API` would be its own JetStream, which it has not: so it has another prefix there.
    """
    return f"{api}.STREAM.MSG.GET.OBJ_{bucket}", f"{api}.DIRECT.GET.OBJ_{bucket}"


def _filled(row: SubjectRow, role: Role, name: str) -> str:
    """Return a subject of the table with the user's own name where it stands for it, and `*` for the rest."""
    mine = {"submitter": "<tenant>", "worker": "<worker>"}.get(role)
    return _PLACE.sub("*", row.subject.replace(mine, name) if mine else row.subject)


def may_answer(prefix: str, asked: str, reply: str) -> bool:
    """Return whether a question on the subject `asked` may be answered on `reply`, which the asker chose.

    Not on a subject of ours or of the server's own (`$JS`, `$SYS`, `$O` and the like), and in an inbox that `inbox`
    names only where it is that of who may ask there: a tenant's by its submitters, and what operators may read by them.
    Other inboxes are anybody's, as on servers without these permissions.
    """
    if reply.startswith("$") or (reply.startswith(prefix) and reply[len(prefix) : len(prefix) + 1] in (".", "")):
        return False
    if not reply.startswith(_INBOX_HEAD):
        return True
    if _OWNED(reply) is None:
        return True
    parts = reply.split(".", 3)
    room, _, rest = asked.removeprefix(prefix + ".").partition(".")
    owner, _, verb = rest.partition(".")
    if room == "api":
        return (parts[1] == "submitter" and parts[2] == owner) or (parts[1] == "operator" and verb in OPERATOR_READS)
    if room == "worker":
        return parts[1] == "worker" and parts[2] == owner
    return parts[1] == "operator"
