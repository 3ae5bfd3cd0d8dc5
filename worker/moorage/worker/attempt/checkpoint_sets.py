"""Checkpoints that are stored while their job runs: sets of files, each file once for all sets that have it.

A set is an object, its manifest, which names the files with their sizes, times and modes, and the pieces that hold
them. It is written last, so a set is there whole or not at all. A file whose size and time are those of the set before
is not read again, and one whose content that set has is not sent again.

The folder is read while the job may write to it. The files are opened first, and each counts only if it has the same
size and time once it is read as when the folder was looked at. So a set is the folder as it was at that moment,
whatever the job replaces or removes meanwhile. If a file is written in place, the folder is read again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from moorage.bus.checkpoint_manifest import (
    MANIFEST_BYTES_MAX,
    SET_HEADER,
    Entry,
    Kind,
    Manifest,
    encode_manifest,
    read_manifest,
)
from moorage.bus.errors import BusError
from moorage.bus.object_store import FILES_KEEP_S, Content, ObjectInfo, ObjectStore
from moorage.schemas.errors import Refused, problem
from moorage.system.archives import PATH_BYTES_MAX, BadArchive, link_stays_below, stays_below

#: files, folders and links of one set
ENTRIES_MAX: Final = 20_000
#: files to send that are open at a time
OPEN_MAX: Final = 256
#: how often a folder is looked at again because a file changed while it was read
TRIES_MAX: Final = 3
#: pause before that
AGAIN_S: Final = 0.5
#: how long a set may take: what no manifest names is removed after an hour
SET_S_MAX: Final = 3_000.0
#: a file is sent again once it has been stored for so long: the bucket drops it after twice that time
ANEW_S: Final = FILES_KEEP_S / 2
_READ_BYTES: Final = 1 << 20
#: the folder, in an attempt's, into which a set is written until it is whole
_PART: Final = ".moorage-checkpoint"

log = logging.getLogger("moorage.worker")


class NotKept(Refused):
    """The files that a job left could not be stored."""

    def __init__(self, why: str) -> None:
        super().__init__(problem("not-kept", f"files: {why}"))


class _Changed(Exception):
    """A file changed while it was read; the message names it."""


class KeptSet(NamedTuple):
    """A set that is stored: the object's name, its digest, and the sequence of its description."""

    name: str
    digest: str
    manifest: Manifest
    seq: int = 0


class Pace:
    """Bounds how fast threads read, to `rate` bytes per second together; 0 sets no bound."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, size: int) -> None:
        """Wait until this many bytes may be read."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            wait_s = max(self._free_s - now, 0.0)
            self._free_s = max(self._free_s, now) + size / self._rate
        time.sleep(wait_s)


#: what finds the step of a set in its names, the step itself, or None for none
Step = re.Pattern[str] | int | None


class Seen(NamedTuple):
    """What a look at a folder has found of one entry."""

    path: str
    kind: Kind
    mode: int
    mtime_ns: int
    size: int
    target: str
    inode: int

    @property
    def mark(self) -> tuple[str, str, int, int, int, str]:
        return self[:6]


class Form(NamedTuple):
    """What a checkpoint is: the folder below the attempt's that has its entries, the name of the only one if it is a
    file, and where it leads if it is a link."""

    folder: str
    file: str = ""
    link: str = ""


def form_of(folder: str, checkpoint: str) -> Form | None:
    """Return what is at `checkpoint` below an attempt's folder: a folder, a file, or a link to one of these below the
    attempt's folder; None for nothing.

    Raises NotKept for anything else, OSError.
    """
    found = _form_at(folder, PurePosixPath(checkpoint))
    if found is None or not found.link:
        return found
    path = PurePosixPath(checkpoint)
    if not link_stays_below(path, found.link):
        raise NotKept(f"{checkpoint} is a link that leaves the attempt's folder")
    leads = _form_at(folder, PurePosixPath(target_of(path, found.link)))
    if leads is not None and leads.link:
        raise NotKept(f"{checkpoint} is a link to another link")
    return None if leads is None else leads._replace(link=found.link)


def target_of(path: PurePosixPath, link: str) -> str:
    """Return the path, below the attempt's folder, to which a link at `path` leads."""
    return os.path.normpath(os.path.join(path.parent, link))


def _form_at(folder: str, path: PurePosixPath) -> Form | None:
    if not path.parts:
        return Form("")
    with _below(folder, str(path.parent)) as place:
        if place is None:
            return None
        try:
            about = os.stat(path.name, dir_fd=place, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(about.st_mode):
            return Form("", link=os.readlink(path.name, dir_fd=place))
    if stat.S_ISDIR(about.st_mode):
        return Form(str(path))
    return Form(str(path.parent), path.name)


def look(folder: str, checkpoint: str) -> list[Seen]:
    """Return what is in the checkpoint below an attempt's folder, [] if there is none; of a file, the file alone.

    Raises NotKept if a part of it can never be stored, and OSError, as for what goes while it is looked at.
    """
    form = form_of(folder, checkpoint)
    return [] if form is None else _look(folder, form)


def _look(folder: str, form: Form) -> list[Seen]:
    found: list[Seen] = []
    with _below(folder, form.folder) as top:
        if top is None:
            return []
        owner = os.stat(folder).st_uid
        if form.file:
            return [_seen(form.file, form.file, top, owner)]
        for above, folders, files, place in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            folders.sort()
            for entry in sorted((*files, *folders)):
                path = os.path.normpath(os.path.join(above, entry))
                found.append(_seen(path, entry, place, owner))
            if len(found) > ENTRIES_MAX:
                raise NotKept(f"the checkpoint has more than {ENTRIES_MAX} files and folders")
    return found


def _seen(path: str, entry: str, place: int, owner: int) -> Seen:
    about = os.stat(entry, dir_fd=place, follow_symlinks=False)
    shown = repr(os.fsencode(path)[-200:].decode(errors="replace"))
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise NotKept(f"it would be stored without {shown}, whose name is not UTF-8") from None
    if size > PATH_BYTES_MAX:
        raise NotKept(f"the path {shown} is longer than Linux allows in one call (4096 bytes)")
    if about.st_uid != owner:
        raise NotKept(f"it would be stored without {shown}, of another owner than the job's user")
    mode, target, kind = stat.S_IMODE(about.st_mode) & 0o777, "", "folder"
    if stat.S_ISLNK(about.st_mode):
        mode, target, kind = 0, os.readlink(entry, dir_fd=place), "link"
        if not link_stays_below(PurePosixPath(path), target):
            raise NotKept(f"it would be stored without {shown}, a link that leaves the checkpoint")
    elif stat.S_ISREG(about.st_mode):
        kind = "file"
    elif not stat.S_ISDIR(about.st_mode):
        raise NotKept(f"it would be stored without {shown}, neither a file nor a folder nor a link")
    is_file = kind == "file"  # a folder's time changes with its files, a link's with nothing that counts
    return Seen(
        path,
        kind,  # type: ignore[arg-type]
        mode,
        about.st_mtime_ns if is_file else 0,
        about.st_size if is_file else 0,
        target,
        about.st_ino,
    )


@contextlib.contextmanager
def _below(folder: str, path: str) -> Iterator[int | None]:
    """Give a descriptor of the folder at `path` below a folder, reached through no link; None if there is none."""
    opened = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for part in PurePosixPath(path).parts:
            try:
                opened.append(_open(part, os.O_DIRECTORY, opened[-1]))
            except (FileNotFoundError, NotADirectoryError):
                yield None
                return
        yield opened[-1]
    finally:
        for each in opened:
            os.close(each)


def _open(name: str, flags: int, place: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=place)


class _Reading:
    """The files of a folder that are to be read, as they were when it was looked at."""

    def __init__(self, folder: str, checkpoint: str, wanted: Sequence[Seen]) -> None:
        """Open the first `OPEN_MAX` of them. Raises _Changed, OSError."""
        self._folder, self._checkpoint = folder, checkpoint
        self._open: dict[str, int] = {}
        try:
            for seen in wanted[:OPEN_MAX]:
                self._open[seen.path] = self._opened(seen)
        except BaseException:
            self.close()
            raise

    def _opened(self, seen: Seen) -> int:
        path = PurePosixPath(seen.path)
        try:
            with _below(self._folder, f"{self._checkpoint}/{path.parent}") as place:
                if place is None:
                    raise _Changed(seen.path)
                descriptor = _open(path.name, 0, place)
        except OSError:
            raise _Changed(seen.path) from None
        try:
            self.check(seen, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @staticmethod
    def check(seen: Seen, descriptor: int) -> None:
        """Raise _Changed if the file is not as it was seen."""
        about = os.fstat(descriptor)
        if (about.st_ino, about.st_size, about.st_mtime_ns) != (seen.inode, seen.size, seen.mtime_ns):
            raise _Changed(seen.path)

    def pieces(self, seen: Seen, pace: Pace) -> Iterator[bytes]:
        """Yield a file's content. Raises _Changed, at its end at the latest, if it is not what was seen."""
        descriptor = self._open.get(seen.path)
        own = descriptor is None
        descriptor = self._opened(seen) if descriptor is None else descriptor
        try:
            at = 0
            while piece := os.pread(descriptor, _READ_BYTES, at):
                at += len(piece)
                if at > seen.size:  # else one that grows quickly would be read for ever
                    raise _Changed(seen.path)
                pace.take(len(piece))
                yield piece
            self.check(seen, descriptor)
        finally:
            if own:
                os.close(descriptor)

    def digest(self, seen: Seen, pace: Pace) -> str:
        """Return the SHA-256 of a file's content in hex. Raises _Changed."""
        digest = hashlib.sha256()
        for piece in self.pieces(seen, pace):
            digest.update(piece)
        return digest.hexdigest()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class SetsStore:
    """The sets in a tenant's bucket, of at most `bytes_max` bytes for two of one replica together."""

    def __init__(self, store: ObjectStore, bytes_max: int) -> None:
        self._store = store
        self._bytes_max = bytes_max

    async def find(self, name: str) -> KeptSet | None:
        """Return the set under this name, None if there is none that can be read. Raises BusError."""
        info = await self._store.find(name)
        return None if info is None else await self.read(name, info)

    async def read(self, name: str, info: ObjectInfo) -> KeptSet | None:
        """Return the set whose manifest is this object; None if it is none. Raises BusError."""
        manifest = await read_manifest(self._store, name, info)
        return None if manifest is None else KeptSet(name, info.digest, manifest, info.seq)

    async def put(
        self,
        name: str,
        folder: str,
        checkpoint: str,
        last: Manifest | None,
        pace: Pace,
        step: Step,
        others: Sequence[Manifest] = (),
        only: frozenset[object] | None = None,
    ) -> KeptSet | None:
        """Store the folder `checkpoint` of an attempt's folder as a set under this name; None if it is empty, or not
        `only` as these marks say.

        `last` is the newest set, whose files are not sent again. `others` stay beside it, and count with it. Raises
        NotKept: then nothing that was sent for it is left, as far as it can be removed.
        """
        sent: dict[tuple[str, int, int], Entry] = {}
        stored: KeptSet | None = None
        try:
            async with asyncio.timeout(SET_S_MAX):
                for left in reversed(range(TRIES_MAX)):
                    try:
                        stored = await self._put(name, folder, checkpoint, last, pace, step, sent, others, only)
                        return stored
                    except (_Changed, FileNotFoundError) as error:
                        if not left:
                            raise NotKept(f"{str(error)[:200]!r} changed each time that it was read") from None
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            raise NotKept(f"not stored within {SET_S_MAX:g} s (checkpoint_rate)") from None
        except OSError as error:
            raise NotKept(error.strerror or str(error)) from None
        except BusError as error:
            raise NotKept(error.problem.message) from None
        finally:
            needed = {} if stored is None else stored.manifest.contents
            await self.forget({e.content.nuid for e in sent.values() if e.content is not None} - needed.keys())
        raise AssertionError

    async def _put(
        self,
        name: str,
        folder: str,
        checkpoint: str,
        last: Manifest | None,
        pace: Pace,
        step: Step,
        sent: dict[tuple[str, int, int], Entry],
        others: Sequence[Manifest],
        only: frozenset[object] | None,
    ) -> KeptSet | None:
        now_ms = time.time_ns() // 1_000_000
        known = {} if last is None else known_files(last, now_ms)
        form = await asyncio.to_thread(form_of, folder, checkpoint)
        seen = [] if form is None else await asyncio.to_thread(_look, folder, form)
        if form is None or not seen or (only is not None and only != frozenset(each.mark for each in seen)):
            return None
        files = [each for each in seen if each.kind == "file"]
        wanted = [each for each in files if (key := _key(each)) not in known and key not in sent]
        new_bytes = sum(each.size for each in wanted)
        held = {nuid: of for each in (*([] if last is None else [last]), *others) for nuid, of in each.contents.items()}
        together = sum(each.size for each in held.values()) + new_bytes + sum(each.size for each in sent.values())
        if together > self._bytes_max:
            raise NotKept(
                f"it and the one before take {together} bytes together, checkpoint_bytes is {self._bytes_max}"
            )
        room = await self._store.room()
        if room is not None and new_bytes > room:
            raise NotKept(f"it needs {new_bytes} bytes, and its bucket has room for {room}")
        by_digest = {e.content.digest: e for e in known.values() if e.content is not None}
        sizes = {each.size for each in by_digest.values()}
        reading = await asyncio.to_thread(_Reading, folder, form.folder, wanted)
        try:
            for each in wanted:
                digest = await asyncio.to_thread(reading.digest, each, pace) if each.size in sizes else ""
                if (same := by_digest.get(_said(digest))) is not None:  # it was written anew, and is what it was
                    known[_key(each)] = entry_of(each, same.content, same.stored_ms)
                else:
                    content = await self._store.put_content(reading.pieces(each, pace), lambda _: None)
                    sent[_key(each)] = entry_of(each, content, now_ms)
        finally:
            reading.close()
        entries = [_entry(each, known, sent) for each in seen]
        manifest = Manifest(now_ms, entries, step_of(seen, step), file=form.file, link=form.link)
        payload = encode_manifest(manifest)
        if len(payload) > MANIFEST_BYTES_MAX:
            raise NotKept(f"its names take more than {MANIFEST_BYTES_MAX} bytes")
        digest = await self._store.put(name, [payload], {SET_HEADER: "1"}, lambda _: None)
        return KeptSet(name, digest, manifest)

    async def restore(
        self, kept: KeptSet, into: str, checkpoint: str, bytes_max: int, ids: tuple[int, int] | None
    ) -> None:
        """Write a set into an attempt's folder, to which nothing else writes, in place of what is at `checkpoint`.

        Raises BadArchive, StreamGap if it is not whole and sound, and leaves the folder as it was then; BusError,
        OSError.
        """
        entries = sorted(kept.manifest.entries, key=lambda e: (e.kind == "link", e.path))
        _check(entries, bytes_max)
        link, file = kept.manifest.link, kept.manifest.file
        if link and not link_stays_below(PurePosixPath(checkpoint), link):
            raise BadArchive(f"it is a link that leaves the folder: {link[:200]!r}")
        if file and [(e.path, e.kind) for e in entries] != [(file, "file")]:
            raise BadArchive("it is one file, and has others")
        try:
            root = await self._restore(entries, into, ids)
            await asyncio.to_thread(clear, into, checkpoint)
            manifest, path = kept.manifest, PurePosixPath(checkpoint)
            root = os.path.join(root, manifest.file) if manifest.file else root
            if manifest.link:
                target = target_of(path, manifest.link)
                await asyncio.to_thread(_put_at, into, target, root, ids)
                await asyncio.to_thread(_make_folders, into, path.parts[:-1], (), ids)
                os.symlink(manifest.link, os.path.join(into, path))
                if ids is not None:
                    os.chown(os.path.join(into, path), *ids, follow_symlinks=False)
            else:
                await asyncio.to_thread(_put_at, into, checkpoint, root, ids)
        finally:
            await asyncio.to_thread(clear, into, _PART)

    async def _restore(self, entries: Sequence[Entry], into: str, ids: tuple[int, int] | None) -> str:
        root, folders = os.path.join(into, _PART), [e for e in entries if e.kind == "folder"]
        await asyncio.to_thread(clear, into, _PART)
        await asyncio.to_thread(_make_folders, into, [_PART], folders, ids)
        for entry in entries:
            path = os.path.join(root, entry.path)
            if entry.kind == "link":
                os.symlink(entry.target, path)
                if ids is not None:
                    os.chown(path, *ids, follow_symlinks=False)
            elif entry.kind == "file" and entry.content is not None:
                with open(path, "xb", buffering=0) as file:  # noqa: ASYNC230 - on the disk of the state folder
                    async for piece in self._store.get(entry.content.info):
                        await asyncio.to_thread(file.write, piece)
                    if ids is not None:
                        os.fchown(file.fileno(), *ids)
                    os.fchmod(file.fileno(), entry.mode & 0o755 | 0o400)
                    os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))
        for entry in folders:  # last: one without the right to write takes no files
            os.chmod(os.path.join(root, entry.path), entry.mode & 0o755 | 0o500)
        return root

    async def drop(self, kept: KeptSet, others: Iterable[Manifest]) -> None:
        """Remove a set, and its contents but for those that the others have. Raises no BusError."""
        with contextlib.suppress(BusError):
            info = await self._store.find(kept.name)
            if info is not None and info.digest == kept.digest:
                await self.forget({info.nuid})
        await self.forget_contents(kept.manifest, others)

    async def forget_contents(self, of: Manifest, others: Iterable[Manifest]) -> None:
        """Remove the contents of a set but for those that the others have. Raises no BusError."""
        needed = {nuid for other in others for nuid in other.contents}
        await self.forget(of.contents.keys() - needed)

    async def forget(self, nuids: Iterable[str]) -> None:
        for nuid in nuids:
            await self._store.forget(self._store.subject(nuid))


def known_files(last: Manifest, now_ms: int) -> dict[tuple[str, int, int], Entry]:
    """Return the files of a set whose contents stay for long enough to be those of the next set, too."""
    since_ms = now_ms - ANEW_S * 1000
    found = [e for e in last.entries if e.kind == "file" and e.content is not None and e.stored_ms > since_ms]
    return {(e.path, e.size, e.mtime_ns): e for e in found}


def step_of(seen: Sequence[Seen], pattern: Step) -> int | None:
    """Return the largest number that the pattern finds in the paths of a folder; None for none."""
    if pattern is None or isinstance(pattern, int):
        return pattern
    return max((int(number) for each in seen for number in pattern.findall(each.path)), default=None)


def entry_of(seen: Seen, content: Content | None, stored_ms: int) -> Entry:
    return Entry(*seen[:6], content, stored_ms)


def _entry(
    seen: Seen, known: Mapping[tuple[str, int, int], Entry], sent: Mapping[tuple[str, int, int], Entry]
) -> Entry:
    if seen.kind != "file":
        return entry_of(seen, None, 0)
    of = known.get(_key(seen)) or sent[_key(seen)]
    return entry_of(seen, of.content, of.stored_ms)


def _key(seen: Seen) -> tuple[str, int, int]:
    return seen.path, seen.size, seen.mtime_ns


def _said(hexadecimal: str) -> str:
    """Return a SHA-256 as a description of the object store has it."""
    return "SHA-256=" + base64.urlsafe_b64encode(bytes.fromhex(hexadecimal)).decode()


def _check(entries: Sequence[Entry], bytes_max: int) -> None:
    """Raise BadArchive if a set is larger than allowed, or names anything outside of its folder."""
    if len(entries) > ENTRIES_MAX or sum(e.size for e in entries) > bytes_max:
        raise BadArchive(f"it has more than {ENTRIES_MAX} files or {bytes_max} bytes")
    links = {PurePosixPath(e.path) for e in entries if e.kind == "link"}
    for e in entries:
        path = PurePosixPath(e.path)
        if not stays_below(e.path) or not links.isdisjoint(path.parents):
            raise BadArchive(f"{e.path[:200]!r} leaves the folder")
        if e.kind == "link" and not link_stays_below(path, e.target):
            raise BadArchive(f"{e.path[:200]!r} is a link that leaves the folder")
        if e.kind == "file" and (e.content is None or e.content.size != e.size):
            raise BadArchive(f"{e.path[:200]!r} has no content of its size")


def _put_at(into: str, path: str, root: str, ids: tuple[int, int] | None) -> None:
    """Move what was restored to its place below the attempt's folder, in place of what is there."""
    clear(into, path)
    _make_folders(into, PurePosixPath(path).parts[:-1], (), ids)
    os.rename(root, os.path.join(into, path))


def clear(into: str, folder: str) -> None:
    """Remove `folder` below `into`, or the first link or file on the way there, of the job's own files."""
    path = into
    for part in PurePosixPath(folder).parts:
        path = os.path.join(path, part)
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
            return
    shutil.rmtree(path, ignore_errors=True)


def _make_folders(into: str, parts: Sequence[str], folders: Sequence[Entry], ids: tuple[int, int] | None) -> None:
    path = into
    for part in parts:
        path = os.path.join(path, part)
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
            if ids is not None:
                os.chown(path, *ids)
    for entry in folders:
        made = os.path.join(path, entry.path)
        os.mkdir(made, 0o755)
        if ids is not None:
            os.chown(made, *ids)
