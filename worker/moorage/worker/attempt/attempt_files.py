"""Bring an attempt's files into its folder before its start, and store files of the folder after its end.

It serves every driver whose attempts have folders. The driver reports when an attempt starts and when nothing of it
runs any more.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from moorage.bus.checkpoint_manifest import Manifest
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.errors import CHECKPOINT_NOT_STORED, CHECKPOINT_REFUSED, MoorageError, Refused, problem, refuse
from moorage.schemas.frames import Rescue, Rescued, Values
from moorage.schemas.handler import checkpoint_object, kept_object, reported_object, rescued_object, result_object
from moorage.schemas.job import FilesOf, Run
from moorage.schemas.printable import carried
from moorage.schemas.ranges import numbers_in, parse_ranges
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.attempt.checkpoint_sets import NotKept
from moorage.worker.attempt.checkpoint_watch import CheckpointWatch, Folder
from moorage.worker.attempt.environment import LacksHere
from moorage.worker.attempt.job_files import Begun, FilesUnavailable, JobFiles
from moorage.worker.attempt.reports import has_reported, last_of, rows_in
from moorage.worker.session.attempt_messages import CheckpointStored

#: prefix of the `why`, and the code, of an attempt that ended well but whose files could not be stored
NOT_STORED: Final = "not-stored"
CODE_NOT_KEPT: Final = 1
#: how long storing an attempt's files may delay the report of its end
STORE_S_MAX: Final = 300.0
#: and how long storing what it reported may
REPORTS_S_MAX: Final = 5.0
#: how a program ends that has saved and is to go on: EX_TEMPFAIL of sysexits.h
TRY_AGAIN: Final = 75
#: attempts before one whose checkpoints are looked for
EARLIER_MAX: Final = 16
#: rescues of one driver under way at once, and those whose outcome nobody has asked for yet
RESCUES_MAX: Final = 2
OUTCOMES_MAX: Final = 64
#: what a pattern of `keep` reads in its own way
_MARKS: Final = re.compile(r"([\\*?\[\]! #])")

log = logging.getLogger("moorage.worker")


def brings(name: AttemptName, run: Run) -> bool:
    """Return whether an attempt's folder is to be filled before its start."""
    return run.files is not None or bool(run.files_of) or (run.checkpoint is not None and name[3] > 1)


class Before(NamedTuple):
    """What a placement says of the attempts before it: when the job was accepted, the digests of their checkpoints by
    attempt, "" for none, and up to which attempt others may have stored one all the same; None: any."""

    accepted_ms: int = 0
    checkpoints: Mapping[int, str] = {}
    untold: int | None = None
    gang: bool = False


class AttemptFiles:
    """The files of one driver's attempts. Without `files` none can be fetched or stored."""

    def __init__(
        self, folders: AttemptFolders, files: JobFiles | None, report: Callable[[CheckpointStored], None] | None = None
    ) -> None:
        """`report` gets what is to be told of checkpoints that are stored while their attempts run."""
        self._folders = folders
        self._files = files
        self._report = report
        self._brought: dict[AttemptName, Manifest] = {}  # the sets from which attempts begin that do not run yet
        self._watches: dict[AttemptName, CheckpointWatch] = {}
        self._storing: dict[AttemptName, asyncio.Task[None]] = {}
        #: by attempt of which no other follows: the objects with the checkpoints of its replica
        self._needless: dict[AttemptName, list[str]] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        #: the digests of the checkpoints of attempts that ended, "" for none, until they are told
        self._checkpoints: dict[AttemptName, str] = {}
        #: attempts whose checkpoint is not stored (yet), and why, "" if that is not known
        self._unstored: dict[AttemptName, str] = {}
        #: the newest values that ended attempts reported, until they are told
        self._reported: dict[AttemptName, Values] = {}
        self._kept: set[AttemptName] = set()  # those among them of which no more than the checkpoint is to be stored
        self._rescues: dict[tuple[AttemptName, str], asyncio.Task[None]] = {}  # with the path; an end is told once

    async def bring(self, name: AttemptName, run: Run, before: Before, ids: tuple[int, int] | None) -> None:
        """Unpack the job's files and its newest checkpoint into the attempt's folder, for the owner `ids`.

        Raises FilesUnavailable if this worker cannot have them now, FilesRefused if no worker can. With `ids` None the
        files belong to the agent's user.
        """
        if self._files is None:
            raise FilesUnavailable("this worker has no folders for jobs")
        tenant, job, replica, attempt, _ = name
        if run.files is not None:
            await self._files.bring(tenant, run.files, self._folders.path(name), ids)
        for each in run.files_of:
            await self._files.bring_kept(tenant, _places_of(each), each.accepted_ms, self._folders.path(name), ids)
        if run.checkpoint is not None and attempt > 1:
            if before.gang and before.untold is None:
                why = "a new leader does not know with which step the other ranks begin"
                raise LacksHere(f"{CHECKPOINT_REFUSED}: {why}")
            sought = _sought(job, replica, attempt, before)
            begun = await self._files.bring_checkpoint(tenant, sought, self._folders.path(name), run.checkpoint, ids)
            if before.gang and sought and not begun.name:
                lost = begun.refused or dict.fromkeys(sought, "is not there")
                told = "; ".join(f"that of attempt {_attempt_in(of)} {why}" for of, why in lost.items())
                raise LacksHere(f"{CHECKPOINT_REFUSED}: {told}; all ranks of a gang begin at one step")
            if begun.refused:
                self._folders.refused[name] = _said_of(begun)
            if begun.manifest is not None:
                self._brought[name] = begun.manifest

    def begun(self, names: Sequence[AttemptName]) -> dict[AttemptName, str]:
        """Return what to tell of the checkpoints of attempts that start; nothing of those from which they begin."""
        return {name: why for name in names if (why := self._folders.refused.pop(name, ""))}

    def watch(self, name: AttemptName) -> None:
        """Store an attempt's checkpoint while it runs, from now on, if it is to be."""
        if name not in self._watches and (watch := self._watch_of(name)) is not None:
            self._watches[name] = watch
            if self._folders.every_s(name):
                watch.begin()

    def sets_count(self, name: AttemptName, digests: Sequence[str], *, earlier: bool) -> None:
        """The ledger remembers these sets of a rank of a gang, and perhaps some of an `earlier` attempt."""
        if (watch := self._watches.get(name)) is not None:
            watch.sets_count(digests, earlier=earlier)

    def tell_sets(self) -> None:
        """Report the sets of all ranks of gangs again."""
        for watch in self._watches.values():
            watch.tell_again()

    def unwatch(self, name: AttemptName) -> None:
        """The attempt is over: nothing more of it is stored."""
        self._brought.pop(name, None)
        if (watch := self._watches.pop(name, None)) is not None:
            self._stop(watch.stop())

    def noted(self, names: Iterable[AttemptName]) -> None:
        """The ledger has what was reported of these attempts' checkpoints."""
        for name in names:
            if (watch := self._watches.get(name)) is not None:
                watch.counts()

    def _watch_of(self, name: AttemptName) -> CheckpointWatch | None:
        """Return the watch over an attempt's checkpoint; None if it is not stored while it runs."""
        _, job, replica, attempt, _ = name
        every_s, report = self._folders.every_s(name), self._report
        gang = self._folders.ranks(name) > 0
        if self._files is None or report is None or not (every_s or gang) or not self._folders.checkpoint(name):
            return None
        accepted_ms = self._folders.accepted_ms(name)
        of = Folder(
            self._folders.path(name),
            self._folders.checkpoint(name),
            accepted_ms,
            every_s,
            self._folders.step(name),
            gang,
        )  # fmt: skip
        earlier = _earlier(job, accepted_ms, replica, attempt)

        def tell(digest: str, step: int | None, why: str) -> None:
            report(CheckpointStored(name, digest, step, why))

        return CheckpointWatch(self._files, name, of, earlier, self._brought.pop(name, None), tell)

    def wants_store(self, name: AttemptName) -> bool:
        """Return whether something of this attempt's folder must be stored."""
        return bool(
            self._folders.keep(name) or self._folders.checkpoint(name) or has_reported(self._folders.path(name))
        )

    def hurry(self, name: AttemptName, grace_s: float) -> bool:
        """Stop the storing of an attempt's files in `grace_s` seconds; return False if no storing is under way."""
        storing = self._storing.get(name)
        if storing is not None:
            asyncio.get_running_loop().call_later(grace_s, storing.cancel)
        return storing is not None

    def store(self, name: AttemptName, code: int, why: str, is_asked: bool) -> Coroutine[Any, Any, tuple[int, str]]:
        """Begin to store the files of an ended attempt, and return a coroutine that waits for it.

        Its result is the attempt's code and reason. But if storing failed after an attempt that ended well (code 0),
        the result is `CODE_NOT_KEPT` and a reason that begins with `NOT_STORED`. If a checkpoint was not stored after
        any other end, the reason ends with `CHECKPOINT_NOT_STORED` and why. If the coroutine is cancelled, storing
        stops and nothing is reported. `is_asked` is set if the attempt was asked to end: then its grace also limits the
        storing.
        """
        if self._folders.checkpoint(name):
            if name not in self._watches and (watch := self._watch_of(name)) is not None:
                self._watches[name] = watch  # it ended without an agent
            self._checkpoints[name] = self._watches[name].digest if name in self._watches else ""
        seconds = min(STORE_S_MAX, self._folders.grace_s(name)) if is_asked else STORE_S_MAX
        by_itself = why == "exit" and code in (0, TRY_AGAIN)
        work = self._keep(name, is_good=(code, why) == (0, "exit"), by_itself=by_itself)
        self._storing[name] = asyncio.get_running_loop().create_task(work)
        return self._stored(name, code, why, seconds)

    def told(self, name: AttemptName) -> dict[AttemptName, str]:
        """Return the digest of the checkpoint that an ended attempt has stored, "" for none; {} if nothing is known."""
        digest = self._checkpoints.pop(name, None)
        return {} if digest is None else {name: digest}

    def reported(self, name: AttemptName) -> dict[AttemptName, Values]:
        """Return the newest values that an ended attempt reported; {} if it reported none."""
        values = self._reported.pop(name, None)
        return {} if values is None else {name: values}

    async def _keep(self, name: AttemptName, *, is_good: bool, by_itself: bool) -> None:
        """Store the files to keep, and a checkpoint if another attempt may follow.

        What is stored first is what matters more: after a bad end the checkpoint.
        """
        tenant, job, replica, attempt, fence = name
        folder, keep = self._folders.path(name), self._folders.keep(name)
        await self._keep_reports(name)
        if self._files is None:
            if not keep and not self._folders.checkpoint(name):
                return
            raise FilesUnavailable("this worker stores no files")
        if not is_good:
            await self._keep_checkpoint(self._files, name, by_itself=by_itself)
        if keep:
            also = kept_object(job, replica) if is_good else ""
            try:
                own, accepted_ms = result_object(job, replica, fence), self._folders.accepted_ms(name)
                await self._files.keep(tenant, own, folder, keep, also, accepted_ms)
            except NotKept:  # then the attempt counts as failed
                if is_good:
                    await self._keep_checkpoint(self._files, name, by_itself=by_itself)
                raise
        self._kept.add(name)
        if is_good and self._folders.goes_on(name):
            await self._keep_checkpoint(self._files, name, by_itself=by_itself)
        elif is_good and self._folders.checkpoint(name) and not self._folders.ranks(name):
            until = attempt + (name in self._watches)  # its own, too
            self._needless[name] = _earlier(job, self._folders.accepted_ms(name), replica, until)
        elif is_good and (ranks := self._folders.ranks(name)) and self._folders.checkpoint(name):
            own = checkpoint_object(job, self._folders.accepted_ms(name), replica, attempt)
            await self._files.say_over(tenant, own, ranks)

    async def _keep_reports(self, name: AttemptName) -> None:
        """Store what the attempt reported of itself: its newest values, for its end, and its last rows."""
        tenant, job, replica, _, fence = name
        folder = self._folders.path(name)
        if not has_reported(folder):
            return
        if values := (await asyncio.to_thread(last_of, folder)).values:
            self._reported[name] = values
        rows = await asyncio.to_thread(rows_in, folder)
        if rows and self._files is not None:
            try:
                async with asyncio.timeout(REPORTS_S_MAX):
                    await self._files.keep_rows(tenant, reported_object(job, replica, fence), rows)
            except (MoorageError, TimeoutError) as error:  # they are no result: the attempt ends as it did
                log.warning("what job %s reported is not stored: %s", job, error)

    async def _keep_checkpoint(self, files: JobFiles, name: AttemptName, *, by_itself: bool) -> None:
        tenant, job, replica, attempt, _ = name
        checkpoint, accepted_ms = self._folders.checkpoint(name), self._folders.accepted_ms(name)
        if not checkpoint:
            return
        own = checkpoint_object(job, accepted_ms, replica, attempt)
        earlier = _earlier(job, accepted_ms, replica, attempt)
        self._unstored[name] = ""
        watch, live = self._watches.get(name), list[Manifest]()
        try:
            if self._folders.ranks(name):
                if watch is None:
                    raise NotKept("this worker stores no sets")
                self._checkpoints[name] = await watch.end(by_itself=by_itself)
                del self._unstored[name]
                return
            if watch is not None:
                if digest := await _end(watch):
                    self._checkpoints[name] = digest
                    del self._unstored[name]
                    return
                self._checkpoints[name], live = watch.digest, watch.live
            digest = await files.keep_checkpoint(tenant, own, earlier, self._folders.path(name), checkpoint, live)
            self._checkpoints[name] = digest or self._checkpoints[name]
            if not self._checkpoints[name]:
                raise NotKept(f"there is no {checkpoint}, or nothing in it")
        except NotKept as error:  # the next attempt begins at an earlier one
            log.warning("the checkpoint of job %s was not stored: %s", job, error.problem.message)
            self._unstored[name] = error.problem.message
        else:
            del self._unstored[name]

    async def _stored(self, name: AttemptName, code: int, why: str, seconds: float) -> tuple[int, str]:
        storing, trouble = self._storing[name], ""
        try:
            await asyncio.wait((storing,), timeout=seconds)
            if not storing.done():
                trouble = f"files: not stored within {seconds:g} s"
            elif storing.cancelled():
                trouble = "files: the attempt had to end"
            elif (error := storing.exception()) is not None:
                trouble = error.problem.message if isinstance(error, MoorageError) else "files: moorage failed on them"
                if not isinstance(error, MoorageError):
                    log.error("the files that job %s keeps could not be stored", name[1], exc_info=error)
        finally:
            del self._storing[name]
            storing.cancel()
            await asyncio.wait((storing,))
            is_kept = name in self._kept
            self._kept.discard(name)
            unstored = self._unstored.pop(name, None)
        behind = "" if unstored is None else f"; {CHECKPOINT_NOT_STORED}: {unstored or trouble}"
        if trouble and not is_kept and (code, why) == (0, "exit"):
            return CODE_NOT_KEPT, carried(f"{NOT_STORED}: {trouble}{behind}")
        if trouble:
            log.warning("the files that job %s keeps were not stored: %s", name[1], trouble)
        return code, why if (code, why) == (0, "exit") else carried(f"{why}{behind}")

    def forget(self, names: Sequence[AttemptName]) -> None:
        """Remove the checkpoints of those replicas whose ends are in the ledger, and which have succeeded."""
        for name in names:
            needless = self._needless.pop(name, None)
            if needless and self._files is not None:
                self._stop(self._files.drop_checkpoints(name[0], needless))

    async def rescue(self, ask: Rescue) -> Rescued:
        """Store what an ended attempt left, all of it or what is at a path, unless it is stored or being stored.

        Raises Refused: the folder is gone (not-kept), or storing it failed. It is the asker's to ask again until it
        hears `stored`.
        """
        name = name_in(ask)
        own = Rescued(ask.attempt, rescued_object(ask.job, ask.replica, ask.fence, ask.path))
        await self._folders.emptied()  # before the look at what is stored already: another one may ask meanwhile
        storing = self._rescues.get((name, ask.path))
        if storing is None:
            self._begin_rescue(name, ask)
        elif storing.done():
            del self._rescues[name, ask.path]
            storing.result()
            return msgspec.structs.replace(own, stored=True)
        return own

    def _begin_rescue(self, name: AttemptName, ask: Rescue) -> None:
        if self._files is None:
            raise refuse("not-kept", "this worker stores no files", job=ask.job)
        busy = [of for (of, _), each in self._rescues.items() if not each.done()]
        if len(busy) >= RESCUES_MAX or name in busy:
            raise Refused(problem("overloaded", "other files are being stored", retry_after_s=1.0))
        folder = self._folders.read(name)
        if folder is None:
            raise refuse(
                "not-kept",
                f"attempt {ask.attempt} of replica {ask.replica} has left nothing here, or it is gone",
                found=f"folder_keep {self._folders.bounds.keep_s:g} s",
                job=ask.job,
                next="submit it with --keep 'out/**'",
            )
        pattern = "/" + _MARKS.sub(r"\\\1", ask.path.strip("/")) if ask.path.strip("/") else "**"
        over = [key for key, each in self._rescues.items() if each.done()]
        for key in over[: max(len(self._rescues) - OUTCOMES_MAX, 0)]:
            del self._rescues[key]
        into = rescued_object(ask.job, ask.replica, ask.fence, ask.path)
        work = self._files.keep(name[0], into, folder, [pattern])
        self._rescues[name, ask.path] = task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda done: self._rescued(name, done))

    def _rescued(self, name: AttemptName, done: asyncio.Task[None]) -> None:
        self._folders.read_whole(name)
        if not done.cancelled():
            done.exception()  # so that one that nobody asks about is not logged as unseen

    def _stop(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def settled(self) -> None:
        """Wait until the checkpoints that are being removed are gone."""
        await asyncio.gather(*self._dropping)

    async def close(self) -> None:
        """Stop all storing; the next agent begins it again, a rescue when it is asked for it."""
        for watch in self._watches.values():
            await watch.stop()
        for rescuing in list(self._rescues.values()):
            rescuing.cancel()
            await asyncio.wait((rescuing,))
        for dropping in list(self._dropping):
            dropping.cancel()
            await asyncio.wait((dropping,))
        for storing in list(self._storing.values()):
            storing.cancel()
            await asyncio.wait((storing,))


async def _end(watch: CheckpointWatch) -> str:
    """Store an attempt's set a last time; return its digest, "" if it has none or this one could not be stored."""
    try:
        return await watch.end()
    except NotKept as error:
        log.warning("a checkpoint is stored whole at its end, not as a set: %s", error.problem.message)
        return ""


def _places_of(files: FilesOf) -> dict[str, str]:
    """Return the objects with a job's kept files, and the folder of each below that of the attempt."""
    if files.replicas is None:
        return {kept_object(files.job, 0): files.job}
    numbers = numbers_in(parse_ranges(files.replicas))
    return {kept_object(files.job, number): f"{files.job}/{number}" for number in numbers}


def _sought(job: str, replica: int, attempt: int, before: Before) -> dict[str, str | None]:
    """Return the objects with the checkpoints of the attempts before this one, the newest first, with the digest that
    each must have; None for one of which no worker told."""
    found: dict[str, str | None] = {}
    if before.gang:
        return {checkpoint_object(job, before.accepted_ms, replica, no): it for no, it in before.checkpoints.items()}
    for each in range(attempt - 1, max(0, attempt - 1 - EARLIER_MAX), -1):
        digest = before.checkpoints.get(each)
        if digest or (digest is None and (before.untold is None or each <= before.untold)):
            found[checkpoint_object(job, before.accepted_ms, replica, each)] = digest
    return found


def _said_of(begun: Begun) -> str:
    said = "; ".join(f"that of attempt {_attempt_in(name)} {why}" for name, why in begun.refused.items())
    begins = f"from that of attempt {_attempt_in(begun.name)}" if begun.name else "without a checkpoint"
    return f"{CHECKPOINT_REFUSED}: {said}; it began {begins}"


def _attempt_in(checkpoint: str) -> str:
    return checkpoint.rpartition(".")[2]


def _earlier(job: str, accepted_ms: int, replica: int, attempt: int) -> list[str]:
    """Return the objects with the checkpoints of the attempts before this one, the newest first."""
    attempts = range(attempt - 1, max(0, attempt - 1 - EARLIER_MAX), -1)
    return [checkpoint_object(job, accepted_ms, replica, each) for each in attempts]
