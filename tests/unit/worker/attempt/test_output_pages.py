"""Pages of output: every byte once, text where it is text, and nothing but plain files of ours."""

from __future__ import annotations

import contextlib
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.codec import FRAME_BYTES_MAX, encode
from moorage.schemas.frames import LOG_PAGE_BYTES_MAX, LogPage, ReadLog
from moorage.system.disk_room import DiskRoom
from moorage.worker.attempt.output_pages import page_of, read_page
from moorage.worker.drivers.container.engine import Piece
from moorage.worker.drivers.container.output import ContainerOutput, _Mark, _Stream
from moorage.worker.supervisor.capped_output import (
    NOTICE_BYTES_MAX,
    RING_BYTES,
    ArrivalOrder,
    OutputPump,
    cut_at,
    cut_notice,
    order_path,
)
from moorage.worker.supervisor.protocol import Stream


def ask(offset: int = 0, limit: int = LOG_PAGE_BYTES_MAX, **fields: Any) -> ReadLog:
    attempt = {"tenant": "acme", "job": "j", "replica": 0, "attempt": 1, "fence": 7}
    values: dict[str, Any] = {"session": "s", **attempt, "driver": "process"}
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


class Full(DiskRoom):
    """A disk without room for output."""

    def take(self, size: int) -> bool:
        return False


def pumped(path: Path, cap: int, *chunks: bytes, room: DiskRoom | None = None) -> None:
    """Write a stream to a file as the supervisor does."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    pump = OutputPump(reading, path, cap, "stdout", room or DiskRoom(path.parent))
    for chunk in chunks:
        os.write(writing, chunk)
        assert pump.pump() == chunk
    os.close(writing)
    assert pump.pump() == b""
    pump.close()


def page_in(path: Path, offset: int = 0, limit: int = 64) -> LogPage:
    page = read_page(path, ask(offset, limit), True)
    assert page is not None
    return page


def test_a_file_that_was_cut_says_so_and_its_notice_is_no_output(tmp_path: Path) -> None:
    path = tmp_path / "f"
    pumped(path, 10, b"0123456789abcdef", room=Full(tmp_path))
    page = page_in(path)
    assert (page.text, page.size, page.truncated, page.over, page.cut_to) == ("", 0, True, True, 0)
    pumped(path, 0, b"0123456789abcdef")
    assert (page_in(path).text, page_in(path).truncated) == ("", True)


@contextlib.contextmanager
def files_of(size: int) -> Iterator[None]:
    """Let the system refuse to make a file longer, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 40, 100, 200])
def test_a_file_says_that_it_was_cut_also_where_the_disk_has_no_room_for_a_word(tmp_path: Path, size: int) -> None:
    path = tmp_path / "f"
    whole = b"0123456789" * 30
    with files_of(size):
        pumped(path, 1000, whole[:150], whole[150:])
    page = page_in(path, limit=1000)
    assert (page.truncated, page.over, page.cut_to) == (True, True, 0)
    assert page.text.encode() == whole[: page.size]
    assert page.size < size if size >= 100 else page.size == 0


def test_a_long_stream_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    pumped(path, 12, b"0123456789", b"abcdefghij")
    page = page_in(path)
    assert (page.text, page.offset, page.next, page.size) == ("012", 0, 3, 20)
    assert (page.truncated, page.over, page.cut_from, page.cut_to) == (True, False, 3, 11)
    for offset in (3, 7, 11):
        page = page_in(path, offset)
        assert (page.text, page.offset, page.next, page.over) == ("bcdefghij", 11, 20, True)
    assert page_in(path, 15, 2).text == "fg"
    assert [page_in(path, offset).text for offset in (-4, -9, -100)] == ["ghij", "bcdefghij", "bcdefghij"]
    assert path.stat().st_size == 12 + RING_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_of_any_stream_each_page_has_the_bytes_that_it_names(tmp_path: Path, seed: int) -> None:
    """Also while it is written, and where a new agent goes on with the log of a container."""
    chance = random.Random(seed)
    cap, path = chance.choice([1, 2, 3, 7, 64, 200]), tmp_path / "f"
    head = cap // 4
    data = bytes(chance.randrange(256) for _ in range(chance.randint(0, 600)))
    room, at, went_back = DiskRoom(tmp_path), 0, False
    stream = _Stream(path, cap, "stdout", room, _Mark())
    while at < len(data):
        part = data[at : at + chance.choice([1, 5, 50, 300])]
        at += len(part)
        stream.add(Piece(False, "", part))
        if chance.random() < 0.2:  # the next agent, which knows an earlier place, gets the rest again
            stream.close()
            stream = _Stream(path, cap, "stdout", room, msgspec.structs.replace(stream.mark, count=0))
        if chance.random() < 0.2:
            back = chance.randint(0, at)
            written = min(back, cap)
            stream.close()
            went_back = True
            mark = _Mark(seen_bytes=back, written_bytes=written, dropped_bytes=max(0, back - cap))
            stream, at = _Stream(path, cap, "stdout", room, mark), back
            continue
        offset = chance.randint(0, at + 3)
        page = read_page(path, ask(offset, chance.randint(1, 90)), False)
        assert page is not None
        assert raw(page) == data[page.offset : page.next]
        assert page.size == at
        if at > cap:
            assert (page.cut_from, page.truncated) == (head, True)
            assert page.offset >= offset or offset > at
            assert page.cut_to >= at - (cap - head)
    stream.close()
    if not data:
        return
    kept: dict[int, int] = {}
    offset = 0
    while True:
        page = page_in(path, offset)
        kept |= dict(enumerate(raw(page), page.offset))
        if page.over:
            break
        assert page.next > offset
        offset = page.next
    assert all(data[number] == byte for number, byte in kept.items())
    assert went_back or len(kept) >= min(len(data), cap) - 3, "but for a character that is cut in half"


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


@pytest.mark.parametrize(
    ("notes", "numbers"),
    [
        ([("stdout", 3), ("stdout", 4)], None),
        ([("stderr", 3), ("stderr", 4)], None),
        ([("stderr", 3), ("stderr", 4), ("stdout", 2), ("stderr", 1)], [0, 7, 2]),
        ([("stdout", 3), ("stdout", 4), ("stderr", 2), ("stdout", 1), ("stderr", 9)], [7, 2, 1]),
        ([("stdout", 2**32 + 4), ("stderr", 2), ("stdout", 1)], [2**32 - 1, 0, 5, 2]),
    ],
)
def test_the_order_of_both_streams_is_written_once_both_have_arrived(
    tmp_path: Path, notes: list[tuple[Stream, int]], numbers: list[int] | None
) -> None:
    path = tmp_path / "j.order"
    order = ArrivalOrder(str(path), DiskRoom(tmp_path))
    for stream, size in notes:
        order.note(stream, size)
    order.close()
    order.note("stdout", 1)
    order.note("stderr", 1)
    if numbers is None:
        assert not path.exists()
        return
    data = path.read_bytes()
    assert [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)] == numbers


def test_the_order_of_streams_takes_no_more_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moorage.worker.supervisor.capped_output.ORDER_BYTES_MAX", 40)
    for room in (DiskRoom(tmp_path), Full(tmp_path)):
        path = tmp_path / "j.order"
        path.unlink(missing_ok=True)
        order = ArrivalOrder(str(path), room)
        for at in range(100):
            order.note(("stdout", "stderr")[at % 2], 1)
        order.close()
        assert (path.stat().st_size if path.exists() else 0) == (0 if isinstance(room, Full) else 40)


def test_of_a_container_the_order_is_recorded_by_the_first_agent(tmp_path: Path) -> None:
    pieces = [Piece(at % 3 == 0, f"2026-01-01T00:00:{at:02}Z", b"x" * at) for at in range(1, 9)]
    output = ContainerOutput(tmp_path, "k", 1000)
    for piece in pieces[:5]:
        output.add(piece)
    output.mark()
    output.close(is_over=False)
    order = Path(order_path(tmp_path, "k"))
    first = order.read_bytes()
    assert [first[at] for at in range(0, len(first), 4)] == [3, 3]
    output = ContainerOutput(tmp_path, "k", 1000)
    assert output.since
    for piece in pieces:
        output.add(piece)
    output.close(is_over=True)
    assert output.sizes == (1 + 2 + 4 + 5 + 7 + 8, 3 + 6)
    assert order.read_bytes() == first
