"""Since when each host has nothing to do, for whoever removes hosts."""

from __future__ import annotations

from moorage.scheduler.core.engine import Engine
from moorage.schemas.answers.operators import IdleHost
from moorage.schemas.where import POOL


class IdleHosts:
    """Since when each host has nothing to do, as this leader has seen it: it looks every 2 s, from its beginning on."""

    def __init__(self) -> None:
        self._since_ms: dict[int, int] = {}  # by worker number, for workers with a session

    def look(self, engine: Engine, mono_ms: int) -> None:
        idle = [num for num, host in engine.fleet.hosts.items() if host.heard and not host.worker.attempts]
        self._since_ms = {num: self._since_ms.get(num, mono_ms) for num in idle}

    def rows(self, engine: Engine, mono_ms: int) -> list[IdleHost]:
        """Return the hosts that have nothing to do now, the longest idle first. What a process of its host has is no
        idleness."""
        rows = []
        for num, since_ms in self._since_ms.items():
            host = engine.fleet.hosts.get(num)
            if host is not None and not host.worker.attempts and not host.busy:
                labels = host.worker.inventory.labels
                rows.append(
                    IdleHost(
                        worker=host.worker.id,
                        pool=labels.get(POOL, ""),
                        idle_ms=mono_ms - since_ms,
                        draining=host.worker.flag != "open",
                    )
                )
        rows.sort(key=lambda row: (-row.idle_ms, row.worker))
        return rows
