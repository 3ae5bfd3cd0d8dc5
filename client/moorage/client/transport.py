"""The protocol of an object that connects a client: NATS, or a replacement such as `sim_fleet.SimFleet`."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Protocol

from moorage.bus.errors import BusError
from moorage.bus.health import State
from moorage.bus.inbox import InboxTransport
from moorage.bus.transport import Transport


class Link(Transport, InboxTransport, Protocol):
    """One connection; `bus.connection.Connection` is the real one."""

    #: host and port of the server connected last; "" where there is none
    server_at: str
    #: the place whose leaf node that server is; "" for any other one
    leaf: str
    #: whether that server says that it is one of a cluster
    is_clustered: bool
    #: most bytes of one message, as that server says
    max_payload_bytes: int
    #: how often it was connected again
    reconnects: int
    #: whether the server asks who connects
    asks_for_login: bool

    def on_back(self, call: Callable[[], None]) -> None:
        """Call a function each time this is connected again."""


class ClientTransport(Protocol):
    """The `transport` argument of `AsyncClient`. One transport may serve several clients, also at the same time."""

    @property
    def where(self) -> str:
        """The server's name for error messages, without secrets."""

    @property
    def upkeep(self) -> contextvars.Context | None:
        """The context of the timers after which a client asks for missed events; None for the caller's own."""

    async def connect(self, name: str, on_state: Callable[[State], None], on_error: Callable[[BusError], None]) -> Link:
        """Return a new connection for the caller. `on_state` is called when it is lost and when it is back, `on_error`
        with each error that no caller waits for."""

    async def release(self, link: Link) -> None:
        """Close a connection that `connect` returned."""
