"""The agent's journal: what it folds to, what a crash at any byte leaves, and that it stays small."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import zlib
from pathlib import Path

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Place, Report, ReportFrame
from moorage.worker.agent import journal as journal_module
from moorage.worker.agent.journal import (
    FORM,
    Journal,
    JournalInUse,
    JournalState,
    JournalUnreadable,
    MemoryJournal,
    is_in_use,
)


def name_of(number: int) -> AttemptName:
    return ("acme", f"job-{number}", 0, 1, 100 + number)


def place_of(number: int) -> Place:
    return Place(*name_of(number), [number % 8], "exclusive", False, b"{}")


def frame(no: int, *reports: Report) -> ReportFrame:
    return ReportFrame("session", no, list(reports))


def seen(state: JournalState) -> tuple[object, ...]:
    return (state.join_n, state.ledger, state.unanswered, sorted(state.places))


def history(journal: MemoryJournal) -> None:
    """A life: joined, two placements, one over and answered, one report still on its way."""
    journal.join(1, [])
    journal.live("ledger-1")
    journal.placed([place_of(1), place_of(2)])
    journal.reports(frame(1, Report("claimed", *name_of(1)), Report("claimed", *name_of(2))))
    journal.answered(1)
    journal.reports(frame(2, Report("exited", *name_of(1), 0, "exit"), Report("freed", *name_of(1))))
    journal.answered(2)
    journal.reports(frame(3, Report("started", *name_of(2))))
    journal.flush()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent.journal"


def test_a_journal_read_again_comes_to_the_same_state(path: Path) -> None:
    journal = Journal(path)
    history(journal)
    written = seen(journal.state)
    journal.close()
    again = Journal(path)
    assert seen(again.state) == written
    assert written == (1, "ledger-1", [Report("started", *name_of(2))], [name_of(2)])
    assert again.torn_bytes == 0
    again.close()


def test_only_its_owner_can_read_it(path: Path) -> None:
    Journal(path).close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_journal_cut_at_any_byte_is_read_up_to_the_last_whole_record(path: Path) -> None:
    journal = Journal(path)
    history(journal)
    journal.close()
    data = path.read_bytes()
    states = []
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        cut = Journal(path)
        states.append(seen(cut.state))
        assert cut.torn_bytes <= length
        # what is written behind the cut is read again
        cut.placed([place_of(7)])
        cut.close()
        again = Journal(path)
        assert name_of(7) in again.state.places
        assert again.torn_bytes == 0
        again.close()
    distinct = [state for number, state in enumerate(states) if number == 0 or state != states[number - 1]]
    assert len(distinct) == 9  # nothing, then what each of the eight records changed
    path.write_bytes(data)


def test_a_flipped_bit_ends_the_journal_there_and_is_counted(path: Path) -> None:
    journal = Journal(path)
    history(journal)
    journal.close()
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)
    again = Journal(path)
    assert again.torn_bytes > 0
    assert again.state.unanswered == []
    again.close()


UNKNOWN_RECORD = FORM.magic + (1).to_bytes(4, "big") + zlib.crc32(b"\x01").to_bytes(4, "big") + b"\x01"


@pytest.mark.parametrize("content", [b"something else\n", b"moorage-agent-journal-9\n", UNKNOWN_RECORD])
def test_what_is_no_journal_of_ours_is_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(JournalUnreadable):
        Journal(path)
    assert path.read_bytes() == content


def test_two_agents_cannot_share_a_journal(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(JournalInUse):
        Journal(path)
    journal.close()
    Journal(path).close()


def test_a_journal_that_was_replaced_is_not_in_place(path: Path) -> None:
    journal = Journal(path)
    assert journal.is_in_place()
    path.rename(path.with_suffix(".moved"))
    assert not journal.is_in_place()
    path.write_bytes(FORM.magic)
    assert not journal.is_in_place(), "another file of that name is no more found by it"
    journal.close()


def test_a_look_at_the_lock_keeps_no_agent_out(path: Path) -> None:
    """`is_in_use` holds a shared lock for a moment; an agent that starts just then waits that moment."""
    Journal(path).close()
    look = os.open(path.with_suffix(".lock"), os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.01, os.close, (look,)).start()
    journal = Journal(path)
    assert is_in_use(path)
    journal.close()
    assert not is_in_use(path)


def test_a_join_takes_over_all_unanswered_reports(path: Path) -> None:
    journal = Journal(path)
    history(journal)
    journal.join(2, [Report("started", *name_of(2)), Report("exited", *name_of(2), 0, "exit")])
    journal.close()
    again = Journal(path)
    assert [report.kind for report in again.state.unanswered] == ["started", "exited"]
    again.live("ledger-1")
    assert again.state.unanswered == []
    again.close()


def test_of_a_place_in_quarantine_those_slots_are_left_and_no_restart_forgets_that(path: Path) -> None:
    one, other = name_of(1), name_of(2)
    journal = Journal(path)
    journal.placed([Place(*one, [0, 1], "exclusive", False, b"{}"), Place(*other, [2, 3], "exclusive", False, b"{}")])
    journal.reports(frame(1, Report("quarantined", *one, 0, "1"), Report("quarantined", *other, 0, "2,3")))
    journal.answered(1)
    journal.close()
    for _ in range(2):  # the second one reads what the first one has replaced the file by
        journal = Journal(path)
        assert {name: place.slots for name, place in journal.state.places.items()} == {one: [1], other: [2, 3]}
        assert journal.state.quarantined == {one, other}
        journal.close()
    journal = Journal(path)
    journal.reports(frame(2, Report("freed", *one)))
    assert (set(journal.state.places), journal.state.quarantined) == ({other}, {other})
    journal.close()


def test_that_an_attempt_had_ended_before_its_quarantine_outlives_replaced_files_and_other_reports(path: Path) -> None:
    """One file has the end, the next one the quarantine: only an attempt without an end may still run."""
    ended, stuck, ran = name_of(1), name_of(2), name_of(3)
    journal = Journal(path)
    journal.placed([place_of(1), place_of(2), place_of(3)])
    ends = Report("exited", *ended, -9, "end"), Report("ran", *ran, 3, "exit")
    journal.reports(frame(1, *ends))
    journal.answered(1)
    journal.close()
    journal = Journal(path)  # it reads the reports, and replaces the file by one without them
    journal.close()
    journal = Journal(path)
    journal.reports(frame(1, *(Report("quarantined", *name, 0, "1") for name in (ended, stuck, ran))))
    journal.answered(1)
    journal.join(2, [])
    journal.close()
    for _ in range(2):
        journal = Journal(path)
        assert journal.state.quarantined == {ended, stuck, ran}
        assert journal.state.ended == dict(zip((ended, ran), ends, strict=True))
        journal.close()
    journal = Journal(path)
    journal.reports(frame(1, Report("freed", *ended)))
    assert set(journal.state.ended) == {ran}
    journal.close()


def test_what_was_freed_from_quarantine_is_remembered_and_of_too_many_the_newest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RELEASED_MAX", 2)
    journal = Journal(path)
    journal.placed([place_of(number) for number in range(4)])
    journal.reports(frame(1, *(Report("quarantined", *name_of(number), 0, "1") for number in (1, 2, 3))))
    journal.reports(frame(2, *(Report("freed", *name_of(number)) for number in range(4))))
    journal.answered(2)
    journal.join(2, [])
    journal.close()
    for _ in range(2):  # the second one reads what the first one has replaced the file by
        journal = Journal(path)
        assert list(journal.state.released) == [name_of(2), name_of(3)]
        journal.close()


def test_it_stays_small_whatever_goes_through(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "FORM", FORM._replace(bytes_max=4096))
    journal = Journal(path)
    journal.join(3, [])
    journal.live("ledger-1")
    journal.placed([place_of(0)])
    biggest = 0
    for no in range(1, 500):
        journal.reports(frame(no, Report("claimed", *name_of(no)), Report("freed", *name_of(no))))
        journal.flush()
        journal.answered(no - 1)
        biggest = max(biggest, path.stat().st_size)
    assert biggest < 2 * 4096
    written = seen(journal.state)
    journal.close()
    again = Journal(path)
    assert seen(again.state) == written
    assert list(again.state.places) == [name_of(0)]
    again.close()
    assert sorted(os.listdir(path.parent)) == ["agent.journal", "agent.lock"]


def test_the_memory_journal_folds_alike() -> None:
    journal = MemoryJournal(join_n=9)
    assert journal.state.join_n == 9
    history(journal)
    assert seen(journal.state) == (1, "ledger-1", [Report("started", *name_of(2))], [name_of(2)])
