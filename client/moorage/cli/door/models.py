"""Which service serves which model: what the scheduler says of the tenant's live services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from moorage.client.errors import read_answer
from moorage.schemas.answers.jobs import ServiceRow, ServicesAnswer
from moorage.schemas.errors import MoorageError

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: how often the scheduler is asked
ASK_S: Final = 2.0
#: models that are not known are asked for at once, at most this often: callers wait for that, and are not refused
MISSED_S: Final = 0.25
#: how long who lists the models waits for an answer
LISTED_S: Final = 1.0

log = logging.getLogger("moorage.door")


class Models:
    """The models of one tenant's services, as they were last told. While no scheduler answers they stay as they were:
    calls go on without one."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._rows: dict[str, ServiceRow] = {}
        self.is_stale = False  # no scheduler answered the last question
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    @property
    def rows(self) -> Mapping[str, ServiceRow]:
        """The service of each model."""
        return self._rows

    async def listed(self) -> Mapping[str, ServiceRow]:
        """Return the service of each model as of now, or as last told if no scheduler answers within `LISTED_S`."""
        if not self.is_stale:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LISTED_S):
                    await self._ask_since(asyncio.get_running_loop().time() - MISSED_S)
        return self._rows

    async def service_of(self, model: str) -> str | None:
        """Return the service that serves a model; None if none does. One that has just been submitted is asked for."""
        row = self._rows.get(model)
        if row is None:
            await self._ask_since(asyncio.get_running_loop().time())
            row = self._rows.get(model)
        return None if row is None else row.service

    async def _ask_since(self, since_s: float) -> None:
        """Return with an answer to a question that was asked at this time or later. One that fails is not repeated."""
        if self._asking is not None and not self._asking.done():
            await asyncio.shield(self._asking)
            if self.is_stale:
                return
        if self._asked_s < since_s:
            await asyncio.sleep(max(0.0, self._asked_s + MISSED_S - asyncio.get_running_loop().time()))
            await self.ask()

    async def keep(self) -> None:
        """Ask from time to time, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(ASK_S)

    async def ask(self) -> None:
        """Ask once; callers that ask together share one answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ASK_S * 5):
                answer: Any = await self.client._wire.read("services", {})
            told = read_answer(answer, ServicesAnswer).services
        except (MoorageError, TimeoutError) as error:
            if not self.is_stale:
                log.warning("the models stay as they were: %s", str(error) or "no scheduler answers")
            self.is_stale = True
        else:
            self.is_stale = False
            self._rows = {model: row for row in told for model in row.models}
        self._asked_s = began_s
