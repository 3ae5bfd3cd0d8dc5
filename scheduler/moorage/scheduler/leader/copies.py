"""Watches which servers lack their copy of the ledger: the first loss changes nothing, the loss of half stops all."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream

log = logging.getLogger("moorage.ledger")

#: a copy counts as lacking after two checks in a row: a restarted server catches up within seconds
LOOK_S: Final = 10.0


class Copies:
    """The copies of a ledger, as its leader sees them.

    `lacking` names the servers that were without an up-to-date copy in the last two checks.
    """

    def __init__(self, jetstream: JetStream, stream: str, replicas: int) -> None:
        self._js = jetstream
        self._stream = stream
        self._replicas = replicas
        self.lacking: frozenset[str] = frozenset()
        self._seen_s = time.monotonic()  # when the servers last told which copies they keep

    async def watch(self) -> None:
        """Log, forever, which copies are not up to date, and when all are again; with one copy, return at once."""
        found = self.lacking = frozenset()  # may be left from an earlier term
        while self._replicas > 1:
            before = found
            try:
                found = (await self._js.stream_info(self._stream)).lacking
                self._seen_s = time.monotonic()
            except BusError:
                found = before  # the append logs it
            self._tell(before & found)
            await asyncio.sleep(LOOK_S)

    def _tell(self, lacking: frozenset[str]) -> None:
        if lacking == self.lacking:
            return
        self.lacking = lacking
        if lacking:
            log.warning(
                "copies of the ledger that are not up to date: %d of %d; check "
                "nats-server %s (restart a server whose disk was full):"
                " the ledger accepts records only while more than half of its copies are up to date",
                len(lacking),
                self._replicas,
                ", ".join(sorted(lacking)),
            )
        else:
            log.info("all %d copies of the ledger are kept up", self._replicas)

    def figures(self) -> dict[str, Any]:
        """Return what `fleet` shows of the copies; empty if there is only one."""
        if self._replicas < 2:
            return {}
        seen_ms_ago = int((time.monotonic() - self._seen_s) * 1000)
        copies = {"wanted": self._replicas, "lacking": sorted(self.lacking), "seen_ms_ago": seen_ms_ago}
        return {"ledger_copies": copies}
