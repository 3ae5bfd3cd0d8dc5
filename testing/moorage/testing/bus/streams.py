"""JetStream as far as moorage uses it, in memory: streams by limits, fenced appends, reads, purges, direct get.

It answers with the bytes, codes and words of nats-server 2.15, which `tests/unit/bus/test_conformance_streams.py`
compares with a real one. What it does not know (consumers, mirrors, …) it refuses with status 501, so that no test
passes by silence.
"""

from __future__ import annotations

import base64
import functools
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from moorage.bus.framing import headers_size_bytes
from moorage.bus.jetstream import (
    ERR_NO_MESSAGE,
    ERR_STREAM_FULL,
    ERR_STREAM_NOT_FOUND,
    ERR_WRONG_LAST_SEQUENCE,
    EXPECTED_LAST_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT,
    MESSAGE_ID,
)

#: an answer: its payload and its headers
Reply = tuple[bytes, dict[str, str] | None]
Headers = Mapping[str, str] | None

EXPECTED_STREAM: Final = "Nats-Expected-Stream"
#: keep this message alone: of its subject (`sub`), or of the stream (`all`)
ROLLUP: Final = "Nats-Rollup"
SUBJECTS_PAGE_MAX: Final = 100_000
#: what one stored message takes beside subject, headers and payload, and what having headers adds (file store)
_RECORD_BYTES: Final = 30
_HEADERS_BYTES: Final = 4

#: every setting with the server's own default; a stream with any other setting is refused
_DEFAULTS: Final[dict[str, Any]] = {
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "compression": "none",
    "allow_direct": False,
    "discard_new_per_subject": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "description": "",
}

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


class ApiRefusal(Exception):
    """A refusal of the server: its status, its own number, and its text."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.error = {"code": code, "err_code": err_code, "description": description}


def matches(pattern: list[str], tokens: list[str]) -> bool:
    """Return whether a subject (split at the dots) is one that a filter with `*` and a final `>` names."""
    for position, wanted in enumerate(pattern):
        if wanted == ">":
            return len(tokens) > position
        if position >= len(tokens) or wanted not in ("*", tokens[position]):
            return False
    return len(pattern) == len(tokens)


def literal_head(pattern: str) -> str:
    """Return how every subject that matches the filter begins: all of the filter up to its first wildcard."""
    return pattern[: min((at for at in (pattern.find("*"), pattern.find(">")) if at >= 0), default=len(pattern))]


def last_token(pattern: list[str], parent: list[str]) -> str:
    """Return the last token that a subject one token longer than `parent` must have to match the filter `pattern`.

    `*` if any token matches, empty if no such subject does.
    """
    for position, token in enumerate(parent):
        if position >= len(pattern) or pattern[position] not in ("*", ">", token):
            return ""
        if pattern[position] == ">":
            return "*"
    if len(pattern) <= len(parent):
        return ""
    last = pattern[len(parent)]
    return "*" if last == ">" else last if len(pattern) == len(parent) + 1 else ""


def overlaps(one: list[str], other: list[str]) -> bool:
    """Return whether some subject matches both filters."""
    for left, right in zip(one, other, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(one) == len(other)


class _Message(msgspec.Struct, frozen=True, gc=False):
    subject: str
    seq: int
    time_ns: int
    data: bytes
    headers: dict[str, str] | None

    @property
    def payload_bytes(self) -> int:
        """The size of subject, headers and data in bytes, which is what `max_bytes` of a direct get counts."""
        return len(self.subject) + headers_size_bytes(self.headers) + len(self.data)

    @property
    def stored_bytes(self) -> int:
        return self.payload_bytes + _RECORD_BYTES + (_HEADERS_BYTES if self.headers else 0)


class Stream:
    """A stream: its settings and its messages, in order."""

    def __init__(self, config: dict[str, Any], first_seq: int = 0) -> None:
        self.configure(config)
        self.created_ns = time.time_ns()
        self.messages: dict[int, _Message] = {}
        self.by_subject: dict[str, dict[int, None]] = {}
        self.last_seq = max(0, first_seq - 1)
        self.size_bytes = 0
        self.is_full = False  # for a test to set: its disk is full, whatever its settings allow
        self._ids: dict[str, tuple[int, int]] = {}

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.filters = [subject.split(".") for subject in config["subjects"]]
        self._heads = tuple(literal_head(subject) for subject in config["subjects"])

    def takes(self, subject: str) -> bool:
        """Return whether the stream stores messages on this subject. It is fast for the many subjects that it does not
        store."""
        if not subject.startswith(self._heads):
            return False
        tokens = subject.split(".")
        return any(matches(pattern, tokens) for pattern in self.filters)

    def state(self) -> dict[str, Any]:
        self._expire()
        first = next(iter(self.messages), self.last_seq + 1 if self.last_seq else 0)
        return {
            "messages": len(self.messages),
            "bytes": self.size_bytes,
            "first_seq": first,
            "last_seq": self.last_seq,
            "num_subjects": len(self.by_subject),
            "num_deleted": self.last_seq + 1 - first - len(self.messages) if self.messages else 0,
            "consumer_count": 0,
        }

    # -- writing ------------------------------------------------------------------------------------------------

    def append(self, subject: str, data: bytes, headers: Headers) -> dict[str, Any]:
        """Store a message and return the acknowledgement. Raises ApiRefusal; the checks are in the server's order."""
        self._expire()
        found = headers or {}
        if found.get(EXPECTED_STREAM, self.config["name"]) != self.config["name"]:
            raise ApiRefusal(400, 10060, "expected stream does not match")
        known = self._known(found.get(MESSAGE_ID, ""))
        if known is not None and self.config["num_replicas"] > 1:
            return known  # of several replicas, a fenced message that is sent again is a duplicate, not refused
        self._check_fences(subject, found)
        rollup = self._rollup(found)
        if known is not None:
            return known
        message = _Message(subject, self.last_seq + 1, time.time_ns(), data, dict(headers) if headers else None)
        self._make_room(message)
        self.last_seq = message.seq
        self.messages[message.seq] = message
        self.by_subject.setdefault(subject, {})[message.seq] = None
        self.size_bytes += message.stored_bytes
        if rollup:
            self._delete(
                [each.seq for each in self.read(1, subject if rollup == "sub" else "") if each.seq < message.seq]
            )
        if message_id := found.get(MESSAGE_ID, ""):
            self._ids[message_id] = (message.seq, message.time_ns)
        return {"stream": self.config["name"], "seq": message.seq}

    def _check_fences(self, subject: str, headers: Mapping[str, str]) -> None:
        expected = headers.get(EXPECTED_LAST_SUBJECT_SEQUENCE)
        of_subject = headers.get(EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT)
        if expected is not None:
            last = self.last_of(of_subject or subject)
            if _number(expected) != last:
                raise _wrong_last(last)
        elif of_subject is not None:
            raise ApiRefusal(400, 10193, "missing sequence for expected last sequence per subject")
        expected = headers.get(EXPECTED_LAST_SEQUENCE)
        if expected is not None and _number(expected) != self.last_seq:
            raise _wrong_last(self.last_seq)

    def _rollup(self, headers: Mapping[str, str]) -> str:
        rollup = headers.get(ROLLUP, "")
        if rollup and (not self.config["allow_rollup_hdrs"] or self.config["deny_purge"]):
            raise ApiRefusal(500, 10111, "rollup not permitted")
        if rollup not in ("", "sub", "all"):
            raise ApiRefusal(500, 10111, f'rollup value invalid: "{rollup}"')
        return rollup

    def _known(self, message_id: str) -> dict[str, Any] | None:
        """Return the acknowledgement of a duplicate, if a message with this id was stored within the window."""
        oldest_ns = time.time_ns() - self.config["duplicate_window"]
        while self._ids and (first := next(iter(self._ids.items())))[1][1] < oldest_ns:
            del self._ids[first[0]]
        known = self._ids.get(message_id)
        return None if known is None else {"stream": self.config["name"], "seq": known[0], "duplicate": True}

    def _make_room(self, message: _Message) -> None:
        config, new = self.config, self.config["discard"] == "new"
        if self.is_full:
            raise ApiRefusal(503, ERR_STREAM_FULL, "maximum bytes exceeded")
        if 0 <= config["max_msg_size"] < len(message.data) + headers_size_bytes(message.headers):
            raise ApiRefusal(400, 10054, "message size exceeds maximum allowed")
        own = self.by_subject.get(message.subject, {})
        if 0 < config["max_msgs_per_subject"] <= len(own):
            if new and config["discard_new_per_subject"]:
                raise ApiRefusal(503, ERR_STREAM_FULL, "maximum messages per subject exceeded")
            self._delete([next(iter(own))])
        while 0 < config["max_msgs"] <= len(self.messages):
            self._full(new, "maximum messages exceeded")
        while 0 < config["max_bytes"] < self.size_bytes + message.stored_bytes:
            self._full(new or not self.messages, "maximum bytes exceeded")

    def _full(self, refuse: bool, words: str) -> None:
        if refuse:
            raise ApiRefusal(503, ERR_STREAM_FULL, words)
        self._delete([next(iter(self.messages))])

    def _expire(self) -> None:
        if self.config["max_age"]:
            oldest_ns = time.time_ns() - self.config["max_age"]
            old = []
            for message in self.messages.values():
                if message.time_ns >= oldest_ns:
                    break
                old.append(message.seq)
            self._delete(old)

    def _delete(self, seqs: Iterable[int]) -> int:
        count = 0
        for seq in seqs:
            message = self.messages.pop(seq)
            of_subject = self.by_subject[message.subject]
            del of_subject[seq]
            if not of_subject:
                del self.by_subject[message.subject]
            self.size_bytes -= message.stored_bytes
            count += 1
        return count

    def purge(self, subject: str, below_seq: int) -> int:
        if self.config["deny_purge"]:
            raise ApiRefusal(500, 10110, "stream purge not permitted")
        doomed = [message.seq for message in self.read(1, subject)]
        if below_seq:
            doomed = [seq for seq in doomed if seq < below_seq]
        return self._delete(doomed)

    def delete_message(self, seq: int) -> None:
        if self.config["deny_delete"]:
            raise ApiRefusal(500, 10057, "message delete not permitted")
        if seq not in self.messages:
            raise ApiRefusal(400, 10043, f"sequence {seq} not found")
        self._delete([seq])

    # -- reading ------------------------------------------------------------------------------------------------

    def last_of(self, subject: str) -> int:
        """Return the last sequence of a subject (a filter); 0 if there is none."""
        if (own := self.by_subject.get(subject)) is not None:
            return next(reversed(own))
        pattern = subject.split(".")
        if "*" not in pattern and ">" not in pattern:
            return 0
        of_match = (next(reversed(own)) for each, own in self.by_subject.items() if matches(pattern, each.split(".")))
        return max(of_match, default=0)

    def read(self, from_seq: int, subject: str = "") -> Iterator[_Message]:
        """Yield the messages from a sequence on, of the subjects that match; "" matches all."""
        self._expire()
        pattern = subject.split(".") if subject not in ("", ">") else None
        wanted = {own for own in self.by_subject if pattern is None or matches(pattern, own.split("."))}
        if not wanted:
            return
        seqs = self.messages if from_seq <= 1 else range(from_seq, self.last_seq + 1)
        for seq in list(seqs):
            message = self.messages.get(seq)
            if message is not None and message.subject in wanted:
                yield message

    def find(self, request: dict[str, Any]) -> _Message | None:
        """Return the message that a get asks for; None if it is not there. Raises ApiRefusal if the get names none."""
        if last_by := request.get("last_by_subj"):
            return self.messages.get(self.last_of(last_by))
        if next_by := request.get("next_by_subj"):
            return next(self.read(request.get("seq", 1), next_by), None)
        if not request.get("seq"):
            raise ApiRefusal(400, 10003, "bad request")
        self._expire()
        return self.messages.get(request["seq"])


class Streams:
    """The JetStream of one account: its streams, and the API behind `$JS.API.`."""

    def __init__(self) -> None:
        self.by_name: dict[str, Stream] = {}

    def taking(self, subject: str) -> Stream | None:
        return next((stream for stream in self.by_name.values() if stream.takes(subject)), None)

    def store(self, stream: Stream, subject: str, data: bytes, headers: Headers) -> tuple[bytes, bool]:
        """Store a message in this stream. Return the answer to its publisher, and whether the stream has the message.

        The stream also has it if its id was known, so that it is not stored again.
        """
        try:
            return _encode(stream.append(subject, data, headers)), True
        except ApiRefusal as refusal:
            return _encode({"error": refusal.error, "stream": stream.config["name"], "seq": 0}), False

    def denial(self, stream: Stream) -> bytes:
        """Return the refusal that a publisher gets although the message is stored, because the stream's leader changed
        meanwhile."""
        return _encode({"error": _wrong_last(stream.last_seq).error, "stream": stream.config["name"], "seq": 0})

    def ask(self, verb: str, data: bytes) -> list[Reply]:
        """Return the answers to a request on `$JS.API.<verb>`; [] if the server would not answer."""
        if verb.startswith("DIRECT.GET."):
            return self._direct_get(verb.removeprefix("DIRECT.GET."), data)
        kind, _, name = verb.rpartition(".")
        try:
            answer = self._answer(kind, name, _decode(data) if data else {})
        except ApiRefusal as refusal:
            answer = {"error": refusal.error}
        except msgspec.MsgspecError:
            answer = {"error": ApiRefusal(400, 10025, "invalid JSON").error}
        return [(_encode(answer), None)]

    def _answer(self, kind: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
        if kind == "STREAM.CREATE":
            return self._create(name, request)
        if kind not in (
            "STREAM.INFO",
            "STREAM.UPDATE",
            "STREAM.PURGE",
            "STREAM.DELETE",
            "STREAM.MSG.GET",
            "STREAM.MSG.DELETE",
        ):
            raise ApiRefusal(501, 0, f"the simulated bus has no {kind}")
        stream = self.by_name.get(name)
        if stream is None:
            raise ApiRefusal(404, ERR_STREAM_NOT_FOUND, "stream not found")
        if kind == "STREAM.INFO":
            return _info(stream, request.get("subjects_filter", ""), request.get("offset", 0))
        if kind == "STREAM.UPDATE":
            stream.configure(self._config(name, request))
            return _info(stream)
        if kind == "STREAM.PURGE":
            purged = stream.purge(request.get("filter", ""), request.get("seq", 0))
            return {"success": True, "purged": purged}
        if kind == "STREAM.MSG.GET":
            message = stream.find(request)
            if message is None:
                raise ApiRefusal(404, ERR_NO_MESSAGE, "no message found")
            return {"message": _raw(message)}
        if kind == "STREAM.MSG.DELETE":
            stream.delete_message(request["seq"])
        else:
            del self.by_name[name]
        return {"success": True}

    def _create(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("name") != name:
            raise ApiRefusal(400, 10056, "stream name in subject does not match request")
        config = self._config(name, request)
        there = self.by_name.get(name)
        if there is None:
            there = self.by_name[name] = Stream(config, request.get("first_seq", 0))
            return {**_info(there), "did_create": True}
        if there.config != config:
            raise ApiRefusal(400, 10058, "stream name already in use with a different configuration")
        return _info(there)

    def _config(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with their defaults. Raises ApiRefusal for unknown settings, and if another stream takes
        the same subjects."""
        for key, value in request.items():
            if key not in ("name", "subjects", "metadata", "first_seq", *_DEFAULTS) and value:
                raise ApiRefusal(501, 0, f"the simulated bus has no {key}")
        if request.get("retention", "limits") != "limits":
            raise ApiRefusal(501, 0, "the simulated bus has no retention but limits")
        subjects = request.get("subjects") or [name]
        others = (stream for stream in self.by_name.values() if stream.config["name"] != name)
        if any(overlaps(own.split("."), taken) for stream in others for taken in stream.filters for own in subjects):
            raise ApiRefusal(400, 10065, "subjects overlap with an existing stream")
        known = {key: request[key] for key in _DEFAULTS if key in request}
        bounds = {key: -1 for key in _DEFAULTS if key.startswith("max_") and key != "max_age" and not known.get(key)}
        return {**_DEFAULTS, **known, **bounds, "name": name, "subjects": subjects}

    def _direct_get(self, name: str, data: bytes) -> list[Reply]:
        stream = self.by_name.get(name)
        if stream is None or not stream.config["allow_direct"]:
            return []
        request = _decode(data) if data else {}
        if not any(request.get(key) for key in ("seq", "last_by_subj", "next_by_subj")):
            return [(b"", {"Status": "408", "Description": "Empty Request"})]
        if "batch" not in request:
            message = stream.find(request)
            return [(message.data, _direct_headers(name, message))] if message is not None else [_NOT_FOUND]
        waiting = list(stream.read(request.get("seq", 1), request.get("next_by_subj", "")))
        if not waiting:
            return [_NOT_FOUND]
        replies: list[Reply] = []
        last_seq, sent_bytes = 0, 0
        for message in waiting[: request["batch"]]:
            pending = {"Nats-Num-Pending": str(len(waiting) - len(replies) - 1), "Nats-Last-Sequence": str(last_seq)}
            replies.append((message.data, _direct_headers(name, message) | pending))
            last_seq = message.seq
            sent_bytes += message.payload_bytes
            if 0 < request.get("max_bytes", 0) <= sent_bytes:
                break
        end = {"Nats-Num-Pending": str(len(waiting) - len(replies)), "Nats-Last-Sequence": str(last_seq)}
        return [*replies, (b"", {"Status": "204", "Description": "EOB", **end})]


_NOT_FOUND: Final[Reply] = (b"", {"Status": "404", "Description": "Message Not Found"})


def _number(text: str) -> int:
    """Return the sequence in a header; a text that is no number matches no sequence."""
    return int(text) if text.isascii() and text.isdigit() else -1


def _wrong_last(last: int) -> ApiRefusal:
    return ApiRefusal(400, ERR_WRONG_LAST_SEQUENCE, f"wrong last sequence: {last}")


def _info(stream: Stream, subjects_filter: str = "", offset: int = 0) -> dict[str, Any]:
    state, total = stream.state(), 0
    others = [{"name": f"copy {at}", "current": True} for at in range(2, stream.config["num_replicas"] + 1)]
    if subjects_filter:
        pattern = subjects_filter.split(".")
        found = sorted(subject for subject in stream.by_subject if matches(pattern, subject.split(".")))
        total = len(found)
        page = found[offset : offset + SUBJECTS_PAGE_MAX]
        state["subjects"] = {subject: len(stream.by_subject[subject]) for subject in page}
    return {
        "config": stream.config,
        "created": _rfc3339(stream.created_ns),
        "state": state,
        "cluster": {"leader": "simulated", **({"replicas": others} if others else {})},
        "total": total,
        "offset": offset,
        "limit": SUBJECTS_PAGE_MAX if total else 0,
        "ts": _rfc3339(time.time_ns()),
    }


def _raw(message: _Message) -> dict[str, Any]:
    raw = {
        "subject": message.subject,
        "seq": message.seq,
        "data": base64.b64encode(message.data).decode(),
        "time": _rfc3339(message.time_ns),
    }
    if message.headers:
        lines = "".join(f"{key}: {value}\r\n" for key, value in message.headers.items())
        raw["hdrs"] = base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode()
    return raw


def _direct_headers(stream: str, message: _Message) -> dict[str, str]:
    return {
        **(message.headers or {}),
        "Nats-Stream": stream,
        "Nats-Subject": message.subject,
        "Nats-Sequence": str(message.seq),
        "Nats-Time-Stamp": _rfc3339(message.time_ns),
    }


def _rfc3339(wall_ns: int) -> str:
    """Return a time as Go writes it: nanoseconds without trailing zeros."""
    seconds, rest = divmod(wall_ns, 1_000_000_000)
    return f"{_rfc3339_second(seconds)}{f'.{rest:09d}'.rstrip('0') if rest else ''}Z"


@functools.lru_cache(maxsize=1024)
def _rfc3339_second(wall_s: int) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
