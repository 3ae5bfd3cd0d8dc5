#!/usr/bin/env bash
# Behaviour: An MCP tool's argument of type 'str | None' is parsed as JSON: the text null becomes None, and a text that is an object or a list is refused.
# Versions: mcp 2.3.0
# Guess: A text argument arrives as the text that was sent, as it does for 'str'.
# Seen: str: 'null' and '{"a":1}' arrive as sent; str | None: 'null' arrives as None, '{"a":1}' and '[1]' are refused as not a string, '12' arrives as sent.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages mcp==2.3.0
cat >"$scratch/server.py" <<'EOF'
from mcp.server.mcpserver import MCPServer

server = MCPServer("finding")


@server.tool()
def required(text: str) -> str:
    return repr(text)


@server.tool()
def optional(text: str | None = None) -> str:
    return repr(text)


server.run("stdio")
EOF
export SERVER="$scratch/server.py"
bounded 60 <<'EOF'
import asyncio
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from findings.verdict import verdict

TEXTS = ("null", "12", '{"a":1}', "[1]")


async def look():
    seen = {}
    parameters = StdioServerParameters(command=sys.executable, args=[os.environ["SERVER"]])
    with open(os.devnull, "w") as nowhere:
        async with stdio_client(parameters, errlog=nowhere) as streams, ClientSession(*streams) as session:
            await session.initialize()
            for tool in ("required", "optional"):
                for text in TEXTS:
                    answer = await session.call_tool(tool, {"text": text})
                    seen[tool, text] = "refused" if answer.is_error else answer.content[0].text
    return seen


seen = asyncio.run(look())
expected = {("required", text): repr(text) for text in TEXTS} | {
    ("optional", "null"): "None",
    ("optional", "12"): "'12'",
    ("optional", '{"a":1}'): "refused",
    ("optional", "[1]"): "refused",
}
verdict(seen == expected, {" ".join(asked): answer for asked, answer in seen.items()})
EOF
