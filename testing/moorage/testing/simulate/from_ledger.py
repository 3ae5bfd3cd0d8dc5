"""Writes a trace from what the records of a ledger tell: arrivals, what happened, how long attempts held their devices.

It has what decides, of a command the workload's name alone, and no environment or user's label. `simulate` plays it,
and with `--prove` says whether each placement comes out the same. What a ledger does not tell is counted in the
trace's head.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from moorage.scheduler.ledger.trace_events import Batch, Event

#: as long as what is not known to end: ten years
FOREVER_S: Final = 10 * 365 * 86_400.0
#: the fields of a request that name workers' labels
_OF_LABELS: Final = ("requires", "where", "prefers", "same", "spread_over")


class TraceWriter:
    """Takes batches one after another, from a base on; `lines` yields the trace."""

    def __init__(self, base: Batch, *, anonymous: bool = False) -> None:
        self._anonymous = anonymous
        self._salt = hashlib.blake2b(base.ledger.encode()).digest() if anonymous else b""
        self._ledger = base.ledger
        self._begin_ms = self._until_ms = base.at_ms
        self._from_seq = self._until_seq = base.through
        self._events: list[dict[str, Any]] = []
        self._jobs: dict[int, dict[str, Any]] = {}
        self._since: dict[tuple[int, int], tuple[int, int]] = {}  # by job and replica: attempt, and when it was placed
        self._before: dict[tuple[int, int], int] = {}  # likewise: how many attempts were over before the beginning
        self._cancelled: set[int] = set()
        self._untold = Counter[str]()
        self._usage: dict[str, int] = {}
        self._settings: dict[str, str] = {}
        self._release = ""
        self._take(base)

    def take(self, batch: Batch) -> None:
        """Read the events behind those that were read. A later base has nothing new."""
        self._ledger = self._ledger or batch.ledger
        if not batch.base:
            self._take(batch)

    def _take(self, batch: Batch) -> None:
        for at_ms, events in batch.rows:
            for event in events:
                self._event(at_ms, event)
        self._until_seq, self._until_ms = batch.through, batch.at_ms

    def _at_s(self, ms: int) -> float:
        return (ms - self._begin_ms) / 1000

    def _name(self, name: str) -> str:
        """Return a name as the trace has it: itself, or what it is everywhere in an anonymous one."""
        if not self._anonymous:
            return name
        return "x" + hashlib.blake2b(name.encode(), key=self._salt, digest_size=6).hexdigest()

    # ------------------------------------------------------------------------------------------- reading

    def _event(self, at_ms: int, event: Event) -> None:
        kind, *what = event
        if kind == "event":
            self._happens(at_ms, what[0])
        elif kind == "untold":
            self._untold[what[0]] += 1
        elif kind == "settings":
            release, values = what
            if self._release and values != self._settings:
                self._untold["change of settings"] += 1
            elif not self._release:
                self._release, self._settings = release, values
        elif kind == "job":
            self._arrives(*what)
        elif kind == "usage":
            self._usage[self._name(what[0])] = what[1]
        elif kind == "ran":
            self._ran(*what)
        elif what[0] in self._jobs:  # of others the end alone is in the trace's time
            self._move(at_ms, kind, *what)

    def _happens(self, at_ms: int, what: dict[str, Any]) -> None:
        found = {kind: dict(data) for kind, data in what.items()}
        for data in found.values():
            for key in ("name", "host", "worker", "tenant", "job"):
                if key in data:
                    data[key] = self._name(data[key])
        if (join := found.get("join")) is not None:
            join["devices"] = [
                {**device, "uuid": f"SIM-{join['name']}-{at}"} for at, device in enumerate(join["devices"])
            ]
            if self._anonymous:
                join["labels"] = {}
                for device in join["devices"]:
                    device.pop("labels", None)
        self._events.append({"at_s": self._at_s(at_ms), **found})

    def _arrives(self, num: int, accepted_ms: int, tenant: str, asked: dict[str, Any]) -> None:
        self._jobs[num] = {
            "at_s": self._at_s(max(accepted_ms, self._begin_ms)), "runs_s": FOREVER_S, "tenant": self._name(tenant),
            "request": self._request(asked), "attempts": {}, "placed": {},
        }  # fmt: skip
        if accepted_ms <= self._begin_ms:
            self._jobs[num] |= {"waited_s": -self._at_s(accepted_ms), "stands": {}}

    def _request(self, asked: dict[str, Any]) -> dict[str, Any]:
        request = {**asked, "job": self._name(asked["job"])}
        request["labels"] = {key: self._name(value) for key, value in asked["labels"].items()}
        if "fair_key" in request:
            request["fair_key"] = self._name(request["fair_key"])
        if self._anonymous:
            for name in _OF_LABELS:
                request.pop(name, None)
            for group in request.get("groups", ()):
                group["name"] = self._name(group["name"])
        return request

    def _ran(self, tenant: str, accepted_ms: int, asked: dict[str, Any], ran_ms: list[int]) -> None:
        """Take how long the last attempts of a job ran that ended before the beginning."""
        ran = {"tenant": self._name(tenant), "request": self._request(asked), "ran_s": [ms / 1000 for ms in ran_ms]}
        self._events.append({"at_s": 0.0, "ran": {**ran, "accepted_s": -self._at_s(accepted_ms)}})

    def _move(self, at_ms: int, kind: str, num: int, *what: Any) -> None:
        line = self._jobs[num]
        if kind == "runs":
            index, attempt, host, slots, *began = what
            began_ms = began[0] if began else at_ms  # release 0.3 does not say when it began
            line["stands"][index] = (-self._at_s(began_ms), self._name(host), slots)
            line["request"].pop("start_within_s", None)  # it has started
            self._since[num, index] = self._nth(num, index, attempt), began_ms
        elif kind == "placed":
            index, attempt, host, slots = what
            attempt = self._nth(num, index, attempt)
            line["placed"][f"{index}/{attempt}"] = (self._at_s(at_ms), self._name(host), slots)
            self._since[num, index] = attempt, at_ms
        elif kind == "left":
            index, code = what
            held = self._since.pop((num, index), None)
            if held is not None and code is not None:
                attempt, from_ms = held
                line["attempts"][f"{index}/{attempt}"] = (at_ms - from_ms) / 1000, code
        elif kind == "cancel" and num not in self._cancelled:
            self._cancelled.add(num)
            if what[0] == "":
                cancel = {"tenant": line["tenant"], "job": line["request"]["job"]}
                self._events.append({"at_s": self._at_s(at_ms), "cancel": cancel})
            elif what[0] != "deadline":
                self._untold[f"cancel {what[0]}"] += 1
        elif kind == "end" and what[0] and line["attempts"]:
            line["runs_s"] = max(runs_s for runs_s, _ in line["attempts"].values())

    def _nth(self, num: int, index: int, attempt: int) -> int:
        """Return which attempt of the trace an attempt is: those from before its beginning do not count."""
        return attempt - self._before.setdefault((num, index), attempt - 1)

    # -------------------------------------------------------------------------------------------- writing

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    @property
    def untold(self) -> dict[str, int]:
        """How often the ledger had what a trace does not say, by kind."""
        return dict(self._untold)

    @property
    def records(self) -> int:
        return self._until_seq - self._from_seq

    @property
    def since(self) -> str:
        return f"record {self._from_seq}"

    @property
    def span_ms(self) -> int:
        """How much ledger time the trace has."""
        return self._until_ms - self._begin_ms

    @property
    def is_cut(self) -> bool:
        """Whether the ledger has lost records from before the trace."""
        return self._from_seq > 1

    def lines(self) -> Iterator[bytes]:
        """Yield the head, and the lines in the order of time."""
        head = {
            "trace": 1, "ledger": self._name(self._ledger), "from_seq": self._from_seq, "until_seq": self._until_seq,
            "until_s": self._at_s(self._until_ms), "jobs": len(self._jobs), "untold": self.untold,
        }  # fmt: skip
        if self._release:
            head |= {"release": self._release, "settings": self._settings}
        encode = msgspec.json.encode
        yield encode(head) + b"\n"
        usage = [{"at_s": 0.0, "usage": self._usage}] if self._usage else []
        rows = [*usage, *self._events, *(self._jobs[num] for num in sorted(self._jobs))]
        for row in sorted(rows, key=lambda row: (row["at_s"], "runs_s" in row)):
            yield encode(row) + b"\n"
