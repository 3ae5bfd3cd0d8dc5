"""The fleet frame for observers, twice a second: of ten thousand workers, only rows that changed are written again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from moorage.scheduler.answers import views
from moorage.scheduler.answers.view import View
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.state import Worker
from moorage.schemas.codec import encode
from moorage.schemas.frames import FleetFrame, FleetRow, LedgerCopies

#: rows written before the event loop runs other tasks
AT_ONCE: Final = 2_048


class FleetFrames:
    """Keeps each worker's last row, and the workers sorted by name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows: dict[int, tuple[str, msgspec.Raw | None]] = {}  # by worker number: its name and row
        self._order: list[tuple[str, int]] = []  # names and worker numbers
        engine.fleet.redrawn.clear()

    def catch_up(self) -> Iterator[None]:
        """Write the rows of workers that joined or changed, and drop those of workers that the ledger has forgotten.

        It yields where the event loop should run other tasks.
        """
        known, redrawn, rows = self._engine.state.worker_by_num, self._engine.fleet.redrawn, self._rows
        written = 0
        while redrawn or len(rows) != len(known):
            if written == AT_ONCE:
                yield
                written = 0
            written += 1
            if not redrawn:
                redrawn |= known.keys() ^ rows.keys()
            num = redrawn.pop()
            worker = known.get(num)
            if worker is None:
                self._drop(num)
                continue
            if num not in rows:
                insort(self._order, (worker.id, num))
            rows[num] = worker.id, self._row(worker)

    def _drop(self, num: int) -> None:
        row = self._rows.pop(num, None)
        if row is not None:
            del self._order[bisect_left(self._order, (row[0], num))]

    def frame(self, ledger_copies: LedgerCopies) -> bytes:
        """Return the frame; current once `catch_up` has ended. `ledger_copies` is what `Copies` has found."""
        engine, rows = self._engine, self._rows
        state = engine.state
        workers: list[Any] = [row for _, num in self._order if (row := rows[num][1]) is not None]
        running = sum(len(worker.attempts) for worker in state.workers.values())
        queued = View(engine).queued()
        return encode(
            FleetFrame(
                state.epoch,
                state.seq,
                workers=workers,
                queued=queued,
                running=running,
                ledger_copies=ledger_copies,
            )
        )

    def _row(self, worker: Worker) -> msgspec.Raw | None:
        if worker.is_unlisted:
            return None
        host = self._engine.fleet.hosts.get(worker.num)
        row = FleetRow(
            worker.id,
            views.worker_state(worker, host),
            views.cells(host, len(worker.inventory.gpu_pool)),
            worker.inventory.simulated,
        )
        return msgspec.Raw(encode(row))
