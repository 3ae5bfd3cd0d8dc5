"""What a caller gets of results that lie in shared messages: also after a kill between result and report, a change of
leader, and once they are kept no longer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import moorage
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.bus.transport import Handler, Subscribed
from moorage.client import AsyncClient, JobFailed, NoOutput, handlers
from moorage.client.connected import Connected
from moorage.schemas.handler import result_bucket
from tests.system.live.stack import QUICK, Stack, stack
from tests.waiting import until

#: a service of its own process; with `kill` it ends itself once its first result is stored, before it reports that
SERVICE = """
import asyncio, os, signal, sys
from pathlib import Path
from moorage.worker.agent.embed import EmbeddedWorker
from moorage.bus.results import ResultStore
from moorage.worker.settings import WorkerSettings

url, state, prefix, how = sys.argv[1:]
store = ResultStore.put_together

async def stored(self, tenant, lines):
    await store(self, tenant, lines)
    os.kill(os.getpid(), signal.SIGKILL)

if how == "kill":
    ResultStore.put_together = stored

async def main():
    worker = EmbeddedWorker(url, WorkerSettings(Path(state), "service", prefix, simulate="8xL40S"))

    @worker.handler("echo")
    async def echo(context):
        return {"input": context.input, "how": how}

    @worker.handler("broken")
    async def broken(context):
        raise LookupError(f"no {context.input}")

    @worker.handler("large")
    async def large(context):
        return "x" * context.input

    @worker.handler("nothing")
    async def nothing(context):
        return None

    async with worker:
        print("open", flush=True)
        await worker.serve(asyncio.Event())

asyncio.run(main())
"""
_ROOTS = os.pathsep.join(str(Path(path).parent) for path in moorage.__path__)


@contextlib.asynccontextmanager
async def service(made: Stack, state: Path, how: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, made.url, str(state), made.subjects.prefix, how,
        stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": _ROOTS},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"open\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def client(made: Stack) -> AsyncIterator[tuple[AsyncClient, str]]:
    """A client of `acme`, and the stream of its results, which is gone at the end."""
    prefix = made.subjects.prefix
    stream = f"OBJ_{result_bucket(prefix, 'acme')}"
    async with AsyncClient(made.url, tenant="acme", prefix=prefix) as moorage:
        try:
            yield moorage, stream
        finally:
            with contextlib.suppress(BusError):
                await JetStream(moorage._wire.link).delete_stream(stream)


async def test_a_result_that_is_kept_no_longer_is_said_to_be_so(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, client(made) as (moorage, stream):
        await made.scheduler(config=QUICK)
        async with service(made, tmp_path / "state"):
            job = await moorage.submit_handler("echo", 1)
            assert (await job.result("90s")).value["input"] == 1
            nothing = await moorage.submit_handler("nothing")
            await nothing.result("90s")
            assert (await moorage.job(job.job).result("60s")).value["input"] == 1
            await JetStream(moorage._wire.link).purge(stream)
            with pytest.raises(NoOutput, match=f"the result of job {job.job} is no longer kept") as gone:
                await moorage.job(job.job).result("60s")
            assert (gone.value.code, gone.value.job) == ("not-kept", job.job)
            assert (await moorage.job(nothing.job).result("60s")).value is None, (
                "that returned nothing, and lacks nothing"
            )


async def test_a_caller_of_many_functions_asks_for_no_small_result(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second call on it listens to what is sent to all: no subscription a job, and the tail of what fails."""
    async with stack(nats_server, unique) as made, client(made) as (moorage, _):
        await made.scheduler(config=QUICK)
        async with service(made, tmp_path / "state"):
            assert (await (await moorage.submit_handler("echo", 0)).result("90s")).value["input"] == 0
            asked: list[str] = []
            subscribed: list[str] = []
            stored, subscribe = handlers._stored, Connected.subscribe_ahead

            async def noted(client: Connected, job: str, name: str, seq: int | None) -> Any:
                asked.append(name)
                return await stored(client, job, name, seq)

            async def counted(client: Connected, subject: str, handler: Handler) -> Subscribed:
                subscribed.append(subject)
                return await subscribe(client, subject, handler)

            monkeypatch.setattr(handlers, "_stored", noted)
            monkeypatch.setattr(Connected, "subscribe_ahead", counted)
            for number in range(1, 6):
                job = await moorage.submit_handler("echo", number)
                assert (await job.result("90s")).value["input"] == number
            with pytest.raises(JobFailed) as failed:
                await (await moorage.submit_handler("broken", "tea")).result("90s")
            assert failed.value.log_tail.endswith("LookupError: no tea")
            assert (await (await moorage.submit_handler("nothing")).result("90s")).value is None
            assert (asked, subscribed) == ([], [])
            for size in (5_000, 50_000):  # not sent to all: read
                assert len((await (await moorage.submit_handler("large", size)).result("90s")).value) == size
            assert (len(asked), subscribed) == (2, [])
            assert not moorage._wire._histories.results, "what was taken is let go"


@pytest.mark.slow
async def test_a_service_that_is_killed_between_result_and_report_leaves_no_result(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    """The job runs again, and its caller gets what the attempt returned that the ledger knows to have succeeded."""
    async with stack(nats_server, unique) as made, client(made) as (moorage, stream):
        await made.scheduler(config=QUICK)
        async with service(made, tmp_path / "one", "kill") as first:
            job = await moorage.submit_handler("echo", 1, retries_on_lost=3)
            async with asyncio.timeout(90):
                assert await first.wait() == -signal.SIGKILL
            kept = await JetStream(moorage._wire.link).get_message(stream, 1)
            assert kept is not None
            assert b'"how":"kill"' in kept.data, "it is stored"
            assert (await job.show()).state != "SUCCEEDED"
        async with service(made, tmp_path / "one", "second"):
            result = await job.result("150s")
            assert result.value == {"input": 1, "how": "second"}
            assert [change.state for change in result.changes].count("SUCCEEDED") == 1
            assert (await moorage.job(job.job).result("60s")).value == result.value


@pytest.mark.slow
async def test_each_call_gives_its_own_result_while_leaders_change(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, client(made) as (moorage, _):
        leader = await made.scheduler(config=QUICK)
        done = 0

        async def caller(first: int) -> None:
            nonlocal done
            for number in range(first, first + 40):
                job = await moorage.submit_handler("echo", number)
                assert (await job.result("150s")).value["input"] == number
                done += 1

        async with service(made, tmp_path / "state"):
            calls = asyncio.gather(*(caller(1000 * at) for at in range(8)))
            await until(lambda: done >= 60, 150, "some are done")
            await made.scheduler(config=QUICK)
            await leader.kill()
            await calls
        assert done == 8 * 40
