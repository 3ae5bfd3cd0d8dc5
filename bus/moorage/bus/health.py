"""The state of a connection, as a table of moves, and its counters."""

from __future__ import annotations

import enum
from typing import Final

import msgspec


class State(enum.Enum):
    """The states of a connection: CONNECTING → CONNECTED ⇄ RECONNECTING, and CLOSED from each."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    CLOSED = "closed"


STATE_MOVES: Final[dict[State, frozenset[State]]] = {
    State.CONNECTING: frozenset({State.CONNECTED, State.RECONNECTING, State.CLOSED}),
    State.CONNECTED: frozenset({State.RECONNECTING, State.CLOSED}),
    State.RECONNECTING: frozenset({State.CONNECTED, State.CLOSED}),
    State.CLOSED: frozenset(),
}


class Counters(msgspec.Struct):
    """Counts since this connection was made.

    `sent_dropped`: messages given to `send` while disconnected, too large, or with a bad subject.
    """

    sent: int = 0
    sent_dropped: int = 0
    reconnects: int = 0
    permission_refusals: int = 0
    handler_failures: int = 0
