"""Output of containers: what a new agent reads on, and each piece is kept once."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.worker.drivers.container.engine import Piece
from moorage.worker.drivers.container.log_file import LogFile
from moorage.worker.drivers.container.output import MARGIN_S, ContainerOutput, clear_marks, mark_path
from moorage.worker.supervisor.capped_output import output_path


def test_marks_of_another_worker_stay(tmp_path: Path) -> None:
    keys = ["w1@docker|acme/a/0/1/7", "w1@docker|acme/b/0/1/8", "w2@docker|acme/c/0/1/9"]
    for key in keys:
        output = ContainerOutput(tmp_path, key, 10)
        output.add(Piece(False, "2026-11-23T11:40:01.000000001Z", b"x"))
        output.mark()
        output.close(is_over=False)
    clear_marks(tmp_path, "w1@docker", keys[:1])
    assert [mark_path(tmp_path, key).exists() for key in keys] == [True, False, True]


def test_output_is_read_on_by_time_and_by_the_number_of_pieces_of_that_time(tmp_path: Path) -> None:
    def pieces(*said: tuple[int, bytes]) -> list[Piece]:
        return [Piece(False, f"2026-11-23T11:40:01.{at:09d}Z", data) for at, data in said]

    log = pieces((1, b"a"), (1, b"b"), (1, b"c"), (5, b"d"), (5, b"e"))
    first = ContainerOutput(tmp_path, "w|k", 100)
    assert first.since == "0"
    assert [event.data for piece in log[:2] if (event := first.add(piece))] == [b"a", b"b"]
    first.mark()
    first.add(log[2])  # written, and then it died before it could note that
    first.close(is_over=False)
    second = ContainerOutput(tmp_path, "w|k", 100)
    assert int(second.since) == 1795434001 - MARGIN_S
    told = [event for piece in log if (event := second.add(piece))]
    assert [(event.offset, event.data) for event in told] == [(2, b"c"), (3, b"d"), (4, b"e")]
    assert second.sizes == (5, 0)
    assert output_path(tmp_path, "w|k", "stdout").read_bytes() == b"abcde"
    assert int(second.since) > 0
    assert [piece for piece in log if second.add(piece)] == [], "the log may be read again at any time"
    second.close(is_over=True)
    assert not mark_path(tmp_path, "w|k").exists()


def test_output_after_the_clock_was_set_back_is_kept_once(tmp_path: Path) -> None:
    def piece(time: str, data: bytes) -> Piece:
        return Piece(False, f"2026-11-23T{time}.000000000Z", data)

    log = [piece("11:30:00", b"a"), piece("12:00:00", b"b"), piece("11:00:00", b"c"), piece("11:00:20", b"d")]
    first = ContainerOutput(tmp_path, "w|k", 100)
    assert [piece for piece in log if first.add(piece)] == log
    first.mark()
    first.close(is_over=False)
    second = ContainerOutput(tmp_path, "w|k", 100)
    assert int(second.since) == 1795431600 - MARGIN_S, "the engine leaves out what is earlier than that"
    more = [piece("11:00:30", b"e"), piece("12:00:00", b"f"), piece("12:00:01", b"g")]
    assert [piece for piece in log + more if second.add(piece)] == more
    assert int(second.since) == 1795435201 - MARGIN_S
    assert [piece for piece in log + more if second.add(piece)] == []
    assert output_path(tmp_path, "w|k", "stdout").read_bytes() == b"abcdefg"
    second.close(is_over=True)


def test_a_log_that_its_writer_replaced_is_read_to_its_end_and_from_its_beginning(tmp_path: Path) -> None:
    log, stamp = tmp_path / "ctr.log", "2026-11-26T17:13:58.363678401+00:00"
    with LogFile(str(log)) as file:
        assert list(file.read()) == [], "it is not there yet"
        log.write_text(f"{stamp} stdout F a\n{stamp} std")
        assert list(file.read()) == [Piece(False, stamp, b"a\n")]
        with log.open("a") as old:
            old.write(f"err F b c\r\nnonsense\n{stamp} stdout F \n")
        (tmp_path / "new").write_text(f"{stamp} stdout P x\n")
        (tmp_path / "new").rename(log)
        assert list(file.read()) == [
            Piece(True, stamp, b"b c\r\n"), Piece(False, stamp, b"\n"), Piece(False, stamp, b"x"),
        ]  # fmt: skip
        assert list(file.read()) == []


def test_what_is_written_right_before_a_log_is_replaced_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer goes on after the reader has come to its end, and replaces it before the reader looks for that."""
    log, stamp = tmp_path / "ctr.log", "2026-11-26T17:13:58.363678401+00:00"
    log.write_text(f"{stamp} stdout F a\n")
    is_replaced = LogFile._is_replaced

    def replaced(file: LogFile) -> bool:
        if not (tmp_path / "was-here").exists():
            (tmp_path / "was-here").touch()
            with log.open("a") as old:
                old.write(f"{stamp} stdout F b\n")
            (tmp_path / "new").write_text(f"{stamp} stdout F c\n")
            (tmp_path / "new").rename(log)
        return is_replaced(file)

    monkeypatch.setattr(LogFile, "_is_replaced", replaced)
    with LogFile(str(log)) as file:
        assert [piece.data for piece in file.read()] == [b"a\n", b"b\n", b"c\n"]
