"""The calls of ended members: who is told, by which key, and what a hostile file does not do."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.bus.transport import Delivery
from moorage.schemas.held_calls import FREE, HELD_FILE, IS_MEMBER, MAGIC, RUNS, SLOT_BYTES, WAITS, file_bytes
from moorage.worker.attempt.call_keys import CallKeys
from moorage.worker.attempt.orphaned_calls import OrphanedCalls
from tests.sites import settled
from tests.waiting import until

MOST = 8


def slot(state: int, reply: str) -> bytes:
    return (bytes([state, len(reply)]) + reply.encode()).ljust(SLOT_BYTES, b"\0")


async def test_what_ran_is_told_as_died_and_what_waited_as_busy(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with await connect(nats_url, "caller") as caller:
        heard: dict[str, Delivery] = {}
        await caller.subscribe(f"_INBOX.{unique}.>", lambda each: heard.update({each.subject[-1]: each}))
        orphans = OrphanedCalls(CallKeys(caller.context, unique, None))
        path = tmp_path / HELD_FILE
        path.write_bytes(MAGIC + slot(RUNS, f"_INBOX.{unique}.1") + slot(WAITS, f"_INBOX.{unique}.2"))
        orphans.answer("acme", str(tmp_path), MOST)
        await orphans.close()
        await settled(caller)
        errors = {key: (each.headers or {})["Nats-Service-Error-Code"] for key, each in heard.items()}
        assert errors == {"1": "502", "2": "503"}
        told = {key: msgspec.json.decode(each.data) for key, each in heard.items()}
        assert (told["1"]["error"], told["1"]["started"]) == ("member-died", True)
        assert (told["2"]["error"], told["2"]["started"]) == ("busy", False)
        assert not path.exists()


def left_by(holder: str, *replies: str) -> bytes:
    """The file of a member that holds none of these calls any more."""
    slots = [slot(FREE, reply) for reply in replies] + [slot(FREE, "")] * (MOST - len(replies))
    return MAGIC + b"".join(slots) + slot(IS_MEMBER, holder)


async def test_whose_calls_a_member_may_have_taken_along_is_told_and_who_asks_hears_that_it_has_ended(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with await connect(nats_url, "caller") as caller:
        told: list[str] = []
        for subject in (f"_INBOX.{unique}.>", f"{unique}.other.>", "_INBOX.submitter.beta.>"):
            await caller.subscribe(subject, lambda each: told.append(f"{each.subject} {each.data.decode()}"))
        orphans = OrphanedCalls(CallKeys(caller.context, unique, None))
        held = left_by("echo 0123456789abcdef", f"_INBOX.{unique}.7", f"_INBOX.{unique}.8", f"_INBOX.{unique}.a.nuid",
                       f"{unique}.other.1", "_INBOX.submitter.beta.x.1")  # fmt: skip
        (tmp_path / HELD_FILE).write_bytes(held)
        orphans.answer("acme", str(tmp_path), MOST)
        word = f"_INBOX.{unique}.ended {unique}.call.acme.echo"
        await until(lambda: told == [word], what="an SDK is told, and no other client or tenant")

        async def asked(body: bytes, reply: str = f"_INBOX.{unique}.9") -> None:
            await caller.send([(f"{unique}.call.acme.echo.ASK", body, reply)])

        await asked(b'{"calls":[]}')
        await asked(b"no JSON")
        await asked(b'{"calls":["x"]}', f"{unique}.ledger")
        await asked(b'{"calls":["x"]}')
        said = f'_INBOX.{unique}.9 {{"member":"0123456789abcdef","ended":true}}'
        await until(lambda: len(told) > 1, what="it is said that the member has ended")
        await orphans.close()
        await settled(caller)
        assert told == [word, said]


@pytest.mark.parametrize("holder", ["", "echo", "Echo 0123456789abcdef", "echo 0123", "echo.x 0123456789abcdef", "* x"])
async def test_a_member_that_names_itself_as_none_is_not_spoken_of(holder: str, tmp_path: Path) -> None:
    (tmp_path / HELD_FILE).write_bytes(left_by(holder, "_INBOX.a.1"))
    orphans = OrphanedCalls(CallKeys(Context(url="nats://127.0.0.1:1"), "moorage", None))
    orphans.answer("acme", str(tmp_path), MOST)
    assert not orphans._tasks


@pytest.mark.parametrize("kind", ["none", "folder", "fifo", "link", "endless", "empty", "unreadable"])
async def test_a_file_that_is_none_is_dropped(kind: str, tmp_path: Path) -> None:
    path, elsewhere = tmp_path / HELD_FILE, tmp_path / "elsewhere"
    elsewhere.write_bytes(MAGIC + slot(RUNS, "_INBOX.x"))
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(file_bytes(MOST) + (1 << 40))
    elif kind == "empty":
        path.touch()
    elif kind == "unreadable":
        path.write_bytes(b"\xff" * 10_000)
    orphans = OrphanedCalls(CallKeys(Context(url="nats://127.0.0.1:1"), "moorage", None))
    orphans.answer("acme", str(tmp_path), MOST)
    assert not orphans._tasks, "nobody is told anything"
    await orphans.close()
    assert elsewhere.exists()
