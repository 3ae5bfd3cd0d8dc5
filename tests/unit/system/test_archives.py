"""What an archive of files may hold: nothing in it reaches outside the folder, and nothing in it is a bomb."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from moorage.system import archives
from moorage.system.archives import BadArchive, FoundFile, Inflating, unpack

MIB = 1 << 20


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


def folder(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=0o700)


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    held.seek(0)
    return held


BAD = {
    "a path that goes up": ([member("../x", b"x")], "leaves the folder"),
    "a path that goes up inside": ([member("a/../../x", b"x")], "leaves the folder"),
    "an absolute path": ([member("/tmp/x", b"x")], "leaves the folder"),
    "a link that goes up": ([link("a", "../x")], "a link that leaves the folder"),
    "an absolute link": ([link("a", "/etc/passwd")], "a link that leaves the folder"),
    "a link that goes up deep": ([link("a/b", "../../x")], "a link that leaves the folder"),
    "a link that goes up behind another": (
        [folder("p"), link("p/up", ".."), link("out", "p/up/../x")],
        "a link that leaves the folder",
    ),
    "a link to nowhere": ([link("a", "")], "a link that leaves the folder"),
    "a file behind a link": ([folder("in"), link("a", "in"), member("a/x", b"x")], "behind a link"),
    "a file over a link": ([member("x", b"1"), link("a", "x"), member("a", b"2")], "behind a link"),
    "a hard link": ([member("x", b"x"), link("a", "x", tarfile.LNKTYPE)], "neither a file"),
    "a hard link to outside": ([link("a", "/etc/passwd", tarfile.LNKTYPE)], "neither a file"),
    "a device": ([member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], "neither a file"),
    "a pipe": ([member("pipe", type=tarfile.FIFOTYPE)], "neither a file"),
    "too much": ([member("a", bytes(MIB)), member("b", b"1")], "more than 1048576 bytes"),
    "too long a path": ([member("a/" * 3000 + "b", b"")], "leaves the folder"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_leaves_the_folder_or_is_no_file_is_refused(tmp_path: Path, bad: str) -> None:
    members, why = BAD[bad]
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(BadArchive, match=why):
        unpack(tar(*members), into, MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["into"]


@pytest.mark.parametrize("junk", [b"", b"no tar at all" * 100, tar(member("a", b"x" * 2000)).getvalue()[:1500]])
def test_what_is_no_tar_file_is_told_so(tmp_path: Path, junk: bytes) -> None:
    with pytest.raises(BadArchive, match="not a tar file"):
        unpack(io.BytesIO(junk), tmp_path, MIB)


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MEMBERS_MAX", 3)
    with pytest.raises(BadArchive, match="more than 3 files"):
        unpack(tar(*(member(f"f{at}") for at in range(4))), tmp_path, MIB)


def test_what_is_harmless_is_there_with_its_mode_and_no_more(tmp_path: Path) -> None:
    held = tar(
        folder("src"),
        member("src/run", b"#!/bin/sh\n", mode=0o4777),
        member("src/data", b"data", mode=0o600),
        link("src/same", "data"),
        link("src/deep", "../src/./data"),
        link("top", "src"),
        member("no/folder/of/its/own", b"x"),
    )
    assert unpack(held, tmp_path, MIB) == 7
    assert (tmp_path / "src/run").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "src/data").stat().st_mode & 0o7777 == 0o644
    assert (tmp_path / "src/deep").read_bytes() == (tmp_path / "top/same").read_bytes() == b"data"
    assert (tmp_path / "no/folder/of/its/own").read_bytes() == b"x"


@pytest.mark.parametrize(
    "second", [member("in/x", b"x"), folder("in/x"), link("in/x", "y"), folder("in"), member("in")]
)
def test_no_archive_is_unpacked_through_a_link_of_an_earlier_one(
    tmp_path: Path, second: tuple[tarfile.TarInfo, bytes]
) -> None:
    """A job may bring several. Their links could lead one another out of the folder."""
    unpack(tar(folder("real"), link("in", "real")), tmp_path, MIB)
    with pytest.raises(BadArchive):
        unpack(tar(second), tmp_path, MIB)
    assert not [*(tmp_path / "real").iterdir()]


def test_an_archive_adds_to_the_folders_of_an_earlier_one(tmp_path: Path) -> None:
    deep = "a/b/c/"
    unpack(tar(member(f"{deep}x", b"x")), tmp_path, MIB)
    unpack(tar(folder(deep), member(f"{deep}y", b"y")), tmp_path, MIB)
    assert sorted(path.name for path in (tmp_path / deep).iterdir()) == ["x", "y"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
def test_files_belong_to_the_jobs_user_whatever_the_archive_says(tmp_path: Path) -> None:
    held = tar(folder("src"), member("src/a", b"a", uid=0, gid=0, uname="root"), link("src/b", "a"))
    unpack(held, tmp_path, MIB, (65534, 65533))
    for name in ("src", "src/a", "src/b"):
        about = (tmp_path / name).lstat()
        assert (about.st_uid, about.st_gid) == (65534, 65533)


def gzipped(data: bytes) -> bytes:
    deflater = zlib.compressobj(9, wbits=31)
    return deflater.compress(data) + deflater.flush()


@pytest.mark.parametrize("cut", [lambda data: data, lambda data: data[:-5]])
def test_a_stream_is_whole_or_refused(cut: Callable[[bytes], bytes]) -> None:
    data = os.urandom(3 * MIB)
    into = io.BytesIO()
    inflating = Inflating(into, 3 * MIB)
    packed = cut(gzipped(data))
    for at in range(0, len(packed), 70_001):
        inflating.feed(packed[at : at + 70_001])
    if cut(b"whole" * 2) == b"whole" * 2:
        assert into.getvalue() == data
        assert len(inflating.address()) == 64
    else:
        with pytest.raises(BadArchive, match="end is missing"):
            inflating.address()


def test_a_bomb_is_given_up_at_its_bound_and_what_is_no_gzip_at_once() -> None:
    into = io.BytesIO()
    with pytest.raises(BadArchive, match="more than 1048576 bytes"):
        Inflating(into, MIB).feed(gzipped(bytes(64 * MIB)))
    assert len(into.getvalue()) <= MIB
    with pytest.raises(BadArchive, match="not compressed by gzip"):
        Inflating(io.BytesIO(), MIB).feed(b"plain")


@pytest.mark.parametrize("name", ["a/found", "a/" + "long/" * 60 + "found"])
@pytest.mark.parametrize("size", [0, 1, 512, 3 * MIB])
def test_one_file_is_found_as_an_archive_passes_by_and_is_there_once_it_has_come(name: str, size: int) -> None:
    wanted, large = os.urandom(size), 5 * MIB
    before = (folder("a"), member("a/large", bytes(large)), link("a/found2", "large"))
    data = tar(*before, member(name, wanted), member("b", bytes(8 * MIB))).getvalue()
    found, held, at = FoundFile(name, 2 * MIB), 0, 0
    while found.content() is None:
        found.write(data[at : at + 70_001])
        at, held = at + 70_001, max(held, len(found._held) if at < large else 0)
    assert found.content() == wanted[: 2 * MIB]
    assert (held < MIB, at < large + size + MIB) == (True, True)
    for path, end in (("c", len(data)), (name, large), ("a/found2", len(data)), ("b", len(data) - 4 * MIB)):
        lacking = FoundFile(path, 9 * MIB)
        lacking.write(data[:end])
        with pytest.raises(BadArchive):
            lacking.content(at_end=True)


KINDS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [b"", tarfile.TarInfo("a").tobuf()])
def test_a_header_that_is_large_is_refused_before_it_is_read(tmp_path: Path, kind: bytes, first: bytes) -> None:
    header = tarfile.TarInfo("large")
    header.type, header.size = kind, MIB
    source = io.BytesIO(first + header.tobuf(tarfile.GNU_FORMAT) + b"a" * MIB)
    with pytest.raises(BadArchive, match="not a tar file: a header takes 1048576 bytes"):
        unpack(source, tmp_path, 1 << 30)
    assert source.tell() < MIB


def pax(name: str, text: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, text, type=tarfile.XHDTYPE)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([member("a", b"x"), member("a/b", b"x")], "its names cannot be made: File exists"),
        ([member("n" * 300, b"x")], "its names cannot be made: File name too long"),
        ([member(".", b"x")], "its names cannot be made: Is a directory"),
        ([pax("p", b"14 size=-1024\n"), member("a")], "not a tar file"),
        ([pax("p", b"13 mtime=nan\n"), member("a")], "not a tar file"),
    ],
)
def test_what_no_host_could_unpack_is_the_archives_fault(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], why: str
) -> None:
    with pytest.raises(BadArchive, match=why):
        unpack(tar(*members), tmp_path, MIB)


def test_a_long_name_is_no_large_header(tmp_path: Path) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("x/" * 100 + "y"))
    held.seek(0)
    assert unpack(held, tmp_path, MIB) == 1
