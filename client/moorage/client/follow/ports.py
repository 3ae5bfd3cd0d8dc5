"""What following jobs needs of a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from moorage.bus.transport import Handler, Subscribed
from moorage.schemas.frames import Answer
from moorage.schemas.subjects import Subjects


class Reads(Protocol):
    """A client as reading output needs it."""

    async def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]: ...


class Asks(Reads, Protocol):
    """A client as following jobs needs it; `AsyncClient` documents each of these."""

    @property
    def tenant(self) -> str: ...

    @property
    def subjects(self) -> Subjects: ...

    async def answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer: ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed: ...

    async def subscribe_ahead(self, subject: str, handler: Handler) -> Subscribed: ...
