"""What a client, its connections and a worker remember of jobs goes with the jobs: no table grows with their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus import inbox
from moorage.client import AsyncClient
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import start
from moorage.worker.attempt import output_cleaner
from moorage.worker.settings import WorkerSettings
from tests.system.cli.node import Node
from tests.system.worker.agent.test_agent import body, name_of, place
from tests.waiting import until

CONTAINERS: Final = (dict, list, set, deque)
#: jobs before the first look, and before the second one
FIRST: Final = 25
MORE: Final = 150
#: how many more entries than at the first look a table may have: for what comes and goes meanwhile
SPARE: Final = 25
#: ends of one session, the newest `TOMBSTONES_MAX`: tests/unit/worker/session has them reach it
BOUNDED: Final = {"moorage.worker.session.tombstones.Tombstones._tombstones"}


def sizes(root: object) -> dict[str, int]:
    """The entries of all containers that an object of moorage leads to, by the class and field that has them."""
    found: dict[str, int] = {}
    seen: set[int] = {id(root)}
    todo: list[Any] = [root]
    while todo:
        thing = todo.pop()
        slots = [getattr(each, "__slots__", ()) for each in type(thing).__mro__]
        fields = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
        for name in [*fields, *getattr(thing, "__dict__", ())]:
            value = getattr(thing, name, None)
            if isinstance(value, CONTAINERS):
                key = f"{type(thing).__module__}.{type(thing).__name__}.{name}"
                found[key] = found.get(key, 0) + len(value)
            inner = value if isinstance(value, (list, set, deque, tuple)) else ()
            for each in [value, *(value.values() if isinstance(value, Mapping) else inner)]:
                of = getattr(each, "__self__", each)  # a bound method leads to what it is of
                if type(of).__module__.startswith(("moorage.", "nats.")) and id(of) not in seen:
                    seen.add(id(of))
                    todo.append(of)
    return found


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Which tables have more by much: how many entries they had, and have."""
    return {key: (before.get(key, 0), size) for key, size in after.items() if more(before, key, size)}


def more(before: dict[str, int], key: str, size: int) -> bool:
    return key not in BOUNDED and size > before.get(key, 0) + SPARE


def test_a_table_that_grows_is_found() -> None:
    class Keeps:
        def __init__(self, rows: int) -> None:
            self.rows = dict.fromkeys(range(rows))

    Keeps.__module__ = "moorage.here"
    assert list(grown(sizes(Keeps(FIRST)), sizes(Keeps(FIRST + MORE))).values()) == [(FIRST, FIRST + MORE)]


async def test_a_client_remembers_no_job_that_it_is_done_with(
    node: Node, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "DUE_SPARE", 10)

    async def use(client: AsyncClient, jobs: int) -> None:
        for at in range(jobs):
            job = await client.submit(["sh", "-c", f"echo {at}"], job=f"{unique}-{jobs}-{at}", gpu=None)
            assert (await job.result("60s")).state == "SUCCEEDED"
            assert "".join([piece.text async for piece in job.logs(follow=False)]) == f"{at}\n"
            await job.show()

    async with AsyncClient(node.url, tenant=unique) as client:
        await use(client, FIRST)
        before = sizes(client)
        assert len(before) > 10
        await use(client, MORE)
        assert grown(before, sizes(client)) == {}


async def test_a_worker_remembers_no_job_that_is_over(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_cleaner, "SWEEP_AT_ENDS", 10)
    settings = WorkerSettings(tmp_path, "w1", unique, simulate="2xH100", drivers=("process", "noop"), output_members=10)
    async with ScriptedLeader(nats_url, unique) as leader:
        running = await start(settings, nats_url)
        try:
            seat = await leader.joined("w1")

            async def use(first: int, jobs: int) -> None:
                for at in range(first, first + jobs):
                    name = name_of(f"j{at}", fence=10 + at)
                    driver = ("process", "noop")[at % 2]
                    argv = ["sh", "-c", "echo one"] if driver == "process" else []
                    await leader.want("w1", place(name, body(*argv, driver=driver)))
                    await leader.await_report("w1", "freed", name)

            await use(0, FIRST)
            before = sizes(running)
            assert len(before) > 30
            await use(FIRST, MORE)
            await until(lambda: not seat.renewals[-1].held, what="the leader knows that all are over")
            assert grown(before, sizes(running)) == {}
        finally:
            await running.stop()
