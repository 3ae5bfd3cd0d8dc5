#!/usr/bin/env bash
# Behaviour: What a tool of an MCP stdio server prints goes to standard error; the session goes on.
# Versions: mcp 2.3.0
# Guess: Standard output is the protocol's: a print in a tool breaks the session.
# Seen: The tool's answer comes, the next call works, and the printed line is in the server's standard error.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages mcp==2.3.0
cat >"$scratch/server.py" <<'EOF'
from mcp.server.mcpserver import MCPServer

server = MCPServer("finding")


@server.tool()
def talk() -> str:
    print("printed by a tool", flush=True)
    return "answered"


server.run("stdio")
EOF
export SERVER="$scratch/server.py"
bounded 60 <<'EOF'
import asyncio
import os
import sys
import tempfile

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from findings.verdict import verdict


async def look():
    parameters = StdioServerParameters(command=sys.executable, args=[os.environ["SERVER"]])
    with tempfile.TemporaryFile("w+") as errors:
        async with stdio_client(parameters, errlog=errors) as streams, ClientSession(*streams) as session:
            await session.initialize()
            answers = [(await session.call_tool("talk", {})).content[0].text for _ in range(2)]
        errors.seek(0)
        return answers, errors.read().count("printed by a tool")


answers, printed = asyncio.run(look())
verdict((answers, printed) == (["answered"] * 2, 2), {"answers": answers, "lines on standard error": printed})
EOF
