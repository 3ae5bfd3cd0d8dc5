"""The SDK's exceptions: one class for each way in which a caller may react, all with `.code .why .fixes .job`.

A code of a scheduler's answer (`schemas.errors.CODES`) or of the bus (`bus.errors.BUS_CODES`) is kept unchanged. Codes
of errors that only the SDK can notice are in `CLIENT_CODES`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, Unpack

import msgspec

from moorage.bus.errors import (
    BUS_CODES,
    BusError,
    CannotConnect,
    Disconnected,
    NoResponders,
    NotAuthorized,
    NotNats,
    PayloadTooLarge,
    PermissionRefused,
    RequestTimeout,
)
from moorage.bus.own_fleets import running
from moorage.bus.target import find_home, read_up
from moorage.schemas.codec import FRAME_BYTES_MAX, REQUEST_BYTES_MAX
from moorage.schemas.errors import CODES, Details, Fault, MoorageError, Problem, problem
from moorage.schemas.exit_words import exit_words
from moorage.schemas.job import CANCELLED, EXPIRED, FAILED, REJECTED, TIMED_OUT
from moorage.schemas.names import exactly, word_of
from moorage.schemas.reasons import REASONS
from moorage.system.build import build

if TYPE_CHECKING:
    from moorage.client.follow.job_history import Result
    from moorage.schemas.job import Request

T = TypeVar("T")

#: code -> (whose fault, what it means in one sentence)
CLIENT_CODES: Final[dict[str, tuple[Fault, str]]] = {
    "no-scheduler": ("fleet", "the NATS server is there, but no scheduler answered in the time given"),
    "unread-answer": ("caller", "the scheduler's answer has a form that this client's release does not know"),
    "no-agent": ("fleet", "no worker of this host lends GPUs to processes that run here"),
    "timed-out": ("caller", "the wait took longer than its timeout; the job itself goes on"),
    "job-failed": ("caller", "the job ended with another exit code than 0, or by a signal, and has no retries left"),
    "job-timed-out": ("caller", "the job ran longer than its timeout or deadline"),
    "job-cancelled": ("caller", "the job was cancelled"),
    "job-expired": ("fleet", "the job could not start within the time it was given"),
    "job-rejected": ("fleet", "no worker of the fleet could ever run the job"),
    "no-endpoint": ("caller", "the service has no such method, so the call did not start"),
    "no-service": ("fleet", "no job has the service, so the call did not start"),
    "no-member": ("fleet", "a job has the service, and no member of it was there in time, so the call did not start"),
    "service-busy": ("fleet", "all members of the service that were asked are full, so the call did not start"),
    "call-expired": ("fleet", "no member of the service had a free place in the caller's time, so it did not start"),
    "member-died": ("fleet", "the process that ran the call ended before it answered"),
    "unreachable": ("fleet", "no member of the service has the call any more, as behind a break; it may have run"),
    "call-failed": ("service", "the service ran the call and answered with an error"),
    "bad-batch": ("service", "the service's function answered its batch of calls with no list of as many answers"),
    "already-running": ("caller", "another `moorage up` runs on this data folder"),
    "child-failed": ("moorage", "a process of `moorage up` keeps dying"),
}


#: failed replicas in the notes of a `JobFailed`
NAMED_MAX: Final = 5


def stopped_early(why: str) -> bool:
    """Return whether a job ended because `max_failed` of its replicas had failed."""
    return "and max_failed is " in why


def word_to_explain(job: str) -> str:
    """Return the word that names a job for `moorage explain`, which takes a code for the code: some are of this side
    alone."""
    return exactly(job) if any(job in known for known in (CODES, BUS_CODES, CLIENT_CODES, REASONS)) else word_of(job)


class ClientError(MoorageError):
    """The base of all errors. `fixes` are at most three lines that say what to do now, the best one first.

    A traceback shows the fixes as notes below the message, after the field of the `problem`, the value found there and
    the values allowed.
    """

    def __init__(self, problem: Problem, fixes: Sequence[str] = ()) -> None:
        super().__init__(problem)
        self.fixes: tuple[str, ...] = (*fixes, *((problem.next,) if problem.next else ()))
        for name, told in (("at", problem.field), ("found", problem.found), ("allowed", problem.allowed)):
            if told:
                self.add_note(f"{name} {told}")
        for fix in self.fixes:
            self.add_note(f"fix: {fix}")

    @property
    def why(self) -> str:
        """The message, without the code."""
        return self.problem.message

    @property
    def job(self) -> str:
        """The id of the job that the error is about; "" if it is about no single job."""
        return self.problem.job


class Rejected(ClientError):
    """The request is refused, by the scheduler or by this client before it was sent. `code` says why.

    Nothing of the request is recorded.
    """


class Conflict(Rejected):
    """The job id is already used by a request with other content."""


class QueueFull(Rejected):
    """The queue is full: submit again, with the same id, after `retry_after_s` seconds."""

    @property
    def retry_after_s(self) -> float:
        """How many seconds to wait before the next submit; 1 if the scheduler names no time."""
        return self.problem.retry_after_s or 1.0


class BatchRejected(Rejected):
    """Some requests of `submit_many` were refused; the others are submitted.

    `problems` has the problem of each refused request, by its index from 0. The message has the first problem. `jobs`
    has one entry per request: a handle of the client's own kind (`AsyncJob` or `Job`), or None if the request was
    refused. After pickling it has the jobs' ids in place of the handles.
    """

    def __init__(self, jobs: list[Any], problems: dict[int, Problem]) -> None:
        at = min(problems)
        first = problems[at]
        where = f"{len(problems)} of {len(jobs)} requests refused, the first at index {at}: "
        super().__init__(msgspec.structs.replace(first, message=where + first.message))
        self.jobs = jobs
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        make, how, state = super().__reduce__()
        return make, how, {**state, "jobs": [getattr(job, "job", job) for job in self.jobs]}


class NotFound(ClientError):
    """There is no such job, worker, dead letter or kept file.

    For jobs and workers the answer is not stale: it is as of a ledger record acknowledged after the request arrived.
    """


class NotPermitted(ClientError):
    """NATS refused the credentials, or this user may not use the subject, or may not borrow from this host's worker."""


class BadContext(ClientError):
    """The NATS context or URL cannot be used. `why` names it, and says what is wrong with it."""


class Unreachable(ClientError):
    """There is no NATS server, or the connection to it was lost and did not come back in time."""


class NoScheduler(Unreachable):
    """There is a NATS server, but no scheduler answers. With the code `not-leading`, a scheduler answers that cannot
    append to its ledger: `why` says since when, and the server's error."""


class NoAgent(Unreachable):
    """No worker of this host lends GPUs to this process."""


class NoOutput(ClientError):
    """Stored output or a handler's result is not available: it is no longer kept (`not-kept`), or the worker that has
    the output does not answer (`worker-lost`)."""


class Overloaded(ClientError):
    """Too many requests of this kind are in progress. Send it again after `problem.retry_after_s` seconds."""


class TimedOut(ClientError, TimeoutError):
    """The timeout passed. What the call waited for may still happen. This is also a `TimeoutError`."""


class CallRefused(ClientError):
    """The call of a service did not start: `code` is no-service, no-member, service-busy or call-expired.

    It may be sent again."""

    @property
    def retry_after_s(self) -> float:
        """After how many seconds a place may be free; 0 if the service names no time."""
        return self.problem.retry_after_s or 0.0


class CallFailed(ClientError):
    """The call of a service started, and has no answer: `code` is call-failed, bad-batch or member-died.

    `kind` names the exception of the service's function, such as ValueError. `status` and `headers` are those of a
    `CallError` of the function; of any other error `status` is 500, or 502 for member-died.
    """

    def __init__(
        self, problem: Problem, *, status: int = 500, headers: Mapping[str, str] | None = None, kind: str = ""
    ) -> None:
        super().__init__(problem)
        self._kind = kind
        self.status = status
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        return self._kind or self.problem.found


class FailedReplica(msgspec.Struct, frozen=True):
    """A replica that failed: its number, its `item`, its exit status, the last line of its stderr, and its worker.

    `code` is minus the signal if negative, None if none is known; `stderr` is "" if there is none or it is not kept.
    """

    replica: int
    state: str
    code: int | None = None
    why: str = ""
    item: Any = None
    stderr: str = ""
    worker: str = ""

    def __str__(self) -> str:
        item = "" if self.item is None else f" ({self.item})"
        return f"replica {self.replica}{item}, code {self.code}: {self.stderr or self.why or self.state}"


class JobFailed(ClientError):
    """The job did not end as SUCCEEDED: see `state` and `exit_code`.

    `log_tail` has the last lines of its output, which a traceback shows as a note. It is "" if there are none or they
    were not read: `gather` and a second `Job.result` read none. Of several replicas `failed` has the first 20 that
    failed, with their items; it is empty where `log_tail` is not read.
    """

    def __init__(
        self,
        result: Result,
        log_tail: str = "",
        request: Request | Mapping[str, Any] | None = None,
        failed: Sequence[FailedReplica] = (),
    ) -> None:
        code, what = _ENDED.get(result.state, _ENDED[FAILED])
        text = f"job {result.job} {what}"
        limit = _limit_reached(result)
        value = None if limit is None else _value_of(request, limit.field)
        if result.state == FAILED and result.code is not None:
            text += f" {exit_words(result.code)}"
        if limit is not None and value is not None:
            text += f": {limit.said.format(f'{value:g} s')} ({limit.field})"
        elif result.why:
            text += f": {result.why}"
        fixes = () if limit is None else (f"allow more: {limit.flag}, in a request {limit.field}",)
        if any(map(stopped_early, (result.why, *(change.why for change in result.changes)))):
            fixes = (f"run all that is left: moorage again {word_of(result.job)} --failed --max-failed all",)
        look = f"moorage show {word_of(result.job)}"
        if result.replaced_by is not None:
            look = f"moorage logs {word_of(result.replaced_by)}"
        problem = Problem(code, text, CLIENT_CODES[code][0], job=result.job, next=look)
        super().__init__(problem, fixes)
        self.result = result
        self.log_tail = log_tail
        self.failed = tuple(failed)
        if failed:
            more = [f"… and more: moorage show {word_of(result.job)} --failed"] if len(failed) > NAMED_MAX else []
            self.add_note("\n".join([*map(str, failed[:NAMED_MAX]), *more]))
        if log_tail:
            self.add_note("its output ends with:\n" + textwrap.indent(log_tail, "  "))

    @property
    def state(self) -> str:
        """The job's last state: FAILED, TIMED_OUT, CANCELLED, EXPIRED or REJECTED."""
        return self.result.state

    @property
    def exit_code(self) -> int | None:
        """The exit status of the attempt that decided the end, minus the signal if negative; None if none is known."""
        return self.result.code


class ItemFailed(ClientError):
    """An item of `AsyncClient.map` or `AsyncService.submit_many` has no value: its function raised, its call failed, or
    its replica did not succeed.

    `kind` names the exception of the function, such as ValueError, and its traceback is a note; "" if there was none.
    `item` is the item's number, and `replica` that of the replica that had it: the same where each has one item.
    `state` and `exit_code` are how that ended.
    """

    def __init__(
        self,
        job: str,
        replica: int,
        state: str,
        exit_code: int | None,
        why: str,
        *,
        kind: str = "",
        text: str = "",
        item: int | None = None,
    ) -> None:
        item = replica if item is None else item
        code, what = _ENDED.get(state, _ENDED[FAILED])
        ended = f" with code {exit_code}" if exit_code and not kind and state == FAILED else ""
        said = ": ".join(filter(None, (f"item {item} of job {job} {what}{ended}", kind, why)))
        next_step = f"moorage logs {word_of(job)} --replica {replica}"
        super().__init__(Problem(code, said, CLIENT_CODES[code][0], job=job, next=next_step))
        self.item, self.replica, self.state, self.exit_code, self.kind = item, replica, state, exit_code, kind
        if text:
            self.add_note("its traceback:\n" + textwrap.indent(text, "  "))


class _Limit(NamedTuple):
    """A time limit of a request: its field, its `reason` in a transition, its option, and its words for users."""

    field: str
    reason: str
    flag: str
    said: str


_LIMITS: Final = (
    _Limit("deadline_s", "deadline_s passed", "--deadline", "it was not over {} after its acceptance"),
    _Limit("start_within_s", "start_within_s passed", "--start-within", "it had not started {} after its acceptance"),
    _Limit("timeout_s", "timeout", "--time-limit", "an attempt ran for {}, its time limit"),
)


def _limit_reached(result: Result) -> _Limit | None:
    """Return the limit that ended the job; None if none did, or if no transition that names it was seen."""
    if result.state not in (TIMED_OUT, EXPIRED):
        return None
    reasons = {result.why, *(change.why for change in result.changes)}
    return next((limit for limit in _LIMITS if limit.reason in reasons), None)


def _value_of(request: Request | Mapping[str, Any] | None, field: str) -> float | None:
    """Return this limit of a request, which may be as on the wire, in seconds; None if it is not set or not known."""
    body = request if isinstance(request, Mapping | None) else msgspec.to_builtins(request)
    if body is None:
        return None
    value: float | None = (body.get("run") or {}).get(field, body.get(field))
    return value


_ENDED: Final = {
    FAILED: ("job-failed", "failed"),
    TIMED_OUT: ("job-timed-out", "ran out of time"),
    CANCELLED: ("job-cancelled", "was cancelled"),
    EXPIRED: ("job-expired", "expired before it could start"),
    REJECTED: ("job-rejected", "was rejected"),
}

_BY_CODE: Final[dict[str, type[ClientError]]] = {
    "conflict": Conflict,
    "queue-full": QueueFull,
    "not-found": NotFound,
    "not-leading": NoScheduler,
    "not-kept": NoOutput,
    "worker-lost": NoOutput,
    "overloaded": Overloaded,
    "behind": Overloaded,
    "permission-refused": NotPermitted,  # of the server, for what is not there yet: `asking.NotNow`
}


def error_of(answer: Problem) -> ClientError:
    """Return the exception for a scheduler's refusal."""
    return _BY_CODE.get(answer.code, Rejected)(answer)


def not_now(answer: Problem, where: str, timeout_s: float) -> ClientError:
    """Return the exception for a scheduler that answered "not now" until the timeout; `where` as in `unanswered`."""
    return error_of(msgspec.structs.replace(answer, message=f"{answer.message}; asked at {where} for {timeout_s:g} s"))


def rejected(code: str, message: str, **details: Unpack[Details]) -> Rejected:
    """Return the exception for a request that the scheduler would refuse; it is raised before anything is sent."""
    return Rejected(problem(code, message, **details))


def not_found(message: str, **details: Unpack[Details]) -> NotFound:
    """Return the exception for a thing that was looked up and does not exist."""
    return NotFound(problem("not-found", message, **details))


def timed_out(message: str, *, job: str = "", next_step: str = "") -> TimedOut:
    """Return the exception for a wait that took too long. `next_step` says what to do now."""
    return TimedOut(client_problem("timed-out", message, job=job, next_step=next_step))


def of_batch(problem: Problem, at: int) -> Problem:
    """Return the problem of one of several requests, with the request's index in the field: `$[2].gpu.count`."""
    return msgspec.structs.replace(problem, field=f"$[{at}]{problem.field.removeprefix('$')}")


def client_problem(
    code: str, message: str, *, job: str = "", found: str = "", next_step: str = "", field: str = ""
) -> Problem:
    """Return a problem that only the client can notice. Raises KeyError for a code that is not in `CLIENT_CODES`."""
    return Problem(code, message, CLIENT_CODES[code][0], field=field, found=found, next=next_step, job=job)


#: in the address of a server that `moorage up` could be
_THIS_MACHINE: Final = ("127.0.0.1:", "localhost:", "[::1]:")


def unread_answer(error: msgspec.ValidationError, data: Mapping[str, Any] | None = None) -> ClientError:
    """Return the error for an answer that cannot be read as this release knows it; `data` may say which release sent
    it."""
    rows = (data or {}).get("schedulers")
    leads = [row for row in rows if isinstance(row, Mapping) and row.get("leads")] if isinstance(rows, list) else []
    release = next((str(row["release"]) for row in leads if row.get("release")), "")
    use = (
        f"moorage {release}" if release else "the release of the schedulers (an operator: moorage admin feature-level)"
    )
    return ClientError(
        client_problem(
            "unread-answer",
            f"this client is of release {build()}, and cannot read the scheduler's answer: {error}",
            next_step=f"use a client of {use}",
        )
    )


def read_answer(data: Any, kind: type[T]) -> T:
    """Return an answer's data as this type. Raises `ClientError` (`unread-answer`)."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise unread_answer(error) from None


def no_server(error: CannotConnect) -> Unreachable:
    """Return the exception for a failed connection, with fixes for a caller of the SDK or the command."""
    problem = msgspec.structs.replace(error.problem, next="", found="")
    fixes = ["name another: --nats URL or a nats context, or NATS_CONTEXT, or NATS_URL"]
    folder = find_home()
    up = read_up(folder)
    if up is not None and up.url not in error.url:
        fixes.insert(0, f"for the moorage up of {folder}: --nats {up.url}")
    elif isinstance(error, NotNats):
        port = "see which process has that port: ss -ltnp; for NATS with handshake_first, set tls_first in the context"
        fixes.insert(0, port)
    elif fleets := running():
        fixes[:0] = [f"for the moorage up of {fleet.folder}: --nats {fleet.up.url}" for fleet in fleets]
    elif any(name in error.url for name in _THIS_MACHINE):
        fixes.insert(0, "start one on this machine: moorage up")
    return Unreachable(problem, tuple(fixes))


_INBOX_FIX: Final = (
    "or, on a leaf node or with users of your own, name the inbox that may be answered: --inbox-prefix, as"
    " _INBOX.submitter.TENANT"
)


def unanswered(error: BusError, where: str, timeout_s: float, leaf: str = "") -> MoorageError:
    """Return the exception for a request that got no answer. `where` is the server, shown without secrets; `leaf` is
    the place whose leaf node it is, "" for any other server.

    A bus error that has no exception of the SDK is returned unchanged.
    """
    if isinstance(error, CannotConnect):
        return no_server(error)
    if isinstance(error, Disconnected):
        return Unreachable(error.problem)
    if isinstance(error, NotAuthorized | PermissionRefused):
        return NotPermitted(error.problem)
    if isinstance(error, PayloadTooLarge):  # the scheduler's own error, had the server let the frame pass
        return Rejected(
            problem(
                "too-large",
                "the frame is too large",
                found=error.size_bytes,
                allowed=f"{REQUEST_BYTES_MAX} bytes a request, {FRAME_BYTES_MAX} bytes a frame",
            )
        )
    if isinstance(error, NoResponders | RequestTimeout):
        what = "no scheduler listens" if isinstance(error, NoResponders) else "no scheduler answered"
        is_cluster = "," in where.partition(" ")[0]
        if leaf:
            what = f"the link of leaf node {leaf} to the other servers is cut, or {what}:"
        return NoScheduler(
            client_problem("no-scheduler", f"{what} at {where}, tried for {timeout_s:g} s"),
            (
                "ask again, as a standby takes over within 14 s; if there is none, start one: moorage scheduler"
                if is_cluster
                else "start one: moorage scheduler, or all of it on this machine: moorage up",
                "or see why it is silent: moorage doctor",
                *(() if isinstance(error, NoResponders) else (_INBOX_FIX,)),
            ),
        )
    return error
