"""The door with the key of a caller, as the internet should find it: it calls, and can do nothing else."""

from __future__ import annotations

import socket

import aiohttp
import pytest

from moorage.cli.door.models import Models
from moorage.cli.door.server import Door, serving
from moorage.client import NotPermitted
from tests.system.deploy.test_roles_live import everybody
from tests.system.services.test_jobs_live import answers
from tests.system.services.test_jobs_live import serving as served


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
