"""The inbox of a caller whose server has permissions: found, named, or told to be missing, by the SDK, the command, the
doctor and the member's log."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest

from moorage.bus.embedded import find_binary
from moorage.client import AsyncClient, BadContext, NotPermitted, TimedOut
from tests.ports import free_ports
from tests.system.cli.node import environment
from tests.system.cli.node import moorage as command
from tests.system.services.members import member
from tests.waiting import until

#: `shop` has all rights; `own` an inbox of the tenant's role alone, and `odd` one that no member may answer
USERS = """\
listen: "127.0.0.1:%d"
accounts { A { users: [
  { user: shop, password: shop }
  { user: member, password: member, permissions: {
    publish: ["moorage.call.>", "moorage.calls.>", "_INBOX.submitter.default.>"], subscribe: ["moorage.>"] } }
  { user: own, password: own, permissions: { publish: ["moorage.>"], subscribe: ["_INBOX.submitter.default.>"] } }
  { user: odd, password: odd, permissions: { publish: ["moorage.>"], subscribe: ["_INBOX.odd.>"] } }
] } }
"""


@contextlib.asynccontextmanager
async def site(folder: Path) -> AsyncIterator[int]:
    [port] = free_ports(1)
    (folder / "nats.conf").write_text(USERS % port)
    server = await asyncio.create_subprocess_exec(find_binary(), "-c", str(folder / "nats.conf"), stderr=PIPE)
    try:
        yield port
    finally:
        server.terminate()
        await server.communicate()


def at(user: str, port: int) -> str:
    return f"nats://{user}:{user}@127.0.0.1:{port}"


async def test_who_logs_in_by_url_is_answered_where_members_may_answer(tmp_path: Path) -> None:
    """The call ran, and the server dropped its answer: the caller was told to wait longer."""
    async with site(tmp_path) as port, member(at("member", port), tmp_path, "functions:echo", "--name", "echo") as one:
        await one.ready()
        for user in ("shop", "own"):
            async with AsyncClient(at(user, port), timeout=10) as moorage:
                assert await moorage.call("echo", user) == user
        words = ("call", "echo", "hello", "--nats", at("shop", port), "--within", "10s")
        ran = await command(*words, env=environment())
        assert (ran.code, ran.out.strip(), ran.err) == (0, "hello", "")


async def test_an_answer_that_the_server_refuses_is_told_where_it_is_missed(tmp_path: Path) -> None:
    async with site(tmp_path) as port, member(at("member", port), tmp_path, "functions:echo", "--name", "echo") as one:
        await one.ready()
        async with AsyncClient(at("odd", port), inbox_prefix="_INBOX.odd", timeout=4) as moorage:
            with pytest.raises(TimedOut) as told:
                await moorage.call("echo", "x")
        assert "the server takes no message of it to your inbox _INBOX.odd." in str(told.value)
        assert "permission for _INBOX.odd.>" in str(told.value)
        assert "as _INBOX.submitter.default: --inbox-prefix" in told.value.problem.next
        words = ("call", "echo", "x", "--within", "4s", "--nats", at("odd", port), "--inbox-prefix", "_INBOX.odd")
        ran = await command(*words, env=environment())
        assert "takes no message of it to your inbox" in ran.err
        assert "_INBOX.submitter.default" in ran.err
        bare = await nats.connect(at("shop", port))
        await bare.publish("moorage.call.default.echo", b"x", reply="_INBOX.MiXed.1")
        await until(lambda: "publish to _INBOX.MiXed.1" in one.said, what=one.said)
        assert "as _INBOX.submitter.TENANT" in one.said
        await bare.close()


async def test_who_may_have_no_inbox_is_told_both_that_were_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path) as port:
        with pytest.raises(NotPermitted) as told:
            async with AsyncClient(at("odd", port)):
                pass
        assert "refuses _INBOX.> and _INBOX.submitter.default.>" in str(told.value)
        assert "MOORAGE_INBOX_PREFIX" in told.value.problem.next
        monkeypatch.setenv("MOORAGE_INBOX_PREFIX", "_INBOX.odd")
        async with AsyncClient(at("odd", port)) as moorage:
            assert moorage._wire.link.inbox_prefix == "_INBOX.odd"
        async with AsyncClient(at("own", port), inbox_prefix="_INBOX.submitter.default") as moorage:
            assert moorage._wire.link.inbox_prefix == "_INBOX.submitter.default"
        for wrong in ("_INBOX.odd.>", "_INBOX.odd.", "a b", ""):
            with pytest.raises(BadContext, match="inbox prefix"):
                AsyncClient(at("own", port), inbox_prefix=wrong)
