"""The protocols of a client, as the modules that follow jobs need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from moorage.bus.transport import Handler, Subscribed
from moorage.schemas.frames import Answer
from moorage.schemas.subjects import Subjects


class Reads(Protocol):
    """A client that can read output."""

    async def read(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]: ...


class Asks(Reads, Protocol):
    """A client that can follow jobs. `AsyncClient` documents the methods."""

    @property
    def tenant(self) -> str: ...

    @property
    def subjects(self) -> Subjects: ...

    async def answer(self, verb: str, arguments: Mapping[str, Any]) -> Answer: ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscribed: ...

    async def subscribe_ahead(self, subject: str, handler: Handler) -> Subscribed: ...
