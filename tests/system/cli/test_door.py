"""`moorage door`: what callers of HTTP get, whom it lets in, and what it lets nobody do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moorage.cli.door.models import Models
from moorage.client import AsyncClient
from tests.system.cli.node import Lines, Node, environment, moorage, start
from tests.waiting import until

ENGINE = (sys.executable, "-m", "moorage.testing.fake_engine", "{port}")
SERVE = (sys.executable, "-m", "moorage.cli", "serve", "--http", "/health", "--")


@contextlib.asynccontextmanager
async def door(node: Node, *words: str, cwd: Path | None = None) -> AsyncIterator[str]:
    """A door's address."""
    process = await start("door", "--listen", "0", *words, env=node.env(), cwd=cwd)
    lines = Lines(process.stderr)
    try:
        said = await lines.until("door at")
        found = re.search(r"(http://\S+)/v1", said)
        assert found is not None, said
        yield found[1]
    finally:
        process.terminate()
        assert await process.wait() == 0


@contextlib.asynccontextmanager
async def served(node: Node, name: str, *models: str, **service: Any) -> AsyncIterator[str]:
    """A job whose members are fake engines, for the first of these models."""
    run = {
        "argv": [
            sys.executable,
            "-m",
            "moorage.cli",
            "serve",
            "--http",
            "/health",
            "--",
            *ENGINE,
            "--model",
            models[0],
        ],
        "env": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        "ready": {"call": True, "within_s": 60},
    }
    async with AsyncClient(node.url) as client:
        job = await client.submit({"run": run, "service": {"name": name, "models": models, **service}}, job=f"j-{name}")
        await until(lambda: _is_ready(client, f"j-{name}"), 60, "its members are ready")
        try:
            yield name
        finally:
            await job.cancel()


async def _is_ready(client: AsyncClient, job: str) -> bool:
    return bool((await client.job(job).show()).ready)


def _body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [], "max_tokens": 3, **more}


async def test_a_service_that_has_just_come_is_listed_at_once(node: Node, unique: str) -> None:
    async with door(node) as url, aiohttp.ClientSession(url) as http:
        async with http.get("/v1/models") as answer:
            before = {row["id"] for row in (await answer.json())["data"]}
        async with served(node, f"c-{unique}"[:40], f"m-{unique}"), http.get("/v1/models") as answer:
            assert {row["id"] for row in (await answer.json())["data"]} - before == {f"m-{unique}"}


async def test_openais_api_through_the_door(node: Node, unique: str) -> None:
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    async with served(node, chat, model, f"{model}-lora"), door(node) as url, aiohttp.ClientSession(url) as http:
        async with http.post("/v1/chat/completions", json=_body(model)) as answer:
            assert answer.status == 200
            assert answer.headers["X-Moorage-Member"]
            assert answer.headers["X-Request-Id"]
            assert len(answer.headers.getall("Server")) == 1
            assert (await answer.json())["usage"]["completion_tokens"] == 3
        async with http.post("/v1/chat/completions", json=_body(model, stream=True)) as answer:
            assert answer.headers["X-Accel-Buffering"] == "no"
            events = (await answer.text()).split("\n\n")
            assert len(events) == 6
            assert events[-2:] == ["data: [DONE]", ""]
        async with http.get("/v1/models") as answer:
            rows = {row["id"]: row["moorage"] for row in (await answer.json())["data"]}
            assert rows[model] == {"service": chat, "state": "ready"}
            assert f"{model}-lora" in rows
        async with http.get(f"/v1/models/{model}") as answer:
            assert (await answer.json())["owned_by"] == chat
        form = aiohttp.FormData({"model": model})
        form.add_field("file", b"model\r\n\r\nother", filename="a.wav")
        async with http.post("/v1/echo", data=form) as answer:
            assert answer.status == 200
        for body, status, code in (
            ({"json": _body("nosuch")}, 404, "model_not_found"),
            ({"json": {"messages": []}}, 400, "invalid_request"),
            ({"data": b"{"}, 400, "invalid_json"),
        ):
            async with http.post("/v1/chat/completions", **body) as answer:
                told = (await answer.json())["error"]
                assert (answer.status, told["code"]) == (status, code)
                assert answer.headers["x-should-retry"] == "false"
        async with http.post("/v1/chat/completions", json=_body(f"{model}-lora")) as answer:
            assert answer.status == 404, "the engine's own"
            assert "does not exist" in (await answer.json())["error"]["message"]
        async with http.post(
            "/v1/chat/completions", json=_body(model, stream=True, max_tokens=9, break_at=2)
        ) as answer:
            text = await answer.text()
            assert json.loads(text.split("data: ")[-1])["error"]["code"] == "engine_died"
            assert "[DONE]" not in text
        taken = await moorage(
            "submit", "--service", f"x-{unique}"[:40], "--models", model, "--", "true", env=node.env()
        )
        assert taken.code != 0
        assert "served-elsewhere" in taken.err


async def test_a_model_is_known_as_soon_as_its_job_is_accepted(node: Node, unique: str) -> None:
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    async with AsyncClient(node.url) as client:
        models = Models(client)
        assert await models.service_of(model) is None
        request = {
            "run": {"argv": ["true"]},
            "service": {"name": chat, "models": [model]},
            "replicas": {"min": 0, "max": 1},
        }
        job = await client.submit(request, job=f"j-{unique}")
        assert await models.service_of(model) == chat
        await job.cancel()


async def test_while_no_scheduler_answers_a_model_may_be_there(nats_url: str, tmp_path: Path) -> None:
    env = environment(MOORAGE_HOME=str(tmp_path), NATS_URL=nats_url)
    process = await start("door", "--listen", "0", "--timeout", "500ms", env=env, cwd=tmp_path)
    found = re.search(r"(http://\S+)/v1", await Lines(process.stderr).until("door at"))
    assert found is not None
    async with aiohttp.ClientSession(found[1]) as http, http.post("/v1/completions", json=_body("m")) as answer:
        assert answer.status == 503
        assert answer.headers["x-should-retry"] == "true"
        assert "no scheduler answers" in (await answer.json())["error"]["message"]
    process.terminate()
    assert await process.wait() == 0


async def test_a_caller_that_leaves_ends_its_call_and_one_that_waits_is_told_why(node: Node, unique: str) -> None:
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    async with (
        served(node, chat, model, queue={"most": 0}, http={"health": "/health", "paths": ["/v1/*", "/stat"]}),
        door(node, "--start", "500ms") as url,
        aiohttp.ClientSession(url) as http,
    ):

        async def has_aborted() -> bool:
            async with http.get(f"/svc/{chat}/stat") as answer:
                return answer.status == 200 and (await answer.json())["aborted"] == 1

        answer = await http.post("/v1/chat/completions", json=_body(model, stream=True, max_tokens=10_000))
        await answer.content.readany()
        async with http.post("/v1/chat/completions", json=_body(model)) as full:
            assert full.status == 429
            assert full.headers["x-should-retry"] == "true"
            assert int(full.headers["Retry-After"]) >= 1
        answer.close()
        await until(has_aborted, 60, "the engine hears of it")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", {"Host": "evil.example"}, 403),
        ("/v1/models", {"Origin": "http://evil.example"}, 403),
        ("/svc/../x", {}, 400),
        ("/nosuch", {}, 404),
        ("/svc/UPPER/x", {}, 404),
        ("/v1/x", {"X-Large": "x" * 17_000}, 431),
        ("/v1/files", {}, 404),
    ],
)
async def test_what_a_door_without_keys_refuses(node: Node, path: str, headers: Mapping[str, str], status: int) -> None:
    async with door(node) as url, aiohttp.ClientSession() as http:
        from yarl import URL

        async with http.get(URL(url + path, encoded=True), headers=headers) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"], "in the form of OpenAI's API"


async def test_a_door_that_ends_says_which_calls_it_waits_for_and_the_same_signal_again_cuts_them_off(
    node: Node, unique: str
) -> None:
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    process = await start("door", "--listen", "0", env=node.env())
    lines = Lines(process.stderr)
    found = re.search(r"(http://\S+)/v1", await lines.until("door at"))
    assert found is not None
    async with served(node, chat, model), aiohttp.ClientSession(found[1]) as http:
        answer = await http.post("/v1/chat/completions", json=_body(model, stream=True, max_tokens=100_000))
        await answer.content.readany()
        process.send_signal(signal.SIGINT)
        assert "calls that run, which may end within a minute: 1" in await lines.until("calls that run")
        await answer.content.readany()  # it goes on
        process.send_signal(signal.SIGINT)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
        assert await process.wait() == -signal.SIGINT


async def test_a_key_opens_what_it_names_until_it_is_taken_back(node: Node, unique: str, tmp_path: Path) -> None:
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    made = await moorage("door", "key", "add", "one", "--services", "c-*", env=node.env(), cwd=tmp_path)
    other = await moorage("door", "key", "add", "two", "--services", "x-*", "--raw", env=node.env(), cwd=tmp_path)
    assert (made.code, other.code) == (0, 0)
    one, two = made.out.strip(), other.out.strip()
    assert one.startswith("mk-")
    assert one not in (tmp_path / "door_keys").read_text()
    assert (tmp_path / "door_keys").stat().st_mode & 0o777 == 0o600
    options = ("--keys", "door_keys", "--origin", "https://app.example")
    async with served(node, chat, model), door(node, *options, cwd=tmp_path) as url, aiohttp.ClientSession(url) as http:

        async def told(key: str, path: str = "/v1/chat/completions", **headers: str) -> int:
            sent = {"Authorization": f"Bearer {key}", **headers} if key else headers
            async with http.post(path, json=_body(model), headers=sent) as answer:
                return answer.status

        assert await told("") == 401
        assert await told("mk-wrong") == 401
        assert await told(one) == 200
        assert await told("", **{"X-Api-Key": one}) == 200
        assert await told(two) == 404, "who may not call it does not learn that it is there"
        assert await told(one, f"/svc/{chat}/v1/chat/completions") == 403
        assert await told(two, f"/svc/{chat}/v1/chat/completions") == 403
        assert await told(one, Origin="https://app.example") == 200
        assert await told(one, Origin="https://evil.example") == 403
        preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        async with http.options("/v1/chat/completions", headers=preflight) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert (await moorage("door", "key", "rm", "one", env=node.env(), cwd=tmp_path)).code == 0
        assert await told(one) == 401


async def test_moorage_up_has_a_door_that_starts_with_its_first_caller(node: Node) -> None:
    url = node.up.door
    assert url.startswith("http://127.0.0.1:")
    async with aiohttp.ClientSession() as http, http.get(f"{url}/models") as answer:
        assert (await answer.json())["object"] == "list"


async def test_a_door_that_others_reach_takes_keys(node: Node) -> None:
    ran = await moorage("door", "--listen", "0.0.0.0:0", env=node.env())
    assert ran.code != 0
    assert "moorage door key add" in ran.err
