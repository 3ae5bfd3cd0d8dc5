"""`moorage mcp`, asked by the protocol's own client, over a real node."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import TextContent

from tests.system.cli.node import COMMAND, Node
from tests.waiting import until


class Agent:
    """What an agent has of the tools: their names, and what a call answers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def tools(self) -> dict[str, bool | None]:
        """Return whether each tool only reads, by its name."""
        listed = (await self._client.list_tools()).tools
        assert all(tool.description for tool in listed)
        return {tool.name: tool.annotations.read_only_hint if tool.annotations else None for tool in listed}

    async def call(self, name: str, **arguments: Any) -> tuple[bool, str]:
        """Return whether a call went well, and the text of its answer."""
        answer = await self._client.call_tool(name, arguments)
        text = "".join(piece.text for piece in answer.content if isinstance(piece, TextContent))
        return not answer.is_error, text

    async def answer(self, name: str, **arguments: Any) -> Any:
        well, text = await self.call(name, **arguments)
        assert well, text
        return json.loads(text)


@contextlib.asynccontextmanager
async def agent(node: Node, tenant: str, *words: str) -> AsyncIterator[Agent]:
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **node.env(tenant)}
    how = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], "mcp", *words], env=env)
    async with Client(stdio_client(how)) as client:
        yield Agent(client)


async def test_an_agent_asks_what_a_user_asks_and_changes_nothing(node: Node, unique: str) -> None:
    await node.run(
        "submit", "--gpu", "2xH100", "--job", "speaks", "--", "sh", "-c", "echo said; sleep 600", tenant=unique
    )
    await node.run("submit", "--gpu", "9xH100", "--on-no-match", "wait", "--job", "waits", "--", "true", tenant=unique)
    async with agent(node, unique) as asks:
        assert await asks.tools() == dict.fromkeys(("fleet", "plan", "ls", "show", "explain", "logs"), True)
        found = await asks.answer("fleet")
        assert {"sim-0000", "sim-0001"} <= {row["worker"] for row in found["workers"]}
        assert found["fits_now"][0]["gpus"] >= 8
        assert (await asks.answer("plan", gpu="1xH100"))["starts"] in ("now", "later", "unknown")
        assert (await asks.answer("plan", gpu="64xH100"))["starts"] == "never"
        assert [row["job"] for row in (await asks.answer("ls", ids="spe*"))["jobs"]] == ["speaks"]
        assert (await asks.answer("explain", job="waits"))["reason"]

        async def has_said() -> bool:
            return "said" in (await asks.answer("logs", job="speaks"))["lines"]

        await until(has_said, 60, "the job's output is there")
        well, text = await asks.call("explain", job="nobody")
        assert (well, "error[not-found]" in text, "fix: moorage ls" in text) == (False, True, True), text
        well, text = await asks.call("plan", gpus="1")
        assert (well, "plan has no argument gpus; fix: it has gpu, " in text) == (False, True), text
        well, text = await asks.call("cancel", job="speaks")
        assert not well
    assert (await node.run("show", "speaks", "--json", tenant=unique)).frame["data"]["state"] == "RUNNING"
    await node.run("cancel", "speaks,waits", tenant=unique)


async def test_with_operate_an_agent_submits_and_cancels(node: Node, unique: str) -> None:
    async with agent(node, unique, "--operate") as acts:
        tools = await acts.tools()
        assert (tools["submit"], tools["cancel"], tools["ls"]) == (False, False, True)
        made = await acts.answer("submit", command=["sleep", "600"], gpu="1xH100", job="of-an-agent", limit="2h")
        assert made == {"job": "of-an-agent"}
        well, text = await acts.call("submit", command=["true"], gpu="1xB200", job="never")
        assert (well, "no known worker could ever run this" in text) == (False, True), text
        well, text = await acts.call("submit", command=["true"], gpu="nonsense?!")
        assert (well, "error[invalid-argument]" in text) == (False, True), text
        cancelled = await acts.answer("cancel", job="of-an-agent", reason="enough")
        assert cancelled["cancelled"]
    shown = (await node.run("show", "of-an-agent", "--json", tenant=unique)).frame["data"]
    assert shown["request"]["run"]["timeout_s"] == 7200


def test_without_the_package_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moorage.cli.study import mcp
    from moorage.schemas.optional import install_extra

    monkeypatch.setitem(sys.modules, "mcp", None)
    assert mcp.mcp() == 1
    assert f"fix: {install_extra('mcp')}" in capsys.readouterr().err
