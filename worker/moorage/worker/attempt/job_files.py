"""Bring files to jobs: fetch them from the tenant's bucket once per worker, and unpack them for each attempt.

Fetched files are checked against their name, the SHA-256 of the tar file. The tar file is kept in a folder that only
the agent reads, up to a limit: replicas of one job, and the next job with the same files, read it from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, NamedTuple

import msgspec

from moorage.bus.checkpoint_manifest import SET_HEADER, Manifest
from moorage.bus.errors import BusError, PermissionRefused, StreamGap
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import ObjectInfo, ObjectStore, checkpoints_store, files_store, schedules_store
from moorage.schemas.errors import Refused, problem
from moorage.schemas.frames import Values
from moorage.schemas.handler import ACCEPTED_HEADER, RANKS_HEADER, is_earlier, over_object, set_objects
from moorage.schemas.job import KEEP_STARS_MAX, is_quick, kept_pattern
from moorage.schemas.roles import RIGHTS_ANEW
from moorage.schemas.subjects import Subjects
from moorage.system.archive_parts import LIST_BYTES_MAX, PARTS_HEADER, PARTS_MAX, Part, decode_parts, part_object
from moorage.system.archives import (
    LEFT_OUT,
    MEMBERS_MAX,
    PATH_BYTES_MAX,
    BadArchive,
    Inflating,
    compressed,
    empty,
    link_stays_below,
    unpack,
)
from moorage.system.device_environment import HostAtFault
from moorage.system.disk_room import spare_bytes
from moorage.worker.attempt.checkpoint_sets import KeptSet, NotKept, Pace, SetsStore, clear, form_of
from moorage.worker.settings import CHECKPOINT_BYTES_DEFAULT, CHECKPOINT_RATE_DEFAULT

#: below the state folder
CACHE: Final = "files"
#: how long the files of one job may take to arrive
FETCH_S_MAX: Final = 600.0
#: most files and folders of an attempt's folder that are searched for files to store
ENTRIES_MAX: Final = 1_000_000
#: most entries that are named as left out, and characters of each name
NAMED_MAX: Final = 8
NAME_CHARS_MAX: Final = 200
#: checkpoints of one replica that stay
CHECKPOINTS_KEPT: Final = 2
_COPY_BYTES: Final = 1 << 20
#: header of a checkpoint: bytes of its tar file
_TAR_BYTES: Final = "Moorage-Tar-Bytes"
#: suffix of files that are being fetched, or whose fetch was given up
_PART: Final = ".part"
#: and of the list of parts beside an archive that was fetched in parts
_PARTS: Final = ".parts"

log = logging.getLogger("moorage.worker")


class FilesRefused(Refused):
    """No worker can give the job its files: they are not in the bucket, or are invalid."""

    def __init__(self, why: str) -> None:
        super().__init__(problem("failed-precondition", f"files: {why}"))


class FilesUnavailable(HostAtFault):
    """This worker cannot have the files now."""

    def __init__(self, why: str) -> None:
        super().__init__(f"files: {why}")


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise FilesRefused or FilesUnavailable in place of what the block raises about a bucket, archive or disk."""
    try:
        yield
    except BadArchive as error:
        raise FilesRefused(str(error)) from None
    except TimeoutError:
        raise FilesUnavailable(f"not fetched within {FETCH_S_MAX:g} s") from None
    except OSError as error:
        raise FilesUnavailable(error.strerror or str(error)) from None
    except BusError as error:
        raise FilesUnavailable(error.problem.message) from None


class LeftOut:
    """What matched the patterns of a job and was not stored: how much, and the first names with the reason of each; and
    the patterns that matched nothing."""

    def __init__(self) -> None:
        self.count = 0
        self.unmatched: list[str] = []
        self._named: list[tuple[str, str]] = []

    def __str__(self) -> str:
        more = f" and {self.count - len(self._named)} more" if self.count > len(self._named) else ""
        return ", ".join(f"{name!r} ({why})" for name, why in self._named) + more

    def add(self, name: str, why: str) -> None:
        self.count += 1
        if len(self._named) < NAMED_MAX:
            self._named.append((os.fsencode(name).decode(errors="replace")[-NAME_CHARS_MAX:], why))

    @property
    def header(self) -> str:
        """The value of the header LEFT_OUT, as JSON in ASCII: a name may have any bytes."""
        unmatched = [pattern[:NAME_CHARS_MAX] for pattern in self.unmatched[:NAMED_MAX]]
        return json.dumps({"count": self.count, "names": self._named, "unmatched": unmatched})


class Bucket(NamedTuple):
    """A bucket of the object store, and the setting that bounds an object in it."""

    store: ObjectStore
    bytes_max: int
    setting: str


class Begun(NamedTuple):
    """The object with the checkpoint from which an attempt begins, "" for none; and those before it that were not used,
    with what is wrong with each. `manifest` is its own, if it is a set."""

    name: str
    refused: Mapping[str, str]
    manifest: Manifest | None = None


class JobFiles:
    """The files of one worker's jobs.

    `bytes_max` limits the files of one job, `cache_bytes` the tar files that are kept, `checkpoint_bytes` a checkpoint.
    While jobs run, their checkpoints are read at `checkpoint_rate` bytes per second, all together.
    """

    def __init__(
        self,
        jetstream: JetStream,
        prefix: str,
        state: Path,
        bytes_max: int,
        cache_bytes: int,
        checkpoint_bytes: int = CHECKPOINT_BYTES_DEFAULT,
        checkpoint_rate: int = CHECKPOINT_RATE_DEFAULT,
    ) -> None:
        self._jetstream = jetstream
        self._subjects = Subjects(prefix)
        self._folder = state / CACHE
        self.bytes_max = bytes_max
        self._cache_bytes = cache_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self.pace = Pace(checkpoint_rate)
        self._fetching: dict[Path, asyncio.Task[None]] = {}

    def open(self) -> None:
        """Make the folder for fetched files, and remove incomplete files of an earlier agent. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._folder.glob(f"*{_PART}"):
            left.unlink()

    async def bring(self, tenant: str, address: str, into: str, ids: tuple[int, int] | None) -> None:
        """Unpack the files at this address into the folder `into`, which no other process may write to.

        They get the owner `ids` (None: the agent's user). Raises FilesRefused if no worker can have them, and
        FilesUnavailable if this worker cannot have them now.
        """
        kept = self._kept(tenant, address)
        with translated():
            is_old = kept.exists()
            try:
                await self._bring(tenant, address, into, ids)
            except BadArchive:
                if not is_old:
                    raise
                kept.unlink(missing_ok=True)  # this disk may have damaged it
                await asyncio.to_thread(empty, into)
                await self._bring(tenant, address, into, ids)

    async def _bring(self, tenant: str, address: str, into: str, ids: tuple[int, int] | None) -> None:
        with await self.opened(tenant, address) as source:
            await asyncio.to_thread(unpack, source, into, self.bytes_max, ids)

    def _kept(self, tenant: str, address: str) -> Path:
        return self._folder / f"{tenant}.{address}"  # by tenant: knowing an address must not give access to the files

    async def opened(self, tenant: str, address: str) -> BinaryIO:
        """Return the tar file at this address, fetched if it is not here. Raises what `translated` translates."""
        kept = self._kept(tenant, address)
        with contextlib.suppress(FileNotFoundError):
            os.utime(kept)
            return kept.open("rb")
        fetching = self._fetching.get(kept)
        if fetching is None:
            fetching = self._fetching[kept] = asyncio.create_task(self._fetch(kept, tenant, address))
            fetching.add_done_callback(lambda task: self._fetched(kept, task))
        await asyncio.shield(fetching)  # shielded: if this attempt ends, other attempts still wait for the files
        return kept.open("rb")

    async def bring_checkpoint(
        self, tenant: str, sought: Mapping[str, str | None], into: str, folder: str, ids: tuple[int, int] | None
    ) -> Begun:
        """Unpack the first of these objects that is complete and sound, in place of what is at `into/folder`; of one
        attempt's, the newest.

        One with another digest than its own here (None: any) is not what its attempt has stored, and is left alone.

        Return which it was. None at all is no error, nor one that this worker has no right to. Raises FilesUnavailable
        if it cannot be had here now, or is too large for this worker.
        """
        store, refused = self._checkpoints(tenant), dict[str, str]()
        with translated():
            for name, digest in sought.items():
                try:
                    found = await self._found(store, name)
                except PermissionRefused as error:  # the rights are of a release that had no such bucket
                    log.warning("no checkpoint can be read: %s; %s", error.problem.message, RIGHTS_ANEW)
                    break
                right = [each for each in found if digest is None or each[1].digest == digest]
                if found and not right:
                    refused[name] = "is not the one that its attempt has stored"
                    log.warning("the checkpoint %s %s: it is not used", name, refused[name])
                for of, info in right:
                    try:
                        manifest = await self._unpack_checkpoint(store, of, info, into, folder, ids)
                        return Begun(name, refused, manifest)
                    except (BadArchive, StreamGap) as error:
                        refused[name] = "is damaged"
                        log.warning("the checkpoint %s cannot be used: %s", of, error)
        return Begun("", refused)

    @staticmethod
    async def _found(store: ObjectStore, name: str) -> list[tuple[str, ObjectInfo]]:
        """Return the objects with checkpoints of one attempt, the newest first. Raises BusError."""
        found = [(each, info) for each in (name, *set_objects(name)) if (info := await store.find(each)) is not None]
        return sorted(found, key=lambda each: -each[1].seq)

    async def _unpack_checkpoint(
        self, store: ObjectStore, name: str, info: ObjectInfo, into: str, folder: str, ids: tuple[int, int] | None
    ) -> Manifest | None:
        most, sets = self._checkpoint_bytes, self.sets(store)
        if SET_HEADER in info.headers:
            if (kept := await sets.read(name, info)) is None:
                raise BadArchive("its manifest cannot be read")
            if (size := sum(entry.size for entry in kept.manifest.entries)) > most:
                raise FilesUnavailable(f"the checkpoint takes {size} bytes, checkpoint_bytes here is {most}")
            await sets.restore(kept, into, folder, most, ids)
            return kept.manifest
        if (size := _tar_bytes(info)) > most:  # the worker that stored it takes more, or took more
            raise FilesUnavailable(f"the checkpoint takes {size} bytes, checkpoint_bytes here is {most}")
        with tempfile.TemporaryFile(dir=self._folder) as spool:
            await _inflated(store, info, spool, most)
            await asyncio.to_thread(clear, into, folder)
            await asyncio.to_thread(unpack, spool, into, most, ids, folder)
        return None

    def sets(self, of: ObjectStore | str) -> SetsStore:
        """Return the sets in a bucket of checkpoints, or in that of a tenant."""
        store = self._checkpoints(of) if isinstance(of, str) else of
        return SetsStore(store, self._checkpoint_bytes)

    async def bring_kept(
        self, tenant: str, places: Mapping[str, str], accepted_ms: int, into: str, ids: tuple[int, int] | None
    ) -> None:
        """Unpack those of these objects that there are, each into its folder below `into`.

        Those of a job that was accepted before `accepted_ms` count as not there.

        Raises FilesRefused if there is none of them, and FilesUnavailable if they cannot be had here now, all together
        within `FETCH_S_MAX`.
        """
        store, left, found = files_store(self._jetstream, self._subjects, tenant), self.bytes_max, 0
        until_s = asyncio.get_running_loop().time() + FETCH_S_MAX
        with translated():
            for name, folder in places.items():
                async with asyncio.timeout_at(until_s):
                    info = await store.find(name)
                if info is None or is_earlier(info.headers, accepted_ms):
                    continue
                with tempfile.TemporaryFile(dir=self._folder) as spool:
                    left, found = left - await _inflated(store, info, spool, left, until_s), found + 1
                    await asyncio.to_thread(_make_folders, into, folder, ids)
                    await asyncio.to_thread(unpack, spool, os.path.join(into, folder), self.bytes_max, ids)
        if not found:
            raise FilesRefused(f"files-gone: no kept files of job {next(iter(places.values())).partition('/')[0]}")

    async def keep_checkpoint(
        self,
        tenant: str,
        name: str,
        earlier: Sequence[str],
        folder: str,
        checkpoint: str,
        live: Sequence[Manifest] = (),
    ) -> str:
        """Store the checkpoint of a folder as an object, and remove all but the newest of the `earlier` ones, but for
        what the `live` sets have of them.

        Return its digest, "" if there was nothing to store. An empty one is not stored, nor one of which something
        would be missing: the next attempt begins at the newest whole one. Raises NotKept. No process may write to the
        folder any more.
        """
        try:
            form = form_of(folder, checkpoint)
            if form is None or (not form.file and not os.listdir(os.path.join(folder, form.folder))):
                return ""
        except OSError as error:
            raise NotKept(error.strerror or str(error)) from None
        store, most = self._checkpoints(tenant), self._checkpoint_bytes
        if form.file or form.link:  # a set says what it is
            kept = await self.sets(store).put(name, folder, checkpoint, None, Pace(0), None)
            digest = "" if kept is None else kept.digest
        else:
            kept_in = Bucket(store, most, "checkpoint_bytes")
            digest = await self._keep(kept_in, name, folder, [f"/{checkpoint}/**"], whole=True)
        await self.drop_checkpoints(tenant, earlier, CHECKPOINTS_KEPT - 1, live)
        return digest

    async def drop_checkpoints(
        self, tenant: str, names: Sequence[str], but: int = 0, live: Sequence[Manifest] = ()
    ) -> None:
        """Remove those of these attempts' checkpoints that there are, `but` the newest so many of them. Raises nothing.

        Contents that the `live` sets have stay.
        """
        store = self._checkpoints(tenant)
        sets, kept, doomed = self.sets(store), list[Manifest](), list[KeptSet]()
        try:
            for name in names:
                for each, info in await self._found(store, name):
                    but -= 1
                    of = await sets.read(each, info)
                    if but >= 0:
                        kept += [] if of is None else [of.manifest]
                    elif of is None:
                        await store.forget(store.subject(info.nuid))
                    else:
                        doomed.append(of)
            for of in doomed:
                await sets.drop(of, (*kept, *live))
        except BusError as error:
            log.warning("checkpoints such as %s stay until the bucket drops them: %s", names[0], error)

    def bucket(self, tenant: str) -> Bucket:
        """Return the bucket for the files that a tenant's jobs keep."""
        return Bucket(files_store(self._jetstream, self._subjects, tenant), self.bytes_max, "files_bytes")

    def _checkpoints(self, tenant: str) -> ObjectStore:
        return checkpoints_store(self._jetstream, self._subjects, tenant)

    async def keep(
        self,
        tenant: str,
        name: str,
        folder: str,
        patterns: Sequence[str],
        also: str = "",
        accepted_ms: int = 0,
    ) -> None:
        """Store the files, links and empty folders of a folder that match the patterns as an object of the tenant's
        bucket; `also` is another name of it, `accepted_ms` is when its job was accepted.

        A header of the object names what matches and cannot be stored, and the patterns that matched nothing. Raises
        NotKept. No process may write to the folder any more.
        """
        await self._keep(self.bucket(tenant), name, folder, patterns, also, accepted_ms)

    async def say_over(self, tenant: str, checkpoint: str, ranks: int) -> None:
        """Store that a rank has ended well, of a gang of so many: the sets of all go once all have. Raises nothing."""
        store, headers = self._checkpoints(tenant), {RANKS_HEADER: str(ranks)}
        try:
            await store.put(over_object(checkpoint), [b"1"], headers, lambda _: None)
        except BusError as error:
            log.warning("the checkpoints of a gang stay until the bucket drops them: %s", error)

    async def keep_rows(self, tenant: str, name: str, rows: Sequence[Values]) -> None:
        """Store what an attempt reported of itself as an object of the tenant's bucket. Raises BusError."""
        await self.bucket(tenant).store.put(name, [msgspec.json.encode(rows)], {}, lambda _: None)

    async def _keep(
        self,
        bucket: Bucket,
        name: str,
        folder: str,
        patterns: Sequence[str],
        also: str = "",
        accepted_ms: int = 0,
        *,
        whole: bool = False,
    ) -> str:
        """Do the same as `keep`, in this bucket, and return the digest of what is stored, "" if nothing is.

        With `whole` nothing is stored if something would be missing.
        """
        left_out = LeftOut()
        try:
            if spare_bytes(self._folder) <= 0:
                raise NotKept("the disk of the worker is nearly full")
            with tempfile.TemporaryFile(dir=self._folder) as spool:
                stopped = threading.Event()
                try:
                    count = await asyncio.to_thread(self._pack, spool, folder, patterns, stopped, left_out, bucket)
                finally:
                    stopped.set()
                if (size := spool.seek(0, os.SEEK_END)) > bucket.bytes_max:
                    raise NotKept(f"more than {bucket.bytes_max} bytes as a tar file ({bucket.setting})")
                if whole and (left_out.count or not count):
                    raise NotKept(f"it would be stored without {left_out}" if left_out.count else "there are none")
                headers = {
                    "Content-Type": "application/gzip", ACCEPTED_HEADER: str(accepted_ms), _TAR_BYTES: str(size)
                }  # fmt: skip
                if left_out.count:
                    log.warning("the files that %s keeps are stored without %s", name, left_out)
                if left_out.count or left_out.unmatched:
                    headers[LEFT_OUT] = left_out.header
                if whole:
                    await _fits(bucket.store, spool, size)
                empty_alone = not count and not left_out.count
                digest = await bucket.store.put(name, compressed(spool), headers, lambda _: None, also)
                if whole and await bucket.store.find(name) is None:
                    raise NotKept("the bucket dropped a part of them as they were stored: it is too small")
                return digest
        except OSError as error:
            raise NotKept(error.strerror or str(error)) from None
        except RecursionError:
            raise NotKept("the folders are nested too deeply to be packed") from None
        except BusError as error:
            if not empty_alone:  # else nothing is lost but the word that nothing matched
                remedy = f"; {RIGHTS_ANEW}" if isinstance(error, PermissionRefused) else ""
                raise NotKept(f"{error.problem.message}{remedy}") from None
        return ""

    def _pack(
        self,
        into: BinaryIO,
        folder: str,
        patterns: Sequence[str],
        stopped: threading.Event,
        left_out: LeftOut,
        bucket: Bucket,
    ) -> int:
        """Write a tar file of what matches, until `stopped`; return how many members it has. Raises NotKept, OSError.

        The agent can read files that the job cannot. So links are not followed, and only files of the folder's owner
        are read. A link is stored as a link, if it names something below the folder.
        """
        import pathspec

        slow = next((pattern for pattern in patterns if not is_quick(pattern)), None)
        if slow is not None:  # a match holds the interpreter lock, and so blocks the whole agent
            raise NotKept(
                f"keep: {slow[:80]!r} has too many stars: a part of a path may have at most two, and at most"
                f" {KEEP_STARS_MAX} parts may have two"
            )
        try:
            kept = pathspec.GitIgnoreSpec.from_lines(map(kept_pattern, patterns))
        except (ValueError, re.error) as error:
            raise NotKept(f"keep: {error}") from None
        owner, seen, count, size = os.stat(folder).st_uid, 0, 0, 0
        unmatched = {
            text: rule for text, rule in zip(patterns, kept.patterns, strict=True) if rule.include is not False
        }
        with tarfile.open(fileobj=into, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for above, folders, files, place in os.fwalk(folder, follow_symlinks=False):
                if len(os.fsencode(above)) - len(os.fsencode(folder)) > PATH_BYTES_MAX:
                    raise NotKept("the path of a folder is longer than Linux allows in one call (4096 bytes)")
                folders.sort()
                seen += len(folders) + len(files)
                if seen > ENTRIES_MAX:
                    raise NotKept(f"more than {ENTRIES_MAX} files and folders to look at")
                for entry in sorted((*files, *folders)):
                    if stopped.is_set():
                        raise NotKept("given up")
                    name = os.path.relpath(os.path.join(above, entry), folder)
                    if len(os.fsencode(name)) > PATH_BYTES_MAX:
                        raise NotKept("the path of a file is longer than Linux allows in one call (4096 bytes)")
                    about = os.stat(entry, dir_fd=place, follow_symlinks=False)
                    is_folder = stat.S_ISDIR(about.st_mode)
                    path = f"{name}/" if is_folder else name
                    for text in [text for text, rule in unmatched.items() if rule.include and rule.match_file(path)]:
                        del unmatched[text]
                    if not kept.match_file(path):
                        continue
                    if is_folder and _has_entries(entry, place):
                        continue  # the folders of a file are made with it
                    why = _why_not(name, about, owner, entry, place)
                    if why:
                        left_out.add(name, why)
                        continue
                    count, size = count + 1, size + (about.st_size if stat.S_ISREG(about.st_mode) else 0)
                    if count > MEMBERS_MAX or size > bucket.bytes_max:
                        most = f"{MEMBERS_MAX} files or {bucket.bytes_max} bytes ({bucket.setting})"
                        raise NotKept(f"more than {most}")
                    _add(archive, name, entry, place, owner)
        left_out.unmatched = [*unmatched]
        return count

    def _fetched(self, kept: Path, task: asyncio.Task[None]) -> None:
        del self._fetching[kept]
        if not task.cancelled():
            task.exception()  # retrieved, in case the attempts that waited for it are over

    async def _fetch(self, kept: Path, tenant: str, address: str) -> None:
        store = files_store(self._jetstream, self._subjects, tenant)
        info = await store.find(address)
        if info is None:
            store = schedules_store(self._jetstream, self._subjects, tenant)
            with contextlib.suppress(
                PermissionRefused
            ):  # rights of a release that had no such bucket: nothing is there
                info = await store.find(address)
        if info is None:
            raise FilesRefused("they are not, or no longer, in the tenant's bucket: submit the job again with them")
        part = kept.with_name(kept.name + _PART)
        try:
            with open(part, "w+b", opener=_private) as into:  # noqa: ASYNC230 - on the disk of the state folder
                async with asyncio.timeout(FETCH_S_MAX):
                    if PARTS_HEADER in info.headers:
                        found, parts = await self._join(tenant, store, info, into)
                    else:
                        found, parts = await self._inflate(store, info, into), b""
                into.flush()
                await asyncio.to_thread(os.fsync, into.fileno())  # a kept file is not checked again
            if found != address:
                raise BadArchive("their content does not match their address")
            await asyncio.to_thread(self._make_room, part.stat().st_size)
            if parts:
                kept.with_name(kept.name + _PARTS).write_bytes(parts)
            part.rename(kept)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    async def _inflate(self, store: ObjectStore, info: ObjectInfo, into: BinaryIO) -> str:
        inflating = Inflating(into, self.bytes_max)
        async for piece in store.get(info):
            await asyncio.to_thread(inflating.feed, piece)
        return inflating.address()

    async def _join(self, tenant: str, store: ObjectStore, info: ObjectInfo, into: BinaryIO) -> tuple[str, bytes]:
        """Write the parts of an archive into a file. Return the SHA-256 of all, and the list of the parts.

        A part that another archive here has is taken from there. Raises BadArchive, BusError, FilesRefused, OSError.
        """
        if info.size > LIST_BYTES_MAX:
            raise BadArchive("the list of their parts is too long")
        listed = b"".join([piece async for piece in store.get(info)])
        try:
            parts = decode_parts(listed)
        except msgspec.DecodeError as error:
            raise BadArchive(f"the list of their parts cannot be read: {error}") from None
        if len(parts) > PARTS_MAX or sum(part.size for part in parts) > self.bytes_max:
            raise BadArchive(f"they take more than {self.bytes_max} bytes, or have more than {PARTS_MAX} parts")
        whole, known = hashlib.sha256(), await asyncio.to_thread(self._known_parts, tenant)
        for part in parts:
            at = into.tell()
            if part not in known or not await asyncio.to_thread(_copied, part, *known[part], into):
                into.seek(at)
                into.truncate()
                found = await store.find(part_object(part.digest))
                if found is None:
                    raise FilesRefused(
                        "a part of them is not, or no longer, in the tenant's bucket: submit the job again"
                    )
                if await self._inflate(store, found, into) != part.digest or into.tell() - at != part.size:
                    raise BadArchive("a part of them has other content than its name says")
            known[part] = Path(into.name), at
            await asyncio.to_thread(_hash, whole, into, at)
        return whole.hexdigest(), listed

    def _known_parts(self, tenant: str) -> dict[Part, tuple[Path, int]]:
        """Return the parts of a tenant's archives here: each with one that has it, and where it begins there."""
        found: dict[Part, tuple[Path, int]] = {}
        for path in self._folder.glob(f"{tenant}.{'?' * 64}{_PARTS}"):
            archive, at = path.with_name(path.name.removesuffix(_PARTS)), 0
            with contextlib.suppress(OSError, msgspec.DecodeError):
                for part in decode_parts(path.read_bytes()):
                    found[part] = archive, at
                    at += part.size
        return found

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until `size` more fits; an open file stays readable."""
        found: list[tuple[os.stat_result, Path]] = []
        for path in self._folder.iterdir():
            if not path.name.endswith((_PART, _PARTS)):
                with contextlib.suppress(FileNotFoundError):  # another fetch makes room, too
                    found.append((path.stat(), path))
        left = size + sum(about.st_size for about, _ in found)
        for about, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if left <= self._cache_bytes:
                break
            path.unlink(missing_ok=True)
            path.with_name(path.name + _PARTS).unlink(missing_ok=True)
            left -= about.st_size

    async def close(self) -> None:
        """Stop all fetches."""
        for fetching in list(self._fetching.values()):
            fetching.cancel()
            await asyncio.wait((fetching,))


def _copied(part: Part, archive: Path, at: int, into: BinaryIO) -> bool:
    """Append a part that another archive has to a file; return False if it has it no longer, or another content."""
    digest, left = hashlib.sha256(), part.size
    try:
        with archive.open("rb") as source:
            into.flush()  # both may be one file
            source.seek(at)
            while left and (piece := source.read(min(left, _COPY_BYTES))):
                digest.update(piece)
                into.write(piece)
                left -= len(piece)
    except FileNotFoundError:
        return False
    return not left and digest.hexdigest() == part.digest


def _hash(whole: hashlib._Hash, file: BinaryIO, at: int) -> None:
    """Add what a file has from there on to a digest."""
    file.flush()
    file.seek(at)
    while piece := file.read(_COPY_BYTES):
        whole.update(piece)


async def _inflated(
    store: ObjectStore, info: ObjectInfo, spool: BinaryIO, bytes_max: int, until_s: float | None = None
) -> int:
    """Write an object's tar file into `spool`, and return its size. Raises BadArchive, BusError, TimeoutError.

    `until_s` is how long it may take, as the loop's time; None: `FETCH_S_MAX` from now on.
    """
    inflating = Inflating(spool, bytes_max)
    async with asyncio.timeout_at(asyncio.get_running_loop().time() + FETCH_S_MAX if until_s is None else until_s):
        async for piece in store.get(info):
            await asyncio.to_thread(inflating.feed, piece)
    inflating.address()
    size = spool.tell()
    spool.seek(0)
    return size


async def _fits(store: ObjectStore, spool: BinaryIO, size: int) -> None:
    """Raise NotKept if the bucket has no room for this tar file of `size` bytes once it is compressed; or BusError."""
    room = await store.room()
    if room is None or size + (size >> 6) <= room:  # it surely fits: its messages have headers, too
        return
    packed = await asyncio.to_thread(lambda: sum(map(len, compressed(spool))))
    if packed + (packed >> 6) > room:
        raise NotKept(f"it takes {packed} bytes compressed, and its bucket has room for {room}")


def _tar_bytes(info: ObjectInfo) -> int:
    """Return the size of an object's tar file as its header says; 0 if it says none."""
    try:
        return int(info.headers.get(_TAR_BYTES, ["0"])[0])
    except (ValueError, IndexError):
        return 0


def _make_folders(into: str, folder: str, ids: tuple[int, int] | None) -> None:
    """Make `folder` below `into` and the folders on the way, in place of links of the job's own files.

    Raises BadArchive if a file of the job has such a name.
    """
    path = into
    for part in PurePosixPath(folder).parts:
        path = os.path.join(path, part)
        if os.path.islink(path):
            os.unlink(path)
        elif os.path.exists(path) and not os.path.isdir(path):
            raise BadArchive(f"{os.path.relpath(path, into)!r} is a file among the job's files, and is to be a folder")
        os.makedirs(path, exist_ok=True)
        if ids is not None:
            os.chown(path, *ids)


def _has_entries(entry: str, place: int) -> bool:
    descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        with os.scandir(descriptor) as entries:
            return next(entries, None) is not None
    finally:
        os.close(descriptor)


def _why_not(name: str, about: os.stat_result, owner: int, entry: str, place: int) -> str:
    """Return why an entry of a folder cannot be stored; "" if it can."""
    if about.st_uid != owner:
        return "it belongs to another owner than the job's user"
    if stat.S_ISLNK(about.st_mode):
        target = os.readlink(entry, dir_fd=place)
        return "" if link_stays_below(PurePosixPath(name), target) else "it is a link that leaves the job's folder"
    if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode):
        return ""
    return "it is neither a file nor a folder nor a link"


def _add(archive: tarfile.TarFile, name: str, entry: str, place: int, owner: int) -> None:
    """Add one entry of a folder, which no process changes. Raises OSError, also for an entry of another owner."""
    member = tarfile.TarInfo(name)
    about = os.stat(entry, dir_fd=place, follow_symlinks=False)
    member.mtime, member.mode = int(about.st_mtime), about.st_mode & 0o755
    if stat.S_ISLNK(about.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(entry, dir_fd=place)
        archive.addfile(member)
    elif stat.S_ISDIR(about.st_mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    else:
        descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
        with open(descriptor, "rb") as content:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != owner:
                raise NotKept(f"{name!r} was changed while it was stored")
            member.size = about.st_size
            archive.addfile(member, content)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
