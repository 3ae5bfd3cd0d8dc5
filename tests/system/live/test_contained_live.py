"""A request that makes the scheduler fail stops nobody else, by both doors, as it is read and as it is placed."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.client import AsyncClient
from moorage.schemas.answers.letters import LetterRow
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, QUICK, Caller, Stack, caller, request, stack
from tests.waiting import until

POISON: dict[str, Any] = {"gpu": {"model": "poison"}}


def operator(made: Stack) -> AsyncClient:
    return AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S)


async def letters_of(client: AsyncClient, count: int) -> list[LetterRow]:
    async def there() -> list[LetterRow] | None:
        rows = [row async for row in client.admin.dead_letters()]
        return rows if len(rows) >= count else None

    return list(await until(there, ANSWER_S, f"{count} dead letters"))


async def runs(who: Caller, job: str) -> None:
    assert (await who.submit(job, gpu={}))["kind"] == "accepted"
    await who.reaches(job, "SUCCEEDED")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["read", "placing"])  # of all places: tests/unit/scheduler/leader
async def test_a_poisonous_request_by_both_doors(place: str, nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, caller(made, "beta") as beta:
        await made.poisoned_scheduler(place, QUICK)
        await acme.leader()
        await made.agent("w0", "2xH100", worker="w0")
        await acme.workers_up("w0")
        # of two tenants: whose second request fails within a minute has its others refused for the rest of it
        answer = await beta.api("submit", request("poison-0", **POISON))
        assert (answer["kind"], answer["code"]) == ("error", "internal"), answer
        await acme.queue("submit", request("poison-1", **POISON))
        await acme.queue("submit", request("behind", gpu={}))
        await runs(beta, "other")
        await acme.reaches("behind", "SUCCEEDED")
        async with operator(made) as ana:
            (row,) = await letters_of(ana, 1)
            assert (row.job, row.code, row.tenant) == ("poison-1", "internal", "acme")
            whole = await ana.admin.dead_letter(row.sequence)
            assert "Poisoned" in whole.evidence
        fleet = await acme.fleet()
        assert fleet["epoch"] == 1, "it leads on"
        if place != "read":
            assert fleet["contained"]["counts"]["request"] == 2
        assert "Poisoned" in made.processes[0].words()
        # and in the next term, which has the defect no more, the letter is handed in again
        await made.processes[0].kill()
        await made.poisoned_scheduler("none", QUICK)
        await acme.leader(2)
        async with operator(made) as ana:
            done = await ana.admin.resend(row.sequence, why="mended")
            assert done.answer["job"] == "poison-1"
        await runs(beta, "after")


async def counted(who: Caller, what: str, least: int) -> dict[str, Any]:
    """Wait until the leader has failed so often on this; what the fleet shows of its failures."""

    async def there() -> dict[str, Any] | None:
        contained = dict((await who.fleet())["contained"])
        return contained if contained["counts"].get(what, 0) >= least else None

    return dict(await until(there, ANSWER_S, f"{least} failures: {what}"))


@pytest.mark.slow
async def test_tasks_beside_the_records_that_raise(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.poisoned_scheduler("tasks", QUICK)
        await acme.leader()
        await made.agent("w0", "2xH100", worker="w0")
        await acme.workers_up("w0")
        await counted(acme, "task", 4)
        await runs(acme, "good")
        assert (await acme.fleet())["epoch"] == 1
        assert "the fleet frame is started again" in made.processes[0].words()
