"""A job of many replicas on a real server: its counts are those of a list that the test keeps.

Some replicas fail, some are lost with their worker, a range is cancelled, and the leader is killed at half.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.ranges import count_of, is_in, numbers_in, parse_ranges
from tests.system.live.stack import BRIEF, Caller, caller, stack, unique_prefix
from tests.turns import turns
from tests.waiting import until

#: one replica in so many fails, by its number
EVERY: Final = 100
AGENTS: Final = 4
GPUS: Final = 64


async def ended(one: Caller) -> int:
    """How many replicas have ended, as the leader of the moment tells."""
    states = (await one.show("many")).get("replicas", {}).get("states", {})
    return sum(states.get(name, 0) for name in ("SUCCEEDED", "FAILED", "CANCELLED"))


async def rows(one: Caller, numbers: str) -> dict[int, dict[str, Any]]:
    """The rows of these replicas, once the history has their ends."""

    async def read() -> list[dict[str, Any]] | None:
        answer = await one.api("show", {"job": "many", "replicas": numbers})
        return None if answer.get("code") in ("behind", "overloaded") else answer["data"]["replica_states"]

    found = await until(read, 60, f"the ends of {numbers}")
    return {row["replica"]: row for row in found}


@pytest.mark.timeout(1200)  # a million take minutes on two slow cores
@pytest.mark.parametrize("count", turns([3_000, 20_000, 200_000, 1_000_000], 1, 0))
async def test_counts_are_those_of_a_list(nats_server: EmbeddedServer, count: int) -> None:
    cancelled = ((count - count // 10, count - 1),)
    every = range(count)
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        first = await made.scheduler(config=BRIEF)
        await one.leader()
        await made.scheduler(config=BRIEF)
        agents = [
            await made.agent(f"a{number}", f"{GPUS}xH100", worker=f"w{number}", drivers=["noop"])
            for number in range(AGENTS)
        ]
        await one.workers_up(*(f"w{number}" for number in range(AGENTS)))
        answer = await one.api(
            "submit",
            {
                "job": "many",
                "replicas": count,
                "gpu": {},
                "max_failed": None,
                "run": {"driver": "noop", "argv": ["exit", "3", str(EVERY)]},
            },
        )
        assert answer["kind"] == "accepted", answer
        text = f"{cancelled[0][0]}-{cancelled[0][1]}"
        done = await one.api("cancel", {"job": "many", "replicas": text})
        assert done["data"]["cancelled"], done

        async def half() -> bool:
            return await ended(one) >= count // 2

        await until(half, 60 + count / 200, "half of them ended")
        await agents[0].kill()
        await first.kill()
        await one.leader(2)
        await made.agent("a0", f"{GPUS}xH100", worker="w0", drivers=["noop"])

        async def over() -> dict[str, Any] | None:
            shown = await one.show("many")
            return shown if shown.get("state") == "FAILED" else None

        shown = await until(over, 120 + count / 200, "all of them ended")
        expected = {
            "SUCCEEDED": sum(1 for index in every if index % EVERY and not is_in(cancelled, index)),
            "FAILED": sum(1 for index in every if not index % EVERY and not is_in(cancelled, index)),
            "CANCELLED": count_of(cancelled),
        }
        told = shown["replicas"]
        assert told["of"] == count
        assert told["states"] == expected
        assert parse_ranges(told["ended"]["CANCELLED"].removesuffix(", …")) == cancelled
        assert shown["code"] == 3
        found = await rows(one, f"0-3, {count // 2}, {count // 2 + 1}, {count - 1}")
        assert {index: row["state"] for index, row in found.items()} == {
            0: "FAILED", 1: "SUCCEEDED", 2: "SUCCEEDED", 3: "SUCCEEDED",
            count // 2: "FAILED", count // 2 + 1: "SUCCEEDED", count - 1: "CANCELLED",
        }  # fmt: skip
        assert all(row["fence"] and row["ran_on"] for row in found.values() if row["state"] != "CANCELLED")
        await run_again(one, {index for index in every if not index % EVERY or is_in(cancelled, index)})


async def run_again(one: Caller, wanted: set[int]) -> None:
    """What did not succeed is run again, under its numbers, by two messages of a bare caller; now all of it does."""
    answer = await one.api("again", {"job": "many", "failed": True})
    request = answer["data"]["request"]
    assert set(numbers_in(parse_ranges(request["indices"]))) == wanted
    accepted = await one.api("submit", {**request, "run": {**request["run"], "argv": ["exit", "0"]}})
    assert accepted["kind"] == "accepted", accepted

    async def over() -> dict[str, Any] | None:
        shown = await one.show(request["job"])
        return shown if shown.get("state") == "SUCCEEDED" else None

    shown = await until(over, 120 + len(wanted) / 200, "all of them succeeded")
    assert shown["replicas"] == {"of": len(wanted), "states": {"SUCCEEDED": len(wanted)}}
