"""Pages of output: every byte once, text where it is text, and nothing but plain files of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.codec import FRAME_BYTES_MAX, encode
from moorage.schemas.frames import LOG_PAGE_BYTES_MAX, LogPage, ReadLog
from moorage.system.disk_room import DiskRoom
from moorage.worker.output_pages import page_of, read_page
from moorage.worker.supervisor.output import NOTICE_BYTES_MAX, OutputPump, cut_at, cut_notice


def ask(offset: int = 0, limit: int = LOG_PAGE_BYTES_MAX, **fields: Any) -> ReadLog:
    member = {"tenant": "acme", "job": "j", "replica": 0, "attempt": 1, "fence": 7}
    values: dict[str, Any] = {"session": "s", **member, "driver": "process"}
    return ReadLog(**(values | {"stream": "out", "offset": offset, "limit": limit} | fields))


def raw(page: LogPage) -> bytes:
    return page.text.encode() if page.data is None else page.data


@given(
    st.one_of(st.binary(max_size=200), st.text("aé€🚢\x00\n", max_size=80).map(str.encode)),
    st.integers(1, 40),
    st.booleans(),
)
def test_pages_give_every_byte_once_and_text_where_it_is_text(data: bytes, limit: int, is_over: bool) -> None:
    at, given_bytes = 0, b""
    for _ in range(len(data) + 2):
        page = page_of(data, ask(at, limit), is_over)
        assert page.offset == at
        assert len(raw(page)) == page.next - page.offset <= limit
        given_bytes += raw(page)
        at = page.next
        if page.next == page.offset:
            break
    rest = data[len(given_bytes) :]
    assert given_bytes == data[: len(given_bytes)]
    if is_over:
        assert rest == b""
        assert page.over
    else:
        assert len(rest) < 4  # the beginning of a character whose end may come yet
        assert not page.over


def test_a_page_is_the_bytes_themselves_where_they_are_no_text() -> None:
    assert page_of(b"\xff\xfe\x00", ask(), True).data == b"\xff\xfe\x00"
    zeros = bytes(LOG_PAGE_BYTES_MAX)  # six characters each in JSON
    page = page_of(zeros, ask(), True)
    assert page.data == zeros
    for text in (zeros, b"\n" * LOG_PAGE_BYTES_MAX, b'"' * LOG_PAGE_BYTES_MAX, b"\x1b[31m" * (LOG_PAGE_BYTES_MAX // 5)):
        assert len(encode(page_of(text, ask(), True))) < FRAME_BYTES_MAX * 2 // 3


def test_a_negative_offset_counts_from_the_end_and_begins_with_a_character() -> None:
    data = "abc€def".encode()
    assert page_of(data, ask(-3), True).text == "def"
    page = page_of(data, ask(-5), True)
    assert (page.text, page.offset, page.data) == ("def", 6, None)
    assert page_of(data, ask(-1000), True).text == "abc€def"
    assert page_of(b"", ask(-5), True).over


def test_an_offset_behind_the_end_is_the_end() -> None:
    page = page_of(b"abc", ask(100), True)
    assert (page.offset, page.next, page.text, page.over) == (3, 3, "", True)
    assert not page_of(b"abc", ask(100), False).over


def test_a_file_that_was_cut_says_so_and_its_notice_is_no_output(tmp_path: Path) -> None:
    path, (reading, writing) = tmp_path / "f", os.pipe()
    os.set_blocking(reading, False)
    pump = OutputPump(reading, path, 10, "stdout", DiskRoom(tmp_path))
    os.write(writing, b"0123456789abcdef")
    os.close(writing)
    while pump.pump():
        pass
    pump.close()
    page = read_page(path, ask(), True)
    assert page is not None
    assert (page.text, page.size, page.truncated, page.over) == ("0123456789", 10, True, True)
    tail = read_page(path, ask(-4), True)
    assert tail is not None
    assert tail.text == "6789"


def test_a_job_that_writes_such_a_line_is_not_cut() -> None:
    assert len(cut_notice("stdout", 10**16 - 1, disk_full=True)) <= NOTICE_BYTES_MAX
    fake = b"hello" + cut_notice("stdout", 3)
    assert cut_at(fake, 0) is None
    assert cut_at(b"hello" + cut_notice("stderr", 5), 0) == 5


def test_nothing_but_a_plain_file_is_read(tmp_path: Path) -> None:
    assert read_page(tmp_path / "none", ask(), True) is None
    secret = tmp_path / "secret"
    secret.write_text("secret")
    link = tmp_path / "link"
    link.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        read_page(link, ask(), True)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a plain file"):
        read_page(tmp_path / "fifo", ask(), True)
    with pytest.raises(OSError, match="not a plain file"):
        read_page(tmp_path, ask(), True)


def test_a_file_that_ends_keeps_the_time_of_its_end(tmp_path: Path) -> None:
    """A job that was silent for a day has output as old as its end."""
    path, (reading, writing) = tmp_path / "f", os.pipe()
    os.set_blocking(reading, False)
    pump = OutputPump(reading, path, 10, "stdout", DiskRoom(tmp_path))
    os.write(writing, b"x")
    pump.pump()
    os.utime(path, (1, 1))
    os.close(writing)
    pump.close()
    assert path.stat().st_mtime > 1_000_000
