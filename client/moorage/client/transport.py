"""Where a client gets its connection: NATS, or something in its place, as `sim_fleet.SimFleet`."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Protocol

from moorage.bus.health import State
from moorage.bus.inbox import InboxTransport
from moorage.bus.transport import Transport


class Link(Transport, InboxTransport, Protocol):
    """One connection, as `bus.connection.Connection` is it."""


class ClientTransport(Protocol):
    """What `AsyncClient(transport=…)` takes. One may serve several clients, one after the other or at once."""

    @property
    def where(self) -> str:
        """The server's name for messages, without secrets."""

    @property
    def upkeep(self) -> contextvars.Context | None:
        """Of the timers after which a client asks whether it missed something; None: the context of the caller."""

    async def connect(self, name: str, on_state: Callable[[State], None]) -> Link:
        """A connection of the caller's own; `on_state` is told when it is lost and back."""

    async def release(self, link: Link) -> None:
        """Close what `connect` gave."""
