"""`moorage door` under load: streams while members come and go, too many calls, cold starts, slow readers.

Times and bytes are printed, for who measures on a machine of their own; none decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moorage.cli.door import server
from moorage.cli.door.models import Models
from moorage.cli.door.server import AHEAD_BYTES, Door, serving
from moorage.client import AsyncClient, JobFailed
from tests.system.cli.node import Lines, Node, start
from tests.system.cli.test_door import ENGINE, SERVE, door
from tests.waiting import until

#: streams that go on at once, and how many there are in all
AT_ONCE = 40
STREAMS = int(os.environ.get("MOORAGE_TEST_STREAMS", "400"))
#: seconds of overload
OVERLOAD_S = float(os.environ.get("MOORAGE_TEST_OVERLOAD_S", "3"))


def request(name: str, job: str, *engine: str, **more: Any) -> dict[str, Any]:
    """A service of fake engines."""
    run = {
        "argv": [*SERVE, *ENGINE, *engine],
        "env": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        "ready": {"call": True, "within_s": 60},
        "restart": "always",
    }
    service = {"name": name, "concurrency": 64, **more.pop("service", {})}
    return {"job": job, "run": run, "service": service, **more}


async def has(client: AsyncClient, job: str, members: int) -> None:
    async def ready() -> bool:
        return (await client.job(job).show()).ready == members

    await until(ready, 60, f"{members} members of {job} are ready")


@pytest.mark.long
async def test_no_stream_is_short_while_a_service_rolls_grows_is_drained_and_shrinks(
    node_of_its_own: Node, unique: str
) -> None:
    node, name = node_of_its_own, f"c-{unique}"[:40]
    async with (
        AsyncClient(node.url) as client,
        door(node) as url,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        await client.submit(request(name, "v1", "--version", "1", gpu={}))
        await has(client, "v1", 1)
        seen, versions, is_over = 0, Counter[str](), asyncio.Event()

        async def streams() -> None:
            nonlocal seen
            while not is_over.is_set():
                body = {"model": "tiny", "stream": True, "max_tokens": 20, "delay_ms": 10}
                async with http.post(f"/svc/{name}/v1/chat/completions", json=body) as answer:
                    text = await answer.text()
                    assert (answer.status, text.count("data: ")) == (200, 22), text[-400:]
                    versions[answer.headers["X-Version"]] += 1
                seen += 1

        async def more(number: int) -> None:
            upto = seen + number
            await until(lambda: seen >= upto, 60, "streams end")

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(streams())
            for number, members in ((2, 4), (3, 1)):
                job = f"v{number}"
                made = request(name, job, "--version", str(number), gpu={}, replicas=members)
                await client.submit(made | {"instead_of": f"v{number - 1}"})
                await until(lambda: versions[str(number)] > 0, 60, f"version {number} answers")  # noqa: B023
                await has(client, job, members)
                with contextlib.suppress(JobFailed):  # it was replaced
                    await client.job(f"v{number - 1}").result()
                await more(STREAMS // 4)
                worker = (await client.job(job).show()).replica_states[0].worker
                await client.fleet.drain(worker, within="30s")
                await more(STREAMS // 4)
                await client.fleet.uncordon(worker)
            is_over.set()
        print(f"{seen} streams, none short: {dict(versions)}")


@pytest.mark.long
async def test_of_too_many_calls_some_are_answered_and_all_others_told_to_come_again(node: Node, unique: str) -> None:
    name, run_s, places, wait_s = f"c-{unique}"[:40], 0.2, 4, 0.3
    async with (
        AsyncClient(node.url) as client,
        door(node) as url,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        service = {"concurrency": places, "queue": {"most": places}}
        job = await client.submit(request(name, f"j-{unique}", service=service))
        await has(client, job.job, 1)
        told, late_s = Counter[int](), list[float]()
        ends_s = time.monotonic() + OVERLOAD_S

        async def calls() -> None:
            body = {"model": "tiny", "max_tokens": 1, "delay_ms": 1000 * run_s}
            while time.monotonic() < ends_s:
                began_s = time.monotonic()
                headers = {"X-Moorage-Wait": str(wait_s)}
                async with http.post(f"/svc/{name}/v1/chat/completions", json=body, headers=headers) as answer:
                    await answer.read()
                    told[answer.status] += 1
                    if answer.status == 429:
                        late_s.append(time.monotonic() - began_s - wait_s)
                        assert int(answer.headers["Retry-After"]) >= 1
                        assert answer.headers["x-should-retry"] == "true"

        await asyncio.gather(*(calls() for _ in range(8 * places)))
        busy = told[200] * run_s / (OVERLOAD_S * places)
        print(f"{dict(told)}, places busy {busy:.0%}, refused at most {max(late_s):.3f} s after the wait")
        assert set(told) == {200, 429}
        await job.cancel()


async def test_a_stream_that_waits_for_a_cold_start_gets_signs_of_life_and_then_its_answer(
    node: Node, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BEAT_FIRST_S", 0.3)
    monkeypatch.setattr(server, "BEAT_S", 0.3)
    name, listener = f"c-{unique}"[:40], socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    async with (
        AsyncClient(node.url) as client,
        serving(Door({"default": Models(client)}, None), [listener]),
        aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as http,
    ):
        job = await client.submit(request(name, f"j-{unique}", "--load", "2", replicas={"min": 0, "max": 1}))
        began_s = time.monotonic()
        body = {"model": "tiny", "stream": True, "max_tokens": 3}
        async with http.post(f"/svc/{name}/v1/chat/completions", json=body) as answer:
            text, first_s = b"", 0.0
            async for piece in answer.content.iter_any():
                text += piece
                first_s = first_s or (time.monotonic() - began_s if b"data: " in text else 0.0)
        print(f"first token of a service that loads for 2 s after {first_s:.2f} s")
        beats, data = text.split(b"data: ", 1)
        assert beats.count(b": waiting for a member\n\n") >= 3
        assert beats == b": waiting for a member\n\n" * beats.count(b":")
        assert data.count(b"data: ") == 4, "the whole answer"
        await job.cancel()


async def test_a_slow_reader_of_a_large_answer_is_cut_off_and_the_door_holds_little_of_it(
    node: Node, unique: str
) -> None:
    name = f"c-{unique}"[:40]
    process = await start("door", "--listen", "0", env=node.env())
    found = re.search(r"(http://\S+)/v1", await Lines(process.stderr).until("door at"))
    assert found is not None
    async with AsyncClient(node.url) as client, aiohttp.ClientSession(found[1], read_bufsize=1 << 14) as http:
        job = await client.submit(request(name, f"j-{unique}"))
        await has(client, job.job, 1)
        url, mib = f"/svc/{name}/v1/blob", 100
        async with http.get(f"{url}?kib=64") as answer:
            assert len(await answer.read()) == 64 * 1024
        before = _peak_kib(process.pid)
        answer = await http.get(f"{url}?kib={mib << 10}")
        got = len(await answer.content.readany())

        async def is_cut() -> bool:
            async with http.get("/metrics") as told:
                return "moorage_door_requests 0\n" in await told.text()

        await until(is_cut, 60, "the door is done with it")
        with pytest.raises(aiohttp.ClientError):
            got += len(await answer.read())
        assert got < mib << 20
        grew_mib = (_peak_kib(process.pid) - before) / 1024
        print(f"the door's most memory grew by {grew_mib:.1f} MiB, {AHEAD_BYTES >> 20} wait at most")
        await job.cancel()
    process.terminate()
    assert await process.wait() == 0


def _peak_kib(pid: int) -> int:
    """The most memory that a process has had."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])
