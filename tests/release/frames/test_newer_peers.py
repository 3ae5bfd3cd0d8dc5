"""Our worker and our SDK with a scheduler of a later release, whose frames say more than this one knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.client import AsyncClient, Conflict, Event
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import problem
from moorage.schemas.frames import Accepted, End, Start
from moorage.schemas.frames import Event as EventFrame
from tests.release.frames.recorded import encode_newer
from tests.system.worker.agent.test_agent import body, name_of, place, world
from tests.unit.client.scripted_scheduler import ScriptedScheduler, change, shown
from tests.waiting import until


def test_the_frames_say_more() -> None:
    said = encode_newer(EventFrame("t", "j", 1, "QUEUED", 1, [change(1)]))
    assert said.count(b"novelty") == 2
    assert Decoder(EventFrame)(said).changes == [change(1)]


async def test_a_worker_runs_ends_and_starts_gangs(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.worker.drivers.conformance.leader.encode", encode_newer)
    async with world(nats_url, unique, tmp_path) as w:
        agent = await w.add()
        seat = await w.leader.joined("w1")
        ended, rank = name_of("ended"), name_of("gang", fence=11)
        await w.leader.want("w1", place(name_of(), body()), place(ended, body("hang"), (1,)))
        await w.leader.want("w1", place(rank, body(), (2,), hold=True))
        await w.leader.heard("w1", "freed", name_of())
        await w.leader.heard("w1", "started", ended)
        await w.leader.want("w1", End(*ended, "cancelling", 0.1))
        await w.leader.want("w1", Start(*rank, "192.0.2.7", 29500, 1))
        await w.leader.heard("w1", "freed", ended)
        await w.leader.heard("w1", "freed", rank)
        heard = len(seat.renewals)
        await until(lambda: len(seat.renewals) > heard, what="a renewal after all that")
        assert not agent.dropped


async def test_the_sdk_follows_and_is_refused(nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.client.scripted_scheduler.encode", encode_newer)
    first = shown("j", "QUEUED", change(1, "QUEUED"))
    first |= {"novelty": 1, "changes": [{**each, "novelty": {"of": 1}} for each in first["changes"]]}
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("submit", Accepted("j", 7, "QUEUED"), problem("conflict", "other content"))
        scheduler.will_show(first)
        job = await client.submit(["true"], job="j")
        states = []
        async with client.watch("j") as watch:
            async for event in watch.follow(20):
                assert isinstance(event, Event)
                states.append(event.state)
                if len(states) == 1:
                    await scheduler.say("j", "SUCCEEDED", change(2), change(3, "SUCCEEDED", code=0))
        assert (job.job, states) == ("j", ["QUEUED", "SUCCEEDED"])
        with pytest.raises(Conflict):
            await client.submit(["false"], job="j")
