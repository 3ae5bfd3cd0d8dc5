"""The door, as the clients that people have reach it: OpenAI's SDKs, LangChain, a page in a browser; and behind it a
real engine, llama.cpp, with a model that the test makes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from moorage.client import AsyncClient
from tests.system.cli.browser import browser
from tests.system.cli.node import Node, moorage
from tests.system.cli.test_door import door, served
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.long]
ENGINES: Final = Path(__file__).parent / "engines"
INSTALL_S: Final = 300.0
PAGE: Final = "<!doctype html><title>a page of another origin</title>"
#: as a page would: read a stream, with a key
ASK: Final = """async ([url, key, model]) => {
  try {
    const answer = await fetch(url + "/v1/chat/completions", {
      method: "POST", headers: {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
      body: JSON.stringify({model, messages: [], stream: true, max_tokens: 4}),
    });
    const text = await answer.text();
    return [answer.status, text.split("data: ").length - 1, text.includes("[DONE]")];
  } catch (error) { return String(error); }
}"""


async def ran(*words: str, cwd: Path) -> str:
    """What a program writes; it has to succeed."""
    process = await asyncio.create_subprocess_exec(*words, cwd=cwd, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), INSTALL_S)
    assert process.returncode == 0, words
    return out.decode()


async def python_with(folder: Path, *packages: str) -> str:
    """An interpreter of its own with these packages."""
    await ran(sys.executable, "-m", "venv", str(folder), cwd=folder.parent)
    python = str(folder / "bin" / "python")
    await ran(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages, cwd=folder.parent)
    return python


async def test_openais_sdks_and_langchain_through_the_door(node: Node, unique: str, tmp_path: Path) -> None:
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    (tmp_path / "sdk.mjs").write_text((ENGINES / "sdk.mjs").read_text())
    python, _ = await asyncio.gather(
        python_with(tmp_path / "venv", "openai", "langchain-openai"),
        ran("npm", "install", "--no-audit", "--no-fund", "--silent", "openai@6", cwd=tmp_path),
    )
    async with served(node, chat, model), door(node) as url:
        asked = (f"{url}/v1", model)
        in_python = json.loads(await ran(python, str(ENGINES / "sdk.py"), *asked, cwd=tmp_path))
        in_js = json.loads(await ran("node", "sdk.mjs", *asked, cwd=tmp_path))
    assert model in in_python.pop("models")
    assert model in in_js.pop("models")
    both = {"tokens": 4, "parts": 4, "refused": "model_not_found"}
    assert in_js == both
    assert in_python == {**both, "langchain": 4, "langchain parts": 4}


async def test_a_page_calls_from_a_browser_if_its_origin_may(node: Node, unique: str, tmp_path: Path) -> None:
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    made = await moorage("door", "key", "add", "one", "--services", "c-*", env=node.env(), cwd=tmp_path)

    async def page_of(_: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page_of)
    runner = web.AppRunner(app)
    await runner.setup()
    sites = [web.TCPSite(runner, "127.0.0.1", 0) for _ in range(2)]
    for site in sites:
        await site.start()
    ours, others = (f"http://127.0.0.1:{each[1]}" for each in runner.addresses)
    try:
        options = ("--keys", "door_keys", "--origin", ours)
        async with (
            served(node, chat, model),
            door(node, *options, cwd=tmp_path) as url,
            browser() as running,
        ):
            told: dict[str, Any] = {}
            for origin in (ours, others):
                page = await running.new_page()
                await page.goto(origin)
                told[origin] = await page.evaluate(ASK, [url, made.out.strip(), model])
            assert told[ours] == [200, 6, True]
            assert "Failed to fetch" in told[others]
    finally:
        await runner.cleanup()


async def test_a_real_engine_serves_by_the_words_of_the_page(node: Node, unique: str, tmp_path: Path) -> None:
    """llama.cpp's server on this machine's processors: streams, places, a cancel, its death."""
    chat, model = f"c-{unique}"[:40], f"m-{unique}"
    python = await python_with(tmp_path / "venv", "xllamacpp", "gguf", "numpy")
    await ran(python, str(ENGINES / "tiny_model.py"), "tiny.gguf", cwd=tmp_path)
    engine = [python, str(ENGINES / "llama_server.py"), "-m", str(tmp_path / "tiny.gguf"), "-np", "4"]
    serve = [sys.executable, "-m", "moorage.cli", "serve", "--http", "/health", "--"]
    run = {
        "argv": [*serve, *engine, "--port", "{port}"],
        "env": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        "ready": {"call": True, "within_s": 120},
        "restart": "always",
    }
    async with AsyncClient(node.url, timeout="60s") as client:
        body = {"run": run, "service": {"name": chat, "models": [model], "concurrency": 4}}
        job = await client.submit(body, job=f"j-{unique}"[:40])

        async def is_ready() -> bool:
            return bool((await job.show()).ready)

        await until(is_ready, 120, "the engine has loaded its model")
        asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        answers = [each async for each in client.service(chat).map([asked] * 12)]
        assert {each["usage"]["completion_tokens"] for each in answers} == {5}
        async with door(node) as url:
            words = ("-sN", f"{url}/v1/chat/completions", "-d", json.dumps({**asked, "model": model, "stream": True}))
            events = (await ran("curl", *words, cwd=tmp_path)).strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert len([each for each in events if '"content":"' in each]) == 5
        async for _ in client.service(chat).stream({**asked, "max_tokens": 100, "stream": True}):
            break  # whoever leaves frees the place
        assert (await client.call(chat, asked))["usage"]["completion_tokens"] == 5
        await job.cancel()
