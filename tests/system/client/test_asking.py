"""Asking again: with the same id, until a deadline, and then a typed error that says how to go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.client import (
    AsyncClient,
    BadContext,
    BatchRejected,
    Client,
    ClientError,
    Conflict,
    NoScheduler,
    NotFound,
    NotPermitted,
    QueueFull,
    Rejected,
    Unreachable,
)
from moorage.schemas.errors import problem
from moorage.schemas.frames import Accepted, Answer
from tests.system.cli.node import moorage
from tests.unit.client.scripted_scheduler import ScriptedScheduler
from tests.waiting import until


@pytest.mark.slow
async def test_a_request_waits_for_a_scheduler_and_keeps_its_id(nats_url: str, unique: str) -> None:
    waits = []
    # before it subscribes: a request that found no answer would be one more
    scheduler = ScriptedScheduler(nats_url, unique)
    scheduler.will("submit", problem("not-leading", "not me"), None, Accepted("x", 5, "QUEUED"))
    async with AsyncClient(nats_url, tenant=unique, on_wait=lambda: waits.append(1)) as client:
        submitting = asyncio.create_task(client.submit(["x"]))
        await until(lambda: waits, what="asked again")
        async with scheduler:
            job = await submitting
            assert job.accepted == Accepted("x", 5, "QUEUED")
            assert len({body["job"] for _, body in scheduler.asked}) == 1
            assert len(scheduler.asked) == 3


async def test_a_submit_that_is_cancelled_is_awaited_no_more(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("submit", None)
        submitting = asyncio.create_task(client.submit(["x"]))
        await until(lambda: scheduler.asked, what="it was sent")
        mux: Any = client._wire._mux
        assert mux.waiting == 1
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert mux.waiting == 0


async def test_a_submit_while_the_connection_is_lost_waits_for_it(fresh_server: EmbeddedServer, unique: str) -> None:
    async with AsyncClient(fresh_server.url, tenant=unique, timeout="60s") as client:
        await fresh_server.kill()
        await until(lambda: not client._wire.link.is_connected)
        submitting = asyncio.create_task(client.submit(["x"], job="x"))
        await asyncio.sleep(0)
        again = await EmbeddedServer.start(fresh_server.data_dir, port=fresh_server.port)
        try:
            async with ScriptedScheduler(again.url, unique) as scheduler:
                scheduler.will("submit", Accepted("x", 5, "QUEUED"))
                assert (await submitting).accepted == Accepted("x", 5, "QUEUED")
        finally:
            await again.stop()


@pytest.mark.slow
async def test_a_submit_with_a_key_that_was_revoked_is_refused_after_one_try(
    fresh_data_dir: Path, fresh_server: EmbeddedServer
) -> None:
    """It was tried for 45 s, and a key that is refused is taken again only if somebody changes the server."""
    waits = []
    async with AsyncClient(fresh_server.ledger_url, timeout="10m", on_wait=lambda: waits.append(1)) as client:
        await fresh_server.kill()
        (fresh_data_dir / "ledger-password").write_text("other")
        again = await EmbeddedServer.start(fresh_data_dir, port=fresh_server.port)
        try:
            await until(lambda: client._wire.put_off, what="its key is refused")
            with pytest.raises(NotPermitted, match="refused these credentials") as refused:
                await client.submit(["x"])
            assert refused.value.code == "not-authorized"
            assert len(waits) == 1
        finally:
            await again.stop()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("conflict", Conflict),
        ("queue-full", QueueFull),
        ("not-found", NotFound),
        ("failed-precondition", Rejected),
        ("no-match", Rejected),
    ],
)
async def test_a_refusal_is_typed_and_not_repeated(
    nats_url: str, unique: str, code: str, kind: type[ClientError]
) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("submit", problem(code, "because", job="x", next="do so", retry_after_s=2.5))
        with pytest.raises(kind) as refused:
            await client.submit(["x"])
        error = refused.value
        assert (error.code, error.why, error.fixes, error.job) == (code, "because", ("do so",), "x")
        if isinstance(error, QueueFull):
            assert error.retry_after_s == 2.5
        assert len(scheduler.asked) == 1


async def test_a_word_that_is_no_gpu_is_refused_before_anything_is_sent(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        for ask in (
            client.submit(["x"], gpu="lots"),
            client.submit_many([["x"]], gpu="lots"),
            client.run(["x"], gpu="lots"),
            client.plan(["x"], gpu="lots"),
            client.submit_handler("h", 1, gpu="lots"),
        ):
            with pytest.raises(
                Rejected, match="'lots' is neither a count nor a model with a number in its name"
            ) as told:
                await ask
            assert (told.value.code, told.value.problem.field) == ("invalid-argument", "$.gpu")
            assert (told.value.problem.found, told.value.problem.allowed) == ("lots", "a count, a model or both")
            assert "with a count any model may be named" in told.value.fixes[0]
        assert scheduler.asked == []


async def test_of_many_requests_the_malformed_ones_are_named_and_the_others_go_on(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("submit", [Accepted("a", 9, "ACCEPTED"), Accepted("b", 9, "ACCEPTED")])
        many: list[Any] = [["x"], {"run": {"argv": []}}, ["y"], {"run": {"argv": ["x"]}, "rum": 1}, None]
        with pytest.raises(BatchRejected, match=r"3 of 5 requests refused, the first at index 1: .*argv") as told:
            await client.submit_many(many)
        error = told.value
        fields = {at: problem.field for at, problem in error.problems.items()}
        assert fields == {1: "$[1].run.argv", 3: "$[3].rum", 4: "$[4].run.argv"}
        assert error.problem.field == fields[1]
        assert "a command is a list of words, not NoneType" in error.problems[4].message
        assert [at for at, job in enumerate(error.jobs) if job is not None] == [0, 2]
        sent = [request["run"]["argv"] for _, frame in scheduler.asked for request in frame]
        assert sent == [["x"], ["y"]]


async def test_a_field_that_is_given_for_all_requests_is_refused_before_any_is_sent(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        with pytest.raises(Rejected) as told:
            await client.submit_many([["x"], ["x"]], priority=101)
        assert (type(told.value), told.value.problem.field) == (Rejected, "$.priority")
        assert scheduler.asked == []


async def test_jobs_to_wait_for_are_handles(nats_url: str, unique: str) -> None:
    async with AsyncClient(nats_url, tenant=unique) as client:
        for ask in (client.wait(["train-42"]), client.gather("train-42")):  # type: ignore[list-item, arg-type]
            with pytest.raises(TypeError, match=r"'train-42' is no AsyncJob: .* job\('train-42'\)"):
                await ask
        job = client.job("train-42")
        with pytest.raises(TypeError, match=r"a list is no AsyncJob: gather takes jobs as arguments, gather\(\*jobs\)"):
            await client.gather([job])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"alone, use job\.result\(\)"):
            await client.wait(job)  # type: ignore[arg-type]

    def waits() -> None:
        with Client(nats_url, tenant=unique) as client:
            ids: list[Any] = ["train-42"]
            for wait in (client.wait, lambda jobs: client.gather(*jobs), lambda jobs: list(client.as_completed(jobs))):
                with pytest.raises(TypeError, match="'train-42' is no Job"):
                    wait(ids)

    await asyncio.to_thread(waits)


async def test_a_context_that_cannot_be_used_is_one_of_the_errors_of_the_client() -> None:
    with pytest.raises(BadContext, match="there is no context 'no-such-context'") as told:
        await AsyncClient("no-such-context").open()
    assert isinstance(told.value, ClientError)
    assert (told.value.code, bool(told.value.why)) == ("bad-context", True)


async def test_no_scheduler_is_told_after_the_deadline(nats_url: str, unique: str) -> None:
    async with AsyncClient(nats_url, tenant=unique, timeout="300ms") as client:
        with pytest.raises(NoScheduler) as none:
            await client.ls()
        assert none.value.code == "no-scheduler"
        assert any("moorage scheduler" in fix for fix in none.value.fixes)


async def test_a_scheduler_that_says_nothing_is_told_after_the_deadline(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler:
        scheduler.will("ls", None)
        async with AsyncClient(nats_url, tenant=unique, timeout="300ms") as client:
            with pytest.raises(NoScheduler):
                await client.ls()


async def test_what_a_leader_said_last_is_told_though_the_last_try_heard_nothing(nats_url: str, unique: str) -> None:
    async with ScriptedScheduler(nats_url, unique) as scheduler:
        scheduler.will("ls", problem("not-leading", "the ledger is stuck", next="look at it"), None)
        async with AsyncClient(nats_url, tenant=unique, timeout="500ms") as client:
            with pytest.raises(NoScheduler, match=r"the ledger is stuck; asked at .* for 0\.5 s") as told:
                await client.ls()
            assert (told.value.code, told.value.fixes) == ("not-leading", ("look at it",))


async def test_the_command_says_what_a_scheduler_answered_while_it_asks_again(nats_url: str, unique: str) -> None:
    overloaded = problem("overloaded", "too many questions")
    rows = Answer("ls", 9, {"jobs": [], "counts": {}})
    async with ScriptedScheduler(nats_url, unique) as scheduler:
        scheduler.will("ls", overloaded, overloaded, problem("behind", "the history lacks the end"), rows)
        ran = await moorage("ls", "--nats", nats_url, "--tenant", unique, "--timeout", "20s", "--json")
    assert (ran.code, len(scheduler.asked)) == (0, 4), ran.err
    assert ran.err == (
        "not now, overloaded: too many questions; this command asks again for up to 20s\n"
        "not now, behind: the history lacks the end; this command asks again for up to 20s\n"
    )


async def test_no_server_is_told_without_secrets() -> None:
    with pytest.raises(Unreachable) as none:
        async with AsyncClient("nats://someone:hunter2@127.0.0.1:1", connect_timeout="200ms"):
            pass
    assert none.value.code == "cannot-connect"
    assert "hunter2" not in none.value.why + "".join(none.value.fixes)
    assert none.value.fixes
