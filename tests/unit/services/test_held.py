"""The file of a member's calls: what it keeps of them, and what a job that writes it can make others say."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.calls.held import HeldCalls
from moorage.schemas.held_calls import (
    MAGIC,
    REPLY_BYTES_MAX,
    RUNS,
    SLOT_BYTES,
    WAITS,
    HeldCall,
    Holder,
    file_bytes,
    held_in,
    most_held,
)
from moorage.schemas.service import BatchSpec, QueueSpec

MOST = 4


def opened(path: Path) -> tuple[HeldCalls, set[HeldCall]]:
    held = HeldCalls()
    return held, set(held.open(path, MOST, "moorage", "acme", Holder("echo", "0123456789abcdef")))


def left(path: Path) -> set[HeldCall]:
    return set(held_in(path.read_bytes(), MOST, "moorage", "acme"))


def slot(state: int, reply: bytes, size: int | None = None) -> bytes:
    return (bytes([state, len(reply) if size is None else size]) + reply).ljust(SLOT_BYTES, b"\0")


async def test_what_a_member_holds_when_it_is_killed_is_in_the_file_and_the_next_one_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    held, _ = opened(path)
    held.waits("_INBOX.a.1")
    held.waits("_INBOX.a.2")
    held.runs("_INBOX.a.2")
    held.runs("_INBOX.a.3")
    held.over("_INBOX.a.3")
    held.runs("_INBOX.a.4")
    held.answered("_INBOX.a.4")
    assert left(path) == {
        HeldCall("_INBOX.a.1", False),
        HeldCall("_INBOX.a.2", True),
        HeldCall("_INBOX.a.4", True),  # its answer may not have left the process
    }
    held.runs("_INBOX.a.4")  # its caller calls again with the same subject
    held._let_all_go()
    assert HeldCall("_INBOX.a.4", True) in left(path)
    for reply in ("_INBOX.a.5", "_INBOX.a.6"):
        held.waits(reply)
    assert len(left(path)) == MOST
    before = left(path)
    held.close()
    assert path.exists(), "calls are left in it"
    again, found = opened(path)
    assert found == before
    assert left(path) == set()
    again.close()
    assert not path.exists()


async def test_a_living_members_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "calls"
    first, _ = opened(path)
    first.runs("_INBOX.a.1")
    second, found = opened(path)
    assert found == set()
    assert str(path) in caplog.text
    second.runs("_INBOX.a.2")
    second.close()
    assert left(path) == {HeldCall("_INBOX.a.1", True)}
    first.over("_INBOX.a.1")
    first.close()
    link = tmp_path / "link"
    link.symlink_to(path)
    third, _ = opened(link)
    third.runs("_INBOX.a.1")
    third.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "reply",
    [
        b"moorage.call.acme.embed",
        b"moorage.worker.w1.place",
        b"$JS.API.STREAM.DELETE.x",
        b"$SYS.REQ.SERVER.PING",
        b"_INBOX.submitter.beta.x",
        b"_INBOX.worker.w1.x",
        b"_INBOX.scheduler.s1.x",
        b"_INBOX.x y",
        b"_INBOX.x\r\nPUB a 0\r\n",
        b"_INBOX.*",
        b"_INBOX.>",
        b"_INBOX..x",
        b"_INBOX.\xff",
        b"_INBOX.\xc3\xa9",
        b"x" * (REPLY_BYTES_MAX + 1),
    ],
)
def test_a_hostile_file_makes_nobody_speak_where_its_tenants_callers_do_not_listen(reply: bytes) -> None:
    good = slot(WAITS, b"_INBOX.submitter.acme.1")
    bad = b"".join(slot(state, reply[: SLOT_BYTES - 2], min(255, len(reply))) for state in (WAITS, RUNS, 7))
    found = list(held_in(MAGIC + bad + good, MOST, "moorage", "acme"))
    assert found == [HeldCall("_INBOX.submitter.acme.1", False)]


def test_a_file_counts_for_so_many_calls_and_each_subject_once() -> None:
    many = b"".join(slot(RUNS, b"_INBOX.a.%d" % at) for at in range(100))
    assert len(list(held_in(MAGIC + many, MOST, "moorage", "acme"))) == MOST
    twice = slot(RUNS, b"_INBOX.a.1") + slot(WAITS, b"_INBOX.a.1")
    assert list(held_in(MAGIC + twice, MOST, "moorage", "acme")) == [HeldCall("_INBOX.a.1", True)]
    assert list(held_in(many, MOST, "moorage", "acme")) == [], "it is no such file"
    assert list(held_in(MAGIC + many[: SLOT_BYTES - 1], MOST, "moorage", "acme")) == []
    assert list(held_in(MAGIC + slot(RUNS, b"_INBOX.a.1", 0), MOST, "moorage", "acme")) == []


def test_the_file_has_room_for_all_that_may_run_and_wait() -> None:
    assert most_held(1) == 258
    assert most_held(4, BatchSpec(32)) == 2 * 128 + 256
    assert most_held(8, None, QueueSpec(0)) == 16
    assert file_bytes(most_held(8, None, QueueSpec(10_000))) < 3_000_000
