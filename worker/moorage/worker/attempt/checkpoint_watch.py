"""Watches the checkpoint folder of one attempt while it runs, and stores it as a set when it is due.

That is so `every_s` after the set before, once the folder has changed and then been quiet for a moment. It is so at
once when the job touches the file of `MOORAGE_CHECKPOINT_NOW`, which is removed once the set counts. A set counts once
the ledger has its digest: a later attempt begins with no other one. So the two places are written in turn, and none
before the set in the other one counts.

A rank of a gang stores at times that are the same for all ranks, and in three places: its sets count only together with
those of the others. It writes over a set only once the ledger has said that this one counts no more. While there is no
such place it stores nothing.

If nothing names the steps of a gang, its sets are of moments: a rank stores at each moment that is the same for all, if
its folder did not change for a while before, and nothing otherwise. So what counts is what all ranks had while none of
them wrote. The set of an attempt's end counts if all ranks ended by themselves, as they do once they have saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from moorage.bus.checkpoint_manifest import Manifest
from moorage.bus.errors import BusError
from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import MoorageError
from moorage.schemas.handler import CHECKPOINT_NOW_FILE, checkpoint_object, set_objects
from moorage.schemas.job import step_pattern
from moorage.worker.attempt.checkpoint_sets import ANEW_S, KeptSet, NotKept, Pace, Seen, Step, look, step_of
from moorage.worker.attempt.job_files import CHECKPOINTS_KEPT, JobFiles

#: between two looks, and the largest part of all time that they may take
LOOK_S: Final = 1.0
LOOK_PART: Final = 0.02
#: a folder that has not changed for so long is taken to be whole
QUIET_S: Final = 2.0
#: one that changes for so long, or for as long as between two sets, is stored all the same: each file counts only if
#: it did not change while it was read
RESTLESS_S: Final = 60.0
#: pause after a set that could not be stored, unless the next one is due before
FAILED_S: Final = 60.0

#: a moment of a gang counts for a rank whose folder did not change for so long before, or for this part of the time
#: between two moments, if that is less. Wall clocks of its hosts may differ by less
QUIET_BEFORE_S: Final = 10.0
QUIET_BEFORE_PART: Final = 0.25
#: so many moments that do not count, one after the other, are told
MISSED_MAX: Final = 3
#: in place of a moment, for the set of an end: later than all
AT_END: Final = (1 << 53) - 1

log = logging.getLogger("moorage.worker")


class Folder(NamedTuple):
    """What is stored of an attempt's folder, and when."""

    path: str
    checkpoint: str
    accepted_ms: int
    every_s: float
    step: str
    gang: bool = False


class CheckpointWatch:
    """`tell` is called with the digest of each set that is stored and its step, and why none is otherwise.

    `earlier` are the objects with checkpoints of the attempts before, `brought` is the set from which this one began.
    """

    def __init__(
        self,
        files: JobFiles,
        name: AttemptName,
        folder: Folder,
        earlier: Sequence[str],
        brought: Manifest | None,
        tell: Callable[[str, int | None, str], None],
    ) -> None:
        self._files = files
        self._name = name
        self._folder = folder
        self._earlier = earlier
        self._tell = tell
        self._tenant, job, replica, attempt, _ = name
        self._sets = files.sets(self._tenant)
        self._places = set_objects(checkpoint_object(job, folder.accepted_ms, replica, attempt))
        self._step = step_pattern(folder.step)
        self._restless_s = min(RESTLESS_S, folder.every_s)
        self._brought = brought
        self._stored: list[KeptSet] = []  # of this attempt, the newest first
        self._is_loaded = False
        #: of a rank of a gang: the digests that the ledger has, and those of them that count no more
        self._noted: set[str] = set()
        self._free: set[str] = set()
        self._keeps_earlier = folder.gang
        self._counts = asyncio.Event()
        self._counts.set()
        self._asked_ns: int | None = None  # the time of the touch that the set in `_stored` answers
        self._warned = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def digest(self) -> str:
        """The digest of the newest set of this attempt, "" for none."""
        return self._stored[0].digest if self._stored else ""

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def counts(self) -> None:
        """The ledger has what was told last."""
        self._noted = {kept.digest for kept in self._stored}
        if self._asked_ns is not None:
            asked_ns, self._asked_ns = self._asked_ns, None
            if self._asked() == asked_ns:  # else the job has asked again
                with contextlib.suppress(OSError):
                    os.unlink(self._now_file)
        self._counts.set()

    def sets_count(self, digests: Sequence[str], *, earlier: bool) -> None:
        """Of the sets that the ledger has, these count or may come to, and perhaps some of an `earlier` attempt."""
        self._free = self._noted - set(digests)
        self._keeps_earlier = earlier

    def tell_again(self) -> None:
        """Tell all sets of a rank of a gang to a new leader, which may not know of them."""
        if self._folder.gang and self._stored:
            self._noted.clear()
            self._told()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def end(self, *, by_itself: bool = True) -> str:
        """Store the folder a last time, now that nothing of the attempt runs; return the digest, "" for no set at all.
        `by_itself`: its program ended as it does once it has saved.

        Raises NotKept. Does nothing for an attempt that has stored no set while it ran, unless it is a rank of a gang:
        that tells its set, with its step. The sets before stay: the ledger may not have the end yet.
        """
        gang = self._folder.gang
        await self.stop()
        if self._is_by_moments and not by_itself:
            return self.digest
        try:
            await self._load()
            if not self._stored and not gang:
                return ""
            seen = await asyncio.to_thread(look, self._folder.path, self._folder.checkpoint)
        except BusError as error:
            raise NotKept(error.problem.message) from None
        except OSError as error:
            raise NotKept(error.strerror or str(error)) from None
        if gang and not seen:
            raise NotKept(f"there is no {self._folder.checkpoint}, or nothing in it")
        if seen and (self._has_changed(seen) or self._is_by_moments):
            await self._put(self._places[-1], Pace(0), AT_END if self._is_by_moments else self._step)
            if gang:
                self._told()
        return self.digest

    @property
    def live(self) -> list[Manifest]:
        """The sets that this attempt has stored and that are there, the newest first."""
        return [kept.manifest for kept in self._stored]

    # -- inside

    async def _run(self) -> None:
        try:
            await self._load_patiently()
            await (self._watch_moments() if self._is_by_moments else self._watch())
        except Exception:
            log.exception("the checkpoints of job %s are not stored while it runs", self._name[1])

    async def _load_patiently(self) -> None:
        while True:
            try:
                await self._load()
            except BusError:
                await asyncio.sleep(FAILED_S)
            else:
                return

    async def _load(self) -> None:
        """Find the sets that an earlier agent has stored for this attempt. Raises BusError."""
        if self._is_loaded:
            return
        found = [kept for name in self._places if (kept := await self._sets.find(name)) is not None]
        self._stored = sorted(found, key=lambda kept: -kept.manifest.at_ms)
        self._is_loaded = True
        if self._stored:  # it is not known whether that agent came to tell it
            self._told()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._next_due_s()
        before: frozenset[object] = frozenset()
        still_s = due_s
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._counts.is_set():
                await self._counts.wait()
                continue
            asked_ns = await asyncio.to_thread(self._asked)
            if asked_ns is None and loop.time() < due_s:
                continue
            began_s = loop.time()
            try:
                seen = await asyncio.to_thread(look, self._folder.path, self._folder.checkpoint)
                marks = frozenset(each.mark for each in seen)
                if marks != before:
                    before, still_s = marks, began_s
                has_changed = bool(seen) and self._has_changed(seen)
                if not has_changed:
                    self._answer(asked_ns)
                elif not (place := self._next_place()):
                    if loop.time() >= due_s:
                        due_s = self._next_due_s()
                        self.tell_again()  # the leader may have lost what it knew
                elif asked_ns is not None or began_s - still_s >= QUIET_S or began_s - due_s >= self._restless_s:
                    self._asked_ns = asked_ns
                    await self._store(place, self._files.pace, self._step)
                    await self._drop_earlier()
                    due_s = self._next_due_s()
            except (OSError, MoorageError) as error:
                due_s = loop.time() + min(FAILED_S, self._folder.every_s)
                self._asked_ns = None
                if not isinstance(error, FileNotFoundError):  # of what goes while it is looked at
                    self._warn(error.problem.message if isinstance(error, MoorageError) else str(error))
            await asyncio.sleep((loop.time() - began_s) * (1 / LOOK_PART - 1) if loop.time() < due_s else 0)

    @property
    def _is_by_moments(self) -> bool:
        return self._folder.gang and self._step is None

    async def _watch_moments(self) -> None:
        loop = asyncio.get_running_loop()
        before_s, missed = min(QUIET_BEFORE_S, self._folder.every_s * QUIET_BEFORE_PART), 0
        while True:
            due_s = self._next_due_s()
            passed_s = time.time() - self._folder.accepted_ms / 1000
            moment = round((passed_s + due_s - loop.time()) / self._folder.every_s)  # the same number for all ranks
            await asyncio.sleep(max(0.0, due_s - before_s - loop.time()))
            before = await self._marks()
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            try:
                is_quiet = loop.time() < due_s + before_s and before == await self._marks()
                missed = 0 if is_quiet else missed + 1
                if missed == MISSED_MAX:
                    self._warn(
                        f"it changed shortly before each of {missed} moments at which all ranks store: save less often,"
                        " or name steps and give checkpoint_step"
                    )
                if before and is_quiet:
                    await self._store_moment(moment, before)
            except (OSError, MoorageError) as error:
                self._asked_ns = None
                self._warn(error.problem.message if isinstance(error, MoorageError) else str(error))
            await asyncio.sleep(max(0.0, due_s + LOOK_S / 10 - loop.time()))  # the next moment is another one

    async def _marks(self) -> frozenset[object]:
        """Return what tells whether the folder has changed; nothing for none, or one that goes meanwhile."""
        with contextlib.suppress(OSError):
            return frozenset(
                each.mark for each in await asyncio.to_thread(look, self._folder.path, self._folder.checkpoint)
            )
        return frozenset()

    async def _store_moment(self, moment: int, was: frozenset[object]) -> None:
        """Store the folder as it was at a moment of the gang, unless it changes before it is read."""
        if not self._counts.is_set() or not (place := self._next_place()):
            self.tell_again()  # the leader may have lost what it knew
            return
        self._asked_ns = await asyncio.to_thread(self._asked)
        await self._store(place, self._files.pace, moment, was)
        await self._drop_earlier()

    def _answer(self, asked_ns: int | None) -> None:
        """Tell the job that what it asks to be stored is stored: nothing has changed."""
        if asked_ns is not None and (self._stored or self._brought is not None):
            self._asked_ns = asked_ns
            self.counts()

    def _next_place(self) -> str:
        """Return the place that does not hold the newest set; of a rank of a gang, one without a set that may count,
        "" for none."""
        if self._folder.gang:
            used = {kept.name for kept in self._stored if kept.digest not in self._free}
            return next((place for place in self._places[:-1] if place not in used), "")
        newest = self._stored[0].name if self._stored else ""
        return next(place for place in self._places if place != newest)

    def _next_due_s(self) -> float:
        """Return when the next set is due, on the loop's clock. For all ranks of a gang that is the same moment."""
        now_s, every_s = asyncio.get_running_loop().time(), self._folder.every_s
        if not self._folder.gang:
            return now_s + every_s
        return now_s + every_s - (time.time() - self._folder.accepted_ms / 1000) % every_s

    def _has_changed(self, seen: Sequence[Seen]) -> bool:
        last = self._last
        if last is None:
            return True
        is_old = time.time_ns() // 1_000_000 - last.oldest_ms > ANEW_S * 1000
        return is_old or last.signature != frozenset(each.mark for each in seen)

    @property
    def _last(self) -> Manifest | None:
        return self._stored[0].manifest if self._stored else self._brought

    async def _store(self, place: str, pace: Pace, step: Step, only: frozenset[object] | None = None) -> None:
        """Store a set, tell it, and remove what it leaves of the one that was in its place; else a sweep does."""
        if not await self._put(place, pace, step, only):
            self._asked_ns = None
            return
        newest, *before = self._stored
        self._stored = [newest, *(each for each in before if each.name != place)]
        self._told()
        for each in before:
            if each.name == place and not self._keeps_earlier:  # what an earlier attempt's set has may be in it
                await self._sets.forget_contents(each.manifest, self.live)

    async def _put(self, place: str, pace: Pace, step: Step, only: frozenset[object] | None = None) -> bool:
        folder = self._folder
        if folder.gang:
            seen = await asyncio.to_thread(look, folder.path, folder.checkpoint)
            if seen and step_of(seen, step) is None:
                raise NotKept(f"no name in {folder.checkpoint} has a step, by checkpoint_step, as a gang needs it")
        others = [each.manifest for each in self._stored[1:] if folder.gang and each.name != place]
        kept = await self._sets.put(place, folder.path, folder.checkpoint, self._last, pace, step, others, only)
        if kept is not None:
            self._stored.insert(0, kept)
            self._warned = ""
        return kept is not None

    async def _drop_earlier(self) -> None:
        """Remove what more than two sets of the replica leave of earlier attempts."""
        if self._earlier and not self._keeps_earlier:
            but = CHECKPOINTS_KEPT - len(self._stored)
            await self._files.drop_checkpoints(self._tenant, self._earlier, but, self.live)
            if not but:
                self._earlier = ()

    def _told(self) -> None:
        self._counts.clear()
        told = reversed(self._stored) if self._folder.gang else self._stored[:1]
        for each in told:
            if each.digest not in self._noted:
                self._tell(each.digest, each.manifest.step, "")

    def _warn(self, why: str) -> None:
        if why != self._warned:
            log.warning("the checkpoint of job %s was not stored while it runs: %s", self._name[1], why)
            self._warned = why
            self._tell(self.digest, None, why)

    @property
    def _now_file(self) -> str:
        return f"{self._folder.path}/{CHECKPOINT_NOW_FILE}"

    def _asked(self) -> int | None:
        """Return when the job has touched its file last; None without one."""
        try:
            return os.stat(self._now_file, follow_symlinks=False).st_mtime_ns
        except OSError:
            return None
