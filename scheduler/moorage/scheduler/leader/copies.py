"""Watches which servers lack their copy of the ledger: the first loss changes nothing, the loss of half stops all.

Of a ledger with one copy it finds out where that is, and whether a cluster could hold more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.scheduler.ledger.one_copy import servers_of
from moorage.schemas.frames import LedgerCopies
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.ledger")

LOOK_S: Final = 3.0
#: a copy counts as lacking after so long: a restarted server catches up within seconds
LACKS_S: Final = 6.0


class Copies:
    """The copies of a ledger, as its leader sees them.

    `lacking` names the servers that had no up-to-date copy in all checks of the last `LACKS_S` seconds. Of a ledger
    with one copy on a cluster, `servers` names the cluster's servers that were found, three at most.
    """

    def __init__(self, jetstream: JetStream, subjects: Subjects, replicas: int) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._stream = subjects.ledger_stream
        self._replicas = replicas
        self.lacking: frozenset[str] = frozenset()
        self.servers: frozenset[str] = frozenset()
        self._holder = ""  # the server with the only copy, once it is known
        self._seen_s = time.monotonic()  # when the servers last told which copies they keep

    async def watch(self) -> None:
        """Log, forever, which copies are not up to date, and when all are again; of one copy, log once if it is one on
        a cluster, and return."""
        if self._replicas < 2:
            await self._find_holder()
            return
        self.lacking = frozenset()  # may be left from an earlier term
        since_s: dict[str, float] = {}
        while True:
            now = time.monotonic()
            try:
                found = (await self._js.stream_info(self._stream)).lacking
                since_s = {server: since_s.get(server, now) for server in found}
                self._seen_s = now
            except BusError:
                pass  # the append logs it
            self._log_lacking(frozenset(server for server, at_s in since_s.items() if now >= at_s + LACKS_S))
            await asyncio.sleep(LOOK_S)

    async def _find_holder(self) -> None:
        while True:
            try:
                info = await self._js.stream_info(self._stream)
                self._holder = info.leader
                self.servers = await servers_of(self._js, self._subjects) if info.cluster else frozenset()
                break
            except BusError:  # the append logs it
                await asyncio.sleep(LOOK_S)
        if len(self.servers) > 1:
            log.warning(
                "the ledger has one copy, on nats-server %s, though the cluster has more servers (%s): while that"
                " server is away nothing is accepted, and after the lease all jobs end. For a copy on each of three:"
                " moorage admin backup FILE, stop every scheduler, moorage admin restore FILE --replace --replicas 3,"
                " and start them with replicas = 3 under [scheduler] of moorage.toml",
                self._holder,
                ", ".join(sorted(self.servers)),
            )

    def _log_lacking(self, lacking: frozenset[str]) -> None:
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

    def figures(self) -> LedgerCopies:
        """Return what `fleet` and its frame show of the copies: with one copy its server, and the servers of a cluster
        around it."""
        wanted, lacking = self._replicas, sorted(self.lacking)
        if wanted > 1:
            seen_ms_ago = int((time.monotonic() - self._seen_s) * 1000)
            return LedgerCopies(wanted=wanted, lacking=lacking, seen_ms_ago=seen_ms_ago)
        return LedgerCopies(wanted=wanted, lacking=lacking, holder=self._holder, servers=sorted(self.servers))
