"""Output of the past over the real server, from real processes: every byte once, to its tenant alone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.client import AsyncClient, JobFailed, NoOutput, NotFound
from moorage.client.output import Piece
from moorage.schemas.codec import encode
from moorage.schemas.errors import CODES
from moorage.schemas.frames import LOG_PAGE_BYTES_MAX, ReadLog
from tests.system.live.stack import ANSWER_S, BRIEF, QUICK, Caller, Stack, caller, stack
from tests.waiting import until

PAGE = LOG_PAGE_BYTES_MAX


def raw(page: dict[str, Any]) -> bytes:
    return base64.b64decode(page["data"]) if "data" in page else page.get("text", "").encode()


async def whole(one: Caller, job: str, stream: str = "out", limit: int = PAGE, **more: Any) -> bytes:
    """Every page of a stream, as a client in any language reads them."""
    at, got = 0, b""

    async def asked() -> dict[str, Any] | None:
        body = {"job": job, "stream": stream, "offset": at, "limit": limit, **more}
        answer = await one.api("logs", body)
        return None if answer.get("code") == "worker-lost" else dict(answer)  # a slow one has two seconds

    while True:
        answer = await until(asked, ANSWER_S, f"a page of {job}")
        assert answer["kind"] == "answer", answer
        page = answer["data"]
        assert len(raw(page)) <= limit
        got, at = got + raw(page), page.get("next", 0)
        if page.get("over"):
            return got


def client_of(made: Stack, tenant: str = "acme") -> AsyncClient:
    return AsyncClient(made.url, tenant=tenant, prefix=made.subjects.prefix, timeout=ANSWER_S)


async def joined(pieces: AsyncIterator[Piece]) -> dict[str, bytes]:
    """What the pieces are together; each must begin where the one before ended."""
    got: dict[str, bytes] = {"out": b"", "err": b""}
    async for piece in pieces:
        assert piece.offset == len(got[piece.stream]), "a gap or a double"
        got[piece.stream] += piece.text.encode() if piece.data is None else piece.data
        assert piece.behind == len(got[piece.stream])
    return got


@pytest.mark.slow
async def test_a_finished_jobs_output_is_there_in_pages(nats_server: EmbeddedServer, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one:
        await made.scheduler()
        await made.agent("w", "4xH100", worker="w1")
        await one.workers_up("w1")
        script = "head -c 3145728 /dev/urandom | tee /dev/stderr | md5sum"
        await one.submit("binary", "sh", "-c", script)
        await one.submit("text", "sh", "-c", "seq 1 40000; echo problem >&2; exit 3")
        await one.submit("silent", "true")
        await one.submit("waits", "true", gpu={"model": "H999"})
        await one.reaches("binary", "SUCCEEDED")
        await one.reaches("text", "FAILED")
        await one.reaches("silent", "SUCCEEDED")

        said = await whole(one, "binary", "err")
        assert len(said) == 3 * 1024 * 1024
        assert (await whole(one, "binary")).split()[0].decode() == hashlib.md5(said).hexdigest()
        numbers = "".join(f"{number}\n" for number in range(1, 40001)).encode()
        for limit in (PAGE, 4097, 65536):
            assert await whole(one, "text", limit=limit) == numbers
        assert await whole(one, "text", "err") == b"problem\n"
        assert await whole(one, "silent") == b""
        page = (await one.api("logs", {"job": "text", "offset": -12}))["data"]
        assert (page["text"], page["worker"], page["attempt"]) == ("39999\n40000\n", "w1", 1)
        # one that was never placed has said nothing, and may yet
        assert (await one.api("logs", {"job": "waits"}))["data"] == {
            "kind": "log-page",
            "attempt": 0,
            "stream": "out",
        }

        async with client_of(made) as client:
            assert await joined(client.job("binary").logs()) == {"out": await whole(one, "binary"), "err": said}
            assert (await joined(client.job("text").logs(follow=False)))["out"] == numbers
            tail = [piece.text async for piece in client.job("text").logs(tail=2)]
            assert tail == ["39999\n40000\n", "problem\n"]
            with pytest.raises(JobFailed) as failed:  # long over: nothing of it was heard here
                await client.job("text").result()
            assert failed.value.log_tail.splitlines()[-2:] == ["40000", "problem"]
            shown = await client.job("text").show()
            assert shown.kept is not None
            assert shown.kept.output_ms["w1"] == pytest.approx(shown.kept.job_ms, abs=60_000)


@pytest.mark.slow
async def test_following_begins_at_the_beginning_without_gap_or_double(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one, client_of(made) as client:
        await made.scheduler()
        await made.agent("w", "4xH100", worker="w1")
        await one.workers_up("w1")
        go = tmp_path / "go"
        wait = f"while [ ! -e {go} ]; do sleep 0.02; done"
        script = f"seq 1 30000; {wait}; seq 30001 60000; printf 'caf\\303'; sleep 0.1; printf '\\251'"
        await one.submit("j", "sh", "-c", script)
        await one.reaches("j", "RUNNING")

        async def has_said() -> bool:
            page = (await one.api("logs", {"job": "j", "offset": -6}))["data"]
            return bool(page.get("text") == "30000\n" and not page.get("over"))

        await until(has_said, ANSWER_S, "the first half is written")
        following = [asyncio.create_task(joined(client.job("j").logs())) for _ in range(3)]
        first = client.job("j").logs(tail=1)
        assert (await anext(first)).text == "30000\n"
        go.touch()
        wanted = "".join(f"{number}\n" for number in range(1, 60001)).encode() + "café".encode()
        for each in await asyncio.gather(*following):
            assert each["out"] == wanted
        rest = "".join([piece.text async for piece in first])
        assert rest == wanted.decode()[wanted.decode().index("30001") :]


@pytest.mark.slow
async def test_the_output_of_a_rank_that_waits_for_its_gang_is_not_over(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one:
        await made.scheduler()
        await made.agent("a", "1xH100", worker="w1")
        other = await made.agent("b", "1xH100", worker="w2")
        await one.workers_up("w1", "w2")
        other.stop()
        await one.submit("gang", "sh", "-c", "echo rank $RANK", replicas=2, gpu={"scheduling": "gang"})

        async def waits() -> list[int]:
            rows = (await one.show("gang"))["replica_states"]
            return [row["replica"] for row in rows if row["state"] == "CLAIMED"]

        [rank] = await until(waits, ANSWER_S, "a rank is claimed")
        page = (await one.api("logs", {"job": "gang", "replica": rank}))["data"]
        assert (page["attempt"], page.get("over", False)) == (1, False)
        other.wake()
        await one.reaches("gang", "SUCCEEDED")
        assert await whole(one, "gang", replica=rank) == f"rank {rank}\n".encode()


@pytest.mark.slow
async def test_the_output_of_a_job_that_left_memory_is_found_by_its_history(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one:
        await made.scheduler(config={**QUICK, "ended_max": 0})
        await made.agent("w", "1xH100", worker="w1")
        await one.workers_up("w1")
        await one.submit("said", "sh", "-c", "echo hello; echo why >&2")
        await one.submit("large", "sh", "-c", "echo large", "y" * 3000)

        async def is_compacted(job: str) -> bool:
            return bool((await one.api("show", {"job": job}))["data"].get("compacted"))

        for job in ("said", "large"):
            await until(lambda job=job: is_compacted(job), ANSWER_S, f"{job} leaves memory")
        assert (await whole(one, "said"), await whole(one, "said", "err")) == (b"hello\n", b"why\n")
        assert await whole(one, "large") == b"large\n"  # its request was too large to be kept: the worker finds it
        assert (await one.api("logs", {"job": "said", "attempt": 2}))["code"] == "not-found"
        assert (await one.api("logs", {"job": "said", "replica": 1}))["code"] == "invalid-argument"
        async with client_of(made) as client:
            assert await joined(client.job("said").logs()) == {"out": b"hello\n", "err": b"why\n"}


@pytest.mark.slow
async def test_nobody_reads_the_output_of_another_tenant_nor_output_or_a_file_without_the_workers_session(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one, caller(made, "other") as other:
        await made.scheduler()
        agent = await made.agent("w", "4xH100", worker="w1")
        await one.workers_up("w1")
        await one.submit("j", "echo", "mine")
        await other.submit("k", "echo", "theirs")
        await one.reaches("j", "SUCCEEDED")
        await other.reaches("k", "SUCCEEDED")
        assert await whole(one, "j") == b"mine\n"
        for body in ({"job": "j"}, {"job": "j", "tenant": "acme"}, {"job": "acme/j"}):
            answer = await other.api("logs", body)
            assert answer["kind"] == "error", body
            assert answer["code"] in ("not-found", "invalid-argument")
        assert await whole(other, "k") == b"theirs\n"
        # the same id is another job
        await other.submit("j", "echo", "another")
        await other.reaches("j", "SUCCEEDED")
        assert await whole(other, "j") == b"another\n"
        assert await whole(one, "j") == b"mine\n"
        async with client_of(made, "other") as client:
            with pytest.raises(NotFound):
                [piece async for piece in client.job("nothing").logs()]
        fence = (await one.show("j"))["replica_states"][0]["fence"]
        question = ReadLog("5e55" * 8, "acme", "j", 0, 1, fence, "process", "out", 0, 100)
        subject = made.subjects.worker("w1", "logs")
        async with await connect(made.url, "intruder") as intruder:
            for payload in (
                encode(question),
                encode(question, json=False),
                b"",
                b"\xc1",
                b'{"kind":"read-log"}',
                encode({"kind": "read-log", "session": "", "tenant": "../..", "job": "/etc/passwd"}),
            ):
                answer = await intruder.request(subject, payload, ANSWER_S)
                assert b"mine" not in answer.data
                assert any(code.encode() in answer.data for code in ("session-over", "invalid-argument")), answer.data
        assert await whole(one, "j") == b"mine\n"
        assert agent.process.returncode is None


@pytest.mark.slow
async def test_a_worker_that_is_away_is_named_and_its_output_is_there_when_it_is_back(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one, client_of(made) as client:
        await made.scheduler(config=BRIEF | {"lease_s": 10.0})  # it is asked before the worker counts as lost
        agent = await made.agent("w", "4xH100", worker="w1")
        await one.workers_up("w1")
        await one.submit("j", "echo", "hello")
        await one.reaches("j", "SUCCEEDED")
        await agent.kill()
        answer = await one.api("logs", {"job": "j"})
        assert (answer["code"], answer["found"], answer["fault"]) == ("worker-lost", "w1", CODES["worker-lost"][0])
        assert "w1, which does not answer now" in answer["message"]

        async def lost() -> str:
            return str((await one.api("logs", {"job": "j"}))["message"])

        async def is_lost() -> bool:
            return "w1, which was lost " in await lost()

        await until(is_lost, 90, "the worker is lost")
        with pytest.raises(NoOutput) as gone:
            [piece async for piece in client.job("j").logs()]
        assert gone.value.code == "worker-lost"
        # a stopped one answers nothing, and the leader waits for it no longer than its bound
        again = await made.agent("w", "4xH100", worker="w1")

        async def is_back() -> bool:
            return bool((await one.api("logs", {"job": "j"}))["kind"] == "answer")

        await until(is_back, 90, "the worker is back")
        assert await whole(one, "j") == b"hello\n"
        again.stop()
        assert (await one.api("logs", {"job": "j"}))["code"] == "worker-lost"
        again.wake()


@pytest.mark.slow
async def test_cleared_output_says_by_which_setting_and_running_output_stays(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one, client_of(made) as client:
        await made.scheduler()
        agent = await made.agent("w", "4xH100", worker="w1")
        await one.workers_up("w1")
        go = tmp_path / "go"
        await one.submit("runs", "sh", "-c", f"seq 1 1000; while [ ! -e {go} ]; do sleep 0.02; done; echo end")
        await one.submit("over", "sh", "-c", "seq 1 1000")
        await one.reaches("over", "SUCCEEDED")
        await one.reaches("runs", "RUNNING")
        await agent.kill()
        # the next agent keeps nothing: it clears at its start, before anything else is asked of it
        await made.agent("w", "4xH100", worker="w1", output_keep=0.0)
        await one.workers_up("w1")

        async def cleared() -> dict[str, Any] | None:
            answer = await one.api("logs", {"job": "over"})
            return answer if answer.get("code") == "not-kept" else None

        answer = await until(cleared, 90, "the output is cleared")
        assert "output_keep 0 s" in answer["found"]
        assert answer["fault"] == "fleet"
        with pytest.raises(NoOutput):
            [piece async for piece in client.job("over").logs()]
        numbers = "".join(f"{number}\n" for number in range(1, 1001)).encode()
        page = (await one.api("logs", {"job": "runs", "limit": PAGE}))["data"]
        assert raw(page) == numbers
        following = asyncio.create_task(joined(client.job("runs").logs()))
        await until(lambda: bool(client._wire._histories.followers), what="it is followed")
        go.touch()
        assert (await following)["out"] == numbers + b"end\n"


@pytest.mark.slow
async def test_each_attempt_has_its_own_output_and_so_has_each_replica(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one, client_of(made) as client:
        await made.scheduler()
        await made.agent("w", "4xH100", worker="w1")
        await one.workers_up("w1")
        script = "echo $MOORAGE_REPLICA.$MOORAGE_ATTEMPT; test $MOORAGE_ATTEMPT = 2"
        await one.submit("j", "sh", "-c", script, replicas=2, retries=1)
        await one.reaches("j", "SUCCEEDED")
        for replica in (0, 1):
            assert await whole(one, "j", replica=replica) == f"{replica}.2\n".encode()
            assert await whole(one, "j", replica=replica, attempt=1) == f"{replica}.1\n".encode()
        pieces = [piece async for piece in client.job("j").logs()]
        assert [(piece.replica, piece.attempt, piece.text) for piece in pieces if piece.text] == [
            (0, 2, "0.2\n"),
            (1, 2, "1.2\n"),
        ]
        only = [piece.text async for piece in client.job("j").logs(replica=1, attempt=1) if piece.text]
        assert only == ["1.1\n"]


@pytest.mark.slow
async def test_a_flood_of_questions_is_bounded_and_costs_nobody_an_answer(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as one, client_of(made) as client:
        await made.scheduler()
        await made.agent("w", "4xH100", worker="w1")
        await one.workers_up("w1")
        await one.submit("j", "sh", "-c", "seq 1 90000")
        await one.reaches("j", "SUCCEEDED")
        wanted = await whole(one, "j")
        answers = await asyncio.gather(*(one.api("logs", {"job": "j", "limit": PAGE}) for _ in range(200)))
        kinds = {answer.get("code", "answer") for answer in answers}
        assert "answer" in kinds
        assert kinds <= {"answer", "overloaded", "worker-lost"}, "a slow worker has two seconds"

        async def all_of_it() -> dict[str, bytes] | None:
            with contextlib.suppress(NoOutput):
                return await joined(client.job("j").logs())
            return None

        # the SDK waits its turn
        every = await asyncio.gather(*(until(all_of_it, ANSWER_S) for _ in range(40)))
        assert all(each["out"] == wanted for each in every)
