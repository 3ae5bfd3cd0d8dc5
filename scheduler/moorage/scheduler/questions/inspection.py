"""Asks all workers to inspect their devices and what runs there, for an audit.

It is one question to all, and answers until a time-out.

A worker does not reply but publishes on its own subject, to which no other client may write, so its answer is proven to
be its own. Audits that arrive during an inspection share it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final

from moorage.bus.transport import Delivery, Transport
from moorage.schemas.answers.operators import DeviceDrift
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Finding, Look, Looked
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.scheduler")

#: how long workers may take; a worker gives up a hanging device after 2 s
LOOK_S: Final = 2.5

_decode_looked: Final = Decoder[Looked](Looked)


class Inspection:
    """The inspections of one leader. `run` lasts for the term; `ask` calls back with the workers' answers.

    `expected` returns the workers that have to answer.
    """

    def __init__(self, out: Transport, subjects: Subjects, expected: Callable[[], set[str]], epoch: int) -> None:
        self._out = out
        self._subjects = subjects
        self._expected = expected
        self._epoch = epoch
        self._asked: list[Callable[[dict[str, Looked], list[str]], None]] = []
        self._some = asyncio.Event()
        self._number = 0
        self._missing: set[str] = set()
        self._answers: dict[str, Looked] = {}
        self._all = asyncio.Event()

    def ask(self, told: Callable[[dict[str, Looked], list[str]], None]) -> None:
        """Start an inspection or join the present one.

        `told` gets the answers by worker, and the workers that did not answer in time.
        """
        self._asked.append(told)
        self._some.set()

    def on_looked(self, delivery: Delivery) -> None:
        """Take a worker's answer; ignore answers to other inspections, unexpected ones and unreadable ones."""
        worker = self._subjects.token(delivery.subject, 1)
        if worker not in self._missing:
            return
        try:
            frame = _decode_looked(delivery.data)
        except Refused:
            return
        if frame.ask != self._number:
            return
        self._missing.discard(worker)
        self._answers[worker] = frame
        if not self._missing:
            self._all.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            if not self._asked:
                continue  # answered by the previous inspection already
            answers, silent = await self._look()
            asked, self._asked = self._asked, []
            for told in asked:
                try:
                    told(answers, silent)
                except Exception:  # a defect of moorage must not end the term; the client asks again
                    log.exception("a request for an audit could not be answered")

    async def _look(self) -> tuple[dict[str, Looked], list[str]]:
        self._number, self._answers, self._missing = secrets.randbits(48), {}, self._expected()
        if self._missing:
            self._all.clear()
            await self._out.send([(self._subjects.look, encode(Look(self._number, self._epoch)), "")])
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._all.wait()
            except TimeoutError:
                pass  # workers without an answer are reported as silent
        silent, self._missing = sorted(self._missing), set()
        return self._answers, silent


def _attempt_of(finding: Finding) -> str:
    if finding.pid:
        return f"{finding.uuid} pid {finding.pid} {finding.name}".rstrip()
    return finding.uuid or finding.name


def device_drift(answers: dict[str, Looked]) -> list[DeviceDrift]:
    """Return the findings as rows of an audit's `drift`; `member` is stable from one inspection to the next."""
    return [
        DeviceDrift(
            worker=worker,
            kind=finding.kind,
            member=_attempt_of(finding),
            gpu=finding.uuid,
            slot=finding.slot,
            pid=finding.pid,
            name=finding.name,
            memory_mib=finding.memory_mib,
        )
        for worker, frame in sorted(answers.items())
        for finding in frame.findings
    ]
