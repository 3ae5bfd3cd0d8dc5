"""The agent's journal on a simulated machine: the production file, a disk that may be full, a process that may die."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from moorage.schemas.frames import Report
from moorage.testing.bus.processes import Process
from moorage.worker.agent.journal import JOURNAL_NAME, Journal
from tests.release.sim.machine import Machine


class SimulatedJournal(Journal):
    """What the killed agent had not handed to the kernel is gone, and nothing is written after.

    A full disk takes what still fits: a part of the record, then it raises, as write(2) does.
    """

    def __init__(self, machine: Machine, process: Process) -> None:
        super().__init__(machine.state / JOURNAL_NAME)
        self._machine = machine
        self._process = process
        self._is_cut = False
        process.on_kill.append(self._cut)

    def flush(self) -> None:
        if not self._pending:
            return
        self._process.acts()
        if self._is_cut:
            return
        if self._machine.disk_is_full:
            data = self._file._framed(self._pending)
            os.write(self._file._descriptor, data[: self._machine.rng.randrange(len(data))])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().flush()

    def join(self, n: int, reports: list[Report], devices: Sequence[str] = (), left: Sequence[str] = ()) -> None:
        if not self._is_cut:
            super().join(n, reports, devices, left)

    def close(self) -> None:
        self._cut()

    def _cut(self) -> None:
        if self._is_cut:
            return
        self._is_cut = True
        os.close(self._lock)
        self._file.close()
        self._pending.clear()
