"""Every subject and stream, with who writes and who reads it. No other module builds a subject from text."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from moorage.schemas.actors import NO_OPERATOR

PREFIX_DEFAULT: Final = "moorage"
#: stands for a job in the subject of the results of all jobs of a tenant; no job can have this id
ALL_JOBS: Final = "~"
is_prefix = re.compile(r"[A-Za-z0-9_-]{1,32}(\.[A-Za-z0-9_-]{1,32}){0,3}").fullmatch

API_VERBS: Final = (
    "submit",
    "cancel",
    "uncancel",
    "change",
    "signal",
    "show",
    "ls",
    "explain",
    "plan",
    "history",
    "again",
    "logs",
    "use",
    "reports",
    "rescue",
    "usage",
    "schedule",
    "wake",
    "services",
    "exec",
)
#: the verbs that change nothing, of submitters and of operators; those of `schedule` and `dlq` list and show as well
READ_VERBS: Final = frozenset(
    (
        *("show", "ls", "explain", "plan", "history", "again", "logs", "use", "reports", "usage", "services"),
        *("fleet", "audit", "acts", "tenants", "schedule", "dlq"),
    )
)
#: the verb that only some submitters may use where keys are configured: it runs commands in running jobs
EXEC: Final = "exec"
#: in the table of subjects, a submitter that may use it
MAY_EXEC: Final = "submitter with exec"
#: stands for a tenant in the subject of what happens to the fleet; no tenant can have this name
FLEET: Final = "_fleet"
#: stands for a service in the subjects on which its members hand calls to each other; no service can have this name
MEMBERS: Final = "~"
#: behind the subject of a service, whose methods have no capital letters: what callers ask its members
ASK: Final = "ASK"
#: what the members of a service say to each other, or to all
MEMBER_VERBS: Final = ("have", "want", "load")
#: in the table of subjects, who is of no role: a machine with a join token, and who answers it
OF_POOLS: Final = ("pool", "joiner")
#: in the table of subjects, a worker of tenants that have buckets
MAY_STORE: Final = "worker with files"
#: what a worker asks of the leader
WORKER_VERBS: Final = ("join", "renew", "fact")


def asked_of(calls: str, member: str = "") -> str:
    """Return the subject on which all members of the service with this subject, or one of them, are asked which calls
    they have."""
    return f"{calls}.{ASK}.{member}" if member else f"{calls}.{ASK}"


def member_of(calls: str, member: str) -> str:
    """Return the subject of calls for one member of the service with this subject."""
    return f"{calls}.at.{member}"


class SubjectRow(NamedTuple):
    """A row of the table of subjects. `kind` is answered, asked, durable, broadcast, `broadcast, public` or ledger."""

    subject: str
    kind: str
    writes: str
    reads: str
    what: str


class Subjects:
    """All subjects under one prefix (default `moorage`)."""

    def __init__(self, prefix: str = PREFIX_DEFAULT) -> None:
        self.prefix = prefix
        self.api_all = f"{prefix}.api.*.*"
        self.admin_all = f"{prefix}.admin.*.*"
        self.request_all = f"{prefix}.request.>"
        self.worker_join_all = f"{prefix}.worker.*.join"
        self.worker_renew_all = f"{prefix}.worker.*.renew"
        self.worker_fact_all = f"{prefix}.worker.*.fact"
        self.hello_all = f"{prefix}.hello.*"
        self.load_all = f"{prefix}.load.*"
        self.member_load_all = f"{prefix}.calls.*.*.load"
        self.fleet_frame = f"{prefix}.fleet.frame"
        self.fleet_detail = f"{prefix}.fleet.detail"
        self.roll_call = f"{prefix}.fleet.rollcall"
        self.standing = f"{prefix}.fleet.standing"
        self.look = f"{prefix}.fleet.look"
        self.may_store = f"{prefix}.fleet.maystore"
        self.worker_looked_all = f"{prefix}.worker.*.looked"
        self.worker_fetch_all = f"{prefix}.worker.*.fetch.>"
        self.worker_store_all = f"{prefix}.worker.*.store.>"
        self.worker_result_all = f"{prefix}.worker.*.result.>"
        self.ledger_all = f"{prefix}.ledger.>"
        self.ledger_record = f"{prefix}.ledger.record"
        self.ledger_snapshot = f"{prefix}.ledger.snapshot"
        self.ledger_epoch = f"{prefix}.ledger.epoch"
        self.snapshot_all = f"{prefix}.snapshot.>"
        self.follower_all = f"{prefix}.follower.>"
        self.follower_chunk = f"{prefix}.follower.chunk"
        self.follower_saved = f"{prefix}.follower.saved"
        self.trace_events = f"{prefix}.trace.events"
        self.schedule_all = f"{prefix}.schedule.>"
        self.schedule_wishes = f"{prefix}.schedule.wish.>"
        self.schedule_runs = f"{prefix}.schedule.run.>"
        #: on which a leader has nats-server check a time, before it records the schedule; and what that would publish
        self.schedule_try = f"{prefix}.schedule.try"
        self.schedule_tried = f"{prefix}.schedule.tried"
        self.scheduled_all = f"{prefix}.scheduled.>"
        self.dead_letters_all = f"{prefix}.dlq.>"
        self.history_all = f"{prefix}.history.*"
        self.persons = f"{prefix}.person."
        self._upper = upper = prefix.upper().replace(".", "_")
        self.ledger_stream = f"{upper}_LEDGER"
        self.snapshot_stream = f"{upper}_SNAPSHOT"
        self.follower_stream = f"{upper}_FOLLOWER"
        self.trace_stream = f"{upper}_TRACE"
        self.schedule_stream = f"{upper}_SCHEDULE"
        self.request_stream = f"{upper}_REQUEST"
        self.request_none = f"{prefix}.request"  # of the stream for all where each tenant has its own: nobody's
        self.dead_letter_stream = f"{upper}_DLQ"
        self.history_stream = f"{upper}_HISTORY"

    def api(self, tenant: str, verb: str) -> str:
        return f"{self.prefix}.api.{tenant}.{verb}"

    def admin(self, verb: str, operator: str = NO_OPERATOR) -> str:
        """Return an operator's subject; `operator` is the name in its key, `_` where there are no keys."""
        return f"{self.prefix}.admin.{operator}.{verb}"

    def join(self, pool: str) -> str:
        """Return the subject on which a machine with a join token of a pool asks for its key."""
        return f"{self.prefix}.join.{pool}"

    def request(self, tenant: str, verb: str) -> str:
        """Return the durable queue's subject; `verb` is submit or cancel."""
        return f"{self.prefix}.request.{tenant}.{verb}"

    def request_stream_of(self, tenant: str) -> str:
        """Return the name of a tenant's own stream of the durable queue, whether it exists or not."""
        return f"{self.request_stream}_{tenant}"

    def events(self, tenant: str) -> str:
        return f"{self.prefix}.events.{tenant}"

    def event(self, tenant: str, job: str) -> str:
        return f"{self.prefix}.event.{tenant}.{job}"

    def history(self, tenant: str) -> str:
        return f"{self.prefix}.history.{tenant}"

    def tty(self, tenant: str, worker: str, stream: str, way: str) -> str:
        """Return the subject of one direction of a stream, see `frames.running`; `way` is `in` or `out`."""
        return f"{self.prefix}.tty.{tenant}.{worker}.{stream}.{way}"

    def log(self, tenant: str, job: str, replica: int | str) -> str:
        return f"{self.prefix}.log.{tenant}.{job}.{replica}"

    def results(self, tenant: str) -> str:
        """Return the subject on which small results of a tenant's functions are sent to all of its subscribers."""
        return self.log(tenant, ALL_JOBS, 0)

    def hello(self, worker: str) -> str:
        return f"{self.prefix}.hello.{worker}"

    def load(self, worker: str) -> str:
        return f"{self.prefix}.load.{worker}"

    def worker(self, worker: str, verb: str) -> str:
        """Return a worker's subject for a `verb`: join, renew, report, looked, wanted or logs."""
        return f"{self.prefix}.worker.{worker}.{verb}"

    def snapshot(self, name: str) -> str:
        return f"{self.prefix}.snapshot.{name}"

    def schedule_wish(self, tenant: str, name: str) -> str:
        """Return the subject of the message that nats-server repeats for a schedule."""
        return f"{self.prefix}.schedule.wish.{tenant}.{name}"

    def schedule_run(self, tenant: str, name: str) -> str:
        """Return the subject on which nats-server publishes the runs of a schedule; the stream keeps the newest."""
        return f"{self.prefix}.schedule.run.{tenant}.{name}"

    def dead_letter(self, tenant: str) -> str:
        return f"{self.prefix}.dlq.{tenant}"

    def result_bucket(self, tenant: str) -> str:
        """Return the tenant's bucket of the object store, for results of functions; its stream is `OBJ_<bucket>`."""
        return f"{self._upper}_RESULT_{tenant}"

    def files_bucket(self, tenant: str) -> str:
        """Return the tenant's bucket for files that jobs bring and leave; its stream is `OBJ_<bucket>`."""
        return f"{self._upper}_FILES_{tenant}"

    def checkpoints_bucket(self, tenant: str) -> str:
        """Return the tenant's bucket for checkpoints of its jobs; its stream is `OBJ_<bucket>`."""
        return f"{self._upper}_CHECKPOINTS_{tenant}"

    def schedules_bucket(self, tenant: str) -> str:
        """Return the tenant's bucket for files of its schedules; its stream is `OBJ_<bucket>`."""
        return f"{self._upper}_SCHEDULES_{tenant}"

    def person(self, tenant: str, name: str, user: str) -> str:
        """Return the right of a scheduler that says which person a tenant's user is, as nats-server names the user.

        Nobody publishes there: nats-server tells a scheduler its rights, and so who is who.
        """
        return f"{self.persons}{tenant}.{name}.{user}"

    def call(self, tenant: str, service: str) -> str:
        """Return the subject of a service's calls, which its members answer."""
        return f"{self.prefix}.call.{tenant}.{service}"

    def call_cancel(self, tenant: str, service: str) -> str:
        """Return the subject on which a caller says that it no longer waits; the payload is its reply subject."""
        return f"{self.call(tenant, service)}.cancel"

    def call_put(self, tenant: str, service: str, member: str, number: int | str) -> str:
        """Return the subject on which a member gets the data of a call that come in parts."""
        return f"{self.call(tenant, service)}.put.{member}.{number}"

    def member(self, tenant: str, service: str, verb: str) -> str:
        """Return a subject among the members of a service for a `verb`: have, want, load or turn."""
        return f"{self.prefix}.calls.{tenant}.{service}.{verb}"

    def member_inbox(self, tenant: str) -> str:
        """Return the beginning of the inboxes of a tenant's members."""
        return f"{self.prefix}.calls.{tenant}.{MEMBERS}"

    def token(self, subject: str, position: int) -> str:
        """Return one token after the prefix: 0 is the part such as `api`, 1 the tenant or worker, 2 the verb. "" if
        there is none."""
        parts = subject[len(self.prefix) + 1 :].split(".")
        return parts[position] if position < len(parts) else ""

    def table(self) -> list[SubjectRow]:
        """Return the whole table, as the protocol page prints it."""
        from moorage.schemas.operate import ADMIN_VERBS  # a client that asks for no table does not wait for it

        p = self.prefix
        return [
            SubjectRow(f"{p}.api.<tenant>.<verb>", "answered", "submitter", "leader", ", ".join(API_VERBS)),
            SubjectRow(f"{p}.request.<tenant>.submit", "durable", "submitter", "leader", "requests while nobody leads"),
            SubjectRow(f"{p}.request.<tenant>.cancel", "durable", "submitter", "leader", "cancels while nobody leads"),
            SubjectRow(f"{p}.admin.<operator>.<verb>", "answered", "operator", "leader", ", ".join(ADMIN_VERBS)),
            SubjectRow(f"{p}.join.<pool>", "answered", "pool", "joiner", "a machine with a join token wants a key"),
            SubjectRow(f"{p}.events.<tenant>", "broadcast", "leader", "tenant, operators", "one frame a tick"),
            SubjectRow(
                f"{p}.events.{FLEET}", "broadcast", "leader", "operators", "joins, losses, drains, GPUs out, takeovers"
            ),
            SubjectRow(
                f"{p}.event.<tenant>.<job>", "broadcast", "leader", "tenant, operators", "one event a job and tick"
            ),
            SubjectRow(
                f"{p}.call.<tenant>.>",
                "asked",
                "submitter, caller, service",
                "service",
                "`<service>`: a call, which one member answers; `<service>.cancel`: its caller waits no longer; "
                "`<service>.at.<member>`: a call for this member, which gives it to any other if it has no free place; "
                "`<service>.put.<member>.<call>`: data in parts; `<service>.ASK`, `<service>.ASK.<member>`: whether "
                "members have calls",
            ),
            SubjectRow(
                f"{p}.calls.<tenant>.>",
                "broadcast",
                "service",
                "service",
                f"among members: {', '.join(f'`<service>.{verb}`' for verb in MEMBER_VERBS)}; `{MEMBERS}`: inboxes",
            ),
            SubjectRow(
                f"{p}.calls.<tenant>.<service>.load", "broadcast", "service", "leader", "what each member has to do"
            ),
            SubjectRow(
                f"{p}.calls.<tenant>.<service>.turn",
                "broadcast",
                "leader",
                "service",
                "whether a member of a service that sleeps has its GPUs for calls",
            ),
            SubjectRow(
                f"{p}.history.<tenant>",
                "durable",
                "leader",
                "leader (verb history), operators",
                "what became of jobs; tenants need no right on it",
            ),
            SubjectRow(
                f"{p}.log.<tenant>.<job>.<replica>",
                "broadcast",
                "worker",
                "tenant",
                "output as it comes; `~` for a job: results",
            ),
            SubjectRow(
                f"{p}.hello.<worker>", "broadcast, public", "worker", "observers, scheduler", "what a worker is"
            ),
            SubjectRow(
                f"{p}.load.<worker>", "broadcast, public", "worker", "observers, scheduler", "load of the worker"
            ),
            SubjectRow(f"{p}.fleet.frame", "broadcast, public", "leader", "observers", "the whole fleet in one frame"),
            SubjectRow(
                f"{p}.fleet.detail",
                "broadcast",
                "leader",
                "operators",
                "tenants, use of GPUs by job, ends",
            ),
            SubjectRow(f"{p}.fleet.rollcall", "broadcast, public", "leader", "workers", "say hello and renew, now"),
            SubjectRow(
                f"{p}.fleet.standing", "broadcast, public", "schedulers", "leader, observers", "who leads, who waits"
            ),
            SubjectRow(
                f"{p}.fleet.look", "broadcast, public", "leader", "workers", "an audit: look at your devices, now"
            ),
            SubjectRow(f"{p}.fleet.maystore", "asked", "schedulers", "leader", "whether a worker may store an object"),
            SubjectRow(f"{p}.worker.<worker>.looked", "broadcast", "that worker", "leader", "what no lease explains"),
            SubjectRow(f"{p}.worker.<worker>.join", "answered", "that worker", "leader", "a new lease session"),
            SubjectRow(f"{p}.worker.<worker>.renew", "answered", "that worker", "leader", "the session lives on"),
            SubjectRow(f"{p}.worker.<worker>.fact", "answered", "that worker", "leader", "what happened to attempts"),
            SubjectRow(f"{p}.worker.<worker>.wanted", "broadcast", "leader", "that worker", "place, start, end"),
            SubjectRow(
                f"{p}.worker.<worker>.logs",
                "asked",
                "leader",
                "that worker",
                "a page of output that it keeps, the use of GPUs in the last minutes, what an ended attempt left",
            ),
            *(
                SubjectRow(f"{p}.worker.<worker>.{verb}.>", "asked", MAY_STORE, "schedulers", f"passed on: {what}")
                for verb, what in (
                    ("fetch", "`$JS.API.<behind>`, for messages of tenants' buckets; nats-server answers"),
                    ("store", "`$O.<behind>`, to keep a tenant's files or checkpoints"),
                    ("result", "`$O.<behind>`, to keep a function's result"),
                )
            ),
            SubjectRow(
                f"{p}.tty.<tenant>.<worker>.<stream>.in",
                "broadcast",
                MAY_EXEC,
                "that worker",
                "input of a command that runs in a job",
            ),
            SubjectRow(
                f"{p}.tty.<tenant>.<worker>.<stream>.out",
                "broadcast",
                "that worker",
                MAY_EXEC,
                "output of a command that runs in a job, and its end",
            ),
            SubjectRow(f"{p}.dlq.<tenant>", "durable", "leader", "operators", "queued requests that could not be read"),
            SubjectRow(
                f"{p}.ledger.record, .epoch, .snapshot",
                "ledger",
                "leader",
                "schedulers",
                "every decision, in its own account",
            ),
            SubjectRow(
                f"{p}.snapshot.<name>", "ledger", "schedulers", "schedulers", "the state at a record, in chunks"
            ),
            SubjectRow(
                f"{p}.schedule.wish.<tenant>.<name>, .run.<tenant>.<name>, .try, .tried",
                "ledger",
                "leader",
                "leader",
                "when a schedule runs, and its newest run; each run is passed on to `scheduled.<tenant>.<name>`",
            ),
            SubjectRow(
                f"{p}.follower.chunk, .saved", "ledger", "schedulers", "schedulers", "what was counted up to a record"
            ),
            SubjectRow(
                f"{p}.trace.events", "ledger", "leader", "schedulers", "what records tell a trace, if it is kept"
            ),
        ]
