"""Pack files for a job. The same files give the same archive, byte for byte, so that it is sent only once.

The content of a folder is at the top of the archive; a single file is there under its own name. Owners and times are
left out, and of a file's mode only the execute bit is kept. Paths that a folder's `.moorageignore` lists are left out,
as git leaves out those of a `.gitignore` (`ignore_rules`).
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Final, NamedTuple

from moorage.bus.target import HOME_DEFAULT
from moorage.client.errors import rejected
from moorage.client.ignore_rules import Rule, leaves_out, rules_of
from moorage.system.archive_parts import Member, Part, ends_of, read_parts
from moorage.system.archives import FILES_BYTES_MAX, MEMBERS_MAX, link_stays_below

IGNORE_FILE: Final = ".moorageignore"
#: always left out: of no use to a job, and large, or the folder of `moorage up`, which contains sockets and passwords.
#: A `.venv` may be a link, and the `.git` of a worktree is a file
_ALWAYS: Final = rules_of("\n".join((".git", "__pycache__", ".venv", HOME_DEFAULT)).encode())
#: 1980-01-01 UTC: some programs do not accept 0 as a time
_MTIME_S: Final = 315_532_800
_SPOOL_BYTES: Final = 32 << 20
#: bytes of a program's first line that Linux reads
FIRST_LINE_BYTES_MAX: Final = 256
#: most files that a warning names
NAMED_MAX: Final = 3


class Packed(NamedTuple):
    """A tar file on disk or in memory, with its address (its SHA-256) and its size in bytes.

    `files` is its number of files; links and folders are not counted. `warnings` name programs that cannot be started.
    `tops` are the names at its top, in their order, a folder's with / behind it. `parts` are what it is sent in.
    """

    file: IO[bytes]
    address: str
    size: int
    files: int
    warnings: tuple[str, ...] = ()
    tops: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()


def pack(paths: Iterable[str | os.PathLike[str]]) -> Packed:
    """Pack files and folders into a tar file. Raises `Rejected` for a path that does not exist, cannot be read, or is
    neither a file nor a folder, for two files of one name, for a link that leaves its folder, and for too many or too
    large files."""
    found: dict[str, Path] = {}
    for path in paths:
        for name, file in _below(Path(path)):
            if name in found and found[name].samefile(file):  # named by itself, and in a folder
                continue
            if name in found:
                raise rejected(
                    "invalid-argument",
                    f"two files would be {name} in the job's folder",
                    found=f"{found[name]} and {file}",
                    next="leave one out, or give the folder that contains both",
                )
            found[name] = file
    if len(found) > MEMBERS_MAX:
        raise _too_large(f"{len(found)} files and folders", f"{MEMBERS_MAX} files and folders")
    spool = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115 - it is handed on
    try:
        from_windows, members = _write(found, spool)
        address, parts = read_parts(spool, ends_of(members, spool.seek(0, os.SEEK_END)))
    except BaseException:
        spool.close()
        raise
    files = sum(path.is_file() and not path.is_symlink() for path in found.values())
    return Packed(spool, address, spool.tell(), files, _warnings(from_windows), _tops(found), parts)


def _tops(found: Mapping[str, Path]) -> tuple[str, ...]:
    folders = {name.partition("/")[0] for name in found if "/" in name}
    folders |= {name for name, path in found.items() if path.is_dir() and not path.is_symlink()}
    names = sorted({name.partition("/")[0] for name in found})
    return tuple(f"{name}/" if name in folders else name for name in names)


def _warnings(from_windows: list[str]) -> tuple[str, ...]:
    if not from_windows:
        return ()
    named, more = ", ".join(from_windows[:NAMED_MAX]), len(from_windows) - NAMED_MAX
    return (
        f"the first line of {named}{f' and {more} more' if more > 0 else ''} ends with CR LF, as on Windows, so no host"
        " can start it: write the file with LF alone (dos2unix does that)",
    )


def _write(found: Mapping[str, Path], spool: IO[bytes]) -> tuple[list[str], list[Member]]:
    """Write the archive, and return the names of programs whose first line ends with CR LF, and the members."""
    size, from_windows, members = 0, list[str](), list[Member]()
    # GNU's format has names of any length and, unlike pax, no headers of its own that could differ
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(found):
            at = archive.offset
            try:
                more, is_from_windows = _add(archive, name, found[name])
            except OSError as error:
                raise _unreadable(found[name], error) from None
            size += more
            members.append(Member(name, at, more))
            if is_from_windows:
                from_windows.append(name)
            if size > FILES_BYTES_MAX:
                raise _too_large(f"more than {FILES_BYTES_MAX >> 20} MiB", f"{FILES_BYTES_MAX >> 20} MiB")
    return from_windows, members


def _below(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files and folders that a path stands for, each with its name in the archive. Raises `Rejected`."""
    if not path.is_dir():
        if not os.path.exists(path):
            raise rejected(
                "invalid-argument", f"there is no file or folder {path}", found=str(path), next="give an existing path"
            )
        yield path.resolve().name if path.name in ("", "..") else path.name, path.resolve()  # of a link, its target
        return
    lists: dict[str, list[Rule]] = {}  # by the folder of the list

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename or path), error)

    for folder, folders, files in os.walk(path, onerror=refuse):
        above = Path(folder).relative_to(path).as_posix()
        head = "" if above == "." else f"{above}/"
        if own := _rules_in(Path(folder)):
            lists[head] = own
        nearest_first = [(at, rules) for at, rules in sorted(lists.items(), reverse=True) if head.startswith(at)]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [
            name for name in folders if name not in links and not _stays(nearest_first, head + name, is_folder=True)
        ]
        for name in (*files, *links):
            if not _stays(nearest_first, head + name, is_folder=False):
                yield head + name, Path(folder, name)
        yield from ((head + name, Path(folder, name)) for name in folders)


def _rules_in(folder: Path) -> list[Rule]:
    """Return the rules of a folder's own list; none if it has none. Raises `Rejected`."""
    try:
        return rules_of((folder / IGNORE_FILE).read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder / IGNORE_FILE, error) from None


def _stays(nearest_first: Iterable[tuple[str, list[Rule]]], name: str, *, is_folder: bool) -> bool:
    """Return whether a path is left out: by the nearest list that has a pattern for it, or by what always is."""
    for head, rules in nearest_first:
        found = leaves_out(rules, os.fsencode(name.removeprefix(head)), is_folder=is_folder)
        if found is not None:
            return found
    return bool(leaves_out(_ALWAYS, os.fsencode(name), is_folder=is_folder))


def _add(archive: tarfile.TarFile, name: str, path: Path) -> tuple[int, bool]:
    """Add one file, folder or link. Return the size of its content in bytes, and whether it is a program whose first
    line ends with CR LF. Raises OSError, `Rejected`."""
    about = path.lstat() if "/" in name or path.is_symlink() else path.stat()
    member = tarfile.TarInfo(name)
    member.mtime = _MTIME_S
    if stat.S_ISDIR(about.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(member)
        return 0, False
    if stat.S_ISLNK(about.st_mode):
        target = os.readlink(path)
        if not link_stays_below(PurePosixPath(name), target):
            raise rejected(
                "invalid-argument",
                f"{path} is a link that leaves the folder",
                found=target,
                next=f"list it in {IGNORE_FILE}, or give its target",
            )
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
        archive.addfile(member)
        return 0, False
    if not stat.S_ISREG(about.st_mode):
        raise rejected(
            "invalid-argument",
            f"{path} is neither a file nor a folder",
            found=str(path),
            next=f"list it in {IGNORE_FILE}",
        )
    with path.open("rb") as content:
        member.size = os.fstat(content.fileno()).st_size
        member.mode = 0o755 if about.st_mode & stat.S_IXUSR else 0o644
        head = content.read(FIRST_LINE_BYTES_MAX) if member.mode & 0o100 else b""
        content.seek(0)
        archive.addfile(member, content)
    return member.size, head.startswith(b"#!") and head.partition(b"\n")[0].endswith(b"\r")


def _unreadable(path: Path, error: Exception) -> Exception:
    """Return the refusal of a file. An error of tarfile has no `strerror`: the file ended before its size."""
    why = error.strerror if isinstance(error, OSError) else error
    if why is None:
        return rejected(
            "invalid-argument",
            f"{path} became shorter while it was packed",
            found=str(path),
            next=f"try again once nothing writes it, or list it in {IGNORE_FILE}",
        )
    return rejected(
        "invalid-argument",
        f"{path} cannot be read: {why}",
        found=str(path),
        next=f"make it readable, or list it in {IGNORE_FILE}",
    )


def _too_large(found: str, allowed: str) -> Exception:
    return rejected(
        "too-large", f"a job brings at most {allowed}", found=found, allowed=allowed,
        next=f"list files that the job does not need in {IGNORE_FILE}; fetch large data from a store of your own",
    )  # fmt: skip
