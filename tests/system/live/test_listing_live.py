"""`ls` of tenants and operators on a real server: memory and history alike, page by page; and the operators' frame."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

import nats

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.codec import Decoder
from moorage.schemas.frames import FleetDetail, TenantDetail
from tests.system.live.stack import ANSWER_S, Caller, caller, stack, unique_prefix
from tests.waiting import until

#: jobs leave memory as soon as they are over
FORGETFUL: Final[dict[str, float]] = {"ended_max": 0}
ENDED: Final = 30


async def pages(one: Caller, verb: str, **asked: Any) -> list[dict[str, Any]]:
    """The pages of a question, one after the other."""
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        body = asked | ({"after": after} if after else {})
        answer = await (one.admin("ls", body) if verb == "admin" else one.api("ls", body))
        assert "data" in answer, answer
        found.append(answer["data"])
        after = answer["data"].get("next", "")
        if not after:
            return found


async def names(one: Caller, verb: str, **asked: Any) -> list[str]:
    """The ids on all pages; none comes twice while nothing changes."""
    found = [row["job"] for page in await pages(one, verb, **asked) for row in page["jobs"]]
    assert len(set(found)) == len(found)
    return found


async def test_an_operator_pages_through_the_jobs_of_all_tenants_in_memory_and_history(
    nats_server: EmbeddedServer,
) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one, caller(made, "beta") as other:
        await made.scheduler(config=FORGETFUL)
        await made.agent("a", "4xH100")
        await one.leader()
        await one.workers_up("sim-0000")
        for number in range(ENDED):
            sweep = "lr" if number % 2 else "wd"
            await one.submit(f"old-{number}", "sh", "-c", f"exit {number % 3 == 0:d}", labels={"sweep": sweep})
        await other.submit("theirs")
        done = [f"old-{number}" for number in range(ENDED)]

        async def left() -> bool:
            kept = (await one.admin("ls", {"history": False}))["data"]
            return not kept["jobs"]

        await until(left, ANSWER_S, "all ended jobs out of memory")
        await one.submit("runs", "sleep", "600", labels={"sweep": "lr"})
        await one.reaches("runs", "RUNNING")
        await one.submit("waits", gpu={"count": 4}, labels={"sweep": "lr"})

        assert set(await names(one, "admin")) == {*done, "theirs", "runs", "waits"}
        assert set(await names(one, "admin", limit=7)) == {*done, "theirs", "runs", "waits"}
        assert set(await names(one, "api")) == {*done, "runs", "waits"}, "a tenant's own"
        assert await names(one, "admin", tenant="beta") == ["theirs"]
        swept = {f"old-{number}" for number in range(1, ENDED, 2)}
        assert set(await names(one, "admin", labels={"sweep": "lr"})) == {*swept, "runs", "waits"}
        failed = {f"old-{number}" for number in range(0, ENDED, 3)}
        assert set(await names(one, "admin", states=["FAILED"], limit=3)) == failed
        assert set(await names(one, "admin", ids="old-*1")) == {"old-1", "old-11", "old-21"}
        assert set(await names(one, "admin", worker="sim-0000")) == {*done, "theirs", "runs"}
        assert await names(one, "admin", worker="sim-0000", states=["RUNNING"]) == ["runs"]
        assert await names(one, "admin", reason="busy") == ["waits"]

        first = (await pages(one, "admin", labels={"sweep": "lr"}))[0]
        assert first["counts"] == {"RUNNING": 1, "QUEUED": 1}
        assert {row["job"]: row.get("reason") for row in first["jobs"]} == {"runs": None, "waits": "busy"}
        [row] = [row for page in await pages(one, "admin", ids="old-3") for row in page["jobs"]]
        shown = await one.show("old-3")
        same = ("job", "tenant", "state", "rev", "gpu", "priority", "attempt", "worker", "code", "why", "ended_ms")
        assert {name: row[name] for name in same} == {name: shown[name] for name in same}
        assert (row["labels"], row["compacted"], row["ran_ms"] >= 0) == ({"sweep": "lr"}, True, True)
        assert "changes" not in row

        oldest = await pages(one, "admin", states=["QUEUED", "RUNNING"], oldest=True, limit=1)
        assert [row["job"] for page in oldest for row in page["jobs"]] == ["runs", "waits"]
        tenants = (await one.admin("tenants", {}))["data"]
        assert tenants["ended"] == {
            "acme": {"SUCCEEDED": ENDED - len(failed), "FAILED": len(failed)},
            "beta": {"SUCCEEDED": 1},
        }
        assert (await one.api("ls", {"tenant": "beta"}))["code"] == "invalid-argument"


async def test_jobs_are_listed_as_they_were_at_a_moment_from_memory_and_history(nats_server: EmbeddedServer) -> None:
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler(config=FORGETFUL)
        await made.agent("a", "2xH100")
        await one.leader()
        await one.workers_up("sim-0000")
        await one.submit("before", "sh", "-c", "exit 3")
        await until(partial(is_gone, one, "before"), ANSWER_S, "the first job ended, and left memory")
        await one.submit("ran", "sleep", "600", gpu={"count": 2})
        shown = await one.reaches("ran", "RUNNING")
        await one.submit("waited")
        waited = await one.show("waited")
        then_ms = waited["changes"][0]["time_ms"]
        await one.api("cancel", {"job": "ran", "by": "ann", "reason": "enough"})
        await until(partial(is_gone, one, "ran"), ANSWER_S, "the second one, too")
        await one.submit("later", "sleep", "600")
        await one.reaches("waited", "SUCCEEDED")

        async def then(at_ms: int) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
            found = await pages(one, "admin", at_ms=at_ms, limit=1)
            rows = {row["job"]: row for page in found for row in page["jobs"]}
            ended: dict[str, int] = {}
            for page in found:
                for state, jobs in page["ended"].items():
                    ended[state] = ended.get(state, 0) + jobs
            return rows, ended

        rows, ended = await then(then_ms)
        assert {job: (row["state"], row["leases"]) for job, row in rows.items()} == {
            "ran": ("RUNNING", [["sim-0000", [0, 1]]]),
            "waited": ("QUEUED", []),
        }
        assert (rows["ran"]["gpu"], rows["ran"]["worker"]) == (shown["gpu"], "sim-0000")
        assert ended == {"FAILED": 1}
        assert await then(waited["changes"][0]["time_ms"] - 7_200_000) == ({}, {})


async def is_gone(one: Caller, job: str) -> bool:
    return bool((await one.show(job)).get("compacted", False))


async def test_operators_hear_tenants_counts_and_the_use_of_gpus_by_job(nats_server: EmbeddedServer) -> None:
    decode = Decoder[FleetDetail](FleetDetail)
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        await made.scheduler()
        await made.agent("a", "2xH100")
        await one.leader()
        await one.workers_up("sim-0000")
        await one.submit("works", "sleep", "600")
        await one.reaches("works", "RUNNING")
        await one.submit("waits", gpu={"count": 2})
        nc = await nats.connect(made.url)
        frames: asyncio.Queue[bytes] = asyncio.Queue()

        async def heard(message: Any) -> None:
            frames.put_nowait(message.data)

        await nc.subscribe(made.subjects.fleet_detail, cb=heard)
        try:

            async def tells() -> FleetDetail | None:
                frame = decode(await frames.get())
                return frame if frame.jobs else None

            frame = await until(tells, ANSWER_S, "a frame with the use of the job")
        finally:
            await nc.close()
        assert frame.tenants == [TenantDetail(tenant="acme", jobs=2, gpus=1, waiting=1)]
        [row] = frame.jobs
        assert (row.tenant, row.job, row.worker, row.devices) == ("acme", "works", "sim-0000", 1)
        assert 0 <= row.percent_min <= row.percent <= row.percent_max <= 100
        assert (frame.tenants_of, frame.jobs_of, frame.ended) == (1, 1, {})
