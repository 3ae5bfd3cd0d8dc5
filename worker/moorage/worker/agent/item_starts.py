"""Start attempts of jobs whose items are in a file: each once its item is read. The file may have to be fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moorage.schemas.attempt import AttemptName
from moorage.schemas.items import Item
from moorage.worker.attempt.job_items import ItemRefused, JobItems
from moorage.worker.driver import ended_unstarted, never_ran
from moorage.worker.session.attempt_messages import Attempt, Event


class ItemStarts:
    """The attempts whose items are being read; `start` gets them with their items, `report` those that do not start."""

    def __init__(
        self, items: JobItems, start: Callable[[list[tuple[Attempt, Item]]], None], report: Callable[[Event], None]
    ) -> None:
        self._items = items
        self._start = start
        self._report = report
        self._reading: set[asyncio.Task[None]] = set()
        #: attempts that no driver has yet
        self.waiting: dict[AttemptName, Attempt] = {}

    def begin(self, attempts: Sequence[Attempt]) -> None:
        """Read the items of attempts, those of one file together, and then start them."""
        files: dict[object, list[Attempt]] = {}
        for attempt in attempts:
            self.waiting[attempt.name] = attempt
            run = attempt.request.workload
            files.setdefault((attempt.tenant, run.files, run.items), []).append(attempt)
        for each in files.values():
            reading = asyncio.get_running_loop().create_task(self._read(each))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    async def _read(self, attempts: list[Attempt]) -> None:
        run, numbers = attempts[0].request.workload, [attempt.replica for attempt in attempts]
        try:
            items = await self._items.in_file(attempts[0].tenant, run, numbers)
        except Exception as error:
            for attempt in self._still(attempts):
                self._report(never_ran(attempt.name, error))
            return
        ready: list[tuple[Attempt, Item]] = []
        for attempt, item in zip(attempts, items, strict=True):
            if not self._still([attempt]):
                continue
            if isinstance(item, ItemRefused):
                self._report(never_ran(attempt.name, item))
            else:
                ready.append((attempt, item))
        if ready:
            self._start(ready)

    def _still(self, attempts: list[Attempt]) -> list[Attempt]:
        """Return the attempts that have not been ended meanwhile; they wait no more."""
        return [attempt for attempt in attempts if self.waiting.pop(attempt.name, None) is attempt]

    def end(self, name: AttemptName, why: str) -> bool:
        """Give up the start of an attempt and report its end; return False if it does not wait here."""
        if self.waiting.pop(name, None) is None:
            return False
        self._report(ended_unstarted(name, why))
        return True

    async def close(self) -> None:
        """Start nothing more; the next agent reports the attempts that have not started."""
        for reading in list(self._reading):
            reading.cancel()
            await asyncio.wait((reading,))
