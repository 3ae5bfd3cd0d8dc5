"""Check, unpack and compress archives of files.

An archive is a tar file with regular files, folders, and links to something below the same folder: nothing in it names
a place outside of the folder into which it is unpacked, and nothing is written through a link, its own or an earlier
archive's: a link of one archive below a link of another could lead anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Final, Protocol, cast

#: files, folders and links of one archive
MEMBERS_MAX: Final = 100_000
PATH_BYTES_MAX: Final = 4096
#: bytes of all files of an archive that a client sends
FILES_BYTES_MAX: Final = 1 << 30
#: header of a stored archive of a job's files: what matched and was left out, as JSON {"count": 2, "names": [["a",
#: "why"]]}
LEFT_OUT: Final = "Moorage-Left-Out"
_READ_BYTES: Final = 1 << 20
#: an archive whose samples do not become smaller than this part is sent as it is: its data is compressed already
_WORTH: Final = 0.95
#: samples of an archive, spread over all of it, and bytes of each
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 64 * 1024


#: a member that only holds what stands in the header of the next one, such as a long name
_HEADER_BYTES_MAX: Final = 64 * 1024
#: so much behind a header's begin has all of it, with the members before it that only hold its names
_AHEAD_BYTES: Final = 4 * _HEADER_BYTES_MAX
_HEADERS: Final = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


#: a file where a folder is to be, a name that is too long: no host could make them
_NO_SUCH_NAMES: Final = (errno.ENAMETOOLONG, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


class BadArchive(ValueError):
    """An archive holds a member that is not allowed. The message names it."""


class _Member(tarfile.TarInfo):
    """A member whose header is small: `tarfile` reads headers whole, before anything can look at them."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size < 0 or (self.type in _HEADERS and self.size > _HEADER_BYTES_MAX):
            raise tarfile.ReadError(f"a header takes {self.size} bytes, at most {_HEADER_BYTES_MAX}")
        try:
            return super()._proc_member(archive)  # type: ignore[misc, no-any-return]
        except tarfile.HeaderError as error:  # which some Pythons take for the end of the archive
            raise tarfile.ReadError(str(error)) from None


def check_members(archive: tarfile.TarFile, bytes_max: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, each after it was checked, in all at most `bytes_max` bytes and `MEMBERS_MAX`.

    Raises BadArchive for what is not allowed, and as `tarfile` for what is no archive.
    """
    links: set[PurePosixPath] = set()
    count = size = 0
    for member in archive:
        count, size = count + 1, size + member.size
        if count > MEMBERS_MAX:
            raise BadArchive(f"it holds more than {MEMBERS_MAX} files")
        if size > bytes_max:
            raise BadArchive(f"its files take more than {bytes_max} bytes")
        path, shown = PurePosixPath(member.name), repr(member.name[:200])
        if not stays_below(member.name):
            raise BadArchive(f"{shown} leaves the folder")
        if not links.isdisjoint((path, *path.parents)):
            raise BadArchive(f"{shown} is behind a link")
        if member.issym():
            if not link_stays_below(path, member.linkname):
                raise BadArchive(f"{shown} is a link that leaves the folder")
            links.add(path)
        elif not (member.isdir() or (member.isreg() and not member.issparse())):
            raise BadArchive(f"{shown} is neither a file nor a folder nor a symbolic link")
        yield member


def stays_below(path: str) -> bool:
    """Return whether a relative path names something below the folder that it is read in, or that folder."""
    is_short = len(path.encode(errors="surrogateescape")) <= PATH_BYTES_MAX
    return bool(path) and is_short and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def link_stays_below(link: PurePosixPath, target: str) -> bool:
    """Return whether a symbolic link points below the folder, even if it points at another such link.

    So `..` may only be at its beginning: after the name of another link, it would count from that link's target.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(link.parent.parts)
    return bool(target) and up <= depth and (up == len(parts) or stays_below("/".join(parts[up:]))) and target[0] != "/"


def unpack(
    source: IO[bytes],
    into: str | Path,
    bytes_max: int,
    ids: tuple[int, int] | None = None,
    only: str = "",
    keep_modes: bool = False,
) -> int:
    """Unpack a tar file into a folder to which no other process writes; return how many members were made.

    The folder may hold what earlier archives brought. Nothing is written through a link of theirs.

    With `only`, just the member of that name and what lies below it are made; 0 if there is none. With `ids`,
    everything made belongs to that user and group. With `keep_modes`, a file has the archive's mode, as far as the
    umask allows; otherwise every user may read it. After an error, what was made before stays. Raises BadArchive, and
    OSError for what the disk refuses.
    """
    count = 0
    root = str(Path(into))
    made = {root}
    try:
        with _opened(source) as archive:
            for member in check_members(archive, bytes_max):
                if not only or PurePosixPath(member.name).is_relative_to(only):
                    _make(member, source, root, ids, keep_modes, made)
                    count += 1
    except OSError as error:
        if error.errno in _NO_SUCH_NAMES and os.path.isdir(into):
            raise BadArchive(f"its names cannot be made: {error.strerror}") from None
        raise
    return count


def find_file(source: IO[bytes], name: str, bytes_max: int) -> tuple[int, int] | None:
    """Return where a plain file of a tar file begins and how many bytes it has; None if the tar file has none.

    Raises BadArchive, OSError.
    """
    with _opened(source) as archive:
        for member in check_members(archive, bytes_max):
            if member.isreg() and PurePosixPath(member.name) == PurePosixPath(name):
                return member.offset_data, member.size
    return None


@contextlib.contextmanager
def _opened(source: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """Give the archive of a tar file; what cannot be read of it in the block raises BadArchive."""
    try:
        with tarfile.open(fileobj=source, mode="r:", tarinfo=_Member) as archive:
            yield archive
    except BadArchive:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:  # also a size below 0, a time that is none
        raise BadArchive(f"it is not a tar file: {error}") from None


def _make(
    member: tarfile.TarInfo,
    source: IO[bytes],
    into: str,
    ids: tuple[int, int] | None,
    keep_modes: bool,
    folders: set[str],
) -> None:
    """Make one member that was checked. `TarFile.extract` takes three times as long for it."""
    parts = PurePosixPath(member.name).parts or (".",)
    path = os.path.join(into, *parts)
    if os.path.dirname(path) not in folders:
        _make_folders(into, parts[:-1], ids, folders)
    if member.isdir():
        _make_folders(into, parts, ids, folders)
        return
    if member.issym():
        os.symlink(member.linkname, path)
    else:
        mode = 0o755 if member.mode & 0o100 else 0o644
        if keep_modes:
            mode = member.mode & 0o755 | 0o600
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(descriptor, "wb", buffering=0) as file:
            if not keep_modes:
                os.fchmod(descriptor, mode)  # whatever the umask is
            source.seek(member.offset_data)
            left = member.size
            while left:
                piece = source.read(min(left, _READ_BYTES))
                if not piece:
                    raise BadArchive("it is not a tar file: its end is missing")
                left -= file.write(piece)
            os.utime(descriptor, (member.mtime, member.mtime))
    if ids is not None:
        os.chown(path, *ids, follow_symlinks=False)


def _make_folders(into: str, parts: Sequence[str], ids: tuple[int, int] | None, known: set[str]) -> None:
    """Make a folder below `into` and those above it, but for the `known` ones. Raises BadArchive at a link."""
    path = into
    for part in parts:
        path = os.path.join(path, part)
        if path in known:
            continue
        if os.path.islink(path):
            raise BadArchive(f"{part[:200]!r} is a link that was here before")
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)
            if ids is not None:
                os.chown(path, *ids)
        known.add(path)


def empty(folder: str | Path) -> None:
    """Remove everything in a folder to which no other process writes. Raises OSError."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


class Seekable(Protocol):
    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int: ...

    def read(self, size: int = -1, /) -> bytes: ...


def compressed(tar: Seekable) -> Iterator[bytes]:
    """Yield a tar file as gzip, in pieces."""
    size, sample = tar.seek(0, os.SEEK_END), b""
    for at in range(_SAMPLES):
        tar.seek(size * at // _SAMPLES)
        sample += tar.read(_SAMPLE_BYTES)
    deflater = zlib.compressobj(1 if len(zlib.compress(sample, 1)) < _WORTH * len(sample) else 0, wbits=31)
    tar.seek(0)
    while piece := tar.read(_READ_BYTES):
        yield deflater.compress(piece)
    yield deflater.flush()


class FoundFile:
    """Takes the content of a tar file in pieces, and of it keeps one plain file, cut at `bytes_max`.

    What passes by before is not held, so that this takes a few hundred KiB of memory beside the file.
    """

    def __init__(self, path: str, bytes_max: int) -> None:
        self._path = PurePosixPath(path)
        self._bytes_max = bytes_max
        self._held = bytearray()
        self._begin = 0  # where in the tar file the held part begins
        self._at = 0
        self._archive: tarfile.TarFile | None = None
        self._place: tuple[int, int] | None = None
        self._count = 0

    def write(self, data: bytes, /) -> None:
        """Take the next piece."""
        self._held += data

    def content(self, *, at_end: bool = False) -> bytes | None:
        """Return the file once it has come, None before. Raises BadArchive if there is none, at the latest `at_end`."""
        if self._place is None:
            self._look(at_end)
        if self._place is None:
            return None
        begin, size = self._place
        self._drop(begin)
        if len(self._held) < size:
            if at_end:
                raise BadArchive("its end is missing")
            return None
        return bytes(self._held[:size])

    def _look(self, at_end: bool) -> None:
        """Look at the members whose headers have come."""
        while self._place is None:
            header = 0 if self._archive is None else self._archive.offset
            self._drop(header - 1)  # `tarfile` looks whether there is something before a header
            if not at_end and self._begin + len(self._held) < header + _AHEAD_BYTES:
                return
            try:
                if self._archive is None:
                    self._archive = tarfile.open(fileobj=cast(IO[bytes], self), mode="r:", tarinfo=_Member)  # noqa: SIM115
                member = self._archive.next()
            except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
                raise BadArchive(f"it is not a tar file: {error}") from None
            self._count += 1
            if member is None or self._count > MEMBERS_MAX:
                raise BadArchive(f"it has no file {self._path}")
            if member.isreg() and not member.issparse() and PurePosixPath(member.name) == self._path:
                self._place = member.offset_data, min(member.size, self._bytes_max)

    def _drop(self, before: int) -> None:
        passed = min(max(before - self._begin, 0), len(self._held))
        del self._held[:passed]
        self._begin += passed

    # -- for `tarfile`

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = place
        return place

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        begin = self._at - self._begin
        piece = bytes(self._held[begin:] if size < 0 else self._held[begin : begin + size])
        self._at += len(piece)
        return piece


class Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


class Inflating:
    """Takes a gzip stream in pieces and writes its content, at most `bytes_max` bytes, into a file.

    At the end it has the SHA-256 of the content.
    """

    def __init__(self, into: Sink, bytes_max: int) -> None:
        self._into = into
        self._left = bytes_max
        self._bytes_max = bytes_max
        self._inflater = zlib.decompressobj(wbits=31)
        self._digest = hashlib.sha256()

    def feed(self, data: bytes) -> None:
        """Take the next piece; bytes behind the end of the gzip stream are ignored.

        Raises BadArchive if the content exceeds the bound, or if this is no gzip.
        """
        try:
            while data:
                plain = self._inflater.decompress(data, _READ_BYTES)
                self._left -= len(plain)
                if self._left < 0:
                    raise BadArchive(f"it unpacks to more than {self._bytes_max} bytes")
                self._digest.update(plain)
                self._into.write(plain)
                data = self._inflater.unconsumed_tail
                if self._inflater.eof:
                    break
        except zlib.error as error:
            raise BadArchive(f"it is not compressed by gzip: {error}") from None

    def address(self) -> str:
        """Return the SHA-256 of what was written, in hex. Raises BadArchive if the stream is not at its end."""
        if not self._inflater.eof:
            raise BadArchive("its end is missing")
        return self._digest.hexdigest()
