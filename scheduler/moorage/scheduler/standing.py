"""Who leads and who stands by: every scheduler says so, and which feature level it can write and fold.

It is only said and proves nothing; so an operator who raises the level names how many schedulers must have said it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery, Subscribed, Transport
from moorage.scheduler.core import records
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Standing
from moorage.schemas.release import RELEASE
from moorage.schemas.subjects import Subjects

SAY_S: Final = 2.0
#: who was silent for so long is not counted any more
HEARD_S: Final = 5 * SAY_S
#: schedulers that are kept in mind; beyond it a new one is not
KNOWN_MAX: Final = 64

_decode: Final[Decoder[Standing]] = Decoder(Standing)


class Standings:
    """Says what this scheduler is, for as long as `say` runs; keeps what others said, once `listen` was called."""

    def __init__(self, world: Transport, subjects: Subjects, name: str) -> None:
        self._world = world
        self._subject = subjects.standing
        self._name = name
        self._heard: dict[str, tuple[Standing, float]] = {}

    async def say(self, now: Callable[[], tuple[int, bool]]) -> None:
        """For ever: `now` gives the ledger record folded through, and whether we lead."""
        while True:
            ledger, leads = now()
            frame = Standing(self._name, RELEASE, records.FORMAT, ledger, leads)
            with contextlib.suppress(BusError):
                await self._world.send([(self._subject, encode(frame), "")])
            await asyncio.sleep(SAY_S)

    async def listen(self) -> Subscribed:
        return await self._world.subscribe(self._subject, self._on_delivery)

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            said = _decode(delivery.data)
        except Refused:
            return
        if len(self._heard) >= KNOWN_MAX and said.scheduler not in self._heard:
            self.lately()  # each start of a scheduler may have another name: those that went make room
        if said.scheduler in self._heard or len(self._heard) < KNOWN_MAX:
            self._heard[said.scheduler] = (said, time.monotonic())

    def lately(self) -> list[Standing]:
        """Those heard within the last seconds, by name."""
        since = time.monotonic() - HEARD_S
        self._heard = {name: heard for name, heard in self._heard.items() if heard[1] >= since}
        return [self._heard[name][0] for name in sorted(self._heard)]

    def rows(self) -> list[dict[str, Any]]:
        """As the verb `fleet` shows them."""
        rows = [msgspec.to_builtins(said) for said in self.lately()]
        return [{key: row[key] for key in row if key not in ("kind", "v")} for row in rows]
