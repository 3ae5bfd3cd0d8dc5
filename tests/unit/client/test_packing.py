"""What a job brings along is packed the same way each time, and nothing is packed that a worker would refuse."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from pathlib import Path
from typing import IO

import pytest

from moorage.client import brought, packing, sending
from moorage.client.errors import Rejected
from moorage.client.packing import pack
from moorage.system import archives
from moorage.system.archives import unpack


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))


def made(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(name))
    return root


def address(path: Path) -> str:
    packed = pack([path])
    with packed.file:
        return packed.address


def compressed(path: Path) -> tuple[bytes, int]:
    packed = pack([path])
    with packed.file:
        return b"".join(archives.compressed(packed.file)), packed.size


def unpacked(paths: list[Path], into: Path) -> list[str]:
    into.mkdir()
    packed = pack(paths)
    with packed.file:
        plain = zlib.decompress(b"".join(archives.compressed(packed.file)), wbits=31)
    unpack(io.BytesIO(plain), into, 1 << 30)
    return names(into)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("train.py",), "train.py"),
        (("b.py", "a.py"), "a.py, b.py"),
        (("a.py", "conf/x.yaml", "conf/y/z.yaml"), "a.py, conf/ (3 files)"),
        (("odd\udc80 name\n",), "odd\ufffd name\\n"),
        (
            tuple(f"{number}.py" for number in range(10)),
            f"{', '.join(f'{n}.py' for n in range(8))} and 2 more (10 files)",
        ),
    ],
)
def test_an_archive_says_by_name_what_is_in_it(tmp_path: Path, files: tuple[str, ...], words: str) -> None:
    packed = pack([made(tmp_path, *files)])
    packed.file.close()
    said = sending._brought(packed)
    assert (brought._words(brought._decode(said)), said.isascii()) == (words, True)


def test_the_same_files_have_the_same_address_whenever_they_were_written(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", "b/c.py", "a.py"), made(tmp_path / "two", "a.py", "b/c.py")
    os.utime(two / "a.py", (1, 1))
    os.chmod(two / "a.py", 0o600)
    assert address(one) == address(two)
    os.chmod(two / "a.py", 0o700)
    assert address(one) != address(two)  # it can be executed now
    assert compressed(one) == compressed(one)


def test_a_folder_brings_its_content_and_a_file_itself(tmp_path: Path) -> None:
    code = made(tmp_path / "code", "train.py", "lib/a.py", "empty/x", ".git/HEAD", "lib/__pycache__/a.pyc")
    (code / "empty/x").unlink()
    (code / "lib/b.py").symlink_to("a.py")
    (code / "libs").symlink_to("lib")
    made(code, ".moorage/nats/ledger-password")
    os.mkfifo(code / ".moorage/supervisor.sock")
    single = made(tmp_path, "single.txt") / "single.txt"
    expected = ["empty", "lib", "lib/a.py", "lib/b.py", "libs", "single.txt", "train.py"]
    assert unpacked([code, single], tmp_path / "into") == expected


def test_what_moorageignore_lists_stays(tmp_path: Path) -> None:
    code = made(tmp_path / "code", "a.py", "data/big", "data/keep.txt", "logs/x.log", "sub/logs/y.log", "sub/b.py")
    (code / ".moorageignore").write_text("# not these\n*.log\n/data/*\n!/data/keep.txt\n")
    expected = [".moorageignore", "a.py", "data", "data/keep.txt", "logs", "sub", "sub/b.py", "sub/logs"]
    assert unpacked([code], tmp_path / "into") == expected


@pytest.mark.parametrize(
    ("patterns", "brought"),
    [
        ("*\n!*/\n!*.md\n", ["README.md", "data/README.md", "data/sub/note.md"]),
        ("/src/\n*.md\ndata/**\n!data/**/\n!data/**/*.md\n", ["data/README.md", "data/sub/note.md"]),
        ("/src/\n/README.md\ndata/**/\n", ["data/README.md", "data/big.bin"]),
        ("*.*\ncache\n!/src/\n", ["src/x"]),
        ("*.*\nsrc**/x\n", []),
    ],
)
def test_moorageignore_is_read_as_git_reads_it(tmp_path: Path, patterns: str, brought: list[str]) -> None:
    """The answers are those of `git ls-files -o`."""
    code = made(tmp_path / "code", "README.md", "data/README.md", "data/big.bin", "data/sub/note.md", "src/x")
    made(code, "src/cache/x")
    (code / ".moorageignore").write_text(patterns + ".moorageignore\n")
    found = unpacked([code], tmp_path / "into")
    assert [name for name in found if (tmp_path / "into" / name).is_file()] == brought


def test_a_venv_that_is_a_link_and_the_git_of_a_worktree_are_left_out(tmp_path: Path) -> None:
    code = made(tmp_path / "code", "a.py", ".git", "lib/.git")
    (code / ".venv").symlink_to("/opt/venv")
    assert unpacked([code], tmp_path / "into") == ["a.py", "lib"]


def test_a_byte_order_mark_does_not_hide_the_first_pattern_of_moorageignore(tmp_path: Path) -> None:
    code = made(tmp_path / "code", "secret.key", "b.key", "a.py")
    (code / ".moorageignore").write_bytes(b"\xef\xbb\xbfsecret.key\r\nb.key\r\n")
    assert unpacked([code], tmp_path / "into") == [".moorageignore", "a.py"]


def test_what_a_job_may_not_bring_is_named(tmp_path: Path) -> None:
    code = made(tmp_path / "code", "a.py")
    for path, why in (
        (tmp_path / "none", "there is no file or folder"),
        (code / "a.py" / "b", "there is no file or folder"),
    ):
        with pytest.raises(Rejected, match=why):
            pack([path])
    (code / "out").symlink_to("/etc/passwd")
    with pytest.raises(Rejected, match="a link that leaves the folder"):
        pack([code])
    (code / "out").unlink()
    os.mkfifo(code / "pipe")
    with pytest.raises(Rejected, match="neither a file nor a folder"):
        pack([code])
    (code / "pipe").unlink()
    with pytest.raises(Rejected, match=r"two files would be a\.py"):
        pack([code, made(tmp_path / "other", "a.py") / "a.py"])


def test_a_file_that_becomes_shorter_while_it_is_packed_is_named_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It "cannot be read: None"."""
    log = tmp_path / "train.log"
    log.write_bytes(bytes(1_000_000))
    addfile = tarfile.TarFile.addfile

    def cut(archive: tarfile.TarFile, member: tarfile.TarInfo, content: IO[bytes] | None = None) -> None:
        os.truncate(log, 10)  # its size is known by now
        addfile(archive, member, content)

    monkeypatch.setattr(tarfile.TarFile, "addfile", cut)
    with pytest.raises(Rejected) as refused:
        address(log)
    assert str(refused.value) == f"{log} became shorter while it was packed"
    assert "try again" in refused.value.problem.next


def test_more_than_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = made(tmp_path / "code", "a.py", "b.py", "c.py")
    monkeypatch.setattr(packing, "MEMBERS_MAX", 2)
    with pytest.raises(Rejected) as refused:
        pack([code])
    assert (refused.value.code, refused.value.problem.found) == ("too-large", "3 files and folders")
    monkeypatch.setattr(packing, "MEMBERS_MAX", 10)
    monkeypatch.setattr(packing, "FILES_BYTES_MAX", 10)
    with pytest.raises(Rejected) as refused:
        pack([code])
    assert refused.value.code == "too-large"


def test_what_is_compressed_already_is_not_compressed_again(tmp_path: Path) -> None:
    (tmp_path / "random").write_bytes(os.urandom(2 << 20))
    sent, size = compressed(tmp_path / "random")
    assert size < len(sent) < size + 10_000
    (tmp_path / "zeros").write_bytes(bytes(2 << 20))
    assert len(compressed(tmp_path / "zeros")[0]) < 20_000


def test_an_archive_that_begins_with_random_bytes_is_compressed_for_what_follows(tmp_path: Path) -> None:
    code = made(tmp_path / "code")
    code.mkdir()
    (code / "a.zip").write_bytes(os.urandom(2 << 20))
    (code / "b.txt").write_bytes(bytes(8 << 20))
    sent, size = compressed(code)
    assert len(sent) < size // 4


def test_a_program_whose_first_line_ends_as_on_windows_is_warned_of(tmp_path: Path) -> None:
    code = made(tmp_path / "code", "a.sh", "b.sh", "c.txt", "lib/d.sh")
    for name, text in (("a.sh", b"#!/bin/sh\r\n"), ("b.sh", b"#!/bin/sh\necho\r\n"), ("lib/d.sh", b"#!/bin/sh\r\n")):
        (code / name).write_bytes(text)
        (code / name).chmod(0o755)
    (code / "c.txt").write_bytes(b"#!/bin/sh\r\n")
    with (packed := pack([code])).file:
        (warning,) = packed.warnings
    assert warning.startswith("the first line of a.sh, lib/d.sh ends with CR LF, as on Windows")
    (code / "a.sh").unlink()
    (code / "lib/d.sh").unlink()
    with (packed := pack([code])).file:
        assert packed.warnings == ()


def test_a_file_that_the_caller_names_by_a_link_comes_with_its_content(tmp_path: Path) -> None:
    made(tmp_path, "far/away.txt")
    (tmp_path / "near").mkdir()
    (tmp_path / "near/model.txt").symlink_to("../far/away.txt")
    assert unpacked([tmp_path / "near/model.txt"], tmp_path / "into") == ["model.txt"]
    assert not (tmp_path / "into/model.txt").is_symlink()
    assert (tmp_path / "into/model.txt").read_text() == "far/away.txt"
