"""Answers of a container engine that cannot be read, or are longer than any good one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from moorage.schemas.frames import NOT_HERE
from moorage.worker.drivers.container.docker import Docker
from moorage.worker.drivers.container.engine import EngineDown, EngineError
from moorage.worker.drivers.container.faults import pull_fault

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def engine(folder: Path, answer: Answer) -> AsyncIterator[Docker]:
    """Give the client of an engine that answers everything so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "e.sock")).start()
    made = Docker(folder / "e.sock")
    try:
        yield made
    finally:
        await made.close()
        await runner.cleanup()


async def test_a_pull_whose_message_quotes_a_long_page_of_a_registry_fails_as_any_other(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        error = "error parsing HTTP 404 response body: " + "<p>" * 2_000_000
        lines = [{"status": "Pulling"}, {"error": error}]
        return web.Response(body=b"".join(msgspec.json.encode(each) + b"\r\n" for each in lines))

    seen: list[Any] = []
    async with engine(tmp_path, answer) as made:
        pulling = made.pull("nowhere:1")
        seen.append(await anext(pulling))
        with pytest.raises(EngineError) as failed:
            await anext(pulling)
    assert seen == [{"status": "Pulling"}]
    assert "error parsing HTTP 404" in failed.value.message
    assert len(failed.value.message) < 1000
    assert pull_fault("nowhere:1", failed.value).mark == NOT_HERE


@pytest.mark.parametrize("body", [b"<html>", b'"ok"', b"7", b"[7]", b"{}", b"\xff{}"])
async def test_an_answer_that_cannot_be_read_counts_as_none(tmp_path: Path, body: bytes) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async with engine(tmp_path, answer) as made:
        asks: list[Awaitable[object]] = [made.state("c"), made.create({}, "c")]
        if body != b"{}":
            asks.append(made.labelled("a=b"))
        for ask in asks:
            with pytest.raises(EngineDown):
                await ask
