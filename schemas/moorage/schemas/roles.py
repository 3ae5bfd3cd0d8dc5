"""The rights of the six roles: the subjects to which each may publish and subscribe, and its inbox. They follow from
the table of subjects.

The permission templates, the reference page and the scheduler's check of reply subjects all come from here. The asker
chooses a reply subject, and no server checks it. Without `may_answer`, a legal question could make the scheduler
publish where the asker may not (a worker's subject, JetStream's API, another user's inbox).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, get_args

from moorage.schemas.actors import NO_OPERATOR
from moorage.schemas.names import is_worker
from moorage.schemas.passed_on import PassedOn
from moorage.schemas.subjects import EXEC, MAY_EXEC, SubjectRow, Subjects

Role = Literal["submitter", "caller", "operator", "observer", "worker", "service", "scheduler"]
ROLE_NAMES: Final[tuple[Role, ...]] = get_args(Role)
#: what a role is, and the words of the table's columns that mean it
ROLES: Final[dict[Role, tuple[str, tuple[str, ...]]]] = {
    "submitter": ("a service or a person, of one tenant", ("submitter", "tenant")),
    "caller": ("what calls a tenant's services, and does nothing else: a door", ("caller",)),
    "operator": ("who runs the fleet", ("operator", "operators", "observers")),
    "observer": ("dashboards: all that is public, no tenant's job", ("observers",)),
    "worker": ("one machine, by its id", ("worker", "workers", "that worker")),
    "service": ("members of a tenant's services, which answer calls", ("service",)),
    "scheduler": ("leaders and standbys", ("leader", "schedulers", "scheduler")),
}
#: what callers of services may ask besides: to wake one, and which there are
CALLER_ASKS: Final = ("wake", "services")
#: what the inbox of a caller has behind that of its tenant's submitter, so that members may answer there: with its name
CALLER_INBOX: Final = "caller-"
#: what operators may ask of any tenant, whose events they hear as well
OPERATOR_READS: Final = ("show", "ls", "explain", "history", "usage")
INBOX: Final = "_INBOX"
_INBOX_HEAD: Final = f"{INBOX}."
#: by which JetStream of the users' account is asked from a tenant's, for results (NATS' `jetstream_api_prefix`)
RESULT_API: Final = "$JS.moorage.API"
#: the name by which the joiner gives its one order, and that of its inbox
JOINER: Final = "joiner"
POOL: Final = "pool"
#: an inbox with the name of its owner, with something below it
_OWNED: Final = re.compile(rf"{INBOX}\.(?:{'|'.join((*ROLES, POOL, JOINER))})\.[^.]*\.").match
#: what to do where a user lacks a right that its role has
RIGHTS_ANEW: Final = (
    "these rights are of an earlier release: an operator runs moorage admin nats-config again, with every name, and"
    " reloads the nats-servers"
)
#: what a user is told of its own rights: a scheduler finds in them which tenants have a queue of their own
USER_INFO: Final = "$SYS.REQ.USER.INFO"
#: what a server makes of a reply subject that comes from another account
IMPORTED_REPLY: Final = "_R_"
#: asked of every service by discovery (NATS ADR-32)
_DISCOVERY: Final = {f"$SRV.{verb}{of}" for verb in ("PING", "INFO", "STATS") for of in ("", ".moorage", ".moorage.*")}
_PLACE: Final = re.compile(r"<[a-z]+>")
_STREAM_VERBS: Final = ("CREATE", "UPDATE", "INFO", "PURGE", "MSG.GET", "MSG.DELETE")


class Rights(NamedTuple):
    """The subjects to which a user may publish and subscribe, sorted, each once.

    `answers` is how many answers it may give to each question that it receives, on whatever reply subject that has. It
    may not publish to `refused`, though `publish` covers it, nor hear `unheard`, though `subscribe` does.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: int = 0
    refused: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()


def names(cell: str) -> set[str]:
    """Return the roles that a cell of the table lists, without the notes in brackets."""
    return {name.partition(" (")[0].strip() for name in cell.split(",")}


def inbox(role: Role, name: str) -> str:
    """Return the inbox prefix of one user, for its nats context. No other user may subscribe below it; only that of a
    caller, whose name is TENANT.NAME, is below its tenant's, and persons, named so too, have their tenant's."""
    if role == "submitter":
        name = name.partition(".")[0]
    if role == "caller":
        tenant, _, own = name.partition(".")
        return f"{INBOX}.submitter.{tenant}.{CALLER_INBOX}{own}"
    return f"{INBOX}.{role}.{name}"


def inbox_of(role: Role, name: str, subjects: Subjects) -> str:
    """Return the inbox prefix of one user of any role. Members of a service have theirs among their own subjects."""
    return subjects.member_inbox(name) if role == "service" else inbox(role, name)


def operator_of(inbox_prefix: str) -> str:
    """Return the operator's name in an inbox prefix of the form of `inbox`; `_` for any other prefix."""
    name = inbox_prefix.removeprefix(f"{INBOX}.operator.")
    return name if name != inbox_prefix and is_worker(name) else NO_OPERATOR


def rights(
    role: Role,
    name: str,
    subjects: Subjects,
    *,
    queue: bool = False,
    results_of: Iterable[str] = (),
    queues_of: Iterable[str] = (),
    execs: bool = False,
    serves: Iterable[str] | None = None,
    callers: Iterable[str] = (),
) -> Rights:
    """Return what one user may do. `name` is the tenant of a submitter or service, TENANT.NAME of a
    caller or person, a worker's id, or else the user's own name.

    `queue` gives a submitter the durable queue. `results_of` are the tenants for which buckets of results, files and
    checkpoints exist: their functions' results are written by workers and read by the tenant, their jobs' files are
    written and read by both, and checkpoints by workers alone. There, and for the queue, the server itself answers, on
    whatever subject the asker names. So of the users' account schedulers alone may ask it: workers ask them (see
    `passed_on`). Submitters have these rights in an account of their own, where no other user's subject can be named,
    and the queue only if it is not replicated (one wrong header stops it for everybody).
    `queues_of` are the tenants with a stream of their own for the queue, which schedulers make and read. `execs` lets a
    submitter run commands in its running jobs. `serves` are the tenants for whose jobs a worker may write; None: all.
    `callers` are those of the site, TENANT.NAME: a submitter hears no inbox of theirs, though it is below its own.
    """
    words = set(ROLES[role][1])
    if role == "submitter":
        name = name.partition(".")[0]
    if role == "submitter" and execs:
        words.add(MAY_EXEC)
    rows = [row for row in subjects.table() if row.kind != "ledger"]
    served = None if serves is None or role != "worker" else sorted(serves)
    tenants = ["*"] if served is None else served
    publish = {_filled(row, role, name, each) for row in rows if names(row.writes) & words for each in tenants}
    subscribe = {_filled(row, role, name, each) for row in rows if names(row.reads) & words for each in tenants}
    if role == "service":  # its inbox is among the members' own subjects: see `Subjects.member_inbox`
        # an answer goes to the caller alone. `allow_responses` would let a caller choose the subject
        publish |= {f"{inbox('submitter', name)}.>", f"{INBOX}.operator.*.>"}
    else:
        subscribe.add(f"{inbox(role, name)}.>")
    if role == "submitter":
        if not queue:
            publish -= {subjects.request(name, "submit"), subjects.request(name, "cancel")}
        if name in results_of:
            publish |= set(object_reads(subjects.result_bucket(name)))
            for bucket in (subjects.files_bucket(name), subjects.schedules_bucket(name)):
                publish |= {f"$O.{bucket}.>", *object_reads(bucket)}
            # once full it takes no message, so none that would make room either, and nothing in it has an age
            publish.add(f"{RESULT_API}.STREAM.PURGE.OBJ_{subjects.schedules_bucket(name)}")
    elif role == "caller":
        publish |= {subjects.api(name.partition(".")[0], verb) for verb in CALLER_ASKS}
    elif role == "operator":
        publish |= {subjects.api("*", verb) for verb in OPERATOR_READS}
        publish |= _DISCOVERY
    elif role == "worker":
        passed_on = PassedOn(subjects)
        with_buckets = [tenant for tenant in results_of if served is None or tenant in served]
        publish |= {each for tenant in with_buckets for each in passed_on.rights(name, tenant)}
    elif role == "scheduler":
        streams = [subjects.request_stream, subjects.dead_letter_stream, subjects.history_stream]
        streams += [subjects.request_stream_of(tenant) for tenant in queues_of]
        streams += [f"OBJ_{subjects.result_bucket(tenant)}" for tenant in results_of]
        for bucket_of in (subjects.files_bucket, subjects.checkpoints_bucket, subjects.schedules_bucket):
            streams += [f"OBJ_{bucket_of(tenant)}" for tenant in results_of]
        for bucket_of in (subjects.result_bucket, subjects.files_bucket, subjects.checkpoints_bucket):
            publish |= {f"$O.{bucket_of(tenant)}.>" for tenant in results_of}  # for workers, see `passed_on`
        publish.add(USER_INFO)
        publish |= {f"$JS.API.STREAM.{verb}.{stream}" for verb in _STREAM_VERBS for stream in streams}
        publish |= {f"$JS.API.DIRECT.GET.{stream}" for stream in streams}
        publish |= {f"{INBOX}.>", f"{IMPORTED_REPLY}.>"}
        subscribe |= {subjects.request_all} | _DISCOVERY
    refused = (subjects.api(name, EXEC),) if role == "submitter" and not execs else ()
    mine = (each for each in callers if role == "submitter" and each.startswith(f"{name}."))
    return Rights(
        tuple(sorted(publish)),
        tuple(sorted(subscribe)),
        answers=1 if role == "worker" else 0,
        refused=refused,
        unheard=tuple(sorted(f"{inbox('caller', each)}.>" for each in mine)),
    )


def pool_rights(pool: str, subjects: Subjects) -> Rights:
    """Return what the user may do by which machines with tokens of a pool connect: ask for a key, and no more."""
    return Rights((subjects.join(pool),), (f"{pool_inbox(pool)}.>",))


def joiner_rights(subjects: Subjects) -> Rights:
    """Return what the joiner may do: hear these, answer them, and have the leader record each."""
    publish = sorted((subjects.admin("admit", JOINER), f"{INBOX}.{POOL}.>"))
    return Rights(tuple(publish), (subjects.join("*"), f"{INBOX}.{JOINER}.>"))


def pool_inbox(pool: str) -> str:
    return f"{INBOX}.{POOL}.{pool}"


def joint(of: Iterable[Rights]) -> Rights:
    """Return what several users may do together: a leaf node, behind which they are. What is refused to one of them is
    so to all where no other may do it."""
    each = list(of)
    publish = {subject for one in each for subject in one.publish}
    subscribe = {subject for one in each for subject in one.subscribe}
    return Rights(
        tuple(sorted(publish)),
        tuple(sorted(subscribe)),
        answers=max((one.answers for one in each), default=0),
        refused=tuple(sorted({subject for one in each for subject in one.refused} - publish)),
        unheard=tuple(sorted({subject for one in each for subject in one.unheard} - subscribe)),
    )


def through_leaf(may: Rights) -> Rights:
    """Return these rights as a leaf node needs them: nats-server has no `allow_responses` for those.

    Schedulers alone ask workers, and their inboxes are random. The leaf node's own server still holds each worker
    behind it to one answer for each question.
    """
    if not may.answers:
        return may
    return may._replace(publish=tuple(sorted({*may.publish, f"{INBOX}.scheduler.*.>"})), answers=0)


def has_right(inbox_prefix: str, operation: str, subject: str) -> bool:
    """Return whether the role of the user with this inbox has the right to that subject, which may be in lower case.

    A server that refuses it all the same has rights of an earlier release. Only what everybody of a role may do counts,
    below the default prefix, and no inboxes: those are refused to a wrong key.
    """
    first, role, name, own, *_ = [*inbox_prefix.split("."), "", "", ""]
    if role == "submitter" and own.startswith(CALLER_INBOX):
        role, name = "caller", f"{name}.{own.removeprefix(CALLER_INBOX)}"
    if first != INBOX or role not in ROLES or not name:
        return False
    given, asked = rights(role, name, Subjects()), subject.lower()
    may = given.publish if operation == "publish" else given.subscribe
    may = tuple(each for each in may if not each.startswith(_INBOX_HEAD))
    return asked not in map(str.lower, given.refused) and any(_covers(each.lower(), asked) for each in may)


def _covers(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">" and len(given) >= len(wanted):
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(one in ("*", other) for one, other in zip(wanted, given, strict=True))


def object_reads(bucket: str) -> tuple[str, str]:
    """Return the subjects for reading objects of a bucket from a tenant's account: one message, and several.

    `$JS.API` there would be the account's own JetStream, which it does not have, so the prefix is another one.
    """
    return f"{RESULT_API}.STREAM.MSG.GET.OBJ_{bucket}", f"{RESULT_API}.DIRECT.GET.OBJ_{bucket}"


def _filled(row: SubjectRow, role: Role, name: str, tenant: str) -> str:
    """Return a subject of the table with the user's name in its place, a tenant (or `*`) in that of one, and `*` in the
    other places."""
    mine = {"submitter": "<tenant>", "service": "<tenant>", "worker": "<worker>", "operator": "<operator>"}.get(role)
    if role == "caller":
        mine, name = "<tenant>", name.partition(".")[0]
    own = row.subject.replace(mine, name) if mine else row.subject
    return _PLACE.sub("*", own.replace("<tenant>", tenant))


def may_answer(prefix: str, asked: str, reply: str) -> bool:
    """Return whether a question on the subject `asked` may be answered on `reply`, which the asker chose.

    Subjects of moorage and of the server (`$JS`, `$SYS`, `$O` and the like) are no reply subjects. An inbox of the form
    of `inbox` must belong to a user who may ask on this subject: a submitter of that tenant, that worker, that
    operator, or the joiner. Other inboxes belong to anybody, as on servers without these permissions.
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
    if room == "call":
        return parts[1] == "operator" or (parts[1] == "submitter" and parts[2] == owner)
    if room == "api":
        return (parts[1] == "submitter" and parts[2] == owner) or (parts[1] == "operator" and verb in OPERATOR_READS)
    if room == "worker":
        return parts[1] == "worker" and parts[2] == owner
    if room == "admin" and owner == JOINER:
        return parts[1] == JOINER
    return parts[1] == "operator" and (room != "admin" or parts[2] == owner)
