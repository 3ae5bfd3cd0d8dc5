"""`$SRV` discovery against a real scheduler process, read with nats-py's own types for services (NATS ADR-32)."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats, ServiceVerb, control_subject

from moorage.scheduler.leader.discovery import SERVICE
from moorage.schemas.subjects import API_VERBS
from moorage.system.build import build
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, Stack, caller, stack

#: questions behind each one, whose answers come behind all that are for that one
ROUNDS: Final = 3


async def ask(nc: Client, verb: ServiceVerb, made: Stack, name: str | None = None, id: str | None = None) -> list[Any]:
    """Every answer of this test's own prefix that comes before those to later questions: others may lead beside us.

    Whoever answers at all answers in order, so a second answer would come within the round trips of `ROUNDS` more.
    """
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(f"{inbox}.*")
    subject = control_subject(verb, name, id, "$SRV")
    found: list[Any] = []
    async with asyncio.timeout(ANSWER_S):
        for number in range(ROUNDS + 1):
            reply = f"{inbox}.{number}"
            await nc.publish(subject, reply=reply)
            is_answered = False
            while not is_answered:
                message = await subscription.next_msg(timeout=ANSWER_S)
                if not message.data:  # no responders: the leader leads, but its discovery is not subscribed yet
                    await nc.publish(subject, reply=message.subject)
                    continue
                frame = json.loads(message.data)
                if frame["metadata"]["prefix"] != made.subjects.prefix:
                    continue
                is_answered = message.subject == reply
                if message.subject == f"{inbox}.0":
                    found.append(frame)
    await subscription.unsubscribe()
    return found


@pytest.mark.slow
async def test_the_leader_alone_is_found_and_says_what_it_serves_and_how_it_does(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        lead = await made.scheduler("lead")
        await acme.leader()
        await made.scheduler("standby")
        [everybody] = await ask(acme.nc, ServiceVerb.PING, made)
        ping = ServicePing.from_dict(everybody)
        assert (everybody["type"], ping.name) == ("io.nats.micro.v1.ping_response", SERVICE)
        assert ping.metadata == {"leader": "lead", "prefix": unique, "build": build()}
        assert await ask(acme.nc, ServiceVerb.PING, made, SERVICE) == [everybody]
        assert await ask(acme.nc, ServiceVerb.PING, made, SERVICE, ping.id) == [everybody]

        [frame] = await ask(acme.nc, ServiceVerb.INFO, made, SERVICE)
        info = ServiceInfo.from_dict(frame)
        assert info.type == "io.nats.micro.v1.info_response"
        assert info.description
        assert {endpoint.name: (endpoint.subject, endpoint.queue_group) for endpoint in info.endpoints} == {
            verb: (f"{unique}.api.*.{verb}", "") for verb in API_VERBS
        }

        await acme.submit("waits")
        await acme.api("submit", b'{"job": "refused", "replicas": 0}')
        [frame] = await ask(acme.nc, ServiceVerb.STATS, made, SERVICE)
        stats = ServiceStats.from_dict(frame)
        assert stats.type == "io.nats.micro.v1.stats_response"
        assert [endpoint.name for endpoint in stats.endpoints] == list(API_VERBS)
        data = stats.endpoints[0].data
        assert data is not None
        assert (data["leader"], data["epoch"], data["queued"], data["live_jobs"]) == ("lead", 1, 1, 1)
        assert data["ledger"] >= data["records"] >= 1
        assert data["counters"]["refused"] == 1
        assert {msgspec.json.encode(endpoint.data) for endpoint in stats.endpoints} == {msgspec.json.encode(data)}

        await lead.kill()
        await acme.leader(2)
        [after] = await ask(acme.nc, ServiceVerb.PING, made, SERVICE)
        assert (after["metadata"]["leader"], after["id"] != ping.id) == ("standby", True)
        assert await silence(acme.nc, f"$SRV.PING.{SERVICE}.{ping.id}")


async def silence(nc: Client, subject: str) -> bool:
    try:
        await nc.request(subject, timeout=ANSWER_S)
    except nats.errors.NoRespondersError:
        return True
    return False
