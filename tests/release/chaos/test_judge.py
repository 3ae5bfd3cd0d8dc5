"""The judge finds what is planted: one violation at a time in a history that is otherwise clean."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moorage.worker.agent.journal import FORM
from moorage.worker.supervisor.journal import Over, Starting, open_journal
from moorage.worker.supervisor.protocol import JOURNAL_NAME, Ended
from tests.release.chaos.judge import History, Outcome, Planned, judge
from tests.release.chaos.records import AgentJournal, AttemptKey, Hold, Life, Line, SupervisorJournal, lines_in

GPUS = {"w1": ("u0", "u1"), "w2": ("v0", "v1")}


def attempt(job: str, replica: int = 0, attempt: int = 1, fence: int = 10) -> AttemptKey:
    return ("acme", job, replica, attempt, fence)


def ran(history: History, who: AttemptKey, worker: str, slot: int, began_s: float, *, whole: bool = True) -> None:
    """An attempt as all records show it where all goes well: held, run, over, freed."""
    history.holds += [Hold(worker, who, "placed", (slot,)), Hold(worker, who, "claimed")]
    words = ("start", "beat", "end") if whole else ("start", "beat")
    history.lines += [Line(word, who, (GPUS[worker][slot],), began_s + n / 10) for n, word in enumerate(words)]
    history.lives.append(Life(who, worker, began_s, began_s + 0.5))
    history.holds.append(Hold(worker, who, "freed"))


def clean() -> History:
    """A job, one that was repeated after a loss, one that was cancelled, and a gang of two."""
    history = History([], {}, [], [], [])
    history.accepted = [
        Planned("acme", "a"),
        Planned("acme", "b"),
        Planned("acme", "c", may_be_cancelled=True),
        Planned("acme", "g", replicas=2, gang=True),
    ]
    ran(history, attempt("a"), "w1", 0, 1.0)
    ran(history, attempt("b"), "w1", 0, 2.0)
    ran(history, attempt("b", attempt=2, fence=20), "w2", 0, 3.0)
    for rank in (0, 1):
        history.holds += [Hold("w2", attempt("g", rank), "placed", (rank,)), Hold("w2", attempt("g", rank), "claimed")]
    for word in ("start", "end"):
        history.lines += [Line(word, attempt("g", rank), (GPUS["w2"][rank],), 4.0) for rank in (0, 1)]
    history.finals = {
        "acme/a": Outcome("SUCCEEDED", [(5, 0, 1, "SUCCEEDED")]),
        "acme/b": Outcome("SUCCEEDED", [(5, 0, 1, "QUEUED"), (9, 0, 2, "SUCCEEDED")], losses=1),
        "acme/c": Outcome("CANCELLED"),
        "acme/g": Outcome("SUCCEEDED", [(5, 0, 1, "SUCCEEDED"), (5, 1, 1, "SUCCEEDED")]),
    }
    return history


def test_what_is_clean_is_found_clean_and_counted() -> None:
    verdict = judge(clean())
    assert verdict.kept, verdict.found
    assert (verdict.accepted, verdict.succeeded, verdict.cancelled) == (4, 3, 1)
    assert (verdict.losses, verdict.repeated_after_loss, verdict.gangs_started) == (1, 1, 1)


def forgotten(history: History) -> None:
    del history.finals["acme/a"]


def never_over(history: History) -> None:
    history.finals["acme/a"] = Outcome("RUNNING")


def ended_badly(history: History) -> None:
    history.finals["acme/a"] = Outcome("FAILED")


def cancelled_unasked(history: History) -> None:
    history.finals["acme/a"] = Outcome("CANCELLED")


def two_successes(history: History) -> None:
    history.finals["acme/b"] = Outcome("SUCCEEDED", [(5, 0, 1, "SUCCEEDED"), (9, 0, 2, "SUCCEEDED")])


def success_of_one_replica_only(history: History) -> None:
    history.finals["acme/g"] = Outcome("SUCCEEDED", [(5, 0, 1, "SUCCEEDED")])


def success_without_a_run(history: History) -> None:
    history.lines = [line for line in history.lines if line.attempt[1] != "a" or line.word != "end"]


def slot_given_twice(history: History) -> None:
    at = next(n for n, hold in enumerate(history.holds) if hold.word == "freed")
    history.holds.insert(at, Hold("w1", attempt("x"), "placed", (0,)))


def never_freed(history: History) -> None:
    at = next(n for n, hold in enumerate(history.holds) if hold.word == "freed")
    del history.holds[at]


def two_jobs_on_a_device(history: History) -> None:
    history.lines.insert(1, Line("start", attempt("x"), ("u0",), 1.05))


def a_long_holder_between_short_ones(history: History) -> None:
    """One that began first and goes on behind two others: both began on its device."""
    late = attempt("x")
    history.lines.insert(0, Line("start", late, ("u0",), 0.9))
    history.lines.append(Line("beat", late, ("u0",), 9.0))


def two_attempts_by_their_lines(history: History) -> None:
    history.lines.append(Line("beat", attempt("b"), (), 9.0))


def two_attempts_by_their_supervisors(history: History) -> None:
    for at, life in enumerate(history.lives):
        if life.attempt == attempt("b"):
            history.lives[at] = life._replace(ended_s=3.01)


def an_attempt_started_twice(history: History) -> None:
    history.lines.append(Line("start", attempt("a"), (), 9.0))


def a_rank_that_nobody_claimed(history: History) -> None:
    history.holds = [hold for hold in history.holds if hold.attempt != attempt("g", 1) or hold.word != "claimed"]


@pytest.mark.parametrize(
    ("plant", "count"),
    [
        (forgotten, "lost"),
        (never_over, "lost"),
        (ended_badly, "failed"),
        (cancelled_unasked, "failed"),
        (two_successes, "not_one_success"),
        (success_of_one_replica_only, "not_one_success"),
        (success_without_a_run, "not_one_success"),
        (slot_given_twice, "double_leases"),
        (never_freed, "double_leases"),
        (two_jobs_on_a_device, "double_leases"),
        (a_long_holder_between_short_ones, "double_leases"),
        (two_attempts_by_their_lines, "two_live_attempts"),
        (two_attempts_by_their_supervisors, "two_live_attempts"),
        (an_attempt_started_twice, "two_live_attempts"),
        (a_rank_that_nobody_claimed, "half_started_gangs"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_violation_is_found(plant: Callable[[History], None], count: str) -> None:
    history = clean()
    plant(history)
    verdict = judge(history)
    assert not verdict.kept
    assert getattr(verdict, count) > 0, verdict.found
    assert verdict.found


# ------------------------------------------------------------------------------------------------- reading records


def framed(record: list[object]) -> bytes:
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def test_a_supervisors_journal_is_read_where_and_as_supervisors_write_it(tmp_path: Path) -> None:
    who = attempt("a")
    key = f"w1|{who[0]}/{who[1]}/{who[2]}/{who[3]}/{who[4]}"
    starting = Starting(key=key, boot_id="b", boottime_s=1.0, cgroup="", marks=())
    over = Over(ended=Ended(key=key, reason="exit", proof="walk", ended_boottime_s=2.5))
    open_journal(tmp_path / JOURNAL_NAME, [starting, over]).close()
    journal = SupervisorJournal("w1", tmp_path / JOURNAL_NAME)
    journal.read()
    journal.close()
    assert list(journal.lives.values()) == [Life(who, "w1", 1.0, 2.5)]


def placed(job: str) -> bytes:
    return framed(["placed", [["acme", job, 0, 1, 10, [0, 1], "exclusive", False, b"{}"]]])


def test_a_journal_is_followed_through_its_replacement_and_a_cut_tail(tmp_path: Path) -> None:
    file = tmp_path / "w1.journal"
    journal = AgentJournal("w1", file)
    assert list(journal.read()) == []
    file.write_bytes(FORM.magic + placed("a") + placed("b")[:7])  # the second is still being written, and never will be
    assert [hold.attempt[1] for hold in journal.read()] == ["a"]
    with file.open("r+b") as opened:
        opened.truncate(len(FORM.magic + placed("a")))
    assert list(journal.read()) == []
    with file.open("ab") as opened:
        opened.write(framed(["facts", 1, [["freed", *attempt("a")]]]))
    new = tmp_path / "new"
    new.write_bytes(FORM.magic + placed("c"))
    new.replace(file)  # before anybody read what the old one said last
    assert [(hold.attempt[1], hold.word) for hold in journal.read()] == [("a", "freed"), ("c", "placed")]
    journal.close()


def test_a_torn_or_foreign_line_is_told(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("start acme a 0 1 10 u0,u1 12.5\n")
    assert lines_in(file) == [Line("start", attempt("a"), ("u0", "u1"), 12.5)]
    file.write_text("start acme a 0 1\n")
    with pytest.raises(ValueError, match="no line of a job"):
        lines_in(file)
