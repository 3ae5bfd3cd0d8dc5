"""The worker of the page `write-a-worker.md`, as it is printed: without a leader, and beyond its lease."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.subjects import PREFIX_DEFAULT
from tests.system.live.stack import ANSWER_S, BRIEF, QUICK, caller, request, stack
from tests.waiting import until

PAGE = Path(__file__).parents[3] / "docs/how-to/write-a-worker.md"
#: the worker prints each question that it asks
ASK, ASKED = "async def ask(verb, frame):\n", "async def ask(verb, frame):\n    print('asked', verb, flush=True)\n"


@asynccontextmanager
async def page_worker(folder: Path, url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """Run the page's worker; yield it with what it prints."""
    found = re.search(r'```python title="worker.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert ASK in found[1]
    script, log = folder / "worker.py", folder / "worker.log"
    script.write_text(found[1].replace(ASK, ASKED))
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), env={**os.environ, "NATS_URL": url}, stdout=output, stderr=output
        )
    try:
        yield process, log
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_it_floods_no_server_without_a_leader_and_gets_every_frame_in_json(
    fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with stack(fresh_server, PREFIX_DEFAULT) as made, caller(made) as one:
        scheduler = await made.scheduler(config=QUICK)
        await one.leader()
        async with page_worker(tmp_path, made.url) as (_, log):
            await one.submit("short", "sleep", "1.5")
            await one.reaches("short", "RUNNING")
            used = await one.api("use", {"job": "short"})
            assert (used["code"], "does not tell what its jobs use" in used["message"]) == ("not-kept", True)
            await scheduler.kill()
            before = log.read_text().count("asked renew")
            await until(lambda: log.read_text().count("asked renew") >= before + 6, ANSWER_S, "renewals without answer")
            words = log.read_text()
            assert 1 < words.count("asked fact") < 60
            await made.scheduler(config=QUICK)
            await one.leader(2)
            await one.reaches("short", "SUCCEEDED")
            assert (await one.show("short"))["attempt"] == 1
            # the next leader has from the ledger that this worker reads JSON
            await one.queue("submit", msgspec.msgpack.encode(request("packed")))
            await one.reaches("packed", "SUCCEEDED")
            assert (await one.api("logs", {"job": "short"}))["code"] == "not-kept", "it answers no questions for output"

            async def tell(message: Msg) -> None:
                asked = json.loads(message.data)
                place = {name: asked[name] for name in ("attempt", "stream", "offset")}
                told = {"kind": "log-page", **place, "next": asked["offset"] + 5, "text": "words", "over": True}
                await message.respond(json.dumps(told).encode())

            await one.nc.subscribe(made.subjects.worker("plain", "logs"), cb=tell)
            await one.nc.flush()
            page = (await one.api("logs", {"job": "short"}))["data"]
            assert (page["text"], page["over"], page["worker"]) == ("words", True, "plain")


@pytest.mark.slow
async def test_a_job_that_it_ended_with_its_lease_is_tried_again(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    async with stack(fresh_server, PREFIX_DEFAULT) as made, caller(made) as one:
        await made.scheduler(config=BRIEF | {"grace_s": 20.0})  # it is lost later than its own lease is over
        await one.leader()
        async with page_worker(tmp_path, made.url) as (worker, _):
            await one.submit("long", "sleep", "600")
            await one.reaches("long", "RUNNING")
            worker.send_signal(signal.SIGSTOP)
            over_s = time.monotonic() + BRIEF["lease_s"] + 1
            await until(lambda: time.monotonic() > over_s, ANSWER_S, "the end of its lease")
            worker.send_signal(signal.SIGCONT)

            async def again() -> bool:
                shown = await one.show("long")
                assert shown["state"] != "FAILED", shown
                return bool(shown["attempt"] == 2 and shown["state"] == "RUNNING")

            await until(again, ANSWER_S, "its second attempt")
