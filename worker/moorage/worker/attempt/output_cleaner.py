"""Delete old output files: the oldest finished first, by age, total size and number, but never a running job's.

Files are also deleted if output would leave too little of the disk for the journals next to it (`disk_room`).

A file belongs to an attempt, and an attempt to the supervisor. The supervisor lists its attempts after the folder was
read, so an attempt that started in between is never deleted. Ages are measured by CLOCK_BOOTTIME from the end that this
process saw; for attempts that ended before, the file's time is compared with the wall clock. A crash at any point
leaves whole files or none: the next process reads the folder again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from moorage.schemas.errors import refuse
from moorage.schemas.frames import LogPage, ReadLog
from moorage.schemas.frames.output import LogStream
from moorage.system.disk_room import spare_bytes
from moorage.system.proctree import boottime_s
from moorage.worker.attempt.output_pages import read_page
from moorage.worker.settings import OUTPUT_BYTES_DEFAULT, OUTPUT_KEEP_DEFAULT, OUTPUT_MEMBERS_DEFAULT
from moorage.worker.supervisor.capped_output import key_digest, order_path, output_path
from moorage.worker.supervisor.protocol import OUTPUT_FOLDER, Stream

#: seconds between two sweeps, and how many ends bring the next one forward
SWEEP_S: Final = 30.0
SWEEP_AT_ENDS: Final = 1000
#: file whose time is that of the newest deleted output
MARK: Final = "output.cleared"
#: size of a disk block: small files count with what they take on disk
BLOCK_BYTES: Final = 512
_NAME: Final = re.compile(r"([0-9a-f]{32})\.(stdout|stderr|order)")
_FILES: Final = ("stdout", "stderr", "order")
_STREAM_OF: Final[dict[LogStream, Stream]] = {"out": "stdout", "err": "stderr"}

log = logging.getLogger("moorage.worker")


class OutputBounds(NamedTuple):
    """Output is kept `keep_s` seconds after the end, with `bytes_max` in all, for `attempts_max` finished attempts."""

    keep_s: float = OUTPUT_KEEP_DEFAULT
    bytes_max: int = OUTPUT_BYTES_DEFAULT
    attempts_max: int = OUTPUT_MEMBERS_DEFAULT


class Output(NamedTuple):
    """The files of an attempt: bytes on disk, and the newer file's time."""

    bytes: int = 0
    mtime_s: float = 0.0

    def with_file(self, about: os.stat_result) -> Output:
        """Return it with one more file of the attempt."""
        return Output(self.bytes + about.st_blocks * BLOCK_BYTES, max(self.mtime_s, about.st_mtime))


class OutputCleaner:
    """The output folder of one supervisor.

    `begin` with the living attempts, report starts and ends, and let `run` sweep.
    """

    def __init__(self, state: Path, bounds: OutputBounds) -> None:
        self.bounds = bounds
        self._state = state
        self._folder = state / OUTPUT_FOLDER
        self._living: set[str] = set()
        self._ended: dict[str, float] = {}  # since the last sweep: digest -> CLOCK_BOOTTIME of the end
        self._finished: OrderedDict[str, tuple[float, Output]] = OrderedDict()  # oldest end first
        self._soon = asyncio.Event()
        self._is_full = False  # whether the log's last line says that the disk is full

    def scan(self) -> dict[str, Output]:
        """Return every attempt that has a file. Run it in a thread, before the supervisor is asked for its attempts."""
        found: dict[str, Output] = {}
        try:
            entries = list(os.scandir(self._folder))
        except FileNotFoundError:
            return {}
        for entry in entries:
            matched = _NAME.fullmatch(entry.name)
            if matched is not None and entry.is_file(follow_symlinks=False):
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found[matched[1]] = found.get(matched[1], Output()).with_file(about)
        return found

    def begin(self, scanned: dict[str, Output], living: Iterable[str]) -> None:
        """Take over what the folder had, with the keys of the attempts that lived after it was read."""
        now, wall = boottime_s(), time.time()
        self._living = {key_digest(key) for key in living}
        old = sorted((output.mtime_s, digest) for digest, output in scanned.items() if digest not in self._living)
        known = {digest: at for digest, (at, _) in self._finished.items()} | self._ended
        self._finished.clear()
        ends = [(known.get(digest, now - max(wall - mtime_s, 0.0)), digest) for mtime_s, digest in old]
        for at, digest in sorted(ends):
            self._finished[digest] = (at, scanned[digest])

    def started(self, key: str) -> None:
        self._living.add(key_digest(key))

    def ended(self, key: str) -> None:
        """Record that an attempt is over and its files are complete."""
        digest = key_digest(key)
        self._living.discard(digest)
        self._ended[digest] = boottime_s()
        if len(self._ended) >= SWEEP_AT_ENDS:
            self._soon.set()

    def share(self, key: str, to: str) -> None:
        """Have the output of an ended attempt count also as that of `to`, which never ran."""
        for stream in _FILES:
            with contextlib.suppress(OSError):
                os.link(*(self._folder / f"{key_digest(each)}.{stream}" for each in (key, to)))
        self.ended(to)

    def is_cleared(self, ended_ms: int) -> bool:
        """Return whether the output of an attempt may have been deleted by the limits.

        It ended at `ended_ms`, in milliseconds of another host's wall clock.
        """
        if self.bounds.keep_s <= 0 or min(self.bounds.bytes_max, self.bounds.attempts_max) <= 0:
            return True
        try:
            cleared_s = os.stat(self._state / MARK).st_mtime
        except FileNotFoundError:
            return False
        return ended_ms / 1000 <= cleared_s + SWEEP_S

    async def page(self, key: str, ask: ReadLog, is_over: bool, worker: str) -> LogPage:
        """Return a page of the kept output of an attempt with this key; without a file, an empty page.

        Raises Refused (`not-kept`) if the file cannot be read, or is not there and may have been deleted. `is_over`
        says whether the file was complete before this call. An attempt that is not over in the ledger may be about to
        start here.
        """
        stream = _STREAM_OF.get(ask.stream)
        path = Path(order_path(self._state, key)) if stream is None else output_path(self._state, key, stream)
        try:
            page = await asyncio.to_thread(read_page, path, ask, is_over)
        except OSError as error:
            raise refuse("not-kept", f"the output cannot be read: {error.strerror or error}", job=ask.job) from None
        if page is None and stream is not None and is_over and self.is_cleared(ask.ended_ms):
            bounds = self.bounds
            raise refuse(
                "not-kept",
                f"no {stream} is kept: the attempt wrote none, or it was deleted",
                found=f"output_keep {bounds.keep_s:g} s, output_bytes {bounds.bytes_max}, "
                f"output_members {bounds.attempts_max}",
                job=ask.job,
                next=f"raise them for later jobs, in [worker] of the settings of {worker}",
            )
        return page if page is not None else LogPage(ask.attempt, ask.stream, over=is_over)

    async def run(self) -> None:
        """Sweep now, then every `SWEEP_S` seconds and after many ends, until cancelled."""
        while True:
            await self.sweep()
            try:
                async with asyncio.timeout(SWEEP_S):
                    await self._soon.wait()
            except TimeoutError:
                pass
            self._soon.clear()

    async def sweep(self) -> int:
        """Delete output that exceeds the limits; return of how many attempts.

        An error of the disk is logged, and then it is 0.
        """
        ended, self._ended = self._ended, {}
        try:
            sizes, running_bytes, spare = await asyncio.to_thread(self._measure, list(ended), list(self._living))
            for digest, output in sizes.items():
                self._finished[digest] = (ended[digest], output)
            doomed = self._over_bounds(running_bytes, spare)
            self._log_room(spare + sum(output.bytes for output in doomed.values()))
            cleared = await asyncio.to_thread(self._clear, doomed) if doomed else []
            for digest in cleared:  # only now: what could not be deleted is found again by the next sweep
                self._finished.pop(digest, None)
            if cleared:
                log.info("cleared the output of %d finished attempts", len(cleared))
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            log.warning("output of ended jobs cannot be deleted now: %s", error)
            self._ended = ended | self._ended
            return 0
        return len(cleared)

    def _log_room(self, spare: int) -> None:
        """Log that the disk is full, and that it has room again, once each."""
        if spare <= 0 and not self._is_full:
            log.warning(
                "the disk of %s is nearly full: output of jobs is not stored, as nothing can be started without room"
                " for the journal; free space there", self._state,
            )  # fmt: skip
        elif spare > 0 and self._is_full:
            log.warning("the disk of %s has space again: output of jobs is stored again", self._state)
        self._is_full = spare <= 0

    def _over_bounds(self, running_bytes: int, spare: int) -> dict[str, Output]:
        """Return the oldest finished attempts whose output must go. `spare` is the room left on the disk.

        Those that run again are forgotten; the others once their output is gone.
        """
        now, bounds = boottime_s(), self.bounds
        total = running_bytes + sum(output.bytes for _, output in self._finished.values())
        doomed: dict[str, Output] = {}
        runs_again: list[str] = []
        left = len(self._finished)
        for digest, (at, output) in self._finished.items():
            fits = total <= bounds.bytes_max and left <= bounds.attempts_max and spare > 0
            if fits and now - at <= bounds.keep_s:
                break
            left -= 1
            total -= output.bytes
            if digest in self._living:
                runs_again.append(digest)
            else:
                spare += output.bytes
                doomed[digest] = output
        for digest in runs_again:
            del self._finished[digest]
        return doomed

    # -- in a thread

    def _measure(self, ended: list[str], living: list[str]) -> tuple[dict[str, Output], int, int]:
        """Return the output of ended attempts, the bytes of running ones, and the room left on the disk."""
        sizes = {digest: output for digest in ended if (output := self._output(digest)) is not None}
        running_bytes = sum(output.bytes for digest in living if (output := self._output(digest)) is not None)
        return sizes, running_bytes, spare_bytes(self._state)

    def _output(self, digest: str) -> Output | None:
        found = None
        for stream in _FILES:
            try:
                about = os.stat(self._folder / f"{digest}.{stream}", follow_symlinks=False)
            except FileNotFoundError:
                continue
            found = (found or Output()).with_file(about)
        return found

    def _clear(self, doomed: dict[str, Output]) -> list[str]:
        """Delete the output of these attempts, and return those of which no file is left.

        The mark is set first: a reader must not take deleted output for the output of a silent job. A file that cannot
        be deleted must not keep those that are younger.
        """
        mark = self._state / MARK
        newest_s = max(output.mtime_s for output in doomed.values())
        try:
            newest_s = max(newest_s, os.stat(mark).st_mtime)
        except FileNotFoundError:
            pass
        descriptor = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.utime(descriptor, (newest_s, newest_s))
        finally:
            os.close(descriptor)
        cleared: list[str] = []
        failed: list[OSError] = []
        for digest in doomed:
            try:
                self._unlink(digest)
            except OSError as error:
                failed.append(error)
            else:
                cleared.append(digest)
        if failed:
            log.warning("the output of %d ended jobs cannot be deleted now: %s", len(failed), failed[0])
        return cleared

    def _unlink(self, digest: str) -> None:
        for stream in _FILES:
            try:
                os.unlink(self._folder / f"{digest}.{stream}")
            except FileNotFoundError:
                pass
