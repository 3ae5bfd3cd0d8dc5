"""The state of a connection, as a table of moves."""

from __future__ import annotations

import enum
from typing import Final


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
