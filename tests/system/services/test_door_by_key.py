"""The door with the key of a caller, as the internet should find it: it calls, and can do nothing else."""

from __future__ import annotations

import hashlib
import socket

import aiohttp
import pytest

from moorage.bus.transport import Delivery
from moorage.cli.door.models import Models
from moorage.cli.door.server import Door, serving
from moorage.client import NotPermitted
from tests.sites import settled
from tests.system.deploy.test_caller_role import ASKED, FOREIGN, OF_MEMBERS
from tests.system.deploy.test_roles_live import everybody
from tests.system.services.test_jobs_live import answers
from tests.system.services.test_jobs_live import serving as served
from tests.waiting import until


@pytest.mark.slow
async def test_a_door_with_a_callers_key_reaches_the_services_of_its_tenant() -> None:
    async with (
        everybody(calls=True, callers=("acme.door1",)) as made,
        made.client("submitter.acme") as acme,
        made.client("caller.acme.door1") as caller,
        await made.site.connect("submitter.acme") as bare,
    ):
        job = await served(acme, "echo", service={"name": "echo", "models": ["tiny"]})
        await answers(bare, "moorage.call.acme.echo", b"x", job)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        async with (
            serving(Door({"acme": Models(caller)}, None), [listener]),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            async with http.post("/v1/anything", json={"model": "tiny"}) as answer:
                assert (answer.status, await answer.json()) == (200, {"model": "tiny"})
            async with http.get("/v1/models") as answer:
                assert [row["id"] for row in (await answer.json())["data"]] == ["tiny"]
            async with http.post("/v1/x", json={"model": "other"}) as answer:
                assert answer.status == 404
            async with http.post("/svc/nosuch/v1/x", data=b"") as answer:
                assert answer.status == 404
        with pytest.raises(NotPermitted):
            await caller.submit({"run": {"argv": ["true"]}})
        with pytest.raises(NotPermitted):
            await caller.job("s-echo").show()


@pytest.mark.slow
async def test_calls_streams_and_large_data_pass_by_a_callers_key() -> None:
    async with (
        everybody(calls=True, callers=("acme.door1",)) as made,
        made.client("submitter.acme") as acme,
        made.client("caller.acme.door1") as caller,
        await made.site.connect("caller.acme.door1") as bare,
    ):
        jobs = {name: await served(acme, name) for name in ("large", "count", "digest")}
        assert len((await answers(bare, "moorage.call.acme.large", b"7", jobs["large"])).data) == 7
        await answers(bare, "moorage.call.acme.count", b"1", jobs["count"])
        assert await caller.call("large", b"5000000") == bytes(5_000_000)
        assert [each async for each in caller.service("count").stream(b"1000")] == list(range(1000))
        await answers(bare, "moorage.call.acme.digest", b"x", jobs["digest"])
        data = bytes(range(256)) * 20_000
        size, found, _ = await caller.call("digest", data)
        assert (size, found) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.slow
async def test_a_members_answer_and_the_schedulers_reach_no_subject_but_a_callers_inbox() -> None:
    async with (
        everybody(calls=True, callers=("acme.door1",)) as made,
        made.client("submitter.acme") as acme,
        await made.site.connect("caller.acme.door1", on_error=lambda _: None) as bare,
        await made.site.witness("MOORAGE_TENANT_acme") as tenant,
        await made.site.witness("MOORAGE") as users,
    ):
        job = await served(acme, "echo", service={"name": "embed"})
        await answers(bare, "moorage.call.acme.embed", b"x", job)
        heard: list[Delivery] = []
        for witness in (tenant, users):
            await witness.subscribe(">", heard.append)
        await settled(tenant, users)
        foreign, mark = (*FOREIGN, *OF_MEMBERS), b'{"v":1}  '
        for subject in ASKED:
            for reply in foreign:
                await bare.send([(subject, mark, reply)])
        # behind all of these, in order, on the same ways
        await bare.request("moorage.call.acme.embed", b"last", 30.0)
        await bare.request("moorage.api.acme.services", b'{"v":1}', 30.0)
        await tenant.send([("moorage.end", b"end", "")])
        await users.send([("moorage.end", b"end", "")])
        await until(lambda: sum(each.subject == "moorage.end" for each in heard) == 2)
        assert [each.subject for each in heard if each.subject in foreign and mark in each.data] == []
        said_anyway = {"moorage.events.acme", "moorage.worker.w1.wanted"}  # by the leader, of what goes on
        assert [each.subject for each in heard if each.subject in {*FOREIGN} - said_anyway] == []
