"""Start members of jobs whose items are in a file: each once its item is read. The file may have to be fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moorage.schemas.attempt import AttemptName
from moorage.schemas.items import Item
from moorage.worker.attempt.job_items import ItemRefused, JobItems
from moorage.worker.drivers.base import ended_unstarted, never_ran
from moorage.worker.session.member_messages import Event, Member


class ItemStarts:
    """The members whose items are being read; `start` gets them with their items, `report` those that do not start."""

    def __init__(
        self, items: JobItems, start: Callable[[list[tuple[Member, Item]]], None], report: Callable[[Event], None]
    ) -> None:
        self._items = items
        self._start = start
        self._report = report
        self._reading: set[asyncio.Task[None]] = set()
        #: members that no driver has yet
        self.waiting: dict[AttemptName, Member] = {}

    def begin(self, members: Sequence[Member]) -> None:
        """Read the items of members, those of one file together, and then start them."""
        files: dict[object, list[Member]] = {}
        for member in members:
            self.waiting[member.name] = member
            run = member.request.workload
            files.setdefault((member.tenant, run.files, run.items), []).append(member)
        for each in files.values():
            reading = asyncio.get_running_loop().create_task(self._read(each))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    async def _read(self, members: list[Member]) -> None:
        run, numbers = members[0].request.workload, [member.replica for member in members]
        try:
            items = await self._items.in_file(members[0].tenant, run, numbers)
        except Exception as error:
            for member in self._still(members):
                self._report(never_ran(member.name, error))
            return
        ready: list[tuple[Member, Item]] = []
        for member, item in zip(members, items, strict=True):
            if not self._still([member]):
                continue
            if isinstance(item, ItemRefused):
                self._report(never_ran(member.name, item))
            else:
                ready.append((member, item))
        if ready:
            self._start(ready)

    def _still(self, members: list[Member]) -> list[Member]:
        """Return the members that have not been ended meanwhile; they wait no more."""
        return [member for member in members if self.waiting.pop(member.name, None) is member]

    def end(self, name: AttemptName, why: str) -> bool:
        """Give up the start of a member and report its end; return False if it does not wait here."""
        if self.waiting.pop(name, None) is None:
            return False
        self._report(ended_unstarted(name, why))
        return True

    async def close(self) -> None:
        """Start nothing more; the next agent reports the members that have not started."""
        for reading in list(self._reading):
            reading.cancel()
            await asyncio.wait((reading,))
