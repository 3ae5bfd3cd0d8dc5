"""Answer the leader's requests for what this worker keeps of jobs, outside the turns and a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from moorage.bus.transport import Delivery
from moorage.schemas.attempt import name_in
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Problem, Refused, problem, refuse
from moorage.schemas.frames import LogPage, ReadLog, ReadReports, ReadUse, ReportsPage, Rescue, Rescued, UsePage
from moorage.schemas.names import is_job, is_tenant
from moorage.worker.attempt.reports import has_reported, rows_in
from moorage.worker.driver import Driver, KeepsFolders, KeepsOutput
from moorage.worker.session.lease_session import LeaseSession
from moorage.worker.session.shell import Shell

#: pages of output that are read at the same time; the leader asks again for others
LOG_READS_MAX: Final = 16

_Ask = ReadLog | ReadUse | ReadReports | Rescue
_Page = LogPage | UsePage | ReportsPage | Rescued

_decode_ask: Final[Decoder[_Ask]] = Decoder(_Ask)


class OutputReader:
    """Answers the requests for output, the use of devices and what attempts left, that one worker gets."""

    def __init__(
        self,
        shell: Shell,
        worker: str,
        session: LeaseSession,
        drivers: Mapping[str, Driver],
        use: Callable[[ReadUse], UsePage],
    ) -> None:
        self._shell = shell
        self._worker = worker
        self._session = session
        self._drivers = drivers
        self._use = use
        self._reading = 0

    def on_asked(self, delivery: Delivery) -> None:
        """Handle a request of the leader for a page, and answer it later; with "overloaded" at once if
        `LOG_READS_MAX` pages are being read.

        A request without a reply subject is dropped.
        """
        if not delivery.reply:
            self._shell.dropped["no-reply"] += 1
        elif self._reading >= LOG_READS_MAX:
            busy = problem("overloaded", f"{LOG_READS_MAX} pages are being read", retry_after_s=0.2)
            self._shell.post(delivery.reply, encode(busy, json=False))
        else:
            self._reading += 1
            self._shell.spawn(self._answer(delivery))

    async def _answer(self, delivery: Delivery) -> None:
        answer: _Page | Problem
        try:
            answer = await self._page(_decode_ask(delivery.data))
        except Refused as refused:
            answer = refused.problem
        except Exception as error:  # a foreign driver may fail in any way, and the leader must get an answer
            answer = problem("not-kept", f"the output cannot be read: {type(error).__name__}: {error}")
        finally:
            self._reading -= 1
        self._shell.post(delivery.reply, encode(answer, json=False))

    async def _page(self, ask: _Ask) -> _Page:
        """Return the page. Raises Refused for another session, for an impossible name, and if nothing is kept."""
        session = self._session
        if session.phase != "live" or ask.session != session.session:
            raise refuse("session-over", f"{self._worker} is in another lease session")
        if not (is_tenant(ask.tenant) and is_job(ask.job)):
            raise refuse("invalid-argument", "no tenant or no job can have this name", found=f"{ask.tenant}/{ask.job}")
        if isinstance(ask, ReadUse):
            return self._use(ask)
        if isinstance(ask, ReadReports):
            folders = [driver.folder_of(name_in(ask)) for driver in self._drivers.values()]
            folder = next((each for each in folders if each and has_reported(each)), "")
            rows = await asyncio.to_thread(rows_in, folder) if folder else []
            return ReportsPage(ask.replica, ask.attempt, rows)
        if ask.driver:
            driver = self._drivers.get(ask.driver)
            if driver is None:
                raise refuse("not-kept", f"{self._worker} no longer has the driver {ask.driver}", job=ask.job)
            return await _of(driver, ask)
        nothing = refuse("not-kept", f"{self._worker} keeps nothing of this job", job=ask.job)
        for driver in self._drivers.values():  # the leader does not know the driver any more: ask each
            try:
                return await _of(driver, ask)
            except Refused as refused:
                nothing = refused
        raise nothing


async def _of(driver: Driver, ask: ReadLog | Rescue) -> LogPage | Rescued:
    if isinstance(ask, Rescue):
        if isinstance(driver, KeepsFolders):
            return await driver.rescue(ask)
        raise refuse("not-kept", f"the driver {driver.name} keeps no folders of jobs that have ended", job=ask.job)
    if isinstance(driver, KeepsOutput):
        return await driver.read_log(ask)
    raise refuse(
        "not-kept",
        f"the driver {driver.name} keeps no output: the output of its jobs is on their log subject while they run",
        job=ask.job,
    )
