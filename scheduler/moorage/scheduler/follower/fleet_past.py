"""What happened to the fleet: the events of operators, kept from each record of the ledger. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import Record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.fleet_events import fleet_events
from moorage.scheduler.follower.since import trouble_of_since
from moorage.schemas.answers.operators import PastAnswer
from moorage.schemas.errors import Problem
from moorage.schemas.frames import FleetEvent

#: events that are remembered, and those in one answer
EVENTS_MAX: Final = 10_000
ANSWERED_MAX: Final = 1_000

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[FleetEvent]).decode


class FleetPast:
    """The events of the records that were folded into a state, the oldest first.

    How many jobs a lost worker had is not among them: a record does not tell it.
    """

    def __init__(self, events: Sequence[FleetEvent] = ()) -> None:
        self._events: deque[FleetEvent] = deque(events, EVENTS_MAX)

    def fold(self, state: State, record: Record, folded: Folded) -> None:
        """Take the events of a record that has just been folded into `state`."""
        for act in record.acts:
            if isinstance(act, acts.Epoch):
                self._events.append(FleetEvent("leading", state.time_ms, state.seq, scheduler=act.scheduler))
        if record.acts or folded.was_out:
            self._events += fleet_events(state, record.acts, None, folded.was_out)

    def dump(self) -> bytes:
        return _encode(list(self._events))

    @classmethod
    def load(cls, saved: bytes) -> FleetPast:
        """Return what `dump` has written; b"" is nothing. Raises msgspec's errors for other bytes."""
        return cls(_decode(saved) if saved else ())

    def answer(
        self, arguments: Mapping[str, Any], now_ms: int, gaps: Sequence[tuple[int, int]] = ()
    ) -> dict[str, Any] | Problem:
        """Return the newest events of the last `since_s` seconds; without it, all. `gaps` are as in `OperatorsActs`."""
        since_s = arguments.get("since_s")
        if since_s is not None and (trouble := trouble_of_since(since_s, "moorage events --help")):
            return trouble
        from_ms = 0 if since_s is None else now_ms - int(since_s * 1000)
        found = [event for event in self._events if event.time_ms >= from_ms]
        lost_ms = self._events[0].time_ms if len(self._events) == EVENTS_MAX else 0
        answer = PastAnswer(
            events=found[-ANSWERED_MAX:],
            left_out=max(0, len(found) - ANSWERED_MAX),
            from_ms=max(from_ms, lost_ms),
            until_ms=now_ms,
            gaps=[[begin, end] for begin, end in gaps if end >= from_ms],
        )
        plain: dict[str, Any] = msgspec.to_builtins(answer)
        return plain
