"""A file of records: what a crash, a full disk or damage leaves of it, and that it is replaced as one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from moorage.system import record_file
from moorage.system.record_file import Form, NotThisForm, RecordFile, Records, read_records

FORMS = [Form(b"magic\n", b"", 1000, 200), Form(b"magic\n", b"\xc1rec", 1000, 200)]
BODIES = [b"one", b"", b"three" * 9]


@pytest.fixture(params=FORMS, ids=["plain", "marked"])
def form(request: pytest.FixtureRequest) -> Form:
    assert isinstance(request.param, Form)
    return request.param


def test_what_is_written_is_read_in_order(tmp_path: Path, form: Form) -> None:
    assert read_records(tmp_path / "f", form) == Records([], 0)
    file = RecordFile(tmp_path / "f", form, BODIES[:1])
    file.append(BODIES[1:])
    file.append([])
    assert file.bytes_written == (tmp_path / "f").stat().st_size
    file.close()
    assert read_records(tmp_path / "f", form) == Records(BODIES, 0)
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_file_cut_anywhere_has_its_whole_records_and_counts_the_rest(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "f"
    RecordFile(path, form, BODIES).close()
    data, seen = path.read_bytes(), set()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        found = read_records(path, form)
        assert found.bodies == BODIES[: len(found.bodies)]
        seen.add(len(found.bodies))
        RecordFile(path, form, found.bodies).close()
        whole = path.stat().st_size if length >= len(form.magic) else 0
        assert found.torn_bytes == length - whole
    assert seen == {0, 1, 2, 3}


def test_another_kind_of_file_is_no_such_file(tmp_path: Path, form: Form) -> None:
    (tmp_path / "f").write_bytes(b"other\n")
    with pytest.raises(NotThisForm):
        read_records(tmp_path / "f", form)


def test_only_marks_lead_past_damage(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "f"
    RecordFile(path, form, BODIES).close()
    path.write_bytes(path.read_bytes().replace(b"one", b"onf"))
    assert read_records(path, form).bodies == (BODIES[1:] if form.mark else [])


def test_what_a_full_disk_did_not_take_is_not_in_the_file(
    tmp_path: Path, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RecordFile(tmp_path / "f", form, BODIES[:1])

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:-1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(record_file, "_write_all", full)
        with pytest.raises(OSError, match="No space"):
            file.append([b"lost"])
    file.append(BODIES[1:])
    file.close()
    assert read_records(tmp_path / "f", form) == Records(BODIES, 0)


def test_it_is_large_beyond_its_bound_or_twice_what_it_had(tmp_path: Path, form: Form) -> None:
    file = RecordFile(tmp_path / "f", form, [])
    file.append([b"x" * 100])
    assert not file.is_large
    file.append([b"x" * 100])
    assert file.is_large
    file.replace([b"x" * 150])
    file.append([b"x" * 100])
    assert not file.is_large, "it would be replaced again and again"
    file.close()


def test_a_file_that_was_moved_or_replaced_is_not_in_place(tmp_path: Path, form: Form) -> None:
    file = RecordFile(tmp_path / "f", form, [])
    assert file.is_in_place()
    (tmp_path / "f").rename(tmp_path / "g")
    assert not file.is_in_place()
    (tmp_path / "f").write_bytes(form.magic)
    assert not file.is_in_place()
    file.replace([])
    assert file.is_in_place()
    file.close()
