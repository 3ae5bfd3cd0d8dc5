"""The transport as the rest of moorage sees it: a few methods, so that another transport can take its place.

`connection.Connection` is the one over nats-py; the simulated one has the same methods. Nothing here imports nats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec

from moorage.bus.errors import PermissionRefused

#: subject, payload, reply subject ("" for none)
Outgoing = tuple[str, bytes, str]

STATUS_HEADER: Final = "Status"


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One message received. `received_monotonic_s` is `time.monotonic()` when this process took it off the socket."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None = None
    received_monotonic_s: float = msgspec.field(default_factory=time.monotonic)


#: Runs in the read path: it may only enqueue, never await or compute for long.
Handler = Callable[[Delivery], None]


class Wanted(NamedTuple):
    """A subscription to make. The server ends it after `most` messages; 0: never."""

    subject: str
    handler: Handler
    most: int = 0


class Subscribed(Protocol):
    """A standing subscription."""

    @property
    def subject(self) -> str: ...

    @property
    def refused(self) -> PermissionRefused | None:
        """Why the server refused it; None if it did not."""

    async def unsubscribe(self) -> None: ...


class Transport(Protocol):
    """What services and the SDK need of NATS."""

    @property
    def inbox_prefix(self) -> str: ...

    @property
    def is_connected(self) -> bool: ...

    def after_read(self, call: Callable[[], None]) -> None: ...

    async def regained(self) -> None: ...

    async def send(self, batch: Iterable[Outgoing]) -> int: ...

    async def publish(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str]) -> bool: ...

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscribed: ...

    async def subscribe_ahead(self, subject: str, handler: Handler, queue: str = "") -> Subscribed: ...

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Delivery: ...

    async def request_many(
        self, subject: str, payload: bytes, idle_timeout_s: float, is_last: Callable[[Delivery], bool]
    ) -> list[Delivery]: ...

    async def close(self) -> None: ...
